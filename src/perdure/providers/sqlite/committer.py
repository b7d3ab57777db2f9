"""Operations in transactions of the one connection that writes.

Operations are functions of a ``Transaction``. One that fails before it has written anything fails
alone; after it has written, the transaction is rolled back and its operations are run one by one.
Used by one thread at a time.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING

import apsw

from perdure.errors import (
    InternalError,
    PerdureError,
    StoreBusy,
    StoreClosed,
    StoreFull,
    StoreUnavailable,
)
from perdure.providers.sqlite import batches
from perdure.providers.sqlite.connection import (
    BusyHandler,
    breaks_connection,
    connect_writer,
    disconnect,
    is_out_of_space,
    translate,
)
from perdure.providers.sqlite.lending import RaisedByCode
from perdure.providers.sqlite.transaction import Transaction
from perdure.providers.sqlite.whereabouts import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from perdure.clock import Clock
    from perdure.providers.sqlite.connection import Durability
    from perdure.providers.sqlite.entries import Delivery, Entry, Outcome
    from perdure.providers.sqlite.lending import LendableConnection
    from perdure.providers.sqlite.log import Log

_log = logging.getLogger("perdure.sqlite")

QUICK_SECONDS = 0.002
"""A commit that takes longer has met a slow disk."""


class _RunOneByOne(Exception):
    """An operation failed after it had written, so its neighbours must be run again."""


class Committer:
    """Owns the writing connection, and opens it again when it broke."""

    def __init__(
        self,
        path: Path,
        durability: Durability,
        clock: Clock,
        log: Log,
        reached: Callable[[str], None],
        *,
        orphan_grace_ms: int,
    ) -> None:
        self._path = path
        self._durability: Durability = durability
        self._clock = clock
        self._wal = log
        self._reached = reached
        """Called at named points of a commit; only fault campaigns do something there."""
        self._orphan_grace_ms = orphan_grace_ms
        self._transaction: Transaction | None = None
        self._whereabouts = Whereabouts(path)
        self._busy_handler = BusyHandler()
        self._data_version = 0
        self._is_broken = False
        """The connection may be anywhere in a transaction, and is yet to be dropped."""
        self.quick_commits = 0
        """How many in a row the disk has taken quickly, up to the last one."""

    # --- commits

    def commit(self, entries: list[Entry], delivery: Delivery) -> None:
        """Run them in as few transactions as possible, and note what became of each."""
        try:
            if len(entries) < batches.RUN_MIN:
                self._attempt(entries, delivery)
                return
            for group in _groups(entries):
                try:
                    self._attempt_together(group, delivery)
                except _RunOneByOne:
                    for entry in group:
                        self._attempt([entry], delivery)
        except Exception as bug:  # noqa: BLE001 - whoever writes must outlive a bug
            self._give_up(entries, delivery, bug)

    def commit_at_once(self, entry: Entry, delivery: Delivery) -> bool:
        """As ``commit``, for one; False, and nothing is done, if another process is writing."""
        self._busy_handler.is_patient = False
        try:
            self._attempt([entry], delivery)
        except Exception as bug:  # noqa: BLE001 - as above
            self._give_up([entry], delivery, bug)
        except BaseException as signal:  # it breaks into the thread of the event loop
            self._is_broken = True  # at once: the next signal may break into what follows
            self._give_up([entry], delivery, signal)
            raise
        finally:
            self._busy_handler.is_patient = True
        return not isinstance(delivery.outcomes[0][2], StoreBusy)

    def _give_up(self, entries: list[Entry], delivery: Delivery, error: BaseException) -> None:
        """Whatever it was, everybody who waits gets an answer."""
        # Told last: it takes long enough for another signal to break into it.
        self.drop_connection()
        answered = {id(entry) for entry, _, _ in delivery.outcomes}
        unknown = unknown_outcome(self._path, error)
        delivery.outcomes += [
            (entry, None, unknown) for entry in entries if id(entry) not in answered
        ]
        _log.error("a commit to %s broke", self._path, exc_info=error)

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
            begun = perf_counter()
            transaction.commit()
            is_quick = perf_counter() - begun < QUICK_SECONDS
            self.quick_commits = self.quick_commits + 1 if is_quick else 0
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
                self.drop_connection()
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
        if self._is_broken:
            self.drop_connection()
        if self._transaction is None:
            self.adopt(connect_writer(self._path, self._durability))
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

    def adopt(self, connection: LendableConnection) -> None:
        """Write through this one, which is open already."""
        connection.wait_with(self._busy_handler)
        connection.set_wal_hook(self._wal.note)
        self._transaction = Transaction(connection, self._orphan_grace_ms)
        # Taken before the first operation: a commit between that and the first look is noticed.
        self._data_version = self._transaction.execute("PRAGMA data_version").get
        self._whereabouts.note()

    def drop_connection(self) -> None:
        """At the end, and after an I/O error: then everything is read from the file again."""
        self.quick_commits = 0  # how long the next one takes, which opens the file, nobody knows
        if self._transaction is not None:
            disconnect(self._transaction.connection)
        self._transaction = None
        self._is_broken = False

    # --- between commits

    def see_others(self) -> bool:
        """Whether another process has written since the last look."""
        if self._transaction is None:
            return False
        try:
            version = self._transaction.execute("PRAGMA data_version").get
        except apsw.Error as error:
            # The next operation meets the same trouble and has somebody to tell it to.
            _log.warning("cannot look for changes in %s: %s", self._path, error)
            return False
        before, self._data_version = self._data_version, version
        return bool(version != before)

    def checkpoint(self, mode: int) -> None:
        """Copy the log into the file, as far as that mode goes."""
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
                self.drop_connection()


def unknown_outcome(path: Path, error: BaseException) -> StoreUnavailable:
    """Of an operation that this broke into."""
    unknown = StoreUnavailable(
        "write", f"{str(path)!r}: {error!r}; whether it was written is unknown"
    )
    unknown.__cause__ = error
    return unknown


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
