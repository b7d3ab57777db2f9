"""Pauses between tries: exponential with jitter, bounded."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from perdure.errors import ProviderError, StoreClosed
from perdure.runtime.observe import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.model.work import RetryPlan

_FIRST_SECONDS = 0.05
_LONGEST_SECONDS = 3.0


class Backoff:
    """Grows with each failure in a row."""

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_delay(self, *, retryable: bool) -> float:
        """Seconds to wait; a permanent error gets the longest pause, since only people cure it."""
        self._failures = min(self._failures + 1, 10)
        if not retryable:
            return _LONGEST_SECONDS
        seconds: float = min(_FIRST_SECONDS * 2**self._failures, _LONGEST_SECONDS)
        return seconds * random.uniform(0.5, 1.0)


class FetchTrouble:
    """What a fetch loop does about errors: a defect must not end what everybody waits for."""

    def __init__(self, what: str, closed: Callable[[StoreClosed], None]) -> None:
        self._what = what
        self._closed = closed
        """Told when the store has closed for good."""
        self._backoff = Backoff()

    def is_over(self) -> None:
        self._backoff.reset()

    def seconds_after(self, error: BaseException) -> float:
        """Tell it, and give the seconds to wait."""
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, StoreClosed):
            self._closed(error)
        if isinstance(error, ProviderError):
            log.warning("cannot fetch %s: %s", self._what, error)
        else:
            log.error("cannot fetch %s", self._what, exc_info=error)
        return self._backoff.next_delay(
            retryable=isinstance(error, ProviderError) and error.retryable
        )


def retry_delay_ms(plan: RetryPlan, attempt: int) -> int:
    """Pause after the attempt of that number (from 1) failed."""
    exponent = min(attempt - 1, 60)
    delay_ms = min(plan.first_delay_ms * plan.multiplier**exponent, plan.max_delay_ms)
    return max(0, round(delay_ms * (1 + plan.jitter * random.uniform(-1, 1))))
