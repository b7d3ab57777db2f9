"""What a new connection to Postgres does while nobody waits for it, and what waits for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
from psycopg import sql

from perdure.conformance.factories import activity, raised, start, started
from perdure.model.status import Status
from perdure.providers.items import ExecutionMetadata, TurnCommit
from perdure.providers.postgres import PostgresProvider, connections
from postgres_factory import new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

FIRST = TurnCommit(
    execution_id=1,
    history_delta=(started("x"),),
    metadata=ExecutionMetadata(name="Flow", version="1.0.0", status=Status.RUNNING),
    consumed=None,
)


@pytest.fixture
def connection() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_server().dsn, autocommit=True) as connection:
        yield connection


class Stage:
    """A schema whose rehearsals do something that can be seen from outside."""

    def __init__(self, connection: psycopg.Connection[Any], play: str) -> None:
        self.schema = new_schema()
        self._connection = connection
        self._run("CREATE TABLE {schema}.rehearsals (token text)")
        self._run(
            "CREATE OR REPLACE FUNCTION {schema}.rehearse_commits(p_token text) RETURNS void "
            f"LANGUAGE plpgsql SET search_path TO {{schema}} AS $$ BEGIN {play} END $$"
        )

    def rehearsals(self) -> int:
        ((number,),) = self._run("SELECT count(*) FROM {schema}.rehearsals").fetchall()
        return int(number)

    def _run(self, statement: Any) -> psycopg.Cursor[Any]:
        name = sql.Identifier(self.schema)
        return self._connection.execute(sql.SQL(statement).format(schema=name))

    @asynccontextmanager
    async def provider(self, **options: Any) -> AsyncGenerator[PostgresProvider]:
        provider = PostgresProvider(shared_server().dsn, schema=self.schema, **options)
        async with provider, asyncio.timeout(20):
            yield provider


SEEN = "INSERT INTO rehearsals VALUES (p_token);"


async def run_turn(provider: PostgresProvider, instance_id: str) -> None:
    await provider.enqueue_for_orchestrator(start(instance_id))
    fetched = await provider.fetch_orchestration_item(60_000, 10_000)
    assert fetched is not None
    first = msgspec.structs.replace(FIRST, history_delta=(started(instance_id),))
    await provider.ack_orchestration_item(fetched.lock_token, first)


def test_a_rehearsal_runs_the_quick_commits_and_leaves_nothing_behind(
    connection: psycopg.Connection[Any],
) -> None:
    schema = new_schema()
    connection.execute("SET track_functions = 'pl'")
    with connection.transaction():
        connection.execute(
            sql.SQL("SELECT {}.rehearse_commits('nobody')").format(sql.Identifier(schema))
        )
        calls = dict(
            connection.execute(
                "SELECT funcname, calls FROM pg_stat_xact_user_functions WHERE schemaname = %s",
                (schema,),
            ).fetchall()
        )
    tables = connection.execute(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = %s::regnamespace "
        "AND relname NOT IN ('migrations', 'store')",
        (schema,),
    ).fetchall()
    counts = {
        table: connection.execute(
            sql.SQL("SELECT count(*) FROM {}.{}").format(
                sql.Identifier(schema), sql.Identifier(table)
            )
        ).fetchone()
        for (table,) in tables
    }

    assert {
        name: calls.get(name, 0)
        for name in ("commit_single", "add_single_work", "place_single", "end_single", "lock_turns")
    } == {
        "commit_single": 2,
        "add_single_work": 1,
        "place_single": 1,
        "end_single": 1,
        "lock_turns": 0,
    }
    assert len(counts) > 8
    assert set(counts.values()) == {(0,)}


@pytest.mark.parametrize(("prepare", "number"), [(True, 1), (False, 0)])
def test_a_connection_rehearses_once_and_behind_a_pooler_never(
    connection: psycopg.Connection[Any], *, prepare: bool, number: int
) -> None:
    async def check() -> None:
        stage = Stage(connection, SEEN)
        # One connection: whatever comes next has to wait for the rehearsal.
        async with stage.provider(pool_size=2, prepare=prepare, listen=False) as provider:
            for instance_id in ("x", "y", "z"):
                await run_turn(provider, instance_id)

            assert stage.rehearsals() == number

    asyncio.run(check())


def test_a_fetch_that_finds_nothing_is_not_followed_by_a_rehearsal(
    connection: psycopg.Connection[Any],
) -> None:
    async def check() -> None:
        stage = Stage(connection, SEEN)
        async with stage.provider(pool_size=2, listen=False) as provider:
            assert await provider.fetch_orchestration_item(60_000, 0) is None
            assert await provider.read("x") == []

            assert stage.rehearsals() == 0

    asyncio.run(check())


@pytest.mark.parametrize(
    "play",
    [
        "RAISE EXCEPTION 'no';",
        "PERFORM pg_terminate_backend(pg_backend_pid());",
        "RAISE EXCEPTION USING ERRCODE = 'serialization_failure';",
    ],
)
def test_turns_go_on_whatever_comes_of_a_rehearsal(
    connection: psycopg.Connection[Any], play: str
) -> None:
    async def check() -> None:
        stage = Stage(connection, play)
        async with stage.provider(pool_size=2) as provider:
            for instance_id in ("x", "y"):
                await run_turn(provider, instance_id)

            assert len(await provider.read("y")) == 1

    asyncio.run(check())


def test_a_handle_is_closed_without_waiting_for_a_rehearsal(
    connection: psycopg.Connection[Any],
) -> None:
    async def check() -> None:
        stage = Stage(connection, "PERFORM pg_sleep(25);")
        async with asyncio.timeout(15), stage.provider() as provider:
            await run_turn(provider, "x")  # on another connection

    asyncio.run(check())


def test_work_that_a_handle_adds_is_fetched_however_busy_the_start_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_SETTLING_SECONDS", 1000)
    monkeypatch.setattr(connections, "_IDLE_SECONDS", 0.001)

    async def check() -> None:
        provider = PostgresProvider(shared_server().dsn, schema=new_schema())
        async with provider, asyncio.timeout(20):
            busy = asyncio.create_task(keep_busy(provider))
            waiting = asyncio.create_task(provider.fetch_work_item(60_000, 15_000))
            await provider.enqueue_for_worker(activity("x"))

            assert await waiting is not None

            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)

    asyncio.run(check())


def test_work_of_others_is_fetched_once_nothing_else_is_going_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_SETTLING_SECONDS", 1000)

    async def check() -> None:
        schema = new_schema()
        dsn = shared_server().dsn
        async with PostgresProvider(dsn, schema=schema) as other:
            await other.enqueue_for_worker(activity("x"))
        async with PostgresProvider(dsn, schema=schema) as provider, asyncio.timeout(20):
            await provider.enqueue_for_orchestrator(raised("x"))

            assert await provider.fetch_work_item(60_000, 15_000) is not None

    asyncio.run(check())


async def keep_busy(provider: PostgresProvider) -> None:
    while True:
        await provider.read("x")
