"""History events: a closed set of records with common fields and a ``type`` tag.

Kinds are append-only: a breaking change is a new kind, a new field has a default. Payload fields
hold raw JSON, so that a stored event reads as one document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from perdure.model.failures import Failure

if TYPE_CHECKING:
    from collections.abc import Iterable

NULL = msgspec.Raw(b"null")


class BaseEvent(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag=str,
    gc=False,  # never part of a cycle: the garbage collector skips histories
):
    """Fields of every event. ``event_id`` is its position in the history, from 1.

    Subclasses inherit the options of the class, except ``kw_only``. Type checkers want ``frozen``
    to be repeated.
    """

    event_id: int
    instance_id: str
    execution_id: int
    timestamp_ms: int
    turn: int
    """Number of the turn that wrote the event, from 1. Replay compares turn by turn."""


class Scheduled(BaseEvent, frozen=True, kw_only=True):
    """An event that a call of the code has caused."""

    op: str
    """Operation key: path of the calling task and a number in that task, ``0.2/3``."""
    site: str = ""
    """``file:line`` of the call in user code."""
    compensation: bool = False
    """True if a saga made the call, to undo an earlier step."""


class Resolving(BaseEvent, frozen=True, kw_only=True):
    """An event that completes or cancels the step of an earlier event."""

    source_event_id: int


class Cancelling(Resolving, frozen=True, kw_only=True):
    """An event by which the code gives up a step."""


class Watcher(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A step of another instance that waits for the end of this one."""

    instance_id: str
    execution_id: int
    activity_id: int
    seed: str
    """Seed of the execution: a later instance with the same id has another one."""
    watched_id: str
    """The instance that it waits for. A copy of that instance, under another id, is not."""


class Terminal(BaseEvent, frozen=True, kw_only=True):
    """The last event of an execution."""


# --- life of an execution


class OrchestrationStarted(BaseEvent, frozen=True, kw_only=True):
    """Always the first event of an execution."""

    name: str
    version: str
    input: msgspec.Raw = NULL
    framework_version: str
    seed: str
    """Random seed of this execution: ``random()`` and ``uuid4()`` derive from it."""
    parent_instance_id: str | None = None
    parent_execution_id: int | None = None
    parent_event_id: int | None = None
    depth: int = 0
    initial_custom_status: str | None = None
    initial_state: dict[str, str] | None = None
    """State that the execution begins with: JSON text by key. None for a first execution, which
    begins with none, and in histories written before this field existed."""
    trace: str | None = None
    scheduled_for_ms: int | None = None
    """The time for which a schedule, or ``start(at=...)``, has started the instance."""
    key_seed: str | None = None
    """Replaces the seed in idempotency keys. A copy repeats the seed of its original, but its
    activities are other calls."""


class OrchestrationCompleted(Terminal, frozen=True, kw_only=True):
    output: msgspec.Raw = NULL


class OrchestrationFailed(Terminal, frozen=True, kw_only=True):
    failure: Failure


class OrchestrationCancelled(Terminal, frozen=True, kw_only=True):
    reason: str = ""


class OrchestrationTerminated(Terminal, frozen=True, kw_only=True):
    reason: str = ""


class OrchestrationContinuedAsNew(Terminal, frozen=True, kw_only=True):
    input: msgspec.Raw = NULL
    version: str | None = None


class OrchestrationCancelRequested(BaseEvent, frozen=True, kw_only=True):
    reason: str = ""


class OrchestrationRetried(BaseEvent, frozen=True, kw_only=True):
    """An operator let an ended execution go on. The turns after ``kept_turn`` are undone."""

    kept_turn: int
    started: dict[str, str] = {}
    """Ids of the instances that undone turns have started detached, by operation key and
    name of the orchestration."""
    left_out: tuple[int, ...] = ()
    """Ids of arrived events and messages of the kept turns that the code does not get again."""


# --- activities


class ActivityScheduled(Scheduled, frozen=True, kw_only=True):
    """The event id is the id of the activity."""

    name: str
    input: msgspec.Raw = NULL
    session_id: str | None = None
    tag: str | None = None


class ActivityCompleted(Resolving, frozen=True, kw_only=True):
    result: msgspec.Raw = NULL
    attempts: int = 1


class ActivityFailed(Resolving, frozen=True, kw_only=True):
    failure: Failure


class ActivityCancelRequested(Cancelling, frozen=True, kw_only=True):
    reason: str = ""


# --- timers


class TimerCreated(Scheduled, frozen=True, kw_only=True):
    fire_at_ms: int


class TimerFired(Resolving, frozen=True, kw_only=True):
    fire_at_ms: int


