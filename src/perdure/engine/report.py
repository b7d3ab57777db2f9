"""A mismatch between code and history, explained: both sides, where, a diff and the cure."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from perdure.engine.matching import CANCELLING_KINDS, key_of
from perdure.errors import Nondeterminism
from perdure.model import events

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CURE = """\
What to do
  - revert the change, and the instance goes on by itself; or
  - guard the new code with `if patched("a-name"):` and keep the old way in the else branch; or
  - put the change into a new version of the orchestration: @orchestration(version=...); this
    instance stays on the version that it began with.
If the code did not change, something in it does not repeat: the clock, random numbers, the order of
a set, a global or the environment. Use now(), random(), uuid4(), side_effect() or an activity."""

_LINES_MAX = 100


def nondeterminism(
    started: events.OrchestrationStarted,
    turn: int,
    recorded: Sequence[events.Event],
    performed: Sequence[events.Event],
) -> Nondeterminism:
    """The error for a turn in which the code did something else than history holds."""
    then, now = _first_difference(recorded, performed)
    where = (
        f"orchestration {started.name!r} {started.version}, instance {started.instance_id!r}, "
        f"execution {started.execution_id}, turn {turn}"
    )
    headline = f"{where}: history says {then}, the code did {now}"
    diff = "\n".join(_diff(turn, _lines(recorded), _lines(performed)))
    report = (
        f"The code does not repeat its history\n  {where}\n\n"
        f"history says  {then}\nthe code did  {now}\n\n{diff}\n\n{_CURE}\n"
    )
    return Nondeterminism(headline, report=report)


def _diff(turn: int, then: list[str], now: list[str]) -> Iterator[str]:
    """What differs, from the first difference on; a turn may hold thousands of steps."""
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
    """One decision as a line: its key, what it is, and where it was asked for."""
    key = key_of(event) or f"event {event.event_id}"
    site = getattr(event, "site", "")
    return f"{key}  {_content(event)}" + (f"  at {site}" if site else "")


def _first_difference(
    recorded: Sequence[events.Event], performed: Sequence[events.Event]
) -> tuple[str, str]:
    """Both sides of the first key at which they differ."""
    mine = {key_of(event): event for event in performed}
    theirs = {key_of(event): event for event in recorded}
    for key, then in theirs.items():
        if type(then) is events.PatchMarked:
            continue
        now = mine.get(key)
        if now is None:
            return describe(then), _instead(performed, theirs)
        if now is not then:
            return describe(then), describe(now)
    return "nothing more in this turn", _instead(performed, theirs)


def _instead(performed: Sequence[events.Event], theirs: dict[str | None, events.Event]) -> str:
    extra = next((event for event in performed if key_of(event) not in theirs), None)
    return "nothing of the kind" if extra is None else describe(extra)


def _in_order(decisions: Sequence[events.Event]) -> list[events.Event]:
    """By branch and number, so that another interleaving does not show up as a difference."""
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
            return f"set_status({_short(event.status or 'None')})"
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
