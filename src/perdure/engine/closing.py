"""Unwinds coroutines that are given up, whatever their clean-up code does."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

_ATTEMPTS_MAX = 1000


def close_coroutine(coro: Any) -> None:
    """Close from the inside out, however often the clean-up awaits.

    Closing only the outermost one is not enough: if an inner one awaits in its clean-up, the outer
    ones see a RuntimeError that they may catch, and the inner one is left to the garbage collector.
    """
    if not inspect.iscoroutine(coro):  # somebody else's kind, which knows best how to end
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
    """Never finalize what does not end, not even at exit: to drop a coroutine is to run it."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(coro))


def close_awaited(generator: AsyncGenerator[Any, Any]) -> None:
    """Close what an asynchronous generator awaits itself.

    It is further inside than whoever iterates over the generator, and cannot be found from there.
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
        # It awaits in its clean-up: nothing will ever come, so unwind it from there.
        closing.throw(GeneratorExit)


def release_task(task: asyncio.Task[Any]) -> None:
    """Take a closed task and what it waited for out of each other's reach."""
    waiter = cast("Any", task)._fut_waiter  # noqa: SLF001
    if waiter is not None:
        release_future(waiter)
    release_future(task)


_cancel_plainly: Callable[[Any], bool] = cast("Any", asyncio.Future).cancel


def release_future(future: asyncio.Future[Any]) -> None:
    """Drop its callbacks. The base method: nobody else may hear of it any more."""
    _cancel_plainly(future)


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    if not task.done():
        return None
    try:
        # Raised, not asked for: only this makes the task let go of the traceback.
        task.result()
    except BaseException as error:  # noqa: BLE001
        return error
    return None


def release_error(error: BaseException | None) -> None:
    """Let go of the frames of an error that was described: they hold the code's variables."""
    attempts = 0
    while error is not None and attempts < _ATTEMPTS_MAX:
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
