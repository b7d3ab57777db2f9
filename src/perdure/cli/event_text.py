"""What an event of a history says, in the words of the code."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.client.durations import shown_duration
from perdure.client.steps import payload_text, shortened, shown_call
from perdure.model import events

FAILED_KINDS = (
    events.ActivityFailed,
    events.SubOrchestrationFailed,
    events.OrchestrationFailed,
    events.OrchestrationCancelled,
    events.OrchestrationTerminated,
)


def content_of(event: events.Event) -> str:
    """Calls as calls, values as JSON, failures as their message."""
    match event:
        case events.OrchestrationStarted():
            version = f"@{event.version}" if event.version else ""  # it ended before it began
            return f"{event.name}{version} {payload_text(event.input)}"
        case events.ActivityScheduled():
            return shown_call(event.name, event.input)
        case events.SubOrchestrationScheduled():
            return f"{shown_call(event.name, event.input)} as {event.child_instance_id}"
        case events.OrchestrationChained():
            return f"{shown_call(event.name, event.input)} as {event.target_instance_id}"
        case events.TimerCreated():
            return shown_duration(event.fire_at_ms - event.timestamp_ms)
        case events.CustomStatusUpdated():
            return event.status or "None"
        case events.KeyValueSet():
            return f"{event.key} = {shortened(event.value)}"
        case events.ExternalEvent() | events.QueueEventDelivered():
            return f"{event.name} {payload_text(event.data)}"
        case events.ActivityFailed() | events.SubOrchestrationFailed():
            return f"of {event.source_event_id}: {event.failure}"
        case events.OrchestrationFailed():
            return str(event.failure)
        case _:
            return _rest(event)


def _rest(event: events.Event) -> str:
    parts: list[str] = []
    for name in ("source_event_id", "name", "key", "input", "output", "result", "value", "reason"):
        value: Any = getattr(event, name, None)
        if value in {None, ""} if not isinstance(value, msgspec.Raw) else False:
            continue
        shown = payload_text(value) if isinstance(value, msgspec.Raw) else str(value)
        parts.append(f"of {shown}" if name == "source_event_id" else shown)
    return " ".join(parts)
