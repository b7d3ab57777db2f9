"""Renewing locks on a connection and a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

import psycopg

from perdure.errors import StoreClosed
from perdure.providers.postgres import rows
from perdure.providers.postgres.backoff import Backoff
from perdure.providers.postgres.calling import call_for_rows
from perdure.providers.postgres.connections import Row
from perdure.providers.postgres.faults import Remedy, refusal, remedy_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from perdure.providers.postgres.place import Place

log = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 2.0
"""For the first try; what is left of a lock when it is renewed allows for another one. Each try has
twice the time of the one before: a slow server is not helped by more to do."""
_JOIN_SECONDS: Final = 2.0


class _Line:
    """A connection, with the event loop and the thread that it lives on until it is told to end.

    It holds nobody up who exits.
    """

    def __init__(self, place: Place, *, prepare: bool) -> None:
        self._place = place
        self._prepare = prepare
        self._connection: psycopg.AsyncConnection[Row] | None = None
        self._prepared: set[bytes] = set()
        self._turn = asyncio.Lock()
        self._over = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="perdure-renewals", daemon=True)
        self._thread.start()

    def ask(
        self, statement: bytes, values: Sequence[bytes | None], seconds: float
    ) -> Future[list[Row]]:
        """Cancelled if the line ends first."""
        return asyncio.run_coroutine_threadsafe(self._ask(statement, values, seconds), self._loop)

    async def end(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    # --- in the thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        await self._over.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._hang_up()

    async def _ask(
        self, statement: bytes, values: Sequence[bytes | None], seconds: float
    ) -> list[Row]:
        async with self._turn:
            if self._connection is None or self._connection.closed:
                self._connection = await psycopg.AsyncConnection[Row].connect(
                    self._place.conninfo, autocommit=True, prepare_threshold=None
                )
                self._prepared = set()
            try:
                return await call_for_rows(
                    self._connection,
                    statement,
                    values,
                    prepared=self._prepared if self._prepare else None,
                    seconds=seconds,
                )
            except BaseException as error:
                # An answer that was not waited for would be taken for the next one's.
                if remedy_for(error) is Remedy.RECONNECT or not isinstance(error, psycopg.Error):
                    self._hang_up()
                raise

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pgconn.finish()


class Renewals:
    """A connection of its own, on a thread of its own, so that no lock is lost for want of one.

    Neither a busy pool nor a blocked event loop keeps it from the server, and a connection that has
    gone silent is replaced. May be used from any event loop.
    """

    def __init__(self, place: Place, *, prepare: bool, retry_seconds: float) -> None:
        self._place = place
        self._prepare = prepare
        self._retry_seconds = retry_seconds
        self._is_open = False
        self._starting = threading.Lock()
        self._line: _Line | None = None

    def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        with self._starting:
            self._is_open = False
            line, self._line = self._line, None
        if line is not None:
            await line.end()

    async def run(self, operation: str, statement: bytes, parameters: Sequence[Any]) -> list[Row]:
        """Rows of a statement that may be repeated; it is, for as long as that can help."""
        backoff = Backoff(self._retry_seconds)
        seconds = _ANSWER_SECONDS
        values = [rows.parameter(each) for each in parameters]
        while True:
            try:
                return await self._ask(operation, statement, values, seconds)
            except (psycopg.Error, OSError) as error:
                if isinstance(error, TimeoutError):
                    log.warning(
                        "%s: %s has not answered within %s s, and is asked again on another "
                        "connection",
                        operation,
                        self._place.location,
                        seconds,
                    )
                    seconds *= 2
                if remedy_for(error) is Remedy.NONE or not await backoff.pause():
                    raise refusal(operation, error, self._place.location) from error

    async def _ask(
        self, operation: str, statement: bytes, values: Sequence[bytes | None], seconds: float
    ) -> list[Row]:
        with self._starting:
            if not self._is_open:
                raise self._closed(operation)
            if self._line is None:
                self._line = _Line(self._place, prepare=self._prepare)
            asked = self._line.ask(statement, values, seconds)
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._closed(operation) from None  # the line has ended under it

    def _closed(self, operation: str) -> StoreClosed:
        return StoreClosed(operation, f"{self._place.location} is not open")
