"""The executors of sync activities: threads of this process, and child processes.

A child process is for code that needs its own CPU core or a time limit that really stops. It is
started when it is needed, kept for the next call, and killed when its call is cancelled or times
out. Values are sent as JSON. A child finds a function by its name: in a module, which it imports,
or in the program's own script, which it loads under another name, as multiprocessing does. The
program of a child is ``perdure.runtime.child``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import runpy
import socket
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from perdure.authoring.context import ActivityInfo
from perdure.authoring.definitions import Activity, Registry
from perdure.codec import JSON, Codec
from perdure.errors import PayloadError, PerdureError, UsageError
from perdure.model.events import NULL
from perdure.model.failures import Category, Failure, describe_exception, with_content
from perdure.processes import start_with_socket
from perdure.runtime.metrics import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


_SHORTAGES = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of a machine that is short of something, and may have it again a little later."""
_NO_ANSWER = (asyncio.IncompleteReadError, ConnectionError)
_LAST_ANSWER_SECONDS = 1.0
"""Time to read an answer that a process sent before it ended."""
_BEGIN_SECONDS = 120.0
"""Time for the start of a process and the imports of its code."""
_LOADED_AS = "__mp_main__"
"""The name of the program's own script in a child, so that its main part does not run there. It is
the name that multiprocessing uses: pools that an activity makes find its functions under it."""
_LOADING = "__perdure_loading__"
"""A global variable of the script while a child loads it."""


# --- how an attempt can fail to run, or to raise its own exception here


class NotBegun(PerdureError):
    """The worker has no thread or process for the code, so the code was not called."""


class ProcessDied(PerdureError):
    """The child process ended without an answer."""


