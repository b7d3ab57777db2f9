"""Connections: settings that are read back, the schema, errors, and use by an activity."""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import errno
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import apsw

from perdure.errors import (
    CorruptData,
    ProviderError,
    StoreBusy,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    UsageError,
)
from perdure.logs import get_logger
from perdure.model.wire import FORMAT_VERSION
from perdure.providers.migrate import Migration, due_migrations, load_migrations
from perdure.providers.sqlite.guards import not_a_database

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from perdure.clock import Clock
    from perdure.providers.sqlite.database import System

_log = get_logger("perdure.sqlite")

Durability: TypeAlias = Literal["full", "relaxed"]

APPLICATION_ID: Final = 0x50455244
"""Marks a database file as ours."""

BUSY_SECONDS_MAX: Final = 10.0
"""Longest wait of one statement for another writer."""

_SAFE_SQLITE: Final = (3, 51, 3)
"""Before it, two connections that checkpoint at once could lose committed transactions."""

STATEMENTS_KEPT: Final = 128
"""Prepared statements of a connection.

More than one kind of load uses, and few: apsw looks for a statement from the first slot on, and
puts it into the next slot in turn, so that each execution searches half of the slots. With 512 the
search took 5 % of a step.
"""

INCREMENTAL: Final = 2
"""The value of PRAGMA auto_vacuum for a file whose free pages are given back bit by bit."""

_SYNCHRONOUS: Final = {"full": 2, "relaxed": 1}

MIGRATIONS: Final = load_migrations("perdure.providers.sqlite")


def check_library() -> None:
    """Raise StoreRefused for an SQLite version that is known to lose data."""
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")) < _SAFE_SQLITE:
        safe = ".".join(map(str, _SAFE_SQLITE))
        raise StoreRefused(
            "open",
            f"SQLite {version} can lose committed transactions; {safe} or later is needed: "
            "upgrade the package apsw",
        )


def connect_writer(
    path: Path, durability: Durability, busy_handler: BusyHandler
) -> RestrictedConnection:
    """Return the connection that writes. A new file is switched to WAL."""
    connection = _connect(path, apsw.SQLITE_OPEN_READWRITE, busy_handler)
    with _closed_on_error(connection):
        check_application(connection, path)
        if connection.pragma("journal_mode") != "wal":
            _set(connection, path, journal_mode="wal")
        # The two in the middle matter on macOS only, where a plain fsync does not reach the disk.
        _set(
            connection,
            path,
            synchronous=_SYNCHRONOUS[durability],
            fullfsync=1,
            checkpoint_fullfsync=1,
            cache_size=-32_768,
        )
    return connection


def set_durability(connection: apsw.Connection, durability: Durability) -> None:
    """Let the next transactions of the writing connection wait for the disk, or not."""
    connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")


def connect_memory(clock: Clock) -> RestrictedConnection:
    """Return a new database in memory with its schema."""
    connection = RestrictedConnection(":memory:", statementcachesize=STATEMENTS_KEPT)
    connection.wait_with(lambda _: False)
    _keep_plans(connection)
    connection.pragma("temp_store", 2)
    _apply(connection, MIGRATIONS, clock)
    return connection


def connect_reader(path: Path, busy_handler: BusyHandler) -> apsw.Connection:
    """Return a connection that cannot write."""
    connection = _connect(path, apsw.SQLITE_OPEN_READONLY, busy_handler)
    with _closed_on_error(connection):
        _set(connection, path, query_only=1, cache_size=-8_192)
    return connection


def due(connection: apsw.Connection, path: Path) -> Sequence[Migration]:
    """Return the migrations to apply. Raise an error for a newer schema."""
    return due_migrations(MIGRATIONS, _schema_version(connection), str(path))


