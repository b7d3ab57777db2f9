"""The writer of a store, which runs its operations in transactions, and threads that only read.

The store makes an ``Entry`` of each verb and its arguments. The outcomes of a commit go back to the
event loop in a ``CommitResult``.

All operations that arrive while a commit is running share the next one. One that fails before it
has written anything fails alone; after it has written, the transaction is rolled back and its
operations are run one by one.
"""

from __future__ import annotations

import queue
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import apsw

from perdure.errors import InternalError, PerdureError, StoreBusy, StoreUnavailable
from perdure.logs import get_logger
from perdure.providers.sqlite.connection import (
    RaisedByCode,
    breaks_connection,
    disconnect,
    translate,
)
from perdure.providers.sqlite.control import extend_stalled_locks
from perdure.providers.sqlite.transaction import PreconditionChanged, Snapshot

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from perdure.providers.sqlite.database import Database
    from perdure.providers.sqlite.transaction import Transaction, Verb
    from perdure.providers.waiting import Poll

_log = get_logger("perdure.sqlite")

BATCH_OPERATIONS_MAX: Final = 512
BATCH_QUERIES_MAX: Final = 64
QUICK_SECONDS = 0.002
"""A commit that takes longer has met a slow disk."""
QUICK_COMMITS_MIN: Final = 3
"""After this many consecutive commits under 2 ms, commit on the event loop."""


LOOK_FOR_DEAD_SECONDS: Final = 0.2

_lasts: Final = attrgetter("verb.lasts")

STALL_MS: Final = 1_000
"""If the store kept its clients waiting for longer, locks may have run out unrenewed."""


TOGETHER_MIN: Final = 2
"""Run this many consecutive calls of a verb together; fewer one by one."""


class Entry:
    """An accepted operation and the future that waits for it."""

    __slots__ = ("args", "future", "is_query", "is_small", "poll", "raw", "verb")

    def __init__(
        self,
        future: asyncio.Future[Any],
        verb: Verb,
        args: tuple[Any, ...],
        is_small: bool = False,
        poll: Poll | None = None,
        raw: bool = False,
        is_query: bool = False,
    ) -> None:
        self.future = future
        self.verb = verb
        self.args = args
        self.is_small = is_small
        """Its statements take less time than a hop to another thread."""
        self.poll = poll
        """Waits before the operation is tried again; None: it is tried only once."""
        self.raw = raw
        """Return ``NoWork`` to the caller, which is the wait itself (``Store._keep_looking``)."""
        self.is_query = is_query
        """It only reads, so it need not fail with a commit that it shares with others."""


Outcome: TypeAlias = tuple[Entry, Any, BaseException | None]
"""An operation with its answer or its error."""


class CommitResult:
    """The outcomes of one commit, or of queries that share a snapshot, and what waiters must know.

    For the event loop. Without outcomes it tells of a look at the file.
    """

    __slots__ = (
        "changed_instances",
        "dead_holders",
        "foreign",
        "outcomes",
        "turns_changed",
        "work_changed",
    )

    def __init__(self, *, foreign: bool = False, dead_holders: Sequence[str] = ()) -> None:
        self.outcomes: list[Outcome] = []
        self.turns_changed = False
        self.work_changed = False
        self.changed_instances: list[str] = []
        self.foreign = foreign
        """Another process has written: anything may have changed."""
        self.dead_holders = dead_holders
        """Processes that have died; their locks can be released."""


