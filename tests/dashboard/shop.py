"""Orchestrations for the tests of the dashboard: one of each kind of run."""

import asyncio

from perdure import Retry, activity, orchestration, state, wait_for_event


@activity
async def reserve(item: str) -> str:
    if item == "anvil":
        raise ValueError("no anvil in stock 4711")
    return f"{item} reserved"


@activity(retry=Retry(max_attempts=5, first_delay=3600, max_delay=3600))
async def charge(order: str) -> str:
    if order.startswith("retry"):
        raise ConnectionError("the bank did not answer")
    return f"receipt-{order}"


@orchestration
async def deliver(order: str) -> str:
    return await reserve(f"van for {order}")


@orchestration
async def checkout(order: str, items: list[str]) -> str:
    """Reserve the items, take the money, wait for approval, deliver."""
    await asyncio.gather(*(reserve(item) for item in items))
    state["items"] = len(items)
    receipt = await charge(order)
    if order.startswith("big"):
        async with asyncio.timeout(86_400):
            await wait_for_event("approval", bool)
    await deliver(order)
    return receipt


@orchestration
async def fan_out(count: int) -> int:
    return len(await asyncio.gather(*(reserve(str(number)) for number in range(count))))
