"""Awaiting a future that others await, too: a waiter that is cancelled leaves it alone.

``asyncio.shield`` puts a second future in between, which costs a pass of the event loop more. Here
the task waits for the future itself, and only its cancellation is kept away from it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextvars import Context

T = TypeVar("T")


class Shielded(Generic[T]):
    """The future as one waiter sees it. To asyncio, what has these members is a future."""

    __slots__ = ("_asyncio_future_blocking", "_context", "_future", "_message", "_wake")

    def __init__(self, future: asyncio.Future[T]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, T]:
        self._asyncio_future_blocking = True  # says that this is awaited, not just yielded
        yield self
        return self._future.result()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def add_done_callback(self, wake: Callable[[Any], object], *, context: Context) -> None:
        self._wake = wake
        self._context = context
        self._future.add_done_callback(wake, context=context)

    def cancel(self, msg: Any = None) -> bool:
        """Wake the waiter alone; False if it is being woken already."""
        if not self._future.remove_done_callback(self._wake):
            return False
        self._message = msg
        self.get_loop().call_soon(self._wake, self, context=self._context)
        return True

    def result(self) -> NoReturn:
        """What a waiter gets that was not woken by the future."""
        raise asyncio.CancelledError(*() if self._message is None else (self._message,))
