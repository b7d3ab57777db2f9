"""The short forms for a single operation on Postgres leave the same rows as the general form."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
from psycopg import sql

from patience import HANG_SECONDS
from perdure.conformance.factories import activity, event, raised, start, started
from perdure.errors import InvalidValue, LockLost
from perdure.model.status import Status
from perdure.providers.postgres import PostgresProvider, pipeline, records, statements
from perdure.providers.postgres.calling import RawConnection
from perdure.providers.records import Claim, ExecutionMetadata, KvSet, TurnCommit
from postgres_factory import new_schema
from postgres_proxy import Proxy
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLES = (
    "instances",
    "executions",
    "history",
    "orchestrator_queue",
    "instance_locks",
    "worker_queue",
    "kv_store",
    "kv_delta",
)
LONG_MS = 60_000
RUNNING = ExecutionMetadata(
    name="Flow", version="1.0.0", status=Status.RUNNING, framework_version=(0, 1, 0)
)
COMPLETED = ExecutionMetadata(status=Status.COMPLETED, output='"done"')


def claimed(activity_id: int) -> Any:
    claim = Claim(lock_token=f"work-{activity_id}", lock_timeout_ms=LONG_MS)
    return activity("x", activity_id=activity_id, claim=claim)


FIRST = TurnCommit(
    execution_id=1,
    history_delta=(started("x"),),
    worker_items=(claimed(2),),
    metadata=RUNNING,
    consumed=(),
    keep_lock_ms=LONG_MS,
)
STEP = TurnCommit(
    execution_id=1,
    history_delta=(event("x", 2), event("x", 3)),
    worker_items=(claimed(3),),
    settled_work=("work-2",),
    consumed=(),
    keep_lock_ms=LONG_MS,
)
REMEMBERS = TurnCommit(
    execution_id=1,
    history_delta=(event("x", 4),),
    kv_changes=(KvSet(key="k", value="1", updated_at_ms=1),),
    consumed=(),
    keep_lock_ms=LONG_MS,
)
LAST = TurnCommit(
    execution_id=1,
    history_delta=(event("x", 4),),
    settled_work=("work-3",),
    metadata=COMPLETED,
    consumed=(),
)


class Store:
    """Sends operations one by one, in the short or the general form."""

    def __init__(self, connection: psycopg.Connection[Any], *, quick: bool) -> None:
        self._connection = connection
        self._schema = new_schema()
        self._statements = statements.Statements(self._schema)
        self._more = 0 if quick else records.UNCOMMON
        self._batch = 0

    def start(self, commit: TurnCommit) -> None:
        row, parts = records.turn_row("x", "lock", commit, is_first=True)
        assert not parts & records.UNCOMMON
        self._send(statements.START_TURNS, {**row, "owner": "me"}, parts)

    def commit(self, commit: TurnCommit) -> None:
        row, parts = records.turn_row("x", "lock", commit, is_first=False)
        self._send(statements.COMMIT_TURNS, row, parts)

    def raise_events(self, number: int) -> None:
        """Send one message, or two, which take the general form."""
        row = msgspec.structs.asdict(raised("x"))
        self._send(statements.ENQUEUE_MESSAGES, row, 0, copies=number)

    def deliver(self) -> None:
        """Mark the queued messages as a fetch of the owner does."""
        psycopg.RawCursor(self._connection).execute(
            self._statements(statements.FETCH_TURNS),
            (["delivery"], False, LONG_MS, "me", None, None, LONG_MS, True),
        )

    def _send(self, template: Any, row: dict[str, Any], parts: int, copies: int = 1) -> None:
        self._batch += 1
        text = msgspec.json.encode([{**row, "n": n} for n in range(copies)]).decode()
        ((answer,),) = (
            psycopg.RawCursor(self._connection)
            .execute(
                self._statements(template), ["lane", self._batch, False, text, parts | self._more]
            )
            .fetchall()
        )
        assert msgspec.json.decode(answer).get("refused") is None

    def content(self) -> dict[str, list[Any]]:
        """Return all rows, with equal times."""
        content: dict[str, list[Any]] = {}
        for table in TABLES:
            statement = sql.SQL(
                "SELECT to_jsonb(t) FROM {}.{} t ORDER BY to_jsonb(t)::text"
            ).format(sql.Identifier(self._schema), sql.Identifier(table))
            found = self._connection.execute(statement).fetchall()
            content[table] = [
                {
                    name: "time" if isinstance(value, int) and value > 10**12 else value
                    for name, value in row.items()
                }
                for (row,) in found
            ]
        return content


def _begin(_store: Store) -> None:
    """Nothing more."""


def _step(store: Store) -> None:
    store.commit(STEP)


def _end(store: Store) -> None:
    store.commit(STEP)
    store.commit(REMEMBERS)
    store.commit(msgspec.structs.replace(LAST, history_delta=(event("x", 5),)))


def _consume(store: Store) -> None:
    store.raise_events(1)
    store.deliver()
    store.commit(msgspec.structs.replace(STEP, consumed=(2,)))


def _consume_some(store: Store) -> None:
    store.raise_events(2)
    store.deliver()
    store.raise_events(1)
    store.commit(msgspec.structs.replace(STEP, consumed=(3,)))


def _end_with_messages_left(store: Store) -> None:
    store.commit(STEP)
    store.raise_events(1)
    store.commit(LAST)


@pytest.fixture
def connection() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_server().dsn, autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize(
    "run", [_begin, _step, _end, _consume, _consume_some, _end_with_messages_left]
)
def test_the_short_form_leaves_the_same_rows_as_the_general_one(
    connection: psycopg.Connection[Any], run: Callable[[Store], None]
) -> None:
    contents: list[dict[str, list[Any]]] = []
    for quick in (True, False):
        store = Store(connection, quick=quick)
        store.start(FIRST)
        run(store)
        contents.append(store.content())

    assert contents[0] == contents[1]
    assert contents[0]["history"]


def test_a_last_turn_that_settles_what_is_not_held_changes_nothing() -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=new_schema()) as provider:
            await provider.start_orchestration_item(start("x"), FIRST, "lock", "me")
            delta = (event("x", 2),)
            wrong = msgspec.structs.replace(LAST, history_delta=delta, settled_work=("work-9",))

            with pytest.raises(LockLost):
                await provider.ack_orchestration_item("lock", wrong)

            assert (await provider.admin.get_instance_info("x")).status is Status.RUNNING
            assert len(await provider.read("x")) == 1
            await provider.ack_orchestration_item("lock", STEP)  # the lock is as it was

    asyncio.run(check())


def test_an_instance_that_exists_is_not_started_again_by_a_single_start() -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=new_schema()) as provider:
            assert await provider.start_orchestration_item(start("x"), FIRST, "lock", "me")
            await provider.ack_orchestration_item("lock", STEP)
            await provider.ack_orchestration_item("lock", LAST)
            free = msgspec.structs.replace(FIRST, worker_items=())

            assert not await provider.start_orchestration_item(start("x"), free, "other", "me")

            assert (await provider.admin.get_instance_info("x")).status is Status.COMPLETED

    asyncio.run(check())


def test_a_store_that_is_up_to_date_is_opened_after_two_statements() -> None:
    async def check() -> None:
        schema = new_schema()
        async with (
            Proxy(shared_server().socket_directory, lambda _message: None) as proxy,
            PostgresProvider(proxy.dsn, schema=schema, listen=False),
        ):
            assert proxy.statements == 2  # which server is it, and which store

    asyncio.run(check())


def test_a_big_commit_is_answered_and_applied_once_though_all_tasks_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writing = asyncio.Event()
    write = RawConnection._write

    def noted(connection: RawConnection) -> None:
        writing.set()
        write(connection)

    monkeypatch.setattr(RawConnection, "_write", noted)

    async def scenario() -> tuple[bool, int]:
        schema, dsn = new_schema(), shared_server().dsn
        # On one connection: of several, none might have run the statement often enough.
        async with PostgresProvider(dsn, schema=schema, pool_size=2, listen=False) as provider:
            for number in range(4):  # from then on its statement is prepared, and sent at once
                await provider.enqueue_for_orchestrator(start(f"small-{number}"))
            big = raised("small-0", "event", "x" * 2_000_000)
            sending = asyncio.ensure_future(provider.enqueue_for_orchestrator(big))
            async with asyncio.timeout(
                HANG_SECONDS
            ):  # too late: the message must be bigger than the socket
                await writing.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task(), sending}:
                task.cancel()
            async with asyncio.timeout(HANG_SECONDS):
                taken = await sending
            return taken, len(await provider.admin.list_messages("small-0"))

    assert asyncio.run(scenario()) == (True, 2)


def test_a_turn_too_big_for_the_server_is_refused_by_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "_ONE_BYTES_MAX", 1 << 20)

    async def scenario() -> None:
        async with PostgresProvider(shared_server().dsn, schema=new_schema()) as provider:
            assert await provider.start_orchestration_item(start("x"), FIRST, "token", "me")
            big = msgspec.structs.replace(event("x", 2), data="x" * (1 << 21))
            commit = msgspec.structs.replace(STEP, history_delta=(big, event("x", 3)))
            with pytest.raises(InvalidValue, match="2 MB are too much for one commit"):
                await provider.ack_orchestration_item("token", commit)
            await provider.ack_orchestration_item("token", STEP)

    asyncio.run(scenario())


def test_a_number_of_a_step_stands_beside_its_name_in_the_functions() -> None:
    folder = Path(records.__file__).parent / "functions"
    lines = [line for each in folder.glob("*.sql") for line in each.read_text().splitlines()]
    tested = [line for line in lines if re.search(r"p_parts &", line)]
    named = [re.search(r"p_parts & (\d+) .*-- ([A-Z_]+)$", line) for line in tested]

    assert len(tested) > 20
    assert [line for line, match in zip(tested, named, strict=True) if match is None] == []
    assert all(getattr(records, match[2]) == int(match[1]) for match in named if match)
