"""How many may use a pool at once."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """As asyncio.Semaphore, with a way in that does not wait."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take_now(self) -> bool:
        """False if none is free."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def take(self) -> None:
        if self.take_now():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # it was this one's turn, and it does not take it
            raise

    def release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
