"""The documented views show instances, events, work and locks to plain SQL."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from perdure.clock import ManualClock, SystemClock
from perdure.model.failures import Block, BlockReason
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    CustomStatusChange,
    ExecutionMetadata,
    HistoryRecord,
    OrchestratorMessage,
    SessionFetch,
    StartRouting,
    TurnCommit,
    WorkerMessage,
)
from perdure.providers.sqlite import SqliteProvider

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sql-views.md"
NOW = 1_800_000_000_125
NOW_TEXT = "2027-01-15T08:00:00.125Z"
KEEP_MS = 60_000
VIEWS = ("v_instances", "v_events", "v_work", "v_locks")


def start_of(instance_id, parent=None):
    routing = StartRouting(name="Shop", version="1.0.0", parent_instance_id=parent)
    return OrchestratorMessage(
        instance_id=instance_id, kind="StartOrchestration", body="{}", start=routing
    )


def work_of(instance_id, activity_id, **more):
    identity = ActivityIdentity(instance_id=instance_id, execution_id=1, activity_id=activity_id)
    return WorkerMessage(identity=identity, name="charge", body="[]", **more)


def first_turn(*work, keep_lock_ms=KEEP_MS, **metadata):
    data = f'{{"type":"OrchestrationStarted","timestamp_ms":{NOW}}}'
    return TurnCommit(
        execution_id=1,
        history_delta=(
            HistoryRecord(event_id=1, data=data),
            HistoryRecord(event_id=2, data="not JSON"),
        ),
        worker_items=work,
        metadata=ExecutionMetadata(name="Shop", version="1.0.0", **metadata),
        keep_lock_ms=keep_lock_ms,
    )


@pytest.fixture
def query(tmp_path):
    """Fill a store with a coroutine function, then ask a view of it with the standard library."""
    path = tmp_path / "store.db"

    def query(fill, sql, clock=None):
        async def run():
            async with SqliteProvider(path, clock=clock or ManualClock(NOW)) as provider:
                await fill(provider)

        asyncio.run(run())
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(sql)]

    return query


async def fill_nothing(_provider):
    pass


def documented_columns(view):
    section = PAGE.read_text().split(f"## {view}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("view", VIEWS)
def test_every_column_is_documented(query, view):
    columns = query(fill_nothing, f"SELECT name FROM pragma_table_info('{view}')")

    assert [row["name"] for row in columns] == documented_columns(view)


def test_instances_show_their_latest_execution(query):
    async def fill(provider):
        await provider.start_orchestration_item(
            start_of("order", "root"),
            msgspec.structs.replace(
                first_turn(
                    keep_lock_ms=None,
                    parent_instance_id="root",
                    status=Status.COMPLETED,
                    output='"paid"',
                    framework_version=(1, 2, 3),
                ),
                custom_status=CustomStatusChange(value='"packing"'),
            ),
            "t" * 32,
            "me",
        )

    assert query(fill, "SELECT * FROM v_instances") == [
        {
            "instance_id": "order",
            "name": "Shop",
            "version": "1.0.0",
            "status": "Completed",
            "execution_id": 1,
            "parent_instance_id": "root",
            "framework_version": "1.2.3",
            "output": '"paid"',
            "custom_status": '"packing"',
            "custom_status_version": 1,
            "block": None,
            "created_at": NOW_TEXT,
            "created_at_ms": NOW,
            "updated_at": NOW_TEXT,
            "updated_at_ms": NOW,
            "completed_at": NOW_TEXT,
            "completed_at_ms": NOW,
        }
    ]


def test_an_instance_shows_the_time_of_a_turn_that_changed_nothing_else(query):
    clock = ManualClock(NOW)

    async def fill(provider):
        await provider.start_orchestration_item(start_of("order"), first_turn(), "t" * 32, "me")
        clock.advance(1_000)
        plain = TurnCommit(execution_id=1, consumed=(), keep_lock_ms=KEEP_MS)
        await provider.ack_orchestration_item("t" * 32, plain)

    (row,) = query(fill, "SELECT status, created_at_ms, updated_at_ms FROM v_instances", clock)

    assert row == {"status": "Running", "created_at_ms": NOW, "updated_at_ms": NOW + 1_000}


def test_queued_starts_are_instances_that_wait(query):
    async def fill(provider):
        for instance_id in ("blocked", "paused", "pending"):
            await provider.enqueue_for_orchestrator(start_of(instance_id, "root"))
        fetched = await provider.fetch_orchestration_item(KEEP_MS, 0)
        assert fetched.item.instance_id == "blocked"
        block = Block(reason=BlockReason.POISON, message="no", since_ms=NOW)
        await provider.abandon_orchestration_item(fetched.lock_token, 1_000, block=block)
        await provider.admin.suspend_instance("paused")

    rows = query(
        fill,
        "SELECT instance_id, name, version, status, parent_instance_id, created_at_ms,"
        " block IS NOT NULL AS has_block FROM v_instances ORDER BY instance_id",
    )

    assert [list(row.values()) for row in rows] == [
        ["blocked", "Shop", "1.0.0", "Blocked", "root", NOW, 1],
        ["paused", "Shop", "1.0.0", "Paused", "root", NOW, 0],
        ["pending", "Shop", "1.0.0", "Pending", "root", NOW, 0],
    ]


def test_an_instance_that_continues_as_new_is_shown_once(query):
    async def fill(provider):
        ends = first_turn(status=Status.CONTINUED_AS_NEW, keep_lock_ms=None)
        again = msgspec.structs.replace(ends, orchestrator_items=(start_of("order"),))
        await provider.start_orchestration_item(start_of("order"), again, "t" * 32, "me")

    rows = query(fill, "SELECT instance_id, status FROM v_instances")

    assert rows == [{"instance_id": "order", "status": "ContinuedAsNew"}]


def test_events_show_their_type_and_time(query):
    async def fill(provider):
        await provider.start_orchestration_item(start_of("order"), first_turn(), "t" * 32, "me")

    first, second = query(fill, "SELECT * FROM v_events ORDER BY event_id")

    assert first["event_type"] == "OrchestrationStarted"
    assert (first["recorded_at"], first["recorded_at_ms"]) == (NOW_TEXT, NOW)
    assert second == {
        "instance_id": "order",
        "execution_id": 1,
        "event_id": 2,
        "event_type": None,
        "recorded_at": None,
        "recorded_at_ms": None,
        "data": "not JSON",
    }


def test_work_shows_if_a_worker_can_take_it(query):
    clock = SystemClock()
    now = clock.now_ms()

    async def fill(provider):
        claim = Claim(lock_token="w" * 32, lock_timeout_ms=KEEP_MS)
        await provider.start_orchestration_item(
            start_of("order"),
            first_turn(
                work_of("order", 2, claim=claim),
                work_of("order", 3, tag="gpu", visible_at_ms=now + KEEP_MS),
                work_of("order", 4, session_id="s"),
            ),
            "t" * 32,
            "me",
        )
        await provider.enqueue_for_worker(work_of("order", 5))
        fetched = await provider.fetch_work_item(KEEP_MS, 0)
        assert fetched.identity.activity_id == 5

    rows = query(fill, "SELECT * FROM v_work ORDER BY activity_id", clock)

    assert [(row["activity_id"], row["state"], row["attempt_count"]) for row in rows] == [
        (2, "locked", 1),
        (3, "delayed", 0),
        (4, "ready", 0),
        (5, "locked", 1),
    ]
    assert [(row["tag"], row["session_id"]) for row in rows[1:3]] == [("gpu", None), (None, "s")]
    for row in rows:
        assert row["enqueued_at_ms"] >= now
        if row["state"] == "locked":
            assert row["locked_until_ms"] == row["locked_at_ms"] + KEEP_MS
            assert row["locked_at"].startswith("20")
        else:
            assert (row["locked_at"], row["locked_at_ms"], row["locked_until"]) == (None,) * 3


def test_locks_show_who_holds_what_since_when(query):
    clock = ManualClock(NOW)

    async def fill(provider):
        await provider.start_orchestration_item(start_of("kept"), first_turn(), "t" * 32, "me")
        await provider.enqueue_for_orchestrator(start_of("taken"))
        await provider.fetch_orchestration_item(KEEP_MS, 0, owner="other")
        await provider.enqueue_for_worker(work_of("kept", 2, session_id="s"))
        await provider.fetch_work_item(
            KEEP_MS, 0, SessionFetch(owner_id="worker", lock_timeout_ms=KEEP_MS)
        )
        clock.advance(1_000)
        plain = TurnCommit(execution_id=1, consumed=(), keep_lock_ms=KEEP_MS)
        await provider.ack_orchestration_item("t" * 32, plain)

    rows = query(fill, "SELECT * FROM v_locks ORDER BY kind, instance_id", clock)

    assert [list(row.values()) for row in rows] == [
        [
            *("instance", "kept", 1, None, "Shop", "me", 1, 1),
            *(NOW_TEXT, NOW, "2027-01-15T08:01:01.125Z", NOW + 61_000),
        ],
        [
            *("instance", "taken", None, None, "Shop", "other", 0, 1),
            *(NOW_TEXT, NOW, "2027-01-15T08:01:00.125Z", NOW + 60_000),
        ],
        [
            *("work", "kept", 1, 2, "charge", "worker", 0, 1),
            *(NOW_TEXT, NOW, "2027-01-15T08:01:00.125Z", NOW + 60_000),
        ],
    ]


def test_an_expired_lock_is_not_live(query):
    async def fill(provider):
        await provider.start_orchestration_item(start_of("order"), first_turn(), "t" * 32, "me")

    rows = query(fill, "SELECT kind, is_live FROM v_locks", ManualClock(1_600_000_000_000))

    assert rows == [{"kind": "instance", "is_live": 0}]


def test_a_released_lock_has_no_time(query):
    async def fill(provider):
        await provider.enqueue_for_orchestrator(start_of("order"))
        fetched = await provider.fetch_orchestration_item(KEEP_MS, 0)
        await provider.abandon_orchestration_item(fetched.lock_token)
        await provider.enqueue_for_worker(work_of("order", 2))
        work = await provider.fetch_work_item(KEEP_MS, 0)
        await provider.abandon_work_item(work.lock_token)

    rows = query(
        fill,
        "SELECT locked_at FROM instance_locks UNION ALL SELECT locked_at FROM worker_queue",
    )

    assert rows == [{"locked_at": None}] * 2
