"""Clocks that jump, milliseconds that matter, and many callers at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    activity,
    bodies,
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
    timer,
)
from perdure.conformance.harness import Store, checks, outcomes
from perdure.conformance.requires import requires
from perdure.conformance.sessions import worker
from perdure.errors import DuplicateEvent, LockLost
from perdure.limits import BATCH_MESSAGES_MAX, ORPHAN_GRACE_MS
from perdure.providers.records import ExecutionMetadata, SessionFetch, TurnCommit

if TYPE_CHECKING:
    from perdure.providers.contract import Provider


@checks
class TestOwnClock:
    verbs = ("clock",)

    async def test_a_clock_that_it_names_is_not_behind_the_store(self, store: Store) -> None:
        await enqueue(store, start("x"))
        await take(store, "x")
        clock = store.provider.clock()

        assert clock is None or clock.now_ms() >= await store.now_ms()

    @requires("injected_clock")
    async def test_it_names_the_clock_that_was_handed_in(self, store: Store) -> None:
        clock = store.provider.clock()
        await store.advance(3_600_000)

        assert clock is not None
        assert clock.now_ms() == store.clock.now_ms()


@checks
@requires("injected_clock")
class TestClocks:
    verbs = ("fetch_orchestration_item", "fetch_work_item", "renew_orchestration_item_lock")

    async def test_a_lock_lives_to_the_millisecond(self, store: Store) -> None:
        await enqueue(store, start("x"))
        await enqueue_work(store, activity("x"))
        held = await take(store, "x", lock_ms=1_000)
        work = await take_work(store, lock_ms=1_000)

        await store.advance(999)
        assert await fetch(store) is None
        assert await fetch_work(store) is None
        await store.advance(1)

        with pytest.raises(LockLost):
            await store.provider.renew_orchestration_item_lock(held.lock_token, 1_000)
        with pytest.raises(LockLost):
            await store.provider.renew_work_item_lock(work.lock_token, 1_000)
        await take(store, "x")
        await take_work(store)

    async def test_a_message_is_visible_to_the_millisecond(self, store: Store) -> None:
        now = await store.now_ms()
        await store.provider.enqueue_for_orchestrator(start("x"), 1_000)
        await enqueue_work(store, activity("x", visible_at_ms=now + 1_000))

        await store.advance(999)
        assert await fetch(store) is None
        assert await fetch_work(store) is None
        await store.advance(1)

        await take(store, "x")
        await take_work(store)

    async def test_a_clock_that_goes_back_fires_nothing_early(self, store: Store) -> None:
        now = await store.now_ms()
        await create(store, "x", orchestrator_items=(timer("x", now + 10_000),))
        await store.advance(-3_600_000)
        assert await fetch(store) is None

        await store.advance(3_600_000 + 9_999)
        assert await fetch(store) is None
        await store.advance(1)

        await take(store, "x")

    async def test_a_clock_that_goes_back_frees_no_lock(self, store: Store) -> None:
        await enqueue(store, start("x"))
        await enqueue_work(store, activity("x"))
        held = await take(store, "x")
        work = await take_work(store)

        await store.advance(-3_600_000)

        assert await fetch(store) is None
        assert await fetch_work(store) is None
        await store.provider.renew_orchestration_item_lock(held.lock_token, LOCK_MS)
        await store.provider.renew_work_item_lock(work.lock_token, LOCK_MS)
        await store.advance(3_600_000)
        assert (await take(store, "x")).attempt_count == 2
        assert (await take_work(store)).attempt_count == 2

    async def test_a_clock_that_leaps_ahead_fences_the_old_holder(self, store: Store) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")

        await store.advance(10 * 365 * 86_400_000)

        successor = await take(store, "x")
        commit = TurnCommit(execution_id=1, history_delta=(event("x", 1),))
        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(held.lock_token, commit)
        await store.provider.ack_orchestration_item(successor.lock_token, commit)

    @requires("long_poll")
    async def test_a_lock_begins_when_it_is_handed_over(self, store: Store) -> None:
        task = asyncio.create_task(fetch(store, lock_ms=1_000, poll_ms=60_000))
        await store.until(lambda: store.clock.next_due_ms() is not None)
        await store.advance(30_000)
        await enqueue(store, start("x"))
        held = await task
        assert held is not None

        await store.advance(999)

        await store.provider.renew_orchestration_item_lock(held.lock_token, 1_000)


async def _hold(store: Store, instance_id: str) -> None:
    """Lock a new instance and a work item of it."""
    await enqueue(store, start(instance_id))
    await enqueue_work(store, activity(instance_id))
    await take(store, instance_id)
    await take_work(store)


@checks
class TestClocksThatGoBack:
    """Nothing waits as long as the clock has gone back, except what has a time of its own."""

    verbs = ("fetch_orchestration_item", "fetch_work_item")

    async def test_what_was_sent_for_now_stays_visible_and_in_order_when_the_clock_goes_back(
        self, store: Store
    ) -> None:
        sent = [start("x"), raised("x", "before"), raised("x", "after"), raised("x", "later")]
        await enqueue(store, *sent[:2])
        await enqueue_work(store, activity("x"))
        await store.advance(-3_600_000)
        await enqueue(store, sent[2])
        await store.advance(1_000)
        await enqueue(store, sent[3])

        assert bodies(await take(store, "x")) == [message.body for message in sent]
        await take_work(store)

    async def test_a_lock_ends_in_its_time_although_the_clock_went_back(self, store: Store) -> None:
        await enqueue(store, start("x"), start("delayed"))
        await enqueue_work(store, activity("x"))
        await take(store, "x")
        await take_work(store)
        delayed = await take(store, "delayed")
        await store.provider.abandon_orchestration_item(delayed.lock_token, LOCK_MS)

        await store.advance(-3_600_000)
        assert await fetch(store) is None
        assert await fetch_work(store) is None
        await store.advance(LOCK_MS)

        taken = [await take(store), await take(store)]
        assert {each.item.instance_id for each in taken} == {"x", "delayed"}
        assert (await take_work(store)).attempt_count == 2

    async def test_a_lock_that_has_ended_stays_ended_when_the_clock_goes_back(
        self, store: Store
    ) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        await store.advance(2 * LOCK_MS)
        await enqueue(store, raised("y"))
        await store.advance(-2 * LOCK_MS)

        await take(store, "x")
        with pytest.raises(LockLost):
            await store.provider.renew_orchestration_item_lock(held.lock_token, LOCK_MS)

    async def test_a_lock_that_is_taken_after_the_clock_went_back_lasts(self, store: Store) -> None:
        """A store that follows the clock does so once, also if the last it noted was a renewal."""
        await enqueue(store, start("x"), start("y"))
        await enqueue_work(store, activity("x"))
        held = await take(store)
        work = await take_work(store)
        await store.advance(1_000)
        await store.provider.renew_orchestration_item_lock(held.lock_token, LOCK_MS)
        await store.provider.renew_work_item_lock(work.lock_token, LOCK_MS)

        await store.advance(-3_600_000)
        later = await take(store)
        await store.advance(LOCK_MS // 2)

        assert await fetch(store) is None
        assert await fetch_work(store) is None
        for each in (held, later):
            await store.provider.renew_orchestration_item_lock(each.lock_token, LOCK_MS)
        await store.provider.renew_work_item_lock(work.lock_token, LOCK_MS)

    @requires("durable")
    async def test_a_store_that_is_opened_again_does_not_follow_the_clock_again(
        self, store: Store
    ) -> None:
        await _hold(store, "x")
        await store.advance(-3_600_000)
        assert await fetch(store) is None

        await store.reopen()

        assert await fetch(store) is None
        assert await fetch_work(store) is None

    @requires("several_handles")
    async def test_all_handles_follow_the_clock_once_together(self, store: Store) -> None:
        other = await store.second()
        await _hold(store, "x")
        await other.enqueue_for_orchestrator(raised("y"))
        await store.advance(-3_600_000)
        for provider in (store.provider, other, store.provider):
            await provider.enqueue_for_orchestrator(raised("y"))

        newcomer = await store.second()

        for provider in (newcomer, store.provider):
            assert await fetch(store, provider=provider) is None
            assert await fetch_work(store, provider=provider) is None

    @requires("durable")
    @pytest.mark.parametrize("again_ms", [300_000, 3_600_000])
    async def test_a_second_jump_is_followed_by_a_store_that_is_opened_after_it(
        self, store: Store, again_ms: int
    ) -> None:
        """The clock has not yet passed the time from which it went back first."""
        await enqueue(store, raised("early"))
        await store.advance(-3_600_000)
        await enqueue(store, raised("early"))
        await store.advance(600_000)
        await _hold(store, "x")
        await enqueue(store, start("y"))
        await enqueue_work(store, activity("y"))

        await store.close()
        await store.advance(-again_ms)
        await store.reopen()

        await take(store, "y", lock_ms=2 * LOCK_MS)
        await take_work(store, lock_ms=2 * LOCK_MS)
        assert await fetch(store) is None
        assert await fetch_work(store) is None
        await store.advance(LOCK_MS)
        assert (await take(store, "x")).attempt_count == 2
        assert (await take_work(store)).attempt_count == 2

    @requires("several_handles")
    async def test_a_handle_that_was_idle_follows_the_clock_as_far_as_it_went_back(
        self, store: Store
    ) -> None:
        other = await store.second()
        await other.enqueue_for_orchestrator(raised("y"))
        await store.advance(600_000)
        await _hold(store, "x")
        await store.advance(-3_600_000)
        assert await fetch(store, provider=other) is None

        await store.advance(LOCK_MS)

        assert (await take(store, "x")).attempt_count == 2
        assert (await take_work(store)).attempt_count == 2

    async def test_a_reply_from_before_the_jump_comes_before_the_timeout_after_it(
        self, store: Store
    ) -> None:
        await create(store, "x")
        reply = raised("x")
        await enqueue(store, reply)
        await store.advance(-3_600_000)
        timeout = timer("x", await store.now_ms() + 1_000)
        await enqueue(store, timeout)

        await store.advance(1_000)

        assert bodies(await take(store, "x")) == [reply.body, timeout.body]

    @requires("admin")
    async def test_a_message_for_no_instance_is_a_dead_letter_in_its_time(
        self, store: Store
    ) -> None:
        lost = raised("x")
        await enqueue(store, lost)
        assert await fetch(store) is None
        await store.advance(-3_600_000)
        assert await fetch(store) is None

        await store.advance(ORPHAN_GRACE_MS)
        assert await fetch(store) is None

        assert [letter.message for letter in await store.admin.list_dead_letters()] == [lost]

    async def test_a_commit_that_is_refused_does_not_undo_that_the_clock_is_followed(
        self, store: Store
    ) -> None:
        await enqueue(store, start("y"))
        refused = await take(store, "y")
        await _hold(store, "x")
        await store.advance(-3_600_000)
        twice = TurnCommit(execution_id=1, history_delta=(event("y", 1), event("y", 1)))
        with pytest.raises(DuplicateEvent):
            await store.provider.ack_orchestration_item(refused.lock_token, twice)
        assert await fetch(store) is None
        await store.advance(LOCK_MS)

        assert {(await take(store)).item.instance_id for _ in "xy"} == {"x", "y"}
        assert (await take_work(store)).attempt_count == 2

    async def test_a_session_lasts_as_long_although_the_clock_went_back(self, store: Store) -> None:
        await enqueue_work(store, activity("x", session="s"), activity("x", 1, 3, session="s"))
        own, other = (SessionFetch(owner_id=each, lock_timeout_ms=LOCK_MS) for each in "ab")
        await take_work(store, session=own)

        await store.advance(-3_600_000)

        assert await fetch_work(store, session=other) is None
        assert (await take_work(store, session=own)).identity.activity_id == 3

    async def test_a_long_queue_keeps_its_order_when_the_clock_goes_back(
        self, store: Store
    ) -> None:
        sent = [raised("x", data=number) for number in range(4 * BATCH_MESSAGES_MAX)]
        await create(store, "x")
        await store.provider.enqueue_many_for_orchestrator(sent[: 2 * BATCH_MESSAGES_MAX])
        await store.advance(-3_600_000)
        await store.provider.enqueue_many_for_orchestrator(sent[2 * BATCH_MESSAGES_MAX :])
        await store.advance(10)

        heard: list[str] = []
        while (fetched := await fetch(store)) is not None:
            heard += bodies(fetched)
            await store.provider.ack_orchestration_item(
                fetched.lock_token, TurnCommit(execution_id=1)
            )

        assert heard == [message.body for message in sent]


@checks
class TestFairness:
    verbs = ("fetch_orchestration_item", "fetch_work_item")

    async def test_the_instance_with_the_oldest_message_comes_first(self, store: Store) -> None:
        order = [f"x-{number}" for number in (3, 1, 4, 5, 9, 2, 6)]
        for instance in order:
            await enqueue(store, start(instance))

        assert [(await take(store)).item.instance_id for _ in order] == order

    async def test_a_busy_instance_does_not_hold_up_a_quiet_one(self, store: Store) -> None:
        for instance in ("busy", "quiet"):
            await create(store, instance)
        await enqueue(store, *(raised("busy", data=number) for number in range(30)))
        await store.advance(1)
        await enqueue(store, raised("quiet"))

        first = await take(store, "busy")
        await store.provider.ack_orchestration_item(
            first.lock_token,
            TurnCommit(execution_id=1, consumed=(first.item.messages[0].message_id,)),
        )
        await store.provider.abandon_orchestration_item(
            (await take(store, "busy")).lock_token, 1_000
        )

        await take(store, "quiet")

    async def test_a_timer_is_as_old_as_its_time(self, store: Store) -> None:
        now = await store.now_ms()
        for instance in ("timer", "event"):
            await create(store, instance)
        await enqueue(store, timer("timer", now + 20_000))
        await store.advance(10_000)
        await enqueue(store, raised("event"))
        await store.advance(20_000)

        await take(store, "event")
        await take(store, "timer")

    async def test_messages_come_in_the_order_in_which_they_were_sent(self, store: Store) -> None:
        await create(store, "x")
        messages = [raised("x", data=number) for number in range(30)]
        await enqueue(store, *messages)

        fetched = await take(store, "x")

        assert [seen.body for seen in fetched.item.messages] == [sent.body for sent in messages]


@checks
class TestManyCallers:
    verbs = ("fetch_orchestration_item", "fetch_work_item", "ack_orchestration_item")

    async def test_a_lost_session_claim_takes_the_next_item(self, store: Store) -> None:
        for round_number in range(10):
            session = f"s-{round_number}"
            await enqueue_work(
                store,
                activity("x", activity_id=1, session=session),
                activity("x", activity_id=2, session=session),
                activity("x", activity_id=3),
            )

            first, second = await asyncio.gather(
                fetch_work(store, session=worker(f"a-{round_number}")),
                fetch_work(store, session=worker(f"b-{round_number}"), provider=store.reader),
            )

            assert first is not None
            assert second is not None
            taken = sorted([first.identity.activity_id, second.identity.activity_id])
            assert taken == [1, 3]
            third = await take_work(
                store, session=worker(f"{'a' if first.session_id else 'b'}-{round_number}")
            )
            for item in (first, second, third):
                await store.provider.ack_work_item(item.lock_token)

    async def test_parallel_families_do_not_get_in_each_others_way(self, store: Store) -> None:
        parents = [f"parent-{number}" for number in range(8)]
        for parent in parents:
            await enqueue(store, start(parent))

        async def run_parent(provider: Provider) -> None:
            held = await take(store, provider=provider)
            parent = held.item.instance_id
            children = tuple(start(f"{parent}-{n}", parent=parent) for n in range(5))
            await provider.ack_orchestration_item(
                held.lock_token,
                TurnCommit(
                    execution_id=1,
                    history_delta=(event(parent, 1),),
                    orchestrator_items=children,
                    metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"),
                ),
            )

        results = await outcomes(*(run_parent(each) for each in (store.provider, store.reader) * 4))

        assert results == [None] * 8
        children = [await take(store) for _ in range(40)]
        assert len({child.item.instance_id for child in children}) == 40

    async def test_no_caller_sees_the_others(self, store: Store) -> None:
        await create(store, "x")

        async def one_worker(provider: Provider, number: int) -> None:
            instance = f"w-{number}"
            await provider.enqueue_for_orchestrator(raised("x", data=number))
            await provider.enqueue_for_worker(activity(instance, activity_id=number + 1))
            work = await take_work(store, provider=provider)
            await provider.renew_work_item_lock(work.lock_token, LOCK_MS)
            await provider.ack_work_item(work.lock_token, completion(work.identity.instance_id))

        results = await outcomes(
            *(
                one_worker(each, number)
                for number, each in enumerate((store.provider, store.reader) * 10)
            )
        )

        assert results == [None] * 20
        assert await fetch_work(store) is None
        assert len((await take(store, "x")).item.messages) == 20


@checks
@requires("durable")
class TestReopening:
    verbs = ("open", "close")

    async def test_attempts_are_counted_across_reopening(self, store: Store) -> None:
        await enqueue(store, start("x"))
        await enqueue_work(store, activity("x"))
        for _ in range(3):
            await take(store, "x")
            await take_work(store)
            await store.reopen()
            await store.advance(LOCK_MS)

        assert (await take(store, "x")).attempt_count == 4
        assert (await take_work(store)).attempt_count == 4
