"""Brings a schema up to date: numbered SQL files, under a lock that lets one process at a time."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from perdure.errors import StoreRefused
from perdure.model.wire import FORMAT_VERSION
from perdure.providers._shared.migrate import due_migrations, load_migrations
from perdure.providers.postgres.faults import said_in
from perdure.providers.postgres.place import ANSWER_SECONDS
from perdure.providers.postgres.silence import answer_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg import AsyncConnection

    from perdure.providers._shared.migrate import Migration
    from perdure.providers.postgres.place import Place

_PACKAGE: Final = "perdure.providers.postgres"
# Not to_regclass: the server may answer it from what it remembers of before a wait for a lock.
_HAS_MIGRATIONS: Final = """
    SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = 'migrations'
"""
_LOCK_SECONDS: Final = 300
_PATIENCE = sql.SQL("SET LOCAL lock_timeout = {}; SET LOCAL statement_timeout = 0").format(
    sql.Literal(f"{_LOCK_SECONDS}s")
)
_APPLIED = sql.SQL("SELECT number, name, checksum FROM {schema}.migrations ORDER BY number")
_TABLE = sql.SQL(
    """
    CREATE TABLE IF NOT EXISTS {schema}.migrations (
        number     integer PRIMARY KEY,
        name       text NOT NULL,
        checksum   text NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """
)
_RECORD = sql.SQL("INSERT INTO {schema}.migrations (number, name, checksum) VALUES (%s, %s, %s)")
_STORE = sql.SQL(
    """
    INSERT INTO {schema}.store (format_version, created_at) VALUES (%s, {schema}.now_ms())
    ON CONFLICT DO NOTHING
    """
)


async def pending(connection: AsyncConnection[Any], place: Place) -> Sequence[Migration]:
    """What has to be applied. Refuses a schema that is newer, or not what the files say."""
    applied: list[tuple[int, str, str]] = []
    with answer_within(connection, ANSWER_SECONDS):
        cursor = await connection.execute(_HAS_MIGRATIONS, (place.schema,))
        if cursor.rowcount == 1:
            applied = await (await connection.execute(_in(place, _APPLIED))).fetchall()
    return due_after(applied, place)


def due_after(applied: Sequence[tuple[int, str, str]], place: Place) -> Sequence[Migration]:
    """``applied``: number, name and checksum of each, in any order. Refuses as ``pending``."""
    migrations = _migrations()
    due = due_migrations(migrations, len(applied), place.location)
    for (number, name, checksum), migration in zip(sorted(applied), migrations, strict=False):
        if checksum != _checksum(migration):
            raise StoreRefused(
                "open",
                f"{place.location}: migration {number} ({name}) is not the one that this version "
                "of perdure has; the schema was made by another build",
            )
    return due


async def read_ahead() -> None:
    """Read the files now, while the server is busy with something else."""
    for migration in _migrations():
        _checksum(migration)


async def migrate(connection: AsyncConnection[Any], place: Place) -> Sequence[Migration]:
    """Apply what is due, all of it or nothing; returns what was applied.

    Processes that start at the same time wait for each other and find it done.
    """
    if not await pending(connection, place):
        return ()
    async with connection.transaction():
        with answer_within(connection, _LOCK_SECONDS + ANSWER_SECONDS):
            # Others may be at it, and a big table takes its time.
            await connection.execute(_PATIENCE)
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_lock_number(place),))
        due = await pending(connection, place)
        if not due:
            return due
        try:
            await _apply(connection, place, due)
        except InsufficientPrivilege as error:
            raise StoreRefused(
                "migrate",
                f"{place.location}: {said_in(error)}; let a role that owns the schema run "
                "'perdure db migrate' and grant this one its rights with grant_worker, or let it "
                "make the schema itself (GRANT CREATE ON DATABASE)",
            ) from error
        return due


async def _apply(connection: AsyncConnection[Any], place: Place, due: Sequence[Migration]) -> None:
    cursor = await connection.execute(
        "SELECT FROM pg_namespace WHERE nspname = %s", (place.schema,)
    )
    if cursor.rowcount == 0:
        await connection.execute(_in(place, sql.SQL("CREATE SCHEMA {schema}")))
    # Functions keep this path; what a user puts into another schema cannot get in between.
    path = sql.SQL("SET LOCAL search_path TO {schema}, pg_temp")
    await connection.execute(_in(place, path))
    await connection.execute(_in(place, _TABLE))
    for migration in due:
        await connection.execute(migration.sql.encode(), prepare=False)
        await connection.execute(
            _in(place, _RECORD), (migration.number, migration.name, _checksum(migration))
        )
    await connection.execute(_in(place, _STORE), (FORMAT_VERSION,))


@functools.cache
def _migrations() -> tuple[Migration, ...]:
    return load_migrations(_PACKAGE)


def _in(place: Place, statement: sql.SQL) -> sql.Composed:
    return statement.format(schema=sql.Identifier(place.schema))


@functools.cache
def _checksum(migration: Migration) -> str:
    return hashlib.sha256(migration.sql.encode()).hexdigest()


def _lock_number(place: Place) -> int:
    digest = hashlib.sha256(f"perdure {place.schema}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)
