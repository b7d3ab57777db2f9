"""Renews locks while work goes on, and reports the locks that are really lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from perdure.errors import ProviderError
from perdure.runtime.metrics import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from perdure.clock import Clock

_JOIN_SECONDS = 2.0


class LockRenewer:
    """Renews all locks of one kind, well before they expire.

    A failed renewal is repeated. A lock is lost only when the store says so.
    """

    def __init__(
        self,
        clock: Clock,
        lock_seconds: float,
        tokens: Callable[[], Sequence[str]],
        renew: Callable[[Sequence[str], int], Awaitable[frozenset[str]]],
        on_lost: Callable[[frozenset[str]], None],
    ) -> None:
        self._clock = clock
        self._lock_ms = round(lock_seconds * 1000)
        self._interval = lock_seconds * 0.4
        self._tokens = tokens
        self._renew = renew
        self._on_lost = on_lost
        self._main_loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Renew until cancelled. May run on any event loop."""
        pause = self._interval
        while True:
            began = time.monotonic()
            await self._clock.sleep(pause * random.uniform(0.9, 1.1))
            tokens = self._tokens()
            if not tokens:
                continue
            self._warn_if_late(time.monotonic() - began)
            try:
                lost = await self._renew(tokens, self._lock_ms)
                pause = self._interval
            except Exception as error:  # noqa: BLE001 - no error may end the renewals
                unexpected = None if isinstance(error, ProviderError) else error
                log.warning(
                    "cannot renew %d locks, trying again: %s",
                    len(tokens),
                    error,
                    exc_info=unexpected,
                )
                pause = self._interval / 4
                continue
            if lost:
                self._main_loop.call_soon_threadsafe(self._on_lost, lost)

    def _warn_if_late(self, seconds: float) -> None:
        """Warn if the pause was longer than a lock lasts, by the monotonic clock."""
        if seconds * 1000 > self._lock_ms:
            log.warning(
                "nothing could run for %.1f s, so locks of %g s may have run out, and their work "
                "is done again. Code that computes or blocks for long belongs into activities that "
                "are plain functions, which run in threads, or have executor='process'",
                seconds,
                self._lock_ms / 1000,
            )


class LockRenewalThread:
    """Runs renewers on their own event loop: code that blocks the main loop loses no lock.

    Only for providers that declare ``other_loops``. For the others, the renewers run on the loop
    that has created them.
    """

    def __init__(self, renewers: Sequence[LockRenewer], *, own_thread: bool) -> None:
        self._renewers = renewers
        self._own_thread = own_thread
        self._loop = asyncio.new_event_loop() if own_thread else asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="perdure-lock-renewal", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = False

    def start(self) -> None:
        if self._own_thread:
            self._thread.start()
        else:
            self._tasks = [self._loop.create_task(renewer.run()) for renewer in self._renewers]

    async def stop(self) -> None:
        self.abort()
        if self._own_thread:
            # Bounded: a renewal that cannot be interrupted may end later, in its daemon thread.
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        else:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        """Cancel the renewals. May be called twice, and before the thread has begun to run."""
        self._is_stopped = True
        if not self._own_thread:
            self._cancel()
            return
        with suppress(RuntimeError):  # the loop is closed: the thread has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._tasks = [self._loop.create_task(renewer.run()) for renewer in self._renewers]
        if self._is_stopped:
            self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
