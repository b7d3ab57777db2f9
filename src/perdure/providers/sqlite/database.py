"""The database of a store, the one connection that writes it, and its surroundings.

- ``System`` has the clock, the random numbers and the threads of a store. The engine takes them
  from there alone, so a simulator can replace all of them at once.
- ``Database`` is what the engine needs of any database; as it is, it serves one in memory.
- ``FileDatabase`` adds what only a file needs: opening its connection again, the write-ahead log,
  commits of other processes, and names that may be removed or replaced while the file is open.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import random
import secrets
import stat
import threading
import time
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import apsw

from perdure.clock import Clock, SystemClock
from perdure.errors import PerdureError, StoreBusy, StoreClosed, StoreFull
from perdure.logs import get_logger
from perdure.providers import rules
from perdure.providers.sqlite import connection as connections
from perdure.providers.sqlite import guards, readiness
from perdure.providers.sqlite.connection import BusyHandler, Durability, RestrictedConnection
from perdure.providers.sqlite.control import ClockFollower
from perdure.providers.sqlite.guards import FileIdentity
from perdure.providers.sqlite.peers import NoPeers, Peers
from perdure.providers.sqlite.transaction import CommitHook, Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from perdure.providers.migrate import Migration
    from perdure.providers.sqlite.writer import CommitResult

_log = get_logger("perdure.sqlite")

OPEN_SECONDS_MAX: Final = 20.0
"""Longest wait for other processes that are opening the same file."""
IDLE_SECONDS_TO_CHECKPOINT: Final = 1.0
WATCH_SECONDS: Final = (0.015, 0.06)
"""Pause between two looks for commits of other processes, just after one and when idle.

In a virtual machine a look takes 0.25 ms of a processor, most of it to wake the thread up.
"""
WATCH_BESIDE_PEERS_SECONDS: Final = 0.25
"""The same while other processes can wake this one: then a look is only the safety net."""

PAGES_TO_CHECKPOINT: Final = 8_000
"""32 MiB: the pause of a copy stays short, and a page that changes often is copied once."""
PAGES_IN_PLACE: Final = guards.LOG_BYTES_RESERVED // 4_200
"""Pages that a new log holds without growing; then SQLite starts it over."""
PAGES_BETWEEN_LOOKS: Final = 250
"""A checkpoint that readers kept from finishing is tried again after this many more pages."""
PAGES_TO_WARN: Final = 14_000
"""55 MiB: a log beyond this is reported, and again each time that it has doubled."""
_PAGE_BYTES: Final = 4_120
"""Size of a page and its header in the log."""

_FREE_PART: Final = 10
"""A tenth of the pages may be free: new instances take them without making the file longer."""
_PAGES_GIVEN_BACK: Final = 16
"""At most so many in a transaction, so that others hardly wait for it."""

_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH

_P = ParamSpec("_P")
_T = TypeVar("_T")


class System:
    """The clock, the random numbers and the threads of this machine.

    A simulator overrides every method.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = SystemClock() if clock is None else clock
        """The clock of locks and due times, which are written into the store."""

    monotonic = staticmethod(time.monotonic)
    """Seconds for measuring how long something takes."""

    file_time_ns = staticmethod(time.time_ns)
    """The clock that the file system stamps its files with, in nanoseconds."""

    pause = staticmethod(time.sleep)
    """Block this thread for that many seconds."""

    uniform = staticmethod(random.uniform)
    """A random number between two others, for waits that should not meet."""

    random_hex = staticmethod(secrets.token_hex)
    """That many unguessable random bytes in hexadecimal digits."""

    def start_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Run a function in a thread that does not keep the process alive."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    async def run_in_thread(
        self, function: Callable[_P, _T], *args: _P.args, **named: _P.kwargs
    ) -> _T:
        """Run a function that blocks in another thread and return its result."""
        return await asyncio.to_thread(function, *args, **named)


