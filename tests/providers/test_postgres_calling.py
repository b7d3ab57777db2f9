"""Commits that are sent and answered without the driver's cursor, on connections that fail them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from patience import HANG_SECONDS
from perdure.conformance.factories import raised, start
from perdure.providers.postgres import PostgresProvider, address
from perdure.providers.postgres.calling import RawConnection, text_of
from perdure.providers.records import OrchestrationFilter
from postgres_factory import new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def connection() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_server().dsn, autocommit=True) as connection:
        yield connection


async def warmed_up(provider: PostgresProvider) -> None:
    """From then on the statement is prepared, and sent without a task."""
    await provider.enqueue_for_orchestrator(start("x"))
    for _ in range(3):
        await provider.enqueue_for_orchestrator(raised("x"))


def sessions(connection: psycopg.Connection[Any], schema: str, *, waiting: bool) -> set[int]:
    """Of the provider, by number; ``waiting`` for a lock or not."""
    found = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'perdure' "
        "AND query LIKE %s AND (wait_event_type IS NOT DISTINCT FROM 'Lock') = %s",
        (f"%{schema}%", waiting),
    )
    return {pid for (pid,) in found}


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["plain", ""],
        ["NULL", "null", " spaces ", "tab\t", "line\nbreak"],
        ['say "x"', "back\\slash", "\\", '\\"', "{a,b}", "a,b", "Fl\u00fc\u00dfe\x1f#1.0.0"],
    ],
)
def test_texts_reach_the_server_as_they_are(
    connection: psycopg.Connection[Any], texts: list[str]
) -> None:
    sent = text_of(texts)
    assert sent is not None

    found = connection.execute("SELECT %s::text[]", (sent.decode(),)).fetchall()

    assert found == [(texts,)]


def test_instances_are_found_by_names_that_need_quoting() -> None:
    name = 'Fl"ow\\{a,b}'

    async def check() -> None:
        provider = PostgresProvider(shared_server().dsn, schema=new_schema(), listen=False)
        async with provider, asyncio.timeout(HANG_SECONDS):
            await provider.enqueue_for_orchestrator(start("x", name=name))
            wanted = OrchestrationFilter(handlers=frozenset({(name, "1.0.0")}))

            fetched = await provider.fetch_orchestration_item(60_000, 0, wanted, 'ow"ner')

            assert fetched is not None
            assert fetched.item.name == name

    asyncio.run(check())


def test_a_connection_that_the_server_ended_while_it_was_idle_is_replaced(
    connection: psycopg.Connection[Any],
) -> None:
    async def check() -> None:
        schema = new_schema()
        provider = PostgresProvider(shared_server().dsn, schema=schema, listen=False)
        async with provider, asyncio.timeout(HANG_SECONDS):
            await warmed_up(provider)
            ended = sessions(connection, schema, waiting=False)
            assert ended
            for pid in ended:
                connection.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
            await asyncio.sleep(0)  # it is told, before or while it is used again

            assert await provider.enqueue_for_orchestrator(raised("x"))

            assert len(await provider.admin.list_messages("x")) == 5

    asyncio.run(check())


def test_a_commit_that_is_not_answered_in_time_is_sent_again_and_applied_once(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "_SERVER_SHARE", 300)  # the server does not give up first

    async def check() -> None:
        schema = new_schema()
        provider = PostgresProvider(
            shared_server().dsn, schema=schema, listen=False, answer_timeout=0.2
        )
        async with provider, asyncio.timeout(HANG_SECONDS):
            await warmed_up(provider)
            blocked: set[int] = set()
            with connection.transaction():
                connection.execute(
                    sql.SQL("SELECT FROM {}.instance_locks FOR UPDATE").format(
                        sql.Identifier(schema)
                    )
                )
                sending = asyncio.ensure_future(provider.enqueue_for_orchestrator(raised("x")))
                while len(blocked) < 2:
                    with psycopg.connect(shared_server().dsn, autocommit=True) as observer:
                        blocked |= sessions(observer, schema, waiting=True)
                    await asyncio.sleep(0.01)

            assert await sending

            assert len(await provider.admin.list_messages("x")) == 5

    asyncio.run(check())


def test_a_statement_whose_connection_breaks_while_it_is_sent_gets_its_error() -> None:
    async def check() -> None:
        dsn = shared_server().dsn
        connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        raw = RawConnection(connection)
        answers: list[Any] = []
        raw.start(
            b"SELECT length($1)",
            [b"x" * 50_000_000],
            prepare=False,
            seconds=30,
            answered=lambda *answer: answers.append(answer),
        )
        assert raw._is_writing, "the statement fitted into the socket: make it bigger"

        connection.pgconn.finish()  # as the driver does with a broken connection
        broken = psycopg.OperationalError("broken")
        raw._fail(broken)

        assert answers == [(None, broken)]

    asyncio.run(check())
