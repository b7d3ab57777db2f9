"""Orchestrations for the tests of the dashboard: one of each kind of run."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from dashboard.shop_before import look_up, pay_back
from perdure import (
    Retry,
    Schedule,
    activity,
    activity_info,
    orchestration,
    promise,
    state,
    wait_for_event,
)


@dataclass
class Decision:
    approved: bool
    by: str
    level: Literal["team", "board"] = "team"
    limit: int = 100


@activity
async def reserve(item: str) -> str:
    if item == "anvil":
        raise ValueError("no anvil in stock 4711")
    return f"{item} reserved"


@activity
async def price(item: str) -> int:
    await asyncio.sleep(0.02)
    return 100 * len(item)


@activity(retry=Retry(max_attempts=5, first_delay=3600, max_delay=3600))
async def charge(order: str, amount: int) -> str:
    if order.startswith("retry"):
        raise ConnectionError("the bank did not answer")
    return f"receipt-{order}"


@activity(retry=Retry(max_attempts=3, first_delay=0.05))
async def notify(order: str) -> None:
    if activity_info().attempt == 1:
        raise TimeoutError("the mail server is slow")


@orchestration
async def deliver(order: str) -> str:
    return await reserve(f"van for {order}")


@orchestration
async def checkout(order: str, items: list[str]) -> str:
    """Reserve the items, take the money, wait for approval, deliver."""
    await asyncio.gather(*(reserve(item) for item in items))
    amount = sum([await price(item) for item in items])
    state["items"] = len(items)
    receipt = await charge(order, amount)
    if order.startswith("big"):
        async with asyncio.timeout(86_400):
            await wait_for_event("approval", Decision)
    await notify(order)
    await deliver(order)
    return receipt


@orchestration
async def refund(order: str) -> str:
    amount = await look_up(order)
    await price(order)
    await wait_for_event("go", bool)
    return await pay_back(order, amount)


@orchestration
async def fan_out(count: int) -> int:
    return len(await asyncio.gather(*(reserve(str(number)) for number in range(count))))


@orchestration
async def pay(order: str) -> str:
    return str(await promise(f"payment:{order}", str))


@orchestration
async def report(city: str) -> str:
    return f"report of {city}"


@activity
async def copy(size: int) -> str:
    return "x" * size


@orchestration
async def large_values(count: int, size: int) -> int:
    return sum([len(await copy(size)) for _ in range(count)])


@orchestration
async def long_history(rounds: int) -> int:
    """Wait for an activity again and again: three events for each."""
    for number in range(rounds):
        await reserve(str(number))
    await wait_for_event("go", bool)
    return rounds


SCHEDULES = [
    Schedule("report-berlin", report, "Berlin", cron="30 2 * * mon-fri", zone="Europe/Berlin"),
    Schedule("sync", report, "everywhere", every=3600, overlap="queue_one"),
]