class Database:
    """A database in memory. A store of another kind overrides what differs.

    ``open`` and ``close`` run outside of the event loop if the store has threads. All other methods
    are called by the writer, one at a time, under ``in_use``.
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
        self.transaction: Transaction | None = None
        """None: the next commit has to open the connection first."""
        self.busy_handler = BusyHandler(system)
        """Waits for other processes that write, or lets statements fail at once with StoreBusy."""
        self.in_use = threading.Lock()
        """Held while the connection is used: locks are renewed by a thread of their own."""
        self.clock_follower = ClockFollower()
        self.peers = NoPeers()
        """The other processes that have the store open."""
        self.is_watching = False
        """Look for commits of other processes while the writer is idle."""

    # --- opening and closing

    def open(self, *, allow_moved: bool) -> None:
        """Make the connection ready. Errors: StoreMoved and others of ``Provider.open``."""
        if self.transaction is None:
            self.adopt(connections.connect_memory(self.system.clock))
        if not allow_moved:
            self.check_not_moved(self.ready().connection)

    def check_not_moved(self, connection: apsw.Connection) -> None:
        """Raise StoreMoved if the content of the store is somewhere else."""
        mark = connections.moved_to(connection)
        if mark is not None:
            raise rules.store_moved(self.label, mark)

    def enforce_moved_mark(self) -> None:
        """Refuse changes if the rows that were put into the tables say that the store was moved."""
        connections.enforce_moved_mark(self.ready().connection)

    def adopt(self, connection: RestrictedConnection) -> None:
        """Write through this connection, whose schema is up to date."""
        self.transaction = self.transaction_type(
            connection, self._orphan_grace_ms, self.system.random_hex, self._hook, self.holder
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
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            connections.disconnect(transaction.connection)

    transaction_type: type[Transaction] = Transaction
    """A store that keeps the texts of events elsewhere has a subclass with its own ``events``."""

    holder = ""
    """Begins the tokens of all locks that are taken through this handle."""

    has_readers = False
    """True: reading threads use ``connect_reader``. False: the writer reads too."""

    def connect_reader(self) -> apsw.Connection:
        """Return a connection that cannot write."""
        raise NotImplementedError

    # --- around each commit

    def ready(self) -> Transaction:
        """Return the transaction to begin. Errors: any that keeps the store from writing."""
        assert self.transaction is not None
        return self.transaction

    lasts = True
    """True: each commit waits for the disk, if the store ever does."""

    def let_last(self, lasts: bool, /) -> None:
        """Let the commits that follow wait for the disk, or not."""

    def check_before_reply(self) -> None:
        """Called after COMMIT. Raise an error if what was just committed may be lost."""

    def reset(self) -> None:
        """Roll back a transaction that an error or a signal has left open."""
        if self.transaction is not None:
            try:
                self.transaction.end()
            except apsw.Error as error:
                _log.warning("rollback in %s failed: %s", self.label, error)

    def known_error(self, operation: str, error: apsw.Error) -> PerdureError:
        """Return SQLite's error as one of ours, with the original as its cause."""
        known: PerdureError = connections.translate(operation, error, self.label)
        transaction = self.transaction
        if transaction is not None and connections.is_out_of_space(transaction.connection):
            known = StoreFull(operation, f"{self.label}: no space left; free some")
        elif transaction is not None and connections.is_refused_change(error):
            mark = connections.moved_to(transaction.connection)
            if mark is None:  # taken back meanwhile
                known = StoreBusy(operation, f"{self.label}: a move was given up; try again")
            else:
                known = rules.store_moved(self.label, mark, operation)
        known.__cause__ = error
        return known

    # --- other processes

    def tell_others(self, result: CommitResult, now: float) -> None:
        """Wake other processes that wait for what was committed. ``now`` is a monotonic time."""
        if self.peers.has_any(now):
            self.peers.tell(
                turns=result.turns_changed,
                work=result.work_changed,
                instance_ids=result.changed_instances,
            )

    def show_worker_until(self, time_ms: int) -> bool:
        """Show the worker of this process to others; False if it has to be written instead."""
        return self.peers.show_until(time_ms)

    # --- between commits, in a thread of the writer

    def idle_seconds(self) -> float | None:
        """Return after how many idle seconds to call ``use_idle_time``; None: never."""
        return None

    def use_idle_time(self, idle_seconds: float) -> bool:
        """Do what can wait for an idle moment; True if another process has written."""
        return False

    def is_upkeep_due(self, *, is_waited_for: bool) -> bool:
        """Return True if ``keep_up`` should run now, although a commit may wait for it."""
        return False

    def keep_up(self) -> None:
        """Do what must be done after so many commits, such as copying a log."""


class FileTransaction(Transaction):
    __slots__ = ()

    keeps_checksums = True

    def give_back_pages(self) -> None:
        """Only for a file that ``SqliteAdmin.vacuum(incremental=True)`` has written anew."""
        if self.row("PRAGMA auto_vacuum")[0] != connections.INCREMENTAL:
            return
        free, pages = (self.row(f"PRAGMA {each}")[0] for each in ("freelist_count", "page_count"))
        if free > pages // _FREE_PART:
            self.rows(f"PRAGMA incremental_vacuum({_PAGES_GIVEN_BACK})")