class Writer:
    """Runs operations on the one connection that writes, where it is called: on the event loop.

    For a database without a disk or upkeep; ``ThreadWriter`` is for others. Threads that have an
    event loop of their own, as the one that renews locks, wait for each other.
    """

    def __init__(self, database: Database, deliver: Callable[[CommitResult], None]) -> None:
        self._database = database
        self._deliver = deliver
        self._now_ms = database.system.clock.now_ms
        self._follower = database.clock_follower
        self._monotonic = database.system.monotonic
        self._last_commit = 0.0
        self._is_broken = False
        """The connection may be anywhere in a transaction, and is yet to be reset."""
        self._quick_commits = 0
        """Number of consecutive commits under ``QUICK_SECONDS``, up to the last one."""
        self._waiting_since: int | None = None
        """Since then nothing was committed, although there was something to commit."""

    # --- called by the store

    def start(self) -> None:
        """Begin to take operations; the database is open."""

    def submit(self, entries: list[Entry]) -> None:
        """Commit these operations, soon or at once, and deliver their outcomes."""
        result = CommitResult()
        with self._database.in_use:
            self._commit(entries, result)
        self._deliver(result)

    def query(self, entry: Entry) -> None:
        """Run an operation that only reads, for a database that only the writer can read."""
        self.submit([entry])

    def commit_here(self, entry: Entry, result: CommitResult) -> bool:
        """Commit it before returning; False, and nothing is done, if that could take long."""
        with self._database.in_use:
            return self._commit_one(entry, result)

    def _commit_one(self, entry: Entry, result: CommitResult) -> bool:
        """Commit it without waiting for another process; False if one is writing."""
        busy_handler = self._database.busy_handler
        busy_handler.is_patient = False
        try:
            self._attempt([entry], result)
        except Exception as bug:  # noqa: BLE001 - the writer must outlive a bug
            self._give_up([entry], result, bug)
        except BaseException as signal:  # it breaks into the thread of the event loop
            self._is_broken = True  # at once: the next signal may break into what follows
            self._give_up([entry], result, signal)
            raise
        finally:
            busy_handler.is_patient = True
        # Busy: another process is writing.
        return not isinstance(result.outcomes[0][2], StoreBusy)

    def watch(self, *, is_watching: bool) -> None:
        """Look for commits of other processes from now on, or no longer."""

    def stop(self) -> None:
        """Finish what was accepted and close the database; wait for that."""
        self._database.close()

    # --- commits

    def _commit(self, entries: list[Entry], result: CommitResult) -> None:
        """Run them in as few transactions as possible, and note what became of each."""
        try:
            for group in _groups(entries):
                self._commit_group(group, result)
        except Exception as bug:  # noqa: BLE001 - the writer must outlive a bug
            self._give_up(entries, result, bug)

    def _commit_group(self, entries: Sequence[Entry], result: CommitResult) -> None:
        """Share statements; else share a transaction; else have one transaction each."""
        if len(entries) >= TOGETHER_MIN:
            for together in (True, False):
                try:
                    self._attempt(entries, result, together=together)
                except PreconditionChanged as error:
                    _log.debug("a batch is run one by one: %r", error.__cause__)
                else:
                    return
        for entry in entries:
            self._attempt([entry], result)

    def _give_up(self, entries: list[Entry], result: CommitResult, error: BaseException) -> None:
        """Fail every entry that has no outcome yet."""
        # Logged last: that takes long enough for another signal to interrupt it.
        self._reset()
        answered = {id(entry) for entry, _, _ in result.outcomes}
        unknown = unknown_outcome(self._database.label, error)
        result.outcomes += [
            (entry, None, unknown) for entry in entries if id(entry) not in answered
        ]
        _log.error("a commit to %s broke", self._database.label, exc_info=error)

    def _attempt(
        self, entries: Sequence[Entry], result: CommitResult, *, together: bool = False
    ) -> None:
        """Run the operations in one transaction and note what became of them.

        Errors: PreconditionChanged if there are several; then nothing is committed or noted.
        """
        transaction: Transaction | None = None
        database, monotonic = self._database, self._monotonic
        try:
            if self._is_broken:
                self._reset()
            if (since := self._waiting_since) is None:
                since = self._waiting_since = self._now_ms()
            transaction = database.ready()
            is_alone = len(entries) == 1
            lasts = entries[0].verb.lasts if is_alone else any(map(_lasts, entries))
            if lasts is not database.lasts:
                database.let_last(lasts)
            transaction.begin(self._now_ms)
            latest, now = self._follower.latest, transaction.now
            if latest is None or now < latest or now - since > STALL_MS:
                self._adjust_locks(transaction, since)
            self._follower.latest = transaction.now
            started = monotonic()
            if is_alone:
                outcomes = [self._outcome(transaction, entries[0], is_alone=True)]
            else:
                run_one = partial(self._outcome, transaction, is_alone=False)
                outcomes = (
                    _run_together(transaction, entries, run_one)
                    if together
                    else list(map(run_one, entries))
                )
            begun = monotonic()
            transaction.commit()
            ended = self._last_commit = monotonic()
            self._quick_commits = self._quick_commits + 1 if ended - begun < QUICK_SECONDS else 0
            self._waiting_since = None
            if ended - started > STALL_MS / 1_000:
                self._note_stall(transaction.now)
            database.check_before_reply()
        except PreconditionChanged:
            assert transaction is not None
            _roll_back(transaction)
            raise
        except (apsw.Error, PerdureError) as error:
            if transaction is not None:
                _roll_back(transaction)
            if isinstance(error, apsw.Error):
                known: PerdureError = database.known_error(entries[0].verb.name, error)
                if breaks_connection(error):
                    self._reset()
            else:
                known = error
            self._note_stall(self._waiting_since)
            queries = [entry for entry in entries if entry.is_query]
            if queries and len(queries) < len(entries):
                self._attempt(queries, result)
                entries = [entry for entry in entries if not entry.is_query]
            result.outcomes += [(entry, None, known) for entry in entries]
        else:
            result.outcomes += outcomes
            result.turns_changed |= transaction.turns_changed
            result.work_changed |= transaction.work_changed
            result.changed_instances += transaction.changed_instances

    def _adjust_locks(self, transaction: Transaction, since: int) -> None:
        """Let locks follow a clock that went back, and extend those that ran out in a stall.

        In a commit of its own: what the transaction does after it may be rolled back.
        """
        jump = self._follower.follow(transaction)
        is_stall = transaction.now - since > STALL_MS
        if is_stall:
            extend_stalled_locks(transaction, since)
        if jump is not None or is_stall:
            transaction.commit()
            if jump is not None:
                self._follower.followed(jump)
            self._database.check_before_reply()
            transaction.begin(self._now_ms)
            transaction.turns_changed = transaction.work_changed = True

    def _outcome(self, transaction: Transaction, entry: Entry, *, is_alone: bool) -> Outcome:
        """Run one operation. If it fails after it has written, all of the transaction is undone."""
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
            if is_alone or breaks_connection(failure):
                raise
            error = failure
        except RaisedByCode as raised:
            error = raised.error
        except Exception as bug:  # noqa: BLE001 - the thread must outlive a bug of one operation
            error = _internal_error(entry, bug)
        if not is_alone:
            raise PreconditionChanged from error
        _roll_back(transaction)
        transaction.begin(self._now_ms)
        return entry, None, error

    def _note_stall(self, since: int | None) -> None:
        """Remember for the next commit that the store was not usable since then, if it took long.

        That is a matter of the store's clock, by which locks run out.
        """
        is_stall = since is not None and self._now_ms() - since > STALL_MS
        self._waiting_since = since if is_stall else None

    def _reset(self) -> None:
        self._database.reset()
        self._is_broken = False


