"""Compares what the code asks for with what history holds, and reports a mismatch."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from perdure.errors import Nondeterminism
from perdure.model import events
from perdure.model.failures import Mismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perdure.codec import Codec

Cancelling: TypeAlias = (
    events.ActivityCancelRequested
    | events.TimerCancelled
    | events.ExternalSubscribedCancelled
    | events.QueueSubscriptionCancelled
    | events.SubOrchestrationCancelRequested
)

CANCELLING_KINDS: Final = (
    events.ActivityCancelRequested,
    events.TimerCancelled,
    events.ExternalSubscribedCancelled,
    events.QueueSubscriptionCancelled,
    events.SubOrchestrationCancelRequested,
)

# Not compared, as history decides them: the time of a timer, the version and an automatic id of a
# child, the delay of a detached start.
COMPARED_FIELDS: Final[Mapping[type[events.Scheduled], tuple[str, ...]]] = {
    events.ActivityScheduled: ("name", "input", "session_id", "tag"),
    events.TimerCreated: (),
    events.ExternalSubscribed: ("name",),
    events.QueueSubscribed: ("name",),
    events.SubOrchestrationScheduled: ("name", "input", "child_instance_id"),
    events.OrchestrationChained: ("name", "input", "target_instance_id"),
    events.CustomStatusUpdated: ("status",),
    events.KeyValueSet: ("key", "value"),
    events.KeyValueCleared: ("key",),
    events.KeyValuesCleared: (),
    events.SideEffectRecorded: (),
    events.PatchMarked: ("name",),
}
_PAYLOADS: Final = frozenset({"input", "status", "value"})
_GIVEN_IDS: Final = frozenset({"child_instance_id", "target_instance_id"})


def key_of(event: events.Event) -> str | None:
    """Return the key of a decision, unique in its turn; None for an event from outside."""
    if isinstance(event, events.Scheduled):
        return event.op
    if isinstance(event, CANCELLING_KINDS):
        return f"cancel {event.source_event_id}"
    if isinstance(event, events.TERMINAL_KINDS):
        return "end"
    return None


def is_same_request(recorded: events.Scheduled, asked: Mapping[str, Any], codec: Codec) -> bool:
    """Return True if the compared fields are equal; payloads are compared as JSON values."""
    for name in COMPARED_FIELDS[type(recorded)]:
        then, now = getattr(recorded, name), asked[name]
        if then == now:
            continue
        if name in _GIVEN_IDS and now is None:
            continue  # an automatic id: the recorded one is used
        if name not in _PAYLOADS or not is_same_payload(then, now, codec):
            return False
    return True


def is_same_payload(
    then: str | msgspec.Raw | None, now: str | msgspec.Raw | None, codec: Codec
) -> bool:
    """Compare as JSON values: a transform may wrap the same value into other bytes each time."""
    if then is None or now is None:
        return then is now
    return _is_same_value(_decoded(then, codec), _decoded(now, codec))


def _decoded(payload: str | msgspec.Raw, codec: Codec) -> Any:
    raw = msgspec.Raw(payload.encode()) if isinstance(payload, str) else payload
    return codec.decode(raw, where="recorded payload")


def _is_same_value(then: Any, now: Any) -> bool:
    """Compare more strictly than ==, for which True, 1 and 1.0 are equal."""
    if type(then) is not type(now):
        return False
    if isinstance(then, dict):
        members = cast("dict[str, Any]", then)
        return members.keys() == now.keys() and all(
            _is_same_value(value, now[key]) for key, value in members.items()
        )
    if isinstance(then, list):
        return _are_same_values(cast("Any", then), now)
    return bool(then == now)


def _are_same_values(then: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(then) == len(now) and all(map(_is_same_value, then, now))


_LINES_MAX = 100


def nondeterminism(
    started: events.OrchestrationStarted,
    turn: int,
    recorded: Sequence[events.Event],
    performed: Sequence[events.Event],
) -> Nondeterminism:
    """Return the error for a turn in which the code did something else than history holds."""
    then, now = _first_difference(recorded, performed)
    sites = (getattr(event, "site", "") for event in (now, then))
    mismatch = Mismatch(
        orchestration=started.name,
        version=started.version,
        instance_id=started.instance_id,
        execution_id=started.execution_id,
        turn=turn,
        recorded="nothing more in this turn" if then is None else describe(then),
        performed="nothing of the kind" if now is None else describe(now),
        event_id=None if then is None else then.event_id,
        site=next(filter(None, sites), ""),
        diff=tuple(_diff(turn, _lines(recorded), _lines(performed))),
    )
    return Nondeterminism(mismatch.headline, mismatch=mismatch, event_id=mismatch.event_id)


def _diff(turn: int, then: list[str], now: list[str]) -> Iterator[str]:
    """Return a unified diff from the first difference on: a turn may have thousands of steps."""
    same = next(
        (index for index, (a, b) in enumerate(zip(then, now, strict=False)) if a != b),
        min(len(then), len(now)),
    )
    window = slice(max(0, same - 2), same + _LINES_MAX)
    return difflib.unified_diff(
        then[window], now[window], f"history, turn {turn}", "this code", lineterm="", n=2
    )


def _lines(decisions: Sequence[events.Event]) -> list[str]:
    return [describe(event) for event in _in_order(decisions)]


def describe(event: events.Event) -> str:
    """Return a decision as one line: its key, its content and its place in the code."""
    key = key_of(event) or f"event {event.event_id}"
    site = getattr(event, "site", "")
    return f"{key}  {_content(event)}" + (f"  at {site}" if site else "")


def _first_difference(
    recorded: Sequence[events.Event], performed: Sequence[events.Event]
) -> tuple[events.Event | None, events.Event | None]:
    """Return both sides of the first key at which they differ; None for a side without one."""
    mine = {key_of(event): event for event in performed}
    theirs = {key_of(event): event for event in recorded}
    extra = next((event for event in performed if key_of(event) not in theirs), None)
    for key, then in theirs.items():
        if type(then) is events.PatchMarked:
            continue
        now = mine.get(key)
        if now is not then:
            return then, extra if now is None else now
    return None, extra


def _in_order(decisions: Sequence[events.Event]) -> list[events.Event]:
    """Sort by branch and number, so that another interleaving is no difference."""
    return sorted(decisions, key=lambda event: _place(key_of(event) or ""))


def _place(key: str) -> tuple[Any, ...]:
    path, _, number = key.partition("/")
    if number.isdigit() and path[:1].isdigit():
        return (0, [int(part) for part in path.split(".")], int(number))
    return (1, [], key)


def _content(event: events.Event) -> str:
    match event:
        case events.ActivityScheduled():
            extra = f" tag={event.tag!r}" if event.tag else ""
            extra += f" session={event.session_id!r}" if event.session_id else ""
            return f"activity {event.name}{_call(event.input)}{extra}"
        case events.TimerCreated():
            return "timer"
        case events.ExternalSubscribed():
            return f"wait for event {event.name!r}"
        case events.QueueSubscribed():
            return f"wait for message in {event.name!r}"
        case events.SubOrchestrationScheduled():
            call = _call(event.input)
            return f"orchestration {event.name}{call} as {event.child_instance_id!r}"
        case events.OrchestrationChained():
            call = _call(event.input)
            return f"detached start of {event.name}{call} as {event.target_instance_id!r}"
        case events.CustomStatusUpdated():
            return f"set_custom_status({_short(event.status or 'None')})"
        case events.KeyValueSet():
            return f"state[{event.key!r}] = {_short(event.value)}"
        case events.KeyValueCleared():
            return f"del state[{event.key!r}]"
        case events.KeyValuesCleared():
            return "state.clear()"
        case events.SideEffectRecorded():
            return "side_effect()"
        case events.PatchMarked():
            return f"patched({event.name!r})"
        case events.OrchestrationCompleted():
            return f"return {_short(bytes(event.output).decode())}"
        case events.OrchestrationFailed():
            return f"raise {_short(str(event.failure))}"
        case events.OrchestrationContinuedAsNew():
            return f"continue_as_new{_call(event.input)}"
        case events.OrchestrationCancelled():
            return "end as cancelled"
        case _:
            if isinstance(event, CANCELLING_KINDS):
                return f"give up step {event.source_event_id}"
            return type(event).__name__


def _call(payload: Any) -> str:
    text = bytes(payload).decode()
    if text.startswith("[") and text.endswith("]"):
        return f"({_short(text[1:-1])})"
    return f"({_short(text)})"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
