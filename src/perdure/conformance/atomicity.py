"""B: a turn is committed as a whole or not at all."""

from __future__ import annotations

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    activity,
    bodies,
    completion,
    create,
    enqueue,
    event,
    fetch,
    fetch_work,
    identity,
    raised,
    start,
    started,
    take,
    take_work,
    timer,
)
from perdure.conformance.harness import Store, checks, outcomes
from perdure.errors import DuplicateEvent, InvalidValue, LockLost
from perdure.model.status import Status
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    KvSet,
    TimerIdentity,
    TurnCommit,
)


def everything(instance: str, *events: int) -> TurnCommit:
    """A commit that changes all that a commit can change."""
    return TurnCommit(
        execution_id=1,
        history_delta=tuple(event(instance, each) for each in events),
        worker_items=(activity(instance),),
        orchestrator_items=(raised(instance), start("child", parent=instance)),
        metadata=ExecutionMetadata(status=Status.COMPLETED, output='"out"'),
        custom_status=CustomStatusChange(value='"half"'),
        kv_changes=(KvSet(key="k", value="v", updated_at_ms=1),),
    )


async def assert_nothing_changed(store: Store, instance: str) -> None:
    """Check that nothing of ``everything`` was written."""
    assert await store.reader.read(instance) == [started(instance)]
    assert await fetch_work(store, provider=store.reader) is None
    assert await store.reader.read("child") == []
    assert await store.reader.get_custom_status(instance) is None
    assert await store.reader.get_kv_all_values(instance) == {}


@checks
class TestAtomicity:
    verbs = ("ack_orchestration_item", "fetch_orchestration_item", "read", "fetch_work_item")

    async def test_a_repeated_event_id_changes_nothing_and_keeps_the_lock(
        self, store: Store
    ) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")

        with pytest.raises(DuplicateEvent):
            await store.provider.ack_orchestration_item(fetched.lock_token, everything("a", 2, 1))

        await assert_nothing_changed(store, "a")
        assert await fetch(store) is None
        await store.provider.ack_orchestration_item(fetched.lock_token, everything("a", 2))
        assert len(await store.reader.read("a")) == 2

    async def test_an_event_id_twice_in_one_commit_changes_nothing(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")

        with pytest.raises(DuplicateEvent):
            await store.provider.ack_orchestration_item(fetched.lock_token, everything("a", 2, 2))

        await assert_nothing_changed(store, "a")

    async def test_a_turn_that_is_ahead_of_the_store_changes_nothing_and_keeps_the_lock(
        self, store: Store
    ) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(fetched.lock_token, everything("a", 3, 4))

        await assert_nothing_changed(store, "a")
        assert await fetch(store) is None
        await store.provider.ack_orchestration_item(fetched.lock_token, everything("a", 2, 3))
        assert len(await store.reader.read("a")) == 3

    async def test_a_turn_without_events_that_is_ahead_of_the_store_consumes_nothing(
        self, store: Store
    ) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                fetched.lock_token, TurnCommit(execution_id=1, after_event_id=2)
            )

        await store.provider.abandon_orchestration_item(fetched.lock_token)
        fetched = await take(store, "a")
        assert bodies(fetched) == [raised("a").body]
        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, after_event_id=1)
        )
        assert await fetch(store) is None

    async def test_a_turn_begins_no_execution_in_its_middle(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                fetched.lock_token,
                TurnCommit(execution_id=2, history_delta=(event("a", 2, execution=2),)),
            )

        assert await store.reader.read("a") == [started("a")]

    async def test_a_hole_among_the_events_of_a_turn_changes_nothing(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(fetched.lock_token, everything("a", 2, 4))

        await assert_nothing_changed(store, "a")

    async def test_an_event_id_below_one_changes_nothing(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(fetched.lock_token, everything("a", 2, 0))

        await assert_nothing_changed(store, "a")

    async def test_all_parts_of_a_commit_become_visible_together(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        events = (started("a"), *(event("a", each) for each in range(2, 6)))
        past_timer, external = timer("a", await store.now_ms() - 1), raised("a")

        await store.provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(
                execution_id=1,
                history_delta=events,
                worker_items=tuple(activity("a", 1, each) for each in (2, 3, 4)),
                orchestrator_items=(past_timer, external),
                metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"),
            ),
        )

        assert tuple(await store.reader.read("a")) == events
        work = [await take_work(store, provider=store.reader) for _ in range(3)]
        assert [item.identity.activity_id for item in work] == [2, 3, 4]
        assert await fetch_work(store) is None
        assert bodies(await take(store, "a")) == [past_timer.body, external.body]

    async def test_a_wrong_token_does_not_release_the_lock(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        await take(store, "a")

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item("wrong", everything("a", 2))

        await assert_nothing_changed(store, "a")
        assert await fetch(store) is None
        await store.advance(LOCK_MS)
        assert len((await take(store, "a")).item.messages) == 1

    async def test_of_two_acks_with_one_token_exactly_one_succeeds(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        token = (await take(store, "a")).lock_token

        results = await outcomes(
            store.provider.ack_orchestration_item(token, everything("a", 2)),
            store.reader.ack_orchestration_item(token, everything("a", 3)),
        )

        assert [type(result) for result in results if result is not None] == [LockLost]
        assert len(await store.reader.read("a")) == 2
        assert await store.reader.get_custom_status("a") == ('"half"', 1)

    async def test_a_refused_commit_leaves_cancelled_work_and_its_messages_alone(
        self, store: Store
    ) -> None:
        fire_at_ms = await store.now_ms() + 60_000
        await create(
            store,
            "a",
            worker_items=(activity("a"),),
            orchestrator_items=(timer("a", fire_at_ms, timer_id=3), completion("a")),
        )
        token = (await take(store, "a")).lock_token
        cancelled = TurnCommit(
            execution_id=1,
            history_delta=(started("a"),),
            cancelled_activities=(identity("a"),),
            cancelled_timers=(TimerIdentity(execution_id=1, timer_id=3),),
        )

        with pytest.raises(DuplicateEvent):
            await store.provider.ack_orchestration_item(token, cancelled)

        assert len(await store.admin.list_work("a")) == 1
        assert len(await store.admin.list_messages("a")) == 2
