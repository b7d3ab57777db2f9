"""The cost of a fetch on Postgres grows with the items that it returns, not with other rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
from psycopg import sql

from perdure.conformance.factories import activity, raised, start
from perdure.providers.postgres import PostgresProvider, records, statements
from perdure.providers.records import ActivityIdentity, TimerIdentity, TurnCommit
from postgres_factory import new_schema
from postgres_proxy import Proxy
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from perdure.providers.records import OrchestratorMessage

MANY = 5_000
ROWS_MAX = 120

FILL_TURNS = """
    INSERT INTO {s}.instance_locks (
        instance_id, route, ready_at, ready_id, lock_token, locked_until, wake_at, suspended,
        not_before
    )
    SELECT kind || '-' || n, {s}.route_of(name, '1'), 1, n, token, until, wake, held, hold
    FROM generate_series(1, {many}) AS n
    CROSS JOIN LATERAL (VALUES
        ('foreign', 'Foreign', NULL, NULL::bigint, NULL::bigint, false, NULL::bigint),
        ('locked', 'Mine', 'token-' || n, 9e15::bigint, 9e15::bigint, false, NULL),
        ('suspended', 'Mine', NULL, NULL, NULL, true, NULL),
        ('backing off', 'Mine', NULL, NULL, 9e15::bigint, false, 9e15::bigint)
    ) AS v (kind, name, token, until, wake, held, hold);
    INSERT INTO {s}.instance_locks (instance_id, route, ready_at, ready_id)
    SELECT 'later-' || n, {s}.route_of('Mine', '1'), 9e15::bigint, n
    FROM generate_series(1, {many}) AS n;
    INSERT INTO {s}.orchestrator_queue (instance_id, kind, body, visible_at, enqueued_at)
    SELECT instance_id, 'x', '{{}}', ready_at, 1 FROM {s}.instance_locks
"""
FILL_WORK = """
    INSERT INTO {s}.worker_queue (
        instance_id, execution_id, activity_id, name, route, body, session_id, visible_at,
        enqueued_at, lock_token, locked_until, wake_at
    )
    SELECT 'i-' || n, 1, kind, name, {s}.route_of(name, tag), '{{}}', session, 1, 1, token,
        wake, wake
    FROM generate_series(1, {many}) AS n
    CROSS JOIN LATERAL (VALUES
        (1, 'foreign', NULL, NULL, NULL, NULL::bigint),
        (2, 'mine', 'gpu', NULL, NULL, NULL),
        (3, 'mine', NULL, NULL, 'token-' || n, 9e15::bigint),
        (4, 'mine', NULL, NULL, NULL, 9e15::bigint),
        (5, 'mine', NULL, 'taken', NULL, NULL)
    ) AS v (kind, name, tag, session, token, wake);
    INSERT INTO {s}.sessions VALUES ('taken', 'another', 9e15::bigint, 1)
"""


class Store:
    """Counts the rows that a statement reads."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._statements = statements.Statements(schema)

    def fill(self, statement: str) -> None:
        self._connection.execute(
            sql.SQL(statement).format(s=sql.Identifier(self._schema), many=sql.Literal(MANY))
        )
        # Otherwise these rows would be counted with those of the next transaction.
        self._connection.execute("SELECT pg_stat_force_next_flush()")
        self._connection.commit()

    def rows_read(self, template: Any, parameters: list[Any]) -> tuple[list[Any], int]:
        """Return the rows of a statement and the number of rows that it read; roll it back."""
        statement = self._statements(template)
        kind = psycopg.RawCursor if b"$1" in statement else psycopg.Cursor
        found = kind(self._connection).execute(statement, parameters).fetchall()
        ((read,),) = self._connection.execute(
            "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables "
            "WHERE schemaname = %s",
            (self._schema,),
        ).fetchall()
        self._connection.rollback()
        return found, int(read)


@pytest.fixture
def store() -> Iterator[Store]:
    with psycopg.connect(shared_server().dsn) as connection:
        yield Store(connection, new_schema())


MY_TURNS = ["Mine\x1f#1", "Mine\x1f"]


@pytest.mark.parametrize("routes", [MY_TURNS, None], ids=["with a filter", "without a filter"])
def test_a_fetch_of_turns_reads_few_rows_however_many_wait(
    store: Store, routes: list[str] | None
) -> None:
    store.fill(FILL_TURNS)
    parameters = [["t" * 32], False, 5_000, "me", routes, None, 60_000, True]

    found, read = store.rows_read(statements.FETCH_TURNS, parameters)

    assert (found[0][0] is None) == (routes is not None)
    assert read < ROWS_MAX


def test_a_batch_of_turns_is_found_past_thousands_that_wait(store: Store) -> None:
    store.fill(FILL_TURNS)
    store.fill(
        """
        INSERT INTO {s}.instance_locks (instance_id, route, ready_at, ready_id)
        SELECT 'ready-' || n, {s}.route_of('Mine', '1'), 2, n FROM generate_series(1, {many}) n;
        INSERT INTO {s}.orchestrator_queue (instance_id, kind, body, visible_at, enqueued_at)
        SELECT 'ready-' || n, 'x', '{{}}', 2, 1 FROM generate_series(1, {many}) n
        """
    )
    parameters = [
        [f"{number:032}" for number in range(10)],
        *(False, 5_000, "me", MY_TURNS, None, 60_000, True),
    ]

    found, read = store.rows_read(statements.FETCH_TURNS, parameters)

    assert [row[0] for row in found] == [f"ready-{number}" for number in range(1, 11)]
    assert read < 3 * ROWS_MAX


