"""Builds the commit of a turn from its outcome. Pure: no clock, no store, no randomness."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from perdure.engine.outcome import (
    Cancelled,
    Completed,
    ContinuedAsNew,
    Failed,
    TurnOutcome,
    Waiting,
)
from perdure.model import events, wire, work
from perdure.model.envelopes import activity_envelope, envelope
from perdure.model.failures import Category, Failure
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    CustomStatusChange,
    ExecutionMetadata,
    HistoryRecord,
    KvChange,
    KvClear,
    KvClearAll,
    KvSet,
    OrchestratorMessage,
    TimerIdentity,
    TrustedCommit,
    Version,
    WorkerMessage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from perdure.engine.execution import Execution
    from perdure.engine.outcome import KvWrite, ScheduledActivity, TurnResult

_UNCHANGED = ExecutionMetadata()
_SEED_CHARACTERS = 8


class ExecutionFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields of an execution that are the same in each of its commits."""

    instance_id: str
    execution_id: int
    name: str
    version: str
    parent: work.ParentLink | None
    depth: int
    trace: str | None
    seed: str
    """The first characters: enough to tell apart executions with the same id and number."""
    framework_version: Version


def facts_of(
    execution: Execution, parent: work.ParentLink | None, framework_version: Version
) -> ExecutionFacts:
    handler, started = execution.handler, execution.started
    return ExecutionFacts(
        instance_id=execution.instance_id,
        execution_id=execution.execution_id,
        name=handler.name,
        version=handler.version,
        parent=parent,
        depth=started.depth,
        trace=started.trace,
        seed=started.seed[:_SEED_CHARACTERS],
        framework_version=framework_version,
    )


def build_commit(
    facts: ExecutionFacts,
    outcome: TurnOutcome,
    claim_for: Callable[[ScheduledActivity], Claim | None],
    *,
    now_ms: int,
    custom_status: str | None,
    final: tuple[Status, str] | None,
    consumed: Sequence[int],
    completed_work: Sequence[str] = (),
    keep_lock_ms: int | None = None,
) -> tuple[TrustedCommit, list[tuple[work.ActivityExecute, Claim]]]:
    """Return the commit of a turn, and the activities that it hands over already locked.

    ``custom_status`` is the value after the turn, ``final`` the ``final_status`` of the outcome.
    """
    worker_items: list[WorkerMessage] = []
    claimed: list[tuple[work.ActivityExecute, Claim]] = []
    for scheduled in outcome.activities:
        item = _activity_item(facts, scheduled, now_ms)
        claim = claim_for(scheduled)
        worker_items.append(activity_envelope(item, claim=claim))
        if claim is not None:
            claimed.append((item, claim))
    encode = wire.encode
    instance_id, execution_id = facts.instance_id, facts.execution_id
    sends = outcome.timers or outcome.children or outcome.detached or outcome.cancelled_children
    commit = TrustedCommit(
        execution_id=execution_id,
        history_delta=tuple(
            [HistoryRecord(event_id=event.event_id, data=encode(event)) for event in outcome.delta]
        ),
        worker_items=tuple(worker_items),
        orchestrator_items=(
            _outgoing(facts, outcome, custom_status, now_ms) if sends or final else ()
        ),
        metadata=_metadata(facts, outcome, final) if final or outcome.turn == 1 else _UNCHANGED,
        custom_status=(
            CustomStatusChange(value=outcome.custom_status.value) if outcome.custom_status else None
        ),
        kv_changes=(
            tuple([_kv_change(write, now_ms) for write in outcome.kv_writes])
            if outcome.kv_writes
            else ()
        ),
        cancelled_activities=(
            tuple(
                [
                    ActivityIdentity(
                        instance_id=instance_id, execution_id=execution_id, activity_id=activity_id
                    )
                    for activity_id in outcome.cancelled_activities
                ]
            )
            if outcome.cancelled_activities
            else ()
        ),
        cancelled_timers=(
            tuple(
                [
                    TimerIdentity(execution_id=execution_id, timer_id=timer_id)
                    for timer_id in outcome.cancelled_timers
                ]
            )
            if outcome.cancelled_timers
            else ()
        ),
        consumed=tuple(consumed),
        keep_lock_ms=keep_lock_ms,
        settled_work=tuple(completed_work),
    )
    return commit, claimed


def _activity_item(
    facts: ExecutionFacts, scheduled: ScheduledActivity, now_ms: int
) -> work.ActivityExecute:
    event = scheduled.event
    return work.ActivityExecute(
        instance_id=facts.instance_id,
        execution_id=facts.execution_id,
        activity_id=event.event_id,
        name=event.name,
        input=event.input,
        orchestration_name=facts.name,
        orchestration_version=facts.version,
        session_id=event.session_id,
        tag=event.tag,
        retry=scheduled.retry,
        timeout_ms=scheduled.timeout_ms,
        heartbeat_ms=scheduled.heartbeat_ms,
        deadline_ms=(None if scheduled.deadline_ms is None else now_ms + scheduled.deadline_ms),
        trace=facts.trace,
        seed=facts.seed,
    )


