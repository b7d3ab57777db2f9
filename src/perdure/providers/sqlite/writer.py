"""Writers: they run the operations of a store, in a thread or on the event loop itself.

All operations that arrive while a commit is running share the next one.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Final, Protocol

import apsw

from perdure.providers.sqlite.committer import Committer
from perdure.providers.sqlite.readers import answer
from perdure.providers.sqlite.verb import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.sqlite.database import Database
    from perdure.providers.sqlite.verb import Entry

BATCH_OPERATIONS_MAX: Final = 512
QUICK_COMMITS_MIN: Final = 3
"""After this many consecutive commits under 2 ms, commit on the event loop."""


LOOK_FOR_DEAD_SECONDS: Final = 0.2


class Writer(Protocol):
    """Runs operations on the one connection that writes. Called from the event loop."""

    def start(self) -> None:
        """Begin to take operations; the database is open."""
        ...

    def submit(self, entries: list[Entry]) -> None:
        """Commit these operations, soon or at once, and deliver their outcomes."""
        ...

    def query(self, entry: Entry) -> None:
        """Run an operation that only reads, for a database that only the writer can read."""
        ...

    def commit_here(self, entry: Entry, delivery: Delivery) -> bool:
        """Commit it before returning; False, and nothing is done, if that could take long."""
        ...

    def watch(self, *, is_watching: bool) -> None:
        """Look for commits of other processes from now on, or no longer."""
        ...

    def stop(self) -> None:
        """Finish what was accepted and close the database; wait for that."""
        ...


class LoopWriter:
    """Commits on the event loop itself. For a database without a disk or upkeep."""

    def __init__(
        self,
        database: Database,
        deliver: Callable[[Delivery], None],
        reached: Callable[[str], None],
    ) -> None:
        self._database = database
        self._committer = Committer(database, reached)
        self._deliver = deliver

    def start(self) -> None: ...

    def submit(self, entries: list[Entry]) -> None:
        delivery = Delivery()
        self._committer.commit(entries, delivery)
        self._deliver(delivery)

    def query(self, entry: Entry) -> None:
        # Without BEGIN: nothing else uses the connection before this returns.
        transaction = self._database.ready()
        transaction.now = self._database.system.clock.now_ms()
        delivery = Delivery()
        try:
            outcome = answer(self._database, entry, transaction)
        except (
            apsw.Error
        ) as error:  # one that breaks a connection to a file; here there is no other
            outcome = (entry, None, self._database.known_error(entry.verb.name, error))
        delivery.outcomes.append(outcome)
        self._deliver(delivery)

    def commit_here(self, entry: Entry, delivery: Delivery) -> bool:
        self._committer.commit_at_once(entry, delivery)
        return True

    def watch(self, *, is_watching: bool) -> None: ...

    def stop(self) -> None:
        self._database.close()


class ThreadWriter:
    """Commits in a thread, and a single small operation on the event loop.

    The way to the thread and back takes longer than the statements of such an operation.
    """

    def __init__(
        self,
        database: Database,
        deliver: Callable[[Delivery], None],
        reached: Callable[[str], None],
    ) -> None:
        self._database = database
        self._system = database.system
        self._committer = Committer(database, reached)
        self._writing = threading.Lock()
        """Held while the connection is used."""
        self._deliver = deliver
        self._queue: queue.SimpleQueue[list[Entry]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last_commit = 0.0
        self._look_at = 0.0
        self._is_asleep = False
        """The thread waits without looking at the clock."""
        self._is_stopping = False

    # --- called from the event loop

    def start(self) -> None:
        self._thread = self._system.start_thread(self._run, "perdure-sqlite")

    def submit(self, entries: list[Entry]) -> None:
        self._queue.put(entries)

    def query(self, entry: Entry) -> None:
        self._queue.put([entry])

    def commit_here(self, entry: Entry, delivery: Delivery) -> bool:
        committer, database = self._committer, self._database
        if (
            committer.quick_commits < QUICK_COMMITS_MIN
            or self._writing.locked()
            or not database.is_connected
        ):
            return False
        # If the thread was quicker, it is waited for; a signal cannot break into taking the lock.
        with self._writing:
            if not committer.commit_at_once(entry, delivery):
                return False
            self._last_commit = self._system.monotonic()
            database.tell_others(delivery)
        needs_thread = self._is_asleep and database.idle_seconds() is not None
        if needs_thread or database.is_upkeep_due(is_waited_for=False):
            self._queue.put([])  # only the thread does what may wait for the disk
        return True

    def watch(self, *, is_watching: bool) -> None:
        self._database.watch(is_watching=is_watching)
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
                delivery = Delivery()
                with self._writing:
                    self._committer.commit(entries, delivery)
                    self._last_commit = self._system.monotonic()
                    self._database.tell_others(delivery)
                # Little may follow here: the loop wakes up now and needs the interpreter.
                self._deliver(delivery)
                self._keep_up()
            elif self._is_stopping:
                break
            else:
                self._keep_up()
                self._use_idle_time()
            self._look_for_dead()
        with self._writing:
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
            with self._writing:
                self._database.keep_up()

    def _use_idle_time(self) -> None:
        with self._writing:
            has_others = self._database.use_idle_time(self._system.monotonic() - self._last_commit)
        if has_others:
            self._deliver(Delivery(foreign=True))

    def _look_for_dead(self) -> None:
        now = self._system.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_FOR_DEAD_SECONDS
        with self._writing:
            dead = self._database.take_dead()
        if dead:
            self._deliver(Delivery(dead_holders=dead))
