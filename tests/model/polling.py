"""The wait of a fetch that found nothing: for a commit, the next due time or its timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.clock import Clock
    from perdure.providers.waiting import Signal


class Poll:
    """The time that a fetch still waits.

    It only shrinks, so that a clock that jumps back cannot stretch it.
    """

    __slots__ = ("_clock", "_deadline_ms", "_left_ms", "_seen", "_signal")

    def __init__(self, signal: Signal, clock: Clock, timeout_ms: int) -> None:
        self._signal = signal
        self._clock = clock
        self._deadline_ms = clock.now_ms() + timeout_ms
        self._left_ms = timeout_ms
        # Taken before the first look, so that no commit after it can be missed.
        self._seen = signal.generation

    async def wait(self, due_at_ms: int | None) -> bool:
        """True when it is worth looking again, if only once more; False when the time is up."""
        now_ms = self._clock.now_ms()
        self._left_ms = min(self._left_ms, self._deadline_ms - now_ms)
        if self._left_ms <= 0:
            return False
        wait_ms = self._left_ms
        if due_at_ms is not None:
            wait_ms = min(wait_ms, max(due_at_ms - now_ms, 1))
        if not await self._signal.wait(self._seen, wait_ms):
            self._left_ms -= wait_ms
        self._seen = self._signal.generation
        return True
