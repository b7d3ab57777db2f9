"""A: instances come into being with the first committed turn, from its metadata."""

from __future__ import annotations

import pytest

from perdure.conformance.factories import (
    bodies,
    create,
    enqueue,
    event,
    fetch,
    raised,
    start,
    started,
    take,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.model.status import Status
from perdure.providers.records import EnqueueCondition, ExecutionMetadata, TurnCommit


@checks
class TestInstanceCreation:
    verbs = ("enqueue_for_orchestrator", "fetch_orchestration_item", "ack_orchestration_item")

    async def test_an_instance_is_created_by_the_metadata_of_its_first_turn(
        self, store: Store
    ) -> None:
        await enqueue(store, start("a", version="1.0.0"))

        fetched = await take(store, "a")
        metadata = ExecutionMetadata(name="TestOrch", version="1.0.5")
        await store.provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(execution_id=1, history_delta=(started("a"),), metadata=metadata),
        )

        assert (fetched.item.name, fetched.item.execution_id) == ("TestOrch", 1)
        assert fetched.item.history == ()
        again = await turn(store, "a")
        assert (again.item.name, again.item.version) == ("TestOrch", "1.0.5")
        assert again.item.history == (started("a"),)

    async def test_enqueueing_a_start_creates_no_execution(self, store: Store) -> None:
        await enqueue(store, start("a"))

        assert await store.reader.read("a") == []
        assert await store.admin.list_executions("a") == []

    @pytest.mark.parametrize("has_message", [False, True])
    async def test_a_start_of_an_id_that_has_only_history_is_pending(
        self, store: Store, has_message: bool
    ) -> None:
        await store.provider.append_with_execution("a", 1, [event("a", 1)])
        if has_message:
            await enqueue(store, raised("a"))

        await enqueue(store, start("a", "Shop", "1.0.0"))

        info = await store.admin.get_instance_info("a")
        assert (info.name, info.version, info.status) == ("Shop", "1.0.0", Status.PENDING)
        taken = await store.provider.enqueue_for_orchestrator(
            start("a"), condition=EnqueueCondition.ABSENT
        )
        assert not taken
        fetched = await take(store, "a")
        assert fetched.item.history == (event("a", 1),)
        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, history_delta=(event("a", 2),))
        )
        assert await store.reader.read("a") == [event("a", 1), event("a", 2)]

    async def test_an_instance_is_as_old_as_the_start_that_its_first_turn_consumes(
        self, store: Store
    ) -> None:
        await enqueue(store, raised("a"))
        await store.advance(1_000)
        await enqueue(store, start("a"))
        pending = await store.admin.get_instance_info("a")
        await store.advance(1_000)
        fetched = await take(store, "a")
        event_id, start_id = [delivery.message_id for delivery in fetched.item.messages]
        commit = TurnCommit(
            execution_id=1,
            history_delta=(started("a"),),
            metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"),
            consumed=(start_id,),
        )
        await store.provider.ack_orchestration_item(fetched.lock_token, commit)

        info = await store.admin.get_instance_info("a")
        assert info.created_at_ms == pending.created_at_ms < info.updated_at_ms
        again = await take(store, "a")
        assert [delivery.message_id for delivery in again.item.messages] == [event_id]

    async def test_an_instance_is_not_as_old_as_a_start_that_is_not_visible_yet(
        self, store: Store
    ) -> None:
        await store.provider.enqueue_for_orchestrator(start("a", "Later"), delay_ms=60_000)
        await store.advance(1_000)
        await enqueue(store, start("a", "Now"))
        sent_ms = await store.now_ms()
        await store.advance(1_000)
        fetched = await take(store, "a")
        commit = TurnCommit(
            execution_id=1,
            history_delta=(started("a"),),
            metadata=ExecutionMetadata(name="Now", version="1.0.0"),
        )
        await store.provider.ack_orchestration_item(fetched.lock_token, commit)

        info = await store.admin.get_instance_info("a")
        assert abs(info.created_at_ms - sent_ms) <= store.tick_ms

    async def test_a_start_is_fetched_before_its_instance_exists(self, store: Store) -> None:
        await enqueue(store, start("a"))

        fetched = await take(store, "a")

        assert len(fetched.item.messages) == 1

    async def test_a_start_without_version_takes_the_version_of_its_metadata(
        self, store: Store
    ) -> None:
        await enqueue(store, start("a", version=None))

        first = await turn(
            store,
            "a",
            poke=False,
            history_delta=(started("a"),),
            metadata=ExecutionMetadata(name="TestOrch", version="2.0.0"),
        )

        assert first.item.version is None
        assert (await turn(store, "a")).item.version == "2.0.0"

    async def test_of_two_starts_the_one_sent_first_says_who_it_is(self, store: Store) -> None:
        """Whichever of the two became visible first."""
        await store.provider.enqueue_for_orchestrator(start("a", name="Early"), delay_ms=60_000)
        await enqueue(store, start("a", name="Late"))
        await store.advance(60_000)

        fetched = await take(store, "a")

        assert (fetched.item.name, len(fetched.item.messages)) == ("Early", 2)

    async def test_only_a_start_of_the_batch_says_who_it_is(self, store: Store) -> None:
        await store.provider.enqueue_for_orchestrator(start("a", "Later", "9.0.0"), 60_000)
        await enqueue(store, start("a", "Now", "1.0.0"))

        fetched = await take(store, "a")

        assert (fetched.item.name, fetched.item.version) == ("Now", "1.0.0")
        assert bodies(fetched) == [start("a", "Now", "1.0.0").body]

    async def test_a_child_is_created_by_its_own_first_turn(self, store: Store) -> None:
        child = start("child", "ChildOrch", "3.0.0", parent="parent")
        await create(store, "parent", orchestrator_items=(child,))

        assert await store.reader.read("child") == []
        first = await turn(
            store,
            "child",
            poke=False,
            history_delta=(started("child", name="ChildOrch"),),
            metadata=ExecutionMetadata(
                name="ChildOrch", version="3.1.0", parent_instance_id="parent"
            ),
        )
        assert (first.item.name, first.item.version) == ("ChildOrch", "3.0.0")
        again = await turn(store, "child")
        assert (again.item.version, again.item.parent_instance_id) == ("3.1.0", "parent")
        assert await fetch(store) is None
