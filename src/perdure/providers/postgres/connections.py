"""Connections, and how often a statement is tried. Knows nothing of what the statements mean."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg

from perdure.errors import ProviderError, StoreBusy, StoreClosed
from perdure.providers.postgres.faults import Remedy, refusal, remedy_for
from perdure.providers.postgres.place import STATEMENT_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from perdure.providers.postgres.place import Place

Row: TypeAlias = tuple[Any, ...]
Parameters: TypeAlias = "Sequence[Any] | Mapping[str, Any]"
_Connection: TypeAlias = "psycopg.AsyncConnection[Row]"

RETRY_SECONDS: Final = 10.0
"""A restart or a failover is over by then; the caller may go on trying."""

_PAUSE_SECONDS: Final = (0.01, 0.5)
_LIFE_SECONDS: Final = 3600.0
"""What a session of the server gathers in its memory is let go from time to time."""
_ANSWER_SECONDS: Final = STATEMENT_TIMEOUT_SECONDS + 5.0
"""The server gives up first; this bounds the wait for an answer that never comes."""


class Backoff:
    """Pauses that grow and are jittered, until the time is up."""

    def __init__(self, seconds: float) -> None:
        self._give_up_at = asyncio.get_running_loop().time() + seconds
        self._ceiling = _PAUSE_SECONDS[0]

    async def pause(self) -> bool:
        """False at once if there is no time left."""
        seconds = random.uniform(0, self._ceiling)
        if asyncio.get_running_loop().time() + seconds > self._give_up_at:
            return False
        await asyncio.sleep(seconds)
        self._ceiling = min(2 * self._ceiling, _PAUSE_SECONDS[1])
        return True


class Connections:
    """A bounded pool, every connection in autocommit: a statement is a transaction.

    The last one used is the next one used, and whoever finds none open opens one: after a restart
    of the server, work goes on as soon as one connection succeeds.
    """

    def __init__(self, place: Place, *, size: int, prepare: bool, retry_seconds: float) -> None:
        self._place = place
        self._retry_seconds = retry_seconds
        self._prepare_threshold = 0 if prepare else None
        self._slots = asyncio.Semaphore(size)
        self._free: list[tuple[_Connection, float]] = []
        """With the times at which they were opened."""
        self._is_open = False

    @property
    def location(self) -> str:
        return self._place.location

    async def connect(self) -> _Connection:
        """A connection of one's own; raises what the driver raises."""
        return await psycopg.AsyncConnection[Row].connect(
            self._place.conninfo, autocommit=True, prepare_threshold=self._prepare_threshold
        )

    def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        await self._drop_free()

    async def run(
        self,
        operation: str,
        statement: bytes,
        parameters: Parameters = (),
        *,
        binary: bool = False,
    ) -> list[Row]:
        """Rows of a statement that may be repeated; it is, for as long as that can help."""
        return await self.run_marked(operation, statement, lambda _: parameters, binary=binary)

    async def run_marked(
        self,
        operation: str,
        statement: bytes,
        parameters: Callable[[bool], Parameters],
        *,
        binary: bool,
        was_sent: bool = False,
    ) -> list[Row]:
        """As ``run``; the parameters may depend on whether the statement may have run before."""
        backoff = Backoff(self._retry_seconds)
        while True:
            try:
                return await self.run_once(
                    operation, statement, parameters(was_sent), binary=binary
                )
            except (psycopg.Error, OSError) as error:
                remedy = remedy_for(error)
                if remedy is Remedy.NONE or not await backoff.pause():
                    raise refusal(operation, error, self.location) from error
                was_sent = was_sent or remedy is Remedy.RECONNECT

    async def run_once(
        self,
        operation: str,
        statement: bytes,
        parameters: Parameters = (),
        *,
        binary: bool = False,
    ) -> list[Row]:
        """One try; raises what the driver raises."""
        await self._take_slot(operation)
        try:
            connection, opened_at = await self._take()
            try:
                return await _ask(connection, statement, parameters, binary=binary)
            finally:
                await self._put(connection, opened_at)
        except (psycopg.Error, OSError) as error:
            if remedy_for(error) is Remedy.RECONNECT:
                # What happened to this one has likely happened to all of them.
                await self._drop_free()
            raise
        finally:
            self._slots.release()

    async def _take_slot(self, operation: str) -> None:
        if not self._is_open:
            raise StoreClosed(operation, f"{self.location} is not open")
        try:
            async with asyncio.timeout(self._retry_seconds):
                await self._slots.acquire()
        except TimeoutError as error:
            raise StoreBusy(
                operation,
                f"{self.location}: all connections were in use for {self._retry_seconds} s; "
                "raise pool_size, or look for what blocks them",
            ) from error

    async def _take(self) -> tuple[_Connection, float]:
        while self._free:
            connection, opened_at = self._free.pop()
            if not connection.closed:
                return connection, opened_at
        return await self.connect(), asyncio.get_running_loop().time()

    async def _put(self, connection: _Connection, opened_at: float) -> None:
        age = asyncio.get_running_loop().time() - opened_at
        if self._is_open and age < _LIFE_SECONDS and not connection.closed:
            self._free.append((connection, opened_at))
        else:
            await connection.close()

    async def _drop_free(self) -> None:
        while self._free:
            connection, _ = self._free.pop()
            await connection.close()