class RecordedFailure(Exception):
    """Stands for an exception that cannot be raised here: one of a child process, or one that would
    end this process.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def failure_from(
    error: BaseException,
    attempts: int,
    raises: tuple[type[Exception], ...] = (),
    codec: Codec = JSON,
) -> Failure:
    """Return the record of the exception with which an attempt failed."""
    category = Category.TIMEOUT if isinstance(error, TimeoutError) else Category.APPLICATION
    failure = describe_exception(error)
    failure = msgspec.structs.replace(failure, category=category, attempts=attempts)
    return with_content(failure, error, raises, codec)


def call_contained(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function; replace errors that a future cannot hold or that would end the worker."""
    try:
        return fn(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("the activity raised StopIteration") from error
    except (GeneratorExit, KeyboardInterrupt, SystemExit) as error:
        raise RecordedFailure(failure_from(error, attempts=1)) from error


# --- threads


class ThreadExecutor:
    """The threads of sync activities.

    A thread cannot be stopped: an abandoned call, which timed out or was cancelled, goes on and
    keeps its thread until it ends.
    """

    def __init__(self, size: int, grace_seconds: float) -> None:
        self._size = size
        self._grace_seconds = grace_seconds
        self._pool = ThreadPoolExecutor(size, "perdure-activity")
        self._loop = asyncio.get_running_loop()
        self._abandoned: dict[Future[Any], str] = {}
        """Abandoned calls that still run, with the activity's name."""
        self._abandoned_ended = asyncio.Event()
        self._logged: set[str] = set()
        """Activities that the log has mentioned."""

    async def run(
        self,
        name: str,
        call: Callable[[], Any],
        limited: Callable[[Awaitable[Any]], Awaitable[Any]] | None,
    ) -> Any:
        """Run a call in a thread. ``limited`` applies its time limits once a thread begins it.

        A call that is cancelled before that never begins.
        """
        begun: asyncio.Future[None] | None = None
        if limited is not None:
            begun = self._loop.create_future()
            call = partial(self._begin, begun, call)
        future = self._submit(call)
        answer = asyncio.wrap_future(future)
        try:
            if limited is None or begun is None:
                return await answer
            await begun
            return await limited(answer)
        finally:
            answer.cancel()
            if not future.cancel() and not future.done():
                self._abandon(name, future)

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        # The pool queues a call before it starts a thread for it. If that start fails, another
        # thread may still run the call, so only a call that can be cancelled has not begun.
        future: Future[Any] = Future()
        try:
            self._pool.submit(_run, future, call)
        except RuntimeError as error:
            if future.cancel():
                raise NotBegun(f"no thread for it: {error}") from error
        return future

    def _begin(self, begun: asyncio.Future[None], call: Callable[[], Any]) -> Any:
        self._loop.call_soon_threadsafe(_set, begun)
        return call()

    def _abandon(self, name: str, future: Future[Any]) -> None:
        self._abandoned[future] = name
        future.add_done_callback(self._on_abandoned_end)
        if len(self._abandoned) >= self._size:
            self._warn(name)  # no other sync activity can begin
        elif name not in self._logged:
            self._loop.call_later(self._grace_seconds, self._check, name, future)

    def _on_abandoned_end(self, future: Future[Any]) -> None:
        self._abandoned.pop(future, None)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._abandoned_ended.set)

    async def wait_for_abandoned(self) -> None:
        """Wait until no abandoned call runs any more."""
        while self._abandoned:
            self._abandoned_ended.clear()
            await self._abandoned_ended.wait()

    def _check(self, name: str, future: Future[Any]) -> None:
        if not future.done() and name not in self._logged:
            self._warn(name)

    def _warn(self, name: str) -> None:
        self._logged.add(name)
        log.warning(
            "activity %r still runs in its thread although it timed out or was cancelled; %d of %d "
            "threads are taken like that. A thread cannot be stopped: look at is_cancelled() now "
            "and then, or use executor='process'",
            name,
            len(self._abandoned),
            self._size,
        )

    @property
    def abandoned(self) -> Counter[str]:
        """The number of abandoned calls that still run, by activity."""
        return Counter(list(self._abandoned.values()))

    def close(self) -> None:
        """Begin no more calls. Running calls continue."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - raised where it is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def _set(begun: asyncio.Future[None]) -> None:
    if not begun.done():
        begun.set_result(None)


# --- finding the function of an activity


def check_not_loading() -> None:
    """Raise UsageError if a child process is loading this program to find an activity in it."""
    if hasattr(sys.modules.get(_LOADED_AS), _LOADING):
        raise UsageError(
            "a process activity is defined in this script, so each child process loads the script: "
            "put what runs under if __name__ == '__main__':, or the activity into a module"
        )


def check_process_activities(registry: Registry) -> None:
    """Raise UsageError for a process activity that a child process cannot find or call."""
    for name in sorted(registry.activity_names):
        activity = registry.resolve_activity(name)
        if activity.settings.executor == "process":
            source_of(activity)
            try:
                activity.signature.check_annotations(JSON)
            except PayloadError as error:
                raise UsageError(
                    f"activity {name!r} runs in a process, which does not have the codec of the "
                    f"runtime: {error}; or use executor='thread'"
                ) from error


class Program(msgspec.Struct, frozen=True):
    """The program that Python was told to run: the name of a module, or a path."""

    module: str | None = None
    path: str | None = None


class Source(msgspec.Struct, frozen=True):
    """The name of a function, and the module or the program that defines it."""

    module: str
    qualname: str
    program: Program | None

    def load(self) -> Activity[..., Any]:
        """Return the activity; called in a child process."""
        module = self._import() if self.program is None else _load(self.program)
        found = _lookup(module, self.qualname)
        if isinstance(found, Activity):
            return cast("Activity[..., Any]", found)
        if isinstance(found, FunctionType):
            return Activity(found)
        raise UsageError(
            f"a child process does not find {self.qualname} in {module.__file__}: the function of "
            "a process activity must be there whenever the file is loaded, so neither under "
            "if __name__ == '__main__': nor made later"
        )

    def _import(self) -> ModuleType:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if not f"{self.module}.".startswith(f"{error.name}."):
                raise
            raise UsageError(
                f"a child process cannot import {self.module}, the module of the process activity "
                f"{self.qualname}: put it where sys.path finds it, under this name"
            ) from error


def source_of(activity: Activity[..., Any]) -> Source:
    """Return what a child needs to find the activity. Raises UsageError if it could not find it."""
    fn = activity.fn
    module = sys.modules.get(fn.__module__)
    found = None if module is None else _lookup(module, fn.__qualname__)
    # Activities are compared by name, not identity: the module may have been loaded again.
    is_itself = found.name == activity.name if isinstance(found, Activity) else found is fn
    if module is None or not is_itself:
        raise UsageError(
            f"activity {activity.name!r} runs in a process, which finds it by the name of its "
            f"function, {fn.__module__}.{fn.__qualname__}, and there is something else or nothing: "
            "define it at the top level of a module, or use executor='thread'"
        )
    return Source(fn.__module__, fn.__qualname__, _program(activity, module))


def _program(activity: Activity[..., Any], module: ModuleType) -> Program | None:
    if activity.fn.__module__ not in {"__main__", _LOADED_AS}:
        return None
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return Program(module=spec.name)  # python -m
    path = Path(getattr(module, "__file__", None) or "<stdin>")
    if spec is not None:
        path = path.parent  # python with a folder or an archive
    if not path.exists():
        raise UsageError(
            f"activity {activity.name!r} runs in a process, which loads the file that defines "
            f"{activity.fn.__qualname__}, but it was typed in, as in a notebook, or given to "
            "python -c: put it into a module and import it from there, or use executor='thread'"
        )
    return Program(path=str(path))


@cache
def _load(program: Program) -> ModuleType:
    # On import, multiprocessing binds _LOADED_AS to the current main module. Importing it now keeps
    # it from overwriting the module that is bound to that name below.
    importlib.import_module("multiprocessing")
    loading = {_LOADING: True}
    if program.module is not None:
        content = runpy.run_module(program.module, loading, _LOADED_AS, alter_sys=True)
    else:
        assert program.path is not None
        content = runpy.run_path(program.path, loading, _LOADED_AS)
    del content[_LOADING]
    module = ModuleType(_LOADED_AS)
    vars(module).update(content)
    # Annotations are resolved in it, pickles name it, and spawned pools load the main module.
    sys.modules["__main__"] = sys.modules[_LOADED_AS] = module
    return module


def _lookup(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


# --- calling it in a child process


class Call(msgspec.Struct, kw_only=True):
    """The request to a child process."""

    source: Source
    info: ActivityInfo
    input: msgspec.Raw


class Answer(msgspec.Struct, kw_only=True):
    """The answer of a child process."""

    result: msgspec.Raw = NULL
    failure: Failure | None = None


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
        limited: Callable[[Awaitable[Any]], Awaitable[Any]] | None = None,
    ) -> Any:
        """Run an activity in a child. ``limited`` applies its time limits once its code begins."""
        call = Call(
            source=source_of(activity),
            info=info,
            input=activity.signature.encode_arguments(args, kwargs, JSON),
        )
        async with self._slots:
            child = await self._idle_child() or await self._spawn_if_possible()
            try:
                answer = await child.call(call, limited)
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
            await self._kill(child)  # it ended by itself, or was killed from outside
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
            # The process is started last, and nothing is awaited after it: a cancelled start leaves
            # no process behind.
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await start_with_socket(
                    theirs,
                    [
                        *(sys.executable, "-P", "-m", "perdure.runtime.child"),
                        *(str(os.getpid()), os.environ.get("PYTHONPATH", "")),
                        *map(str, sys.argv),
                    ],
                    os.environ
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
        self, call: Call, limited: Callable[[Awaitable[Any]], Awaitable[Any]] | None
    ) -> Answer:
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer = asyncio.ensure_future(self._exchange(msgspec.json.encode(call), begun))
        death = asyncio.ensure_future(self._process.wait())
        try:
            # Wait for the end of the process, not of its pipe: programs that it has started may
            # hold the pipe open.
            done, _ = await asyncio.wait(
                (begun, answer, death), return_when=asyncio.FIRST_COMPLETED, timeout=_BEGIN_SECONDS
            )
            if not done:
                raise TimeoutError(
                    f"its process did not begin {call.source.qualname} within {_BEGIN_SECONDS:g} "
                    "s: to start and import what it needs took too long"
                )
            ended = _answer_or_death(call, answer, death)
            return await (ended if limited is None else limited(ended))
        finally:
            answer.cancel()
            death.cancel()
            await asyncio.gather(answer, death, return_exceptions=True)

    async def _exchange(self, data: bytes, begun: asyncio.Future[None]) -> Answer:
        self._writer.write(len(data).to_bytes(4) + data)
        await self._writer.drain()
        while not (frame := await self._receive()):  # an empty frame: the code begins
            begun.set_result(None)
        return msgspec.json.decode(frame, type=Answer)

    async def _receive(self) -> bytes:
        return await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(4)))

    async def kill(self) -> None:
        self._writer.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def _answer_or_death(
    call: Call, answer: asyncio.Future[Answer], death: asyncio.Future[int]
) -> Answer:
    await asyncio.wait((answer, death), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((answer,), timeout=_LAST_ANSWER_SECONDS)
    if answer.done() and not isinstance(answer.exception(), _NO_ANSWER):
        return answer.result()
    raise ProcessDied(f"the process of {call.source.qualname} died with exit code {await death}")
