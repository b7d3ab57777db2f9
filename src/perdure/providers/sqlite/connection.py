"""Opening connections with settings that are read back, and SQLite's errors in our words."""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import errno
import logging
import random
import time
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import apsw

from perdure.errors import (
    CorruptData,
    ProviderError,
    StoreBusy,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from perdure.model.wire import FORMAT_VERSION
from perdure.providers._shared.migrate import due_migrations, load_migrations
from perdure.providers.sqlite.lending import LendableConnection
from perdure.providers.sqlite.place import not_a_database

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from perdure.clock import Clock
    from perdure.providers._shared.migrate import Migration

_log = logging.getLogger("perdure.sqlite")

Durability: TypeAlias = Literal["full", "relaxed"]

APPLICATION_ID: Final = 0x50455244
"""Marks a database file as ours."""

BUSY_SECONDS_MAX: Final = 10.0
"""How long one statement waits for another writer."""

_SAFE_SQLITE: Final = (3, 51, 3)
"""Before it, two connections that checkpoint at once could lose committed transactions."""

_SYNCHRONOUS: Final = {"full": 2, "relaxed": 1}

MIGRATIONS: Final = load_migrations("perdure.providers.sqlite")


def check_library() -> None:
    """Refuse an SQLite that is known to lose data."""
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")) < _SAFE_SQLITE:
        safe = ".".join(map(str, _SAFE_SQLITE))
        raise StoreRefused(
            "open",
            f"SQLite {version} can lose committed transactions; {safe} or later is needed: "
            "upgrade the package apsw",
        )


def connect_writer(path: Path, durability: Durability) -> LendableConnection:
    """The connection that writes; switches the file to WAL if it is new."""
    connection = _connect(path, apsw.SQLITE_OPEN_READWRITE)
    try:
        check_application(connection, path)
        if connection.pragma("journal_mode") != "wal":
            _set(connection, path, "journal_mode", "wal")
        _set(connection, path, "synchronous", _SYNCHRONOUS[durability])
        # Both matter on macOS only, where a plain fsync does not reach the disk.
        _set(connection, path, "fullfsync", 1)
        _set(connection, path, "checkpoint_fullfsync", 1)
        _set(connection, path, "cache_size", -32_768)
    except BaseException:
        disconnect(connection)
        raise
    return connection


def connect_reader(path: Path) -> apsw.Connection:
    """A connection that cannot write."""
    connection = _connect(path, apsw.SQLITE_OPEN_READONLY)
    try:
        _set(connection, path, "query_only", 1)
        _set(connection, path, "cache_size", -8_192)
    except BaseException:
        disconnect(connection)
        raise
    return connection


def due(connection: apsw.Connection, path: Path) -> Sequence[Migration]:
    """What has to be applied; a newer schema is refused."""
    return due_migrations(MIGRATIONS, _schema_version(connection), str(path))


def migrate(connection: apsw.Connection, path: Path, clock: Clock) -> None:
    """Bring the schema up to date; several processes may try at once, one of them does it."""
    if not due(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for migration in due(connection, path):
            connection.execute(migration.sql)
            connection.pragma("user_version", migration.number)
        connection.pragma("application_id", APPLICATION_ID)
        connection.execute(
            "INSERT OR IGNORE INTO store_info (id, format_version, next_message_id, created_at)"
            " VALUES (1, ?, 1, ?)",
            (FORMAT_VERSION, clock.now_ms()),
        )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def disconnect(connection: apsw.Connection) -> None:
    """Close a connection, however badly off it is: there is nothing to be done about an error."""
    try:
        connection.close(force=True)
    except apsw.Error as error:
        _log.warning("closing a connection: %s", error)


def moved_to(connection: apsw.Connection) -> str | None:
    """Where the store's content has gone, if it has."""
    location: str | None = connection.execute("SELECT moved_to FROM store_info").get
    return location


def translate(operation: str, error: apsw.Error, path: Path) -> ProviderError:
    """SQLite's error as one of ours; the caller chains the original."""
    text = f"{str(path)!r}: {error}"
    match error:
        case apsw.BusyError() | apsw.LockedError() | apsw.ProtocolError():
            return StoreBusy(operation, f"{text}; another process holds the database, try again")
        case apsw.FullError():
            return StoreFull(operation, f"{text}; free some space, then it goes on by itself")
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError():
            return CorruptData(
                operation,
                f"{text}; the file is damaged: keep it with its -wal, and restore a backup",
            )
        case apsw.IOError() | apsw.CantOpenError() | apsw.ReadOnlyError() | apsw.PermissionsError():
            return StoreUnavailable(operation, f"{text}; check the disk and its permissions")
        case apsw.NoMemError() | apsw.InterruptError() | apsw.SchemaChangeError():
            return StoreUnavailable(operation, text)
        case _:
            return ProviderError(operation, text)


def is_out_of_space(connection: apsw.Connection) -> bool:
    """Whether the last failure was for want of space, however SQLite reported it."""
    try:
        return connection.system_errno in {errno.ENOSPC, errno.EDQUOT}
    except apsw.ConnectionClosedError:
        return False


def breaks_connection(error: apsw.Error) -> bool:
    """After such an error nothing that the connection holds in memory can be trusted."""
    return isinstance(
        error,
        apsw.IOError
        | apsw.CorruptError
        | apsw.CantOpenError
        | apsw.NoMemError
        | apsw.ConnectionClosedError,
    )


def _connect(path: Path, flags: int) -> LendableConnection:
    connection = LendableConnection(str(path), flags=flags, statementcachesize=512)
    try:
        connection.wait_with(BusyHandler())
        # Plans stay what they are: else SQLite prepares statements again when values change.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        # Only the writer checkpoints, when it wants to.
        connection.wal_autocheckpoint(0)
        _set(connection, path, "mmap_size", 0)
        _set(connection, path, "temp_store", 2)
        _set(connection, path, "trusted_schema", 0)
        _set(connection, path, "cell_size_check", 1)
    except BaseException:
        disconnect(connection)
        raise
    return connection


class BusyHandler:
    """Waits in short random steps: SQLite's own handler sleeps up to 100 ms and starves some."""

    def __init__(self) -> None:
        self.is_patient = True
        """Else a statement that would have to wait fails at once."""
        self._deadline = 0.0

    def __call__(self, attempts: int) -> bool:
        if not self.is_patient:
            return False
        now = time.monotonic()
        if attempts == 0:
            self._deadline = now + BUSY_SECONDS_MAX
        if now >= self._deadline:
            return False
        time.sleep(random.uniform(0.0002, 0.002))
        return True


def _set(connection: apsw.Connection, path: Path, name: str, value: str | int) -> None:
    """Set a pragma and read it back: SQLite ignores what it does not understand."""
    connection.pragma(name, value)
    actual = connection.pragma(name)
    if actual != value:
        raise StoreRefused(
            "open",
            f"SQLite did not take PRAGMA {name} = {value} for {str(path)!r}, it is {actual!r}; "
            "the store would not be safe",
        )


def check_application(connection: apsw.Connection, path: Path) -> None:
    """Refuse a file that somebody else made."""
    try:
        # In this order: tables and mark appear in one commit, perhaps between the two looks.
        has_tables = connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").get
        application_id = connection.pragma("application_id")
    except apsw.NotADBError as error:
        raise not_a_database(path) from error
    if has_tables and application_id != APPLICATION_ID:
        raise StoreRefused(
            "open",
            f"{str(path)!r} is a database of another application; name another file for the store",
        )


def _schema_version(connection: apsw.Connection) -> int:
    version = connection.pragma("user_version")
    assert isinstance(version, int)
    return version
