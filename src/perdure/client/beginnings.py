"""How an execution begins: the first event that its start message becomes, and what that says."""

from __future__ import annotations

import msgspec

from perdure.model import events, work
from perdure.noise import unguessable


def started_by(
    start: work.StartOrchestration | work.ContinueAsNew,
    *,
    version: str,
    framework_version: str,
    now_ms: int,
) -> events.OrchestrationStarted:
    """The first event of the execution that this message begins."""
    parent = start.parent
    # Python makes a dict of more than 15 arguments, which takes longer than everything else here.
    started = events.OrchestrationStarted(
        event_id=1,
        instance_id=start.instance_id,
        execution_id=1,
        timestamp_ms=now_ms,
        turn=1,
        name=start.name,
        version=version,
        input=start.input,
        framework_version=framework_version,
        seed=unguessable(),
        parent_instance_id=parent.instance_id if parent else None,
        parent_execution_id=parent.execution_id if parent else None,
        parent_event_id=parent.event_id if parent else None,
        depth=start.depth,
        trace=start.trace,
    )
    if isinstance(start, work.StartOrchestration):
        return started
    return msgspec.structs.replace(
        started, execution_id=start.execution_id, initial_custom_status=start.custom_status
    )


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
