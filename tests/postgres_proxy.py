"""A proxy in front of a Postgres server that loses or mutes connections at chosen moments."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

_SOCKET = ".s.PGSQL.5432"
_READY = b"Z\x00\x00\x00\x05"
"""The server is done with a statement: with autocommit, it is committed."""


class Cut(Enum):
    """The moment of a statement at which the connection is lost."""

    BEFORE = auto()
    """It never gets to the server."""
    DURING = auto()
    """The server gets it; the connection is cut before the answer."""
    AFTER = auto()
    """It was committed, and the answer is lost."""
    SILENCE = auto()
    """The server never gets it; the connection stays open and silent."""


class Proxy:
    """Listens on a Unix socket; ``plan`` is asked about each message that a client sends."""

    def __init__(self, target_directory: Path, plan: Callable[[bytes], Cut | None]) -> None:
        self._target = target_directory / _SOCKET
        self._plan = plan
        self._home = tempfile.TemporaryDirectory(prefix="perdure-px-")
        self._tasks: set[asyncio.Task[None]] = set()
        self.cuts = 0
        self.connections = 0
        self.statements = 0

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._home.name}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, Path(self._home.name) / _SOCKET)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._home.cleanup()

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            server, request = await asyncio.open_unix_connection(self._target)
        except OSError:
            answer.close()
            return
        finally:
            task.add_done_callback(self._tasks.discard)
        line = _Line(client, answer, server, request)
        try:
            await line.run(self._judge)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            await line.close()

    def _judge(self, message: bytes) -> Cut | None:
        self.statements += 1
        cut = self._plan(message)
        self.cuts += cut is not None
        return cut


class _Line:
    """One connection from a client to the server."""

    def __init__(
        self,
        client: asyncio.StreamReader,
        answer: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        request: asyncio.StreamWriter,
    ) -> None:
        self._client, self._answer = client, answer
        self._server, self._request = server, request
        self._is_mute = False
        self._done = asyncio.Event()

    async def run(self, judge: Callable[[bytes], Cut | None]) -> None:
        answers = asyncio.create_task(self._pass_answers())
        try:
            await self._pass_requests(judge)
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)

    async def close(self) -> None:
        for writer in (self._answer, self._request):
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _pass_requests(self, judge: Callable[[bytes], Cut | None]) -> None:
        is_started = False
        while chunk := await self._client.read(1 << 20):
            cut = judge(chunk) if is_started else None
            is_started = True
            if cut is Cut.BEFORE:
                return
            if cut is Cut.SILENCE:
                await asyncio.Event().wait()
            if cut is Cut.AFTER:
                self._is_mute = True
                self._done.clear()
            self._request.write(chunk)
            await self._request.drain()
            if cut is Cut.AFTER:
                await self._done.wait()
            if cut is not None:
                return

    async def _pass_answers(self) -> None:
        while chunk := await self._server.read(1 << 20):
            if self._is_mute:
                if _READY in chunk:
                    self._done.set()
            else:
                self._answer.write(chunk)
                await self._answer.drain()
        # The server has hung up, so the client shall notice.
        self._done.set()
        self._answer.close()
