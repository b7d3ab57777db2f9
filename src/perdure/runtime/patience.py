"""How long a start waits for a store that is out before its caller is told the error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from perdure.errors import ProviderError, StoreFull

if TYPE_CHECKING:
    from perdure.clock import Clock

START_PATIENCE_SECONDS: Final = 8.0
"""A little less than a store itself waits for a server that is out: one such wait is enough."""


class Patience:
    """Knows since when no commit has succeeded.

    So starts that had to wait behind others for their turn do not wait as long once more.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failing_since_ms: int | None = None

    def renew(self) -> None:
        """The store answered."""
        self._failing_since_ms = None

    def is_over(self, sent_at_ms: int, error: ProviderError) -> bool:
        """Whether the caller of a commit that was first sent then is told this error now."""
        if self._failing_since_ms is None:
            self._failing_since_ms = sent_at_ms
        waited_ms = self._clock.now_ms() - min(sent_at_ms, self._failing_since_ms)
        return isinstance(error, StoreFull) or waited_ms >= START_PATIENCE_SECONDS * 1000
