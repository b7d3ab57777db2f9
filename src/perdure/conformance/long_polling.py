"""Waiting for work: how long a fetch waits, and what wakes it.

Time is the store's: with an injected clock nothing here waits for real, except for a moment in
which a fetch could wrongly return.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from perdure.conformance.factories import (
    activity,
    completion,
    create,
    enqueue,
    enqueue_work,
    event,
    fetch,
    fetch_work,
    raised,
    start,
    take,
    take_work,
)
from perdure.conformance.harness import UNTIL_SECONDS_MAX, Store, checks
from perdure.conformance.requires import requires, requires_absent
from perdure.providers.records import TagFilter, TurnCommit

TOLERANCE_MS: Final = 200
THRESHOLD_MS: Final = 100
OWN_CLOCK_SLACK_MS: Final = 20
"""Two clocks that are not in step may differ by this much about how long a wait was."""
LONG_MS: Final = 30_000
_MOMENT_SECONDS: Final = 0.03


async def settled(task: asyncio.Task[Any], seconds: float = _MOMENT_SECONDS) -> bool:
    """Return True if the task is done after that much real time at most."""
    await asyncio.wait({task}, timeout=seconds)
    return task.done()


async def looked(store: Store, task: asyncio.Task[Any]) -> None:
    """The fetch has an answer, or it has looked and waits."""
    await store.until(lambda: task.done() or store.clock.next_due_ms() is not None)


async def waiting(store: Store, task: asyncio.Task[Any]) -> None:
    """The fetch has looked, found nothing, and waits."""
    if store.capabilities.injected_clock:
        await looked(store, task)
    assert not await settled(task), "the fetch did not wait for work"


async def waited_ms(store: Store, task: asyncio.Task[Any], timeout_ms: int) -> int:
    """Time of the store until a fetch that finds nothing has returned, to the tolerance."""
    if not store.capabilities.injected_clock:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        assert await task is None
        return round((loop.time() - begin) * 1000) + OWN_CLOCK_SLACK_MS
    await waiting(store, task)
    await store.advance(timeout_ms - 1)
    if await settled(task):
        return timeout_ms - 1
    await store.advance(1)
    if await settled(task, 1.0):
        return timeout_ms
    await store.advance(TOLERANCE_MS)
    assert await settled(task, UNTIL_SECONDS_MAX), "the fetch waited beyond its poll timeout"
    return timeout_ms + TOLERANCE_MS


async def woken(task: asyncio.Task[Any]) -> Any:
    """Return the answer of the fetch while the store's clock stands still."""
    assert await settled(task, UNTIL_SECONDS_MAX), "the fetch was not woken"
    return task.result()


@checks
class TestLengthOfAPoll:
    verbs = ("fetch_orchestration_item", "fetch_work_item")

    @requires_absent("long_poll")
    async def test_a_short_poll_for_a_turn_returns_at_once(self, store: Store) -> None:
        async with asyncio.timeout(THRESHOLD_MS / 1000):
            assert await fetch(store, poll_ms=500) is None

    @requires("long_poll")
    async def test_a_long_poll_for_a_turn_waits(self, store: Store) -> None:
        task = asyncio.create_task(fetch(store, poll_ms=500))

        assert await waited_ms(store, task, 500) >= 500
        assert task.result() is None

    async def test_no_fetch_waits_beyond_its_timeout(self, store: Store) -> None:
        if not store.capabilities.long_poll:
            async with asyncio.timeout(0.5):
                assert await fetch(store, poll_ms=300) is None
            return

        task = asyncio.create_task(fetch(store, poll_ms=300))

        assert await waited_ms(store, task, 300) <= 300 + TOLERANCE_MS

    @requires_absent("long_poll")
    async def test_a_short_poll_for_work_returns_at_once(self, store: Store) -> None:
        async with asyncio.timeout(THRESHOLD_MS / 1000):
            assert await fetch_work(store, poll_ms=500) is None

    @requires("long_poll")
    async def test_a_long_poll_for_work_waits(self, store: Store) -> None:
        task = asyncio.create_task(fetch_work(store, poll_ms=500))

        assert await waited_ms(store, task, 500) >= 500
        assert task.result() is None

    async def test_no_timeout_means_no_waiting(self, store: Store) -> None:
        async with asyncio.timeout(LONG_MS / 2000):
            assert await fetch(store, poll_ms=0) is None
            assert await fetch_work(store, poll_ms=0) is None

    async def test_a_worker_that_takes_nothing_does_not_wait(self, store: Store) -> None:
        await enqueue_work(store, activity("x"))

        async with asyncio.timeout(LONG_MS / 2000):
            assert await fetch_work(store, poll_ms=LONG_MS, tags=TagFilter.none()) is None