def migrate(connection: apsw.Connection, path: Path, clock: Clock) -> None:
    """Bring the schema up to date. If several processes try at once, one of them does it."""
    if not due(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        _apply(connection, due(connection, path), clock)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _apply(connection: apsw.Connection, migrations: Sequence[Migration], clock: Clock) -> None:
    for migration in migrations:
        connection.execute(migration.sql)
        connection.pragma("user_version", migration.number)
    connection.pragma("application_id", APPLICATION_ID)
    connection.execute(
        "INSERT OR IGNORE INTO store_info (id, format_version, next_message_id, created_at)"
        " VALUES (1, ?, 1, ?)",
        (FORMAT_VERSION, clock.now_ms()),
    )


def disconnect(connection: apsw.Connection) -> None:
    """Close a connection, also a broken one; an error is only logged."""
    try:
        connection.close(force=True)
    except apsw.Error as error:
        _log.warning("closing a connection: %s", error)


def moved_to(connection: apsw.Connection) -> str | None:
    """Return the place that the content was moved to, or None."""
    location: str | None = connection.execute("SELECT moved_to FROM store_info").get
    return location


_TABLES: Final = (
    *("instances", "executions", "kv_store", "kv_delta", "orchestrator_queue", "instance_locks"),
    *("worker_queue", "sessions", "dead_letters", "workers", "history"),
)
_STORE_WAS_MOVED: Final = "the store was moved"
_REFUSED_CHANGES: Final = tuple(
    (f"refuse_{change}_of_{table}".lower(), change, table)
    for table in _TABLES
    for change in ("INSERT", "UPDATE", "DELETE")
    # A row of history is never changed. The directory store moves its text out of memory.
    if (change, table) != ("UPDATE", "history")
)


def enforce_moved_mark(connection: apsw.Connection) -> None:
    """Let every change of a table fail if the store is marked as moved, else allow changes.

    Triggers do it: they cost nothing while there is no mark, and every connection of every process
    obeys them from the commit that creates them on.
    """
    is_moved = moved_to(connection) is not None
    for name, change, table in _REFUSED_CHANGES:
        connection.execute(
            f"CREATE TRIGGER IF NOT EXISTS {name} BEFORE {change} ON {table}"
            f" BEGIN SELECT RAISE(ABORT, '{_STORE_WAS_MOVED}'); END"
            if is_moved
            else f"DROP TRIGGER IF EXISTS {name}"
        )


def is_refused_change(error: apsw.Error) -> bool:
    """Return True if a statement failed because the store is marked as moved."""
    return isinstance(error, apsw.ConstraintError) and _STORE_WAS_MOVED in str(error)


def translate(operation: str, error: apsw.Error, label: str) -> ProviderError:
    """Return SQLite's error as one of ours; the caller chains the original."""
    text = f"{label}: {error}"
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
    """Return True if the last failure was a full disk, also if SQLite reported another error."""
    try:
        return connection.system_errno in {errno.ENOSPC, errno.EDQUOT}
    except apsw.ConnectionClosedError:
        return False


def breaks_connection(error: apsw.Error) -> bool:
    """Return True if the cache of the connection cannot be trusted after this error."""
    return isinstance(
        error,
        apsw.IOError
        | apsw.CorruptError
        | apsw.CantOpenError
        | apsw.NoMemError
        | apsw.ConnectionClosedError,
    )


def _connect(path: Path, flags: int, busy_handler: BusyHandler) -> RestrictedConnection:
    connection = RestrictedConnection(str(path), flags=flags, statementcachesize=STATEMENTS_KEPT)
    with _closed_on_error(connection):
        connection.wait_with(busy_handler)
        _keep_plans(connection)
        # Only the writer checkpoints, when it wants to.
        connection.wal_autocheckpoint(0)
        _set(connection, path, mmap_size=0, temp_store=2, trusted_schema=0, cell_size_check=1)
    return connection


@contextmanager
def _closed_on_error(connection: apsw.Connection) -> Generator[None]:
    try:
        yield
    except BaseException:
        disconnect(connection)
        raise


def _keep_plans(connection: apsw.Connection) -> None:
    """Else SQLite prepares statements again when the values of their parameters change."""
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)


