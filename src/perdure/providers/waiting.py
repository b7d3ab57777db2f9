"""Signals that wake fetches and clients after a change.

One hub per provider handle. It knows nothing of storage: the provider calls ``notify_*`` after each
commit, on the event loop, and whenever another process may have written.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from perdure.clock import Clock


class Signal:
    """Wakes every waiter once; a waiter that registers before it looks misses nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._generation = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def generation(self) -> int:
        """Rises with each notification. Read it before looking for work."""
        return self._generation

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def notify(self) -> None:
        self._generation += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, seen_generation: int, timeout_ms: int) -> bool:
        """Return True when the generation is past the one seen, False after the timeout."""
        if self._generation != seen_generation:
            return True
        if timeout_ms <= 0:
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        alarm = asyncio.ensure_future(self._clock.sleep(timeout_ms / 1000))
        try:
            await asyncio.wait((waiter, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            alarm.cancel()
            self._waiters.discard(waiter)
        return self._generation != seen_generation


class Poll:
    """The remaining time of a long poll.

    It only shrinks, so that a clock that jumps back cannot stretch it.
    """

    __slots__ = ("_clock", "_deadline_ms", "_left_ms", "_overdue_ms", "_seen", "_signal")

    def __init__(self, signal: Signal, clock: Clock, timeout_ms: int) -> None:
        self._signal = signal
        self._clock = clock
        self._deadline_ms = clock.now_ms() + timeout_ms
        self._left_ms = timeout_ms
        # Taken before the first look, so that no commit after it can be missed.
        self._seen = signal.generation
        self._overdue_ms: int | None = None

    async def wait(self, due_at_ms: int | None) -> bool:
        """Return True when it is time to look again; False when the time of the poll is up."""
        now_ms = self._clock.now_ms()
        self._left_ms = min(self._left_ms, self._deadline_ms - now_ms)
        if self._left_ms <= 0:
            return False
        wait_ms = self._left_ms
        if due_at_ms is not None:
            if due_at_ms <= now_ms and due_at_ms != self._overdue_ms:
                # It came due after the store had looked. Only once for one time, so that a store
                # that names a time and then finds nothing is not asked without a pause.
                self._overdue_ms = due_at_ms
                self._seen = self._signal.generation
                return True
            wait_ms = min(wait_ms, max(due_at_ms - now_ms, 1))
        if not await self._signal.wait(self._seen, wait_ms):
            self._left_ms -= wait_ms
        self._seen = self._signal.generation
        return True


class ChangeHub:
    """Signals by instance, created on demand and dropped with their last watcher."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._signals: dict[str, tuple[Signal, int]] = {}

    def notify(self, instance_ids: Iterable[str]) -> None:
        if self._signals:
            for instance_id in instance_ids:
                entry = self._signals.get(instance_id)
                if entry is not None:
                    entry[0].notify()

    def notify_all(self) -> None:
        for signal, _ in list(self._signals.values()):
            signal.notify()

    def watch(self, instance_id: str) -> Watch:
        return Watch(self, instance_id)

    def _enter(self, instance_id: str) -> Signal:
        signal, watchers = self._signals.get(instance_id) or (Signal(self._clock), 0)
        self._signals[instance_id] = (signal, watchers + 1)
        return signal

    def _leave(self, instance_id: str) -> None:
        signal, watchers = self._signals[instance_id]
        if watchers == 1:
            del self._signals[instance_id]
        else:
            self._signals[instance_id] = (signal, watchers - 1)


class Watch:
    """Notices changes of one instance from the moment it is entered."""

    def __init__(self, hub: ChangeHub, instance_id: str) -> None:
        self._hub = hub
        self._instance_id = instance_id
        self._signal: Signal | None = None
        self._seen = 0

    def __enter__(self) -> Self:
        self._signal = self._hub._enter(self._instance_id)  # noqa: SLF001
        self._seen = self._signal.generation
        return self

    def __exit__(self, *exception: object) -> None:
        self._signal = None
        self._hub._leave(self._instance_id)  # noqa: SLF001

    async def wait(self, timeout_ms: int) -> bool:
        """Return True if something may have changed since entering, or since the last wait."""
        signal = self._signal
        assert signal is not None, "enter the watch before waiting"
        changed = await signal.wait(self._seen, timeout_ms)
        self._seen = signal.generation
        return changed
