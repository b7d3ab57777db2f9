"""A: instances come into being with the first committed turn, from its metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.conformance.factories import (
    bodies,
    create,
    enqueue,
    fetch,
    start,
    started,
    take,
    turn,
)
from perdure.conformance.harness import checks
from perdure.providers.items import ExecutionMetadata, TurnCommit

if TYPE_CHECKING:
    from perdure.conformance.harness import Store


@checks
class TestInstanceCreation:
    verbs = ("enqueue_for_orchestrator", "fetch_orchestration_item", "ack_orchestration_item")

    async def test_c001_an_instance_is_created_by_the_metadata_of_its_first_turn(
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

    async def test_c001_enqueueing_a_start_creates_no_execution(self, store: Store) -> None:
        await enqueue(store, start("a"))

        assert await store.reader.read("a") == []
        assert await store.admin.list_executions("a") == []

    async def test_c002_a_start_is_fetched_before_its_instance_exists(self, store: Store) -> None:
        await enqueue(store, start("a"))

        fetched = await take(store, "a")

        assert len(fetched.item.messages) == 1

    async def test_c003_a_start_without_version_takes_the_version_of_its_metadata(
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

    async def test_c003_only_a_start_of_the_batch_says_who_it_is(self, store: Store) -> None:
        await store.provider.enqueue_for_orchestrator(start("a", "Later", "9.0.0"), 60_000)
        await enqueue(store, start("a", "Now", "1.0.0"))

        fetched = await take(store, "a")

        assert (fetched.item.name, fetched.item.version) == ("Now", "1.0.0")
        assert bodies(fetched) == [start("a", "Now", "1.0.0").body]

    async def test_c004_a_child_is_created_by_its_own_first_turn(self, store: Store) -> None:
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
