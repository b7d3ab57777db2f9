"""The shop: orchestrations over activities that are slow, flaky and leave a paper trail."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from perdure import (
    ActivityFailed,
    Retry,
    activity,
    orchestration,
    set_custom_status,
    wait_for_event,
)

LEDGER = Path(os.environ.get("DEMO_LEDGER", "ledger.txt"))
"""Every effect on the outside world is one line here, written when it happens."""


@dataclass(frozen=True)
class Order:
    id: str
    items: list[str]
    cents: int
    card: str = "good"


class OutOfStock(Exception):
    """An article of the order is not in stock."""


class CardDeclined(Exception):
    """The bank said no: asking again does not help."""


class BankTimeout(Exception):
    """The bank did not answer: asking again does."""


# --- activities: the outside world


@activity
async def reserve(order: str, item: str) -> str:
    await asyncio.sleep(0.1)
    if item == "unicorn":
        raise OutOfStock("no unicorn left")
    _note("reserved", order, item)
    await asyncio.sleep(0.2)  # done, but its answer is still on the way: a crash now repeats it
    return item


@activity
async def release(order: str, item: str) -> None:
    await asyncio.sleep(0.1)
    _note("released", order, item)


@activity(retry=Retry(max_attempts=6, first_delay=0.2, never=(CardDeclined,)), timeout=5)
def charge(order: str, cents: int, card: str) -> str:
    """Sync code runs in a thread. Safe to repeat: the bank takes the money of an order once."""
    time.sleep(0.1)
    if card == "stolen":
        raise CardDeclined("the card was declined")
    if card == "flaky" and _is_first_visit(order):
        raise BankTimeout("bank.example did not answer")
    _note("charged", order, cents)
    time.sleep(0.2)
    return f"receipt-{order}"


@activity
async def refund(order: str, receipt: str) -> None:
    await asyncio.sleep(0.2)
    _note("refunded", order, receipt)


@activity
async def print_label(order: str) -> str:
    _note("labelled", order)
    await asyncio.sleep(0.2)
    return f"parcel-{order}"


@activity
async def hand_over(order: str, parcel: str) -> None:
    await asyncio.sleep(0.2)
    _note("handed-over", order, parcel)


@activity
async def count_shelf(shelf: int) -> int:
    await asyncio.sleep(0.1)
    return shelf % 7


# --- orchestrations: what the shop promises


@orchestration
async def take_order(order: Order) -> str:
    """Reserve in parallel, ask about big orders, charge, deliver; or undo what was done."""
    reserved: list[str] = []
    try:
        set_custom_status("reserving")
        # Wait for all of them, also when one fails: what is still on its way must be undone too.
        steps = [reserve(order.id, item) for item in order.items]
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        reserved += [outcome for outcome in outcomes if isinstance(outcome, str)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if order.cents >= 50_000 and not await _is_approved():
            return await _undo(order, reserved, "not approved in time")
        set_custom_status("charging")
        await charge(order.id, order.cents, order.card)
    except ActivityFailed as error:
        return await _undo(order, reserved, error.message)
    set_custom_status("delivering")
    return await deliver(order.id)


async def _is_approved() -> bool:
    set_custom_status("waiting for approval")
    try:
        async with asyncio.timeout(4):  # a durable timer: it runs on while no worker does
            return await wait_for_event("approval", bool)
    except TimeoutError:
        return False


async def _undo(order: Order, reserved: list[str], why: str) -> str:
    """The saga's way back: release what was reserved."""
    set_custom_status("undoing")
    await asyncio.gather(*(release(order.id, item) for item in sorted(reserved)))
    return f"undone: {why}"


@orchestration
async def deliver(order: str) -> str:
    """A child: label now, hand over when the courier comes."""
    parcel = await print_label(order)
    await asyncio.sleep(1.5)
    await hand_over(order, parcel)
    return parcel


@orchestration
async def change_of_mind(order: Order) -> str:
    """Pay first, then find that there is nothing: the money goes back."""
    receipt = await charge(order.id, order.cents, order.card)
    try:
        return await reserve(order.id, "unicorn")
    except ActivityFailed:
        await refund(order.id, receipt)
        return "refunded"


@orchestration
async def subscription(customer: str, months: int) -> int:
    """A timer in a loop: one payment a month, on a fast calendar."""
    for month in range(1, months + 1):
        await charge(f"{customer}-{month}", 999, "good")
        await asyncio.sleep(0.7)
    return months


@orchestration
async def stocktaking(shelves: int) -> int:
    """A wide fan-out."""
    return sum(await asyncio.gather(*(count_shelf(shelf) for shelf in range(shelves))))


def _note(*words: object) -> None:
    line = " ".join(map(str, words)) + "\n"
    descriptor = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())  # one write: lines of two processes do not mix
    finally:
        os.close(descriptor)


def _is_first_visit(order: str) -> bool:
    marker = LEDGER.with_name(f"visited-{order}")
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
