"""The source of time of stores and runtime: they take a Clock and read no other."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Clock(Protocol):
    """Wall clock in integer milliseconds, and a sleep that follows it."""

    def now_ms(self) -> int:
        """Return the milliseconds since the Unix epoch."""
        ...

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        """Return when this clock has advanced by that many seconds."""
        ...


class SystemClock:
    """The clock of the operating system."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only by ``advance()``; sleepers wake when it reaches their time."""

    def __init__(self, now_ms: int = 1_700_000_000_000, tick_ms: int = 0) -> None:
        self._now_ms = now_ms
        self.tick_ms = tick_ms
        """Milliseconds by which each call of ``now_ms()`` moves the clock."""
        self._sleepers: list[tuple[int, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        self._now_ms += self.tick_ms
        return self._now_ms

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        # The end counts from the call: the clock may move before a task begins to sleep.
        return self._sleep_until(self._now_ms + round(seconds * 1000))

    async def _sleep_until(self, due_ms: int) -> None:
        if due_ms <= self._now_ms:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((due_ms, woken))
        try:
            await woken
        finally:
            self._sleepers = [entry for entry in self._sleepers if entry[1] is not woken]

    def advance(self, milliseconds: int) -> None:
        """Move the clock, also backwards, and wake every sleeper whose time has come."""
        self._now_ms += milliseconds
        for due_ms, woken in self._sleepers:
            if due_ms <= self._now_ms and not woken.done():
                woken.set_result(None)

    def next_due_ms(self) -> int | None:
        """Return the time at which the first sleeper wakes; None without sleepers."""
        return min((due_ms for due_ms, woken in self._sleepers if not woken.done()), default=None)