class BusyHandler:
    """Waits in short random steps: SQLite's own handler sleeps up to 100 ms and starves some."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.is_patient = True
        """Else a statement that would have to wait fails at once."""
        self._deadline = 0.0

    def __call__(self, attempts: int) -> bool:
        if not self.is_patient:
            return False
        system = self._system
        now = system.monotonic()
        if attempts == 0:
            self._deadline = now + BUSY_SECONDS_MAX
        if now >= self._deadline:
            return False
        system.pause(system.uniform(0.0002, 0.002))
        return True


def _set(connection: apsw.Connection, path: Path, **settings: str | int) -> None:
    """Set pragmas and read them back: SQLite ignores what it does not understand."""
    for name, value in settings.items():
        connection.pragma(name, value)
        actual = connection.pragma(name)
        if actual != value:
            raise StoreRefused(
                "open",
                f"SQLite did not take PRAGMA {name} = {value} for {str(path)!r}, it is {actual!r}; "
                "the store would not be safe",
            )


def check_application(connection: apsw.Connection, path: Path) -> None:
    """Raise StoreRefused for a database of another application."""
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


# --- the connection in the hands of a transactional activity


class RaisedByCode(Exception):
    """Carries an error of the activity's code, which reaches the caller unchanged."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


class RestrictedConnection(apsw.Connection):
    """Refuses, while an activity uses it, methods whose effect would outlast the activity."""

    is_restricted = False
    disk_error: apsw.Error | None = None
    """Last error of the store's own disk while the activity used the connection."""
    _busy_handler: Callable[[int], bool] | None = None

    def wait_with(self, busy_handler: Callable[[int], bool]) -> None:
        self._busy_handler = busy_handler
        self.set_busy_handler(busy_handler)

    def restrict(self) -> None:
        self.is_restricted = True
        self.disk_error = None
        self.cursor_factory = _RestrictedCursor

    def release(self) -> None:
        """Undo the settings that the activity may have changed."""
        self.is_restricted = False
        self.cursor_factory = apsw.Cursor
        self.row_trace = self.exec_trace = self.authorizer = None
        self.convert_binding = self.convert_jsonb = None
        self.set_busy_handler(self._busy_handler)


@contextmanager
def restricted(connection: apsw.Connection) -> Generator[None]:
    """Give the connection to an activity. Errors of its code are raised as RaisedByCode, those of
    the store's disk as they are.
    """
    assert isinstance(connection, RestrictedConnection)
    connection.restrict()
    try:
        yield
    except BaseException as error:
        if error is connection.disk_error:
            raise
        raise RaisedByCode(error) from error
    finally:
        connection.release()


class _RestrictedCursor(apsw.Cursor):
    """Notes disk errors of this connection; the activity may use other connections too."""


def _noting_disk_errors(name: str) -> Callable[..., Any]:
    own = getattr(apsw.Cursor, name)

    @wraps(own)
    def method(cursor: _RestrictedCursor, *args: Any, **named: Any) -> Any:
        try:
            return own(cursor, *args, **named)
        except (apsw.FullError, apsw.IOError) as error:
            connection = cursor.connection
            assert isinstance(connection, RestrictedConnection)
            connection.disk_error = error
            raise

    return method


for _name in ("execute", "executemany", "__next__", "fetchall", "fetchone"):
    setattr(_RestrictedCursor, _name, _noting_disk_errors(_name))


def _refused_while_restricted(name: str) -> Callable[..., Any]:
    own = getattr(apsw.Connection, name)

    @wraps(own)
    def method(connection: RestrictedConnection, *args: Any, **named: Any) -> Any:
        if connection.is_restricted:
            raise UsageError(
                f"a transactional activity must not call {name}() of the store's connection: "
                "leave it out, or open a connection of your own for it"
            )
        return own(connection, *args, **named)

    return method


for _name in (
    "aclose", "close", "collation_needed", "collationneeded", "config", "deserialize",
    "preupdate_hook", "set_commit_hook", "set_profile", "set_progress_handler",
    "set_rollback_hook", "set_update_hook", "set_wal_hook", "setcommithook", "setprofile",
    "setprogresshandler", "setrollbackhook", "setupdatehook", "setwalhook", "trace_v2",
    "wal_autocheckpoint",
):  # fmt: skip
    setattr(RestrictedConnection, _name, _refused_while_restricted(_name))
