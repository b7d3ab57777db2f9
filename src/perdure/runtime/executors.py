"""Where activity code runs: on the event loop, in a thread, or in a child process."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from perdure.authoring.activity_context import enter_scope
from perdure.runtime.processes import ProcessPool
from perdure.runtime.scope import RunningScope

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from perdure.authoring import Activity
    from perdure.codec import Codec
    from perdure.runtime.activities import Running
    from perdure.runtime.options import RuntimeOptions


class Executors:
    """Runs one attempt of an activity under its time limits."""

    def __init__(self, options: RuntimeOptions, codec: Codec, worker_id: str) -> None:
        self._options = options
        self.codec = codec
        self.worker_id = worker_id
        self.loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(options.threads, "perdure-activity")
        self._processes = ProcessPool(options.processes)
        self.send_heartbeat: Callable[[str, str], None] = lambda _token, _details: None
        """Set by the runtime: stores what an activity reports. Called on the event loop."""

    def run(
        self,
        running: Running,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        """The activity's code, to be awaited in the context in which this is called."""
        item = running.item
        scope = self._enter(running)
        call: Coroutine[Any, Any, Any]
        if activity.is_async:
            call = activity.fn(*args, **kwargs)
        else:
            call = self._call(activity, args, kwargs)
        if item.heartbeat_ms is not None:
            call = scope.while_beating(call, item.heartbeat_ms / 1000)
        return call if item.timeout_ms is None else _within(item.timeout_ms / 1000, call)

    def _enter(self, running: Running) -> RunningScope:
        scope = running.scope = RunningScope(running, self)
        # Every attempt has a context of its own, which ends with it: nothing to reset.
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
        scope = self._enter(running)
        context = contextvars.copy_context()

        def call(connection: Any) -> Any:
            scope.store_connection = connection
            try:
                return context.run(_contained, activity.fn, args, kwargs)
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
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: context.run(_contained, activity.fn, args, kwargs)
        )

    def abort(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Give up threads that do not end: they cannot be stopped from outside."""
        self.abort()
        await self._processes.close()


def _contained(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it. StopIteration cannot pass a future, and sys.exit() is not for the worker."""
    try:
        return fn(*args, **kwargs)
    except (StopIteration, SystemExit) as error:
        raise RuntimeError(f"the activity raised {type(error).__name__}: {error}") from error


async def _within(seconds: float, call: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await call
