"""Wraps work items in the records that stores route by. No other module fills routing data."""

from __future__ import annotations

from perdure.model import wire, work
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    OrchestratorMessage,
    StartRouting,
    TimerIdentity,
    WorkerMessage,
)


def envelope(
    item: work.OrchestratorItem, *, visible_at_ms: int | None = None
) -> OrchestratorMessage:
    """Wrap a work item for the orchestrator queue."""
    start: StartRouting | None = None
    timer: TimerIdentity | None = None
    if isinstance(item, (work.StartOrchestration, work.ContinueAsNew)):
        start = StartRouting(
            name=item.name,
            version=item.version,
            parent_instance_id=item.parent.instance_id if item.parent else None,
        )
    elif isinstance(item, work.TimerFired):
        timer = TimerIdentity(execution_id=item.execution_id, timer_id=item.timer_id)
        visible_at_ms = item.fire_at_ms
    return OrchestratorMessage(
        instance_id=item.instance_id,
        kind=type(item).__name__,
        body=wire.encode(item),
        visible_at_ms=visible_at_ms,
        start=start,
        timer=timer,
    )


def activity_envelope(
    item: work.ActivityExecute, *, visible_at_ms: int | None = None, claim: Claim | None = None
) -> WorkerMessage:
    """Wrap an activity for the worker queue."""
    return WorkerMessage(
        identity=ActivityIdentity(
            instance_id=item.instance_id,
            execution_id=item.execution_id,
            activity_id=item.activity_id,
        ),
        name=item.name,
        body=wire.encode(item),
        session_id=item.session_id,
        tag=item.tag,
        visible_at_ms=visible_at_ms,
        claim=claim,
    )
