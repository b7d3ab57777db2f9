"""The waiting of long polls."""

from __future__ import annotations

import asyncio

from patience import HANG_SECONDS
from perdure.clock import ManualClock
from perdure.providers.waiting import ChangeHub, Poll, Signal


def test_what_came_due_after_the_look_is_looked_for_at_once() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        poll = Poll(Signal(clock), clock, 60_000)
        due_ms = clock.now_ms() + 500
        clock.advance(500)

        async with asyncio.timeout(HANG_SECONDS):
            assert await poll.wait(due_ms)

    asyncio.run(scenario())


def test_a_time_under_which_nothing_is_found_is_not_asked_for_without_a_pause() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        poll = Poll(Signal(clock), clock, 60_000)
        due_ms = clock.now_ms()
        assert await poll.wait(due_ms)

        again = asyncio.ensure_future(poll.wait(due_ms))
        while clock.next_due_ms() is None:  # noqa: ASYNC110 - the clock has no event for it
            await asyncio.sleep(0)

        assert clock.next_due_ms() == due_ms + 1
        clock.advance(1)
        assert await again

    asyncio.run(scenario())


def test_a_watch_tells_of_each_change_once_and_is_forgotten_with_its_last_reader() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        hub = ChangeHub(clock)
        with hub.watch("x") as first, hub.watch("x") as second:
            hub.notify(["x"])
            for watch in (first, second):
                assert await watch.wait(0)
                assert not await watch.wait(0)
            hub.notify(["y"])
            assert not await first.wait(0)
        assert hub._signals == {}

    asyncio.run(scenario())


def test_a_clock_that_moves_before_the_wait_has_begun_ends_it() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        poll = Poll(Signal(clock), clock, 60_000)

        waiting = asyncio.create_task(poll.wait(clock.now_ms() + 1))
        await asyncio.sleep(0)  # it knows how long to wait, and its alarm has not begun
        assert clock.next_due_ms() is None
        clock.advance(1)
        await asyncio.wait_for(waiting, HANG_SECONDS)

    asyncio.run(scenario())