async def _ask(
    connection: _Connection, statement: bytes, parameters: Parameters, *, binary: bool
) -> list[Row]:
    cursor = connection.cursor(binary=binary)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await cursor.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else []
    except BaseException as error:
        # A stale plan lives on in an open connection, and an answer that was not waited for would
        # be taken for the next one's.
        if remedy_for(error) is Remedy.RECONNECT or not isinstance(error, psycopg.Error):
            await connection.close()
        raise


class Renewals:
    """A connection of its own, on a thread of its own, so that no lock is lost for want of one.

    Neither a busy pool nor a blocked event loop keeps it from the server. May be used from any
    event loop.
    """

    def __init__(self, place: Place, *, prepare: bool, retry_seconds: float) -> None:
        self._place = place
        self._prepare = prepare
        self._retry_seconds = retry_seconds
        self._thread: ThreadPoolExecutor | None = None
        self._connection: psycopg.Connection[Row] | None = None

    def open(self) -> None:
        self._thread = ThreadPoolExecutor(1, "perdure-renewals")

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await self._in_thread(thread, self._disconnect)
            thread.shutdown()

    async def run(self, operation: str, statement: bytes, parameters: Sequence[Any]) -> list[Row]:
        """Rows of a statement that may be repeated; it is, for as long as that can help."""
        backoff = Backoff(self._retry_seconds)
        while True:
            thread = self._thread
            if thread is None:
                raise StoreClosed(operation, f"{self._place.location} is not open")
            try:
                return await self._in_thread(thread, lambda: self._ask(statement, parameters))
            except (psycopg.Error, OSError) as error:
                if remedy_for(error) is Remedy.NONE or not await backoff.pause():
                    raise refusal(operation, error, self._place.location) from error

    @staticmethod
    async def _in_thread(thread: ThreadPoolExecutor, call: Callable[[], list[Row]]) -> list[Row]:
        return await asyncio.wrap_future(thread.submit(call))

    def _ask(self, statement: bytes, parameters: Sequence[Any]) -> list[Row]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.Connection[Row].connect(
                self._place.conninfo,
                autocommit=True,
                prepare_threshold=0 if self._prepare else None,
            )
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except psycopg.Error as error:
            if remedy_for(error) is Remedy.RECONNECT:
                self._disconnect()
            raise

    def _disconnect(self) -> list[Row]:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        return []


def outcome_unknown(operation: str, error: ProviderError) -> ProviderError:
    """The same error, saying that the call may have been applied."""
    return type(error)(
        operation, f"{error.message}; it is not known whether the call was applied", retryable=True
    )