class ThreadWriter(Writer):
    """Commits in a thread, and a single small operation on the event loop.

    The way to the thread and back takes longer than the statements of such an operation.
    """

    def __init__(self, database: Database, deliver: Callable[[CommitResult], None]) -> None:
        super().__init__(database, deliver)
        self._queue: queue.SimpleQueue[list[Entry]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._look_at = 0.0
        self._is_asleep = False
        """The thread waits without looking at the clock."""
        self._is_stopping = False

    # --- called from the event loop

    def start(self) -> None:
        self._thread = self._database.system.start_thread(self._run, "perdure-sqlite")

    def submit(self, entries: list[Entry]) -> None:
        self._queue.put(entries)

    def commit_here(self, entry: Entry, result: CommitResult) -> bool:
        database = self._database
        if (
            self._quick_commits < QUICK_COMMITS_MIN
            or database.in_use.locked()
            or database.transaction is None
        ):
            return False
        # If the thread was quicker, it is waited for; a signal cannot break into taking the lock.
        with database.in_use:
            if not self._commit_one(entry, result):
                return False
            database.tell_others(result, self._last_commit)
        needs_thread = self._is_asleep and database.idle_seconds() is not None
        if needs_thread or database.is_upkeep_due(is_waited_for=False):
            self._queue.put([])  # only the thread does what may wait for the disk
        return True

    def watch(self, *, is_watching: bool) -> None:
        self._database.is_watching = is_watching
        if is_watching:
            self._queue.put([])

    def stop(self) -> None:
        self._is_stopping = True
        self._queue.put([])
        if self._thread is not None:
            self._thread.join()

    # --- the thread

    def _run(self) -> None:
        while True:
            entries = self._collect()
            if entries:
                result = CommitResult()
                with self._database.in_use:
                    self._commit(entries, result)
                    self._database.tell_others(result, self._last_commit)
                # Little may follow here: the loop wakes up now and needs the interpreter.
                self._deliver(result)
                self._keep_up()
            elif self._is_stopping:
                break
            else:
                self._keep_up()
                self._use_idle_time()
            self._look_for_dead()
        with self._database.in_use:
            self._database.close()

    def _collect(self) -> list[Entry]:
        """Return the operations that wait, at least one unless there is something else to do."""
        self._is_asleep = True  # first: a commit elsewhere must see it, or be seen
        seconds = 0.0 if self._is_stopping else self._database.idle_seconds()
        self._is_asleep = seconds is None
        try:
            entries = self._queue.get(timeout=seconds)
        except queue.Empty:
            return []
        finally:
            self._is_asleep = False
        while len(entries) < BATCH_OPERATIONS_MAX and not self._queue.empty():
            entries += self._queue.get_nowait()
        return entries

    def _keep_up(self) -> None:
        if self._database.is_upkeep_due(is_waited_for=not self._queue.empty()):
            with self._database.in_use:
                since, begun = self._now_ms(), self._monotonic()
                self._database.keep_up()
                # A clock that was only set does not count.
                is_long = self._monotonic() - begun > STALL_MS / 1_000
                if is_long and self._waiting_since is None:
                    self._note_stall(since)

    def _use_idle_time(self) -> None:
        with self._database.in_use:
            has_others = self._database.use_idle_time(self._monotonic() - self._last_commit)
        if has_others:
            self._deliver(CommitResult(foreign=True))

    def _look_for_dead(self) -> None:
        now = self._monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_FOR_DEAD_SECONDS
        with self._database.in_use:
            dead = self._database.peers.take_dead(now)
        if dead:
            self._deliver(CommitResult(dead_holders=dead))


class Reader:
    """A thread that only reads, with its own connection: queries never wait for a commit.

    All queries that wait share one snapshot of the database.
    """

    def __init__(
        self, database: Database, deliver: Callable[[CommitResult], None], name: str
    ) -> None:
        self._database = database
        self._deliver = deliver
        self._name = name
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None

    def start(self) -> None:
        self._thread = self._database.system.start_thread(self._run, self._name)

    def query(self, entry: Entry) -> None:
        self._queue.put(entry)

    def stop(self) -> None:
        """Finish what was accepted and close the connection; wait for that."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        is_running = True
        while is_running:
            waiting = [self._queue.get()]
            while len(waiting) < BATCH_QUERIES_MAX and not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            entries = [entry for entry in waiting if entry is not None]
            is_running = len(entries) == len(waiting)
            if entries:
                self._deliver(self._read(entries))
        self._close()

    def _read(self, entries: list[Entry]) -> CommitResult:
        result = CommitResult()
        try:
            if self._snapshot is None:
                self._snapshot = Snapshot(self._database.connect_reader())
            snapshot = self._snapshot
            snapshot.begin(self._database.system.clock.now_ms)
            try:
                result.outcomes = [_answer(self._database, each, snapshot) for each in entries]
            finally:
                snapshot.end()
        except (apsw.Error, PerdureError) as error:
            known = _known_error(self._database, error, entries[0].verb.name)
            result.outcomes = [(entry, None, known) for entry in entries]
            if isinstance(error, apsw.Error) and breaks_connection(error):
                self._close()
        return result

    def _close(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            disconnect(snapshot.connection)


# --- running operations


def _run_together(
    tx: Transaction, entries: Iterable[Entry], run_one: Callable[[Entry], Outcome]
) -> list[Outcome]:
    """Run operations in an order that is as good as theirs, and return their outcomes.

    Errors: PreconditionChanged, apsw.Error; then nothing of it may be committed.
    """
    outcomes: list[Outcome] = []
    for verb, group in groupby(entries, attrgetter("verb")):
        rest = list(group)
        while rest:
            answers: Any = ()
            if verb.run_many is not None and len(rest) >= TOGETHER_MIN:
                answers = _run_many(verb, tx, rest)
            if answers:
                outcomes += map(_outcome_of, rest, answers)
                del rest[: len(answers)]
            else:
                outcomes.append(run_one(rest.pop(0)))
    return outcomes


def _run_many(verb: Verb, tx: Transaction, entries: Sequence[Entry]) -> Sequence[Any]:
    assert verb.run_many is not None
    try:
        return verb.run_many(tx, [entry.args for entry in entries])
    except Exception as error:
        if isinstance(error, apsw.Error) and not isinstance(error, apsw.ConstraintError):
            raise
        raise PreconditionChanged from error


def _outcome_of(entry: Entry, answer: Any) -> Outcome:
    if isinstance(answer, Exception):
        return entry, None, answer
    return entry, answer, None


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


def _answer(database: Database, entry: Entry, snapshot: Snapshot) -> Outcome:
    """Run a query and return its outcome. Errors: apsw.Error that breaks the connection."""
    try:
        return entry, entry.verb.run(snapshot, *entry.args), None
    except apsw.Error as error:
        if breaks_connection(error):
            raise
        return entry, None, _known_error(database, error, entry.verb.name)
    except PerdureError as refusal:
        return entry, None, refusal
    except Exception as bug:  # noqa: BLE001 - the thread must outlive a bug of one query
        return entry, None, _internal_error(entry, bug)


def _known_error(
    database: Database, error: apsw.Error | PerdureError, operation: str
) -> PerdureError:
    if isinstance(error, PerdureError):
        return error
    known = translate(operation, error, database.label)
    known.__cause__ = error
    return known


def _internal_error(entry: Entry, bug: Exception) -> InternalError:
    error = InternalError(f"{entry.verb.name}: {bug!r}")
    error.__cause__ = bug
    return error
