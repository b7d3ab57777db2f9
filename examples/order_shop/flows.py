"""The workflows of the order shop: everything that must not be lost between click and parcel."""

import asyncio
from dataclasses import dataclass

from perdure import (
    ActivityFailed,
    Retry,
    activity,
    orchestration,
    set_custom_status,
    wait_for_event,
)


@dataclass
class Order:
    id: str
    article: str
    cents: int


STOCK = {"lamp": 5, "chair": 0}


@activity
def reserve(article: str) -> None:
    if STOCK.get(article, 0) <= 0:
        raise LookupError(f"no {article} in stock")


@activity(retry=Retry(max_attempts=5, first_delay=0.1), timeout=30)
async def charge(order: str, cents: int) -> str:
    return f"receipt-{order}"


@activity
async def refund(receipt: str) -> None: ...


@activity
async def ship(order: str) -> str:
    return f"parcel-{order}"


@orchestration(version="1.0.0")
async def buy(order: Order) -> str:
    set_custom_status("reserving")
    try:
        await reserve(order.article)
    except ActivityFailed as error:
        return f"sorry: {error.message}"
    set_custom_status("charging")
    receipt = await charge(order.id, order.cents)
    if order.cents >= 100_00:
        set_custom_status("waiting for approval")
        try:
            async with asyncio.timeout(3 * 86_400):
                approved = await wait_for_event("approval", bool)
        except TimeoutError:
            approved = False
        if not approved:
            await refund(receipt)
            return "declined"
    set_custom_status("shipping")
    return await ship(order.id)
