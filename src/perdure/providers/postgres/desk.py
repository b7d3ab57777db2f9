"""Waiting for work: calls that want the same thing are served by one look at the server.

Looks again when something was committed here or notified from elsewhere, when something falls due,
and now and then in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

ItemT = TypeVar("ItemT")
WantT = TypeVar("WantT", bound="Hashable")

_PAUSE_SECONDS_MIN: Final = 0.005
_JITTER: Final = 0.2
_HEARING_SECONDS: Final = 0.02


@dataclass(slots=True)
class Seen(Generic[ItemT]):
    """What a look has found."""

    items: list[ItemT]
    due_seconds: float | None = None
    """In how long there may be something, as far as is known."""


@dataclass(slots=True, eq=False)
class _Caller(Generic[ItemT]):
    until: float
    limit: int
    outcome: asyncio.Future[list[ItemT]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    was_looked_for: bool = False
    """A look has begun since the call."""


class Desk(Generic[WantT, ItemT]):
    """One for each queue."""

    def __init__(
        self,
        look: Callable[[WantT, int], Awaitable[Seen[ItemT]]],
        give_back: Callable[[ItemT], Awaitable[None]],
        poll_seconds: Callable[[], float],
        at_once_max: int,
    ) -> None:
        self._look = look
        self._at_once_max = at_once_max
        self._give_back = give_back
        self._poll_seconds = poll_seconds
        self._callers: dict[WantT, deque[_Caller[ItemT]]] = {}
        self._bells: dict[WantT, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        """Every waiting call returns with nothing."""
        self._is_open = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self.ring()
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def ring(self) -> None:
        """There may be something now."""
        for bell in self._bells.values():
            bell.set()

    def hear(self) -> None:
        """Somebody elsewhere says so. However often that is said, looking has its pace."""
        now = asyncio.get_running_loop().time()
        if now < self._heard_at + _HEARING_SECONDS:
            self.ring_in(self._heard_at + _HEARING_SECONDS - now)
        else:
            self._heard_at = now
            self.ring()

    def ring_in(self, seconds: float) -> None:
        """There may be something then."""
        if seconds <= 0:
            self.ring()
            return
        if not self._bells:
            return
        loop = asyncio.get_running_loop()
        if self._alarm is None or self._alarm.when() > loop.time() + seconds:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = loop.call_later(seconds, self._sound)

    async def fetch(self, want: WantT, limit: int, timeout_seconds: float) -> list[ItemT]:
        """Up to that many items, as soon as there is one; none after the timeout."""
        caller = _Caller[ItemT](asyncio.get_running_loop().time() + timeout_seconds, limit)
        if want not in self._callers:
            self._callers[want] = deque()
            self._bells[want] = asyncio.Event()
            task = asyncio.create_task(self._serve(want), name="perdure-desk")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._callers[want].append(caller)
        self._bells[want].set()
        try:
            return await caller.outcome
        except asyncio.CancelledError:
            await self._abandon(caller)
            raise

    async def _abandon(self, caller: _Caller[ItemT]) -> None:
        outcome = caller.outcome
        if outcome.cancelled() or not outcome.done() or outcome.exception() is not None:
            outcome.cancel()
            return
        await asyncio.shield(self._give_back_all(outcome.result()))

    async def _give_back_all(self, items: list[ItemT]) -> None:
        await asyncio.gather(*[self._give_back(item) for item in items])

    def _sound(self) -> None:
        self._alarm = None
        self.ring()

    # --- serving one kind of call

    async def _serve(self, want: WantT) -> None:
        callers, bell = self._callers[want], self._bells[want]
        try:
            while self._clear(callers) and self._is_open:
                bell.clear()
                pause = await self._serve_once(want, callers)
                if pause is not None and self._is_open:
                    await self._wait(bell, callers, pause)
        finally:
            del self._callers[want], self._bells[want]
            for caller in callers:
                if not caller.outcome.done():
                    caller.outcome.set_result([])

    async def _serve_once(self, want: WantT, callers: deque[_Caller[ItemT]]) -> float | None:
        """How long to wait before looking again; None: look at once."""
        wanted = 0
        for caller in callers:
            caller.was_looked_for = True
            wanted += caller.limit
        try:
            seen = await self._look(want, min(wanted, self._at_once_max))
        except Exception as error:  # noqa: BLE001
            self._refuse(callers, error)
            return None
        if seen.items:
            await self._hand_over(seen.items, callers)
            return None
        self._dismiss(callers)
        return self._poll_seconds() if seen.due_seconds is None else seen.due_seconds

    async def _hand_over(self, items: list[ItemT], callers: deque[_Caller[ItemT]]) -> None:
        while items and self._is_open and self._clear(callers):
            caller = callers.popleft()
            caller.outcome.set_result(items[: caller.limit])
            items = items[caller.limit :]
        await self._give_back_all(items)

    async def _wait(
        self, bell: asyncio.Event, callers: deque[_Caller[ItemT]], pause: float
    ) -> None:
        loop = asyncio.get_running_loop()
        poll = self._poll_seconds() * random.uniform(1 - _JITTER, 1 + _JITTER)
        look_at = loop.time() + max(min(pause, poll), _PAUSE_SECONDS_MIN)
        while self._is_open and self._clear(callers):
            until = min(look_at, *(caller.until for caller in callers))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await bell.wait()
            if bell.is_set() or loop.time() >= look_at:
                return
            self._dismiss(callers)

    @staticmethod
    def _clear(callers: deque[_Caller[ItemT]]) -> bool:
        """Forget calls that were given up; whether any is left."""
        for _ in range(len(callers)):
            caller = callers.popleft()
            if not caller.outcome.done():
                callers.append(caller)
        return bool(callers)

    @staticmethod
    def _dismiss(callers: deque[_Caller[ItemT]]) -> None:
        """Nothing was found: those whose time is up have their answer."""
        now = asyncio.get_running_loop().time()
        for caller in callers:
            is_late = caller.until <= now and caller.was_looked_for
            if is_late and not caller.outcome.done():
                caller.outcome.set_result([])

    @staticmethod
    def _refuse(callers: deque[_Caller[ItemT]], error: Exception) -> None:
        for caller in callers:
            if caller.was_looked_for and not caller.outcome.done():
                caller.outcome.set_exception(error)
