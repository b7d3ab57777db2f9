"""Where activity code runs: on the event loop, in a thread, or in a child process."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.authoring.activity_context import enter_scope
from perdure.runtime.processes import ProcessPool
from perdure.runtime.scope import RunningScope

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.authoring import Activity
    from perdure.codec import Codec
    from perdure.runtime.activities import Running
    from perdure.runtime.options import RuntimeOptions


class Executors:
    """Runs one attempt of an activity under its time limits."""

    def __init__(self, options: RuntimeOptions, codec: Codec, worker_id: str) -> None:
        self._options = options
        self._codec = codec
        self._worker_id = worker_id
        self._threads = ThreadPoolExecutor(options.threads, "perdure-activity")
        self._processes = ProcessPool(options.processes)
        self.send_heartbeat: Callable[[str, str], None] = lambda _token, _details: None
        """Set by the runtime: stores what an activity reports. Called on the event loop."""

    async def run(
        self,
        running: Running,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        last_heartbeat: str | None,
    ) -> Any:
        item = running.item
        scope = self._enter(running, last_heartbeat)
        if activity.is_async and item.timeout_ms is None and item.heartbeat_ms is None:
            return await activity.fn(*args, **kwargs)
        call = self._call(activity, args, kwargs)
        if item.heartbeat_ms is not None:
            call = scope.while_beating(call, item.heartbeat_ms / 1000)
        if item.timeout_ms is None:
            return await call
        async with asyncio.timeout(item.timeout_ms / 1000):
            return await call

    def _enter(self, running: Running, last_heartbeat: str | None) -> RunningScope:
        scope = running.scope = RunningScope(
            running.item,
            self._worker_id,
            self._codec,
            last_heartbeat,
            partial(self.send_heartbeat, running.lock_token),
            asyncio.get_running_loop(),
        )
        # An attempt is a task of its own, so its context ends with it: nothing to reset.
        enter_scope(scope)
        return scope

    def in_transaction(
        self,
        running: Running,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[Any], Any]:
        """The activity's function, to be called with the store's connection in another thread."""
        scope = self._enter(running, None)
        context = contextvars.copy_context()

        def call(connection: Any) -> Any:
            scope.store_connection = connection
            try:
                return context.run(activity.fn, *args, **kwargs)
            finally:
                scope.store_connection = None

        return call

    async def _call(
        self,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if activity.settings.executor == "process":
            return await self._processes.run(activity, args, kwargs)
        if activity.is_async:
            return await activity.fn(*args, **kwargs)
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: context.run(activity.fn, *args, **kwargs)
        )

    def abort(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Give up threads that do not end: they cannot be stopped from outside."""
        self.abort()
        await self._processes.close()
