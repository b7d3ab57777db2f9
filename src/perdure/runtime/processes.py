"""Child processes for activities that need a core of their own or a time limit that really stops.

A child is started when it is needed, kept for the next call, and killed when its call is cancelled
or times out. Values travel as JSON; functions are found by their names.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.authoring.activity_context import ActivityInfo
from perdure.codec import JSON
from perdure.errors import PerdureError
from perdure.model.events import NULL
from perdure.model.failures import Failure
from perdure.runtime.failures import NotBegun, RecordedFailure
from perdure.runtime.sources import Source, source_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.authoring import Activity


class Call(msgspec.Struct, kw_only=True):
    """What a child is asked to do."""

    source: Source
    info: ActivityInfo
    input: msgspec.Raw


class Answer(msgspec.Struct, kw_only=True):
    """How it went."""

    result: msgspec.Raw = NULL
    failure: Failure | None = None


class ProcessDied(PerdureError):
    """The child process ended without an answer."""


_SHORTAGES = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Of what a machine may have again a little later."""
_NO_ANSWER = (asyncio.IncompleteReadError, ConnectionError)
_LAST_WORDS_SECONDS = 1.0
"""For an answer that a process gave before it ended."""
_BEGIN_SECONDS = 120.0
"""For the start of a process and what its code imports."""


class ProcessPool:
    """At most ``size`` children; a call waits for a free one."""

    def __init__(self, size: int) -> None:
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()

    async def run(
        self,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        info: ActivityInfo,
        bounded: Callable[[Awaitable[Any]], Awaitable[Any]] | None = None,
    ) -> Any:
        """Run it in a child; ``bounded`` limits it from the moment when the code begins."""
        call = Call(
            source=source_of(activity),
            info=info,
            input=activity.signature.encode_arguments(args, kwargs, JSON),
        )
        async with self._slots:
            child = await self._idle_child() or await self._spawn_if_possible()
            try:
                answer = await child.call(call, bounded)
            except BaseException:
                await self._kill(child)
                raise
            self._idle.append(child)
        if answer.failure is not None:
            raise RecordedFailure(answer.failure)
        return activity.signature.decode_result(answer.result, JSON)

    async def _idle_child(self) -> _Child | None:
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            await self._kill(child)  # somebody else has ended it meanwhile
        return None

    async def close(self) -> None:
        for child in list(self._all):
            await self._kill(child)

    async def _spawn_if_possible(self) -> _Child:
        try:
            return await self._spawn()
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise NotBegun(f"no process for it: {error}") from error
            raise

    async def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            # The process comes last: a start that is cancelled ends it, and no wait follows.
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "perdure.runtime.child"),
                    *(str(theirs.fileno()), str(os.getpid()), os.environ.get("PYTHONPATH", "")),
                    *map(str, sys.argv),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=os.environ
                    | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
                )
            except BaseException:
                writer.close()
                raise
        child = _Child(process, reader, writer)
        self._all.add(child)
        return child

    async def _kill(self, child: _Child) -> None:
        self._all.discard(child)
        if child in self._idle:
            self._idle.remove(child)
        await child.kill()


class _Child:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._reader.at_eof()

    async def call(
        self, call: Call, bounded: Callable[[Awaitable[Any]], Awaitable[Any]] | None
    ) -> Answer:
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer = asyncio.ensure_future(self._exchange(msgspec.json.encode(call), begun))
        death = asyncio.ensure_future(self._process.wait())
        try:
            # Its end counts, not that of its pipe: what it has started may hold that open.
            done, _ = await asyncio.wait(
                (begun, answer, death), return_when=asyncio.FIRST_COMPLETED, timeout=_BEGIN_SECONDS
            )
            if not done:
                raise TimeoutError(
                    f"its process did not begin {call.source.qualname} within {_BEGIN_SECONDS:g} "
                    "s: to start and import what it needs took too long"
                )
            ending = _ending(call, answer, death)
            return await (ending if bounded is None else bounded(ending))
        finally:
            answer.cancel()
            death.cancel()
            await asyncio.gather(answer, death, return_exceptions=True)

    async def _exchange(self, data: bytes, begun: asyncio.Future[None]) -> Answer:
        self._writer.write(len(data).to_bytes(4) + data)
        await self._writer.drain()
        while not (frame := await self._receive()):  # an empty one: the code begins
            begun.set_result(None)
        return msgspec.json.decode(frame, type=Answer)

    async def _receive(self) -> bytes:
        return await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(4)))

    async def kill(self) -> None:
        self._writer.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def _ending(call: Call, answer: asyncio.Future[Answer], death: asyncio.Future[int]) -> Answer:
    await asyncio.wait((answer, death), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((answer,), timeout=_LAST_WORDS_SECONDS)
    if answer.done() and not isinstance(answer.exception(), _NO_ANSWER):
        return answer.result()
    raise ProcessDied(f"the process of {call.source.qualname} died with exit code {await death}")