class TimerCancelled(Cancelling, frozen=True, kw_only=True):
    pass


# --- external events and mailboxes


class ExternalSubscribed(Scheduled, frozen=True, kw_only=True):
    name: str


class ExternalEvent(BaseEvent, frozen=True, kw_only=True):
    name: str
    data: msgspec.Raw = NULL


class ExternalSubscribedCancelled(Cancelling, frozen=True, kw_only=True):
    reason: str = ""


class QueueSubscribed(Scheduled, frozen=True, kw_only=True):
    name: str


class QueueEventDelivered(BaseEvent, frozen=True, kw_only=True):
    name: str
    data: msgspec.Raw = NULL


class QueueSubscriptionCancelled(Cancelling, frozen=True, kw_only=True):
    reason: str = ""


# --- other orchestrations


class SubOrchestrationScheduled(Scheduled, frozen=True, kw_only=True):
    name: str
    child_instance_id: str
    input: msgspec.Raw = NULL
    version: str | None = None
    on_parent_close: str = "cancel"
    """``cancel`` or ``abandon``: applied to the child if this execution ends first."""


class SubOrchestrationCompleted(Resolving, frozen=True, kw_only=True):
    result: msgspec.Raw = NULL


class SubOrchestrationFailed(Resolving, frozen=True, kw_only=True):
    failure: Failure


class SubOrchestrationCancelRequested(Cancelling, frozen=True, kw_only=True):
    reason: str = ""


class OrchestrationChained(Scheduled, frozen=True, kw_only=True):
    """A detached start: the new instance has no parent and is independent."""

    name: str
    target_instance_id: str
    input: msgspec.Raw = NULL
    version: str | None = None
    delay_ms: int = 0
    scheduled_for_ms: int | None = None


class MessageSent(Scheduled, frozen=True, kw_only=True):
    """A message to another instance. It is sent with the commit of the turn."""

    kind: str
    """``event``, ``message`` or ``cancel``."""
    target_instance_id: str
    name: str = ""
    """Name of the event or the mailbox."""
    data: msgspec.Raw = NULL
    """The value; the reason of a cancellation."""


class WatcherAdded(BaseEvent, frozen=True, kw_only=True):
    """Another instance waits for the end of this one and will be told."""

    watcher: Watcher


# --- state and recorded values


class CustomStatusUpdated(Scheduled, frozen=True, kw_only=True):
    status: str | None = None
    """JSON text; None clears it."""


class KeyValueSet(Scheduled, frozen=True, kw_only=True):
    key: str
    value: str


class KeyValueCleared(Scheduled, frozen=True, kw_only=True):
    key: str


class KeyValuesCleared(Scheduled, frozen=True, kw_only=True):
    pass


class SideEffectRecorded(Scheduled, frozen=True, kw_only=True):
    value: msgspec.Raw = NULL


class PatchMarked(Scheduled, frozen=True, kw_only=True):
    """The code called ``patched(name)`` for the first time in a live turn, which returned True."""

    name: str


StateChange: TypeAlias = KeyValueSet | KeyValueCleared | KeyValuesCleared

Event: TypeAlias = (
    OrchestrationStarted
    | OrchestrationCompleted
    | OrchestrationFailed
    | OrchestrationCancelled
    | OrchestrationTerminated
    | OrchestrationContinuedAsNew
    | OrchestrationCancelRequested
    | OrchestrationRetried
    | ActivityScheduled
    | ActivityCompleted
    | ActivityFailed
    | ActivityCancelRequested
    | TimerCreated
    | TimerFired
    | TimerCancelled
    | ExternalSubscribed
    | ExternalEvent
    | ExternalSubscribedCancelled
    | QueueSubscribed
    | QueueEventDelivered
    | QueueSubscriptionCancelled
    | SubOrchestrationScheduled
    | SubOrchestrationCompleted
    | SubOrchestrationFailed
    | SubOrchestrationCancelRequested
    | OrchestrationChained
    | MessageSent
    | WatcherAdded
    | CustomStatusUpdated
    | KeyValueSet
    | KeyValueCleared
    | KeyValuesCleared
    | SideEffectRecorded
    | PatchMarked
)


def without_undone(history: Iterable[Event]) -> list[Event]:
    """Return the history without the turns that a retry has undone, and without what it left out.

    Event ids then have gaps.
    """
    kept: list[Event] = []
    for event in history:
        if type(event) is OrchestrationRetried:
            left_out = event.left_out
            kept = [
                each
                for each in kept
                if each.turn <= event.kept_turn and each.event_id not in left_out
            ]
        kept.append(event)
    return kept
