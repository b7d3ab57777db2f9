"""The one thread that writes. Whatever arrives while a commit is running shares the next one.

Operations are functions of a ``Transaction``. One that fails before it has written anything fails
alone; after it has written, the transaction is rolled back and its operations are run one by one.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from typing import TYPE_CHECKING, Final

import apsw

from perdure.errors import (
    InternalError,
    PerdureError,
    StoreClosed,
    StoreFull,
    StoreUnavailable,
)
from perdure.providers.sqlite import batches
from perdure.providers.sqlite.connection import (
    breaks_connection,
    connect_writer,
    disconnect,
    is_out_of_space,
    translate,
)
from perdure.providers.sqlite.entries import Delivery
from perdure.providers.sqlite.lending import RaisedByCode
from perdure.providers.sqlite.place import LOG_BYTES_RESERVED
from perdure.providers.sqlite.transaction import Transaction
from perdure.providers.sqlite.whereabouts import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from perdure.clock import Clock
    from perdure.providers.sqlite.connection import Durability
    from perdure.providers.sqlite.entries import Entry, Outcome

_log = logging.getLogger("perdure.sqlite")

BATCH_OPERATIONS_MAX: Final = 512
WAL_PAGES_TO_CHECKPOINT: Final = 8_000
"""32 MiB: often enough for a short pause, seldom enough that a hot page is copied back once."""
WAL_PAGES_IN_PLACE: Final = LOG_BYTES_RESERVED // 4_200
"""What a new log has room for without growing; then it is used from its start again."""
WAL_PAGES_BETWEEN_LOOKS: Final = 250
"""A checkpoint that readers did not let finish is tried again after so many more."""
WAL_PAGES_TO_INSIST: Final = 14_000
"""55 MiB: past this a reader that pins the log is waited for."""
IDLE_SECONDS_TO_CHECKPOINT: Final = 1.0
WATCH_SECONDS: Final = (0.015, 0.045)
"""How often the file is asked for commits of other processes, just after one and when idle."""


class _RunOneByOne(Exception):
    """An operation failed after it had written, so its neighbours must be run again."""


class Writer:
    """Owns the writing connection and its thread."""

    def __init__(
        self,
        path: Path,
        durability: Durability,
        clock: Clock,
        deliver: Callable[[Delivery], None],
        reached: Callable[[str], None],
        *,
        orphan_grace_ms: int,
    ) -> None:
        self._path = path
        self._durability: Durability = durability
        self._clock = clock
        self._orphan_grace_ms = orphan_grace_ms
        self._deliver = deliver
        self._reached = reached
        """Called at named points of a commit; only fault campaigns do something there."""
        self._queue: queue.SimpleQueue[list[Entry]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="perdure-sqlite", daemon=True)
        self._transaction: Transaction | None = None
        self._whereabouts = Whereabouts(path)
        self._wal_pages = 0
        self._first_pages_to_checkpoint = (
            WAL_PAGES_IN_PLACE if durability == "full" else WAL_PAGES_TO_CHECKPOINT
        )
        self._pages_to_checkpoint = self._first_pages_to_checkpoint
        self._last_commit = 0.0
        self._data_version = 0
        self._watch_seconds = WATCH_SECONDS[0]
        self._is_watching = False
        self._is_stopping = False

    # --- called from the event loop

    def start(self, connection: apsw.Connection) -> None:
        self._adopt(connection)
        self._thread.start()

    def submit(self, entries: list[Entry]) -> None:
        self._queue.put(entries)

    def watch(self, *, is_watching: bool) -> None:
        """Look for commits of other processes from now on, or no longer."""
        self._is_watching = is_watching
        if is_watching:
            self._queue.put([])

    def stop(self) -> None:
        """Finish what was accepted, then close; does not wait."""
        self._is_stopping = True
        self._queue.put([])

    def join(self) -> None:
        self._thread.join()

    # --- the thread

    def _run(self) -> None:
        while True:
            entries = self._collect()
            if entries:
                delivery = Delivery()
                try:
                    self._commit(entries, delivery)
                except Exception as bug:  # noqa: BLE001 - the thread must outlive a bug
                    _log.exception("a commit to %s broke", self._path)
                    self._give_up(entries, delivery, bug)
                self._last_commit = time.monotonic()
                # Little may follow here: the loop wakes up now and needs the interpreter.
                self._deliver(delivery)
                self._checkpoint_if_large()
            elif self._is_stopping:
                break
            else:
                self._use_idle_time()
        self._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self._drop_connection()

    def _collect(self) -> list[Entry]:
        """What is waiting, at least one unless there is something else to do."""
        try:
            entries = self._queue.get(timeout=self._patience())
        except queue.Empty:
            return []
        while len(entries) < BATCH_OPERATIONS_MAX and not self._queue.empty():
            entries += self._queue.get_nowait()
        return entries

    def _patience(self) -> float | None:
        if self._is_stopping:
            return 0
        if self._is_watching:
            return self._watch_seconds * random.uniform(0.8, 1.2)
        return IDLE_SECONDS_TO_CHECKPOINT * 1.1 if self._wal_pages else None

    def _commit(self, entries: list[Entry], delivery: Delivery) -> None:
        if len(entries) < batches.RUN_MIN:
            self._attempt(entries, delivery)
            return
        for group in _groups(entries):
            try:
                self._attempt_together(group, delivery)
            except _RunOneByOne:
                for entry in group:
                    self._attempt([entry], delivery)

    def _give_up(self, entries: list[Entry], delivery: Delivery, bug: Exception) -> None:
        """Whatever it was, the thread goes on: everybody who waits gets an answer."""
        self._drop_connection()
        answered = {id(entry) for entry, _, _ in delivery.outcomes}
        error = StoreUnavailable(
            "write", f"{str(self._path)!r}: {bug!r}; whether it was written is unknown"
        )
        error.__cause__ = bug
        delivery.outcomes += [
            (entry, None, error) for entry in entries if id(entry) not in answered
        ]

    def _attempt_together(self, entries: Sequence[Entry], delivery: Delivery) -> None:
        try:
            self._attempt(entries, delivery, together=len(entries) >= batches.RUN_MIN)
        except batches.NotAsSeen as error:
            _log.debug("a batch is run one by one: %r", error.__cause__)
            self._attempt(entries, delivery)

    def _attempt(
        self, entries: Sequence[Entry], delivery: Delivery, *, together: bool = False
    ) -> None:
        """Run the operations in one transaction and note what became of them."""
        transaction: Transaction | None = None
        try:
            transaction = self._opened()
            transaction.begin(self._clock.now_ms)
            self._reached("begun")
            if together:
                outcomes = self._outcomes(entries, transaction)
            else:
                outcomes = [self._outcome(entry, transaction, len(entries)) for entry in entries]
            self._reached("before commit")
            transaction.commit()
            self._reached("after commit")
            self._check_place()
        except (_RunOneByOne, batches.NotAsSeen):
            assert transaction is not None
            _roll_back(transaction)
            raise
        except (apsw.Error, PerdureError) as error:
            if transaction is not None:
                _roll_back(transaction)
            known = self._known_error(error, entries[0].name)
            if isinstance(error, apsw.Error) and breaks_connection(error):
                self._drop_connection()
            delivery.outcomes += [(entry, None, known) for entry in entries]
        else:
            delivery.outcomes += outcomes
            delivery.turns_changed |= transaction.turns_changed
            delivery.work_changed |= transaction.work_changed
            delivery.changed_instances += transaction.changed_instances

    def _outcomes(self, entries: Sequence[Entry], transaction: Transaction) -> list[Outcome]:
        def run_one(entry: Entry) -> Outcome:
            return self._outcome(entry, transaction, len(entries))

        try:
            return batches.run(transaction, entries, run_one)
        except apsw.ConstraintError as error:
            raise batches.NotAsSeen from error
        except (apsw.Error, _RunOneByOne):
            raise
        except Exception as error:
            raise batches.NotAsSeen from error

    def _outcome(self, entry: Entry, transaction: Transaction, neighbours: int) -> Outcome:
        connection = transaction.connection
        changes = connection.total_changes()
        error: BaseException
        try:
            return entry, entry.operation(transaction, *entry.args), None
        except PerdureError as refusal:
            if connection.total_changes() == changes and connection.in_transaction:
                return entry, None, refusal
            error = refusal
        except apsw.Error as failure:
            if neighbours == 1 or breaks_connection(failure):
                raise
            error = failure
        except RaisedByCode as raised:
            error = raised.error
        except Exception as bug:  # noqa: BLE001 - the thread must outlive a bug of one operation
            error = InternalError(f"{entry.name}: {bug!r}")
            error.__cause__ = bug
        if neighbours > 1:
            raise _RunOneByOne from error
        _roll_back(transaction)
        transaction.begin(self._clock.now_ms)
        return entry, None, error

    def _known_error(self, error: apsw.Error | PerdureError, operation: str) -> PerdureError:
        if isinstance(error, PerdureError):
            return error
        transaction = self._transaction
        known: PerdureError = translate(operation, error, self._path)
        if transaction is not None and is_out_of_space(transaction.connection):
            known = StoreFull(operation, f"{str(self._path)!r}: no space left; free some")
        known.__cause__ = error
        return known

    # --- the connection

    def _opened(self) -> Transaction:
        if self._transaction is None:
            self._adopt(connect_writer(self._path, self._durability))
        transaction = self._transaction
        assert transaction is not None
        self._check_place()
        return transaction

    def _check_place(self) -> None:
        """Before a commit, which could do harm, and before an answer, which could be a lie."""
        if not self._whereabouts.are_right():
            raise StoreClosed(
                "write",
                f"{str(self._path)!r} or a file beside it (-wal, -shm) was removed or replaced "
                "while it was open; what was written last may be lost, and no more is written. "
                "Restart the program on the file that you want",
            )

    def _adopt(self, connection: apsw.Connection) -> None:
        connection.set_wal_hook(self._note_wal_size)
        self._transaction = Transaction(connection, self._orphan_grace_ms)
        # Taken before the first operation: a commit between that and the first look is noticed.
        self._data_version = self._transaction.execute("PRAGMA data_version").get
        self._whereabouts.note()

    def _note_wal_size(self, _connection: apsw.Connection, _database: str, pages: int) -> int:
        if pages < self._wal_pages:
            self._pages_to_checkpoint = self._first_pages_to_checkpoint
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def _drop_connection(self) -> None:
        """At the end, and after an I/O error: then everything is read from the file again."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            disconnect(transaction.connection)

    # --- between commits

    def _use_idle_time(self) -> None:
        if self._is_watching:
            self._look_for_others()
        idle_seconds = time.monotonic() - self._last_commit
        if self._wal_pages and idle_seconds > IDLE_SECONDS_TO_CHECKPOINT:
            # The log keeps its length: overwriting it is cheaper than making it longer again.
            self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
            # Whatever came of it: another try is worth it only after the next commit.
            self._wal_pages = 0
            self._pages_to_checkpoint = self._first_pages_to_checkpoint

    def _look_for_others(self) -> None:
        if self._transaction is None:
            return
        try:
            version = self._transaction.execute("PRAGMA data_version").get
        except apsw.Error as error:
            # The next operation meets the same trouble and has somebody to tell it to.
            _log.warning("cannot look for changes in %s: %s", self._path, error)
            return
        if version == self._data_version:
            self._watch_seconds = min(self._watch_seconds * 1.1, WATCH_SECONDS[1])
            return
        self._data_version = version
        self._watch_seconds = WATCH_SECONDS[0]
        self._deliver(Delivery(foreign=True))

    def _checkpoint_if_large(self) -> None:
        pages = self._wal_pages
        if pages < self._pages_to_checkpoint:
            return
        if pages < WAL_PAGES_TO_CHECKPOINT and not self._queue.empty():
            return
        insists = pages >= WAL_PAGES_TO_INSIST
        mode = apsw.SQLITE_CHECKPOINT_RESTART if insists else apsw.SQLITE_CHECKPOINT_PASSIVE
        self._checkpoint(mode)
        self._pages_to_checkpoint = pages + WAL_PAGES_BETWEEN_LOOKS

    def _checkpoint(self, mode: int) -> None:
        if self._transaction is None:
            return
        try:
            self._transaction.connection.wal_checkpoint(mode=mode)
        except (apsw.BusyError, apsw.LockedError):
            pass  # readers or another process are in the way; there will be a better moment
        except apsw.Error as error:
            # What was committed is safe in the log; only its copying into the file has failed.
            _log.warning("checkpoint of %s failed: %s", self._path, error)
            if breaks_connection(error):
                self._drop_connection()


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Runs of operations that may share a transaction."""
    group: list[Entry] = []
    for entry in entries:
        if entry.alone:
            if group:
                yield group
            yield [entry]
            group = []
        else:
            group.append(entry)
    if group:
        yield group


def _roll_back(transaction: Transaction) -> None:
    try:
        transaction.end()
    except apsw.Error as error:
        _log.warning("rollback failed: %s", error)
