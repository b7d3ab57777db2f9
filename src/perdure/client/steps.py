"""The steps of an execution, read from its history: calls, outcomes, open waits, differences."""

from __future__ import annotations

import datetime
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from perdure.arguments import check_number
from perdure.authoring.communication import ASK_PREFIX, REPLY
from perdure.client.formats import record_from, shown_duration, utc_time
from perdure.codec import is_sealed, shown_text
from perdure.errors import CorruptData, NotFound
from perdure.model import events, wire
from perdure.model.failures import Failure
from perdure.model.status import Status
from perdure.model.work import INSTANCE_RESULT, MISSING, InstanceEnd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import HistoryRecord

State: TypeAlias = Literal["open", "done", "failed", "dropped"]
Kind: TypeAlias = Literal[
    "activity",
    "timer",
    "event",
    "message",
    "instance",
    "orchestration",
    "start",
    "send",
    "side effect",
]

_TEXT_MAX: Final = 200
_PAGE: Final = 2_000
_KINDS: Final[dict[type[events.Scheduled], Kind]] = {
    events.ActivityScheduled: "activity",
    events.TimerCreated: "timer",
    events.ExternalSubscribed: "event",
    events.QueueSubscribed: "message",
    events.SubOrchestrationScheduled: "orchestration",
    events.OrchestrationChained: "start",
    events.MessageSent: "send",
    events.SideEffectRecorded: "side effect",
}
_STATES: Final[dict[type[events.Event], State]] = {
    events.ActivityCompleted: "done",
    events.SubOrchestrationCompleted: "done",
    events.TimerFired: "done",
    events.ExternalEvent: "done",
    events.QueueEventDelivered: "done",
    events.ActivityFailed: "failed",
    events.SubOrchestrationFailed: "failed",
}
"""States by the event of the outcome; every other outcome drops the step."""
_DONE_AT_ONCE: Final = ("start", "send", "side effect")
RUN_BY_WORKERS: Final = frozenset({"activity", "instance"})
"""Kinds of steps that are in the worker queue."""
_SENDS: Final = {"event": "raise_event_to", "message": "send_message_to"}


class StepView(msgspec.Struct, kw_only=True):
    """One call of the code and its outcome. The texts are made when they are asked for."""

    event: Any
    """The event of the call."""
    kind: Kind
    name: str
    event_id: int
    op: str
    site: str
    since_ms: int
    due_ms: int | None
    child_id: str | None
    state: State = "open"
    ended_ms: int | None = None
    outcome: Any = None
    """The event that ended the step."""

    def end(self, outcome: events.Event, at_ms: int) -> None:
        self.outcome, self.ended_ms = outcome, at_ms
        self.state = _STATES.get(type(outcome), "dropped")

    @property
    def branch(self) -> str:
        """Path of the task that made the call; ``0`` is the orchestration itself."""
        return self.op.partition("/")[0]

    @property
    def call(self) -> str:
        """Text of the call, such as ``charge("o-1", 1200)``."""
        return f"compensation: {self._call}" if self.event.compensation else self._call

    @property
    def _call(self) -> str:
        match self.kind:
            case "timer":
                return f"timer {shown_duration(self.event.fire_at_ms - self.since_ms)}"
            case "event":
                return f'wait_for_event("{self.name}")'
            case "message" if self.name.startswith(ASK_PREFIX):
                return f'requests("{self.name.removeprefix(ASK_PREFIX)}")'
            case "message":
                return f'next_message("{self.name}")'
            case "instance":
                return f'instance("{self.name}").result()'
            case "send":
                return _shown_send(self.event)
            case "side effect":
                return "side_effect()"
            case "start":
                return f"start_detached {shown_call(self.name, self.event.input)}"
            case _:
                return shown_call(self.name, self.event.input)

    @property
    def result(self) -> str | None:
        """JSON text of the result, shortened."""
        match self.outcome or self.event:
            case events.ActivityCompleted() as ended if self.kind == "instance":
                return _shown_end(ended.result)
            case events.ActivityCompleted() | events.SubOrchestrationCompleted() as ended:
                return payload_text(ended.result)
            case events.ExternalEvent() | events.QueueEventDelivered() as received:
                return payload_text(received.data)
            case events.SideEffectRecorded() as recorded:
                return payload_text(recorded.value)
            case _:
                return None

    @property
    def error(self) -> str | None:
        return str(self.outcome.failure) if self.state == "failed" else None

    @property
    def attempts(self) -> int:
        """Attempts of an activity, or of the activity that failed a child; else 0."""
        if self.state == "failed":
            return int(self.outcome.failure.attempts)
        return getattr(self.outcome, "attempts", 0)


