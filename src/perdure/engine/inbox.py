"""Messages to events: what is stale, repeated or too late is left out and named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.engine.operations import ACTIVITY, CHILD, TIMER
from perdure.model import events, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from perdure.engine.journal import Journal
    from perdure.engine.operations import Family
    from perdure.engine.recording import CodeRecorder


def add_beginning(
    started: events.OrchestrationStarted,
    carried: Iterable[work.CarriedMessage],
    journal: Journal,
) -> None:
    """Note the first event, and what the execution before had not consumed."""
    journal.delta.append(started)
    journal.last_event_id = started.event_id
    for message in carried:
        kind = events.QueueEventDelivered if message.mailbox else events.ExternalEvent
        journal.arrive(kind, name=message.name, data=message.data)


def add_messages(
    items: Iterable[work.OrchestratorItem], journal: Journal, recorder: CodeRecorder
) -> Sequence[str]:
    """Note each message of a turn as an event; the answer is a line for each that is ignored."""
    ignored: list[str] | None = None
    for item in items:
        reason = _ADD[type(item)](item, journal, recorder)
        if reason is not None:
            ignored = ignored or []
            ignored.append(f"{type(item).__name__}{reason}")
    return ignored or ()


def _complete_activity(
    item: work.ActivityCompleted, journal: Journal, recorder: CodeRecorder
) -> str | None:
    unwanted = _unwanted(item, item.activity_id, ACTIVITY, recorder)
    if unwanted is None:
        journal.arrive_completed(item.activity_id, item.result, item.attempts)
    return unwanted


def _fail_activity(
    item: work.ActivityFailed, journal: Journal, recorder: CodeRecorder
) -> str | None:
    unwanted = _unwanted(item, item.activity_id, ACTIVITY, recorder)
    if unwanted is None:
        journal.arrive(
            events.ActivityFailed, source_event_id=item.activity_id, failure=item.failure
        )
    return unwanted


def _fire_timer(item: work.TimerFired, journal: Journal, recorder: CodeRecorder) -> str | None:
    unwanted = _unwanted(item, item.timer_id, TIMER, recorder)
    if unwanted is None:
        if item.timer_id not in recorder.operations.open:
            return _too_late(item.timer_id)
        journal.arrive(events.TimerFired, source_event_id=item.timer_id, fire_at_ms=item.fire_at_ms)
    return unwanted


def _complete_child(
    item: work.SubOrchCompleted, journal: Journal, recorder: CodeRecorder
) -> str | None:
    unwanted = _unwanted(item, item.event_id, CHILD, recorder)
    if unwanted is None:
        journal.arrive(
            events.SubOrchestrationCompleted, source_event_id=item.event_id, result=item.result
        )
    return unwanted


def _fail_child(item: work.SubOrchFailed, journal: Journal, recorder: CodeRecorder) -> str | None:
    unwanted = _unwanted(item, item.event_id, CHILD, recorder)
    if unwanted is None:
        journal.arrive(
            events.SubOrchestrationFailed, source_event_id=item.event_id, failure=item.failure
        )
    return unwanted


def _raise_event(item: work.ExternalRaised, journal: Journal, _: CodeRecorder) -> None:
    journal.arrive(events.ExternalEvent, name=item.name, data=item.data)


def _deliver_message(item: work.QueueMessage, journal: Journal, _: CodeRecorder) -> None:
    journal.arrive(events.QueueEventDelivered, name=item.name, data=item.data)


def _cancel(item: work.CancelInstance, journal: Journal, recorder: CodeRecorder) -> str | None:
    parent_id = item.parent_instance_id
    if parent_id is not None and parent_id != journal.parent_instance_id:
        return f": {parent_id!r} is not its parent"
    came = (type(event) is events.OrchestrationCancelRequested for event in journal.delta)
    if recorder.cancel_reason is not None or any(came):
        return ": cancellation was requested before"
    journal.arrive(events.OrchestrationCancelRequested, reason=item.reason)
    return None


def _start(
    _: work.StartOrchestration | work.ContinueAsNew, journal: Journal, __: CodeRecorder
) -> str | None:
    # The one that begins the first turn has become its first event already.
    return ": the instance runs already" if journal.turn > 1 else None


def _unwanted(
    item: Any, source_event_id: int, family: Family, recorder: CodeRecorder
) -> str | None:
    """Why it is: of another execution, or not the first. What has no source is an error."""
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
    work.StartOrchestration: _start,
    work.ContinueAsNew: _start,
    work.ActivityCompleted: _complete_activity,
    work.ActivityFailed: _fail_activity,
    work.TimerFired: _fire_timer,
    work.ExternalRaised: _raise_event,
    work.QueueMessage: _deliver_message,
    work.SubOrchCompleted: _complete_child,
    work.SubOrchFailed: _fail_child,
    work.CancelInstance: _cancel,
}
