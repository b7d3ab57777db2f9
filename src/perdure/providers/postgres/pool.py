"""A bounded pool of connections that repeats statements while repeating can help.

Knows nothing about the meaning of the statements.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

import psycopg

from perdure.errors import StoreBusy, StoreClosed
from perdure.providers.postgres.calling import RawConnection, cut, value_of
from perdure.providers.postgres.faults import (
    OldPrimary,
    Remedy,
    is_unusable_after,
    remedy_for,
    repeat,
)
from perdure.providers.postgres.hosts import TIMELINE, Row, ServerConnection, timeline_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from psycopg.pq.abc import PGresult

    from perdure.providers.postgres.calling import Parameters
    from perdure.providers.postgres.hosts import Hosts

_Answer = TypeVar("_Answer")

RETRY_SECONDS: Final = 10.0
"""Long enough for a restart or a failover of the server."""

_OPEN_AFTER_SECONDS: Final = 0.02
"""A statement waits this long for a connection in use before the pool opens another one. A new
connection has to plan every statement first, which costs the server more than most statements."""
_PREPARE_AFTER_RUNS: Final = 3
"""Preparing a statement takes a round trip; a short program does not get it back."""
_WAIT_FOR_STANDBYS: Final = b"SELECT pg_logical_emit_message(true, 'perdure', '')"
"""Writes to the log only. Its commit waits, and so for everything that was written before."""
_LATE: Final = (TimeoutError, psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled)
"""Errors that come because a statement waits for too long."""
_LIFE_SECONDS: Final = 3600.0
"""Older connections are closed: the memory of a server process grows with its age."""


@dataclass(slots=True, eq=False)
class PooledConnection:
    """An open connection."""

    connection: ServerConnection
    opened_at: float
    raw: RawConnection
    timeline: int
    """That of its server; behind a pooler, of the server that has answered last. 0: unknown."""
    busy_since: float | None = None
    runs: Counter[bytes] = field(default_factory=Counter[bytes])
    """Number of runs of each statement. The server does not plan a known statement again."""


class ConnectionPool:
    """Connections in autocommit: each statement is a transaction.

    A statement goes to a free connection that has run it before, otherwise to the one that was used
    last. If none is free it waits in line; after ``_OPEN_AFTER_SECONDS`` the pool opens another
    connection for it, one at a time. The answer of an old primary counts as lost.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        size: int,
        prepare: bool,
        retry_seconds: float,
    ) -> None:
        self._hosts = hosts
        self._address = hosts.address
        self._fence = hosts.fence
        self._size = size
        self.retry_seconds = retry_seconds
        """Seconds for which a call is repeated, or waits for a connection."""
        self._prepares = prepare
        self._free: list[PooledConnection] = []
        self._all: set[PooledConnection] = set()
        """Connections that are free or in use."""
        self._waiting: deque[asyncio.Future[PooledConnection | None]] = deque()
        self._is_opening = False
        self._is_open = False

    @property
    def location(self) -> str:
        return self._address.location

    def open(self) -> None:
        self._is_open = True

    def adopt(self, connection: ServerConnection) -> None:
        """Make a connection part of the pool."""
        pooled = self._pooled(connection)
        self._give_back(pooled, self._outdated(pooled))

    def leave_old_primaries(self) -> None:
        """Close connections to servers on an older timeline; their calls are repeated."""
        for pooled in [each for each in self._all if 0 < each.timeline < self._fence.newest]:
            if pooled in self._free:
                self._free.remove(pooled)
                self._close(pooled)
            else:
                cut(pooled.connection)
        self._wake_one()

    def is_waiting_since(self, seconds: float) -> bool:
        """Return True if an answer has been outstanding for longer than that."""
        before = asyncio.get_running_loop().time() - seconds
        return any(each.busy_since is not None and each.busy_since < before for each in self._all)

    def close(self) -> None:
        self._is_open = False
        self._close_free()
        while (waiter := self._next_waiter()) is not None:
            waiter.set_result(None)  # it finds the pool closed

    # --- statements

    async def run(
        self,
        operation: str,
        statement: bytes,
        parameters: Parameters | Callable[[bool], Parameters] = (),
        *,
        seconds: float | None = None,
        retry_seconds: float | None = None,
        writes: bool = False,
        was_sent: bool = False,
        escapes: bool = False,
    ) -> list[Row]:
        """Return the rows of a statement that may be repeated, and is while that can help.

        ``parameters``: a function is told whether the statement may have run before; ``was_sent``:
        it has been sent before. ``seconds``: how long an answer may take. ``retry_seconds``: 0
        means to try once. ``writes``: the first try may have written all that there is to write,
        and not have waited for synchronous standbys to the end. The repeat waits for them.
        ``escapes``: as in ``RawConnection.call_for_rows``.
        """
        limit = self._address.answer_seconds if seconds is None else seconds

        async def attempt(again: bool) -> list[Row]:
            async def ask(pooled: PooledConnection) -> list[Row]:
                if again and writes:
                    await pooled.raw.call(_WAIT_FOR_STANDBYS, (), prepare=False, seconds=limit)
                return await pooled.raw.call_for_rows(
                    statement,
                    parameters(again) if callable(parameters) else parameters,
                    prepare=self._is_worth_preparing(pooled, statement),
                    seconds=limit,
                    escapes=escapes,
                )

            return await self._on_connection(operation, statement, ask)

        return await repeat(
            operation,
            self.location,
            self.retry_seconds if retry_seconds is None else retry_seconds,
            attempt,
            was_sent=was_sent,
        )

    async def call_once(
        self, operation: str, statement: bytes, parameters: Sequence[bytes]
    ) -> bytes:
        """Try a commit once and return its text. Raises what the driver raises."""
        statement = self._telling_timeline(statement)

        async def ask(pooled: PooledConnection) -> bytes:
            result = await pooled.raw.call(
                statement,
                parameters,
                prepare=self._is_worth_preparing(pooled, statement),
                seconds=self._address.answer_seconds,
            )
            self._note_timeline(pooled, result)
            return value_of(result)

        return await self._on_connection(operation, statement, ask)

    def call_now(
        self,
        statement: bytes,
        parameters: Sequence[bytes],
        done: Callable[[bytes, BaseException | None], None],
    ) -> bool:
        """Call as ``call_once`` if a connection that knows the statement is free; or return False.

        ``done`` is called with the text, or with the error that the driver would raise.
        """
        statement = self._telling_timeline(statement)
        pooled = self._pick_ready(statement) if self._is_open else None
        if pooled is None:
            return False

        def answered(result: PGresult | None, error: BaseException | None) -> None:
            if result is not None:
                self._note_timeline(pooled, result)
                error = self._outdated(pooled)
            self._give_back(pooled, error)
            done(b"" if error is not None or result is None else value_of(result), error)

        pooled.busy_since = asyncio.get_running_loop().time()
        try:
            pooled.raw.start(
                statement,
                parameters,
                prepare=self._prepares,
                seconds=self._address.answer_seconds,
                answered=answered,
            )
        except (psycopg.Error, OSError) as error:
            answered(None, error)
        return True

    async def _on_connection(
        self,
        operation: str,
        statement: bytes,
        ask: Callable[[PooledConnection], Awaitable[_Answer]],
    ) -> _Answer:
        pooled = await self._take(operation, statement)
        pooled.busy_since = asyncio.get_running_loop().time()
        try:
            answer = await ask(pooled)
            if (outdated := self._outdated(pooled)) is not None:
                raise outdated
        except BaseException as error:
            self._give_back(pooled, error)
            raise
        pooled.runs[statement] += 1
        self._give_back(pooled)
        return answer

    def _outdated(self, pooled: PooledConnection) -> OldPrimary | None:
        """Return the error for an answer of a server that is not the primary any more."""
        if 0 < pooled.timeline < self._fence.newest:
            host = pooled.connection.server.host
            return OldPrimary(f"{host} has answered on timeline {pooled.timeline}, an older one")
        return None

    def _telling_timeline(self, statement: bytes) -> bytes:
        """Return the statement of a commit with the timeline as a second column, for a pooler.

        A pooler may give each transaction another server.
        """
        is_fixed = self._prepares or not self._hosts.knows_timelines
        return statement if is_fixed else b"%b, %b" % (statement, TIMELINE)

    def _note_timeline(self, pooled: PooledConnection, result: PGresult) -> None:
        if result.nfields > 1 and (file_name := result.get_value(0, 1)) is not None:
            pooled.timeline = timeline_of(file_name)
            if pooled.timeline > self._fence.newest:
                self._fence.note(replace(pooled.connection.server, timeline=pooled.timeline))

    def _is_worth_preparing(self, pooled: PooledConnection, statement: bytes) -> bool:
        return self._prepares and pooled.runs[statement] >= _PREPARE_AFTER_RUNS

    # --- taking and giving back connections

    async def _take(self, operation: str, statement: bytes) -> PooledConnection:
        self._require_open(operation)
        pooled = self._pick(statement)
        if pooled is not None:
            return pooled
        now = asyncio.get_running_loop().time()
        open_at = now if not self._all else now + _OPEN_AFTER_SECONDS
        give_up_at = now + self.retry_seconds
        while True:
            may_open = now >= open_at and len(self._all) < self._size
            if may_open and not self._is_opening:
                return await self._open_another()
            # Past give_up_at a connection is being opened, which has a time limit of its own.
            until = open_at if now < open_at else give_up_at if now < give_up_at else None
            pooled = await self._wait_in_line(until)
            if pooled is None:
                # One may have become free after this wait ended and before it came to this line.
                pooled = self._pick(statement)
            if pooled is not None:
                return pooled
            self._require_open(operation)
            now = asyncio.get_running_loop().time()
            if not self._all:
                open_at = now  # no connection is left that could become free
            if now >= give_up_at and len(self._all) >= self._size:
                raise StoreBusy(
                    operation,
                    f"{self.location}: all connections were in use for {self.retry_seconds} s; "
                    "raise pool_size, or look for what blocks them",
                )

    def _require_open(self, operation: str) -> None:
        if not self._is_open:
            raise StoreClosed(operation, f"{self.location} is not open")

    async def _wait_in_line(self, until: float | None) -> PooledConnection | None:
        """Return the connection that was handed over, or None at that time or if woken earlier."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[PooledConnection | None] = loop.create_future()
        self._waiting.append(waiter)
        timer = None if until is None else loop.call_at(until, _end_wait, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # This caller got a connection, or its chance to open one, and does not use it.
                pooled = waiter.result()
                if pooled is None:
                    self._wake_one()
                else:
                    self._give_back(pooled)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _pick(self, statement: bytes) -> PooledConnection | None:
        for position in range(len(self._free) - 1, -1, -1):
            pooled = self._free[position]
            if pooled.connection.closed:
                self._close(self._free.pop(position))
            elif statement in pooled.runs:
                return self._free.pop(position)
        return self._free.pop() if self._free else None

    def _pick_ready(self, statement: bytes) -> PooledConnection | None:
        """Return a free connection on which the statement needs no preparing."""
        for position in range(len(self._free) - 1, -1, -1):
            pooled = self._free[position]
            is_ready = statement in (pooled.raw.prepared if self._prepares else pooled.runs)
            if is_ready and not pooled.connection.closed:
                return self._free.pop(position)
        return None

    async def _open_another(self) -> PooledConnection:
        self._is_opening = True
        try:
            pooled = self._pooled(await self._hosts.connect())
        except (psycopg.Error, OSError) as error:
            # Others would wait as long and fail too, one after the other.
            while self._waiting:
                _fail_wait(self._waiting.popleft(), error)
            self._close_if_broken(error)
            raise
        else:
            return pooled
        finally:
            self._is_opening = False
            self._wake_one()

    def _give_back(self, pooled: PooledConnection, error: BaseException | None = None) -> None:
        pooled.busy_since = None
        if error is not None:
            if isinstance(error, _LATE) and self._hosts.waiting_commits:
                error.add_note("the synchronous standby does not answer")
            if is_unusable_after(error):
                self._close(pooled)
            self._close_if_broken(error)
        age = asyncio.get_running_loop().time() - pooled.opened_at
        if self._is_open and age < _LIFE_SECONDS and not pooled.connection.closed:
            waiter = self._next_waiter()
            if waiter is None:
                self._free.append(pooled)
            else:
                waiter.set_result(pooled)
        else:
            self._close(pooled)
            self._wake_one()

    def _next_waiter(self) -> asyncio.Future[PooledConnection | None] | None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                return waiter
        return None

    def _wake_one(self) -> None:
        """Let the first in line see whether it may open a connection now."""
        waiter = self._next_waiter()
        if waiter is not None:
            waiter.set_result(None)

    def _close_if_broken(self, error: BaseException) -> None:
        if remedy_for(error) is Remedy.RECONNECT:
            # The same has likely happened to all of them.
            self._close_free()

    def _close_free(self) -> None:
        while self._free:
            self._close(self._free.pop())

    def _pooled(self, connection: ServerConnection) -> PooledConnection:
        now = asyncio.get_running_loop().time()
        timeline = connection.server.timeline or 0
        pooled = PooledConnection(connection, now, RawConnection(connection), timeline)
        self._all.add(pooled)
        return pooled

    def _close(self, pooled: PooledConnection) -> None:
        """Close it as the driver does, without awaiting."""
        self._all.discard(pooled)
        pooled.raw.stop()
        pooled.connection.pgconn.finish()


def _end_wait(waiter: asyncio.Future[PooledConnection | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _fail_wait(waiter: asyncio.Future[PooledConnection | None], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)
