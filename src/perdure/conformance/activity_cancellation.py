"""I: work is independent of its instance's fate, until a turn cancels it by identity."""

from __future__ import annotations

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
    finish,
    identity,
    raised,
    take,
    take_work,
    timer,
    turn,
)
from perdure.conformance.harness import Store, checks, outcomes
from perdure.errors import LockLost
from perdure.model.status import Status
from perdure.providers.records import TimerIdentity, TurnCommit


async def renew_past_the_end(store: Store, lock_token: str) -> None:
    """Renew a lock; it must hold after the end that it had."""
    await store.provider.renew_work_item_lock(lock_token, LOCK_MS * 2)
    await store.advance(LOCK_MS)
    assert await fetch_work(store) is None
    await store.provider.renew_work_item_lock(lock_token, LOCK_MS)


@checks
class TestWorkOutlivesItsInstance:
    verbs = ("fetch_work_item", "renew_work_item_lock", "ack_work_item", "delete_instance")

    async def test_work_of_a_running_instance_is_fetched(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))

        assert (await take_work(store)).identity == identity("a")

    async def test_work_scheduled_by_a_completing_turn_is_fetched(self, store: Store) -> None:
        await create(store, "a")

        await finish(store, "a", Status.COMPLETED, worker_items=(activity("a"),))

        assert (await take_work(store, provider=store.reader)).identity == identity("a")

    async def test_work_scheduled_by_a_failing_turn_is_fetched(self, store: Store) -> None:
        await create(store, "a")

        await finish(store, "a", Status.FAILED, worker_items=(activity("a"),))

        assert (await take_work(store, provider=store.reader)).identity == identity("a")

    async def test_work_scheduled_by_a_continued_execution_is_fetched(self, store: Store) -> None:
        await create(store, "a")

        await finish(store, "a", Status.CONTINUED_AS_NEW, worker_items=(activity("a"),))

        assert (await take_work(store, provider=store.reader)).identity == identity("a")

    async def test_work_of_an_unknown_instance_is_fetched(self, store: Store) -> None:
        await enqueue_work(store, activity("unknown"))

        assert (await take_work(store)).identity == identity("unknown")

    async def test_a_lock_is_renewed_while_the_instance_runs(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)

        await renew_past_the_end(store, item.lock_token)

    async def test_a_lock_is_renewed_after_the_instance_has_ended(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        await finish(store, "a")

        await renew_past_the_end(store, item.lock_token)

    async def test_a_lock_is_renewed_without_any_instance(self, store: Store) -> None:
        await enqueue_work(store, activity("unknown"))
        item = await take_work(store)

        await renew_past_the_end(store, item.lock_token)

    async def test_settling_without_a_completion_tells_nobody(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)

        await store.provider.ack_work_item(item.lock_token)

        assert await fetch(store) is None
        await store.advance(LOCK_MS)
        assert await fetch_work(store) is None

    async def test_a_forced_deletion_is_harmless_for_a_worker(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a", 1, 2), activity("a", 1, 3)))
        held = await take_work(store)

        await store.admin.delete_instance("a", force=True)

        assert await fetch_work(store) is None
        with pytest.raises(LockLost):
            await store.provider.ack_work_item(held.lock_token, completion("a"))
        assert await fetch(store) is None


@checks
class TestCancellation:
    verbs = ("ack_orchestration_item", "ack_work_item", "renew_work_item_lock", "fetch_work_item")

    async def test_cancelled_work_is_gone_and_the_rest_stays(self, store: Store) -> None:
        await create(store, "a", worker_items=tuple(activity("a", 1, each) for each in (2, 3, 4)))

        await turn(store, "a", cancelled_activities=(identity("a", 1, 2), identity("a", 1, 4)))

        assert (await take_work(store, provider=store.reader)).identity.activity_id == 3
        assert await fetch_work(store) is None

    async def test_settling_cancelled_work_is_refused_for_good(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        await turn(store, "a", cancelled_activities=(identity("a"),))

        with pytest.raises(LockLost) as refusal:
            await store.provider.ack_work_item(item.lock_token, completion("a"))

        assert not refusal.value.retryable
        assert await fetch(store) is None

    async def test_renewing_cancelled_work_tells_the_worker(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        await turn(store, "a", cancelled_activities=(identity("a"),))

        with pytest.raises(LockLost):
            await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS)

    async def test_cancelling_what_does_not_exist_is_fine(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))

        await turn(store, "a", cancelled_activities=(identity("a", 1, 99), identity("a", 7, 7)))

        await take_work(store)

    async def test_five_activities_are_cancelled_by_one_turn(self, store: Store) -> None:
        ids = range(2, 7)
        await create(store, "a", worker_items=tuple(activity("a", 1, each) for each in ids))

        await turn(store, "a", cancelled_activities=tuple(identity("a", 1, each) for each in ids))

        assert await fetch_work(store) is None

    async def test_what_is_scheduled_and_cancelled_by_one_turn_is_gone(self, store: Store) -> None:
        await create(
            store,
            "a",
            worker_items=(activity("a", 1, 2), activity("a", 1, 3)),
            cancelled_activities=(identity("a", 1, 2),),
        )

        assert (await take_work(store)).identity.activity_id == 3
        assert await fetch_work(store) is None

    async def test_only_the_named_execution_is_cancelled(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a", 1, 2), activity("a", 2, 2)))
        await enqueue_work(store, activity("b", 1, 2))

        await turn(store, "a", cancelled_activities=(identity("a", 1, 2),))

        left = [(await take_work(store)).identity for _ in range(2)]
        assert left == [identity("a", 2, 2), identity("b", 1, 2)]

    async def test_a_cancelled_timer_never_fires(self, store: Store) -> None:
        now_ms = await store.now_ms()
        kept = timer("a", now_ms + 1_000, timer_id=3)
        await create(store, "a", orchestrator_items=(timer("a", now_ms + 1_000, timer_id=2), kept))

        await turn(store, "a", cancelled_timers=(TimerIdentity(execution_id=1, timer_id=2),))

        await store.advance(1_000)
        assert bodies(await take(store, "a", provider=store.reader)) == [kept.body]

    async def test_a_timer_that_is_already_due_can_be_cancelled(self, store: Store) -> None:
        await create(store, "a", orchestrator_items=(raised("a"),))
        fetched = await take(store, "a")
        await store.provider.enqueue_for_orchestrator(timer("a", await store.now_ms()))
        await store.provider.abandon_orchestration_item(fetched.lock_token)

        await turn(
            store,
            "a",
            poke=False,
            consumed=(fetched.item.messages[0].message_id,),
            cancelled_timers=(TimerIdentity(execution_id=1, timer_id=2),),
        )

        assert await fetch(store) is None

    async def test_cancelling_a_timer_spares_other_instances(self, store: Store) -> None:
        due_ms = await store.now_ms()
        await create(store, "b", orchestrator_items=(timer("b", due_ms),))
        await create(store, "a")

        await turn(store, "a", cancelled_timers=(TimerIdentity(execution_id=1, timer_id=2),))

        assert bodies(await take(store, "b")) == [timer("b", due_ms).body]

    async def test_turns_that_are_committed_at_once_cancel_each_its_timer(
        self, store: Store
    ) -> None:
        due = await store.now_ms() + LOCK_MS
        cancelled = (TimerIdentity(execution_id=1, timer_id=2),)
        instances = ("a", "b", "c", "d")
        for instance in instances:
            await create(store, instance, orchestrator_items=(timer(instance, due),))
            await enqueue(store, raised(instance))
        turns = [(instance, (await take(store, instance)).lock_token) for instance in instances]

        commits = [
            store.provider.ack_orchestration_item(
                token,
                TurnCommit(
                    execution_id=1,
                    history_delta=(event(instance, 2),),
                    cancelled_timers=() if instance == "b" else cancelled,
                ),
            )
            for instance, token in turns
        ]

        assert await outcomes(*commits) == [None] * 4

        await store.advance(LOCK_MS)
        await take(store, "b")
        assert await fetch(store) is None
