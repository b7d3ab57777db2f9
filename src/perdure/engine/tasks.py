"""Tasks and futures of the durable loop: stable hashes, notes of reads, and closing.

Each task is a branch with a path: ``0`` is the task of the orchestration, ``0.2`` its second child.
Each future hashes by its place in its branch, never by its address: asyncio keeps futures in sets,
and a set must iterate in the same order on every replay, under every hash seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import traceback
import zlib
from typing import TYPE_CHECKING, Any, Final, cast

from perdure.authoring.context import Step

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
    from contextvars import Context
    from types import CodeType

    _Future = asyncio.Future[Any]
    _Step = Step[Any]
else:
    _Future = object
    _Step = Step

_IDENTITY_BITS = 24
_ATTEMPTS_MAX = 1000


class Branch:
    """Counters of one task: its operations, the tasks that it started, the futures it created."""

    __slots__ = (
        "_children",
        "_identity",
        "_operations",
        "_rng",
        "_seed",
        "is_compensation",
        "path",
        "site",
    )

    def __init__(self, path: str, seed: str, site: str = "") -> None:
        self.path = path
        self.site = site
        """``file:line`` that created the task, for steps without a line of user code."""
        self.is_compensation = False
        """True while a saga undoes earlier steps in this task."""
        self._seed = seed
        # The seed keeps tasks of different executions apart in asyncio's process-wide set.
        self._identity = zlib.crc32(f"{seed}/{path}".encode()) << _IDENTITY_BITS
        self._operations = 0
        self._children = 0
        self._rng: random.Random | None = None

    def next_operation(self) -> str:
        self._operations += 1
        return f"{self.path}/{self._operations}"

    def coming_operation(self) -> str:
        """Return the key that ``next_operation`` will return next."""
        return f"{self.path}/{self._operations + 1}"

    def next_identity(self) -> int:
        """Return a hash. Hashes are consecutive in a branch: small sets keep the creation order."""
        self._identity += 1
        return self._identity

    def child(self, site: str = "") -> Branch:
        self._children += 1
        child = Branch(f"{self.path}.{self._children}", self._seed, site)
        child.is_compensation = self.is_compensation
        return child

    def rng(self) -> random.Random:
        """Return the generator of this branch, seeded by the execution and the path."""
        if self._rng is None:
            from random import Random

            self._rng = Random(f"{self._seed}/{self.path}")
        return self._rng


class DurableTask(asyncio.Task[Any]):
    """A task of the durable loop, bound to its branch."""

    __slots__ = ("_identity", "branch")

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        loop: asyncio.AbstractEventLoop,
        branch: Branch,
        identity: int,
        name: str | None,
        context: Context | None,
    ) -> None:
        # Set before the base class runs: its constructor puts the task into a set.
        self._identity = identity
        self.branch = branch
        super().__init__(coro, loop=loop, name=name or f"Task-{branch.path}", context=context)
        # The engine closes pending tasks itself, so asyncio must not log them.
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._identity


class DurableFuture(asyncio.Future[Any]):
    """The result of ``loop.create_future()``: locks, queues and sleeps wait on these."""

    __slots__ = ("_identity",)

    def __init__(self, *, loop: asyncio.AbstractEventLoop, identity: int) -> None:
        self._identity = identity
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._identity


_Gathering: Any = getattr(asyncio.tasks, "_GatheringFuture")  # noqa: B009
GATHERING_INIT: Final[CodeType] = _Gathering.__init__.__code__
_COLLECT: Final[CodeType] = next(
    each
    for each in asyncio.gather.__code__.co_consts
    if getattr(each, "co_name", "") == "_done_callback"
)
"""The callback of ``gather`` that collects results. The code reads them from gather's future."""


_error_of: Callable[[Any], BaseException | None] = cast("Any", asyncio.Future).exception
"""Reads the exception of a future without marking it as read."""


class ReadTracking(_Future):
    """A future that notes when the code reads its value or its error.

    Callbacks of asyncio that only test for completion (``wait``, ``TaskGroup``) read neither.
    """

    __slots__ = ()

    def mark_read(self) -> None:
        """Note that the code reads the result. Also called when there is no result yet."""

    def __await__(self) -> Generator[Any, None, Any]:
        self.mark_read()
        return super().__await__()

    __iter__ = __await__

    def result(self) -> Any:
        if sys._getframe(1).f_code is not _COLLECT:  # noqa: SLF001
            self.mark_read()
        return super().result()

    def exception(self) -> BaseException | None:
        error = super().exception()
        if error is not None and sys._getframe(1).f_code is not _COLLECT:  # noqa: SLF001
            self.mark_read()
        return error


class DurableGathering(_Gathering):  # type: ignore[misc]
    """The future of ``asyncio.gather`` under a stable hash."""

    _identity: int

    def __hash__(self) -> int:
        return self._identity


class ReadTrackingGathering(ReadTracking, DurableGathering):
    """A gathering of futures that note reads: reading it reads all of its children."""

    def mark_read(self) -> None:
        if not self.done() or self.cancelled():
            return
        error = _error_of(self)
        for child in self._children:
            if not isinstance(child, ReadTracking) or not child.done() or child.cancelled():
                continue
            if error is None or _error_of(child) is error:
                child.mark_read()


