"""Ending an instance by an operator's word, without running any of its code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.client.messages import envelope
from perdure.errors import CorruptData, InstanceFinished, NotFound
from perdure.model import events, wire, work
from perdure.model.failures import Category, Failure
from perdure.model.status import Status
from perdure.providers.items import (
    EnqueueCondition,
    ExecutionMetadata,
    HistoryRecord,
    OrchestratorMessage,
    TurnCommit,
)

if TYPE_CHECKING:
    from perdure.clock import Clock
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.items import OrchestrationItem

_LOCK_MS = 10_000


async def terminate(
    provider: Provider, admin: ProviderAdmin, instance_id: str, reason: str, clock: Clock
) -> None:
    """Take the lock away from whoever holds it and commit the end. Works on corrupt histories."""
    info = await admin.get_instance_info(instance_id)
    if info.status.is_final:
        raise InstanceFinished(f"{instance_id!r} has ended already: {info.status}")
    try:
        fetched = await admin.lock_instance(instance_id, _LOCK_MS)
    except NotFound:
        # Its start is still queued: the cancellation joins it and it ends before it begins.
        cancel = work.CancelInstance(instance_id=instance_id, reason=reason or "terminated")
        await provider.enqueue_for_orchestrator(envelope(cancel), condition=EnqueueCondition.ALIVE)
        return
    try:
        commit = await _final_commit(admin, fetched.item, reason, clock.now_ms())
    except BaseException:
        await provider.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)
        raise
    await provider.ack_orchestration_item(fetched.lock_token, commit)


async def _final_commit(
    admin: ProviderAdmin, item: OrchestrationItem, reason: str, now_ms: int
) -> TurnCommit:
    failure = Failure(category=Category.TERMINATED, message=reason)
    last_event_id = max((record.event_id for record in item.history), default=0)
    last_turn, parent = _last_turn_and_parent(item)
    event = events.OrchestrationTerminated(
        event_id=last_event_id + 1,
        instance_id=item.instance_id,
        execution_id=item.execution_id,
        timestamp_ms=now_ms,
        turn=last_turn + 1,
        reason=reason,
    )
    queued_work = await admin.list_work(item.instance_id, limit=100_000)
    messages = await admin.list_messages(item.instance_id, limit=100_000)
    outgoing = await _cancelled_children(admin, item.instance_id)
    if parent is not None:
        outgoing.append(
            envelope(
                work.SubOrchFailed(
                    instance_id=parent.instance_id,
                    execution_id=parent.execution_id,
                    event_id=parent.event_id,
                    child_instance_id=item.instance_id,
                    failure=failure,
                )
            )
        )
    return TurnCommit(
        execution_id=item.execution_id,
        history_delta=(HistoryRecord(event_id=event.event_id, data=wire.encode(event)),),
        orchestrator_items=tuple(outgoing),
        metadata=ExecutionMetadata(
            status=Status.TERMINATED, output=msgspec.json.encode(failure).decode()
        ),
        cancelled_activities=tuple(queued.message.identity for queued in queued_work),
        cancelled_timers=tuple(
            queued.message.timer for queued in messages if queued.message.timer is not None
        ),
    )


def _last_turn_and_parent(item: OrchestrationItem) -> tuple[int, work.ParentLink | None]:
    try:
        history = wire.decode_history(record.data for record in item.history)
    except CorruptData:
        return 0, None
    started = history[0] if history else None
    parent = None
    if isinstance(started, events.OrchestrationStarted):
        parent = parent_link(started)
    return max((event.turn for event in history), default=0), parent


def parent_link(started: events.OrchestrationStarted) -> work.ParentLink | None:
    """Where this execution reports its end."""
    if (
        started.parent_instance_id is None
        or started.parent_execution_id is None
        or started.parent_event_id is None
    ):
        return None
    return work.ParentLink(
        instance_id=started.parent_instance_id,
        execution_id=started.parent_execution_id,
        event_id=started.parent_event_id,
    )


async def _cancelled_children(admin: ProviderAdmin, instance_id: str) -> list[OrchestratorMessage]:
    outgoing: list[OrchestratorMessage] = []
    for child_id in await admin.list_children(instance_id):
        info = await admin.get_instance_info(child_id)
        if not info.status.is_final:
            cancel = work.CancelInstance(instance_id=child_id, reason="parent was terminated")
            outgoing.append(envelope(cancel))
    return outgoing
