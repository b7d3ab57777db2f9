"""Operations that share a commit take few statements, however many they are."""

from __future__ import annotations

import asyncio

import apsw
import msgspec
import pytest

from perdure.clock import ManualClock
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    ExecutionMetadata,
    HistoryRecord,
    OrchestrationFilter,
    OrchestratorMessage,
    StartRouting,
    TurnCommit,
    WorkerMessage,
)
from perdure.providers.sqlite import SqliteProvider, database

KEEP_MS = 1_000
SHOP = OrchestrationFilter(handlers=frozenset({("Shop", "1.0.0")}))


def start_of(instance_id):
    routing = StartRouting(name="Shop", version="1.0.0")
    return OrchestratorMessage(
        instance_id=instance_id, kind="StartOrchestration", body="{}", start=routing
    )


def work_of(number, body, instance_id="x", claim=None):
    identity = ActivityIdentity(instance_id=instance_id, execution_id=1, activity_id=number)
    return WorkerMessage(identity=identity, name="act", body=body, claim=claim)


def test_big_items_are_fetched_together_with_small_ones(tmp_path):
    bodies = ['"' * 900_000 if number % 7 == 3 else f"{number}" for number in range(1, 40)]

    async def fetch():
        async with SqliteProvider(tmp_path / "store.db", durability="relaxed") as provider:
            for number, body in enumerate(bodies, 1):
                await provider.enqueue_for_worker(work_of(number, body))
            return await provider.fetch_work_items(100, KEEP_MS, 0)

    fetched = asyncio.run(fetch())

    assert [work.body for work in fetched] == bodies
    assert {work.attempt_count for work in fetched} == {1}


def test_an_activity_behind_many_others_is_found_by_its_name(tmp_path):
    async def fetch():
        async with SqliteProvider(tmp_path / "store.db", durability="relaxed") as provider:
            for number in range(1, 61):
                await provider.enqueue_for_worker(work_of(number, "[]"))
            wanted = frozenset({"rare", "missing"})
            nothing = await provider.fetch_work_item(KEEP_MS, 0, activities=wanted)
            rare = msgspec.structs.replace(work_of(61, "[]"), name="rare")
            await provider.enqueue_for_worker(rare)
            return nothing, await provider.fetch_work_item(KEEP_MS, 0, activities=wanted)

    nothing, found = asyncio.run(fetch())

    assert nothing is None
    assert (found.name, found.identity.activity_id) == ("rare", 61)


@pytest.fixture
def statements(monkeypatch):
    """The statements that writers run from now on."""
    seen = []
    adopt = database.FileDatabase.adopt

    def watch(self, connection):
        adopt(self, connection)
        connection.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: seen.append(event["sql"]))

    monkeypatch.setattr(database.FileDatabase, "adopt", watch)
    return seen


def test_a_burst_of_turns_takes_few_statements(tmp_path, statements):
    ids = [f"x{number:03}" for number in range(200)]

    def first_of(instance_id):
        claim = Claim(lock_token=f"work of {instance_id}", lock_timeout_ms=KEEP_MS)
        return TurnCommit(
            execution_id=1,
            history_delta=(
                HistoryRecord(event_id=1, data="1"),
                HistoryRecord(event_id=2, data="2"),
            ),
            worker_items=(work_of(2, "[]", instance_id, claim),),
            metadata=ExecutionMetadata(name="Shop", version="1.0.0"),
            keep_lock_ms=KEEP_MS,
        )

    def last_of(instance_id):
        return TurnCommit(
            execution_id=1,
            history_delta=(HistoryRecord(event_id=3, data="3"),),
            metadata=ExecutionMetadata(status=Status.COMPLETED, output="1"),
            consumed=(),
            settled_work=(f"work of {instance_id}",),
        )

    async def run():
        clock = ManualClock(1_800_000_000_000)
        async with SqliteProvider(tmp_path / "s.db", clock=clock, durability="relaxed") as provider:
            statements.clear()
            begun = await asyncio.gather(
                *[
                    provider.start_orchestration_item(
                        start_of(each), first_of(each), f"turn of {each}", "me"
                    )
                    for each in ids
                ]
            )
            await asyncio.gather(
                *[provider.ack_orchestration_item(f"turn of {each}", last_of(each)) for each in ids]
            )
            count = len(statements)
            metrics = await provider.admin.get_system_metrics()
        return begun, count, metrics

    begun, count, metrics = asyncio.run(run())

    assert all(begun)
    assert (metrics.by_status, metrics.total_events) == ({Status.COMPLETED: 200}, 600)
    assert count < 100


def test_a_burst_of_starts_from_the_queue_takes_few_statements(tmp_path, statements):
    ids = [f"x{number:03}" for number in range(200)]

    def first_of(fetched):
        claim = Claim(lock_token=f"work of {fetched.item.instance_id}", lock_timeout_ms=KEEP_MS)
        return TurnCommit(
            execution_id=1,
            history_delta=(HistoryRecord(event_id=1, data="1"),),
            worker_items=(work_of(2, "[]", fetched.item.instance_id, claim),),
            metadata=ExecutionMetadata(name="Shop", version="1.0.0", framework_version=(1, 2, 3)),
            consumed=tuple(each.message_id for each in fetched.item.messages),
            keep_lock_ms=KEEP_MS,
        )

    async def run():
        clock = ManualClock(1_800_000_000_000)
        async with SqliteProvider(tmp_path / "s.db", clock=clock, durability="relaxed") as provider:
            await provider.enqueue_many_for_orchestrator([start_of(each) for each in ids])
            statements.clear()
            fetched = await asyncio.gather(
                *[provider.fetch_orchestration_item(KEEP_MS, 0, SHOP, "me") for _ in range(250)]
            )
            took = [each for each in fetched if each is not None]
            await asyncio.gather(
                *[provider.ack_orchestration_item(each.lock_token, first_of(each)) for each in took]
            )
            count = len(statements)
            metrics = await provider.admin.get_system_metrics()
            depths = await provider.admin.get_queue_depths()
        return took, count, metrics, depths

    took, count, metrics, depths = asyncio.run(run())

    assert [each.item.instance_id for each in took] == ids
    assert metrics.by_status == {Status.RUNNING: 200}
    assert (depths.orchestrator.locked, depths.worker.locked) == (0, 200)
    assert count < 100
