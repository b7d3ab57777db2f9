"""Where activity code runs: on the event loop, in a thread, or in a child process."""

from __future__ import annotations

import asyncio
import contextvars
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.runtime.bounds import Bound
from perdure.runtime.failures import RecordedFailure, failure_from
from perdure.runtime.observe import log
from perdure.runtime.processes import ProcessPool
from perdure.runtime.threads import Threads

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Coroutine

    from perdure.authoring import Activity
    from perdure.codec import Codec
    from perdure.runtime.options import RuntimeOptions
    from perdure.runtime.running import Running
    from perdure.runtime.scope import RunningScope


class Executors:
    """Runs one attempt of an activity under its time limits."""

    def __init__(self, options: RuntimeOptions, codec: Codec, worker_id: str) -> None:
        self._options = options
        self.codec = codec
        self.worker_id = worker_id
        self.loop = asyncio.get_running_loop()
        self._threads = Threads(options.threads, options.cancel_grace_seconds)
        self._processes = ProcessPool(options.processes)
        self.send_heartbeat: Callable[[Running], None] = lambda _running: None
        """Set by the runtime: stores what an activity has told. Called on the event loop."""
        self._deaf: set[str] = set()
        """Activities of which the log says that they do not let themselves be cancelled."""

    def run(
        self,
        scope: RunningScope,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        """The activity's code, to be awaited in the context in which this is called."""
        item = scope.running.item
        bounded: Callable[[Awaitable[Any]], Coroutine[Any, Any, Any]] | None = None
        if item.timeout_ms is not None or item.heartbeat_ms is not None:
            bounded = partial(self._bounded, scope)
        if not activity.is_async:
            return self._call(activity, args, kwargs, scope, bounded)
        call: Coroutine[Any, Any, Any] = activity.fn(*args, **kwargs)
        return call if bounded is None else bounded(call)

    def in_transaction(
        self,
        scope: RunningScope,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[Any], Any]:
        """The activity's function, to be called with the store's connection in another thread."""
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
        scope: RunningScope,
        bounded: Callable[[Awaitable[Any]], Awaitable[Any]] | None,
    ) -> Any:
        if activity.settings.executor == "process":
            return await self._processes.run(activity, args, kwargs, scope.info, bounded)
        context = contextvars.copy_context()
        return await self._threads.run(
            activity.name, lambda: context.run(_contained, activity.fn, args, kwargs), bounded
        )

    async def _bounded(self, scope: RunningScope, call: Awaitable[Any]) -> Any:
        """Await the call under the limits of one attempt."""
        item = scope.running.item
        expect_end = partial(self.expect_end, scope.running)
        if item.heartbeat_ms is not None:
            call = self._while_beating(scope, call, item.heartbeat_ms / 1000, expect_end)
        if item.timeout_ms is None:
            return await call
        seconds = item.timeout_ms / 1000
        limit = Bound(seconds, f"no result within {seconds:g} s", expect_end)
        return await limit.hold(call, scope.cancel)

    async def _while_beating(
        self,
        scope: RunningScope,
        call: Awaitable[Any],
        seconds: float,
        expect_end: Callable[[float], asyncio.TimerHandle],
    ) -> Any:
        scope.silence = Bound(seconds, f"no heartbeat for {seconds:g} seconds", expect_end)
        try:
            return await scope.silence.hold(call, scope.cancel)
        finally:
            scope.silence = None

    def expect_end(self, running: Running, after_seconds: float = 0) -> asyncio.TimerHandle:
        """Say so in the log when the code still runs, long after it was interrupted."""
        seconds = after_seconds + self._options.cancel_grace_seconds
        return self.loop.call_later(seconds, self._check_end, running)

    def _check_end(self, running: Running) -> None:
        name = running.item.name
        if running.task is not None and name not in self._deaf:
            self._deaf.add(name)
            log.warning(
                "activity %r goes on although it timed out or was cancelled %g s ago: it does not "
                "let CancelledError through. It keeps its slot until it ends",
                name,
                self._options.cancel_grace_seconds,
            )

    @property
    def in_threads(self) -> Counter[str]:
        """How many calls of each activity run in threads although nobody waits for them."""
        return self._threads.left

    async def settle_threads(self) -> None:
        """Wait for calls that were given up, and may look at whether they are cancelled."""
        await self._threads.settle()

    def abort(self) -> None:
        """Give up threads that do not end: they cannot be stopped from outside."""
        self._threads.close()

    async def close(self) -> None:
        self.abort()
        await self._processes.close()


def _contained(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it. These cannot pass a future, or would end the worker, which they are not for."""
    try:
        return fn(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("the activity raised StopIteration") from error
    except (GeneratorExit, KeyboardInterrupt, SystemExit) as error:
        raise RecordedFailure(failure_from(error, attempts=1)) from error
