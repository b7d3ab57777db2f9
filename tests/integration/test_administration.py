"""Operations of a client for operators: lists, counts, trees, deletion, pruning, waiting."""

import asyncio
import datetime

import pytest

from integration.conditions import reached, until, waiting
from patience import HANG_SECONDS
from perdure import (
    InstanceQuery,
    OrchestrationFailed,
    Runtime,
    Status,
    activity,
    continue_as_new,
    orchestration,
    set_custom_status,
    state,
    wait_for_event,
)
from perdure.client.damage import check_instances
from perdure.client.moving import decode_snapshot
from perdure.errors import (
    InstanceFinished,
    InstanceStillRunning,
    InvalidValue,
    NotARoot,
    NotFound,
    WaitTimeout,
)
from perdure.providers.records import PruneOptions


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def quick(value: int) -> int:
    return await echo(value)


@orchestration
async def gate() -> str:
    return await wait_for_event("go", str)


@orchestration
async def parent() -> int:
    return await quick.options(id="kid")(1)


@orchestration
async def rounds(left: int) -> str:
    set_custom_status({"left": left})
    await echo(left)
    if left:
        continue_as_new(left - 1)
    return "over"


HANDLERS = [quick, gate, parent, rounds, echo]


async def test_instances_are_listed_filtered_counted_and_paged(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        for number in range(12):
            await (await runtime.start(quick, number, id=f"q-{number:02}")).result(HANG_SECONDS)
        await runtime.start(gate, id="waits")
        await waiting(runtime, "waits")
        done = InstanceQuery(statuses=frozenset({Status.COMPLETED}))

        assert await runtime.admin.count() == 13
        assert await runtime.admin.count(done) == 12
        assert await runtime.admin.count(InstanceQuery(name="gate")) == 1
        assert await runtime.admin.count(InstanceQuery(id_prefix="q-1")) == 2
        seen, cursor = [], None
        while True:
            page, cursor = await runtime.admin.page(done, cursor=cursor, limit=5)
            seen += [view.id for view in page]
            if cursor is None:
                break
        assert seen == [f"q-{number:02}" for number in reversed(range(12))]
        with pytest.raises(InvalidValue):
            await runtime.admin.page(limit=0)


async def test_a_tree_is_deleted_as_a_whole(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        await (await runtime.start(parent, id="p")).result(HANG_SECONDS)
        with pytest.raises(NotARoot):
            await runtime.admin.delete("kid")

        assert (await runtime.admin.delete("p")).instances == 2
        with pytest.raises(NotFound):
            await runtime.describe("kid")


async def test_a_running_instance_is_deleted_only_by_force(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        await runtime.start(gate, id="g")
        await waiting(runtime, "g")
        with pytest.raises(InstanceStillRunning):
            await runtime.admin.delete("g")
        await runtime.admin.delete("g", force=True)
        again = await runtime.start(gate, id="g")
        await again.raise_event("go", "second life")

        assert await again.result(HANG_SECONDS) == "second life"


async def test_an_instance_that_starts_children_all_the_time_is_deleted_by_force(make_runtime):
    @orchestration
    async def child(n: int) -> int:
        return n

    @orchestration
    async def busy() -> None:
        for n in range(1000):
            await asyncio.gather(child(n), child(n))

    async with make_runtime([busy, child]) as runtime:
        for number in range(5):
            root = await runtime.start(busy, id=f"busy-{number}")

            async def is_growing(root=root):
                return len((await runtime.admin.tree(root.id)).instance_ids) > 5

            await until(is_growing)
            await runtime.admin.delete(root.id, force=True)

        assert await runtime.admin.count() == 0


async def test_finished_roots_are_deleted_in_bulk(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        for number in range(3):
            await (await runtime.start(quick, number)).result(HANG_SECONDS)
        await runtime.start(gate, id="g")
        await waiting(runtime, "g")

        assert (await runtime.admin.delete_many(InstanceQuery())).instances == 3
        assert await runtime.admin.count() == 1


async def test_all_that_fit_are_deleted_however_many_or_up_to_the_limit(make_provider):
    async with Runtime(make_provider(), HANDLERS) as runtime:
        handles = await runtime.start_many(quick, [(f"q-{n}", (n,)) for n in range(1_050)])
        await asyncio.gather(*(handle.result(HANG_SECONDS) for handle in handles))

        assert (await runtime.admin.delete_many(InstanceQuery(), limit=20)).instances == 20
        assert (await runtime.admin.delete_many(InstanceQuery())).instances == 1_030


async def test_any_query_selects_what_is_deleted_and_what_is_pruned(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        for number in range(4):
            await (await runtime.start(quick, number, id=f"q-{number}")).result(HANG_SECONDS)
        await (await runtime.start(rounds, 2, id="r-1")).result(HANG_SECONDS)
        await runtime.start(gate, id="q-gate")
        await waiting(runtime, "q-gate")

        pruned = await runtime.admin.prune_many(InstanceQuery(id_prefix="r-"))
        limited = await runtime.admin.delete_many(InstanceQuery(id_prefix="q-"), limit=1)
        left = [view.id async for view in runtime.admin.instances(InstanceQuery(name="quick"))]
        deleted = await runtime.admin.delete_many(InstanceQuery(id_prefix="q-"))

        assert (pruned.executions, limited.instances, deleted.instances) == (2, 1, 3)
        assert sorted(left) == ["q-1", "q-2", "q-3"]
        assert {view.id async for view in runtime.admin.instances()} == {"r-1", "q-gate"}


async def test_past_executions_are_pruned_and_the_last_one_stays(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(rounds, 4, id="r")
        assert await handle.result(HANG_SECONDS) == "over"
        assert len(await runtime.admin.executions("r")) == 5

        assert (await runtime.admin.prune("r", PruneOptions(keep_last=3))).executions == 2
        assert (await runtime.admin.prune_many(InstanceQuery())).executions == 2
        assert [e.execution_id for e in await runtime.admin.executions("r")] == [5]
        assert (await handle.describe()).custom_status == {"left": 0}


async def test_a_status_change_wakes_its_waiters(make_runtime):
    @orchestration
    async def stages() -> None:
        for stage in ("one", "two"):
            set_custom_status(stage)
            await wait_for_event("next", None)

    async with make_runtime([stages]) as runtime:
        handle = await runtime.start(stages, id="s")
        first = await handle.wait_for_status_change(0, 10)
        assert first.custom_status == "one"
        change = asyncio.ensure_future(
            handle.wait_for_status_change(first.custom_status_version, 10)
        )
        await handle.raise_event("next")
        assert (await change).custom_status == "two"
        with pytest.raises(WaitTimeout):
            await handle.wait_for_status_change(2, 0.05)


async def test_workers_and_the_store_describe_themselves(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        await until(runtime.admin.workers)
        (worker,) = await runtime.admin.workers()

        assert worker.worker_id == runtime.worker_id
        assert ("gate", "1.0.0") in worker.handlers
        assert (await runtime.admin.store()).provider == runtime.provider.name


async def test_queue_depths_and_metrics_follow_the_work(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        await runtime.start(quick, 1, id="later", delay=3600)
        depths = await runtime.admin.queue_depths()
        assert depths.orchestrator.delayed == 1
        await (await runtime.start(quick, 2, id="now")).result(HANG_SECONDS)
        await reached(runtime, "now", Status.COMPLETED)
        assert (await runtime.admin.metrics()).by_status[Status.COMPLETED] == 1


# --- state and sizes of an instance


@orchestration
async def staged() -> str:
    state["stage"] = "new"
    await wait_for_event("pay", int)
    state["stage"] = "paid"
    await wait_for_event("go", int)
    return "done"


async def test_a_client_waits_for_a_value_of_the_state(make_runtime):
    async with make_runtime([staged]) as runtime:
        handle = await runtime.start(staged, id="s")
        assert await handle.wait_for_state("stage", str, timeout=HANG_SECONDS) == "new"

        waiting = asyncio.ensure_future(
            handle.wait_for_state("stage", str, until="paid".__eq__, timeout=HANG_SECONDS)
        )
        await handle.raise_event("pay", 1)
        assert await waiting == "paid"

        with pytest.raises(
            WaitTimeout, match=r"has not set state\['other'\] in time .* event 'go'"
        ):
            await handle.wait_for_state("other", timeout=0)
        unheard = asyncio.ensure_future(handle.wait_for_state("other", timeout=HANG_SECONDS))
        await handle.raise_event("go", 1)
        with pytest.raises(InstanceFinished, match="without that value"):
            await unheard


async def test_the_sizes_of_an_instance_are_told(make_runtime):
    async with make_runtime([staged]) as runtime:
        handle = await runtime.start(staged, id="s")
        await handle.wait_for_state("stage", timeout=HANG_SECONDS)
        events = await handle.history()

        stats = await handle.stats()

    assert stats.history_events == len(events)
    assert stats.history_bytes > 100 * len(events)
    assert (stats.state_keys, stats.state_bytes) == (1, len('stage"new"'))
    assert (stats.pending_messages, stats.pending_activities) == (0, 0)


async def test_old_state_of_an_ended_instance_is_pruned(make_runtime):
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    async with make_runtime([staged]) as runtime:
        handle = await runtime.start(staged, id="s")
        with pytest.raises(InstanceStillRunning, match="del state"):
            await runtime.admin.prune_state("s", updated_before=later)
        await handle.raise_event("pay", 1)
        await handle.raise_event("go", 1)
        assert await handle.result(HANG_SECONDS) == "done"

        long_ago = later - datetime.timedelta(days=9)
        assert await runtime.admin.prune_state("s", updated_before=long_ago) == 0
        assert await handle.state("stage") == "paid"
        assert await runtime.admin.prune_state("s", updated_before=later) == 1
        assert await handle.state("stage") is None
        assert await handle.result(HANG_SECONDS) == "done"
        assert [each async for each in check_instances(runtime.provider) if each] == []


async def test_operators_retry_rerun_and_export_from_python(make_runtime):
    tries = []

    @activity
    async def shaky() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not yet")
        return len(tries)

    @orchestration
    async def flow() -> int:
        return await shaky()

    async with make_runtime([flow, shaky]) as runtime:
        handle = await runtime.start(flow, id="f")
        with pytest.raises(OrchestrationFailed):
            await handle.result(HANG_SECONDS)

        retried = await runtime.admin.retry("f")
        assert retried is not None
        assert retried.again == ("shaky",)
        assert await runtime.get("f").result(HANG_SECONDS) == 2
        with pytest.raises(InvalidValue, match="latest"):
            await runtime.admin.rerun("f", version="latest")
        again = await runtime.admin.rerun("f")
        assert again.startswith("f-rerun-")
        assert await runtime.get(again).result(HANG_SECONDS) == 3
        *lines, end = [line async for line in runtime.admin.export("f")]

    assert [decode_snapshot(line).instance_id for line in lines] == ["f"]
    assert end == '{"perdure_export_end":1}'
