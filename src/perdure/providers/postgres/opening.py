"""Opening a store: whether the server will do, what is due, and what is in the schema."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row

from perdure.errors import StoreRefused
from perdure.model.wire import FORMAT_VERSION
from perdure.providers._shared import moved
from perdure.providers.postgres import queries
from perdure.providers.postgres.migrate import due_after, migrate, pending
from perdure.providers.postgres.place import ANSWER_SECONDS, check_server
from perdure.providers.postgres.silence import answer_within

if TYPE_CHECKING:
    from typing import LiteralString

    from perdure.providers.postgres.connections import Row
    from perdure.providers.postgres.place import Place
    from perdure.providers.postgres.queries import Statements
    from perdure.providers.postgres.server_clock import ServerClock


async def prepare_store(
    connection: psycopg.AsyncConnection[Row],
    place: Place,
    statements: Statements,
    clock: ServerClock,
    *,
    allow_moved: bool,
    auto_migrate: bool,
) -> None:
    """Bring the schema up to date, or refuse the store. One statement if there is nothing to do."""
    try:
        found = await _ask(connection, statements, queries.OPEN_STORE, clock)
    except psycopg.ProgrammingError:
        found = None  # not there yet, or not all of it
    if found is None or due_after(found["applied"] or (), place):
        await _bring_up_to_date(connection, place, statements, auto_migrate=auto_migrate)
        found = await _ask(connection, statements, queries.OPEN_STORE, clock)
        assert found is not None
    check_server(found, place.location)
    if found["format_version"] > FORMAT_VERSION:
        raise StoreRefused(
            "open",
            f"{place.location} has format {found['format_version']}, written by a newer version "
            f"of perdure; this one knows up to {FORMAT_VERSION}. Upgrade perdure",
        )
    if found["moved_to"] is not None and not allow_moved:
        raise moved.refusal(place.location, found["moved_to"])


async def _bring_up_to_date(
    connection: psycopg.AsyncConnection[Row],
    place: Place,
    statements: Statements,
    *,
    auto_migrate: bool,
) -> None:
    facts = await _ask(connection, statements, queries.GET_FACTS, None)
    assert facts is not None
    check_server(facts, place.location)
    due = await pending(connection, place)
    if due and not auto_migrate:
        numbers = ", ".join(str(migration.number) for migration in due)
        raise StoreRefused(
            "open",
            f"{place.location} lacks the migrations {numbers}; run 'perdure db migrate' "
            "with a role that owns the schema",
        )
    if due:
        await migrate(connection, place)


async def _ask(
    connection: psycopg.AsyncConnection[Row],
    statements: Statements,
    template: LiteralString,
    clock: ServerClock | None,
) -> dict[str, Any] | None:
    cursor = connection.cursor(row_factory=dict_row)
    sent_at = time.monotonic()
    with answer_within(connection, ANSWER_SECONDS):
        # Asked once: a statement that is prepared is sent in two goes.
        await cursor.execute(statements(template), prepare=False)
        found = await cursor.fetchone()
    if found is not None and clock is not None:
        clock.note(found["now_ms"], sent_at)
    return found
