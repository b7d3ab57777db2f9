"""Closes coroutines, generators and tasks that are abandoned, even if their clean-up awaits."""

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
    """Clear the frames of an error that was recorded: they hold the variables of the code."""
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


class Unwinding(BaseException):
    """Raised into user code that must not go on. Its cause is recorded before it is raised.

    A BaseException, so that ``except Exception`` in user code does not catch it. Code that catches
    it cannot go on either: the loop runs no further callback of this execution.
    """
