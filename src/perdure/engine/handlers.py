"""What each event from outside does to the code: one small function a kind, found by table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.engine.failures import activity_error, child_error
from perdure.engine.operations import Family
from perdure.model import events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perdure.engine.recording import CodeRecorder

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
    operation = recorder.lanes.arrive(event.name, event.data, mailbox=False)
    if operation is not None:
        recorder.deliver(operation, event.data, recorder.lanes.arrivals)


def _deliver_message(recorder: CodeRecorder, event: events.QueueEventDelivered) -> None:
    operation = recorder.lanes.arrive(event.name, event.data, mailbox=True)
    if operation is not None:
        recorder.deliver(operation, event.data, recorder.lanes.arrivals)


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
"""Every kind of event that does not come from the code itself."""
