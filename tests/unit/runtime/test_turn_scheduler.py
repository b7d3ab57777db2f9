"""Turns run in slices: instances that have begun come first, new ones at the store's pace."""

from __future__ import annotations

import asyncio
import gc
from functools import partial

import pytest

from perdure.runtime import orchestrations
from perdure.runtime.orchestrations import TurnScheduler


async def until_idle(scheduler: TurnScheduler) -> None:
    while scheduler:  # noqa: ASYNC110 - passes of the loop are what is counted here
        await asyncio.sleep(0)


@pytest.fixture
def _endless_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no slice ends by the clock."""
    monkeypatch.setattr(orchestrations, "perf_counter", lambda: 0.0)


@pytest.mark.usefixtures("_endless_slices")
def test_what_has_begun_runs_before_what_is_new() -> None:
    async def scenario() -> list[str]:
        ran: list[str] = []
        scheduler = TurnScheduler(ran.append)
        for n in range(3):
            scheduler.begin(f"new {n}")
            scheduler.run(partial(ran.append, f"due {n}"))
        await until_idle(scheduler)
        return ran

    ran = asyncio.run(scenario())
    # One new turn begins in every slice, so that a busy runtime starts something, too.
    assert ran == ["new 0", "due 0", "due 1", "due 2", "new 1", "new 2"]


@pytest.mark.usefixtures("_endless_slices")
def test_new_instances_begin_as_fast_as_the_store_takes_them() -> None:
    async def scenario() -> None:
        ran: list[int] = []
        scheduler = TurnScheduler(ran.append)
        for n in range(orchestrations.FIRST_TURNS_MAX + 10):
            scheduler.begin(n)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(ran) == orchestrations.FIRST_TURNS_MAX
        for _ in range(4):
            scheduler.begun()
        for _ in range(20):
            await asyncio.sleep(0)
        assert ran == list(range(orchestrations.FIRST_TURNS_MAX + 4))
        scheduler.run(partial(ran.append, -1))
        await asyncio.sleep(0)
        assert ran[-1] == -1, "what has begun does not wait for the store"

    asyncio.run(scenario())


def test_a_slice_ends_and_lets_the_event_loop_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1_000_000))
    monkeypatch.setattr(
        orchestrations, "perf_counter", lambda: next(seconds) * orchestrations.SLICE_SECONDS / 3
    )

    async def scenario() -> list[str]:
        ran: list[str] = []
        scheduler = TurnScheduler(ran.append)
        for _ in range(6):
            scheduler.run(partial(ran.append, "turn"))
        asyncio.get_running_loop().call_soon(ran.append, "another callback")
        await until_idle(scheduler)
        return ran

    assert asyncio.run(scenario()) == [*["turn"] * 3, "another callback", *["turn"] * 3]


def test_a_turn_that_breaks_does_not_stop_the_others() -> None:
    async def scenario() -> tuple[list[str], list[str]]:
        ran: list[str] = []
        told: list[str] = []
        scheduler = TurnScheduler(ran.append)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: told.append(str(context["exception"])))

        def break_down() -> None:
            raise RuntimeError("broken")

        scheduler.run(break_down)
        scheduler.run(partial(ran.append, "the next"))
        await until_idle(scheduler)
        return ran, told

    assert asyncio.run(scenario()) == (["the next"], ["broken"])


@pytest.mark.parametrize("is_collecting", [True, False])
def test_a_slice_leaves_the_garbage_collector_as_it_was(is_collecting: bool) -> None:
    async def scenario() -> list[bool]:
        seen: list[bool] = []
        scheduler = TurnScheduler(print)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def break_down() -> None:
            seen.append(gc.isenabled())
            raise RuntimeError("broken")

        for turn in (break_down, lambda: seen.append(gc.isenabled())):
            scheduler.run(turn)
            await until_idle(scheduler)
            seen.append(gc.isenabled())
        return seen

    try:
        (gc.enable if is_collecting else gc.disable)()
        assert asyncio.run(scenario()) == [False, is_collecting] * 2
    finally:
        gc.enable()
