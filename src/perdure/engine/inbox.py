"""Turns each message into a history event, and applies each such event to the code.

A live turn does both. A replayed turn has the events already, so it only applies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.engine.operations import ACTIVITY, CHILD, TIMER, Family
from perdure.model import events, work
from perdure.model.failures import activity_error, child_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from perdure.engine.journal import Journal
    from perdure.engine.recorder import CodeRecorder


def add_beginning(
    started: events.OrchestrationStarted,
    carried: Iterable[work.CarriedMessage],
    journal: Journal,
) -> None:
    """Add the first event, and the arrivals that the previous execution did not consume."""
    journal.delta.append(started)
    journal.last_event_id = started.event_id
    for message in carried:
        kind = events.QueueEventDelivered if message.mailbox else events.ExternalEvent
        journal.arrive(kind, name=message.name, data=message.data)


def add_messages(
    items: Iterable[work.OrchestratorItem], journal: Journal, recorder: CodeRecorder
) -> Sequence[str]:
    """Add an event for each message of a turn; return a line for each message that is ignored."""
    ignored: list[str] | None = None
    for item in items:
        reason = _ADD[type(item)](item, journal, recorder)
        if reason is not None:
            ignored = ignored or []
            ignored.append(f"{type(item).__name__}{reason}")
    return ignored or ()


def _add_activity_result(
    item: work.ActivityCompleted, journal: Journal, recorder: CodeRecorder
) -> str | None:
    unwanted = _unwanted(item, item.activity_id, ACTIVITY, recorder)
    if unwanted is None:
        journal.arrive_completed(item.activity_id, item.result, item.attempts)
    return unwanted


def _add_activity_failure(
    item: work.ActivityFailed, journal: Journal, recorder: CodeRecorder
) -> str | None:
    unwanted = _unwanted(item, item.activity_id, ACTIVITY, recorder)
    if unwanted is None:
        journal.arrive(
            events.ActivityFailed, source_event_id=item.activity_id, failure=item.failure
        )
    return unwanted


def _add_timer(item: work.TimerFired, journal: Journal, recorder: CodeRecorder) -> str | None:
    unwanted = _unwanted(item, item.timer_id, TIMER, recorder)
    if unwanted is None:
        if item.timer_id not in recorder.operations.open:
            return _too_late(item.timer_id)
        journal.arrive(events.TimerFired, source_event_id=item.timer_id, fire_at_ms=item.fire_at_ms)
    return unwanted


def _add_child_result(
    item: work.SubOrchCompleted, journal: Journal, recorder: CodeRecorder
) -> str | None:
    unwanted = _unwanted(item, item.event_id, CHILD, recorder)
    if unwanted is None:
        journal.arrive(
            events.SubOrchestrationCompleted, source_event_id=item.event_id, result=item.result
        )
    return unwanted


def _add_child_failure(
    item: work.SubOrchFailed, journal: Journal, recorder: CodeRecorder
) -> str | None:
    unwanted = _unwanted(item, item.event_id, CHILD, recorder)
    if unwanted is None:
        journal.arrive(
            events.SubOrchestrationFailed, source_event_id=item.event_id, failure=item.failure
        )
    return unwanted


def _add_event(item: work.ExternalRaised, journal: Journal, _: CodeRecorder) -> None:
    journal.arrive(events.ExternalEvent, name=item.name, data=item.data)


def _add_message(item: work.QueueMessage, journal: Journal, _: CodeRecorder) -> None:
    journal.arrive(events.QueueEventDelivered, name=item.name, data=item.data)


def _add_cancellation(
    item: work.CancelInstance, journal: Journal, recorder: CodeRecorder
) -> str | None:
    parent_id = item.parent_instance_id
    if parent_id is not None and parent_id != journal.parent_instance_id:
        return f": {parent_id!r} is not its parent"
    came = (type(event) is events.OrchestrationCancelRequested for event in journal.delta)
    if recorder.cancel_reason is not None or any(came):
        return ": cancellation was requested before"
    journal.arrive(events.OrchestrationCancelRequested, reason=item.reason)
    return None


def _add_start(
    _: work.StartOrchestration | work.ContinueAsNew, journal: Journal, __: CodeRecorder
) -> str | None:
    # The start message of the first turn is its first event already.
    return ": the instance runs already" if journal.turn > 1 else None


def _unwanted(
    item: Any, source_event_id: int, family: Family, recorder: CodeRecorder
) -> str | None:
    """Return why a completion is ignored, or None if it is the first one for its open step.

    Raise Nondeterminism for a completion without a step.
    """
    if item.execution_id != recorder.execution_id:
        return (
            f" for event {source_event_id}: it belongs to execution {item.execution_id}, "
            f"this is {recorder.execution_id}"
        )
    if not recorder.operations.accept(source_event_id, family, item):
        return _too_late(source_event_id)
    return None


def _too_late(source_event_id: int) -> str:
    return f" for event {source_event_id}: it was completed or given up before"


_ADD: Final[
    Mapping[type[work.OrchestratorItem], Callable[[Any, Journal, CodeRecorder], str | None]]
] = {
    work.StartOrchestration: _add_start,
    work.ContinueAsNew: _add_start,
    work.ActivityCompleted: _add_activity_result,
    work.ActivityFailed: _add_activity_failure,
    work.TimerFired: _add_timer,
    work.ExternalRaised: _add_event,
    work.QueueMessage: _add_message,
    work.SubOrchCompleted: _add_child_result,
    work.SubOrchFailed: _add_child_failure,
    work.CancelInstance: _add_cancellation,
}


COMPLETION_FAMILIES: Final[Mapping[type[events.Event], Family]] = {
    events.ActivityCompleted: Family.ACTIVITY,
    events.ActivityFailed: Family.ACTIVITY,
    events.TimerFired: Family.TIMER,
    events.SubOrchestrationCompleted: Family.CHILD,
    events.SubOrchestrationFailed: Family.CHILD,
}


def _start(recorder: CodeRecorder, event: events.OrchestrationStarted) -> None:
    args, kwargs = recorder.handler.signature.decode_arguments(event.input, recorder.codec)
    recorder.loop.start_root(recorder.handler.fn(*args, **kwargs))


def _complete_activity(recorder: CodeRecorder, event: events.ActivityCompleted) -> None:
    operation = recorder.operations.open.pop(event.source_event_id, None)
    if operation is not None:
        value = operation.definition.signature.decode_result(event.result, recorder.codec)
        operation.target.set_result(value)


def _fail_activity(recorder: CodeRecorder, event: events.ActivityFailed) -> None:
    operation = recorder.operations.open.pop(event.source_event_id, None)
    if operation is not None:
        operation.target.set_exception(activity_error(event.failure, operation.event.name))


def _complete_child(recorder: CodeRecorder, event: events.SubOrchestrationCompleted) -> None:
    operation = recorder.operations.open.pop(event.source_event_id, None)
    if operation is not None and not operation.target.done():
        value = operation.definition.signature.decode_result(event.result, recorder.codec)
        operation.target.set_result(value)


def _fail_child(recorder: CodeRecorder, event: events.SubOrchestrationFailed) -> None:
    operation = recorder.operations.open.pop(event.source_event_id, None)
    if operation is not None and not operation.target.done():
        operation.target.set_exception(child_error(event.failure, operation.event.name))


def _fire_timer(recorder: CodeRecorder, event: events.TimerFired) -> None:
    operation = recorder.operations.open.pop(event.source_event_id, None)
    if operation is not None:
        recorder.loop.fire(operation.target)


def _raise_event(recorder: CodeRecorder, event: events.ExternalEvent) -> None:
    operation = recorder.mailboxes.arrive(event.name, event.data, is_message=False)
    if operation is not None:
        recorder.deliver(operation, event.data, recorder.mailboxes.arrivals)


def _deliver_message(recorder: CodeRecorder, event: events.QueueEventDelivered) -> None:
    operation = recorder.mailboxes.arrive(event.name, event.data, is_message=True)
    if operation is not None:
        recorder.deliver(operation, event.data, recorder.mailboxes.arrivals)


def _cancel(recorder: CodeRecorder, event: events.OrchestrationCancelRequested) -> None:
    root = recorder.loop.root
    if root is not None and recorder.cancel_reason is None:
        recorder.cancel_reason = event.reason
        recorder.is_cancelled_late = root.done()
        root.cancel(event.reason)


APPLY: Final[Mapping[type[events.Event], Callable[[CodeRecorder, Any], None]]] = {
    events.OrchestrationStarted: _start,
    events.OrchestrationCancelRequested: _cancel,
    events.ActivityCompleted: _complete_activity,
    events.ActivityFailed: _fail_activity,
    events.TimerFired: _fire_timer,
    events.ExternalEvent: _raise_event,
    events.QueueEventDelivered: _deliver_message,
    events.SubOrchestrationCompleted: _complete_child,
    events.SubOrchestrationFailed: _fail_child,
}
"""Applies each kind of event from outside. Every other kind is a decision of the code."""