@checks
@requires("long_poll")
class TestWakingForATurn:
    verbs = ("fetch_orchestration_item",)

    async def test_a_message_wakes_a_waiting_fetch(self, store: Store) -> None:
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await enqueue(store, start("x"))

        assert (await woken(task)).item.instance_id == "x"

    async def test_one_message_wakes_one_of_many(self, store: Store) -> None:
        tasks = [asyncio.create_task(fetch(store, poll_ms=2_000)) for _ in range(5)]
        for task in tasks:
            await waiting(store, task)

        await enqueue(store, start("x"))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await store.advance(2_000 + TOLERANCE_MS)

        results = await asyncio.gather(*tasks)
        assert sum(result is not None for result in results) == 1

    async def test_as_many_messages_wake_as_many_fetches(self, store: Store) -> None:
        tasks = [asyncio.create_task(fetch(store, poll_ms=LONG_MS)) for _ in range(5)]
        for task in tasks:
            await waiting(store, task)

        await enqueue(store, *(start(f"x-{number}") for number in range(5)))

        results = [await woken(task) for task in tasks]
        assert len({result.item.instance_id for result in results}) == 5

    async def test_starts_that_are_sent_together_wake_as_many_fetches(self, store: Store) -> None:
        tasks = [asyncio.create_task(fetch(store, poll_ms=LONG_MS)) for _ in range(3)]
        for task in tasks:
            await waiting(store, task)

        await store.provider.enqueue_many_for_orchestrator(
            [start(f"x-{number}") for number in range(3)]
        )

        assert len({(await woken(task)).item.instance_id for task in tasks}) == 3

    async def test_a_delayed_message_is_taken_when_its_time_comes(self, store: Store) -> None:
        await store.provider.enqueue_for_orchestrator(start("x"), 4_000)
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.advance(2_000)
        assert not await settled(task)
        await store.advance(2_000)

        assert (await woken(task)).item.instance_id == "x"

    @requires("hot_path")
    async def test_a_timer_that_comes_due_wakes_the_owner_of_a_kept_lock(
        self, store: Store
    ) -> None:
        await create(store, "x", owner="me", keep_lock_ms=LONG_MS)
        await store.provider.enqueue_for_orchestrator(raised("x"), delay_ms=400)
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS, owner="me"))
        await waiting(store, task)

        await store.advance(400)

        assert (await woken(task)).continues

    async def test_a_lock_that_expires_frees_its_instance_for_who_waits(self, store: Store) -> None:
        await enqueue(store, start("x"))
        await take(store, "x", lock_ms=400)
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.advance(400)

        assert (await woken(task)).attempt_count == 2

    async def test_an_abandoned_instance_wakes_a_waiting_fetch(self, store: Store) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.provider.abandon_orchestration_item(held.lock_token)

        assert (await woken(task)).attempt_count == 2

    async def test_an_ack_wakes_a_fetch_for_what_arrived_meanwhile(self, store: Store) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        await enqueue(store, raised("x", "late"))
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.provider.ack_orchestration_item(
            held.lock_token, TurnCommit(execution_id=1, history_delta=(event("x", 1),))
        )

        assert len((await woken(task)).item.messages) == 1

    @requires("hot_path")
    async def test_a_lock_that_is_kept_wakes_its_owner_for_what_arrived_meanwhile(
        self, store: Store
    ) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x", owner="me")
        await enqueue(store, raised("x", "late"))
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS, owner="me"))
        await waiting(store, task)

        commit = TurnCommit(execution_id=1, history_delta=(event("x", 1),), keep_lock_ms=LONG_MS)
        await store.provider.ack_orchestration_item(held.lock_token, commit)

        assert (await woken(task)).continues

    async def test_a_completed_activity_wakes_the_turn_that_waits_for_it(
        self, store: Store
    ) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        work = await take_work(store)
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.provider.ack_work_item(work.lock_token, completion("x"))

        assert (await woken(task)).item.instance_id == "x"

    @requires("admin")
    async def test_a_resumed_instance_wakes_a_waiting_fetch(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))
        await store.admin.suspend_instance("x")
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.admin.resume_instance("x")
        await _step_clock(store, task)

        assert (await woken(task)).item.instance_id == "x"

    @requires("several_handles")
    async def test_a_message_through_another_handle_is_noticed(self, store: Store) -> None:
        other = await store.second()
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await other.enqueue_for_orchestrator(start("x"))
        await _step_clock(store, task)

        assert (await woken(task)).item.instance_id == "x"

    async def test_closing_the_handle_wakes_a_waiting_fetch_with_nothing(
        self, store: Store
    ) -> None:
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        work = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
        await waiting(store, task)
        await waiting(store, work)

        await store.provider.close()

        assert await woken(task) is None
        assert await woken(work) is None

    async def test_a_fetch_that_was_given_up_holds_no_lock(self, store: Store) -> None:
        task = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
        await waiting(store, task)
        task.cancel()
        await asyncio.wait({task})

        await enqueue(store, start("x"))

        assert (await take(store, "x")).attempt_count == 1


