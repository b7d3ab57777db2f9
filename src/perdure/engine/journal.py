"""The decisions of a turn: appended to history in a live turn, compared with it on replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from perdure.engine.matching import is_same_payload, is_same_request, key_of, nondeterminism
from perdure.engine.sites import call_site
from perdure.errors import Nondeterminism
from perdure.model import events

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

    from perdure.authoring.policies import ActivityOptions
    from perdure.codec import Codec
    from perdure.engine.matching import Cancelling

S = TypeVar("S", bound=events.Scheduled)

# Frames of the engine between a call in user code and call_site() here.
_OWN_FRAMES = 4


class Journal:
    """The decisions of the running turn, and the envelope fields that every event carries."""

    def __init__(self, started: events.OrchestrationStarted, codec: Codec) -> None:
        self.instance_id = started.instance_id
        self.execution_id = started.execution_id
        self.parent_instance_id = started.parent_instance_id
        self.last_event_id = 0
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
        event = kind(
            event_id=self.last_event_id,
            instance_id=self.instance_id,
            execution_id=self.execution_id,
            timestamp_ms=self.now_ms,
            turn=self.turn,
            **fields,
        )
        self.delta.append(event)

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

    def begin_replay(
        self, turn: int, now_ms: int, arrived: int, decisions: Sequence[events.Event]
    ) -> None:
        """Expect exactly these decisions, in any order: branches may interleave differently."""
        self.last_event_id += arrived
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
            self.last_event_id += 1
            return self._repeat(kind, op, site, fields)
        event = kind(
            event_id=self.last_event_id + 1,
            instance_id=self.instance_id,
            execution_id=self.execution_id,
            timestamp_ms=self.now_ms,
            turn=self.turn,
            op=op,
            site=call_site(_OWN_FRAMES) or site,
            **fields,
        )
        self.delta.append(event)
        # Counted after the event exists: deep recursion raises RecursionError above this line.
        self.commands += 1
        self.last_event_id += 1
        return event

    def schedule_activity(
        self, op: str, site: str, name: str, payload: msgspec.Raw, options: ActivityOptions
    ) -> events.ActivityScheduled:
        """Like ``schedule`` for the most common request; keywords cost a quarter of a dict."""
        if self.is_replaying:
            fields = {
                "name": name,
                "input": payload,
                "session_id": options.session,
                "tag": options.tag,
            }
            return self.schedule(events.ActivityScheduled, op, site, fields)
        event = events.ActivityScheduled(
            event_id=self.last_event_id + 1,
            instance_id=self.instance_id,
            execution_id=self.execution_id,
            timestamp_ms=self.now_ms,
            turn=self.turn,
            op=op,
            site=call_site(_OWN_FRAMES) or site,
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

    def cancel(self, kind: type[Cancelling], source_event_id: int, **fields: Any) -> None:
        """Record that the code gave up an open step."""
        if not self.is_replaying:
            event_id = self.last_event_id + 1
            self.delta.append(self._cancelling(kind, event_id, source_event_id, fields))
            self.last_event_id = event_id
            return
        self.last_event_id += 1
        recorded = self._expected.pop(f"cancel {source_event_id}", None)
        if recorded is not None and type(recorded) is kind:
            self._performed.append(recorded)
        else:
            self._unexpected += 1
            self._performed.append(self._cancelling(kind, 0, source_event_id, fields))

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
        unexpected = kind(
            event_id=-self._unexpected,
            instance_id=self.instance_id,
            execution_id=self.execution_id,
            timestamp_ms=self.now_ms,
            turn=self.turn,
            op=op,
            site=call_site() or site,
            **fields,
        )
        self._performed.append(unexpected)
        return unexpected

    def _cancelling(
        self, kind: type[Cancelling], event_id: int, source: int, fields: dict[str, Any]
    ) -> Cancelling:
        return kind(
            event_id=event_id,
            instance_id=self.instance_id,
            execution_id=self.execution_id,
            timestamp_ms=self.now_ms,
            turn=self.turn,
            source_event_id=source,
            **fields,
        )
