"""Executors of activity code: shared tasks of the event loop, threads, and child processes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import types
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from perdure.arguments import in_seconds
from perdure.runtime.metrics import log
from perdure.runtime.processes import NotBegun, ProcessPool, RecordedFailure, failure_from

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator

    from perdure.authoring import Activity
    from perdure.codec import Codec
    from perdure.runtime.attempts import AttemptScope, RunningActivity
    from perdure.runtime.options import RuntimeOptions

_ENDED: Final = object()
"""Yielded by the coroutine of an activity task when an activity has ended."""


class Executors:
    """Runs one attempt of an activity under its time limits."""

    def __init__(self, options: RuntimeOptions, codec: Codec, worker_id: str) -> None:
        self._options = options
        self.codec = codec
        self.worker_id = worker_id
        self.loop = asyncio.get_running_loop()
        self._threads = ThreadExecutor(options.threads, in_seconds(options.cancel_grace))
        self._processes = ProcessPool(options.processes)
        self.send_heartbeat: Callable[[RunningActivity], None] = lambda _running: None
        """Set by the runtime: stores the heartbeat of an activity. Called on the event loop."""
        self._not_cancellable: set[str] = set()
        """Activities of which the log says that they ignore cancellation."""

    def run(
        self,
        scope: AttemptScope,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        """Return the activity's code as a coroutine, to be awaited in the caller's context."""
        item = scope.running.item
        limited: Callable[[Awaitable[Any]], Coroutine[Any, Any, Any]] | None = None
        if item.timeout_ms is not None or item.heartbeat_ms is not None:
            limited = partial(self._limited, scope)
        if not activity.is_async:
            return self._call(activity, args, kwargs, scope, limited)
        call: Coroutine[Any, Any, Any] = activity.fn(*args, **kwargs)
        return call if limited is None else limited(call)

    def in_transaction(
        self,
        scope: AttemptScope,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[Any], Any]:
        """Return the activity as a function of the store's connection, for the store's thread."""
        context = contextvars.copy_context()

        def call(connection: Any) -> Any:
            scope.store_connection = connection
            try:
                return context.run(_call_contained, activity.fn, args, kwargs)
            finally:
                scope.store_connection = None

        return call

    async def _call(
        self,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scope: AttemptScope,
        limited: Callable[[Awaitable[Any]], Awaitable[Any]] | None,
    ) -> Any:
        if activity.settings.executor == "process":
            return await self._processes.run(activity, args, kwargs, scope.info, limited)
        context = contextvars.copy_context()
        return await self._threads.run(
            activity.name, lambda: context.run(_call_contained, activity.fn, args, kwargs), limited
        )

    async def _limited(self, scope: AttemptScope, call: Awaitable[Any]) -> Any:
        """Await the call under the time limits of one attempt."""
        item = scope.running.item
        check_end = partial(self.check_end_later, scope.running)
        if item.heartbeat_ms is not None:
            call = self._with_heartbeats(scope, call, item.heartbeat_ms / 1000, check_end)
        if item.timeout_ms is None:
            return await call
        seconds = item.timeout_ms / 1000
        limit = TimeLimit(seconds, f"no result within {seconds:g} s", check_end)
        return await limit.run(call, scope.cancel)

    async def _with_heartbeats(
        self,
        scope: AttemptScope,
        call: Awaitable[Any],
        seconds: float,
        check_end: Callable[[float], asyncio.TimerHandle],
    ) -> Any:
        limit = TimeLimit(seconds, f"no heartbeat for {seconds:g} seconds", check_end)
        scope.heartbeat_limit = limit
        try:
            return await limit.run(call, scope.cancel)
        finally:
            scope.heartbeat_limit = None

    def check_end_later(
        self, running: RunningActivity, after_seconds: float = 0
    ) -> asyncio.TimerHandle:
        """Log a warning if the code still runs when the time to end by itself is over."""
        seconds = after_seconds + in_seconds(self._options.cancel_grace)
        return self.loop.call_later(seconds, self._check_end, running)

    def _check_end(self, running: RunningActivity) -> None:
        name = running.item.name
        if running.task is not None and name not in self._not_cancellable:
            self._not_cancellable.add(name)
            log.warning(
                "activity %r goes on although it timed out or was cancelled %g s ago: it does not "
                "let CancelledError through. It keeps its slot until it ends",
                name,
                in_seconds(self._options.cancel_grace),
            )

    @property
    def abandoned_in_threads(self) -> Counter[str]:
        """The number of abandoned calls that still run in threads, by activity."""
        return self._threads.abandoned

    async def wait_for_threads(self) -> None:
        """Wait until no abandoned call runs any more; its code may look at ``is_cancelled()``."""
        await self._threads.wait_for_abandoned()

    def abort(self) -> None:
        """Begin no more calls in threads. Those that run cannot be stopped."""
        self._threads.close()

    async def close(self) -> None:
        self.abort()
        await self._processes.close()


def _call_contained(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function; replace errors that a future cannot hold or that would end the worker."""
    try:
        return fn(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("the activity raised StopIteration") from error
    except (GeneratorExit, KeyboardInterrupt, SystemExit) as error:
        raise RecordedFailure(failure_from(error, attempts=1)) from error


class TimeLimit:
    """Interrupts a call when its time is up. The time can be restarted."""

    def __init__(
        self, seconds: float, message: str, check_end: Callable[[float], asyncio.TimerHandle]
    ) -> None:
        self._seconds = seconds
        self._message = message
        self._check_end = check_end
        """Logs code that still runs so many seconds later."""

    async def run(self, call: Awaitable[Any], interrupted: Callable[[], None]) -> Any:
        """Await the call. When its time is up, call ``interrupted`` and raise TimeoutError."""
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(self._seconds)
        self._check = self._check_end(self._seconds)
        try:
            async with self._limit:
                return await call
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            interrupted()
            raise TimeoutError(self._message) from error.__cause__
        finally:
            self._check.cancel()

    def restart(self) -> None:
        """Let the time begin again; only while ``run`` awaits the call."""
        if not self._limit.expired():
            self._limit.reschedule(self._loop.time() + self._seconds)
            self._check.cancel()
            self._check = self._check_end(self._seconds)


class ThreadExecutor:
    """The threads of sync activities.

    A thread cannot be stopped: an abandoned call, which timed out or was cancelled, goes on and
    keeps its thread until it ends.
    """

    def __init__(self, size: int, grace_seconds: float) -> None:
        self._size = size
        self._grace_seconds = grace_seconds
        self._pool = ThreadPoolExecutor(size, "perdure-activity")
        self._loop = asyncio.get_running_loop()
        self._abandoned: dict[Future[Any], str] = {}
        """Abandoned calls that still run, with the activity's name."""
        self._abandoned_ended = asyncio.Event()
        self._logged: set[str] = set()
        """Activities that the log has mentioned."""

    async def run(
        self,
        name: str,
        call: Callable[[], Any],
        limited: Callable[[Awaitable[Any]], Awaitable[Any]] | None,
    ) -> Any:
        """Run a call in a thread. ``limited`` applies its time limits once a thread begins it.

        A call that is cancelled before that never begins.
        """
        begun: asyncio.Future[None] | None = None
        if limited is not None:
            begun = self._loop.create_future()
            call = partial(self._begin, begun, call)
        future = self._submit(call)
        answer = asyncio.wrap_future(future)
        try:
            if limited is None or begun is None:
                return await answer
            await begun
            return await limited(answer)
        finally:
            answer.cancel()
            if not future.cancel() and not future.done():
                self._abandon(name, future)

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        # The pool queues a call before it starts a thread for it. If that start fails, another
        # thread may still run the call, so only a call that can be cancelled has not begun.
        future: Future[Any] = Future()
        try:
            self._pool.submit(_run, future, call)
        except RuntimeError as error:
            if future.cancel():
                raise NotBegun(f"no thread for it: {error}") from error
        return future

    def _begin(self, begun: asyncio.Future[None], call: Callable[[], Any]) -> Any:
        self._loop.call_soon_threadsafe(_set, begun)
        return call()

    def _abandon(self, name: str, future: Future[Any]) -> None:
        self._abandoned[future] = name
        future.add_done_callback(self._on_abandoned_end)
        if len(self._abandoned) >= self._size:
            self._warn(name)  # no other sync activity can begin
        elif name not in self._logged:
            self._loop.call_later(self._grace_seconds, self._check, name, future)

    def _on_abandoned_end(self, future: Future[Any]) -> None:
        self._abandoned.pop(future, None)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._abandoned_ended.set)

    async def wait_for_abandoned(self) -> None:
        """Wait until no abandoned call runs any more."""
        while self._abandoned:
            self._abandoned_ended.clear()
            await self._abandoned_ended.wait()

    def _check(self, name: str, future: Future[Any]) -> None:
        if not future.done() and name not in self._logged:
            self._warn(name)

    def _warn(self, name: str) -> None:
        self._logged.add(name)
        log.warning(
            "activity %r still runs in its thread although it timed out or was cancelled; %d of %d "
            "threads are taken like that. A thread cannot be stopped: look at is_cancelled() now "
            "and then, or use executor='process'",
            name,
            len(self._abandoned),
            self._size,
        )

    @property
    def abandoned(self) -> Counter[str]:
        """The number of abandoned calls that still run, by activity."""
        return Counter(list(self._abandoned.values()))

    def close(self) -> None:
        """Begin no more calls; those that run go on."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - raised where it is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def _set(begun: asyncio.Future[None]) -> None:
    if not begun.done():
        begun.set_result(None)


class ActivityTasks:
    """Runs the activities of one dispatcher on few tasks of the event loop.

    A task for each activity would cost more than a quick activity does, so a task takes the next
    activity as long as none has to wait. Each activity has its own context. The task on which an
    activity first waits belongs to that activity alone from then on, so contexts, cancellation and
    ``asyncio.timeout`` work as in a task that was made for it.
    """

    def __init__(
        self,
        run: Callable[[RunningActivity], Coroutine[Any, Any, None]],
        on_error: Callable[[RunningActivity, BaseException], None],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._run = run
        self._on_error = on_error
        """Called when the run of an activity has raised."""
        self._tasks = tasks
        """Holds every task that has something to do."""
        self._loop = asyncio.get_running_loop()
        self._launched: deque[RunningActivity] = deque()
        self._fresh: set[asyncio.Task[None]] = set()
        """Tasks that were started or woken, and have not run since."""
        self._idle: tuple[asyncio.Future[None], asyncio.Task[None]] | None = None
        """The one task that waits for more, and the future that wakes it. A chain of steps needs
        only this one."""
        self._context = contextvars.copy_context()
        """The context of the runtime: activities do not see the context of their caller."""
        self._is_retiring = False
        """No task waits for more."""

    def launch(self, running: RunningActivity) -> None:
        self._launched.append(running)
        if not self._fresh:
            self._start()

    def retire(self) -> None:
        """Let every task end when it has nothing to do, so that waiting for the tasks ends."""
        self._is_retiring = True
        if self._idle is not None:
            self._start()

    def close(self) -> None:
        """Begin none of the activities that have not begun."""
        self._launched.clear()
        self.retire()

    def _start(self) -> None:
        idle, self._idle = self._idle, None
        if idle is None or idle[0].done():  # done: the task was cancelled and has not run since
            task = self._loop.create_task(self._serve(), context=self._context.copy())
            task.add_done_callback(self._on_task_end)
        else:
            waker, task = idle
            waker.set_result(None)
        self._fresh.add(task)
        self._tasks.add(task)

    async def _serve(self) -> None:
        """Run launched activities until one of them waits; then go on with that one alone."""
        task: Any = asyncio.current_task()
        coroutine: Any = self._run_each()
        proceed, copy_context = coroutine.send, self._context.copy
        proceed(None)
        launched = self._launched
        running: RunningActivity | None
        context: contextvars.Context | None
        while True:
            self._fresh.discard(task)
            while launched:
                running = launched.popleft()
                running.task = task
                context = copy_context()
                try:
                    awaited = context.run(proceed, running)
                    if awaited is not _ENDED:
                        self._start_substitutes()
                        await _continue(coroutine, awaited, context)
                        return
                except Exception as error:  # noqa: BLE001 - logged there
                    self._on_error(running, error)
                    return  # the activity may have waited, so the task is its own
                except BaseException as error:  # cancelled, or interrupted by a signal
                    self._on_error(running, error)
                    raise
                finally:
                    running.task = running.scope = None
                # _must_cancel: 3.11 and 3.12 leave it set for a cancellation that was taken back.
                if task.cancelling() or task._must_cancel:  # noqa: SLF001
                    return
            if self._idle is not None or self._is_retiring:
                return
            running = context = None  # release them: the wait may be long
            await self._wait_for_more(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A callback, because a task can be cancelled before its first line, or while it waits."""
        self._tasks.discard(task)
        self._fresh.discard(task)
        if self._idle is not None and self._idle[1] is task:
            self._idle = None
        if self._launched and not self._fresh:
            self._start()

    @types.coroutine
    def _run_each(self) -> Generator[Any, Any, None]:
        """Run the activities that it is sent, one after the other, in a single coroutine."""
        run = self._run
        while True:
            yield from run((yield _ENDED))

    def _wait_for_more(self, task: asyncio.Task[None]) -> asyncio.Future[None]:
        self._tasks.discard(task)
        waker: asyncio.Future[None] = self._loop.create_future()
        self._idle = (waker, task)
        return waker

    def _start_substitutes(self) -> None:
        """Start two more tasks for one whose activity waits, so that many soon run at once."""
        for _ in range(min(2, len(self._launched) - len(self._fresh))):
            self._start()


@types.coroutine
def _continue(
    coroutine: Generator[Any, Any, None], awaited: Any, context: contextvars.Context
) -> Generator[Any, Any, None]:
    """Run an activity that waits for something to its end, in its own context."""
    while awaited is not _ENDED:
        proceed: Callable[[Any], Any] = coroutine.send
        try:
            given = yield awaited
        except BaseException as error:  # noqa: BLE001
            proceed, given = coroutine.throw, error  # thrown below, outside of this except
        try:
            awaited = context.run(proceed, given)
        finally:
            given = None
