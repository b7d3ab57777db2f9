"""Periodic work of a runtime: renews locks, announces the worker, retries and deletes instances."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from perdure.arguments import in_milliseconds, in_seconds
from perdure.client.admin import read_instances
from perdure.client.retention import retention_by_worker
from perdure.errors import PerdureError, ProviderError
from perdure.model.failures import BlockReason
from perdure.model.status import Status
from perdure.providers.records import InstanceInfo, InstanceQuery, WorkerInfo
from perdure.runtime.metrics import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from perdure.clock import Clock
    from perdure.runtime.instances import Intake
    from perdure.runtime.worker import Worker

_JOIN_SECONDS = 2.0
_ANNOUNCE_SECONDS = 10.0
_FIRST_SECONDS = 0.25
"""Delay at the start of a runtime, so that waiting work comes first."""
_UNBLOCK_SECONDS = 15.0
"""Repeated, because in a rolling deploy the old code still runs when the new code has started."""
_DELETE_SECONDS = 60.0
_PAUSE_SECONDS = 0.005
_PAUSES = 4
"""The pause after the deletion of a tree, as a multiple of the time that it took; at least
``_PAUSE_SECONDS``. So others wait for one small commit at most, and a busy store is asked less."""


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
        count: Callable[[int, int], None],
    ) -> None:
        self._clock = clock
        self._lock_ms = round(lock_seconds * 1000)
        self._interval = lock_seconds * 0.4
        self._tokens = tokens
        self._renew = renew
        self._on_lost = on_lost
        self._count = count
        """Told of each renewal: the number of locks, and how many of them are lost."""
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
            self._count(len(tokens), len(lost))
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
            self._begin()

    def _begin(self) -> None:
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
        self._begin()
        if self._is_stopped:
            self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Housekeeping:
    """Repeats each task at its interval. A task that fails is only logged."""

    def __init__(
        self,
        worker: Worker,
        intake: Intake,
        describe: Callable[[], WorkerInfo],
    ) -> None:
        self._provider = worker.provider
        self._intake = intake
        self._clock = worker.clock
        self._options = worker.options
        self._owner = worker.worker_id
        self._describe = describe
        self._tasks: list[asyncio.Task[None]] = []
        self._is_announced = False
        self._has_warned = False

    def start(self) -> None:
        options, later, provider = self._options, _FIRST_SECONDS, self._provider
        renew_seconds = in_seconds(options.session_lock_timeout) * 0.4
        periods: list[tuple[Callable[[], Awaitable[object]], float, float]] = [
            (self._renew_sessions, later, renew_seconds),
            (provider.cleanup_orphaned_sessions, later, in_seconds(options.session_idle_timeout)),
        ]
        if provider.capabilities.admin:
            periods.insert(0, (self._announce, 0, _ANNOUNCE_SECONDS))
            periods.append((self.retry_blocked, later, _UNBLOCK_SECONDS))
            if self._describe().keep:
                periods.append((self.delete_ended, later, _DELETE_SECONDS))
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._repeat(*each)) for each in periods]

    def abort(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._once(self._withdraw)

    async def _repeat(
        self, task: Callable[[], Awaitable[object]], delay: float, interval: float
    ) -> None:
        if delay:
            await self._clock.sleep(delay)
        while True:
            await self._once(task)
            await self._clock.sleep(interval)

    async def _once(self, task: Callable[[], Awaitable[object]]) -> None:
        try:
            await task()
        except PerdureError as error:
            log.info("housekeeping: %s", error)
        except Exception:  # noqa: BLE001
            log.exception("housekeeping failed")

    async def _announce(self) -> None:
        admin = self._provider.admin
        me = self._describe()
        if self._is_announced and not self._has_warned:
            # The entry is its own, unless another process with the same id has overwritten it.
            for other in await admin.list_workers():
                if other.worker_id == me.worker_id and _process_of(other) != _process_of(me):
                    self._warn_of(other)
        await admin.register_worker(me, round(_ANNOUNCE_SECONDS * 3000))
        self._is_announced = True

    def _warn_of(self, namesake: WorkerInfo) -> None:
        self._has_warned = True
        log.warning(
            "process %d on %s is a worker with the name %r as well; give each its own, or sessions "
            "run on both and only one of them is listed",
            namesake.process_id,
            namesake.host,
            namesake.worker_id,
        )

    async def _withdraw(self) -> None:
        if self._provider.capabilities.admin:
            await self._provider.admin.register_worker(self._describe(), 0)

    async def _renew_sessions(self) -> None:
        await self._provider.renew_session_lock(
            [self._owner],
            in_milliseconds(self._options.session_lock_timeout),
            in_milliseconds(self._options.session_idle_timeout),
        )

    async def retry_blocked(self) -> None:
        """Resume Blocked instances for which this runtime has other code than the one that failed.

        So a deploy of fixed code needs no further step.
        """
        admin = self._provider.admin
        query = InstanceQuery(statuses=frozenset({Status.BLOCKED}))
        async for info in read_instances(admin, query):
            if self._has_other_code(info):
                log.info("trying %r again with other code", info.instance_id)
                await admin.resume_instance(info.instance_id)

    async def delete_ended(self) -> None:
        """Delete the roots that have been kept long enough, one by one, each with its tree.

        Each tree goes in one transaction that finds all of it ended, so two workers may do this at
        once. A worker that leaves it to another one does nothing.
        """
        admin = self._provider.admin
        others = [each for each in await admin.list_workers() if each.worker_id != self._owner]
        share = retention_by_worker([*others, self._describe()])[self._owner]
        deleted = 0
        async for root in share.due(admin, self._clock.now_ms()):
            began = time.monotonic()
            deleted += (await admin.delete_instance_bulk(root)).instances
            took = time.monotonic() - began
            await self._clock.sleep(max(_PAUSE_SECONDS, _PAUSES * took))
        if deleted:
            log.info("deleted %d instances that had been kept long enough", deleted)

    def _has_other_code(self, info: InstanceInfo) -> bool:
        block = info.block
        if block is None:
            return False
        code = self._intake.fingerprint(info.name, info.version)
        if not code:
            return False
        return block.reason is BlockReason.UNKNOWN_HANDLER or code != block.code


def _process_of(worker: WorkerInfo) -> tuple[str, int, int]:
    return worker.host, worker.process_id, worker.started_at_ms
