"""The decisions of a turn: appended to history in a live turn, compared with it on replay.

A comparison that fails is reported as a ``Mismatch`` of both sides.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from perdure.engine.user_code import call_site
from perdure.errors import Nondeterminism
from perdure.model import events
from perdure.model.failures import Failure, Mismatch
from perdure.model.work import INSTANCE_RESULT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perdure.authoring.policies import ActivityOptions
    from perdure.codec import Codec
    from perdure.engine.tasks import Branch

S = TypeVar("S", bound=events.Scheduled)

# Frames of the engine between a call in user code and call_site() here.
_OWN_FRAMES = 4
_DIFF_LINES_MAX = 100

# Not compared, as history decides them: the time of a timer, the version and an automatic id of a
# child, the delay of a detached start.
COMPARED_FIELDS: Final[Mapping[type[events.Scheduled], tuple[str, ...]]] = {
    events.ActivityScheduled: ("name", "input", "session_id", "tag"),
    events.TimerCreated: (),
    events.ExternalSubscribed: ("name",),
    events.QueueSubscribed: ("name",),
    events.SubOrchestrationScheduled: ("name", "input", "child_instance_id"),
    events.OrchestrationChained: ("name", "input", "target_instance_id"),
    events.MessageSent: ("kind", "target_instance_id", "name", "data"),
    events.CustomStatusUpdated: ("status",),
    events.KeyValueSet: ("key", "value"),
    events.KeyValueCleared: ("key",),
    events.KeyValuesCleared: (),
    events.SideEffectRecorded: (),
    events.PatchMarked: ("name",),
}
_PAYLOADS: Final = frozenset({"input", "status", "value", "data"})
_GIVEN_IDS: Final = frozenset({"child_instance_id", "target_instance_id"})


class TurnDecisions:
    """The decisions of the running turn, and the envelope fields that every event carries."""

    def __init__(self, started: events.OrchestrationStarted, codec: Codec) -> None:
        self.instance_id = started.instance_id
        self.execution_id = started.execution_id
        self.parent_instance_id = started.parent_instance_id
        self.last_event_id = 0
        """Not counted on replay: recorded events have their ids."""
        self.turn = 0
        self.now_ms = 0
        self.commands = 0
        """Number of requests of the code in this turn so far."""
        self.delta: list[Any] = []
        """Events."""
        self.is_replaying = False
        self._started = started
        self._codec = codec
        self._recorded: Sequence[events.Event] = ()
        self._expected: dict[str, events.Event] = {}
        self._performed: list[Any] = []
        """Events."""
        self._unexpected = 0

    def common_fields(self, event_id: int) -> dict[str, Any]:
        """Return the fields that every event of this turn carries."""
        return {
            "event_id": event_id,
            "instance_id": self.instance_id,
            "execution_id": self.execution_id,
            "timestamp_ms": self.now_ms,
            "turn": self.turn,
        }

    def begin_live(self, now_ms: int) -> None:
        """Begin a new turn; its first events are those that come from outside."""
        self.turn += 1
        self.now_ms = now_ms
        self.commands = 0
        self.delta = []

    def undo_begin(self, before_ms: int) -> None:
        """Undo ``begin_live``: no message of this turn was accepted, so there is no turn."""
        self.turn -= 1
        self.now_ms = before_ms

    def arrive(self, kind: type[Any], **fields: Any) -> None:
        """Append an event that comes from outside."""
        self.last_event_id += 1
        self.delta.append(kind(**self.common_fields(self.last_event_id), **fields))

    def arrive_completed(self, source_event_id: int, result: msgspec.Raw, attempts: int) -> None:
        """Like ``arrive`` for the most common event; explicit keywords cost a quarter of a dict."""
        self.last_event_id += 1
        event = events.ActivityCompleted(
            event_id=self.last_event_id,
            instance_id=self.instance_id,
            execution_id=self.execution_id,
            timestamp_ms=self.now_ms,
            turn=self.turn,
            source_event_id=source_event_id,
            result=result,
            attempts=attempts,
        )
        self.delta.append(event)

    def begin_replay(self, turn: int, now_ms: int, decisions: Sequence[events.Event]) -> None:
        """Expect exactly these decisions, in any order: branches may interleave differently."""
        self.is_replaying = True
        self.turn = turn
        self.now_ms = now_ms
        self.commands = 0
        self._recorded = decisions
        self._performed = []
        self._unexpected = 0
        self._expected = {}
        for event in decisions:
            key = key_of(event) or ""
            other = self._expected.setdefault(key, event)
            if other is not event:
                raise Nondeterminism(
                    f"history of {self.instance_id!r} holds two decisions under {key!r} in turn "
                    f"{turn}: events {other.event_id} and {event.event_id}",
                    event_id=event.event_id,
                )

    def end_replay(self) -> None:
        """Raise Nondeterminism unless the turn repeated history exactly."""
        if not self._expected and not self._unexpected:
            return
        # A patch marker without its patched() call is a change that was cleaned up.
        missing = [e for e in self._expected.values() if type(e) is not events.PatchMarked]
        if missing or self._unexpected:
            raise nondeterminism(self._started, self.turn, self._recorded, self._performed)

    def end_of_history(self, last: events.Event) -> None:
        self.is_replaying = False
        self.last_event_id = last.event_id
        self.turn = last.turn

    def schedule(self, kind: type[S], op: str, site: str, fields: dict[str, Any]) -> S:
        """Record a request of the code; on replay return the recorded event that it repeats.

        ``site`` is used if no line of user code is on the stack.
        """
        if self.is_replaying:
            self.commands += 1
            return self._repeat(kind, op, site, fields)
        common = self.common_fields(self.last_event_id + 1)
        event = kind(**common, op=op, site=call_site(_OWN_FRAMES) or site, **fields)
        self.delta.append(event)
        # Counted after the event exists: deep recursion raises RecursionError above this line.
        self.commands += 1
        self.last_event_id += 1
        return event

    def schedule_activity(
        self, op: str, branch: Branch, name: str, payload: msgspec.Raw, options: ActivityOptions
    ) -> events.ActivityScheduled:
        """Like ``schedule`` for the most common request; keywords cost a quarter of a dict."""
        if self.is_replaying or branch.is_compensation:
            fields = {
                "name": name,
                "input": payload,
                "session_id": options.session,
                "tag": options.tag,
                "compensation": branch.is_compensation,
            }
            return self.schedule(events.ActivityScheduled, op, branch.site, fields)
        event = events.ActivityScheduled(
            event_id=self.last_event_id + 1,
            instance_id=self.instance_id,
            execution_id=self.execution_id,
            timestamp_ms=self.now_ms,
            turn=self.turn,
            op=op,
            site=call_site(_OWN_FRAMES) or branch.site,
            name=name,
            input=payload,
            session_id=options.session,
            tag=options.tag,
        )
        self.delta.append(event)
        self.commands += 1
        self.last_event_id += 1
        return event

    def has_call(self, op: str, name: str, payload: msgspec.Raw) -> bool:
        """Return True if history has the same call of an activity or orchestration at this key."""
        recorded = self._expected.get(op) if self.is_replaying else None
        if not isinstance(
            recorded,
            (
                events.ActivityScheduled,
                events.SubOrchestrationScheduled,
                events.OrchestrationChained,
            ),
        ):
            return False
        return recorded.name == name and is_same_payload(recorded.input, payload, self._codec)

    def cancel(self, kind: type[events.Cancelling], source_event_id: int, **fields: Any) -> None:
        """Record that the code gave up an open step."""
        fields["source_event_id"] = source_event_id
        if not self.is_replaying:
            event_id = self.last_event_id + 1
            self.delta.append(kind(**self.common_fields(event_id), **fields))
            self.last_event_id = event_id
            return
        recorded = self._expected.pop(f"cancel {source_event_id}", None)
        if recorded is not None and type(recorded) is kind:
            self._performed.append(recorded)
        else:
            self._unexpected += 1
            self._performed.append(kind(**self.common_fields(0), **fields))

    def end(self, event: events.Terminal, *, is_repeated: bool = False) -> None:
        """Record the end of the execution. On replay the caller has compared it with history."""
        if not self.is_replaying:
            self.last_event_id = event.event_id
            self.delta.append(event)
            return
        recorded = self._expected.pop("end", None)
        if recorded is not None and is_repeated:
            self._performed.append(recorded)
        else:
            self._unexpected += 1
            self._performed.append(event)

    def recorded_end(self) -> events.Event | None:
        return self._expected.get("end")

    def coming_failure(self) -> Failure | None:
        """Return the recorded failure if the code made no further decision before it."""
        end = self._expected.get("end")
        if not isinstance(end, events.OrchestrationFailed):
            return None
        is_next = all(key == "end" or key.startswith("cancel ") for key in self._expected)
        return end.failure if is_next else None

    def _repeat(self, kind: type[S], op: str, site: str, fields: dict[str, Any]) -> S:
        recorded: Any = self._expected.pop(op, None)
        if type(recorded) is kind and is_same_request(recorded, fields, self._codec):
            self._performed.append(recorded)
            same: S = recorded
            return same
        self._unexpected += 1
        for name in ("child_instance_id", "target_instance_id"):
            if fields.get(name, "") is None:
                fields[name] = "(automatic)"
        common = self.common_fields(-self._unexpected)
        unexpected = kind(**common, op=op, site=call_site() or site, **fields)
        self._performed.append(unexpected)
        return unexpected


# --- comparing


def key_of(event: events.Event) -> str | None:
    """Return the key of a decision, unique in its turn; None for an event from outside."""
    if isinstance(event, events.Scheduled):
        return event.op
    if isinstance(event, events.Cancelling):
        return f"cancel {event.source_event_id}"
    if isinstance(event, events.Terminal):
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
        values: list[Any] = cast("Any", then)
        return len(values) == len(now) and all(map(_is_same_value, values, now))
    return bool(then == now)


# --- reporting


def nondeterminism(
    started: events.OrchestrationStarted,
    turn: int,
    recorded: Sequence[events.Event],
    performed: Sequence[events.Event],
) -> Nondeterminism:
    """Return the error for a turn in which the code did not repeat its history."""
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
    window = slice(max(0, same - 2), same + _DIFF_LINES_MAX)
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
            if event.name == INSTANCE_RESULT:
                return f"wait for the end of instance {_call(event.input)}"
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
        case events.MessageSent():
            what = {"event": "raise_event_to", "message": "send_message_to"}.get(event.kind)
            named = f"{event.name!r}, " if event.name else ""
            data = _short(bytes(event.data).decode())
            return f"{what or 'cancel_instance'}({event.target_instance_id!r}, {named}{data})"
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
            if isinstance(event, events.Cancelling):
                return f"give up step {event.source_event_id}"
            return type(event).__name__


def _call(payload: Any) -> str:
    text = bytes(payload).decode()
    if text.startswith("[") and text.endswith("]"):
        return f"({_short(text[1:-1])})"
    return f"({_short(text)})"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