class FileDatabase(Database):
    """A file, which several processes may use at once."""

    transaction_type = FileTransaction
    has_readers = True

    def __init__(
        self, path: Path, durability: Durability, system: System, *, orphan_grace_ms: int
    ) -> None:
        super().__init__(repr(str(path)), system, orphan_grace_ms=orphan_grace_ms)
        self.path = path
        self.durability: Durability = durability
        self._file: guards.File = None
        self._identity = FileIdentity(path, system.file_time_ns)
        self.holder = system.random_hex(8)
        self.peers = Peers(path, self.holder)
        self._data_version = 0
        self._watch_seconds = WATCH_SECONDS[0]
        self._log_pages = 0
        """Length of the write-ahead log; 0 if it need not be copied into the file."""
        self._first_due = PAGES_IN_PLACE if durability == "full" else PAGES_TO_CHECKPOINT
        self._due = self._first_due
        """Length from which on the log is to be copied."""
        self._warn_pages = PAGES_TO_WARN
        """Length from which on a log that readers hold is reported."""

    # --- opening and closing

    def open(self, *, allow_moved: bool) -> None:
        connections.check_library()
        guards.warn_if_open(self.path)
        guards.prepare_file(self.path)
        if self.durability == "full" and self.path.stat().st_size == 0:
            # Create the tables first: SQLite removes the log of an empty file.
            connections.disconnect(self._connect_in_time(allow_moved=True))
            guards.reserve_log(self.path)
        self._forget_log()
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
        return connections.connect_writer(self.path, self.durability, self.busy_handler)

    def adopt(self, connection: RestrictedConnection) -> None:
        connection.set_wal_hook(self._note_log)
        # Taken before the first operation: a commit between that and the first look is noticed.
        self._data_version = connection.execute("PRAGMA data_version").get
        # Again, with the files beside it open: before, another user could have been quicker.
        guards.check_users(self.path)
        self._identity.note()
        self.lasts = True
        super().adopt(connection)

    def started(self) -> None:
        self._file = guards.forbid(self.path)

    def stopped(self) -> None:
        guards.allow(self._file)
        self.peers.close()

    def close(self) -> None:
        # As the other copies of the log, this one does not wait for readers of other processes.
        self.busy_handler.is_patient = False
        self._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self.reset()
        self.busy_handler.is_patient = True

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
        if self.transaction is None:
            self.adopt(self._connect())
        transaction = self.transaction
        assert transaction is not None
        self.check_before_reply()
        return transaction

    def let_last(self, lasts: bool, /) -> None:
        durability = self.durability if lasts else "relaxed"
        assert self.transaction is not None
        connections.set_durability(self.transaction.connection, durability)
        self.lasts = lasts

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

    def reset(self) -> None:
        """Drop the connection: after an I/O error everything is read from the file again."""
        super().close()

    # --- other processes

    def show_worker_until(self, time_ms: int) -> bool:
        # Another user that may write the file cannot see what this one shows.
        is_shared = self.path.stat().st_mode & _WRITABLE_BY_OTHERS
        return not is_shared and super().show_worker_until(time_ms)

    # --- between commits

    def idle_seconds(self) -> float | None:
        if self.is_watching and self.peers.is_listening:
            return WATCH_BESIDE_PEERS_SECONDS * self.system.uniform(0.8, 1.2)
        if self.is_watching:
            return self._watch_seconds * self.system.uniform(0.8, 1.2)
        return IDLE_SECONDS_TO_CHECKPOINT * 1.1 if self._log_pages else None

    def use_idle_time(self, idle_seconds: float) -> bool:
        has_others = self.is_watching and self._see_others()
        if self._log_pages and idle_seconds > IDLE_SECONDS_TO_CHECKPOINT:
            # The log keeps its length: overwriting it is cheaper than making it longer again.
            self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
            # Even if that failed: another try is worth it only after the next commit.
            self._forget_log()
        return has_others

    def _see_others(self) -> bool:
        """Return True if another process has written since the last look."""
        if self.transaction is None:
            return False
        try:
            version = self.transaction.execute("PRAGMA data_version").get
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

    # --- the write-ahead log

    def _note_log(self, _connection: apsw.Connection, _database: str, pages: int) -> int:
        """Called by SQLite after each commit with the length of the log."""
        if pages < self._log_pages:
            self._due = self._first_due
            self._warn_pages = PAGES_TO_WARN
        self._log_pages = pages
        return apsw.SQLITE_OK

    def _forget_log(self) -> None:
        """Copy nothing until the next commit."""
        self._log_pages = 0
        self._due = self._first_due

    def is_upkeep_due(self, *, is_waited_for: bool) -> bool:
        """Return True if the log is to be copied now, even if a commit has to wait for it."""
        pages = self._log_pages
        return pages >= self._due and (pages >= PAGES_TO_CHECKPOINT or not is_waited_for)

    def keep_up(self) -> None:
        """Copy the log as far as readers allow. PASSIVE: other modes would wait for them."""
        copied = self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
        # Also after an attempt that failed.
        self._due = self._log_pages + PAGES_BETWEEN_LOOKS
        if copied < self._log_pages and self._log_pages >= self._warn_pages:
            self._warn_pages = self._log_pages * 2
            _log.warning(
                "the log %s-wal has grown to %d MiB, because a read transaction keeps it from "
                "being used again; it grows until that ends. Find the program that reads the file "
                "(fuser %s-shm names those that have it open: a shell, a viewer, a backup) and end "
                "its transaction",
                self.path,
                self._log_pages * _PAGE_BYTES >> 20,
                self.path,
            )

    def _checkpoint(self, mode: int) -> int:
        """Copy the log into the file as far as that mode goes; return how many pages are copied."""
        if self.transaction is None:
            return 0
        try:
            return self.transaction.connection.wal_checkpoint(mode=mode)[1]
        except (apsw.BusyError, apsw.LockedError):
            pass  # readers or another process are in the way; there will be a better moment
        except apsw.Error as error:
            # What was committed is safe in the log; only its copying into the file has failed.
            _log.warning("checkpoint of %s failed: %s", self.path, error)
            if connections.breaks_connection(error):
                self.reset()
        return 0
