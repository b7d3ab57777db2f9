"""Attempts of activities: their state, the call, the outcome, and when the next one may run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.authoring.activity_context import ActivityInfo, enter_scope
from perdure.engine.user_code import is_interruption
from perdure.errors import CannotUnwrap, LockLost, PerdureError, ProviderError, UsageError
from perdure.model import work
from perdure.providers.envelopes import envelope
from perdure.runtime.background import Backoff
from perdure.runtime.metrics import log
from perdure.runtime.processes import NotBegun, RecordedFailure, failure_from

if TYPE_CHECKING:  # these structs are never encoded, so their fields need no types at run time
    from perdure.authoring import Activity
    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.model.failures import Failure
    from perdure.providers.contract import Provider
    from perdure.providers.records import OrchestratorMessage
    from perdure.runtime.executors import Executors, TimeLimit  # noqa: TC004

Completion = work.ActivityCompleted | work.ActivityFailed

_DELIVERIES_TOGETHER: Final = 3
"""An activity is isolated after so many deliveries: workers die for other reasons, too."""
_ISOLATED_MAX: Final = 1000


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
    _executors: Executors
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
            worker_id=self._executors.worker_id,
            seed=item.seed,
        )

    def heartbeat(self, details: object) -> None:
        executors = self._executors
        raw = executors.codec.encode(details, where=f"heartbeat of {self.running.item.name}")
        self.running.heartbeat = bytes(raw).decode()
        if self._is_heartbeat_seen:  # otherwise a call of _on_heartbeat is on its way already
            self._is_heartbeat_seen = False
            with contextlib.suppress(RuntimeError):  # the loop is closed
                executors.loop.call_soon_threadsafe(self._on_heartbeat)

    def _on_heartbeat(self) -> None:
        self._is_heartbeat_seen = True
        if self.heartbeat_limit is not None:
            self.heartbeat_limit.restart()
        self._executors.send_heartbeat(self.running)

    def last_heartbeat(self, type_: Any) -> Any:
        heartbeat = self.running.last_heartbeat
        if heartbeat is None:
            return None
        return self._executors.codec.decode(msgspec.Raw(heartbeat), type_, where="heartbeat")

    def is_cancelled(self) -> bool:
        return self._cancelled

    def connection(self) -> Any:
        if self.store_connection is None:
            raise UsageError(
                f"activity {self.running.item.name!r} has no transaction; "
                "declare it with @activity(transactional=True)"
            )
        return self.store_connection

    def cancel(self) -> None:
        self._cancelled = True


class Attempts:
    """Calls the functions of one runtime's activities, each attempt once."""

    def __init__(
        self, provider: Provider, executors: Executors, codec: Codec, clock: Clock
    ) -> None:
        self._provider = provider
        self._executors = executors
        self._codec = codec
        self._clock = clock
        self.is_stopping = False

    async def run(
        self, running: RunningActivity, activity: Activity[..., Any]
    ) -> tuple[Failure | None, msgspec.Raw | None]:
        """Call the user's function; return its failure, or its encoded result.

        Both are None if the outcome is not wanted any more or is committed already. Raises
        CannotUnwrap and NotBegun if the function cannot be called here, and CancelledError if the
        worker stopped it.
        """
        item = running.item
        try:
            args, kwargs = activity.signature.decode_arguments(item.input, self._codec)
        except CannotUnwrap:
            raise
        except Exception as error:  # noqa: BLE001 - a class of the user's can raise anything
            return failure_from(error, item.attempt), None
        try:
            scope = running.scope = AttemptScope(running, self._executors)
            running.has_begun = True
            # Every attempt has its own context, which ends with it: there is nothing to reset.
            enter_scope(scope)
            if activity.settings.transactional:
                await self._run_in_transaction(scope, activity, args, kwargs)
                return None, None
            value = await self._executors.run(scope, activity, args, kwargs)
            return None, activity.signature.encode_result(value, self._codec)
        except NotBegun:
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
            return failure_from(error, item.attempt), None

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
        call = self._executors.in_transaction(scope, activity, args, kwargs)

        def complete(connection: Any) -> OrchestratorMessage:
            try:
                result = activity.signature.encode_result(call(connection), self._codec)
            except PerdureError as error:
                # Recorded here, so that it is not taken for an error of the store below.
                raise RecordedFailure(failure_from(error, item.attempt)) from error
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
    exact_ms = min(plan.first_delay_ms * plan.multiplier**exponent, plan.max_delay_ms)
    delay_ms = max(0, round(exact_ms * (1 + plan.jitter * random.uniform(-1, 1))))
    if item.deadline_ms is not None and now_ms + delay_ms >= item.deadline_ms:
        return None
    return delay_ms


class CrashIsolation:
    """Isolates activities that were running again and again when a worker died.

    Each of them may be the one that kills its worker. So few of them run at a time: then the cause
    is soon alone when its worker dies, and the others come to their end. Each that ends doubles the
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