def _outgoing(
    facts: ExecutionFacts, outcome: TurnOutcome, custom_status: str | None, now_ms: int
) -> tuple[OrchestratorMessage, ...]:
    messages = [envelope(_timer_item(facts, timer)) for timer in outcome.timers]
    messages += [envelope(_child_item(facts, child)) for child in outcome.children]
    messages += [_detached_message(facts, chained, now_ms) for chained in outcome.detached]
    messages += [
        envelope(
            work.CancelInstance(
                instance_id=child_id,
                reason="parent no longer needs it",
                parent_instance_id=facts.instance_id,
            )
        )
        for child_id in outcome.cancelled_children
    ]
    last = _last_message(facts, outcome.result, custom_status)
    if last is not None:
        messages.append(envelope(last))
    return tuple(messages)


def _timer_item(facts: ExecutionFacts, timer: events.TimerCreated) -> work.TimerFired:
    return work.TimerFired(
        instance_id=facts.instance_id,
        execution_id=facts.execution_id,
        timer_id=timer.event_id,
        fire_at_ms=timer.fire_at_ms,
    )


def _child_item(
    facts: ExecutionFacts, child: events.SubOrchestrationScheduled
) -> work.StartOrchestration:
    return work.StartOrchestration(
        instance_id=child.child_instance_id,
        name=child.name,
        input=child.input,
        version=child.version,
        parent=work.ParentLink(
            instance_id=facts.instance_id,
            execution_id=facts.execution_id,
            event_id=child.event_id,
        ),
        depth=facts.depth + 1,
        trace=facts.trace,
    )


def _detached_message(
    facts: ExecutionFacts, chained: events.OrchestrationChained, now_ms: int
) -> OrchestratorMessage:
    item = work.StartOrchestration(
        instance_id=chained.target_instance_id,
        name=chained.name,
        input=chained.input,
        version=chained.version,
        trace=facts.trace,
    )
    visible_at_ms = now_ms + chained.delay_ms if chained.delay_ms else None
    return envelope(item, visible_at_ms=visible_at_ms)


def _last_message(
    facts: ExecutionFacts, result: TurnResult, custom_status: str | None
) -> work.OrchestratorItem | None:
    """Return the message that ends the execution: to the parent, or to the next execution."""
    parent = facts.parent
    match result:
        case Waiting():
            return None
        case ContinuedAsNew():
            return work.ContinueAsNew(
                instance_id=facts.instance_id,
                name=facts.name,
                execution_id=facts.execution_id + 1,
                input=result.input,
                version=result.version,
                parent=parent,
                depth=facts.depth,
                carried=result.carried,
                custom_status=custom_status,
                trace=facts.trace,
            )
        case Completed():
            if parent is None:
                return None
            return work.SubOrchCompleted(
                instance_id=parent.instance_id,
                execution_id=parent.execution_id,
                event_id=parent.event_id,
                child_instance_id=facts.instance_id,
                result=result.output,
            )
        case Failed() | Cancelled():
            if parent is None:
                return None
            return work.SubOrchFailed(
                instance_id=parent.instance_id,
                execution_id=parent.execution_id,
                event_id=parent.event_id,
                child_instance_id=facts.instance_id,
                failure=failure_in(result),
            )
        case _:
            assert_never(result)


def failure_in(result: Failed | Cancelled) -> Failure:
    if isinstance(result, Failed):
        return result.failure
    return Failure(category=Category.CANCELLED, message=result.reason)


def final_status(result: TurnResult) -> tuple[Status, str] | None:
    """Return status and stored output of an execution that has ended; None while it goes on."""
    match result:
        case Waiting():
            return None
        case Completed():
            return Status.COMPLETED, bytes(result.output).decode()
        case Failed():
            return Status.FAILED, msgspec.json.encode(result.failure).decode()
        case Cancelled():
            return Status.CANCELLED, msgspec.json.encode(failure_in(result)).decode()
        case ContinuedAsNew():
            return Status.CONTINUED_AS_NEW, bytes(result.input).decode()
        case _:
            assert_never(result)


def _metadata(
    facts: ExecutionFacts, outcome: TurnOutcome, final: tuple[Status, str] | None
) -> ExecutionMetadata:
    """Return the metadata of a first turn, or of one that ends the execution."""
    status, output = final or (Status.RUNNING, None)
    if isinstance(outcome.result, ContinuedAsNew):
        version = outcome.result.version  # workers that have this one run the next execution
    elif outcome.turn == 1:
        version = facts.version
    else:
        return ExecutionMetadata(status=status, output=output)
    return ExecutionMetadata(
        status=status,
        output=output,
        name=facts.name,
        version=version,
        parent_instance_id=facts.parent.instance_id if facts.parent else None,
        framework_version=facts.framework_version,
    )


def _kv_change(write: KvWrite, now_ms: int) -> KvChange:
    if write.key is None:
        return KvClearAll()
    if write.value is None:
        return KvClear(key=write.key)
    return KvSet(key=write.key, value=write.value, updated_at_ms=now_ms)
