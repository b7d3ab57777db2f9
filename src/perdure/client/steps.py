"""The steps of an execution, read from its history: calls, branches, outcomes, open waits."""

from __future__ import annotations

import datetime
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from perdure.client.durations import shown_duration, utc_time
from perdure.errors import CorruptData
from perdure.model import events, wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.providers.contract import Provider

State: TypeAlias = Literal["open", "done", "failed", "dropped"]
Kind: TypeAlias = Literal[
    "activity", "timer", "event", "message", "orchestration", "start", "side effect"
]

_TEXT_MAX: Final = 200


class StepView(msgspec.Struct, kw_only=True):
    """One call of the code and its outcome."""

    kind: Kind
    name: str
    event_id: int
    op: str
    site: str
    since_ms: int
    call: str
    """Text of the call, such as ``charge("o-1", 1200)``."""
    state: State = "open"
    ended_ms: int | None = None
    result: str | None = None
    """JSON text of the result, shortened."""
    error: str | None = None
    attempts: int = 0
    due_ms: int | None = None
    child_id: str | None = None

    @property
    def branch(self) -> str:
        """Path of the task that made the call; ``0`` is the orchestration itself."""
        return self.op.partition("/")[0]


class OpenStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that an instance waits for, as ``describe()`` lists it."""

    kind: Kind
    name: str
    """Of the activity, event, mailbox or orchestration; empty for a timer."""
    event_id: int
    op: str
    site: str
    """``file:line`` of the call."""
    since: datetime.datetime
    due_at: datetime.datetime | None = None
    """The time at which a timer fires."""
    child_id: str | None = None
    """Instance id of a sub-orchestration."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


class BranchView(msgspec.Struct, kw_only=True):
    """A task of the code: its steps, and the tasks that it started, in order."""

    path: str
    items: list[StepView | BranchView] = []

    def steps(self) -> list[StepView]:
        """Return all steps of the branch and of its sub-branches."""
        found: list[StepView] = []
        for item in self.items:
            found += item.steps() if isinstance(item, BranchView) else [item]
        return found


def steps_of(history: Iterable[events.Event]) -> list[StepView]:
    """Return every step, in the order of the calls."""
    steps: dict[int, StepView] = {}
    waiting_steps: dict[tuple[str, str], deque[StepView]] = defaultdict(deque)
    early: dict[tuple[str, str], deque[events.ExternalEvent | events.QueueEventDelivered]] = (
        defaultdict(deque)
    )
    for event in history:
        if isinstance(event, events.Scheduled):
            step = _opened(event)
            if step is None:
                continue
            steps[event.event_id] = step
            if step.kind in {"event", "message"}:
                key = (step.kind, step.name)
                if early[key]:
                    _received(step, early[key].popleft(), event.timestamp_ms)
                else:
                    waiting_steps[key].append(step)
        elif isinstance(event, events.Resolving):
            step = steps.get(event.source_event_id)
            if step is not None and step.state == "open":
                _resolve(step, event)
        elif isinstance(event, (events.ExternalEvent, events.QueueEventDelivered)):
            key = ("event" if isinstance(event, events.ExternalEvent) else "message", event.name)
            waiting = waiting_steps[key]
            while waiting and waiting[0].state != "open":
                waiting.popleft()
            if waiting:
                _received(waiting.popleft(), event, event.timestamp_ms)
            else:
                early[key].append(event)
        elif isinstance(event, events.TERMINAL_KINDS):
            _close(steps.values(), event.timestamp_ms)
    return list(steps.values())


def open_steps(history: Iterable[events.Event]) -> list[OpenStep]:
    """Return the steps that have no outcome yet, oldest first."""
    return [
        OpenStep(
            kind=step.kind,
            name=step.name,
            event_id=step.event_id,
            op=step.op,
            site=step.site,
            since=utc_time(step.since_ms),
            due_at=None if step.due_ms is None else utc_time(step.due_ms),
            child_id=step.child_id,
        )
        for step in steps_of(history)
        if step.state == "open"
    ]


