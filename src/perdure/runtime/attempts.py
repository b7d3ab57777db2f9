"""Attempts of activities: the shared tasks on which they run, the call, its limits, the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import threading
import types
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.arguments import in_seconds
from perdure.authoring.context import ActivityInfo, enter_scope
from perdure.engine.user_code import is_interruption
from perdure.errors import CannotUnwrap, LockLost, PerdureError, ProviderError, UsageError
from perdure.model import work
from perdure.model.wire import envelope
from perdure.providers.sealing import Sealing
from perdure.runtime.executors import (
    NotBegun,
    ProcessPool,
    RecordedFailure,
    ThreadExecutor,
    call_contained,
    failure_from,
)
from perdure.runtime.metrics import log
from perdure.runtime.worker import Backoff, Worker

if TYPE_CHECKING:  # these structs are never encoded, so their fields need no types at run time
    from collections.abc import Awaitable, Callable, Coroutine, Generator

    from perdure.authoring.definitions import Activity
    from perdure.model.failures import Failure
    from perdure.providers.records import OrchestratorMessage

Completion = work.ActivityCompleted | work.ActivityFailed

_DELIVERIES_TOGETHER: Final = 3
"""An activity is isolated after this many deliveries: workers die for other reasons, too."""
_ISOLATED_MAX: Final = 1000
_ENDED: Final = object()
"""Yielded by the coroutine of an activity task when an activity has ended."""


class LookAgain(Exception):
    """Raised by a built-in activity that has no outcome yet: it runs again after ``seconds``."""

    def __init__(self, seconds: float, note: object) -> None:
        super().__init__(seconds)
        self.seconds = seconds
        self.note = note
        """The next run reads it as its last heartbeat."""


class RunningActivity(msgspec.Struct, eq=False, gc=False):
    """An activity from the moment it is locked until its outcome is committed.

    The garbage collector does not track these, so the code that runs one must reset ``task`` and
    ``scope`` when it has ended.
    """

    item: work.ActivityExecute
    lock_token: str
    key: tuple[str, int, int]
    """Instance, execution and activity."""
    last_heartbeat: str | None = None
    """The last heartbeat of an earlier attempt."""
    redelivered: int = 0
    """The number of earlier attempts that have no outcome, because their worker was gone."""
    heartbeat: str | None = None
    """The last heartbeat of this attempt."""
    is_storing_heartbeat: bool = False
    has_begun: bool = False
    task: asyncio.Task[None] | None = None
    """The task that runs its code, while it does."""
    scope: AttemptScope | None = None
    completion: Completion | None = None
    """The outcome, computed but not yet committed."""
    cancelled: bool = False
    """The outcome is not wanted any more: the lock is gone."""
    is_stopped: bool = False
    """The worker stops and has interrupted it. Without an outcome, it is delivered again."""

    def next_item(self, **changes: Any) -> work.ActivityExecute:
        """Return the work item of another attempt, with what this one leaves to it."""
        heartbeat = self.last_heartbeat if self.heartbeat is None else self.heartbeat
        known = {"last_heartbeat": heartbeat, "redelivered": self.redelivered}
        return msgspec.structs.replace(self.item, **(known | changes))


class AttemptScope(msgspec.Struct, eq=False):
    """The attempt as its own code sees it, through ``perdure.heartbeat()`` and its siblings.

    Safe to use from any thread.
    """

    running: RunningActivity
    _attempts: Attempts
    _cancelled: bool = False
    _is_heartbeat_seen: bool = True
    """The event loop has handled the last heartbeat."""
    heartbeat_limit: TimeLimit | None = None
    """Ends the attempt when it has sent no heartbeat for too long."""
    store_connection: Any = None
    """Set while a transactional activity runs."""

    @property
    def info(self) -> ActivityInfo:
        item = self.running.item
        return ActivityInfo(
            instance_id=item.instance_id,
            execution_id=item.execution_id,
            orchestration_name=item.orchestration_name,
            orchestration_version=item.orchestration_version,
            activity_name=item.name,
            activity_id=item.activity_id,
            attempt=item.attempt + self.running.redelivered,
            session=item.session_id,
            tag=item.tag,
            worker_id=self._attempts.worker_id,
            seed=item.seed,
        )

    def heartbeat(self, details: object) -> None:
        attempts = self._attempts
        raw = attempts.codec.encode(details, where=f"heartbeat of {self.running.item.name}")
        item = self.running.item
        self.running.heartbeat = Sealing(attempts.codec).heartbeat(bytes(raw).decode(), item)
        if self._is_heartbeat_seen:  # otherwise a call of _on_heartbeat is on its way already
            self._is_heartbeat_seen = False
            with contextlib.suppress(RuntimeError):  # the loop is closed
                attempts.loop.call_soon_threadsafe(self._on_heartbeat)

    def _on_heartbeat(self) -> None:
        self._is_heartbeat_seen = True
        if self.heartbeat_limit is not None:
            self.heartbeat_limit.restart()
        self._attempts.store_heartbeat(self.running)

    def last_heartbeat(self, type_: Any) -> Any:
        heartbeat = self.running.last_heartbeat
        if heartbeat is None:
            return None
        return self._attempts.codec.decode(msgspec.Raw(heartbeat), type_, where="heartbeat")

    def is_cancelled(self) -> bool:
        return self._cancelled

    def connection(self) -> Any:
        if self.store_connection is None:
            raise UsageError(
                f"activity {self.running.item.name!r} has no transaction; "
                "declare it with @activity(transactional=True)"
            )
        return self.store_connection

    def client(self) -> tuple[Any, asyncio.AbstractEventLoop, threading.Thread]:
        attempts = self._attempts
        return attempts.client, attempts.loop, attempts.loop_thread

    def cancel(self) -> None:
        self._cancelled = True


class Attempts:
    """Calls the functions of one runtime's activities, each attempt once and under its limits."""

    def __init__(self, worker: Worker, store_heartbeat: Callable[[RunningActivity], None]) -> None:
        self._provider = worker.provider
        self._clock = worker.clock
        self.codec = worker.codec
        self.worker_id = worker.worker_id
        self.store_heartbeat = store_heartbeat
        """Stores the heartbeat of an activity. Called on the event loop."""
        self.client = worker.client
        self.loop = asyncio.get_running_loop()
        self.loop_thread = threading.current_thread()
        self._grace_seconds = in_seconds(worker.options.cancel_grace)
        """Time for a cancelled call to end by itself."""
        self.threads = ThreadExecutor(worker.options.threads, self._grace_seconds)
        self._processes = ProcessPool(worker.options.processes)
        self._not_cancellable: set[str] = set()
        """Activities that the log has named, because they ignore cancellation."""
        self.is_stopping = False

    async def run(
        self, running: RunningActivity, activity: Activity[..., Any]
    ) -> tuple[Failure | None, msgspec.Raw | None]:
        """Call the user's function; return its failure, or its encoded result.

        Both are None if the outcome is not wanted any more or is committed already. Raises
        CannotUnwrap and NotBegun if the function cannot be called here, LookAgain if it has no
        outcome yet, and CancelledError if the worker stopped it.
        """
        item = running.item
        try:
            args, kwargs = activity.signature.decode_arguments(item.input, self.codec)
        except CannotUnwrap:
            raise
        except Exception as error:  # noqa: BLE001 - a class of the user's can raise anything
            return failure_from(error, item.attempt), None
        try:
            scope = running.scope = AttemptScope(running, self)
            running.has_begun = True
            # Every attempt has its own context, which ends with it: there is nothing to reset.
            enter_scope(scope)
            if activity.settings.transactional:
                await self._run_in_transaction(scope, activity, args, kwargs)
                return None, None
            value = await self._call(scope, activity, args, kwargs)
            return None, activity.signature.encode_result(value, self.codec)
        except (NotBegun, LookAgain):
            raise
        except BaseException as error:
            if is_interruption(error):
                raise
            if self._is_stopped(running, error):
                raise asyncio.CancelledError("the runtime stops") from error
            if isinstance(error, asyncio.CancelledError) and running.cancelled:
                return None, None
            if isinstance(error, RecordedFailure):
                return msgspec.structs.replace(error.failure, attempts=item.attempt), None
            raises = activity.settings.raises
            return failure_from(error, item.attempt, raises, self.codec), None

    def _is_stopped(self, running: RunningActivity, error: BaseException) -> bool:
        """Return True if the attempt has no outcome because the worker stops."""
        if running.cancelled:
            return False
        # Code that is interrupted may raise another error than CancelledError: that is no outcome.
        return running.is_stopped or (
            self.is_stopping and isinstance(error, asyncio.CancelledError)
        )

    async def _run_in_transaction(
        self,
        scope: AttemptScope,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Call the function inside the store's transaction that also commits its result."""
        item, lock_token = scope.running.item, scope.running.lock_token
        context = contextvars.copy_context()

        def complete(connection: Any) -> OrchestratorMessage:
            """Call the function with the store's connection, on the store's thread."""
            scope.store_connection = connection
            try:
                value = context.run(call_contained, activity.fn, args, kwargs)
                result = activity.signature.encode_result(value, self.codec)
            except PerdureError as error:
                # Recorded here, so that it is not taken for an error of the store below.
                raises = activity.settings.raises
                failure = failure_from(error, item.attempt, raises, self.codec)
                raise RecordedFailure(failure) from error
            finally:
                scope.store_connection = None
            return envelope(completed(item, result))

        backoff = Backoff()
        while True:
            try:
                await self._provider.settle_in_transaction(lock_token, complete)
            except LockLost as error:
                log.info("outcome of %r is dropped: %s", item.name, error)
            except ProviderError as error:
                if not error.retryable:
                    raise
                log.warning("the transaction of %r is begun again: %s", item.name, error)
                await self._clock.sleep(backoff.next_delay(retryable=True))
                continue
            return

    def _call(
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
        if activity.is_async:
            call: Coroutine[Any, Any, Any] = activity.fn(*args, **kwargs)
            return call if limited is None else limited(call)
        if activity.settings.executor == "process":
            return self._processes.run(activity, args, kwargs, scope.info, limited)
        context = contextvars.copy_context()
        return self.threads.run(
            activity.name, lambda: context.run(call_contained, activity.fn, args, kwargs), limited
        )

    async def _limited(self, scope: AttemptScope, call: Awaitable[Any]) -> Any:
        """Await the call under the time limits of one attempt."""
        item = scope.running.item
        check_end = partial(self.check_end_later, scope.running)
        if item.heartbeat_ms is not None:
            seconds = item.heartbeat_ms / 1000
            limit = TimeLimit(seconds, f"no heartbeat for {seconds:g} seconds", check_end)
            scope.heartbeat_limit = limit
            call = limit.run(call, scope.cancel)
        if item.timeout_ms is not None:
            seconds = item.timeout_ms / 1000
            limit = TimeLimit(seconds, f"no result within {seconds:g} s", check_end)
            call = limit.run(call, scope.cancel)
        try:
            return await call
        finally:
            scope.heartbeat_limit = None

    def check_end_later(
        self, running: RunningActivity, after_seconds: float = 0
    ) -> asyncio.TimerHandle:
        """Log a warning if the code still runs when the time to end by itself is over."""
        seconds = after_seconds + self._grace_seconds
        return self.loop.call_later(seconds, self._check_end, running)

    def _check_end(self, running: RunningActivity) -> None:
        name = running.item.name
        if running.task is not None and name not in self._not_cancellable:
            self._not_cancellable.add(name)
            log.warning(
                "activity %r goes on although it timed out or was cancelled %g s ago: it does not "
                "let CancelledError through. It keeps its slot until it ends",
                name,
                self._grace_seconds,
            )

    def abort(self) -> None:
        """Begin no more calls in threads. Those that run cannot be stopped."""
        self.threads.close()

    async def close(self) -> None:
        self.abort()
        await self._processes.close()


class TimeLimit:
    """Interrupts a call when its time is up. The time can be restarted."""

    def __init__(
        self, seconds: float, message: str, check_end: Callable[[float], asyncio.TimerHandle]
    ) -> None:
        self._seconds = seconds
        self._message = message
        self._check_end = check_end
        """Logs code that still runs this many seconds later."""

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
        """Run launched activities until one of them waits; then run only that one."""
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


def completed(item: work.ActivityExecute, result: msgspec.Raw) -> work.ActivityCompleted:
    return work.ActivityCompleted(
        instance_id=item.instance_id,
        execution_id=item.execution_id,
        activity_id=item.activity_id,
        result=result,
        attempts=item.attempt,
    )


def failed(item: work.ActivityExecute, failure: Failure) -> work.ActivityFailed:
    return work.ActivityFailed(
        instance_id=item.instance_id,
        execution_id=item.execution_id,
        activity_id=item.activity_id,
        failure=failure,
    )


def retry_delay_ms(item: work.ActivityExecute, failure: Failure, now_ms: int) -> int | None:
    """Return the delay before the next attempt; None if the failure is final."""
    plan = item.retry
    if plan is None or item.attempt >= plan.max_attempts:
        return None
    if any(name in plan.never for name in (failure.type_name, *failure.lineage)):
        return None
    exponent = min(item.attempt - 1, 60)
    grown_ms = plan.first_delay_ms * plan.multiplier**exponent
    exact_ms = min(grown_ms + plan.increment_ms * (item.attempt - 1), plan.max_delay_ms)
    delay_ms = max(0, round(exact_ms * (1 + plan.jitter * random.uniform(-1, 1))))
    if item.deadline_ms is not None and now_ms + delay_ms >= item.deadline_ms:
        return None
    return delay_ms


class CrashIsolation:
    """Isolates activities that were running again and again when a worker died.

    Each of them may be the one that kills its worker. So only few of them run at a time: the cause
    soon runs alone when its worker dies, and the others end. Each activity that ends doubles the
    number that may run together. A worker that died starts again with one.
    """

    def __init__(self, max_attempts: int) -> None:
        self._deliveries = max(1, min(_DELIVERIES_TOGETHER, max_attempts // 3))
        self._running: set[str] = set()
        self._room = 1

    def may_run(self, lock_token: str, attempt_count: int) -> bool:
        """Return False if the activity must run later, or on another worker."""
        if attempt_count <= self._deliveries:
            return True
        if len(self._running) >= self._room:
            return False
        self._running.add(lock_token)
        return True

    def ended(self, lock_token: str) -> None:
        if lock_token in self._running:
            self._running.remove(lock_token)
            self._room = min(2 * self._room, _ISOLATED_MAX)
