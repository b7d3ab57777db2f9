"""Postgres stores for the conformance kit: a schema each, with a clock that the kit moves."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from perdure.conformance.harness import ProviderFactory
from perdure.providers.postgres import PostgresProvider
from perdure.providers.postgres.listener import Channels
from postgres_server import shared_server

if TYPE_CHECKING:
    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider

_numbers = itertools.count(1)
_emptied: list[str] = []
"""Schemas that earlier tests have finished with. Making one takes longer than emptying it."""


@functools.cache
def _behind_the_provider() -> psycopg.Connection[Any]:
    """For what the kit does to a store without the provider."""
    connection = psycopg.connect(shared_server().dsn, autocommit=True)
    atexit.register(connection.close)
    return connection


def spoil_text(schema: str, table: str, column: str, instance_id: str) -> None:
    """Store bytes that are not UTF-8 in a text, as a damaged page would have them."""
    connection = _behind_the_provider()
    with connection.transaction():
        connection.execute("CREATE CAST (bytea AS text) WITHOUT FUNCTION")
        connection.execute(
            sql.SQL(
                "UPDATE {} SET {} = CAST('\\x7bff'::bytea AS text) WHERE instance_id = {}"
            ).format(sql.Identifier(schema, table), sql.Identifier(column), instance_id)
        )
        connection.execute("DROP CAST (bytea AS text)")


class PostgresFactory(ProviderFactory):
    """The server's clock is stopped at the time of the kit's clock and moves by ``advance``."""

    def __init__(self, **options: Any) -> None:
        # Few connections: each has to plan every statement anew.
        self._options = {"pool_size": 3, **options}
        self._schema = ""
        self._now_ms = 0

    def create(self, clock: ManualClock) -> Provider:
        if not self._schema:
            self._schema = _emptied.pop() if _emptied else _with_clock(new_schema())
            self._now_ms = clock.now_ms()
            self._set_clock()
        return PostgresProvider(shared_server().dsn, schema=self._schema, **self._options)

    async def advance(self, milliseconds: int) -> None:
        self._now_ms += milliseconds
        self._set_clock()
        channels = Channels(self._schema)
        self._execute(
            sql.SQL("NOTIFY {}; NOTIFY {}").format(
                sql.Identifier(channels.turns), sql.Identifier(channels.work)
            )
        )

    async def now_ms(self) -> int:
        return self._now_ms

    async def corrupt_history(self, instance_id: str) -> None:
        spoil_text(self._schema, "history", "data", instance_id)

    async def cleanup(self) -> None:
        if self._schema:
            empty(self._schema)
            _emptied.append(self._schema)

    def _set_clock(self) -> None:
        self._execute(
            sql.SQL("UPDATE {}.clock_of_the_kit SET now_ms = {}").format(
                sql.Identifier(self._schema), sql.Literal(self._now_ms)
            )
        )

    def _execute(self, statement: sql.Composed) -> None:
        _behind_the_provider().execute(statement)


_EMPTY = sql.SQL(
    "SELECT {schema}.mark_moved(NULL) FROM {schema}.store WHERE moved_to IS NOT NULL; "
    "UPDATE {schema}.store SET latest_at = 0; "
    + "; ".join(
        f"DELETE FROM {{schema}}.{table}"
        for table in (
            "instances",
            "executions",
            "history",
            "kv_store",
            "kv_delta",
            "orchestrator_queue",
            "instance_locks",
            "worker_queue",
            "sessions",
            "dead_letters",
            "workers",
            "lanes",
        )
    )
)


def empty(schema: str) -> None:
    """Empty all tables of the schema."""
    _behind_the_provider().execute(_EMPTY.format(schema=sql.Identifier(schema)))


def new_schema() -> str:
    """A fresh schema on the shared server, with everything in it."""
    schema = f"test_{os.getpid()}_{next(_numbers)}"
    provider = PostgresProvider(shared_server().dsn, schema=schema)
    # In a thread, because the caller may be inside an event loop.
    thread = threading.Thread(target=lambda: asyncio.run(provider.migrate()))
    thread.start()
    thread.join()
    return schema


def _with_clock(schema: str) -> str:
    """Its time is kept in a table: a function that is replaced has every plan made anew."""
    _behind_the_provider().execute(
        sql.SQL(
            "CREATE TABLE {schema}.clock_of_the_kit AS SELECT 0::bigint AS now_ms; "
            "CREATE OR REPLACE FUNCTION {schema}.now_ms() RETURNS bigint LANGUAGE sql VOLATILE "
            "AS 'SELECT now_ms FROM {schema}.clock_of_the_kit'"
        ).format(schema=sql.Identifier(schema))
    )
    return schema
