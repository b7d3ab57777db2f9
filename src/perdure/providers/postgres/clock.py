"""Estimates the time of the server from its answers, without asking."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from perdure.logs import get_logger

log = get_logger(__name__)

_BEST_SECONDS: Final = 60.0
_JUMP_MS: Final = 1000
"""Clocks that are kept together differ by less."""


class ServerClock:
    """A clock that is never behind the server, so that a timer set by it is never early.

    An answer carries the server's time at some moment after its statement was sent and before the
    answer came. Added to the moment of sending, the estimate is ahead by at most the time of the
    round trip, so the quickest answer of the last minute gives the best one. An answer that shows
    that the estimate is behind replaces it: after a failover, the clock can be another one.
    """

    def __init__(self) -> None:
        self._ahead_ms = 0.0
        """Server time minus monotonic time."""
        self._noted_at = float("-inf")

    def note(self, server_ms: int, sent_at: float) -> None:
        """Take an answer into account that has just come.

        ``sent_at`` is the monotonic time in seconds at which its statement was first sent.
        """
        # The server rounds its milliseconds down.
        ahead_ms = server_ms + 1 - sent_at * 1000
        behind_ms = server_ms - time.monotonic() * 1000 - self._ahead_ms
        if behind_ms > _JUMP_MS and self._noted_at != float("-inf"):
            log.warning(
                "the clock of the server has jumped ahead by %.1f s, as after a failover to a "
                "server with another clock: timers that were set before are early by that",
                behind_ms / 1000,
            )
        if ahead_ms < self._ahead_ms or sent_at > self._noted_at + _BEST_SECONDS or behind_ms > 0:
            self._ahead_ms, self._noted_at = ahead_ms, sent_at

    def now_ms(self) -> int:
        """Return the time of the server; before the first answer, the time of this machine.

        May be called from any thread.
        """
        if self._noted_at == float("-inf"):
            return time.time_ns() // 1_000_000
        return int(self._ahead_ms + time.monotonic() * 1000)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
