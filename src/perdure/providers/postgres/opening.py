"""Opens a store: checks the server, brings the schema up to date, checks the content.

Tables change by migrations: numbered files in ``tables``, each applied once. Functions and views
are files in ``functions``, applied as a whole when their checksum differs from the one that the
store has recorded. Both happen in one transaction, which one process at a time can run.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.errors import (
    InsufficientPrivilege,
    InvalidSchemaName,
    UndefinedColumn,
    UndefinedTable,
)
from psycopg.rows import dict_row

from perdure.errors import StoreRefused
from perdure.model.wire import FORMAT_VERSION
from perdure.providers import rules
from perdure.providers.migrate import Migration, due_migrations, folder_of, load_migrations
from perdure.providers.postgres.address import StoreAddress, check_server
from perdure.providers.postgres.calling import answer_within
from perdure.providers.postgres.faults import message_of
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.postgres.clock import ServerClock

_PACKAGE: Final = "perdure.providers.postgres"
_FUNCTIONS: Final = "functions"
_FIRST_LAYOUT: Final = (13, "f60d7d5e309906230d2f7b5e41d036d5c0450ad8773894e046087484febf3249")
"""Number and checksum of the migrations that led to the tables of 0001 before there was that file.
They contained the functions as well."""

_LOCK_SECONDS: Final = 300
"""Limit for the wait for another process that changes the schema, perhaps a big table."""
_MIGRATE_SECONDS: Final = 6 * 3600
"""Limit for all of it, for a server that stops answering in between. A big table takes long."""
_TIME_LIMITS = sql.SQL("SET LOCAL lock_timeout = {}; SET LOCAL statement_timeout = 0").format(
    sql.Literal(f"{_LOCK_SECONDS}s")
)
_NOT_THERE: Final = (UndefinedTable, UndefinedColumn, InvalidSchemaName)
_STATE: Final[LiteralString] = """
    (
        SELECT jsonb_agg(jsonb_build_array(m.number, m.name, m.checksum))
        FROM {schema}.migrations m
    ) AS applied,
    to_jsonb(s) ->> 'functions_version' AS functions_version,
    to_jsonb(s) ->> 'functions_checksum' AS functions_checksum
    FROM (SELECT) AS one LEFT JOIN {schema}.store s ON true
