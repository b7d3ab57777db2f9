"""Scenarios whose histories are kept as files: what is written today must be readable for ever.

``python golden_programs.py NAME`` writes the history of a new scenario; it never replaces one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_driver import Driver

from perdure import (
    activity,
    continue_as_new,
    next_message,
    now,
    orchestration,
    patched,
    random,
    set_custom_status,
    side_effect,
    start_detached,
    state,
    uuid4,
    wait_for_event,
)
from perdure.errors import ActivityFailed
from perdure.model import wire
from perdure.model.failures import Category

if TYPE_CHECKING:
    from collections.abc import Callable

HISTORIES = Path(__file__).parent / "histories"


@activity
def charge(order: str, cents: int) -> str:
    return f"receipt-{order}-{cents}"


@activity
async def ship(order: str) -> None: ...


@activity
def refund(receipt: str) -> None: ...


@orchestration
async def packing(order: str, boxes: int = 1) -> int:
    return len(order) * boxes


# --- a checkout that is approved in time


@orchestration(version="1.0.0")
async def checkout(order: str, cents: int) -> str:
    receipt = await charge(order, cents)
    try:
        async with asyncio.timeout(3 * 86400):
            approved = await wait_for_event("approval", bool)
    except TimeoutError:
        return "timed out"
    async with asyncio.TaskGroup() as group:
        group.create_task(ship(order))
        group.create_task(charge.options(timeout=5)(order, 0))
    return receipt if approved else "declined"


def approved_checkout() -> Driver:
    run = Driver(checkout, "o-1", 1200)
    run.start()
    run.turn(run.completed("charge", "receipt-o-1"))
    run.turn(run.raised("approval", True))
    run.turn(run.completed("ship"), run.completed("charge", "x"))
    return run


def checkout_that_timed_out() -> Driver:
    run = Driver(checkout, "o-1", 1200)
    run.start(run.message("other", 1))
    run.turn(run.completed("charge", "receipt-o-1"))
    run.turn(run.fired())
    return run


# --- a saga that is undone


@orchestration
async def saga(order: str) -> str:
    receipt = await charge(order, 5)
    try:
        await ship(order)
    except ActivityFailed as error:
        await refund(receipt)
        return f"undone: {error.type_name}"
    return receipt


def saga_that_is_undone() -> Driver:
    run = Driver(saga, "o-2")
    run.start()
    run.turn(run.completed("charge", "r"))
    run.turn(run.failed("ship", "no truck"))
    run.turn(run.completed("refund"))
    return run


# --- branches of several steps, races, mailboxes


@orchestration
async def branches() -> list[str]:
    async def branch(label: str, delay: float) -> str:
        await asyncio.sleep(delay)
        return await asyncio.wait_for(charge(label, 1), 10)

    shown = list(await asyncio.gather(branch("a", 2), branch("b", 1)))
    steps = {charge("c", 1), charge("d", 1)}
    done, pending = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
    for step in pending:
        step.cancel()
    shown += [step.result() for step in done]
    for each in asyncio.as_completed([branch("e", 0), branch("f", 0)]):
        shown.append(await each)
    return [*shown, await next_message("inbox", str), await next_message("inbox", str)]


def branches_and_races() -> Driver:
    run = Driver(branches)
    run.start(run.message("inbox", "early"))
    run.turn(run.fired(4))
    run.turn(run.fired(3), run.completed("charge", "B"))
    run.turn(run.completed("charge", "A"))
    run.turn(run.completed("charge", "C"))
    run.turn(run.completed("charge", "E"), run.message("inbox", "late"))
    run.turn(run.completed("charge", "F"))
    return run


# --- children


@orchestration
async def family() -> list[str]:
    start_detached(packing, "alone", id="detached-1", delay=1.5)
    kept = packing.options(id="kept", on_parent_close="abandon")("k")
    results = await asyncio.gather(
        packing("a"), packing.options(version="2.0.0")("b", 2), return_exceptions=True
    )
    kept.done()
    return [type(result).__name__ for result in results]


def children_and_detached() -> Driver:
    run = Driver(family)
    run.start()
    run.turn(run.child_completed(4, 1))
    run.turn(run.child_failed(5, Category.CANCELLED, "stopped"))
    return run


# --- values


@orchestration
async def values() -> list[object]:
    set_custom_status({"stage": "begun"})
    state["count"] = state.get("count", int, 0) + 1
    first = [random(), str(uuid4()), now().isoformat(), side_effect(lambda: "seen"), patched("p")]
    await asyncio.sleep(0.5)
    del state["count"]
    set_custom_status(None)
    return [*first, now().isoformat(), random(), patched("p")]


def recorded_values() -> Driver:
    run = Driver(values, kv={"count": "4"})
    run.start()
    run.turn(run.fired())
    return run


# --- ends


@orchestration
async def cleaned(order: str) -> str:
    try:
        return await charge(order, 1)
    finally:
        await refund(order)


def cancelled_with_clean_up() -> Driver:
    run = Driver(cleaned, "o-3")
    run.start()
    run.turn(run.cancel("customer left"))
    run.turn(run.completed("refund"))
    return run


@orchestration
async def counter(number: int) -> None:
    state["number"] = number
    await next_message("tick")
    continue_as_new(number + 1)


def continued_with_unread_messages() -> Driver:
    run = Driver(counter, 7)
    run.start()
    run.turn(run.message("tick", 1), run.message("tick", 2), run.raised("stop", None))
    return run


def still_waiting() -> Driver:
    run = Driver(checkout, "o-4", 9)
    run.start()
    run.turn(run.completed("charge", "r"))
    return run


SCENARIOS: dict[str, Callable[[], Driver]] = {
    scenario.__name__: scenario
    for scenario in (
        approved_checkout,
        checkout_that_timed_out,
        saga_that_is_undone,
        branches_and_races,
        children_and_detached,
        recorded_values,
        cancelled_with_clean_up,
        continued_with_unread_messages,
        still_waiting,
    )
}


def dump(run: Driver) -> list[Any]:
    return [json.loads(wire.encode(event)) for event in run.history]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with (HISTORIES / f"{name}.json").open("x") as file:
            json.dump(dump(SCENARIOS[name]()), file, indent=1)
            file.write("\n")
