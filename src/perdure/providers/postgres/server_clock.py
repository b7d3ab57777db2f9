"""What time it is on the server, without asking: from its answers and how long ago they were."""

from __future__ import annotations

import asyncio
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
        """``sent_at`` is a time of the event loop."""
        # The server's milliseconds are cut off.
        ahead_ms = server_ms + 1 - sent_at * 1000
        if ahead_ms < self._ahead_ms or sent_at > self._noted_at + _BEST_SECONDS:
            self._ahead_ms, self._noted_at = ahead_ms, sent_at

    def now_ms(self) -> int:
        return int(self._ahead_ms + asyncio.get_running_loop().time() * 1000)