"""
"""Reads the row as JSON, because older tables have no columns for the functions."""
_READ_STATE: Final[LiteralString] = "SELECT" + _STATE
_FACTS: Final[LiteralString] = """
    SELECT current_setting('server_version_num') AS server_version_num,
        current_setting('server_encoding') AS server_encoding,
        current_setting('transaction_isolation') AS transaction_isolation"""
_READ_STORE: Final[LiteralString] = (
    _FACTS + ", s.format_version, s.moved_to, {schema}.now_ms() AS now_ms," + _STATE
)
_CREATE_MIGRATIONS = sql.SQL(
    """
    CREATE TABLE IF NOT EXISTS {schema}.migrations (
        number     integer PRIMARY KEY,
        name       text NOT NULL,
        checksum   text NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """
)
_FORGET_MIGRATIONS = sql.SQL("DELETE FROM {schema}.migrations")
_RECORD_MIGRATION = sql.SQL(
    "INSERT INTO {schema}.migrations (number, name, checksum) VALUES (%s, %s, %s)"
)
_RECORD_STORE = sql.SQL(
    """
    INSERT INTO {schema}.store (format_version, created_at) VALUES (%s, {schema}.now_ms())
    ON CONFLICT DO NOTHING
    """
)
_RECORD_FUNCTIONS = sql.SQL(
    "UPDATE {schema}.store SET functions_version = %s, functions_checksum = %s"
)


class SchemaState(NamedTuple):
    """The migrations and functions that a schema has recorded."""

    applied: Sequence[tuple[int, str, str]] = ()
    """Number, name and checksum of each migration."""
    functions_version: str | None = None
    """The version of perdure that has applied the functions."""
    functions_checksum: str | None = None

    @property
    def is_first_layout(self) -> bool:
        checksums = [checksum for _, _, checksum in sorted(self.applied)]
        return (len(checksums), _checksum("\n".join(checksums))) == _FIRST_LAYOUT


async def prepare_store(
    connection: AsyncConnection[Any],
    address: StoreAddress,
    clock: ServerClock,
    *,
    allow_moved: bool,
    auto_migrate: bool,
) -> None:
    """Bring the schema up to date, or refuse the store. Sends one statement if nothing is due."""
    try:
        found = await _ask(connection, address, _READ_STORE, clock)
    except psycopg.ProgrammingError:
        found = None  # the schema, or a part of it, does not exist yet
    if found is None or due_for(_state_in(found), address):
        await _bring_up_to_date(connection, address, auto_migrate=auto_migrate)
        found = await _ask(connection, address, _READ_STORE, clock)
    check_server(found, address.location)
    if found["format_version"] > FORMAT_VERSION:
        raise StoreRefused(
            "open",
            f"{address.location} has format {found['format_version']}, written by a newer version "
            f"of perdure; this one knows up to {FORMAT_VERSION}. Upgrade perdure",
        )
    if found["moved_to"] is not None and not allow_moved:
        raise rules.store_moved(address.location, found["moved_to"])


def _state_in(found: dict[str, Any]) -> SchemaState:
    return SchemaState(
        found["applied"] or (), found["functions_version"], found["functions_checksum"]
    )


async def _bring_up_to_date(
    connection: AsyncConnection[Any], address: StoreAddress, *, auto_migrate: bool
) -> None:
    check_server(await _ask(connection, address, _FACTS), address.location)
    due = await pending(connection, address)
    if due and not auto_migrate:
        names = ", ".join(f"{migration.number} ({migration.name})" for migration in due)
        raise StoreRefused(
            "open",
            f"{address.location} lacks the migrations {names}; run 'perdure db migrate' "
            "with a role that owns the schema",
        )
    if due:
        await migrate(connection, address)


async def _ask(
    connection: AsyncConnection[Any],
    address: StoreAddress,
    statement: LiteralString,
    clock: ServerClock | None = None,
) -> dict[str, Any]:
    """Return the only row of a statement, by column."""
    cursor = connection.cursor(row_factory=dict_row)
    sent_at = time.monotonic()
    with answer_within(connection, address.answer_seconds):
        # Sent once: preparing the statement would take a second round trip.
        await cursor.execute(_in(address, sql.SQL(statement)), prepare=False)
        found = await cursor.fetchone()
    assert found is not None
    if clock is not None:
        clock.note(found["now_ms"], sent_at)
    return found


# --- migrations and functions


async def pending(connection: AsyncConnection[Any], address: StoreAddress) -> Sequence[Migration]:
    """Return what has to be applied: see ``due_for``."""
    return due_for(await _read_state(connection, address), address)


async def _read_state(connection: AsyncConnection[Any], address: StoreAddress) -> SchemaState:
    try:
        with answer_within(connection, address.answer_seconds):
            async with connection.transaction():  # an error ends only this one
                return _state_in(await _ask(connection, address, _READ_STATE))
    except _NOT_THERE:
        return SchemaState()


def due_for(state: SchemaState, address: StoreAddress) -> Sequence[Migration]:
    """Return the migrations that are due, then the functions as the last one if they differ.

    Raises StoreRefused for tables that are newer, or that other files have made. Functions of a
    newer version stay: an older worker beside newer ones uses theirs.
    """
    tables = _tables()
    applied = sorted(state.applied)
    if state.is_first_layout:
        applied = [(1, tables[0].name, _checksum(tables[0].sql))]
    due = due_migrations(tables, len(applied), address.location)
    for (number, name, checksum), migration in zip(applied, tables, strict=False):
        if checksum != _checksum(migration.sql):
            raise StoreRefused(
                "open",
                f"{address.location}: migration {number} ({name}) is not the one that this version "
                "of perdure has; the schema was made by another build",
            )
    functions = _functions()
    if not due and (
        state.functions_checksum == _checksum(functions.sql)
        or _version_of(state.functions_version) > _version_of(VERSION)
    ):
        return ()
    return (*due, functions)


async def migrate(connection: AsyncConnection[Any], address: StoreAddress) -> Sequence[Migration]:
    """Apply all that is due, or nothing if that fails; return what was applied.

    Processes that start at the same time wait for each other and find it done.
    """
    if not await pending(connection, address):
        return ()
    with answer_within(connection, _MIGRATE_SECONDS):
        return await _migrate(connection, address)


async def _migrate(connection: AsyncConnection[Any], address: StoreAddress) -> Sequence[Migration]:
    async with connection.transaction():
        with answer_within(connection, _LOCK_SECONDS + address.answer_seconds):
            await connection.execute(_TIME_LIMITS)
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_lock_number(address),))
        state = await _read_state(connection, address)
        due = due_for(state, address)
        if not due:
            return due
        try:
            await _apply(connection, address, state, due)
        except InsufficientPrivilege as error:
            raise StoreRefused(
                "migrate",
                f"{address.location}: {message_of(error)}; let a role that owns the schema run "
                "'perdure db migrate' and grant this one its rights with grant_worker, or let it "
                "make the schema itself (GRANT CREATE ON DATABASE)",
            ) from error
        return due


async def _apply(
    connection: AsyncConnection[Any],
    address: StoreAddress,
    state: SchemaState,
    due: Sequence[Migration],
) -> None:
    cursor = await connection.execute(
        "SELECT FROM pg_namespace WHERE nspname = %s", (address.schema,)
    )
    if cursor.rowcount == 0:
        await connection.execute(_in(address, sql.SQL("CREATE SCHEMA {schema}")))
    # Functions keep this path, so that objects in other schemas cannot replace ours.
    path = sql.SQL("SET LOCAL search_path TO {schema}, pg_temp")
    await connection.execute(_in(address, path))
    await connection.execute(_in(address, _CREATE_MIGRATIONS))
    if state.is_first_layout:
        await connection.execute(_in(address, _FORGET_MIGRATIONS))
        await _record(connection, address, _tables()[0])
    for migration in due:
        await connection.execute(migration.sql.encode(), prepare=False)
        if migration.name != _FUNCTIONS:
            await _record(connection, address, migration)
    await connection.execute(_in(address, _RECORD_STORE), (FORMAT_VERSION,))
    functions = (VERSION, _checksum(_functions().sql))
    await connection.execute(_in(address, _RECORD_FUNCTIONS), functions)


async def _record(
    connection: AsyncConnection[Any], address: StoreAddress, migration: Migration
) -> None:
    values = (migration.number, migration.name, _checksum(migration.sql))
    await connection.execute(_in(address, _RECORD_MIGRATION), values)


# --- the files


async def read_files() -> None:
    """Read the files now, while the server works on something else."""
    for each in (*_tables(), _functions()):
        _checksum(each.sql)


@functools.cache
def _tables() -> tuple[Migration, ...]:
    return load_migrations(_PACKAGE, "tables")


@functools.cache
def _functions() -> Migration:
    """Return all functions and views as one migration of the newest tables."""
    files = sorted(folder_of(_PACKAGE, _FUNCTIONS).glob("*.sql"))
    text = "\n".join(each.read_text(encoding="utf-8") for each in files)
    return Migration(_tables()[-1].number, _FUNCTIONS, text)


@functools.cache
def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _version_of(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def _in(address: StoreAddress, statement: sql.SQL) -> sql.Composed:
    return statement.format(schema=sql.Identifier(address.schema))


def _lock_number(address: StoreAddress) -> int:
    digest = hashlib.sha256(f"perdure {address.schema}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)
