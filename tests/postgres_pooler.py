"""A pooler as PgBouncer is in transaction mode: each transaction goes to another server session."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_SOCKET = ".s.PGSQL.5432"
_REQUESTS = {80877103, 80877104}
"""For encryption; both are answered with no."""
_NO_SETTINGS = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"


class Pooler:
    """Hands a client's transactions to its sessions in turn, so that no two meet by chance."""

    def __init__(self, target_directory: Path, sessions: int = 3) -> None:
        self._target = target_directory / _SOCKET
        self._sessions = sessions
        self._home = tempfile.TemporaryDirectory(prefix="perdure-pl-")
        self._free: asyncio.Queue[_Session] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.clients = 0
        """That were let in."""
        self.transactions = 0

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._home.name}"

    async def __aenter__(self) -> Self:
        for _ in range(self._sessions):
            self._free.put_nowait(await _Session.open(self._target))
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
        while not self._free.empty():
            self._free.get_nowait().close()
        self._home.cleanup()

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._greet(client, answer)
            self.clients += 1
            while await self._pass_transaction(client, answer):
                self.transactions += 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            answer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await answer.wait_closed()

    @staticmethod
    async def _greet(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        while True:
            (length,) = struct.unpack("!i", await client.readexactly(4))
            body = await client.readexactly(length - 4)
            if struct.unpack("!i", body[:4])[0] not in _REQUESTS:
                break
            answer.write(b"N")
        if b"options\0" in body:
            answer.write(_frame(b"E", _NO_SETTINGS))
            await answer.drain()
            raise ConnectionAbortedError
        answer.write(_frame(b"R", struct.pack("!i", 0)))
        for name, value in {
            "server_version": "16.0",
            "server_encoding": "UTF8",
            "client_encoding": "UTF8",
            "standard_conforming_strings": "on",
            "integer_datetimes": "on",
        }.items():
            answer.write(_frame(b"S", f"{name}\0{value}\0".encode()))
        answer.write(_frame(b"K", struct.pack("!ii", 1, 1)) + _frame(b"Z", b"I"))

    async def _pass_transaction(
        self, client: asyncio.StreamReader, answer: asyncio.StreamWriter
    ) -> bool:
        request = await _read_request(client)
        if request is None:
            return False
        session = await self._free.get()
        try:
            while await session.ask(request, answer) != b"I":
                request = await _read_request(client)
                if request is None:
                    return False
        finally:
            self._free.put_nowait(session)
        return True


class _Session:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, path: Path) -> _Session:
        reader, writer = await asyncio.open_unix_connection(path)
        session = cls(reader, writer)
        body = struct.pack("!i", 196608) + b"user\0postgres\0database\0postgres\0\0"
        writer.write(struct.pack("!i", len(body) + 4) + body)
        await session._read_until_ready(None)
        return session

    async def ask(self, request: bytes, answer: asyncio.StreamWriter) -> bytes:
        """Status of the session after the request: I for idle, T inside a transaction."""
        self._writer.write(request)
        return await self._read_until_ready(answer)

    async def _read_until_ready(self, answer: asyncio.StreamWriter | None) -> bytes:
        while True:
            kind, body = await _read_frame(self._reader)
            if answer is not None:
                answer.write(_frame(kind, body))
            if kind == b"Z":
                return body

    def close(self) -> None:
        self._writer.close()


async def _read_request(client: asyncio.StreamReader) -> bytes | None:
    """Everything up to a Sync or a Query; None at the end."""
    request = b""
    while True:
        kind, body = await _read_frame(client)
        if kind == b"X":
            return None
        request += _frame(kind, body)
        if kind in {b"S", b"Q"}:
            return request


async def _read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    kind = await reader.readexactly(1)
    (length,) = struct.unpack("!i", await reader.readexactly(4))
    return kind, await reader.readexactly(length - 4)


def _frame(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body
