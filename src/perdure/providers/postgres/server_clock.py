"""What time it is on the server, without asking: from its answers and how long ago they were."""

from __future__ import annotations

import asyncio
import time
from typing import Final

_BEST_SECONDS: Final = 60.0


class ServerClock:
    """Never behind the server, so that a timer set by it is never early.

    An answer says what time it was at some moment after its statement was sent. Reckoned from the
    sending, it is ahead by what the way there took: the quickest of the last answers counts.
    """

    def __init__(self) -> None:
        self._ahead_ms = 0.0
        self._noted_at = float("-inf")

    def note(self, server_ms: int, sent_at: float) -> None:
        """``sent_at`` is a monotonic time in seconds."""
        # The server's milliseconds are cut off.
        ahead_ms = server_ms + 1 - sent_at * 1000
        if ahead_ms < self._ahead_ms or sent_at > self._noted_at + _BEST_SECONDS:
            self._ahead_ms, self._noted_at = ahead_ms, sent_at

    def now_ms(self) -> int:
        """May be asked from any thread; the machine's own time before the first answer."""
        if self._noted_at == float("-inf"):
            return time.time_ns() // 1_000_000
        return int(self._ahead_ms + time.monotonic() * 1000)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
