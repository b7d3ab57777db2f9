"""Activities that were in flight again and again when workers died: any of them may be the cause.

They run apart from each other, so that the one that kills is alone when it does, and the others,
which only were beside it, come to their end. Each that ends well makes room for two.
"""

from __future__ import annotations

from typing import Final

_DELIVERIES: Final = 3
"""So many times all run together: a worker dies for other reasons, too."""
_ROOM_MAX: Final = 1000


class Suspects:
    """Of one runtime, which is a new one after each death."""

    def __init__(self, max_attempts: int) -> None:
        self._deliveries = max(1, min(_DELIVERIES, max_attempts // 3))
        self._running: set[str] = set()
        self._room = 1

    def admit(self, lock_token: str, attempt_count: int) -> bool:
        """Whether it may run now; if not, it is for later or for another worker."""
        if attempt_count <= self._deliveries:
            return True
        if len(self._running) >= self._room:
            return False
        self._running.add(lock_token)
        return True

    def ended(self, lock_token: str) -> None:
        if lock_token in self._running:
            self._running.remove(lock_token)
            self._room = min(2 * self._room, _ROOM_MAX)
