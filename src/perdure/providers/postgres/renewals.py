"""Renews locks on a connection and a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final

from perdure.errors import StoreClosed
from perdure.logs import get_logger
from perdure.providers.postgres.calling import Parameters, RawConnection, cut
from perdure.providers.postgres.faults import is_unusable_after, repeat

if TYPE_CHECKING:
    from concurrent.futures import Future

    from perdure.providers.postgres.hosts import Hosts, Row, ServerConnection

log = get_logger(__name__)

_ANSWER_SECONDS: Final = 2.0
"""Time limit of the first try. A lock is renewed early enough for a second one. Each try has twice
the time of the one before: more requests would make a slow server slower."""
_JOIN_SECONDS: Final = 2.0


class _RenewalThread:
    """A connection with an event loop and a daemon thread of its own, until ``end`` is called."""

    def __init__(self, hosts: Hosts, *, prepare: bool) -> None:
        self._hosts = hosts
        self._prepare = prepare
        self._connection: ServerConnection | None = None
        self._raw: RawConnection | None = None
        self._one_at_a_time = asyncio.Lock()
        self._over = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="perdure-renewals", daemon=True)
        self._thread.start()

    def leave_old_primary(self) -> None:
        """Connect anew before the next renewal; one that waits for an answer fails."""
        self._loop.call_soon_threadsafe(self._cut)

    def ask(self, statement: bytes, parameters: Parameters, seconds: float) -> Future[list[Row]]:
        """Return the rows as a future, which is cancelled if the thread ends first."""
        asking = self._ask(statement, parameters, seconds)
        return asyncio.run_coroutine_threadsafe(asking, self._loop)

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
        self._disconnect()

    async def _ask(self, statement: bytes, parameters: Parameters, seconds: float) -> list[Row]:
        async with self._one_at_a_time:
            if self._raw is None or self._connection is None or self._connection.closed:
                self._disconnect()
                self._connection = await self._hosts.connect()
                self._raw = RawConnection(self._connection)
            try:
                return await self._raw.call_for_rows(
                    statement, parameters, prepare=self._prepare, seconds=seconds
                )
            except BaseException as error:
                if is_unusable_after(error):
                    self._disconnect()
                raise

    def _cut(self) -> None:
        if self._one_at_a_time.locked():
            if self._connection is not None:
                cut(self._connection)
        else:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._raw is not None and self._connection is not None:
            self._raw.stop()
            self._connection.pgconn.finish()
        self._raw = self._connection = None


class Renewals:
    """Renews locks while the pool is busy or the event loop is blocked.

    Replaces a connection that has gone silent. May be used from any event loop.
    """

    def __init__(self, hosts: Hosts, *, prepare: bool, retry_seconds: float) -> None:
        self._hosts = hosts
        self._location = hosts.address.location
        self._prepare = prepare
        self._retry_seconds = retry_seconds
        self._is_open = False
        self._starting = threading.Lock()
        self._thread: _RenewalThread | None = None

    def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        with self._starting:
            self._is_open = False
            thread, self._thread = self._thread, None
        if thread is not None:
            await thread.end()

    def leave_old_primary(self) -> None:
        """Renew on another connection than before."""
        with self._starting:
            if self._thread is not None:
                self._thread.leave_old_primary()

    async def run(self, operation: str, statement: bytes, parameters: Parameters) -> list[Row]:
        """Return the rows of a statement that may be repeated, and is while that can help."""
        seconds = _ANSWER_SECONDS

        async def attempt(_again: bool) -> list[Row]:
            nonlocal seconds
            try:
                return await self._ask(operation, statement, parameters, seconds)
            except TimeoutError:
                log.warning(
                    "%s: %s has not answered within %s s; trying again on another connection",
                    operation,
                    self._location,
                    seconds,
                )
                seconds *= 2
                raise

        return await repeat(operation, self._location, self._retry_seconds, attempt)

    async def _ask(
        self, operation: str, statement: bytes, parameters: Parameters, seconds: float
    ) -> list[Row]:
        with self._starting:
            if not self._is_open:
                raise self._closed(operation)
            if self._thread is None:
                self._thread = _RenewalThread(self._hosts, prepare=self._prepare)
            asked = self._thread.ask(statement, parameters, seconds)
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._closed(operation) from None  # the thread has ended meanwhile

    def _closed(self, operation: str) -> StoreClosed:
        return StoreClosed(operation, f"{self._location} is not open")
