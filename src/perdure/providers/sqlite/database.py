"""The database of a store, and the one connection that writes it.

``Database`` is what the engine needs of any database; as it is, it serves one in memory.
``FileDatabase`` adds what only a file needs: opening its connection again, the write-ahead log,
commits of other processes, and names that may be removed or replaced while the file is open.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import apsw

from perdure.errors import PerdureError, StoreClosed, StoreFull
from perdure.providers import rules
from perdure.providers.sqlite import connection as connections
from perdure.providers.sqlite import guards, readiness
from perdure.providers.sqlite.connection import BusyHandler
from perdure.providers.sqlite.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from perdure.providers.migrate import Migration
    from perdure.providers.sqlite.connection import Durability, RestrictedConnection
    from perdure.providers.sqlite.system import System
    from perdure.providers.sqlite.transaction import CommitHook

_log = logging.getLogger("perdure.sqlite")

OPEN_SECONDS_MAX: Final = 20.0
"""Longest wait for other processes that are opening the same file."""
IDLE_SECONDS_TO_CHECKPOINT: Final = 1.0
WATCH_SECONDS: Final = (0.015, 0.06)
"""Pause between two looks for commits of other processes, just after one and when idle.

In a virtual machine a look takes 0.25 ms of a processor, most of it to wake the thread up.
"""

PAGES_TO_CHECKPOINT: Final = 8_000
"""32 MiB: the pause of a copy stays short, and a page that changes often is copied once."""
PAGES_IN_PLACE: Final = guards.LOG_BYTES_RESERVED // 4_200
"""Pages that a new log holds without growing; then SQLite starts it over."""
PAGES_BETWEEN_LOOKS: Final = 250
"""A checkpoint that readers kept from finishing is tried again after this many more pages."""
PAGES_TO_INSIST: Final = 14_000
"""55 MiB: beyond this the checkpoint waits for readers."""


class Database:
    """A database in memory. A store of another kind overrides what differs.

    ``open`` and ``close`` run outside of the event loop if the store has threads. All other methods
    are called by the writer, one at a time.
    """

    def __init__(
        self,
        label: str,
        system: System,
        *,
        orphan_grace_ms: int,
        hook: CommitHook | None = None,
    ) -> None:
        self.label = label
        """The store as messages name it."""
        self.system = system
        self._orphan_grace_ms = orphan_grace_ms
        self._hook = hook
        self._transaction: Transaction | None = None

    # --- opening and closing

    def open(self, *, allow_moved: bool) -> None:
        """Make the connection ready. Errors: StoreMoved and others of ``Provider.open``."""
        if self._transaction is None:
            self.adopt(connections.connect_memory(self.system.clock))
        if not allow_moved:
            self.check_not_moved(self.ready().connection)

    def check_not_moved(self, connection: apsw.Connection) -> None:
        """Raise StoreMoved if the content of the store is somewhere else."""
        mark = connections.moved_to(connection)
        if mark is not None:
            raise rules.store_moved(self.label, mark)

    def adopt(self, connection: RestrictedConnection) -> None:
        """Write through this connection, whose schema is up to date."""
        self._transaction = self.transaction_type(
            connection, self._orphan_grace_ms, self.system.random_hex, self._hook
        )

    def rebuild_readiness(self) -> None:
        """Compute all readiness rows from locks, holds and queued messages, in one transaction.

        For a store that keeps only those columns which do not follow from others.
        """
        transaction = self.ready()
        transaction.begin(self.system.clock.now_ms)
        readiness.refresh_all(transaction)
        transaction.execute("COMMIT")

    def started(self) -> None:
        """Called on the event loop when the store is open."""

    def stopped(self) -> None:
        """Called on the event loop when the store is closed."""

    def close(self) -> None:
        """Drop the connection, and with it everything that only memory holds."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            connections.disconnect(transaction.connection)

    transaction_type: type[Transaction] = Transaction
    """A store that keeps the texts of events elsewhere has a subclass with its own ``events``."""

    has_readers = False
    """True: reading threads use ``connect_reader``. False: the writer reads too."""

    def connect_reader(self) -> apsw.Connection:
        """Return a connection that cannot write."""
        raise NotImplementedError

    @property
    def is_connected(self) -> bool:
        """Return whether the next commit finds the connection open."""
        return self._transaction is not None

    # --- around each commit

    def ready(self) -> Transaction:
        """Return the transaction to begin. Errors: any that keeps the store from writing."""
        assert self._transaction is not None
        return self._transaction

    def check_before_reply(self) -> None:
        """Raise if what was just committed may be lost."""

    def set_patient(self, *, is_patient: bool) -> None:
        """Let statements wait for other processes that write, or fail at once with StoreBusy."""

    def reset(self) -> None:
        """Roll back a transaction that an error or a signal has left open."""
        if self._transaction is not None:
            try:
                self._transaction.end()
            except apsw.Error as error:
                _log.warning("rollback in %s failed: %s", self.label, error)

    def known_error(self, operation: str, error: apsw.Error) -> PerdureError:
        """Return SQLite's error as one of ours, with the original as its cause."""
        known: PerdureError = connections.translate(operation, error, self.label)
        transaction = self._transaction
        if transaction is not None and connections.is_out_of_space(transaction.connection):
            known = StoreFull(operation, f"{self.label}: no space left; free some")
        known.__cause__ = error
        return known

    # --- between commits, in a thread of the writer

    def watch(self, *, is_watching: bool) -> None:
        """Look for commits of other processes while the writer is idle, or no longer."""

    def idle_seconds(self) -> float | None:
        """Return after how many idle seconds to call ``use_idle_time``; None: never."""
        return None

    def use_idle_time(self, idle_seconds: float) -> bool:
        """Do what can wait for an idle moment; True if another process has written."""
        return False

    def is_upkeep_due(self, *, is_waited_for: bool) -> bool:
        """Return whether ``keep_up`` should run now, although a commit may wait for it."""
        return False

    def keep_up(self) -> None:
        """Do what must be done after so many commits, such as copying a log."""


