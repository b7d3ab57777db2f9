"""Who writes, and when: one thread, and for a single small operation the event loop itself.

Whatever arrives while a commit is running shares the next one. An operation that comes alone is
committed where it is: the way to the thread and back takes longer than its statements.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import TYPE_CHECKING, Final

import apsw

from perdure.providers.sqlite.committer import Committer
from perdure.providers.sqlite.entries import Delivery
from perdure.providers.sqlite.log import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from perdure.clock import Clock
    from perdure.providers.sqlite.connection import Durability
    from perdure.providers.sqlite.entries import Entry
    from perdure.providers.sqlite.lending import LendableConnection

BATCH_OPERATIONS_MAX: Final = 512
IDLE_SECONDS_TO_CHECKPOINT: Final = 1.0
WATCH_SECONDS: Final = (0.015, 0.06)
"""How often the file is asked for commits of other processes, just after one and when idle.

In a virtual machine a look takes 0.25 ms of a processor, most of it to wake the thread up.
"""
QUICK_COMMITS_MIN: Final = 3
"""So many in a row, and the disk is quick enough for the event loop to wait for it."""


class Writer:
    """The thread, and the right to use the one connection that writes."""

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
        self._log = Log(durability)
        self._committer = Committer(
            path, durability, clock, self._log, reached, orphan_grace_ms=orphan_grace_ms
        )
        self._writing = threading.Lock()
        """Held by whoever uses the connection."""
        self._deliver = deliver
        self._queue: queue.SimpleQueue[list[Entry]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="perdure-sqlite", daemon=True)
        self._last_commit = 0.0
        self._watch_seconds = WATCH_SECONDS[0]
        self._is_watching = False
        self._is_asleep = False
        """The thread waits without looking at the clock."""
        self._is_stopping = False

    # --- called from the event loop

    def start(self, connection: LendableConnection) -> None:
        self._committer.adopt(connection)
        self._thread.start()

    def submit(self, entries: list[Entry]) -> None:
        self._queue.put(entries)

    def commit_here(self, entry: Entry, delivery: Delivery) -> bool:
        """Commit it in this thread; False, and nothing is done, if that could hold it up."""
        committer = self._committer
        if committer.quick_commits < QUICK_COMMITS_MIN or self._writing.locked():
            return False
        # If the thread was quicker, it is waited for; a signal cannot break into taking the lock.
        with self._writing:
            if not committer.commit_at_once(entry, delivery):
                return False
            self._last_commit = time.monotonic()
        if self._is_asleep or self._log.is_due(is_waited_for=False):
            self._queue.put([])  # for the log, which only the thread copies
        return True

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
                with self._writing:
                    self._committer.commit(entries, delivery)
                    self._last_commit = time.monotonic()
                # Little may follow here: the loop wakes up now and needs the interpreter.
                self._deliver(delivery)
                self._checkpoint_if_large()
            elif self._is_stopping:
                break
            else:
                self._checkpoint_if_large()
                self._use_idle_time()
        with self._writing:
            self._committer.checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self._committer.drop_connection()

    def _collect(self) -> list[Entry]:
        """What is waiting, at least one unless there is something else to do."""
        self._is_asleep = True  # first: a commit elsewhere must see it, or be seen
        patience = self._patience()
        self._is_asleep = patience is None
        try:
            entries = self._queue.get(timeout=patience)
        except queue.Empty:
            return []
        finally:
            self._is_asleep = False
        while len(entries) < BATCH_OPERATIONS_MAX and not self._queue.empty():
            entries += self._queue.get_nowait()
        return entries

    def _patience(self) -> float | None:
        if self._is_stopping:
            return 0
        if self._is_watching:
            return self._watch_seconds * random.uniform(0.8, 1.2)
        return IDLE_SECONDS_TO_CHECKPOINT * 1.1 if self._log.pages else None

    def _checkpoint_if_large(self) -> None:
        if self._log.is_due(is_waited_for=not self._queue.empty()):
            with self._writing:
                self._committer.checkpoint(self._log.mode())
                self._log.put_off()

    def _use_idle_time(self) -> None:
        if self._is_watching:
            self._look_for_others()
        idle_seconds = time.monotonic() - self._last_commit
        if self._log.pages and idle_seconds > IDLE_SECONDS_TO_CHECKPOINT:
            with self._writing:
                # The log keeps its length: overwriting it is cheaper than making it longer again.
                self._committer.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
                # Whatever came of it: another try is worth it only after the next commit.
                self._log.rest()

    def _look_for_others(self) -> None:
        with self._writing:
            has_others = self._committer.see_others()
        if has_others:
            self._watch_seconds = WATCH_SECONDS[0]
            self._deliver(Delivery(foreign=True))
        else:
            self._watch_seconds = min(self._watch_seconds * 1.1, WATCH_SECONDS[1])
