"""Pauses between tries."""

from __future__ import annotations

import asyncio
import random
from typing import Final

_PAUSE_SECONDS: Final = (0.01, 0.5)


class Backoff:
    """Pauses that grow and are jittered, until the time is up.

    It counts from the first failure: however long that took to show, there is a second try.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._give_up_at: float | None = None
        self._ceiling = _PAUSE_SECONDS[0]

    async def pause(self) -> bool:
        """After a failure. False at once if there is no time left."""
        now = asyncio.get_running_loop().time()
        if self._give_up_at is None:
            self._give_up_at = now + self._seconds
        seconds = random.uniform(0, self._ceiling)
        if now + seconds > self._give_up_at:
            return False
        await asyncio.sleep(seconds)
        self._ceiling = min(2 * self._ceiling, _PAUSE_SECONDS[1])
        return True
