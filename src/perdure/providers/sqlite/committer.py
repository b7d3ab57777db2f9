"""Operations in transactions of the one connection that writes.

Operations are functions of a ``Transaction``. One that fails before it has written anything fails
alone; after it has written, the transaction is rolled back and its operations are run one by one.
Used by one thread at a time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import apsw

from perdure.errors import InternalError, PerdureError, StoreBusy, StoreUnavailable
from perdure.providers.sqlite import batch
from perdure.providers.sqlite.connection import RaisedByCode, breaks_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from perdure.providers.sqlite.database import Database
    from perdure.providers.sqlite.transaction import Transaction
    from perdure.providers.sqlite.verb import Delivery, Entry, Outcome

_log = logging.getLogger("perdure.sqlite")

QUICK_SECONDS = 0.002
"""A commit that takes longer has met a slow disk."""


class _RunOneByOne(Exception):
    """An operation failed after it had written, so its neighbours must be run again."""


class Committer:
    """Runs operations in transactions of a database and notes their outcomes."""

    def __init__(self, database: Database, reached: Callable[[str], None]) -> None:
        self._database = database
        self._now_ms = database.system.clock.now_ms
        self._monotonic = database.system.monotonic
        self._reached = reached
        """Called at named points of a commit; only fault campaigns do something there."""
        self._is_broken = False
        """The connection may be anywhere in a transaction, and is yet to be reset."""
        self.quick_commits = 0
        """Number of consecutive commits under ``QUICK_SECONDS``, up to the last one."""

    # --- commits

    def commit(self, entries: list[Entry], delivery: Delivery) -> None:
        """Run them in as few transactions as possible, and note what became of each."""
        try:
            if len(entries) < batch.TOGETHER_MIN:
                self._attempt(entries, delivery)
                return
            for group in _groups(entries):
                try:
                    self._attempt_together(group, delivery)
                except _RunOneByOne:
                    for entry in group:
                        self._attempt([entry], delivery)
        except Exception as bug:  # noqa: BLE001 - the writer must outlive a bug
            self._give_up(entries, delivery, bug)

    def commit_at_once(self, entry: Entry, delivery: Delivery) -> bool:
        """As ``commit``, for one; False, and nothing is done, if another process is writing."""
        database = self._database
        database.set_patient(is_patient=False)
        try:
            self._attempt([entry], delivery)
        except Exception as bug:  # noqa: BLE001 - as above
            self._give_up([entry], delivery, bug)
        except BaseException as signal:  # it breaks into the thread of the event loop
            self._is_broken = True  # at once: the next signal may break into what follows
            self._give_up([entry], delivery, signal)
            raise
        finally:
            database.set_patient(is_patient=True)
        return not isinstance(delivery.outcomes[0][2], StoreBusy)

    def _give_up(self, entries: list[Entry], delivery: Delivery, error: BaseException) -> None:
        """Fail every entry that has no outcome yet."""
        # Told last: it takes long enough for another signal to break into it.
        self._reset()
        answered = {id(entry) for entry, _, _ in delivery.outcomes}
        unknown = unknown_outcome(self._database.label, error)
        delivery.outcomes += [
            (entry, None, unknown) for entry in entries if id(entry) not in answered
        ]
        _log.error("a commit to %s broke", self._database.label, exc_info=error)

    def _attempt_together(self, entries: Sequence[Entry], delivery: Delivery) -> None:
        try:
            self._attempt(entries, delivery, together=len(entries) >= batch.TOGETHER_MIN)
        except batch.PreconditionChanged as error:
            _log.debug("a batch is run one by one: %r", error.__cause__)
            self._attempt(entries, delivery)

    def _attempt(
        self, entries: Sequence[Entry], delivery: Delivery, *, together: bool = False
    ) -> None:
        """Run the operations in one transaction and note what became of them."""
        transaction: Transaction | None = None
        try:
            if self._is_broken:
                self._reset()
            transaction = self._database.ready()
            transaction.begin(self._now_ms)
            self._reached("begun")
            if together:
                outcomes = self._outcomes(entries, transaction)
            else:
                outcomes = [self._outcome(entry, transaction, len(entries)) for entry in entries]
            self._reached("before commit")
            begun = self._monotonic()
            transaction.commit()
            is_quick = self._monotonic() - begun < QUICK_SECONDS
            self.quick_commits = self.quick_commits + 1 if is_quick else 0
            self._reached("after commit")
            self._database.check_before_reply()
        except (_RunOneByOne, batch.PreconditionChanged):
            assert transaction is not None
            _roll_back(transaction)
            raise
        except (apsw.Error, PerdureError) as error:
            if transaction is not None:
                _roll_back(transaction)
            if isinstance(error, apsw.Error):
                known: PerdureError = self._database.known_error(entries[0].verb.name, error)
                if breaks_connection(error):
                    self._reset()
            else:
                known = error
            queries = [entry for entry in entries if entry.is_query]
            if queries and len(queries) < len(entries):
                self._attempt(queries, delivery)
                entries = [entry for entry in entries if not entry.is_query]
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
            return batch.run(transaction, entries, run_one)
        except apsw.ConstraintError as error:
            raise batch.PreconditionChanged from error
        except (apsw.Error, _RunOneByOne):
            raise
        except Exception as error:
            raise batch.PreconditionChanged from error

    def _outcome(self, entry: Entry, transaction: Transaction, neighbours: int) -> Outcome:
        connection = transaction.connection
        changes = connection.total_changes()
        error: BaseException
        try:
            return entry, entry.verb.run(transaction, *entry.args), None
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
            error = InternalError(f"{entry.verb.name}: {bug!r}")
            error.__cause__ = bug
        if neighbours > 1:
            raise _RunOneByOne from error
        _roll_back(transaction)
        transaction.begin(self._now_ms)
        return entry, None, error

    def _reset(self) -> None:
        # The next commit may open a file again: how long that takes is unknown.
        self.quick_commits = 0
        self._database.reset()
        self._is_broken = False


def unknown_outcome(label: str, error: BaseException) -> StoreUnavailable:
    """Return the error for an operation that another error or a signal interrupted."""
    unknown = StoreUnavailable("write", f"{label}: {error!r}; whether it was written is unknown")
    unknown.__cause__ = error
    return unknown


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Runs of operations that may share a transaction."""
    group: list[Entry] = []
    for entry in entries:
        if entry.verb.alone:
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
