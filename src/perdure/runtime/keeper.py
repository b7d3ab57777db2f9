"""Keeps locks alive while work goes on, and tells whose lock is really lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from perdure.errors import ProviderError
from perdure.runtime.observe import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from perdure.clock import Clock

_JOIN_SECONDS = 2.0


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
        self._home = asyncio.get_running_loop()

    async def keep(self) -> None:
        """Renew until cancelled; on any loop."""
        pause = self._interval
        while True:
            began = time.monotonic()
            await self._clock.sleep(pause * random.uniform(0.9, 1.1))
            tokens = self._tokens()
            if not tokens:
                continue
            self._tell_late(time.monotonic() - began)
            try:
                lost = await self._renew(tokens, self._lock_ms)
                pause = self._interval
            except Exception as error:  # noqa: BLE001 - whatever it is, locks must be kept
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
                self._home.call_soon_threadsafe(self._lost, lost)

    def _tell_late(self, seconds: float) -> None:
        """The clock of the machine: one that jumps holds nobody up."""
        if seconds * 1000 > self._lock_ms:
            log.warning(
                "nothing could run for %.1f s, so locks of %g s may have run out, and their work "
                "is done again. Code that computes or blocks for long belongs into activities that "
                "are plain functions, which run in threads, or have executor='process'",
                seconds,
                self._lock_ms / 1000,
            )


class KeeperThread:
    """Runs keepers on a loop of their own: an activity that blocks the main loop loses no lock.

    Only for providers that declare ``other_loops``; else they run on the loop they were made on.
    """

    def __init__(self, keepers: Sequence[LockKeeper], *, own_thread: bool) -> None:
        self._keepers = keepers
        self._own_thread = own_thread
        self._loop = asyncio.new_event_loop() if own_thread else asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="perdure-keeper", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    def start(self) -> None:
        if self._own_thread:
            self._thread.start()
        else:
            self._tasks = [self._loop.create_task(keeper.keep()) for keeper in self._keepers]

    async def stop(self) -> None:
        self.abort()
        if self._own_thread:
            # A renewal that cannot be interrupted may end later: the thread holds nobody up.
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        else:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        """May be called at any time, also twice and before the thread has begun to run."""
        self._is_over = True
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
        self._tasks = [self._loop.create_task(keeper.keep()) for keeper in self._keepers]
        if self._is_over:
            self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
