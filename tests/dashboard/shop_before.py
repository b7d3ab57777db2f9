"""The shop before a change of ``refund`` that does not fit its running instances."""

from perdure import activity, orchestration, wait_for_event


@activity
async def look_up(order: str) -> int:
    return 200


@activity
async def pay_back(order: str, amount: int) -> str:
    return f"{amount} for {order}"


@orchestration
async def refund(order: str) -> str:
    amount = await look_up(order)
    await wait_for_event("go", bool)
    return await pay_back(order, amount)
