"""Migrations, functions and views of a Postgres store, and stores of an earlier layout."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
from psycopg import sql

from patience import HANG_SECONDS
from perdure import Client, Runtime, activity, continue_as_new, orchestration, wait_for_event
from perdure.conformance.factories import raised
from perdure.errors import InstanceFinished, OrchestrationFailed, StoreRefused
from perdure.model.status import Status
from perdure.providers.postgres import PostgresProvider, opening
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
from postgres_factory import new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = Path(__file__).parents[1] / "data" / "postgres_first_layout.sql.gz"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sql-views.md"
VIEWS = ("v_instances", "v_events", "v_work", "v_locks")
KEEP_MS = 60_000


@pytest.fixture
def owner() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_server().dsn, autocommit=True) as connection:
        yield connection


def execute(connection: psycopg.Connection[Any], statement: str, schema: str) -> list[Any]:
    cursor = connection.execute(sql.SQL(statement).format(s=sql.Identifier(schema)))
    return cursor.fetchall() if cursor.description else []


# --- a store of the layout before


@contextmanager
def first_layout(name: str) -> Iterator[str]:
    """Restore the dump into a database of its own and give its address."""
    database = f"{name}_{os.getpid()}"
    with psycopg.connect(shared_server().dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
        dsn = shared_server().dsn.replace("/postgres?", f"/{database}?")
        with psycopg.connect(dsn, autocommit=True) as restoring:
            restoring.execute(gzip.decompress(DATA.read_bytes()))
        yield dsn
        connection.execute(
            sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database))
        )


@activity
async def add(left: int, right: int) -> int:
    return left + right


@activity
async def later(value: int) -> int:
    return value + 1000


@orchestration
async def summed(seed: int) -> int:
    return await add(seed, 1)


@orchestration
async def listening(seed: int) -> int:
    from perdure import state

    state["seed"] = seed
    first = await wait_for_event("go", int)
    return await add(seed, first)


@orchestration
async def sleeping(seed: int) -> int:
    await asyncio.sleep(5)
    return await add(seed, 1)


@orchestration
async def working(seed: int) -> int:
    first = await add(seed, 1)
    return await later(first)


@orchestration
async def parent(seed: int) -> int:
    return await listening(seed)


@orchestration
async def counting(left: int) -> int:
    if left:
        continue_as_new(left - 1)
    return await wait_for_event("go", int)


HANDLERS = [add, later, listening, sleeping, working, parent, counting]
STATUSES = {
    "summed": Status.COMPLETED,
    "broken": Status.FAILED,
    "listening": Status.RUNNING,
    "paused": Status.PAUSED,
    "sleeping": Status.RUNNING,
    "working": Status.RUNNING,
    "parent": Status.RUNNING,
    "parent::1.2": Status.RUNNING,
    "counting": Status.RUNNING,
    "queued": Status.PENDING,
    "blocked": Status.BLOCKED,
}


def test_a_store_of_the_first_layout_is_read_as_it_was() -> None:
    async def check(dsn: str) -> None:
        async with PostgresProvider(dsn) as provider:
            admin = provider.admin
            infos = {info.instance_id: info for info in (await admin.list_instances()).instances}
            assert {each: info.status for each, info in infos.items()} == STATUSES
            assert infos["summed"].output == "8"
            assert infos["summed"].custom_status == '{"at":"adding"}'
            assert infos["counting"].execution_id == 4
            assert infos["parent::1.2"].parent_instance_id == "parent"
            assert [len(await provider.read(each)) for each in ("summed", "working")] == [6, 4]
            assert len(await provider.read_with_execution("counting", 2)) == 2
            assert await provider.get_kv_value("summed", "seed") == "7"
            assert await provider.get_kv_value("listening", "seed") == "7"
            assert [each.message.kind for each in await admin.list_messages("sleeping")] == [
                "TimerFired"
            ]
            assert [each.message.name for each in await admin.list_work("working")] == ["later"]
            letters = await admin.list_dead_letters()
            assert [each.message.instance_id for each in letters] == ["nothing-here"]
            for instance_id in infos:
                snapshot = await admin.export_instance(instance_id)
                assert snapshot.instance_id == instance_id
            assert (await admin.get_store_info()).schema_version == 6

    with first_layout("read") as dsn:
        asyncio.run(check(dsn))


def test_a_store_of_the_first_layout_goes_on_to_the_end() -> None:
    async def check(dsn: str) -> None:
        async with (
            Client(PostgresProvider(dsn)) as client,
            Runtime(PostgresProvider(dsn), [*HANDLERS, summed]),
            asyncio.timeout(HANG_SECONDS),
        ):
            await client.resume("paused")
            with suppress(InstanceFinished):  # the runtime has its code, and may have been quicker
                await client.resume("blocked")
            for instance_id in ("listening", "paused", "parent::1.2", "counting"):
                await client.raise_event(instance_id, "go", 5)
            results = {
                instance_id: await client.get(instance_id).result()
                for instance_id in STATUSES
                if instance_id != "broken"
            }
            assert results == {
                "summed": 8,
                "listening": 12,
                "paused": 12,
                "sleeping": 8,
                "working": 1008,
                "parent": 12,
                "parent::1.2": 12,
                "counting": 5,
                "queued": 71,
                "blocked": 81,
            }
            with pytest.raises(OrchestrationFailed, match="no 7"):
                await client.get("broken").result()

    with first_layout("continue") as dsn:
        asyncio.run(check(dsn))


def test_what_is_due_for_the_first_layout_is_told_and_then_applied_once() -> None:
    async def check(dsn: str) -> None:
        provider = PostgresProvider(dsn)

        told = await provider.migrate(dry_run=True)
        applied = await provider.migrate()

        assert [(each.number, each.name) for each in told] == [
            (2, "lock_times"),
            (3, "promotions"),
            (4, "bounded_delivery"),
            (5, "waiting_mail"),
            (6, "latest_time"),
            (6, "functions"),
        ]
        assert applied == told
        assert await provider.migrate() == ()

    with first_layout("due") as dsn:
        asyncio.run(check(dsn))
        with psycopg.connect(dsn) as connection:
            recorded = execute(connection, "SELECT number FROM {s}.migrations", "perdure")
            assert sorted(recorded) == [(number,) for number in range(1, 7)]


def test_the_first_layout_has_the_same_tables_and_functions_in_the_end(
    owner: psycopg.Connection[Any],
) -> None:
    describe = """
        SELECT c.relname::text, a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace = '{s}'::regnamespace AND a.attnum > 0
        UNION ALL
        SELECT indexname::text, indexdef, '', false FROM pg_indexes WHERE schemaname = '{s}'
        UNION ALL
        SELECT viewname::text, definition, '', false FROM pg_views WHERE schemaname = '{s}'
    """
    sources = "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = '{s}'::regnamespace"

    def described(connection: psycopg.Connection[Any], schema: str) -> tuple[set[Any], set[Any]]:
        found = [
            {
                tuple(str(value).replace(f"{schema}.", "") for value in row)
                for row in connection.execute(statement.format(s=schema).encode())
            }
            for statement in (describe, sources)
        ]
        return found[0], found[1]

    fresh = described(owner, new_schema())
    with first_layout("same") as dsn:
        asyncio.run(PostgresProvider(dsn).migrate())
        with psycopg.connect(dsn) as connection:
            tables, functions = described(connection, "perdure")

    assert tables == fresh[0]
    assert functions >= fresh[1]  # replaced ones stay: workers of before may call them


def test_a_part_of_the_first_layout_is_refused(owner: psycopg.Connection[Any]) -> None:
    del owner
    with first_layout("part") as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("DELETE FROM perdure.migrations WHERE number = 13")
        with pytest.raises(StoreRefused):
            asyncio.run(PostgresProvider(dsn).open())


# --- functions


def functions_of(connection: psycopg.Connection[Any], schema: str) -> tuple[Any, ...]:
    ((version, checksum),) = execute(
        connection, "SELECT functions_version, functions_checksum FROM {s}.store", schema
    )
    return version, checksum


def open_and_close(schema: str, **options: Any) -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema, **options):
            pass

    asyncio.run(check())


def source_of(connection: psycopg.Connection[Any], schema: str) -> str:
    ((source,),) = connection.execute(
        "SELECT prosrc FROM pg_proc WHERE proname = 'is_final' AND pronamespace = %s::regnamespace",
        (schema,),
    ).fetchall()
    return str(source)


@pytest.mark.parametrize(
    ("version", "replaced"), [("0.0.9", True), (opening.VERSION, True), ("999.0.0", False)]
)
def test_functions_of_another_version_are_replaced_unless_they_are_newer(
    owner: psycopg.Connection[Any], version: str, replaced: bool
) -> None:
    schema = new_schema()
    before = functions_of(owner, schema)
    own = source_of(owner, schema)
    execute(
        owner,
        "CREATE OR REPLACE FUNCTION {s}.is_final(status text) RETURNS boolean "
        "LANGUAGE sql AS 'SELECT false'",
        schema,
    )
    owner.execute(
        sql.SQL("UPDATE {}.store SET functions_checksum = 'x', functions_version = {}").format(
            sql.Identifier(schema), sql.Literal(version)
        )
    )

    open_and_close(schema)

    assert (functions_of(owner, schema) == before) is replaced
    assert (source_of(owner, schema) == own) is replaced


def test_functions_that_differ_are_told_and_refused_without_auto_migrate(
    owner: psycopg.Connection[Any],
) -> None:
    schema = new_schema()
    execute(owner, "UPDATE {s}.store SET functions_checksum = 'x'", schema)

    due = asyncio.run(PostgresProvider(shared_server().dsn, schema=schema).migrate(dry_run=True))

    assert [each.name for each in due] == ["functions"]
    with pytest.raises(StoreRefused, match=r"\d \(functions\); run 'perdure db migrate'"):
        open_and_close(schema, auto_migrate=False)


def test_functions_can_be_replaced_while_a_handle_works(owner: psycopg.Connection[Any]) -> None:
    schema = new_schema()

    async def check() -> None:
        dsn = shared_server().dsn
        async with PostgresProvider(dsn, schema=schema) as provider, asyncio.timeout(HANG_SECONDS):
            await provider.enqueue_for_orchestrator(start_of("order"))
            for number in range(10):
                sending = [
                    provider.enqueue_for_orchestrator(raised("order", f"event-{each}"))
                    for each in range(20)
                ]
                execute(owner, "UPDATE {s}.store SET functions_checksum = 'x'", schema)
                other = PostgresProvider(dsn, schema=schema)
                opened = asyncio.create_task(other.open())
                assert await asyncio.gather(*sending) == [True] * 20, number
                await opened
                await other.close()
            assert len(await provider.admin.list_messages("order")) == 201

    asyncio.run(check())


# --- views


def start_of(instance_id: str, parent_id: str | None = None) -> OrchestratorMessage:
    routing = StartRouting(name="Shop", version="1.0.0", parent_instance_id=parent_id)
    return OrchestratorMessage(
        instance_id=instance_id, kind="StartOrchestration", body="{}", start=routing
    )


def work_of(instance_id: str, activity_id: int, **more: Any) -> WorkerMessage:
    identity = ActivityIdentity(instance_id=instance_id, execution_id=1, activity_id=activity_id)
    return WorkerMessage(identity=identity, name="charge", body="[]", **more)


def first_turn(*work: WorkerMessage, keep_lock_ms: int | None = KEEP_MS, **metadata: Any) -> Any:
    data = '{"type":"OrchestrationStarted","timestamp_ms":1800000000125}'
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


def documented_columns(view: str) -> list[str]:
    section = PAGE.read_text().split(f"## {view}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("view", VIEWS)
def test_every_column_of_a_view_is_documented(owner: psycopg.Connection[Any], view: str) -> None:
    cursor = owner.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(new_schema(), view)))

    assert cursor.description is not None
    assert [column.name for column in cursor.description] == documented_columns(view)


def test_the_views_show_instances_events_work_and_locks(owner: psycopg.Connection[Any]) -> None:
    schema = new_schema()

    async def fill() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema) as provider:
            claim = Claim(lock_token="w" * 32, lock_timeout_ms=KEEP_MS)
            turn = first_turn(
                work_of("order", 2, claim=claim),
                work_of("order", 3, tag="gpu", visible_at_ms=provider.clock().now_ms() + KEEP_MS),
                work_of("order", 4, session_id="s"),
                status=Status.RUNNING,
                framework_version=(1, 2, 3),
                parent_instance_id="root",
            )
            custom = CustomStatusChange(value='"packing"')
            await provider.start_orchestration_item(
                start_of("order", "root"),
                msgspec.structs.replace(turn, custom_status=custom),
                "t" * 32,
                "me",
            )
            await provider.enqueue_for_orchestrator(start_of("taken"))
            await provider.fetch_orchestration_item(KEEP_MS, 0, owner="other")
            await provider.fetch_work_item(
                KEEP_MS, 0, SessionFetch(owner_id="worker", lock_timeout_ms=KEEP_MS)
            )
            await asyncio.sleep(0.01)
            plain = TurnCommit(execution_id=1, consumed=(), keep_lock_ms=2 * KEEP_MS)
            await provider.ack_orchestration_item("t" * 32, plain)

    asyncio.run(fill())
    owner.row_factory = psycopg.rows.dict_row
    instances, events, work, locks = (
        owner.execute(
            sql.SQL("SELECT * FROM {} v ORDER BY to_jsonb(v)::text").format(
                sql.Identifier(schema, view)
            )
        ).fetchall()
        for view in VIEWS
    )

    order = next(row for row in instances if row["instance_id"] == "order")
    assert (order["status"], order["framework_version"]) == ("Running", "1.2.3")
    assert (order["custom_status"], order["parent_instance_id"]) == ('"packing"', "root")
    assert order["created_at"].timestamp() * 1000 == pytest.approx(order["created_at_ms"])
    assert order["updated_at_ms"] >= order["created_at_ms"] + 10
    taken = next(row for row in instances if row["instance_id"] == "taken")
    assert (taken["status"], taken["execution_id"], taken["name"]) == ("Pending", 1, "Shop")

    events.sort(key=lambda row: row["event_id"])
    assert [row["event_type"] for row in events] == ["OrchestrationStarted", None]
    assert [row["recorded_at_ms"] for row in events] == [1_800_000_000_125, None]

    work.sort(key=lambda row: row["activity_id"])
    assert [row["state"] for row in work] == ["locked", "delayed", "locked"]
    assert [row["locked_at_ms"] is None for row in work] == [False, True, False]

    locks.sort(key=lambda row: (row["kind"], row["instance_id"], row["activity_id"] or 0))
    keys = ("kind", "instance_id", "execution_id", "activity_id", "owner", "kept", "is_live")
    assert [tuple(row[key] for key in keys) for row in locks] == [
        ("instance", "order", 1, None, "me", True, True),
        ("instance", "taken", None, None, "other", False, True),
        ("work", "order", 1, 2, None, False, True),
        ("work", "order", 1, 4, "worker", False, True),
    ]
    kept, other = locks[0], locks[1]
    assert kept["locked_until_ms"] > kept["locked_at_ms"] + 2 * KEEP_MS  # extended later
    assert other["locked_until_ms"] == other["locked_at_ms"] + KEEP_MS


def test_a_released_lock_has_no_time(owner: psycopg.Connection[Any]) -> None:
    schema = new_schema()

    async def fill() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema) as provider:
            await provider.enqueue_for_orchestrator(start_of("order"))
            fetched = await provider.fetch_orchestration_item(KEEP_MS, 0)
            assert fetched is not None
            await provider.abandon_orchestration_item(fetched.lock_token)
            await provider.enqueue_for_worker(work_of("order", 2))
            work = await provider.fetch_work_item(KEEP_MS, 0)
            assert work is not None
            await provider.abandon_work_item(work.lock_token)

    asyncio.run(fill())

    times = execute(
        owner,
        "SELECT locked_at FROM {s}.instance_locks UNION ALL SELECT locked_at FROM {s}.worker_queue",
        schema,
    )
    assert times == [(None,), (None,)]
