"""Background tasks of a runtime, and the delays between their retries."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from perdure.errors import PerdureError, ProviderError, StoreClosed
from perdure.runtime.metrics import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

_FIRST_SECONDS = 0.05
_LONGEST_SECONDS = 3.0


class BackgroundTasks:
    """Keeps references to tasks until they end: asyncio itself keeps only weak ones."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def spawn_logged(self, answer: Awaitable[object]) -> None:
        """Await a call to the store whose failure only means that a lock expires instead."""
        self.spawn(log_failure(answer))

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


async def log_failure(answer: Awaitable[object]) -> None:
    """Await a call to the store; log its error instead of raising it."""
    try:
        await answer
    except PerdureError as error:
        log.info("%s", error)


class Backoff:
    """Delays that grow with each failure in a row: exponential with jitter, bounded."""

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_delay(self, *, retryable: bool) -> float:
        """Return the seconds to wait; the longest delay after an error that only people can fix."""
        self._failures = min(self._failures + 1, 10)
        if not retryable:
            return _LONGEST_SECONDS
        seconds: float = min(_FIRST_SECONDS * 2**self._failures, _LONGEST_SECONDS)
        return seconds * random.uniform(0.5, 1.0)


class FetchErrors:
    """Logs the errors of a fetch loop and delays the next fetch. No error ends the loop."""

    def __init__(self, what: str, on_closed: Callable[[StoreClosed], None]) -> None:
        self._what = what
        self._on_closed = on_closed
        """Called when the store has closed for good."""
        self._backoff = Backoff()

    def reset(self) -> None:
        """A fetch has succeeded."""
        self._backoff.reset()

    def delay_after(self, error: BaseException) -> float:
        """Log the error and return the seconds to wait. Raises what is not an Exception."""
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, StoreClosed):
            self._on_closed(error)
        if isinstance(error, ProviderError):
            log.warning("cannot fetch %s: %s", self._what, error)
        else:
            log.error("cannot fetch %s", self._what, exc_info=error)
        return self._backoff.next_delay(
            retryable=isinstance(error, ProviderError) and error.retryable
        )