MailKind: TypeAlias = Literal["event", "message"]


class Unread(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals of one name that the code has not asked for yet."""

    kind: MailKind
    name: str
    count: int = 1


class OpenStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that an instance waits for, as ``describe()`` lists it."""

    kind: Kind
    name: str
    """Name of the activity, event, mailbox or orchestration; empty for a timer."""
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


class _Pairing:
    """Pairs the calls of an execution with their outcomes, event by event."""

    def __init__(self) -> None:
        self.open: dict[int, StepView] = {}
        """Steps without an outcome, by event id, oldest first."""
        self._waiting: dict[tuple[str, str], deque[StepView]] = defaultdict(deque)
        self._early: dict[tuple[str, str], deque[events.Event]] = defaultdict(deque)

    def add(self, event: events.Event) -> StepView | None:
        """Take in the next event; return the step that it begins, if any."""
        if isinstance(event, events.Scheduled):
            return self._begin(event)
        if isinstance(event, events.Resolving):
            step = self.open.pop(event.source_event_id, None)
            if step is not None:
                step.end(event, event.timestamp_ms)
        elif isinstance(event, (events.ExternalEvent, events.QueueEventDelivered)):
            self._receive(event)
        elif isinstance(event, events.Terminal):
            for step in self.open.values():
                step.end(event, event.timestamp_ms)
            self.open.clear()
        return None

    def _begin(self, event: events.Scheduled) -> StepView | None:
        kind = _KINDS.get(type(event))
        if kind is None:
            return None
        if kind == "activity" and getattr(event, "name", "") == INSTANCE_RESULT:
            kind = "instance"
        step = _opened(event, kind)
        key = (kind, step.name)
        if kind in _DONE_AT_ONCE:
            step.state, step.ended_ms = "done", event.timestamp_ms
        elif self._early.get(key):
            step.end(self._early[key].popleft(), event.timestamp_ms)
        else:
            self.open[event.event_id] = step
            if kind in {"event", "message"}:
                self._waiting[key].append(step)
        return step

    def _receive(self, event: events.ExternalEvent | events.QueueEventDelivered) -> None:
        """Give an event or message to the oldest step that waits for it, or keep it."""
        key = ("event" if isinstance(event, events.ExternalEvent) else "message", event.name)
        waiting = self._waiting[key]
        while waiting:
            step = waiting.popleft()
            if step.state == "open":
                del self.open[step.event_id]
                step.end(event, event.timestamp_ms)
                return
        self._early[key].append(event)

    def unread(self) -> list[Unread]:
        """Return the arrivals that no step has received."""
        return [
            Unread(kind="event" if kind == "event" else "message", name=name, count=len(arrived))
            for (kind, name), arrived in self._early.items()
            if arrived
        ]


def _opened(event: Any, kind: Kind) -> StepView:
    child_id = getattr(event, "child_instance_id", None)
    return StepView(
        event=event,
        kind=kind,
        name=_awaited_id(event.input) if kind == "instance" else getattr(event, "name", ""),
        event_id=event.event_id,
        op=event.op,
        site=event.site,
        since_ms=event.timestamp_ms,
        due_ms=getattr(event, "fire_at_ms", None),
        child_id=getattr(event, "target_instance_id", child_id) if kind != "send" else None,
    )


def steps_of(history: Iterable[events.Event]) -> list[StepView]:
    """Return every step, in the order of the calls. Steps of undone turns are left out."""
    return steps_and_unread(history)[0]


def steps_and_unread(history: Iterable[events.Event]) -> tuple[list[StepView], list[Unread]]:
    """Return the steps as ``steps_of``, and the arrivals that none of them has received."""
    pairing = _Pairing()
    steps = [step for step in map(pairing.add, events.without_undone(history)) if step is not None]
    return steps, pairing.unread()


async def read_steps(provider: Provider, instance_id: str, execution_id: int) -> list[StepView]:
    """Return every step of the execution."""
    records = await provider.read_with_execution(instance_id, execution_id)
    return steps_of(wire.decode_history(records))


async def read_open_steps(
    provider: Provider, instance_id: str, execution_id: int
) -> tuple[OpenStep, ...]:
    """Return the open steps of the execution; none if its history cannot be read.

    An old step can be open still, so every event is looked at. The history is read page by page,
    and only open steps are kept. A retry reopens steps, so a retried history is read as a whole.
    """
    pairing = _Pairing()
    try:
        async for record in read_records(provider, instance_id, execution_id):
            event = wire.decode_event(record.data)
            if type(event) is events.OrchestrationRetried:
                steps = await read_steps(provider, instance_id, execution_id)
                return _opened_steps(step for step in steps if step.state == "open")
            pairing.add(event)
    except CorruptData:
        return ()
    return _opened_steps(pairing.open.values())


def _opened_steps(steps: Iterable[StepView]) -> tuple[OpenStep, ...]:
    return tuple(
        record_from(
            OpenStep,
            step,
            since=utc_time(step.since_ms),
            due_at=None if step.due_ms is None else utc_time(step.due_ms),
        )
        for step in steps
    )


async def read_history(
    provider: Provider, instance_id: str, execution_id: int | None
) -> list[events.Event]:
    """Return the events of the execution, or of the latest. Raises NotFound if there is none."""
    if execution_id is None:
        records = await provider.read(instance_id)
    else:
        check_number(execution_id, "execution_id", minimum=1)
        records = await provider.read_with_execution(instance_id, execution_id)
    if not records and provider.capabilities.admin:
        await check_execution(provider.admin, instance_id, execution_id)
    return wire.decode_history(records)


async def check_execution(admin: ProviderAdmin, instance_id: str, execution_id: int | None) -> None:
    """Raise NotFound for an unknown id, and for an execution that never was or was pruned."""
    latest = (await admin.get_instance_info(instance_id)).execution_id
    if execution_id not in {None, latest, *await admin.list_executions(instance_id)}:
        raise NotFound(f"{instance_id!r} has no execution {execution_id}; its latest is {latest}")


async def read_records(
    provider: Provider, instance_id: str, execution_id: int, after_event_id: int = 0
) -> AsyncIterator[HistoryRecord]:
    """Read the events page by page, so that a long history does not fill memory."""
    while True:
        records = await provider.read_with_execution(
            instance_id, execution_id, after_event_id=after_event_id, limit=_PAGE
        )
        for record in records:
            yield record
        if len(records) < _PAGE:
            return
        after_event_id = records[-1].event_id


def branches_of(steps: Iterable[StepView]) -> BranchView:
    """Group the steps by task. A task is placed at its first step."""
    root = BranchView(path="0", items=[])
    known = {root.path: root}
    for step in steps:
        _branch(known, step.branch).items.append(step)
    return root


def _branch(known: dict[str, BranchView], path: str) -> BranchView:
    found = known.get(path)
    if found is None:
        parent, _, _ = path.rpartition(".")
        found = known[path] = BranchView(path=path, items=[])
        _branch(known, parent or "0").items.append(found)
    return found


def _awaited_id(arguments: msgspec.Raw) -> str:
    """Return the id of the instance that the step waits for; empty if it is sealed."""
    try:
        return msgspec.json.decode(arguments, type=list[str])[0]
    except (msgspec.MsgspecError, IndexError):
        return ""


def _shown_end(result: msgspec.Raw) -> str:
    if is_sealed(bytes(result)):
        return payload_text(result)
    end = msgspec.json.decode(result, type=InstanceEnd)
    if end.status == Status.COMPLETED:
        return payload_text(end.output)
    if end.status == MISSING:
        return "it does not exist"
    return f"{end.status}: {msgspec.json.decode(end.output, type=Failure)}"


def _shown_send(sent: events.MessageSent) -> str:
    if sent.name == REPLY:
        return f'reply to "{sent.target_instance_id}" {payload_text(sent.data)}'
    named = f'"{sent.name}", ' if sent.name else ""
    call = _SENDS.get(sent.kind, "cancel_instance")
    return f'{call}("{sent.target_instance_id}", {named}{payload_text(sent.data)})'


def shown_call(name: str, payload: Any, limit: int = _TEXT_MAX) -> str:
    """Return the text of a call from the JSON array of its arguments."""
    text = bytes(payload).decode()
    if text.startswith("["):
        arguments = msgspec.json.decode(text, type=list[msgspec.Raw])
        text = ", ".join(bytes(each).decode() for each in arguments)
    return f"{name}({shortened(text if text != 'null' else '', limit)})"


def shortened(text: str, limit: int = _TEXT_MAX) -> str:
    text = shown_text(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def payload_text(payload: Any, limit: int = _TEXT_MAX) -> str:
    return shortened(bytes(payload).decode(), limit)


def started_of(history: Iterable[events.Event], operation: str) -> events.OrchestrationStarted:
    """Return the first event. Raises CorruptData if it does not start an execution."""
    first = next(iter(history), None)
    if not isinstance(first, events.OrchestrationStarted):
        raise CorruptData(operation, f"the history begins with {type(first).__name__}")
    return first


# --- two executions side by side


class ComparedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of both sides under one operation key; None for a side that made none."""

    op: str
    left: str | None
    right: str | None

    @property
    def is_same(self) -> bool:
        return self.left == self.right


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of both sides, in the order of the left one, then the rest of the right one."""

    steps: tuple[ComparedStep, ...]
    ends: ComparedStep

    @property
    def first_difference(self) -> ComparedStep | None:
        different = (step for step in (*self.steps, self.ends) if not step.is_same)
        return next(different, None)


def compare(left: Sequence[events.Event], right: Sequence[events.Event]) -> Comparison:
    """Compare two histories. Times and event ids always differ and are not compared."""
    left_steps = {step.op: _line(step) for step in steps_of(left)}
    right_steps = {step.op: _line(step) for step in steps_of(right)}
    keys = [*left_steps, *(key for key in right_steps if key not in left_steps)]
    beginnings = ComparedStep(op="input", left=_beginning(left), right=_beginning(right))
    steps = (
        ComparedStep(op=key, left=left_steps.get(key), right=right_steps.get(key)) for key in keys
    )
    return Comparison(
        steps=(beginnings, *steps),
        ends=ComparedStep(op="end", left=_end(left), right=_end(right)),
    )


def _line(step: StepView) -> str:
    match step.state:
        case "done":
            outcome = "" if step.result is None else f" -> {step.result}"
        case "failed":
            outcome = f" -> raised {step.error}"
        case "dropped":
            outcome = " (not needed)"
        case "open":
            outcome = " (open)"
    return step.call + outcome


def _beginning(history: Sequence[events.Event]) -> str | None:
    first = history[0] if history else None
    if not isinstance(first, events.OrchestrationStarted):
        return None
    return f"{first.name}@{first.version} {bytes(first.input).decode()}"


def _end(history: Sequence[events.Event]) -> str | None:
    match history[-1] if history else None:
        case events.OrchestrationCompleted(output=output):
            return f"return {bytes(output).decode()}"
        case events.OrchestrationFailed(failure=failure):
            return f"raise {failure}"
        case events.OrchestrationContinuedAsNew(input=input):
            return f"continue_as_new {bytes(input).decode()}"
        case events.OrchestrationCancelled() | events.OrchestrationTerminated() as event:
            return type(event).__name__.removeprefix("Orchestration").lower()
        case _:
            return None
