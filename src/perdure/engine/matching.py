"""Whether what the code asks for now is what history says it asked for then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from perdure.model import events

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

# A timer's time follows from the turn, a child's id and version and a detached start's delay from
# what was decided then: history decides these, the code cannot change them any more.
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
    """What identifies a decision within its turn; None for what came from outside."""
    if isinstance(event, events.Scheduled):
        return event.op
    if isinstance(event, CANCELLING_KINDS):
        return f"cancel {event.source_event_id}"
    if isinstance(event, events.TERMINAL_KINDS):
        return "end"
    return None


def is_same_request(recorded: events.Scheduled, asked: Mapping[str, Any], codec: Codec) -> bool:
    """Of one kind, the same content; payloads may differ in spelling, not in value."""
    for name in COMPARED_FIELDS[type(recorded)]:
        then, now = getattr(recorded, name), asked[name]
        if then == now:
            continue
        if name in _GIVEN_IDS and now is None:
            continue  # an automatic id: the recorded one holds
        if name not in _PAYLOADS or not is_same_payload(then, now, codec):
            return False
    return True


def is_same_payload(
    then: str | msgspec.Raw | None, now: str | msgspec.Raw | None, codec: Codec
) -> bool:
    """Equal as JSON values: a transform may give other bytes each time it wraps the same value."""
    if then is None or now is None:
        return then is now
    return _is_same_value(_decoded(then, codec), _decoded(now, codec))


def _decoded(payload: str | msgspec.Raw, codec: Codec) -> Any:
    raw = msgspec.Raw(payload.encode()) if isinstance(payload, str) else payload
    return codec.decode(raw, where="recorded payload")


def _is_same_value(then: Any, now: Any) -> bool:
    """Stricter than ==, which takes True for 1 and 1.0."""
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
