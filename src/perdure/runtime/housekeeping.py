"""Slow background duties of a runtime: announce it, keep its sessions, retry what was Blocked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from perdure.errors import PerdureError
from perdure.model.failures import BlockReason
from perdure.model.status import Status
from perdure.providers.items import InstanceQuery
from perdure.runtime.observe import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.clock import Clock
    from perdure.providers.contract import Provider
    from perdure.providers.items import InstanceInfo, WorkerInfo
    from perdure.runtime.intake import Intake
    from perdure.runtime.options import RuntimeOptions

_ANNOUNCE_SECONDS = 10.0
_FIRST_SECONDS = 0.25
"""What waits in the store comes first when a runtime starts."""
_UNBLOCK_SECONDS = 15.0
"""Not only at the start: in a rolling deploy the old code goes on after the new one has come."""
_PAGE = 200


class Housekeeping:
    """Tasks that may fail: what they do is done again the next time."""

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
        session_seconds = self._options.session_lock_seconds * 0.4
        self._tasks = [
            loop.create_task(self._every(_ANNOUNCE_SECONDS, self._announce)),
            loop.create_task(self._later(session_seconds, self._renew_sessions)),
            loop.create_task(self._later(self._options.session_idle_seconds, self._clean_sessions)),
            loop.create_task(self._later(_UNBLOCK_SECONDS, self.retry_blocked)),
        ]

    def abort(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._once(self._withdraw)

    async def _every(self, seconds: float, duty: Callable[[], Awaitable[object]]) -> None:
        while True:
            await self._once(duty)
            await self._clock.sleep(seconds)

    async def _later(self, seconds: float, duty: Callable[[], Awaitable[object]]) -> None:
        await self._clock.sleep(_FIRST_SECONDS)
        await self._every(seconds, duty)

    async def _once(self, duty: Callable[[], Awaitable[object]]) -> None:
        try:
            await duty()
        except PerdureError as error:
            log.info("housekeeping: %s", error)
        except Exception:  # noqa: BLE001
            log.exception("housekeeping failed")

    async def _announce(self) -> None:
        admin = self._provider.admin()
        if admin is None:
            return
        me = self._describe()
        if self._is_announced and not self._has_warned:
            # Its own announcement is there, unless somebody else has written over it since.
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
        admin = self._provider.admin()
        if admin is not None:
            await admin.register_worker(self._describe(), 0)

    async def _renew_sessions(self) -> None:
        await self._provider.renew_session_lock(
            [self._owner],
            round(self._options.session_lock_seconds * 1000),
            round(self._options.session_idle_seconds * 1000),
        )

    async def _clean_sessions(self) -> None:
        await self._provider.cleanup_orphaned_sessions()

    async def retry_blocked(self) -> None:
        """Let Blocked instances go on for which this runtime has other code than the one that
        could not: a fixed deploy needs no further step.
        """
        admin = self._provider.admin()
        if admin is None:
            return
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


def seen(worker: WorkerInfo, *, busy: int, now_ms: int) -> WorkerInfo:
    return msgspec.structs.replace(worker, busy=busy, seen_at_ms=now_ms)
