"""Periodic tasks of a runtime: announce the worker, renew sessions, retry Blocked instances."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from perdure.arguments import in_seconds
from perdure.errors import PerdureError
from perdure.model.failures import BlockReason
from perdure.model.status import Status
from perdure.providers.records import InstanceQuery
from perdure.runtime.metrics import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.clock import Clock
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo, WorkerInfo
    from perdure.runtime.intake import Intake
    from perdure.runtime.options import RuntimeOptions

_ANNOUNCE_SECONDS = 10.0
_FIRST_SECONDS = 0.25
"""Delay at the start of a runtime, so that waiting work comes first."""
_UNBLOCK_SECONDS = 15.0
"""Repeated, because in a rolling deploy the old code goes on after the new code has started."""
_PAGE = 200


class Housekeeping:
    """Repeats each task at its interval. A task that fails is only logged."""

    def __init__(
        self,
        provider: Provider,
        intake: Intake,
        *,
        clock: Clock,
        options: RuntimeOptions,
        owner: str,
        describe: Callable[[], WorkerInfo],
    ) -> None:
        self._provider = provider
        self._intake = intake
        self._clock = clock
        self._options = options
        self._owner = owner
        self._describe = describe
        self._tasks: list[asyncio.Task[None]] = []
        self._is_announced = False
        self._has_warned = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        session_seconds = in_seconds(self._options.session_lock_timeout) * 0.4
        self._tasks = [
            loop.create_task(self._every(_ANNOUNCE_SECONDS, self._announce)),
            loop.create_task(self._later(session_seconds, self._renew_sessions)),
            loop.create_task(
                self._later(in_seconds(self._options.session_idle_timeout), self._clean_sessions)
            ),
            loop.create_task(self._later(_UNBLOCK_SECONDS, self.retry_blocked)),
        ]

    def abort(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._once(self._withdraw)

    async def _every(self, seconds: float, task: Callable[[], Awaitable[object]]) -> None:
        while True:
            await self._once(task)
            await self._clock.sleep(seconds)

    async def _later(self, seconds: float, task: Callable[[], Awaitable[object]]) -> None:
        await self._clock.sleep(_FIRST_SECONDS)
        await self._every(seconds, task)

    async def _once(self, task: Callable[[], Awaitable[object]]) -> None:
        try:
            await task()
        except PerdureError as error:
            log.info("housekeeping: %s", error)
        except Exception:  # noqa: BLE001
            log.exception("housekeeping failed")

    async def _announce(self) -> None:
        if not self._provider.capabilities.admin:
            return
        admin = self._provider.admin
        me = self._describe()
        if self._is_announced and not self._has_warned:
            # The entry is its own, unless another process with the same id has overwritten it.
            for other in await admin.list_workers():
                if other.worker_id == me.worker_id and not _is_same_process(other, me):
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
            round(in_seconds(self._options.session_lock_timeout) * 1000),
            round(in_seconds(self._options.session_idle_timeout) * 1000),
        )

    async def _clean_sessions(self) -> None:
        await self._provider.cleanup_orphaned_sessions()

    async def retry_blocked(self) -> None:
        """Resume Blocked instances for which this runtime has other code than the one that failed.

        So a deploy of fixed code needs no further step.
        """
        if not self._provider.capabilities.admin:
            return
        admin = self._provider.admin
        query, cursor = InstanceQuery(statuses=frozenset({Status.BLOCKED})), None
        while True:
            page = await admin.list_instances(query, cursor=cursor, limit=_PAGE)
            for info in page.instances:
                if self._has_other_code(info):
                    log.info("trying %r again with other code", info.instance_id)
                    await admin.resume_instance(info.instance_id)
            if (cursor := page.next_cursor) is None:
                return

    def _has_other_code(self, info: InstanceInfo) -> bool:
        block = info.block
        if block is None:
            return False
        code = self._intake.fingerprint(info.name, info.version)
        if not code:
            return False
        return block.reason is BlockReason.UNKNOWN_HANDLER or code != block.code


def _is_same_process(one: WorkerInfo, other: WorkerInfo) -> bool:
    return (one.host, one.process_id, one.started_at_ms) == (
        other.host,
        other.process_id,
        other.started_at_ms,
    )
