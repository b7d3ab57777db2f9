"""Dropping past executions: the current one always stays, and state outlives them."""

from __future__ import annotations

import pytest

from perdure.client.formats import utc_time
from perdure.conformance.factories import (
    create,
    enqueue,
    event,
    finish,
    next_execution,
    raised,
    start,
    take,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import NotFound
from perdure.model.status import Status
from perdure.providers.records import (
    CustomStatusChange,
    InstanceQuery,
    KvSet,
    PruneOptions,
    TurnCommit,
)


async def with_executions(store: Store, instance: str, count: int) -> None:
    """An instance whose execution ``count`` is running; the ones before continued as new."""
    await create(store, instance)
    for execution in range(2, count + 1):
        await next_execution(store, instance, execution)


@checks
@requires("admin")
class TestPruning:
    verbs = ("prune_executions", "prune_executions_bulk")

    async def test_the_newest_are_kept_and_without_options_the_current(self, store: Store) -> None:
        await with_executions(store, "long", 4)

        result = await store.admin.prune_executions("long", PruneOptions(keep_last=2))
        assert (result.instances_processed, result.executions, result.events) == (1, 2, 2)
        assert await store.admin.list_executions("long") == [3, 4]

        result = await store.admin.prune_executions("long", PruneOptions())
        assert (result.instances_processed, result.executions) == (1, 1)
        assert await store.admin.list_executions("long") == [4]

    async def test_the_current_execution_is_never_pruned(self, store: Store) -> None:
        for keep_last in (None, 0, 1):
            instance = f"keep-{keep_last}"
            await with_executions(store, instance, 4)
            await finish(store, instance)

            result = await store.admin.prune_executions(instance, PruneOptions(keep_last=keep_last))

            assert result.executions == 3
            assert await store.admin.list_executions(instance) == [4]
            assert [record.event_id for record in await store.reader.read(instance)] == [1]
        with pytest.raises(NotFound):
            await store.admin.prune_executions("unknown", PruneOptions(keep_last=0))

    async def test_bulk_pruning_touches_exactly_the_listed(self, store: Store) -> None:
        for instance in ("one", "two", "other"):
            await with_executions(store, instance, 3)
            await finish(store, instance)

        result = await store.admin.prune_executions_bulk(
            InstanceQuery(instance_ids=("one", "two")), PruneOptions()
        )

        assert (result.instances_processed, result.executions, result.events) == (2, 4, 4)
        assert await store.admin.list_executions("one") == [3]
        assert await store.admin.list_executions("other") == [1, 2, 3]

    async def test_more_instances_than_a_page_are_each_pruned_once(self, store: Store) -> None:
        named = [f"i-{number}" for number in range(203)]
        for instance in named:
            await create(store, instance)

        for query in (InstanceQuery(instance_ids=tuple(named)), InstanceQuery()):
            result = await store.admin.prune_executions_bulk(query, PruneOptions())
            assert (result.instances_processed, result.executions) == (len(named), 0)

    async def test_any_query_selects_what_is_pruned_and_the_limit_counts_instances(
        self, store: Store
    ) -> None:
        for instance in ("a-2", "b-1", "a-1", "a-3"):
            await with_executions(store, instance, 2)
            await store.advance(store.tick_ms)
        query = InstanceQuery(id_prefix="a-")

        result = await store.admin.prune_executions_bulk(query, PruneOptions(), limit=2)
        assert (result.instances_processed, result.executions) == (2, 2)
        left = {name: await store.admin.list_executions(name) for name in ("a-1", "a-2", "a-3")}
        assert left == {"a-1": [2], "a-2": [2], "a-3": [1, 2]}

        result = await store.admin.prune_executions_bulk(query, PruneOptions())
        assert (result.instances_processed, result.executions) == (3, 1)
        assert await store.admin.list_executions("b-1") == [1, 2]

    async def test_completed_before_selects_among_all_instances(self, store: Store) -> None:
        for instance in ("old", "new"):
            await with_executions(store, instance, 2)
            await finish(store, instance)
            await store.advance(store.tick_ms)
        await with_executions(store, "busy", 2)
        completed_at = (await store.admin.get_instance_info("new")).completed_at_ms
        assert completed_at is not None

        query = InstanceQuery(completed_before=utc_time(completed_at))
        result = await store.admin.prune_executions_bulk(query, PruneOptions())

        assert (result.instances_processed, result.executions) == (1, 1)
        assert await store.admin.list_executions("old") == [2]
        for instance in ("new", "busy"):
            assert await store.admin.list_executions(instance) == [1, 2]

    async def test_bulk_pruning_leaves_out_a_start_that_is_only_queued(self, store: Store) -> None:
        await with_executions(store, "a-1", 2)
        await store.provider.enqueue_for_orchestrator(start("a-2"))

        for query in (InstanceQuery(), InstanceQuery(id_prefix="a-")):
            result = await store.admin.prune_executions_bulk(query, PruneOptions())
            assert result.instances_processed == 1

    async def test_bulk_pruning_includes_running_instances(self, store: Store) -> None:
        await with_executions(store, "busy", 3)

        result = await store.admin.prune_executions_bulk(
            InstanceQuery(instance_ids=("busy",)), PruneOptions()
        )

        assert (result.instances_processed, result.executions) == (1, 2)
        assert await store.admin.list_executions("busy") == [3]
        assert (await store.admin.get_instance_info("busy")).status is Status.RUNNING

    async def test_completed_before_is_strict(self, store: Store) -> None:
        await with_executions(store, "long", 3)
        ends = [
            (await store.admin.get_execution_info("long", execution)).completed_at_ms or 0
            for execution in (1, 2)
        ]

        early = PruneOptions(completed_before=utc_time(min(ends)))
        assert (await store.admin.prune_executions("long", early)).executions == 0

        late = PruneOptions(completed_before=utc_time(max(ends) + 1))
        assert (await store.admin.prune_executions("long", late)).executions == 2

    async def test_both_options_must_fit(self, store: Store) -> None:
        await with_executions(store, "long", 4)
        everything = await store.now_ms() + 1_000

        result = await store.admin.prune_executions(
            "long", PruneOptions(keep_last=3, completed_before=utc_time(everything))
        )

        assert result.executions == 1
        assert await store.admin.list_executions("long") == [2, 3, 4]

    async def test_an_instance_with_nothing_to_prune_is_still_counted(self, store: Store) -> None:
        await create(store, "single")

        result = await store.admin.prune_executions_bulk(InstanceQuery(), PruneOptions())

        assert (result.instances_processed, result.executions, result.events) == (1, 0, 0)

    async def test_bulk_pruning_includes_children(self, store: Store) -> None:
        await create(store, "root")
        await create(store, "child", parent="root")
        await next_execution(store, "child", 2)

        result = await store.admin.prune_executions_bulk(InstanceQuery(), PruneOptions())

        assert (result.instances_processed, result.executions) == (2, 1)
        assert await store.admin.list_executions("child") == [2]

    async def test_a_turn_in_flight_survives_pruning(self, store: Store) -> None:
        await with_executions(store, "busy", 2)
        await turn(store, "busy", history_delta=(event("busy", 2, 2),))
        await enqueue(store, raised("busy"))
        held = await take(store, "busy")

        await store.admin.prune_executions("busy", PruneOptions())

        await store.provider.ack_orchestration_item(
            held.lock_token, TurnCommit(execution_id=2, history_delta=(event("busy", 3, 2),))
        )
        assert [record.event_id for record in await store.reader.read("busy")] == [1, 2, 3]

    async def test_status_and_state_outlive_the_execution_that_wrote_them(
        self, store: Store
    ) -> None:
        await create(
            store,
            "long",
            custom_status=CustomStatusChange(value='"half"'),
            kv_changes=(KvSet(key="k", value="v", updated_at_ms=1),),
        )
        await next_execution(store, "long", 2)

        await store.admin.prune_executions("long", PruneOptions())

        assert await store.reader.get_custom_status("long") == ('"half"', 1)
        assert await store.reader.get_kv_value("long", "k") == "v"