@checks
@requires("long_poll")
class TestWakingForWork:
    verbs = ("fetch_work_item",)

    async def test_an_item_wakes_a_waiting_worker(self, store: Store) -> None:
        task = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await enqueue_work(store, activity("x"))

        assert (await woken(task)).identity.instance_id == "x"

    async def test_an_item_of_a_turn_wakes_a_waiting_worker(self, store: Store) -> None:
        task = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await create(store, "x", worker_items=(activity("x"),))

        assert (await woken(task)).identity.instance_id == "x"

    async def test_an_item_with_a_foreign_tag_does_not_end_the_wait(self, store: Store) -> None:
        task = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await enqueue_work(store, activity("x", tag="gpu"))
        assert not await settled(task)
        await enqueue_work(store, activity("y"))

        assert (await woken(task)).identity.instance_id == "y"

    async def test_a_delayed_item_is_taken_when_its_time_comes(self, store: Store) -> None:
        await enqueue_work(store, activity("x", visible_at_ms=await store.now_ms() + 400))
        task = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.advance(400)

        assert (await woken(task)).identity.instance_id == "x"

    async def test_a_lock_that_expires_frees_its_item_for_who_waits(self, store: Store) -> None:
        await enqueue_work(store, activity("x"))
        await take_work(store, lock_ms=400)
        task = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.advance(400)

        assert (await woken(task)).attempt_count == 2

    async def test_an_abandoned_item_wakes_a_waiting_worker(self, store: Store) -> None:
        await enqueue_work(store, activity("x"))
        held = await take_work(store)
        task = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await store.provider.abandon_work_item(held.lock_token)

        assert (await woken(task)).attempt_count == 2

    @requires("several_handles")
    async def test_an_item_through_another_handle_is_noticed(self, store: Store) -> None:
        other = await store.second()
        task = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
        await waiting(store, task)

        await other.enqueue_for_worker(activity("x"))
        await _step_clock(store, task)

        assert (await woken(task)).identity.instance_id == "x"


@checks
@requires("long_poll")
@requires("injected_clock")
class TestTimeThatPassesDuringALook:
    verbs = ("fetch_orchestration_item", "fetch_work_item")

    async def test_what_comes_due_between_two_looks_at_the_clock_is_not_slept_through(
        self, store: Store
    ) -> None:
        store.clock.tick_ms = 1
        for delay_ms in range(1, 12):
            name = f"x-{delay_ms}"
            await store.provider.enqueue_for_orchestrator(start(name), delay_ms)
            turn = asyncio.create_task(fetch(store, poll_ms=LONG_MS))
            await looked(store, turn)
            await store.advance(delay_ms)
            assert (await woken(turn)).item.instance_id == name

            due_at_ms = await store.now_ms() + delay_ms
            await enqueue_work(store, activity(name, visible_at_ms=due_at_ms))
            work = asyncio.create_task(fetch_work(store, poll_ms=LONG_MS))
            await looked(store, work)
            await store.advance(delay_ms)
            assert (await woken(work)).identity.instance_id == name


async def _step_clock(store: Store, task: asyncio.Task[Any]) -> None:
    """Let a provider that looks now and then see what another handle wrote, within a second."""
    for _ in range(10):
        if await settled(task):
            return
        await store.advance(100)
