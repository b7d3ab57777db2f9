"""Gives instances back to the store: released, Blocked with the reason, or without late messages.

Nobody waits for it: when it fails, the lock expires instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from perdure.errors import LockLost, NotFound
from perdure.model.failures import BlockReason
from perdure.providers.items import ExecutionMetadata, TurnCommit
from perdure.runtime.observe import log

if TYPE_CHECKING:
    from perdure.clock import Clock
    from perdure.model.failures import Block
    from perdure.providers.contract import Provider
    from perdure.providers.items import FetchedOrchestration
    from perdure.runtime.background import Background
    from perdure.runtime.intake import Drop
    from perdure.runtime.observe import Observer

_PARKED_MS = {
    BlockReason.POISON: 365 * 86_400_000,  # only other code or an operator lets it go on
    BlockReason.NONDETERMINISM: 60_000,
    BlockReason.UNKNOWN_HANDLER: 5_000,
    BlockReason.UNDECODABLE: 60_000,
    BlockReason.LIMIT: 60_000,
}

_COUNTED = frozenset({BlockReason.POISON, BlockReason.LIMIT})
"""Code that never comes back must not be tried for ever: it holds up everybody. Counting the tries
of the others would only put the count in the place of the reason."""

_REMEMBERED_MAX = 256
_NEXT_EXECUTION_MS = 500
"""Seldom enough for an instance that was damaged, and whose next execution will never begin."""


class Returns:
    """What one orchestration dispatcher gives back."""

    def __init__(
        self, provider: Provider, clock: Clock, observer: Observer, background: Background
    ) -> None:
        self._provider = provider
        self._clock = clock
        self._observer = observer
        self._background = background
        self._errors: dict[str, str] = {}
        """What last went wrong here with instances that were failed."""
        self._remembered: dict[str, Block] = {}

    def release(self, lock_token: str) -> None:
        """Nothing was wrong with it: whoever fetches it next begins with a clean count."""
        self._abandon(lock_token, ignore_attempt=True)

    def fail(self, instance_id: str, lock_token: str, error: BaseException) -> None:
        """A turn could not be computed or committed, and nobody knows why."""
        _make_room(self._errors)
        self._errors[instance_id] = f"{type(error).__name__}: {error}"
        self._abandon(lock_token, delay_ms=1000)

    def park(self, instance_id: str, lock_token: str, block: Block) -> None:
        """It cannot go on with the code at hand."""
        error = self._errors.pop(instance_id, None)
        if error is not None and block.reason is BlockReason.POISON:
            message = f"{block.message}; the last time here: {error}"
            block = msgspec.structs.replace(block, message=message)
        log.warning("%r is blocked: %s: %s", instance_id, block.reason, block.message)
        self._observer.blocked(block.reason)
        self._background.spawn_quietly(self._park(instance_id, lock_token, block))

    async def _park(self, instance_id: str, lock_token: str, block: Block) -> None:
        try:
            await self._provider.abandon_orchestration_item(
                lock_token,
                _PARKED_MS[block.reason],
                ignore_attempt=block.reason not in _COUNTED,
                block=msgspec.structs.replace(block, since_ms=self._clock.now_ms()),
            )
        except LockLost:
            if block.reason is BlockReason.LIMIT:
                # The turn kept the event loop from renewing its own lock.
                self.remember(instance_id, block)
            raise

    def remember(self, instance_id: str, block: Block) -> None:
        """Block it when it comes again: another try would only hold up everybody once more."""
        _make_room(self._remembered)
        self._remembered[instance_id] = block

    def park_remembered(self, fetched: FetchedOrchestration) -> bool:
        block = self._remembered.pop(fetched.item.instance_id, None)
        if block is not None:
            self.park(fetched.item.instance_id, fetched.lock_token, block)
        return block is not None

    def drop(self, fetched: FetchedOrchestration, verdict: Drop) -> None:
        """It has ended: what still came for it is consumed."""
        self._background.spawn_quietly(self._drop(fetched, verdict))

    async def _drop(self, fetched: FetchedOrchestration, verdict: Drop) -> None:
        instance_id = fetched.item.instance_id
        if await self._goes_on(instance_id):
            # Its next execution is to begin, and will read it: the start is not visible yet, since
            # the clock was set back, or the fetch had looked at the clock before it was written.
            await self._provider.abandon_orchestration_item(
                fetched.lock_token, _NEXT_EXECUTION_MS, ignore_attempt=True
            )
            return
        if verdict.unread:
            log.warning("%r has ended: nobody reads %s", instance_id, ", ".join(verdict.unread))
        else:  # a completion, timer or cancellation that crossed the end: somebody always does
            log.debug("%r has ended before %d messages", instance_id, len(verdict.message_ids))
        commit = TurnCommit(
            execution_id=verdict.execution_id,
            orchestrator_items=tuple(verdict.replies),
            consumed=tuple(verdict.message_ids),
            metadata=ExecutionMetadata(),
        )
        await self._provider.ack_orchestration_item(fetched.lock_token, commit)

    async def _goes_on(self, instance_id: str) -> bool:
        """Under its lock: whether an instance whose last execution has ended is alive."""
        admin = self._provider.admin()
        if admin is None:
            return False
        try:
            return not (await admin.get_instance_info(instance_id)).status.is_final
        except NotFound:
            return False

    def _abandon(
        self, lock_token: str, *, delay_ms: int | None = None, ignore_attempt: bool = False
    ) -> None:
        self._background.spawn_quietly(
            self._provider.abandon_orchestration_item(
                lock_token, delay_ms, ignore_attempt=ignore_attempt
            )
        )


def _make_room(remembered: dict[str, Any]) -> None:
    if len(remembered) >= _REMEMBERED_MAX:
        del remembered[next(iter(remembered))]