class FileDatabase(Database):
    """A file, which several processes may use at once."""

    has_readers = True

    def __init__(
        self, path: Path, durability: Durability, system: System, *, orphan_grace_ms: int
    ) -> None:
        super().__init__(repr(str(path)), system, orphan_grace_ms=orphan_grace_ms)
        self.path = path
        self.durability: Durability = durability
        self._file: guards.File = None
        self._wal = WalCheckpointPolicy(durability)
        self._identity = guards.FileIdentity(path, system.file_time_ns)
        self._busy_handler = BusyHandler(system)
        self._data_version = 0
        self._is_watching = False
        self._watch_seconds = WATCH_SECONDS[0]

    # --- opening and closing

    def open(self, *, allow_moved: bool) -> None:
        connections.check_library()
        guards.warn_if_open(self.path)
        guards.prepare_file(self.path)
        if self.durability == "full" and self.path.stat().st_size == 0:
            # Create the tables first: SQLite removes the log of an empty file.
            connections.disconnect(self._connect_in_time(allow_moved=True))
            guards.reserve_log(self.path)
        self._wal = WalCheckpointPolicy(self.durability)
        connection = self._connect_in_time(allow_moved=allow_moved)
        try:
            self.adopt(connection)
        except apsw.Error as error:
            connections.disconnect(connection)
            raise connections.translate("open", error, self.label) from error

    def _connect_in_time(self, *, allow_moved: bool) -> RestrictedConnection:
        system = self.system
        deadline = system.monotonic() + OPEN_SECONDS_MAX
        while True:
            try:
                return self._try_to_connect(allow_moved=allow_moved)
            except apsw.Error as error:
                is_busy = isinstance(error, apsw.BusyError | apsw.LockedError | apsw.ProtocolError)
                if not is_busy or system.monotonic() > deadline:
                    raise connections.translate("open", error, self.label) from error
            system.pause(system.uniform(0.002, 0.02))

    def _try_to_connect(self, *, allow_moved: bool) -> RestrictedConnection:
        connection = self._connect()
        try:
            connections.migrate(connection, self.path, self.system.clock)
            if not allow_moved:
                self.check_not_moved(connection)
        except BaseException:
            connections.disconnect(connection)
            raise
        return connection

    def _connect(self) -> RestrictedConnection:
        return connections.connect_writer(self.path, self.durability, self._busy_handler)

    def adopt(self, connection: RestrictedConnection) -> None:
        connection.set_wal_hook(self._wal.note)
        # Taken before the first operation: a commit between that and the first look is noticed.
        self._data_version = connection.execute("PRAGMA data_version").get
        self._identity.note()
        super().adopt(connection)

    def started(self) -> None:
        self._file = guards.forbid(self.path)

    def stopped(self) -> None:
        guards.allow(self._file)

    def close(self) -> None:
        self._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self.reset()

    def connect_reader(self) -> apsw.Connection:
        return connections.connect_reader(self.path, BusyHandler(self.system))

    def due_migrations(self) -> Sequence[Migration]:
        """Return the migrations that ``open`` would apply. Nothing is made or changed."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return connections.MIGRATIONS
        guards.check_existing(self.path)
        try:
            connection = self.connect_reader()
            try:
                connections.check_application(connection, self.path)
                return connections.due(connection, self.path)
            finally:
                connections.disconnect(connection)
        except apsw.NotADBError as error:
            raise guards.not_a_database(self.path) from error
        except apsw.Error as error:
            raise connections.translate("migrate", error, self.label) from error

    # --- around each commit

    def ready(self) -> Transaction:
        if self._transaction is None:
            self.adopt(self._connect())
        transaction = self._transaction
        assert transaction is not None
        self.check_before_reply()
        return transaction

    def check_before_reply(self) -> None:
        """Check before the commit (it could damage another file) and before the reply (the data
        could be lost).
        """
        if not self._identity.unchanged():
            raise StoreClosed(
                "write",
                f"{self.label} or a file beside it (-wal, -shm) was removed or replaced "
                "while it was open; what was written last may be lost, and no more is written. "
                "Restart the program on the file that you want",
            )

    def set_patient(self, *, is_patient: bool) -> None:
        self._busy_handler.is_patient = is_patient

    def reset(self) -> None:
        """Drop the connection: after an I/O error everything is read from the file again."""
        super().close()

    # --- between commits

    def watch(self, *, is_watching: bool) -> None:
        self._is_watching = is_watching

    def idle_seconds(self) -> float | None:
        if self._is_watching:
            return self._watch_seconds * self.system.uniform(0.8, 1.2)
        return IDLE_SECONDS_TO_CHECKPOINT * 1.1 if self._wal.pages else None

    def use_idle_time(self, idle_seconds: float) -> bool:
        has_others = self._is_watching and self._see_others()
        if self._wal.pages and idle_seconds > IDLE_SECONDS_TO_CHECKPOINT:
            # The log keeps its length: overwriting it is cheaper than making it longer again.
            self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
            # Even if that failed: another try is worth it only after the next commit.
            self._wal.rest()
        return has_others

    def _see_others(self) -> bool:
        """Return whether another process has written since the last look."""
        if self._transaction is None:
            return False
        try:
            version = self._transaction.execute("PRAGMA data_version").get
        except apsw.Error as error:
            # The next operation meets the same trouble and reports it to its caller.
            _log.warning("cannot look for changes in %s: %s", self.path, error)
            return False
        before, self._data_version = self._data_version, version
        has_others = bool(version != before)
        if has_others:
            self._watch_seconds = WATCH_SECONDS[0]
        else:
            self._watch_seconds = min(self._watch_seconds * 1.1, WATCH_SECONDS[1])
        return has_others

    def is_upkeep_due(self, *, is_waited_for: bool) -> bool:
        return self._wal.is_due(is_waited_for=is_waited_for)

    def keep_up(self) -> None:
        self._checkpoint(self._wal.mode())
        self._wal.put_off()

    def _checkpoint(self, mode: int) -> None:
        """Copy the log into the file, as far as that mode goes."""
        if self._transaction is None:
            return
        try:
            self._transaction.connection.wal_checkpoint(mode=mode)
        except (apsw.BusyError, apsw.LockedError):
            pass  # readers or another process are in the way; there will be a better moment
        except apsw.Error as error:
            # What was committed is safe in the log; only its copying into the file has failed.
            _log.warning("checkpoint of %s failed: %s", self.path, error)
            if connections.breaks_connection(error):
                self.reset()


class WalCheckpointPolicy:
    """Decides when to copy the write-ahead log into the file, by its number of pages."""

    def __init__(self, durability: Durability) -> None:
        self.pages = 0
        self._first_due = PAGES_IN_PLACE if durability == "full" else PAGES_TO_CHECKPOINT
        self._due = self._first_due

    def note(self, _connection: apsw.Connection, _database: str, pages: int) -> int:
        """Called by SQLite after each commit with the length of the log."""
        if pages < self.pages:
            self._due = self._first_due
        self.pages = pages
        return apsw.SQLITE_OK

    def is_due(self, *, is_waited_for: bool) -> bool:
        """Return whether to copy the log now, even if a commit has to wait for it."""
        pages = self.pages
        return pages >= self._due and (pages >= PAGES_TO_CHECKPOINT or not is_waited_for)

    def mode(self) -> int:
        insists = self.pages >= PAGES_TO_INSIST
        return apsw.SQLITE_CHECKPOINT_RESTART if insists else apsw.SQLITE_CHECKPOINT_PASSIVE

    def put_off(self) -> None:
        """Call after an attempt to copy the log, also after one that failed."""
        self._due = self.pages + PAGES_BETWEEN_LOOKS

    def rest(self) -> None:
        """Do nothing until the next commit."""
        self.pages = 0
        self._due = self._first_due
