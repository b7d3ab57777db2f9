"""A time limit of one attempt: how long it may take, or how long it may keep silent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Bound:
    """Interrupts a call when its time is up; that can be put off."""

    def __init__(
        self, seconds: float, said: str, expect_end: Callable[[float], asyncio.TimerHandle]
    ) -> None:
        self._seconds = seconds
        self._said = said
        self._expect_end = expect_end
        """Sees to it that code which goes on after so many seconds is told of."""

    async def hold(self, call: Awaitable[Any], interrupted: Callable[[], None]) -> Any:
        """Await the call, or raise TimeoutError; then ``interrupted`` is called first."""
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(self._seconds)
        self._check = self._expect_end(self._seconds)
        try:
            async with self._limit:
                return await call
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            interrupted()
            raise TimeoutError(self._said) from error.__cause__
        finally:
            self._check.cancel()

    def put_off(self) -> None:
        """Begin to count anew; only while the call is held."""
        if not self._limit.expired():
            self._limit.reschedule(self._loop.time() + self._seconds)
            self._check.cancel()
            self._check = self._expect_end(self._seconds)
