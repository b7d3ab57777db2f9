"""Builds the commit of a turn from its outcome. Pure: no clock, no store, no randomness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.authoring.definitions import parse_version
from perdure.errors import InternalError
from perdure.model import events, wire, work
from perdure.model.failures import Category, Failure
from perdure.model.status import Status
from perdure.model.wire import activity_envelope, end_notices, envelope
from perdure.model.work import activity_item
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    CustomStatusChange,
    ExecutionMetadata,
    KvChange,
    KvClear,
    KvClearAll,
    KvSet,
    OrchestratorMessage,
    TimerIdentity,
    TrustedCommit,
    WorkerMessage,
)
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from perdure.engine.execution import Execution
    from perdure.engine.outcome import ScheduledActivity, TurnOutcome
    from perdure.runtime.turns import Turn

FRAMEWORK_VERSION = parse_version(VERSION)
_UNCHANGED = ExecutionMetadata()


def build_commit(
    turn: Turn,
    claim_for: Callable[[ScheduledActivity], Claim | None],
    keep_lock_ms: int | None,
) -> tuple[TrustedCommit, list[tuple[work.ActivityExecute, Claim]]]:
    """Return the commit of a turn, and the activities that it hands over already locked."""
    execution, outcome, now_ms = turn.live.execution, turn.outcome, turn.now_ms
    started = execution.started
    is_final = turn.final is not None
    # Most turns have few of these, and a comprehension of nothing costs a call on Python 3.11.
    worker_items, claimed = _worker_items(turn, claim_for) if outcome.activities else ((), [])
    sends = (
        outcome.timers
        or outcome.children
        or outcome.detached
        or outcome.sent
        or outcome.cancelled_children
    )
    outgoing = _outgoing(turn) if sends or is_final else ()
    if turn.starts and (replies := replies_to(turn.starts, work.parent_link(started))):
        outgoing = (*outgoing, *replies)
        # A kept lock is fenced by the history: a commit without events must release its lock.
        keep_lock_ms = keep_lock_ms if outcome.delta else None
    if worker_items and not outcome.delta:  # activities of a retried execution, sent again
        keep_lock_ms = None
    commit = TrustedCommit(
        execution_id=execution.execution_id,
        history_delta=tuple(map(wire.record_of, outcome.delta)),
        worker_items=worker_items,
        orchestrator_items=outgoing,
        metadata=_metadata(turn) if is_final or outcome.turn == 1 else _UNCHANGED,
        custom_status=(
            CustomStatusChange(value=outcome.custom_status.status)
            if outcome.custom_status
            else None
        ),
        kv_changes=(
            tuple([_kv_change(event, now_ms) for event in outcome.kv_writes])
            if outcome.kv_writes
            else ()
        ),
        cancelled_activities=(
            tuple(
                [
                    ActivityIdentity(
                        instance_id=execution.instance_id,
                        execution_id=execution.execution_id,
                        activity_id=activity_id,
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
                    TimerIdentity(execution_id=execution.execution_id, timer_id=timer_id)
                    for timer_id in outcome.cancelled_timers
                ]
            )
            if outcome.cancelled_timers
            else ()
        ),
        consumed=tuple(turn.consumed),
        returned=(
            tuple([arrival.message_id for arrival in turn.postponed if arrival.message_id])
            if turn.postponed and keep_lock_ms is None
            else ()
        ),
        keep_lock_ms=keep_lock_ms,
        settled_work=tuple(turn.completed_work),
        after_event_id=0 if outcome.delta else execution.event_count,
    )
    return commit, claimed


def _worker_items(
    turn: Turn, claim_for: Callable[[ScheduledActivity], Claim | None]
) -> tuple[tuple[WorkerMessage, ...], list[tuple[work.ActivityExecute, Claim]]]:
    """Return the messages of the scheduled activities, and those activities that are claimed."""
    started, now_ms = turn.live.execution.started, turn.now_ms
    messages: list[WorkerMessage] = []
    claimed: list[tuple[work.ActivityExecute, Claim]] = []
    for scheduled in turn.outcome.activities:
        deadline_ms = scheduled.deadline_ms
        item = activity_item(
            scheduled.event,
            started,
            scheduled.retry,
            scheduled.timeout_ms,
            scheduled.heartbeat_ms,
            None if deadline_ms is None else now_ms + deadline_ms,
        )
        claim = claim_for(scheduled)
        messages.append(activity_envelope(item, claim=claim))
        if claim is not None:
            claimed.append((item, claim))
    return tuple(messages), claimed


def _outgoing(turn: Turn) -> tuple[OrchestratorMessage, ...]:
    started, outcome = turn.live.execution.started, turn.outcome
    instance_id = started.instance_id
    messages = [envelope(work.timer_item(timer)) for timer in outcome.timers]
    messages += [envelope(work.child_item(child, started)) for child in outcome.children]
    messages += [_detached_message(started, chained, turn.now_ms) for chained in outcome.detached]
    messages += [envelope(_sent_item(sent)) for sent in outcome.sent]
    messages += [
        envelope(
            work.CancelInstance(
                instance_id=child_id,
                reason="parent no longer needs it",
                parent_instance_id=instance_id,
            )
        )
        for child_id in outcome.cancelled_children
    ]
    last = _last_message(turn.live.execution, outcome)
    if last is not None:
        messages.append(envelope(last))
    if outcome.cancel_reason is not None:
        cancel = work.CancelInstance(instance_id=instance_id, reason=outcome.cancel_reason)
        messages.append(envelope(cancel))
    if turn.final is not None and turn.final[0].is_final:
        messages += end_notices(outcome.watchers, instance_id, *turn.final)
    return tuple(messages)


def _sent_item(sent: events.MessageSent) -> work.OrchestratorItem:
    target, name, data = sent.target_instance_id, sent.name, sent.data
    match sent.kind:
        case "event":
            return work.ExternalRaised(instance_id=target, name=name, data=data)
        case "message":
            return work.QueueMessage(instance_id=target, name=name, data=data)
        case _:
            return work.CancelInstance(instance_id=target, reason=msgspec.json.decode(data))


def _detached_message(
    started: events.OrchestrationStarted, chained: events.OrchestrationChained, now_ms: int
) -> OrchestratorMessage:
    item = work.StartOrchestration(
        instance_id=chained.target_instance_id,
        name=chained.name,
        input=chained.input,
        version=chained.version,
        trace=started.trace,
        scheduled_for_ms=chained.scheduled_for_ms,
    )
    visible_at_ms = now_ms + chained.delay_ms if chained.delay_ms else None
    return envelope(item, visible_at_ms=visible_at_ms)


def _last_message(execution: Execution, outcome: TurnOutcome) -> work.OrchestratorItem | None:
    """Return the message that ends the execution: to the parent, or to the next execution."""
    started, end = execution.started, outcome.end
    parent = work.parent_link(started)
    if isinstance(end, events.OrchestrationContinuedAsNew):
        return work.ContinueAsNew(
            instance_id=execution.instance_id,
            name=execution.handler.name,
            execution_id=execution.execution_id + 1,
            input=end.input,
            version=end.version,
            parent=parent,
            depth=started.depth,
            carried=tuple(outcome.carried),
            custom_status=execution.custom_status,
            trace=started.trace,
            watchers=tuple(outcome.watchers),
            scheduled_for_ms=started.scheduled_for_ms,
        )
    if parent is None or end is None:
        return None
    if isinstance(end, events.OrchestrationCompleted):
        return work.child_completed(parent, execution.instance_id, end.output)
    return work.child_failed(parent, execution.instance_id, _failure_of(end))


def _failure_of(end: events.Terminal) -> Failure:
    """Return the failure of an execution that has not completed."""
    match end:
        case events.OrchestrationFailed():
            return end.failure
        case events.OrchestrationCancelled():
            return Failure(category=Category.CANCELLED, message=end.reason)
        case events.OrchestrationTerminated():
            return Failure(category=Category.TERMINATED, message=end.reason)
        case _:
            raise InternalError(f"{type(end).__name__} is no failure")


def ending_of(last: events.Event | events.Terminal) -> tuple[Status, str] | None:
    """Return status and stored output of an execution with this last event; None if it goes on."""
    if not isinstance(last, events.Terminal):
        return None
    status = work.ENDS[type(last)]
    match last:
        case events.OrchestrationCompleted():
            return status, bytes(last.output).decode()
        case events.OrchestrationContinuedAsNew():
            return status, bytes(last.input).decode()
        case _:
            return status, msgspec.json.encode(_failure_of(last)).decode()


def _metadata(turn: Turn) -> ExecutionMetadata:
    """Return the metadata of a first turn, or of one that ends the execution."""
    status, output = turn.final or (Status.RUNNING, None)
    execution, outcome = turn.live.execution, turn.outcome
    if isinstance(outcome.end, events.OrchestrationContinuedAsNew):
        version = outcome.end.version  # workers that have this one run the next execution
    elif outcome.turn == 1:
        version = execution.handler.version
    else:
        return ExecutionMetadata(status=status, output=output)
    return ExecutionMetadata(
        status=status,
        output=output,
        name=execution.handler.name,
        version=version,
        parent_instance_id=execution.started.parent_instance_id,
        framework_version=FRAMEWORK_VERSION,
    )


def _kv_change(event: events.StateChange, now_ms: int) -> KvChange:
    match event:
        case events.KeyValueSet():
            return KvSet(key=event.key, value=event.value, updated_at_ms=now_ms)
        case events.KeyValueCleared():
            return KvClear(key=event.key)
        case events.KeyValuesCleared():
            return KvClearAll()


def replies_to(
    items: Iterable[work.OrchestratorItem], parent: work.ParentLink | None
) -> list[OrchestratorMessage]:
    """Return answers to parents whose child id is in use: without one they would wait for ever."""
    replies: list[OrchestratorMessage] = []
    for item in items:
        if isinstance(item, work.StartOrchestration) and item.parent not in {None, parent}:
            assert item.parent is not None
            failure = Failure(
                type_name="AlreadyExists",
                lineage=("AlreadyExists", "PerdureError"),
                message=f"an instance with the id {item.instance_id!r} exists already",
            )
            replies.append(envelope(work.child_failed(item.parent, item.instance_id, failure)))
    return replies
