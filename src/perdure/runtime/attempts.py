"""One attempt of an activity: its arguments, the call, and what came of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.authoring.activity_context import enter_scope
from perdure.client.messages import envelope
from perdure.errors import CannotUnwrap, LockLost, PerdureError, ProviderError
from perdure.interruption import is_interruption
from perdure.model import work
from perdure.runtime.failures import NotBegun, RecordedFailure, failure_from
from perdure.runtime.observe import log
from perdure.runtime.retrying import Backoff
from perdure.runtime.scope import RunningScope

if TYPE_CHECKING:
    from perdure.authoring import Activity
    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.model.failures import Failure
    from perdure.providers.contract import Provider
    from perdure.providers.items import OrchestratorMessage
    from perdure.runtime.executors import Executors
    from perdure.runtime.running import Running


class Attempts:
    """Runs the functions of one runtime's activities, each call once."""

    def __init__(
        self, provider: Provider, executors: Executors, codec: Codec, clock: Clock
    ) -> None:
        self._provider = provider
        self._executors = executors
        self._codec = codec
        self._clock = clock
        self.is_stopping = False

    async def run(
        self, running: Running, activity: Activity[..., Any]
    ) -> tuple[Failure | None, msgspec.Raw | None]:
        """One run of the user's function: its encoded result, or how it failed.

        Neither: nobody wants to know, or it is settled already. Raises CannotUnwrap and NotBegun if
        it cannot be called from here, and CancelledError if it was cut off.
        """
        item = running.item
        try:
            args, kwargs = activity.signature.decode_arguments(item.input, self._codec)
        except CannotUnwrap:
            raise
        except Exception as error:  # noqa: BLE001 - also what a class of the user's raises
            return failure_from(error, item.attempt), None
        try:
            scope = running.scope = RunningScope(running, self._executors)
            running.has_begun = True
            # Every attempt has a context of its own, which ends with it: nothing to reset.
            enter_scope(scope)
            if activity.settings.transactional:
                await self._settle_in_transaction(scope, activity, args, kwargs)
                return None, None
            value = await self._executors.run(scope, activity, args, kwargs)
            return None, activity.signature.encode_result(value, self._codec)
        except NotBegun:
            raise
        except BaseException as error:
            if is_interruption(error):
                raise
            if self._is_cut_off(running, error):
                raise asyncio.CancelledError("the runtime stops") from error
            if isinstance(error, asyncio.CancelledError) and running.cancelled:
                return None, None
            if isinstance(error, RecordedFailure):
                return msgspec.structs.replace(error.failure, attempts=item.attempt), None
            return failure_from(error, item.attempt), None

    def _is_cut_off(self, running: Running, error: BaseException) -> bool:
        """Whether the attempt has no outcome because the worker stops."""
        if running.cancelled:
            return False
        # Whatever the code makes of its interruption: what it raises then is no outcome.
        return running.is_cut_off or (
            self.is_stopping and isinstance(error, asyncio.CancelledError)
        )

    async def _settle_in_transaction(
        self,
        scope: RunningScope,
        activity: Activity[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        item, lock_token = scope.running.item, scope.running.lock_token
        call = self._executors.in_transaction(scope, activity, args, kwargs)

        def settle(connection: Any) -> OrchestratorMessage:
            try:
                result = activity.signature.encode_result(call(connection), self._codec)
            except PerdureError as error:
                # An error of the store means one of the store itself, below.
                raise RecordedFailure(failure_from(error, item.attempt)) from error
            return envelope(completed(item, result))

        backoff = Backoff()
        while True:
            try:
                await self._provider.settle_in_transaction(lock_token, settle)
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
