"""What an execution waits for, read off its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.errors import CorruptData
from perdure.model import events, wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.providers.contract import Provider


class OpenStep(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was asked for and has not come yet."""

    kind: str
    """``activity``, ``timer``, ``event``, ``message`` or ``orchestration``."""
    name: str
    event_id: int
    op: str
    site: str
    since_ms: int
    due_ms: int | None = None
    child_instance_id: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


async def read_waits(
    provider: Provider, instance_id: str, execution_id: int
) -> tuple[OpenStep, ...]:
    """What the execution waits for; nothing if its history cannot be read."""
    try:
        records = await provider.read_with_execution(instance_id, execution_id)
        return tuple(open_steps(wire.decode_history(record.data for record in records)))
    except CorruptData:
        return ()


def open_steps(history: Iterable[events.Event]) -> list[OpenStep]:
    """Schedule events that nothing has resolved, in order."""
    steps: dict[int, OpenStep] = {}
    arrivals: dict[tuple[str, str], int] = {}
    for event in history:
        if isinstance(event, events.Resolving):
            steps.pop(event.source_event_id, None)
        elif isinstance(event, events.ExternalEvent):
            arrivals["event", event.name] = arrivals.get(("event", event.name), 0) + 1
        elif isinstance(event, events.QueueEventDelivered):
            arrivals["message", event.name] = arrivals.get(("message", event.name), 0) + 1
        elif isinstance(event, events.Scheduled) and (step := _step(event)) is not None:
            steps[event.event_id] = step
        elif isinstance(event, events.TERMINAL_KINDS):
            return []
    # An arrival goes to the oldest wait of its name that is still open.
    waiting: list[OpenStep] = []
    for step in steps.values():
        key = (step.kind, step.name)
        if arrivals.get(key, 0) > 0:
            arrivals[key] -= 1
        else:
            waiting.append(step)
    return waiting


def _step(event: events.Scheduled) -> OpenStep | None:
    kind, name, due_ms, child = "", "", None, None
    match event:
        case events.ActivityScheduled():
            kind, name = "activity", event.name
        case events.TimerCreated():
            kind, due_ms = "timer", event.fire_at_ms
        case events.ExternalSubscribed():
            kind, name = "event", event.name
        case events.QueueSubscribed():
            kind, name = "message", event.name
        case events.SubOrchestrationScheduled():
            kind, name, child = "orchestration", event.name, event.child_instance_id
        case _:
            return None
    return OpenStep(
        kind=kind,
        name=name,
        event_id=event.event_id,
        op=event.op,
        site=event.site,
        since_ms=event.timestamp_ms,
        due_ms=due_ms,
        child_instance_id=child,
    )