def make_gathering_durable(future: Any, children: Iterable[Any], identity: int) -> None:
    """Change the class of a future that ``gather`` is creating, so that its hash is stable."""
    if type(future) is _Gathering:
        kinds = set(map(type, children))  # few, even for many children
        is_tracking = any(issubclass(kind, ReadTracking) for kind in kinds)
        future._identity = identity  # noqa: SLF001
        future.__class__ = ReadTrackingGathering if is_tracking else DurableGathering


class ArrivalStep(ReadTracking, _Step):
    """A wait for an event or a message.

    An arrival that the code never read is unread: ``continue_as_new()`` carries it to the next
    execution. ``done()`` reads nothing.
    """

    __slots__ = ("is_unread", "waker")

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self.is_unread = False
        """True while an arrival was delivered here that the code has not read."""
        self.waker: asyncio.Future[None] | None = None
        """Future that the task of ``create_task(step)`` waits for."""
        _Step.__init__(self, loop=loop)

    def mark_read(self) -> None:
        if self.done():
            self.is_unread = False

    def peek(self) -> Any:
        """Return the value without marking it as read."""
        return super(ReadTracking, self).result()

    def set_result(self, result: Any) -> None:
        super().set_result(result)
        self._wake_task()

    def set_exception(self, exception: type | BaseException) -> None:
        super().set_exception(exception)
        self._wake_task()

    def cancel(self, msg: Any = None) -> bool:
        is_cancelled = super().cancel(msg)
        self._wake_task()
        return is_cancelled

    def return_unread(self) -> None:
        """Put an unread arrival back into the mailbox, for the next wait."""
        if self.is_unread:
            self.is_unread = False
            cast("Any", self._owner).arrival_returned(self)

    def _wake_task(self) -> None:
        if self.waker is not None and not self.waker.done():
            self.waker.set_result(None)


class ArrivalTask(ReadTracking, DurableTask):
    """The task of ``create_task(step)`` for an ArrivalStep: reading the task reads the step."""

    __slots__ = ("_step",)

    _step: ArrivalStep

    def bind(self, step: ArrivalStep) -> None:
        self._step = step

    def mark_read(self) -> None:
        if self.done():
            self._step.mark_read()


async def await_arrival(step: ArrivalStep) -> Any:
    """Wait for the step and return its value without marking it as read."""
    if not step.done():
        step.waker = step.get_loop().create_future()
        await step.waker
    return step.peek()


# --- closing code that is abandoned, even if its clean-up awaits


class Unwinding(BaseException):
    """Raised into user code that must not go on. Its cause is recorded before it is raised.

    A BaseException, so that ``except Exception`` in user code does not catch it. Code that catches
    it cannot go on either: the loop runs no further callback of this execution.
    """


def close_coroutine(coro: Any) -> None:
    """Close a coroutine from the inside out, also if its clean-up awaits many times.

    Closing only the outermost one is not enough: if an inner one awaits in its clean-up, the outer
    ones see a RuntimeError that they may catch, and the inner one is left to the garbage collector.
    """
    if not inspect.iscoroutine(coro):  # another awaitable: close it by its own method
        with contextlib.suppress(BaseException):
            coro.close()
        return
    for _ in range(_ATTEMPTS_MAX):
        inner = _innermost(coro)
        with contextlib.suppress(BaseException):  # it awaits in its clean-up, or fails there
            inner.close()
        if inner is coro and inspect.getcoroutinestate(coro) == inspect.CORO_CLOSED:
            return
    _keep_for_ever(coro)


def _keep_for_ever(coro: Any) -> None:
    """Keep a coroutine that does not end alive for ever: finalizing it would run it again."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(coro))


def close_awaited(generator: AsyncGenerator[Any, Any]) -> None:
    """Close the coroutine that an asynchronous generator awaits.

    It cannot be found from the coroutine that iterates over the generator.
    """
    awaited = getattr(generator, "ag_await", None)
    if inspect.iscoroutine(awaited):
        close_coroutine(awaited)


def close_generator(generator: AsyncGenerator[Any, Any]) -> None:
    if getattr(generator, "ag_frame", None) is None:
        return
    close_awaited(generator)
    with contextlib.suppress(BaseException):
        closing: Any = generator.aclose()
        closing.send(None)
        # It awaits in its clean-up. That await never ends, so close it from there.
        closing.throw(GeneratorExit)


def release_task(task: asyncio.Task[Any]) -> None:
    """Cut the references between a closed task and the future that it waited for."""
    waiter = cast("Any", task)._fut_waiter  # noqa: SLF001
    if waiter is not None:
        release_future(waiter)
    release_future(task)


_cancel_future: Callable[[Any], bool] = cast("Any", asyncio.Future).cancel


def release_future(future: asyncio.Future[Any]) -> None:
    """Drop the callbacks of a future. The base method is used, as overrides would notify others."""
    _cancel_future(future)


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    if not task.done():
        return None
    try:
        # Only result() makes the task release the traceback; exception() does not.
        task.result()
    except BaseException as error:  # noqa: BLE001
        return error
    return None


def release_error(error: BaseException | None) -> None:
    """Clear the frames of an error that was recorded: they hold the variables of the code.

    An error of the caller, which closes the code while it handles that error, keeps its frames.
    """
    attempts = 0
    handled = sys.exception()
    while error is not None and error is not handled and attempts < _ATTEMPTS_MAX:
        attempts += 1
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__


def _innermost(coro: Any) -> Any:
    awaited = coro.cr_await
    while (
        inspect.iscoroutine(awaited) and inspect.getcoroutinestate(awaited) != inspect.CORO_CLOSED
    ):
        coro, awaited = awaited, awaited.cr_await
    return coro
