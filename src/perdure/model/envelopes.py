"""Envelopes: work items in the records by which stores route them.

Clients and runtimes share this protocol. No other module fills routing data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.errors import InvalidValue
from perdure.model import events, wire, work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.model.status import Status


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Holds texts, numbers and records, so it is never part of a cycle: the collector skips it."""


# --- the records


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
        body=wire.encode(item),
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
        body=wire.encode(item),
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
    item = wire.decode_item(message.body)
    written = envelope(item, visible_at_ms=message.visible_at_ms)
    _compare(message, written, ("instance_id", "kind", "start", "timer"))
    return item


def open_activity(message: WorkerMessage) -> work.ActivityExecute:
    """Return the item in a message of the worker queue. Raises as ``open_message``."""
    item = wire.decode_activity(message.body)
    _compare(message, activity_envelope(item), ("identity", "name", "session_id", "tag"))
    return item


def _compare(message: Record, written: Record, names: tuple[str, ...]) -> None:
    for name in names:
        outside, inside = getattr(message, name), getattr(written, name)
        if outside != inside:
            raise InvalidValue(
                f"the {name} is {outside!r} in the envelope, and {inside!r} in the body"
            )
