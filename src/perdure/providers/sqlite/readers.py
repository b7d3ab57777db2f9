"""Threads that only read, each with its own connection: queries never wait for a commit."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any, Final

import apsw

from perdure.errors import InternalError, PerdureError
from perdure.providers.sqlite.connection import (
    breaks_connection,
    connect_reader,
    disconnect,
    translate,
)
from perdure.providers.sqlite.entries import Delivery
from perdure.providers.sqlite.transaction import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from perdure.clock import Clock
    from perdure.providers.sqlite.entries import Entry

BATCH_QUERIES_MAX: Final = 64


class Reader:
    """One thread; whatever is waiting shares one look at the file."""

    def __init__(
        self, path: Path, clock: Clock, deliver: Callable[[Delivery], None], name: str
    ) -> None:
        self._path = path
        self._clock = clock
        self._deliver = deliver
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._snapshot: Snapshot | None = None

    def start(self) -> None:
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        self._queue.put(entry)

    def stop(self) -> None:
        """Finish what was accepted, then close; does not wait."""
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        is_running = True
        while is_running:
            entries: list[Entry] = []
            entry = self._queue.get()
            try:
                while entry is not None and len(entries) < BATCH_QUERIES_MAX:
                    entries.append(entry)
                    entry = self._queue.get_nowait()
            except queue.Empty:
                pass
            else:
                if entry is None:
                    is_running = False
                else:
                    entries.append(entry)
            if entries:
                self._deliver(self._answer(entries))
        self._close()

    def _answer(self, entries: list[Entry]) -> Delivery:
        delivery = Delivery()
        try:
            snapshot = self._opened()
            snapshot.begin(self._clock.now_ms)
            try:
                delivery.outcomes = [self._outcome(entry, snapshot) for entry in entries]
            finally:
                snapshot.end()
        except (apsw.Error, PerdureError) as error:
            known = self._known_error(error, entries[0].name)
            delivery.outcomes = [(entry, None, known) for entry in entries]
            if isinstance(error, apsw.Error) and breaks_connection(error):
                self._close()
        return delivery

    def _outcome(self, entry: Entry, snapshot: Snapshot) -> tuple[Entry, Any, BaseException | None]:
        try:
            return entry, entry.operation(snapshot, *entry.args), None
        except apsw.Error as error:
            if breaks_connection(error):
                raise
            return entry, None, self._known_error(error, entry.name)
        except PerdureError as refusal:
            return entry, None, refusal
        except Exception as bug:  # noqa: BLE001 - the thread must outlive a bug of one query
            wrapped = InternalError(f"{entry.name}: {bug!r}")
            wrapped.__cause__ = bug
            return entry, None, wrapped

    def _known_error(self, error: apsw.Error | PerdureError, operation: str) -> PerdureError:
        if isinstance(error, PerdureError):
            return error
        known = translate(operation, error, self._path)
        known.__cause__ = error
        return known

    def _opened(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = Snapshot(connect_reader(self._path))
        return self._snapshot

    def _close(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            disconnect(snapshot.connection)