@pytest.mark.parametrize("routes", [["mine\x1f"], None], ids=["by name", "any name"])
def test_a_fetch_of_work_reads_few_rows_however_many_wait(
    store: Store, routes: list[str] | None
) -> None:
    store.fill(FILL_WORK)
    names = None if routes is None else ["mine"]
    parameters = [["t" * 32], False, 5_000, routes, names, [""], "me", 5_000, False]

    found, read = store.rows_read(statements.FETCH_WORK, parameters)

    assert (found[0][0] is None) == (routes is not None)
    assert read < ROWS_MAX


def test_a_fetch_of_a_burst_of_work_reads_each_item_three_times(store: Store) -> None:
    store.fill(
        """
        INSERT INTO {s}.worker_queue (
            instance_id, execution_id, activity_id, name, route, body, visible_at, enqueued_at
        )
        SELECT 'x', 1, n, 'mine', {s}.route_of('mine', NULL), '{{}}', 1, 1
        FROM generate_series(1, {many}) AS n
        """
    )
    tokens = [f"{number:032}" for number in range(500)]
    parameters = [tokens, False, 5_000, ["mine\x1f"], ["mine"], [""], None, None, False]

    found, read = store.rows_read(statements.FETCH_WORK, parameters)

    assert [row[2] for row in found] == list(range(1, 501))
    # To find it, to lock it, to mark it.
    assert read < 3 * 500 + ROWS_MAX


HELD = """
    INSERT INTO {s}.instances (
        instance_id, name, version, named, execution_id, execution_status, status, created_at,
        updated_at
    ) VALUES ('x', 'Mine', '1', true, 1, 'Running', 'Running', 1, 1);
    INSERT INTO {s}.executions VALUES ('x', 1, 'Running', NULL, NULL, 1, NULL);
    INSERT INTO {s}.instance_locks (instance_id, route, lock_token, locked_until)
    VALUES ('x', {s}.route_of('Mine', '1'), 'held', 9e15::bigint);
    INSERT INTO {s}.orchestrator_queue (
        instance_id, message_id, kind, body, visible_at, enqueued_at, lock_token,
        timer_execution_id, timer_id
    )
    SELECT 'x', n, 'x', '{{}}', 1, 1, CASE WHEN n % 2 = 0 THEN 'held' END,
        CASE WHEN n % 2 = 1 THEN 1 END, CASE WHEN n % 2 = 1 THEN n END
    FROM generate_series(1, {many}) AS n;
    INSERT INTO {s}.worker_queue (
        instance_id, execution_id, activity_id, name, route, body, visible_at, enqueued_at,
        lock_token, locked_until, wake_at
    )
    SELECT 'x', 1, n, 'a', 'a', '{{}}', 1, 1, 'work-' || n, 9e15::bigint, 9e15::bigint
    FROM generate_series(1, {many}) AS n
"""


def test_a_turn_reads_as_many_rows_as_it_changes(store: Store) -> None:
    store.fill(HELD)
    half = MANY // 2
    commit = TurnCommit(
        execution_id=1,
        consumed=tuple(range(2, MANY + 1, 2)),
        cancelled_timers=tuple(
            TimerIdentity(execution_id=1, timer_id=number) for number in range(1, MANY, 2)
        ),
        settled_work=tuple(f"work-{number}" for number in range(1, half + 1)),
        cancelled_activities=tuple(
            ActivityIdentity(instance_id="x", execution_id=1, activity_id=number)
            for number in range(half + 1, MANY + 1)
        ),
    )
    row, parts = records.turn_row("x", "held", commit, is_first=False)
    text = msgspec.json.encode([{**row, "n": 0}]).decode()

    found, read = store.rows_read(statements.COMMIT_TURNS, ["lane", 1, False, text, parts])

    assert msgspec.json.decode(found[0][0])["refused"] is None
    assert read < 10 * MANY


def test_a_burst_of_work_is_fetched_with_one_statement_and_given_back_with_another() -> None:
    schema = new_schema()

    async def check() -> None:
        async with (
            Proxy(shared_server().socket_directory, lambda _message: None) as proxy,
            PostgresProvider(proxy.dsn, schema=schema, listen=False) as provider,
        ):
            await asyncio.gather(
                *[provider.enqueue_for_worker(activity("x", activity_id=n)) for n in range(1, 301)]
            )
            for _ in range(5):  # statements are prepared in the fourth round
                before = proxy.statements
                fetched = await provider.fetch_work_items(500, 60_000, 0)
                taken = proxy.statements - before
                await asyncio.gather(
                    *[provider.abandon_work_item(work.lock_token) for work in fetched]
                )
                given_back = proxy.statements - before - taken

            assert [work.identity.activity_id for work in fetched] == list(range(1, 301))
            assert (taken, given_back) == (1, 1)

    asyncio.run(check())


@pytest.mark.parametrize(("message", "batches"), [(start, 3), (raised, 1)], ids=["starts", "mail"])
def test_messages_of_a_call_share_a_commit_only_if_a_full_queue_must_refuse_all(
    message: Callable[..., OrchestratorMessage], batches: int
) -> None:
    schema = new_schema()
    sent: list[bytes] = []

    async def check() -> None:
        async with (
            Proxy(shared_server().socket_directory, sent.append) as proxy,
            PostgresProvider(proxy.dsn, schema=schema, pool_size=2, listen=False) as provider,
        ):
            taken = await provider.enqueue_many_for_orchestrator(
                [message(f"i-{number}") for number in range(1_200)]
            )

            assert taken == [True] * 1_200
            assert sum(b"enqueue_messages" in each for each in sent) == batches

    asyncio.run(check())
