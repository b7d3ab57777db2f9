"""Letting an instance try again: a Blocked one goes on, a failed one starts over under its id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.client.beginnings import parent_link
from perdure.client.messages import envelope
from perdure.errors import CorruptData, InstanceFinished, InstanceStillRunning
from perdure.model import events, wire, work
from perdure.model.status import Status
from perdure.providers.items import ExecutionMetadata, TurnCommit

if TYPE_CHECKING:
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.items import OrchestrationItem

_LOCK_MS = 10_000
_ENDED_BADLY = frozenset({Status.FAILED, Status.CANCELLED, Status.TERMINATED})
_GOES_ON = frozenset({Status.BLOCKED, Status.SUSPENDED})


async def retry(provider: Provider, admin: ProviderAdmin, instance_id: str) -> int:
    """Let it try again; returns the execution that goes on.

    A Blocked instance goes on where it stands. One that Failed or was stopped begins its next
    execution with the same input: its past executions stay, its state too. Raises InstanceFinished
    for a Completed one and InstanceStillRunning for one that needs no help.
    """
    info = await admin.get_instance_info(instance_id)
    if info.status in _GOES_ON:
        await admin.resume_instance(instance_id)
        return info.execution_id
    if info.status is Status.COMPLETED:
        raise InstanceFinished(f"{instance_id!r} has completed; rerun it to do it once more")
    if info.status not in _ENDED_BADLY:
        raise InstanceStillRunning(f"{instance_id!r} is {info.status}: there is nothing to retry")
    fetched = await admin.lock_instance(instance_id, _LOCK_MS)
    try:
        next_start = _next_start(fetched.item, info.custom_status)
    except BaseException:
        await provider.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)
        raise
    # From this commit on the instance is alive again: nobody may see its old end in between.
    commit = TurnCommit(
        execution_id=fetched.item.execution_id,
        orchestrator_items=(envelope(next_start),),
        metadata=ExecutionMetadata(
            status=Status.CONTINUED_AS_NEW, output=bytes(next_start.input).decode()
        ),
    )
    await provider.ack_orchestration_item(fetched.lock_token, commit)
    return next_start.execution_id


def _next_start(item: OrchestrationItem, custom_status: str | None) -> work.ContinueAsNew:
    if item.history_error is not None or not item.history:
        raise CorruptData("retry", item.history_error or f"{item.instance_id!r} has no history")
    history = wire.decode_history(record.data for record in item.history)
    started = history[0]
    if not isinstance(started, events.OrchestrationStarted):
        raise CorruptData("retry", f"the history begins with {type(started).__name__}")
    if not isinstance(history[-1], events.TERMINAL_KINDS):
        raise InstanceStillRunning(f"{item.instance_id!r} is running again; look at it first")
    if isinstance(history[-1], events.OrchestrationCompleted):
        raise InstanceFinished(f"{item.instance_id!r} has completed meanwhile")
    return work.ContinueAsNew(
        instance_id=item.instance_id,
        name=started.name,
        execution_id=item.execution_id + 1,
        input=started.input,
        version=started.version or None,  # terminated before anybody chose one
        parent=parent_link(started),
        depth=started.depth,
        custom_status=custom_status,
        trace=started.trace,
    )