async def read_open_steps(
    provider: Provider, instance_id: str, execution_id: int
) -> tuple[OpenStep, ...]:
    """Return the open steps of the execution; none if its history cannot be read."""
    try:
        records = await provider.read_with_execution(instance_id, execution_id)
        return tuple(open_steps(wire.decode_history(record.data for record in records)))
    except CorruptData:
        return ()


def branches_of(steps: Iterable[StepView]) -> BranchView:
    """Group the steps by task. A task is placed at its first step."""
    root = BranchView(path="0", items=[])
    known = {root.path: root}
    for step in steps:
        _branch(known, step.branch).items.append(step)
    return root


def shown_call(name: str, payload: Any) -> str:
    """Return the text of a call from the JSON array of its arguments."""
    text = bytes(payload).decode()
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return f"{name}({shortened(inner if text != 'null' else '')})"


def shortened(text: str, limit: int = _TEXT_MAX) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def payload_text(payload: Any, limit: int = _TEXT_MAX) -> str:
    return shortened(bytes(payload).decode(), limit)


def _branch(known: dict[str, BranchView], path: str) -> BranchView:
    found = known.get(path)
    if found is None:
        parent, _, _ = path.rpartition(".")
        found = known[path] = BranchView(path=path, items=[])
        _branch(known, parent or "0").items.append(found)
    return found


def _opened(event: events.Scheduled) -> StepView | None:
    fields: dict[str, Any]
    match event:
        case events.ActivityScheduled():
            call = shown_call(event.name, event.input)
            fields = {"kind": "activity", "name": event.name, "call": call}
        case events.TimerCreated():
            length = shown_duration(event.fire_at_ms - event.timestamp_ms)
            fields = {"kind": "timer", "name": "", "call": f"timer {length}"}
            fields["due_ms"] = event.fire_at_ms
        case events.ExternalSubscribed():
            call = f'wait_for_event("{event.name}")'
            fields = {"kind": "event", "name": event.name, "call": call}
        case events.QueueSubscribed():
            call = f'next_message("{event.name}")'
            fields = {"kind": "message", "name": event.name, "call": call}
        case events.SubOrchestrationScheduled():
            call = shown_call(event.name, event.input)
            fields = {"kind": "orchestration", "name": event.name, "call": call}
            fields["child_id"] = event.child_instance_id
        case events.OrchestrationChained():
            call = f"start_detached {shown_call(event.name, event.input)}"
            fields = {"kind": "start", "name": event.name, "call": call, "state": "done"}
            fields |= {"child_id": event.target_instance_id, "ended_ms": event.timestamp_ms}
        case events.SideEffectRecorded():
            fields = {"kind": "side effect", "name": "", "call": "side_effect()", "state": "done"}
            fields |= {"result": payload_text(event.value), "ended_ms": event.timestamp_ms}
        case _:
            return None
    return StepView(
        event_id=event.event_id,
        op=event.op,
        site=event.site,
        since_ms=event.timestamp_ms,
        **fields,
    )


def _resolve(step: StepView, event: events.Resolving) -> None:
    step.ended_ms = event.timestamp_ms
    match event:
        case events.ActivityCompleted():
            step.state, step.attempts = "done", event.attempts
            step.result = payload_text(event.result)
        case events.SubOrchestrationCompleted():
            step.state, step.result = "done", payload_text(event.result)
        case events.ActivityFailed() | events.SubOrchestrationFailed():
            step.state, step.error = "failed", str(event.failure)
            step.attempts = event.failure.attempts
        case events.TimerFired():
            step.state = "done"
        case _:
            step.state = "dropped"


def _received(
    step: StepView, event: events.ExternalEvent | events.QueueEventDelivered, at_ms: int
) -> None:
    step.state, step.ended_ms, step.result = "done", at_ms, payload_text(event.data)


def _close(steps: Iterable[StepView], at_ms: int) -> None:
    """Mark the steps that are open at the end of the execution as dropped."""
    for step in steps:
        if step.state == "open":
            step.state, step.ended_ms = "dropped", at_ms
