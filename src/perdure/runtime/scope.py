"""One attempt of an activity as its own code sees it. Safe to use from any thread."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.authoring.activity_context import ActivityInfo
from perdure.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from perdure.runtime.executors import Executors
    from perdure.runtime.running import Running


class RunningScope:
    """Implements the port that ``perdure.heartbeat()`` and its siblings call."""

    __slots__ = ("_beaten_at", "_cancelled", "_executors", "_item", "_running", "store_connection")

    def __init__(self, running: Running, executors: Executors) -> None:
        self._running = running
        self._item = running.item
        self._executors = executors
        self._cancelled = False
        self._beaten_at = 0.0
        self.store_connection: Any = None
        """Set while a transactional activity runs."""

    @property
    def info(self) -> ActivityInfo:
        item = self._item
        return ActivityInfo(
            instance_id=item.instance_id,
            execution_id=item.execution_id,
            orchestration_name=item.orchestration_name,
            orchestration_version=item.orchestration_version,
            activity_name=item.name,
            activity_id=item.activity_id,
            attempt=item.attempt + self._running.redelivered,
            session=item.session_id,
            tag=item.tag,
            worker_id=self._executors.worker_id,
            seed=item.seed,
        )

    def heartbeat(self, details: object) -> None:
        self._beaten_at = time.monotonic()
        executors = self._executors
        raw = executors.codec.encode(details, where=f"heartbeat of {self._item.name}")
        running = self._running
        running.told = bytes(raw).decode()
        executors.loop.call_soon_threadsafe(
            executors.send_heartbeat, running.lock_token, running.told
        )

    def last_heartbeat(self, type_: Any) -> Any:
        told = self._running.last_heartbeat
        if told is None:
            return None
        return self._executors.codec.decode(msgspec.Raw(told), type_, where="heartbeat")

    def is_cancelled(self) -> bool:
        return self._cancelled

    def connection(self) -> Any:
        if self.store_connection is None:
            raise UsageError(
                f"activity {self._item.name!r} has no transaction; "
                "declare it with @activity(transactional=True)"
            )
        return self.store_connection

    def cancel(self) -> None:
        self._cancelled = True

    async def while_beating(self, work: Awaitable[Any], seconds: float) -> Any:
        """Run the work; TimeoutError once it has not reported for that long."""
        task = asyncio.ensure_future(work)
        self._beaten_at = time.monotonic()
        try:
            while True:
                left = self._beaten_at + seconds - time.monotonic()
                if left <= 0:
                    self._cancelled = True
                    raise TimeoutError(f"no heartbeat for {seconds:g} seconds")
                done, _ = await asyncio.wait((task,), timeout=left)
                if done:
                    return task.result()
        finally:
            if not task.done():
                task.cancel()
                check = self._executors.expect_end(self._running)
                await asyncio.wait((task,))
                check.cancel()
                if not task.cancelled():
                    task.exception()  # looked at: nobody wants to know any more
