"""Keeps locks alive while work goes on, and tells whose lock is really lost."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from perdure.errors import PerdureError, ProviderError
from perdure.runtime.observe import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from perdure.clock import Clock


class LockKeeper:
    """Renews every token of one kind at well under the lock's length.

    A failed renewal loses nothing: it is repeated until the store itself says that a token is gone.
    """

    def __init__(
        self,
        clock: Clock,
        lock_seconds: float,
        tokens: Callable[[], Sequence[str]],
        renew: Callable[[Sequence[str], int], Awaitable[frozenset[str]]],
        lost: Callable[[frozenset[str]], None],
    ) -> None:
        self._clock = clock
        self._lock_ms = round(lock_seconds * 1000)
        self._interval = lock_seconds * 0.4
        self._tokens = tokens
        self._renew = renew
        self._lost = lost
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="perdure-keeper")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        pause = self._interval
        while True:
            await self._clock.sleep(pause * random.uniform(0.9, 1.1))
            tokens = self._tokens()
            if not tokens:
                continue
            try:
                lost = await self._renew(tokens, self._lock_ms)
                pause = self._interval
            except ProviderError as error:
                log.warning("cannot renew %d locks, trying again: %s", len(tokens), error)
                pause = min(self._interval, self._interval / 4)
                continue
            except PerdureError:
                log.exception("renewing locks failed")
                continue
            if lost:
                self._lost(lost)
