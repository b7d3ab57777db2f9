"""The stored form of events and work items: JSON texts, in the records by which stores route them.

Clients and runtimes share it. No other module knows the texts or fills routing data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.errors import CorruptData, InvalidValue
from perdure.model import events, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from perdure.model.status import Status

FORMAT_VERSION: Final = 1
"""Version of the stored form; a store with a newer one is refused."""

# --- the records


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Holds texts, numbers and records, so it is never part of a cycle: the collector skips it."""


class HistoryRecord(Record, frozen=True):
    """One event of a history: its position, and its JSON text."""

    event_id: int
    data: str


class StartRouting(Record, frozen=True, omit_defaults=True):
    """Routing data of a message that can create an instance or its next execution."""

    name: str
    version: str | None = None
    parent_instance_id: str | None = None


class TimerIdentity(Record, frozen=True):
    """Routing data of a timer message, so that it can be removed when its timer is cancelled."""

    execution_id: int
    timer_id: int


class OrchestratorMessage(Record, frozen=True, omit_defaults=True):
    """A message on its way into the orchestrator queue."""

    instance_id: str
    kind: str
    """Type tag of the work item; for people and filters, never for decisions of the provider."""
    body: str
    visible_at_ms: int | None = None
    """None: at once. A time in the past is kept as it is."""
    start: StartRouting | None = None
    timer: TimerIdentity | None = None


class ActivityIdentity(Record, frozen=True):
    """Names one scheduled activity of one execution."""

    instance_id: str
    execution_id: int
    activity_id: int


class Claim(Record, frozen=True):
    """A work item that is written already locked by the runtime that commits it."""

    lock_token: str
    lock_timeout_ms: int


class WorkerMessage(Record, frozen=True, omit_defaults=True):
    """A message on its way into the worker queue."""

    identity: ActivityIdentity
    name: str
    """Name of the activity: workers fetch only what they can run."""
    body: str
    session_id: str | None = None
    tag: str | None = None
    visible_at_ms: int | None = None
    claim: Claim | None = None
    """Only without a session. Counts as the first attempt."""


# --- texts

_encoder = msgspec.json.Encoder()


def encode(record: events.Event | work.OrchestratorItem | work.ActivityExecute) -> str:
    return _encoder.encode(record).decode()


def _decoder_of(kind: Any, what: str) -> Callable[[str], Any]:
    decode = msgspec.json.Decoder(kind).decode

    def decode_text(text: str) -> Any:
        try:
            return decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CorruptData(what, f"{error}: {text[:200]!r}") from error

    return decode_text


decode_event: Callable[[str], events.Event] = _decoder_of(events.Event, "decode_event")
decode_item: Callable[[str], work.OrchestratorItem] = _decoder_of(
    work.OrchestratorItem, "decode_item"
)
decode_activity: Callable[[str], work.ActivityExecute] = _decoder_of(
    work.ActivityExecute, "decode_activity"
)


def record_of(event: events.Event) -> HistoryRecord:
    """Return the event as a store keeps it."""
    return HistoryRecord(event_id=event.event_id, data=encode(event))


def decode_history(records: Iterable[HistoryRecord]) -> list[events.Event]:
    """Decode every event; raise CorruptData for an unknown or damaged one, which is not skipped."""
    return [decode_event(record.data) for record in records]


# --- wrapping work items


def envelope(
    item: work.OrchestratorItem, *, visible_at_ms: int | None = None
) -> OrchestratorMessage:
    """Wrap a work item for the orchestrator queue."""
    start: StartRouting | None = None
    timer: TimerIdentity | None = None
    if isinstance(item, (work.StartOrchestration, work.ContinueAsNew)):
        start = StartRouting(
            name=item.name,
            version=item.version,
            parent_instance_id=item.parent.instance_id if item.parent else None,
        )
    elif isinstance(item, work.TimerFired):
        timer = TimerIdentity(execution_id=item.execution_id, timer_id=item.timer_id)
        visible_at_ms = item.fire_at_ms
    return OrchestratorMessage(
        instance_id=item.instance_id,
        kind=type(item).__name__,
        body=encode(item),
        visible_at_ms=visible_at_ms,
        start=start,
        timer=timer,
    )


def end_notices(
    watchers: Iterable[events.Watcher], instance_id: str, status: Status, output: str | None
) -> list[OrchestratorMessage]:
    """Return the messages that tell the watchers of an instance about its end."""
    watchers = list(watchers)
    if not watchers:
        return []
    result = msgspec.Raw(msgspec.json.encode(work.instance_end(instance_id, status, output)))
    return [
        envelope(
            work.ActivityCompleted(
                instance_id=watcher.instance_id,
                execution_id=watcher.execution_id,
                activity_id=watcher.activity_id,
                result=result,
                seed=watcher.seed,
            )
        )
        for watcher in watchers
        if watcher.watched_id == instance_id
    ]


def identity_of(item: work.ActivityExecute) -> ActivityIdentity:
    return ActivityIdentity(
        instance_id=item.instance_id,
        execution_id=item.execution_id,
        activity_id=item.activity_id,
    )


def unreadable_activity(identity: ActivityIdentity, name: str) -> work.ActivityExecute:
    """Return a work item in the place of one whose body cannot be decoded."""
    return work.ActivityExecute(**msgspec.structs.asdict(identity), name=name)


def activity_envelope(
    item: work.ActivityExecute, *, visible_at_ms: int | None = None, claim: Claim | None = None
) -> WorkerMessage:
    """Wrap an activity for the worker queue."""
    return WorkerMessage(
        identity=identity_of(item),
        name=item.name,
        body=encode(item),
        session_id=item.session_id,
        tag=item.tag,
        visible_at_ms=visible_at_ms,
        claim=claim,
    )


# --- opening them


def open_message(message: OrchestratorMessage) -> work.OrchestratorItem:
    """Return the item in a message of the orchestrator queue.

    Raises CorruptData if the body cannot be decoded, and InvalidValue if it is not what the
    envelope says: a store would route one thing, and the code would see another.
    """
    item = decode_item(message.body)
    written = envelope(item, visible_at_ms=message.visible_at_ms)
    _compare(message, written, ("instance_id", "kind", "start", "timer"))
    return item


def open_activity(message: WorkerMessage) -> work.ActivityExecute:
    """Return the item in a message of the worker queue. Raises as ``open_message``."""
    item = decode_activity(message.body)
    _compare(message, activity_envelope(item), ("identity", "name", "session_id", "tag"))
    return item


def _compare(message: Record, written: Record, names: tuple[str, ...]) -> None:
    for name in names:
        outside, inside = getattr(message, name), getattr(written, name)
        if outside != inside:
            raise InvalidValue(
                f"the {name} is {outside!r} in the envelope, and {inside!r} in the body"
            )
