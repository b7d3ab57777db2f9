"""Threads that only read, each with its own connection: queries never wait for a commit."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Final

import apsw

from perdure.errors import InternalError, PerdureError
from perdure.providers.sqlite.connection import breaks_connection, disconnect, translate
from perdure.providers.sqlite.transaction import Snapshot
from perdure.providers.sqlite.verb import Delivery

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from perdure.providers.sqlite.database import Database
    from perdure.providers.sqlite.verb import Entry, Outcome

BATCH_QUERIES_MAX: Final = 64


class Reader:
    """One thread; all queries that wait share one snapshot of the database."""

    def __init__(self, database: Database, deliver: Callable[[Delivery], None], name: str) -> None:
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
            snapshot.begin(self._database.system.clock.now_ms)
            try:
                delivery.outcomes = [answer(self._database, each, snapshot) for each in entries]
            finally:
                snapshot.end()
        except (apsw.Error, PerdureError) as error:
            known = _known_error(self._database, error, entries[0].verb.name)
            delivery.outcomes = [(entry, None, known) for entry in entries]
            if isinstance(error, apsw.Error) and breaks_connection(error):
                self._close()
        return delivery

    def _opened(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = Snapshot(self._database.connect_reader())
        return self._snapshot

    def _close(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            disconnect(snapshot.connection)


def answer(database: Database, entry: Entry, snapshot: Snapshot) -> Outcome:
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
        wrapped = InternalError(f"{entry.verb.name}: {bug!r}")
        wrapped.__cause__ = bug
        return entry, None, wrapped


def _known_error(
    database: Database, error: apsw.Error | PerdureError, operation: str
) -> PerdureError:
    if isinstance(error, PerdureError):
        return error
    known = translate(operation, error, database.label)
    known.__cause__ = error
    return known
