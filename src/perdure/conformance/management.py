"""Administration: listing, counting and looking up."""

from __future__ import annotations

import pytest

from perdure.client.formats import utc_time
from perdure.conformance.factories import (
    activity,
    create,
    enqueue,
    enqueue_work,
    event,
    finish,
    next_execution,
    raised,
    start,
    take,
    take_work,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import InvalidValue, NotFound
from perdure.model.status import Status
from perdure.providers.records import CustomStatusChange, InstanceQuery, WorkerInfo


async def listed(store: Store, query: InstanceQuery | None = None) -> list[str]:
    page = await store.admin.list_instances(query)
    assert page.next_cursor is None
    return sorted(info.instance_id for info in page.instances)


@checks
@requires("admin")
class TestListing:
    verbs = ("list_instances", "list_instances_by_status", "count_instances")

    async def test_every_created_instance_is_listed(self, store: Store) -> None:
        for instance in ("one", "two", "three"):
            await create(store, instance)

        assert await listed(store) == ["one", "three", "two"]
        assert await store.admin.count_instances() == 3

    async def test_an_instance_is_found_by_its_status(self, store: Store) -> None:
        await create(store, "ended")
        await finish(store, "ended")
        await create(store, "busy")

        assert await store.admin.list_instances_by_status(Status.COMPLETED) == ["ended"]
        assert await store.admin.list_instances_by_status(Status.RUNNING) == ["busy"]
        assert await store.admin.list_instances_by_status(Status.FAILED) == []

    async def test_the_newest_comes_first(self, store: Store) -> None:
        for instance in ("a", "c", "b"):
            await store.advance(1_000)
            await create(store, instance)

        page = await store.admin.list_instances()

        assert [info.instance_id for info in page.instances] == ["b", "c", "a"]

    async def test_pages_follow_each_other_without_gap_or_double(self, store: Store) -> None:
        # Two share a moment, so that a cursor made of the time alone would lose or repeat one.
        for index in range(7):
            await create(store, f"i-{index}")
            if index % 2:
                await store.advance(1_000)
        seen: list[str] = []
        cursor: str | None = None

        while True:
            page = await store.admin.list_instances(cursor=cursor, limit=2)
            assert 1 <= len(page.instances) <= 2
            seen += [info.instance_id for info in page.instances]
            if (cursor := page.next_cursor) is None:
                break

        assert sorted(seen) == [f"i-{index}" for index in range(7)]
        assert (await store.admin.list_instances(limit=7)).next_cursor is None

    async def test_pages_of_queued_starts_follow_each_other_too(self, store: Store) -> None:
        for index in range(5):
            await enqueue(store, start(f"i-{index}"))
            if index % 2:
                await store.advance(1_000)
        seen: list[str] = []
        cursor: str | None = None

        for _ in range(3):
            page = await store.admin.list_instances(cursor=cursor, limit=2)
            seen += [info.instance_id for info in page.instances]
            cursor = page.next_cursor

        assert cursor is None
        assert sorted(seen) == [f"i-{index}" for index in range(5)]

    async def test_a_newcomer_does_not_disturb_the_pages_of_others(self, store: Store) -> None:
        for index in range(4):
            await create(store, f"i-{index}")
            await store.advance(1_000)
        first = await store.admin.list_instances(limit=2)
        await create(store, "newcomer")

        second = await store.admin.list_instances(cursor=first.next_cursor, limit=2)

        assert [info.instance_id for info in first.instances] == ["i-3", "i-2"]
        assert [info.instance_id for info in second.instances] == ["i-1", "i-0"]

    async def test_a_cursor_that_nobody_gave_out_is_refused(self, store: Store) -> None:
        await create(store, "one")

        for cursor in ("nonsense", "", "💥", "1;drop table instances"):
            with pytest.raises(InvalidValue):
                await store.admin.list_instances(cursor=cursor)

    async def test_each_filter_narrows_the_list(self, store: Store) -> None:
        await create(store, "shop-1", name="Shop", version="1.0.0")
        await create(store, "shop-2", name="Shop", version="2.0.0")
        await create(store, "mail", name="Mail", parent="shop-1")
        await finish(store, "shop-2", output='"Receipt 100%"')
        await enqueue(store, start("later", name="Shop"))

        queries = {
            InstanceQuery(name="Shop"): ["later", "shop-1", "shop-2"],
            InstanceQuery(version="2.0.0"): ["shop-2"],
            InstanceQuery(id_prefix="shop-"): ["shop-1", "shop-2"],
            InstanceQuery(instance_ids=("mail", "unknown")): ["mail"],
            InstanceQuery(instance_ids=()): [],
            InstanceQuery(parent_instance_id="shop-1"): ["mail"],
            InstanceQuery(roots_only=True): ["later", "shop-1", "shop-2"],
            InstanceQuery(statuses=frozenset({Status.PENDING})): ["later"],
            InstanceQuery(statuses=frozenset({Status.PENDING, Status.COMPLETED})): [
                "later",
                "shop-2",
            ],
            InstanceQuery(statuses=frozenset()): [],
            InstanceQuery(text="RECEIPT 100%"): ["shop-2"],
            InstanceQuery(text="100_"): [],
            InstanceQuery(name="Shop", statuses=frozenset({Status.RUNNING})): ["shop-1"],
        }
        for query, expected in queries.items():
            assert await listed(store, query) == expected, query
            assert await store.admin.count_instances(query) == len(expected), query

    async def test_wildcards_of_the_store_mean_themselves(self, store: Store) -> None:
        for instance in ("a%b", "a_b", "axb", "a\\b"):
            await create(store, instance)

        assert await listed(store, InstanceQuery(id_prefix="a%")) == ["a%b"]
        assert await listed(store, InstanceQuery(id_prefix="a_")) == ["a_b"]
        assert await listed(store, InstanceQuery(text="%")) == ["a%b"]
        assert await listed(store, InstanceQuery(text="A\\B")) == ["a\\b"]

    @pytest.mark.parametrize("last", ["-", "a", "\ud7ff", "\uffff", "\U0010ffff"])
    async def test_a_prefix_selects_nothing_beside_it(self, store: Store, last: str) -> None:
        beside = [chr(ord(last) + by) for by in (-1, 1) if ord(last) + by <= 0x10FFFF]
        beside = [each for each in beside if not "\ud800" <= each <= "\udfff"]
        inside = sorted(("s" + last, "s" + last + "x", "s" + last + "\U0010ffff"))
        for instance in (*inside, "s", *("s" + each for each in ("x", *beside))):
            await create(store, instance)

        assert sorted(await listed(store, InstanceQuery(id_prefix="s" + last))) == inside
        assert await store.admin.count_instances(InstanceQuery(id_prefix="s" + last)) == 3

    async def test_time_bounds_are_strict(self, store: Store) -> None:
        await create(store, "one")
        await finish(store, "one")
        info = await store.admin.get_instance_info("one")
        created, completed = info.created_at_ms, info.completed_at_ms
        assert completed is not None

        for query, expected in (
            (InstanceQuery(created_after=utc_time(created)), []),
            (InstanceQuery(created_after=utc_time(created - 1)), ["one"]),
            (InstanceQuery(created_before=utc_time(created)), []),
            (InstanceQuery(created_before=utc_time(created + 1)), ["one"]),
            (InstanceQuery(completed_after=utc_time(completed)), []),
            (InstanceQuery(completed_after=utc_time(completed - 1)), ["one"]),
            (InstanceQuery(completed_before=utc_time(completed)), []),
            (InstanceQuery(completed_before=utc_time(completed + 1)), ["one"]),
        ):
            assert await listed(store, query) == expected, query


@checks
@requires("admin")
class TestLookingUp:
    verbs = (
        "get_instance_info",
        "list_executions",
        "latest_execution_id",
        "get_execution_info",
        "read_history_with_execution_id",
    )

    async def test_the_first_ack_makes_execution_one(self, store: Store) -> None:
        await create(store, "one")

        assert await store.admin.list_executions("one") == [1]
        assert await store.admin.latest_execution_id("one") == 1
        assert await store.admin.list_executions("unknown") == []
        with pytest.raises(NotFound):
            await store.admin.latest_execution_id("unknown")

    async def test_an_instance_shows_what_its_metadata_said(self, store: Store) -> None:
        await create(store, "one", name="Shop", version="1.2.3")

        info = await store.admin.get_instance_info("one")

        assert (info.instance_id, info.name, info.version) == ("one", "Shop", "1.2.3")
        assert (info.execution_id, info.status, info.output) == (1, Status.RUNNING, None)
        assert (info.parent_instance_id, info.completed_at_ms, info.block) == (None, None, None)
        with pytest.raises(NotFound):
            await store.admin.get_instance_info("unknown")

    async def test_an_execution_shows_its_status_and_output(self, store: Store) -> None:
        await create(store, "one")
        await finish(store, "one", output='"bye"', history_delta=(event("one", 2),))

        info = await store.admin.get_execution_info("one", 1)

        assert (info.execution_id, info.status, info.output) == (1, Status.COMPLETED, '"bye"')
        assert info.event_count == 2
        assert info.completed_at_ms is not None
        for instance, execution in (("one", 2), ("unknown", 1)):
            with pytest.raises(NotFound):
                await store.admin.get_execution_info(instance, execution)

    async def test_a_queued_start_is_pending(self, store: Store) -> None:
        await enqueue(store, start("later", version=None))

        info = await store.admin.get_instance_info("later")

        assert (info.status, info.name, info.version) == (Status.PENDING, "TestOrch", None)
        assert info.execution_id == 1
        with pytest.raises(NotFound):
            await store.admin.get_instance_info("unknown")

    async def test_a_start_stays_pending_while_its_first_turn_runs(self, store: Store) -> None:
        await enqueue(store, start("first"))
        await take(store, "first")

        assert (await store.admin.get_instance_info("first")).status is Status.PENDING

    async def test_history_of_each_execution_is_read_whole(self, store: Store) -> None:
        await create(store, "one", history_delta=(event("one", 2), event("one", 3)))
        await next_execution(store, "one", 2)

        first = await store.admin.read_history_with_execution_id("one", 1)
        second = await store.admin.read_history_with_execution_id("one", 2)

        assert [record.event_id for record in first] == [1, 2, 3]
        assert [record.event_id for record in second] == [1]
        assert await store.admin.read_history_with_execution_id("one", 3) == []

    async def test_times_are_written_once_and_updates_are_noticed(self, store: Store) -> None:
        await create(store, "one")
        born = await store.admin.get_instance_info("one")
        began = (await store.admin.get_execution_info("one", 1)).started_at_ms
        await store.advance(10_000)

        await turn(store, "one", custom_status=CustomStatusChange(value="1"))
        info = await store.admin.get_instance_info("one")

        assert born.created_at_ms > 0
        assert info.created_at_ms == born.created_at_ms
        assert info.updated_at_ms >= born.updated_at_ms + 10_000
        assert (await store.admin.get_execution_info("one", 1)).started_at_ms == began


@checks
@requires("admin")
class TestTotals:
    verbs = (
        "get_system_metrics",
        "get_queue_depths",
        "get_store_info",
        "register_worker",
        "list_workers",
    )

    async def test_totals_count_what_exists(self, store: Store) -> None:
        await create(store, "one", history_delta=(event("one", 2),))
        await next_execution(store, "one", 2)
        await create(store, "two")
        await finish(store, "two", Status.FAILED)

        metrics = await store.admin.get_system_metrics()

        assert (metrics.total_instances, metrics.total_executions) == (2, 3)
        assert metrics.total_events == 4
        present = {status: count for status, count in metrics.by_status.items() if count}
        assert present == {Status.RUNNING: 1, Status.FAILED: 1}

    async def test_the_depth_grows_with_each_message(self, store: Store) -> None:
        assert (await store.admin.get_queue_depths()).orchestrator.visible == 0

        await enqueue(store, start("one"), raised("one"))
        await enqueue_work(store, activity("one"))

        depths = await store.admin.get_queue_depths()
        assert (depths.orchestrator.visible, depths.worker.visible) == (2, 1)

    async def test_visible_delayed_and_locked_are_told_apart(self, store: Store) -> None:
        now = await store.now_ms()
        await enqueue(store, start("one"))
        await store.provider.enqueue_for_orchestrator(raised("one"), 60_000)
        await enqueue_work(
            store, activity("one"), activity("one", visible_at_ms=now + 60_000), activity("one")
        )
        await take(store, "one")
        await take_work(store)

        depths = await store.admin.get_queue_depths()

        orchestrator, worker = depths.orchestrator, depths.worker
        assert (orchestrator.visible, orchestrator.delayed, orchestrator.locked) == (0, 1, 1)
        assert (worker.visible, worker.delayed, worker.locked) == (1, 1, 1)
        assert orchestrator.oldest_visible_age_ms is None

    async def test_a_message_that_was_given_back_is_counted_as_visible(self, store: Store) -> None:
        for instance in ("abandoned", "expired"):
            await enqueue(store, start(instance))
            await enqueue_work(store, activity(instance))
        held = await take(store, "abandoned", lock_ms=1_000)
        work = await take_work(store, lock_ms=1_000)
        await take(store, "expired", lock_ms=1_000)
        await take_work(store, lock_ms=1_000)

        await store.provider.abandon_orchestration_item(held.lock_token)
        await store.provider.abandon_work_item(work.lock_token)
        await store.advance(1_000)

        depths = await store.admin.get_queue_depths()
        assert (depths.orchestrator.visible, depths.orchestrator.locked) == (2, 0)
        assert (depths.worker.visible, depths.worker.locked) == (2, 0)

    async def test_the_depth_of_work_is_told_by_name_and_tag(self, store: Store) -> None:
        await enqueue_work(store, activity("one", name="render"))
        await store.advance(20_000)
        await enqueue_work(store, activity("one", name="render", tag="gpu"), activity("two"))
        await enqueue_work(store, activity("three", name="render", tag="gpu"))

        depths = await store.admin.get_queue_depths()

        found = {(each.name, each.tag): each for each in depths.activities}
        plain, gpu = found["render", None], found["render", "gpu"]
        assert len(found) == len(depths.activities) == 3
        assert (plain.visible, gpu.visible, depths.worker.visible) == (1, 2, 4)
        assert plain.oldest_visible_age_ms is not None
        assert gpu.oldest_visible_age_ms is not None
        assert plain.oldest_visible_age_ms - gpu.oldest_visible_age_ms >= 20_000

    async def test_the_age_of_the_oldest_visible_message_is_told(self, store: Store) -> None:
        await enqueue(store, start("one"))
        await enqueue_work(store, activity("one"))
        await store.advance(20_000)
        await enqueue(store, raised("one"))

        depths = await store.admin.get_queue_depths()

        for depth in (depths.orchestrator, depths.worker):
            assert depth.oldest_visible_age_ms is not None
            assert 20_000 <= depth.oldest_visible_age_ms < 25_000

    async def test_the_store_says_where_it_is(self, store: Store) -> None:
        info = await store.admin.get_store_info()

        assert info.provider == store.provider.name
        assert info.provider_version == store.provider.version
        assert info.location
        assert info.moved_to is None

    async def test_a_worker_is_listed_until_its_time_is_up(self, store: Store) -> None:
        worker = WorkerInfo(
            worker_id="w-1",
            host="h",
            process_id=1,
            started_at_ms=1,
            framework_version="0.1.0",
            handlers=(("Shop", "1.0.0"),),
            activities=("charge",),
            slots=4,
            busy=2,
        )
        await store.admin.register_worker(worker, 10_000)
        (seen,) = await store.admin.list_workers()
        assert (seen.worker_id, seen.handlers, seen.busy) == ("w-1", (("Shop", "1.0.0"),), 2)

        await store.advance(6_000)
        await store.admin.register_worker(worker, 10_000)
        await store.advance(6_000)
        assert [info.worker_id for info in await store.admin.list_workers()] == ["w-1"]

        await store.advance(60_000)
        assert await store.admin.list_workers() == []

    async def test_a_worker_that_leaves_is_gone_at_once(self, store: Store) -> None:
        worker = WorkerInfo(
            worker_id="w-1", host="h", process_id=1, started_at_ms=1, framework_version="0.1.0"
        )
        await store.admin.register_worker(worker, 10_000)

        await store.admin.register_worker(worker, 0)

        assert await store.admin.list_workers() == []
