"""Deleting many finished roots by a filter, and what the filter must leave alone."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from perdure.client.formats import utc_time
from perdure.conformance.factories import (
    activity,
    continue_as_new,
    create,
    enqueue,
    event,
    finish,
    raised,
    take,
    take_work,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.model.failures import Block, BlockReason
from perdure.model.status import Status
from perdure.providers.records import InstanceQuery


async def ended(store: Store, *instances: str, parent: str | None = None) -> None:
    for instance in instances:
        await create(store, instance, parent=parent)
        await finish(store, instance)


async def left(store: Store) -> list[str]:
    page = await store.admin.list_instances(InstanceQuery())
    return sorted(info.instance_id for info in page.instances)


@checks
@requires("admin")
class TestBulkDeletion:
    verbs = ("delete_instance_bulk",)

    async def test_ids_delete_exactly_those_and_no_filter_deletes_all(self, store: Store) -> None:
        await ended(store, "one", "two", "three", "four")

        result = await store.admin.delete_instance_bulk(InstanceQuery(instance_ids=("one", "two")))
        assert (result.instances, await left(store)) == (2, ["four", "three"])

        result = await store.admin.delete_instance_bulk(InstanceQuery(instance_ids=("unknown",)))
        assert (result.instances, await left(store)) == (0, ["four", "three"])

        result = await store.admin.delete_instance_bulk(InstanceQuery())
        assert (result.instances, await left(store)) == (2, [])

    async def test_running_ones_are_skipped_and_the_limit_counts_roots(self, store: Store) -> None:
        await ended(store, "one", "two", "three", "four")
        await create(store, "busy")
        listed = ("busy", "one", "two", "three", "four")
        query = InstanceQuery(instance_ids=listed)

        deleted = [
            (await store.admin.delete_instance_bulk(query, limit=2)).instances for _ in range(3)
        ]

        assert deleted == [2, 2, 0]
        assert await left(store) == ["busy"]

    async def test_completed_before_is_strict_and_joins_the_ids(self, store: Store) -> None:
        await ended(store, "one", "two", "other")
        times = [
            (await store.admin.get_instance_info(instance)).completed_at_ms
            for instance in ("one", "two")
        ]
        completed_at = [time for time in times if time is not None]
        assert len(completed_at) == 2
        ids = ("one", "two")

        at_the_moment = InstanceQuery(
            instance_ids=ids, completed_before=utc_time(min(completed_at))
        )
        assert (await store.admin.delete_instance_bulk(at_the_moment)).instances == 0

        after = InstanceQuery(instance_ids=ids, completed_before=utc_time(max(completed_at) + 1))
        assert (await store.admin.delete_instance_bulk(after)).instances == 2
        assert await left(store) == ["other"]

    async def test_completed_before_selects_among_all(self, store: Store) -> None:
        await ended(store, "old-1", "old-2")
        await store.advance(store.tick_ms)
        await ended(store, "new")
        completed_at = (await store.admin.get_instance_info("new")).completed_at_ms
        assert completed_at is not None

        before = InstanceQuery(completed_before=utc_time(completed_at))
        assert (await store.admin.delete_instance_bulk(before)).instances == 2
        assert await left(store) == ["new"]

        after = InstanceQuery(completed_before=utc_time(completed_at + 1))
        assert (await store.admin.delete_instance_bulk(after)).instances == 1

    async def test_a_root_that_ended_again_since_it_was_listed_stays(self, store: Store) -> None:
        await ended(store, "again", "other")
        await store.advance(store.tick_ms)
        await ended(store, "later")
        bound = (await store.admin.get_instance_info("later")).completed_at_ms
        assert bound is not None
        list_oldest = store.admin._list_oldest  # noqa: SLF001 - to act right after the listing
        restarted: list[str] = []

        async def list_and_restart(*args: Any, **named: Any) -> list[tuple[int, str]]:
            found = await list_oldest(*args, **named)
            if not restarted:
                await store.admin.delete_instances_atomic(["again"])
                await ended(store, "again")
                restarted.append("again")
            return found

        query = InstanceQuery(completed_before=utc_time(bound))
        with patch.object(store.admin, "_list_oldest", list_and_restart):
            await store.admin.delete_instance_bulk(query)
        # A store that lists and deletes in one transaction leaves no moment to restart it.
        assert await left(store) == [*restarted, "later"]

    async def test_any_query_selects_the_roots_and_the_oldest_go_first(self, store: Store) -> None:
        for instance in ("a-3", "a-1", "b-1", "a-2"):
            await ended(store, instance)
            await store.advance(store.tick_ms)
        await ended(store, "a-child", parent="b-1")
        await create(store, "a-busy")
        query = InstanceQuery(id_prefix="a-", statuses=frozenset({Status.COMPLETED}))

        result = await store.admin.delete_instance_bulk(query, limit=2)
        assert (result.instances, await left(store)) == (2, ["a-2", "a-busy", "a-child", "b-1"])

        other = InstanceQuery(id_prefix="a-", statuses=frozenset({Status.FAILED, Status.RUNNING}))
        assert (await store.admin.delete_instance_bulk(other)).instances == 0

        result = await store.admin.delete_instance_bulk(InstanceQuery(id_prefix="a-"))
        assert (result.instances, await left(store)) == (1, ["a-busy", "a-child", "b-1"])

    async def test_roots_take_their_children_with_them(self, store: Store) -> None:
        await ended(store, "root-1", "root-2", "root-3")
        await ended(store, "child-1a", "child-1b", parent="root-1")
        await ended(store, "child-2", parent="root-2")
        await ended(store, "grandchild-2", parent="child-2")

        result = await store.admin.delete_instance_bulk(InstanceQuery())

        assert (result.instances, result.executions, result.events) == (7, 7, 7)
        assert await left(store) == []

    async def test_no_ids_at_all_delete_nothing(self, store: Store) -> None:
        await ended(store, "one")

        result = await store.admin.delete_instance_bulk(InstanceQuery(instance_ids=()))

        assert (result.instances, await left(store)) == (0, ["one"])

    async def test_a_child_in_the_list_is_skipped(self, store: Store) -> None:
        await ended(store, "root")
        await ended(store, "child", parent="root")

        result = await store.admin.delete_instance_bulk(InstanceQuery(instance_ids=("child",)))

        assert (result.instances, await left(store)) == (0, ["child", "root"])

    async def test_a_tree_with_a_running_descendant_is_skipped(self, store: Store) -> None:
        await ended(store, "root", "other")
        await ended(store, "child", parent="root")
        await create(store, "grandchild", parent="child")

        result = await store.admin.delete_instance_bulk(InstanceQuery())

        assert result.instances == 1
        assert await left(store) == ["child", "grandchild", "root"]

    async def test_a_root_that_will_continue_as_new_is_skipped(self, store: Store) -> None:
        await create(store, "eternal")
        await finish(
            store,
            "eternal",
            Status.CONTINUED_AS_NEW,
            orchestrator_items=(continue_as_new("eternal", 2),),
        )

        result = await store.admin.delete_instance_bulk(InstanceQuery())

        assert (result.instances, await left(store)) == (0, ["eternal"])

    async def test_a_blocked_root_whose_next_start_is_gone_has_ended(self, store: Store) -> None:
        for instance in ("a-1", "a-2"):
            await create(store, instance)
            await finish(store, instance, Status.CONTINUED_AS_NEW)
            await enqueue(store, raised(instance))
            held = await take(store, instance)
            block = Block(reason=BlockReason.LIMIT, message="too much")
            await store.provider.abandon_orchestration_item(held.lock_token, 60_000, block=block)

        plain = InstanceQuery(instance_ids=("a-1",))
        assert (await store.admin.delete_instance_bulk(plain)).instances == 1
        nothing = InstanceQuery(statuses=frozenset())
        assert (await store.admin.delete_instance_bulk(nothing)).instances == 0
        by_status = InstanceQuery(statuses=frozenset({Status.BLOCKED}))
        assert (await store.admin.delete_instance_bulk(by_status)).instances == 1

    async def test_everything_that_was_deleted_is_counted(self, store: Store) -> None:
        await create(store, "one", worker_items=(activity("one"), activity("one", activity_id=3)))
        await finish(store, "one", history_delta=(event("one", 2), event("one", 3)))
        await take_work(store)

        result = await store.admin.delete_instance_bulk(InstanceQuery())

        assert (result.instances, result.executions) == (1, 1)
        assert (result.events, result.messages) == (3, 2)
