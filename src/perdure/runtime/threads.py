"""The threads of sync activities, and which of them are taken by code that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.runtime.failures import NotBegun
from perdure.runtime.observe import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Threads:
    """A thread cannot be stopped: a call that is given up goes on, and keeps its thread."""

    def __init__(self, size: int, grace_seconds: float) -> None:
        self._size = size
        self._grace_seconds = grace_seconds
        self._pool = ThreadPoolExecutor(size, "perdure-activity")
        self._loop = asyncio.get_running_loop()
        self._left: dict[Future[Any], str] = {}
        """Calls that were given up and still run, with the activity's name."""
        self._ended = asyncio.Event()
        """One of them has ended."""
        self._named: set[str] = set()
        """Activities that the log has mentioned."""

    async def run(
        self,
        name: str,
        call: Callable[[], Any],
        bounded: Callable[[Awaitable[Any]], Awaitable[Any]] | None,
    ) -> Any:
        """Call it in a thread; ``bounded`` limits it from the moment when a thread begins it.

        A call that is given up before that never begins.
        """
        begun: asyncio.Future[None] | None = None
        if bounded is not None:
            begun = self._loop.create_future()
            call = partial(self._begin, begun, call)
        future = self._submit(call)
        answer = asyncio.wrap_future(future)
        try:
            if bounded is None or begun is None:
                return await answer
            await begun
            return await bounded(answer)
        finally:
            answer.cancel()
            if not future.cancel() and not future.done():
                self._leave(name, future)

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        # The pool queues a call, and then starts a thread for it: when that fails, the call may
        # still be run by another one, and nobody would know of it.
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

    def _leave(self, name: str, future: Future[Any]) -> None:
        self._left[future] = name
        future.add_done_callback(self._end)
        if len(self._left) >= self._size:
            self._warn(name)  # no other sync activity can begin
        elif name not in self._named:
            self._loop.call_later(self._grace_seconds, self._check, name, future)

    def _end(self, future: Future[Any]) -> None:
        self._left.pop(future, None)
        with contextlib.suppress(RuntimeError):  # closed: nobody waits for it any more
            self._loop.call_soon_threadsafe(self._ended.set)

    async def settle(self) -> None:
        """Wait until no call runs any more that was given up."""
        while self._left:
            self._ended.clear()
            await self._ended.wait()

    def _check(self, name: str, future: Future[Any]) -> None:
        if not future.done() and name not in self._named:
            self._warn(name)

    def _warn(self, name: str) -> None:
        self._named.add(name)
        log.warning(
            "activity %r still runs in its thread although it timed out or was cancelled; %d of %d "
            "threads are taken like that. A thread cannot be stopped: look at is_cancelled() now "
            "and then, or use executor='process'",
            name,
            len(self._left),
            self._size,
        )

    @property
    def left(self) -> Counter[str]:
        """How many calls of each activity still run although they were given up."""
        return Counter(list(self._left.values()))

    def close(self) -> None:
        """Begin nothing more; what runs goes on."""
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
