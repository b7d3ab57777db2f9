"""The records that go in and out of a store.

A provider stores ``body`` and ``data`` texts without looking inside them; everything that it needs
for routing, visibility, identity and state travels beside them in typed fields. The messages that
go into the two queues are part of the model, and can be imported from here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from msgspec.structs import astuple

from perdure.arguments import (
    check_flag,
    check_ids,
    check_members,
    check_moment,
    check_string,
    check_tag,
    whole_milliseconds,
)
from perdure.errors import InvalidValue
from perdure.limits import TAGS_PER_FILTER_MAX
from perdure.model.failures import Block
from perdure.model.status import Status
from perdure.model.wire import ActivityIdentity as ActivityIdentity
from perdure.model.wire import Claim as Claim
from perdure.model.wire import HistoryRecord as HistoryRecord
from perdure.model.wire import OrchestratorMessage as OrchestratorMessage
from perdure.model.wire import Record
from perdure.model.wire import StartRouting as StartRouting
from perdure.model.wire import TimerIdentity as TimerIdentity
from perdure.model.wire import WorkerMessage as WorkerMessage
from perdure.model.work import JOB_PREFIX, JOB_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

Version: TypeAlias = tuple[int, int, int]
"""A semantic version without pre-release: compares as it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The features that a provider declares. The conformance kit checks each that is declared.

    Decisions depend on them, never on the name of a provider.
    """

    durable: bool = True
    """Committed data survives the end of the process."""
    several_handles: bool = True
    """A second handle may be opened on the same store while the first is in use."""
    several_processes: bool = True
    """The second handle may be in another process."""
    long_poll: bool = True
    """A fetch waits for work up to its poll timeout and returns as soon as there is some."""
    hot_path: bool = True
    """``TurnCommit.keep_lock_ms``, ``settled_work``, claimed work items, ``owner`` on fetch, and
    ``start_orchestration_item``."""
    admin: bool = True
    """The property ``admin`` is a ``ProviderAdmin``."""
    injected_clock: bool = True
    """Leases and visibility follow the clock that was handed in, not one of the store's own."""
    other_loops: bool = False
    """Verbs may also be awaited on another event loop, in another thread, and get done even while
    the loop that opened the handle is blocked."""
    transactions: bool = False
    """``settle_in_transaction``: user code may write to the store's own database."""
    time_resolution_ms: int = 1


# --- history and messages


class Delivery(Record, frozen=True):
    """A message as it comes out of the orchestrator queue."""

    message_id: int
    """Position in the queue; names the message in ``TurnCommit.consumed``."""
    body: str
    attempt_count: int


class EnqueueCondition(StrEnum):
    """The condition under which a message is taken, checked in the same transaction."""

    ALWAYS = "always"
    ALIVE = "alive"
    """The instance exists (or its start is queued) and has not ended. Else: NotFound,
    InstanceFinished."""
    ABSENT = "absent"
    """No instance and no queued start with that id. Else nothing is written and False is
    returned."""
    REPLACE = "replace"
    """An instance with that id is deleted with its tree, running or not. Else, for a child
    whose parent is there and has not ended: NotARoot."""


# --- turns


class KvSet(Record, frozen=True, tag="set"):
    key: str
    value: str
    updated_at_ms: int


class KvClear(Record, frozen=True, tag="clear"):
    key: str


class KvClearAll(Record, frozen=True, tag="clear_all"):
    pass


KvChange: TypeAlias = KvSet | KvClear | KvClearAll


class CustomStatusChange(Record, frozen=True):
    """Sets the custom status, or clears it with None. Adds one to its version."""

    value: str | None


class ExecutionMetadata(Record, frozen=True, omit_defaults=True):
    """The state of the execution after this turn. None leaves a field as it is."""

    status: Status | None = None
    """RUNNING, or a status that ends the execution."""
    output: str | None = None
    """JSON text of the result, of the failure, or of the next execution's input."""
    name: str | None = None
    version: str | None = None
    """Set with the name, which creates the instance if it is missing. A name without a version:
    any version of the handler may run what comes next."""
    parent_instance_id: str | None = None
    """Stored when the instance is created; never changed afterwards."""
    framework_version: Version | None = None
    """Pins the execution for capability filters; overwrites."""


class TurnCommit(Record, frozen=True, omit_defaults=True):
    """Everything that one turn changes; applied as a whole or not at all."""

    execution_id: int
    history_delta: tuple[HistoryRecord, ...] = ()
    """New events with consecutive ids. The turn is refused if the event before the first one is not
    stored: a history has no holes."""
    worker_items: tuple[WorkerMessage, ...] = ()
    orchestrator_items: tuple[OrchestratorMessage, ...] = ()
    metadata: ExecutionMetadata = ExecutionMetadata()
    custom_status: CustomStatusChange | None = None
    kv_changes: tuple[KvChange, ...] = ()
    cancelled_activities: tuple[ActivityIdentity, ...] = ()
    cancelled_timers: tuple[TimerIdentity, ...] = ()
    """Timers of this instance that shall not fire, those that this commit adds included."""
    consumed: tuple[int, ...] | None = None
    """``message_id`` of each delivery that the turn used up; the turn is refused if one of them
    does not carry this token. None: all that carry it."""
    returned: tuple[int, ...] = ()
    """``message_id`` of deliveries that the turn gives back: free again, and the attempt is taken
    off. Only if the lock is released. If the execution goes on, mail does not make the instance
    ready until the commit of its next turn."""
    keep_lock_ms: int | None = None
    """Hot path: keep the instance lock for that long from now instead of releasing it."""
    settled_work: tuple[str, ...] = ()
    """Hot path: lock tokens of work items whose completions this turn has already consumed; each
    must be held, and each item is removed."""
    after_event_id: int = 0
    """The last event that a turn without new events has seen. The turn is refused if that event
    is not stored. 0 for other turns."""


class TrustedCommit(TurnCommit, frozen=True):
    """A turn that a runtime built. Stores do not validate it: its parts were checked before."""


class KvEntry(Record, frozen=True):
    value: str
    updated_at_ms: int


class OrchestrationItem(Record, frozen=True):
    """The state from which a turn starts."""

    instance_id: str
    name: str
    version: str | None
    """None when not yet known."""
    execution_id: int
    history: tuple[HistoryRecord, ...]
    messages: tuple[Delivery, ...]
    kv_snapshot: dict[str, KvEntry]
    """State at the end of the previous execution, never of the current one."""
    parent_instance_id: str | None = None
    history_error: str | None = None
    """Set when stored history could not even be read; then ``history`` is empty."""


class FetchedOrchestration(Record, frozen=True):
    """An instance lock and what it covers."""

    item: OrchestrationItem
    lock_token: str
    attempt_count: int
    """The highest of the batch."""
    continues: bool = False
    """True: the caller held this lock already; only ``instance_id`` and ``messages`` are filled."""


class FetchedWork(Record, frozen=True):
    """A locked work item."""

    identity: ActivityIdentity
    name: str
    body: str
    lock_token: str
    attempt_count: int
    session_id: str | None = None
    tag: str | None = None
    heartbeat: str | None = None
    """The last report of an earlier delivery."""


# --- filters


class VersionRange(Record, frozen=True):
    """Both ends included."""

    minimum: Version
    maximum: Version

    def contains(self, version: Version) -> bool:
        return self.minimum <= version <= self.maximum


class OrchestrationFilter(Record, frozen=True):
    """The handlers that a dispatcher has. Applied before anything is locked or read."""

    framework_versions: tuple[VersionRange, ...] | None = None
    """None: any. Empty: nothing. An execution without a pinned version always fits."""
    handlers: frozenset[tuple[str, str]] | None = None
    """(name, version) pairs; None: any. An instance without a version fits by its name alone."""


class TagMode(StrEnum):
    DEFAULT_ONLY = "default_only"
    TAGS = "tags"
    DEFAULT_AND = "default_and"
    ANY = "any"
    NONE = "none"


_MODES_WITH_TAGS = frozenset({TagMode.TAGS, TagMode.DEFAULT_AND})


class TagFilter(Record, frozen=True):
    """Which work items a worker takes by their tag. Build it with the class methods."""

    mode: TagMode = TagMode.DEFAULT_ONLY
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        mode: object = self.mode
        if not isinstance(mode, TagMode) or (self.tags and mode not in _MODES_WITH_TAGS):
            given = ", ".join(map(repr, sorted(self.tags or {"gpu"})))
            raise InvalidValue(
                f"a TagFilter is made by TagFilter.only({given}) and the like, not with the mode "
                f"{mode!r}"
            )

    @classmethod
    def default_only(cls) -> TagFilter:
        return cls()

    @classmethod
    def only(cls, *tags: str) -> TagFilter:
        return cls(mode=TagMode.TAGS, tags=_checked_tags(tags))

    @classmethod
    def default_and(cls, *tags: str) -> TagFilter:
        return cls(mode=TagMode.DEFAULT_AND, tags=_checked_tags(tags))

    @classmethod
    def any(cls) -> TagFilter:
        return cls(mode=TagMode.ANY)

    @classmethod
    def none(cls) -> TagFilter:
        return cls(mode=TagMode.NONE)

    def matches(self, tag: str | None) -> bool:
        match self.mode:
            case TagMode.DEFAULT_ONLY:
                return tag is None
            case TagMode.TAGS:
                return tag in self.tags
            case TagMode.DEFAULT_AND:
                return tag is None or tag in self.tags
            case TagMode.ANY:
                return True
            case TagMode.NONE:
                return False


def _checked_tags(tags: tuple[str, ...]) -> frozenset[str]:
    checked = frozenset(map(check_tag, tags))
    if not 1 <= len(checked) <= TAGS_PER_FILTER_MAX:
        raise InvalidValue(f"a tag filter takes 1 to {TAGS_PER_FILTER_MAX} tags, not {tags!r}")
    return checked


class SessionFetch(Record, frozen=True):
    """Lets a worker take items that belong to a session."""

    owner_id: str
    lock_timeout_ms: int
    only_owned: bool = False
    """At capacity: items of sessions that this owner already holds, but no new session."""


# --- administration

_STATUSES: Final = "a set of Status members, such as {Status.RUNNING}"


def _check_bounds(record: Record, *names: str) -> None:
    for name in names:
        if (moment := getattr(record, name)) is not None:
            check_moment(moment, name)


# A stored time has whole milliseconds. It is past a bound if it is past the bound rounded down, and
# before it if it is before the bound rounded up.


def _after_ms(bound: datetime | None) -> int | None:
    return None if bound is None else whole_milliseconds(bound, round_up=False)


def _before_ms(bound: datetime | None) -> int | None:
    return None if bound is None else whole_milliseconds(bound, round_up=True)


class InstanceQuery(Record, frozen=True, omit_defaults=True):
    """Filters, all of which must fit. None: any."""

    statuses: frozenset[Status] | None = None
    name: str | None = None
    version: str | None = None
    instance_ids: tuple[str, ...] | None = None
    id_prefix: str | None = None
    text: str | None = None
    """Occurs in the id, name, output or custom status, in upper or lower case."""
    parent_instance_id: str | None = None
    roots_only: bool = False
    created_after: datetime | None = None
    created_before: datetime | None = None
    completed_after: datetime | None = None
    completed_before: datetime | None = None
    """Strict, as all the time bounds."""

    def __post_init__(self) -> None:
        if self.statuses is not None:
            check_members(self.statuses, Status, "statuses", _STATUSES)
        if self.instance_ids is not None:
            check_ids(self.instance_ids, "instance_ids")
        for name in ("name", "version", "id_prefix", "text", "parent_instance_id"):
            if (text := getattr(self, name)) is not None:
                check_string(text, name)
        check_flag(self.roots_only, "roots_only")
        _check_bounds(
            self, "created_after", "created_before", "completed_after", "completed_before"
        )

    @property
    def created_after_ms(self) -> int | None:
        return _after_ms(self.created_after)

    @property
    def created_before_ms(self) -> int | None:
        return _before_ms(self.created_before)

    @property
    def completed_after_ms(self) -> int | None:
        return _after_ms(self.completed_after)

    @property
    def completed_before_ms(self) -> int | None:
        return _before_ms(self.completed_before)


class _Instance(Record, frozen=True, kw_only=True):
    """The values of an instance that a listing shows and an export carries."""

    instance_id: str
    version: str | None
    execution_id: int
    created_at_ms: int
    updated_at_ms: int
    parent_instance_id: str | None
    custom_status: str | None
    custom_status_version: int
    block: Block | None = None


class InstanceInfo(_Instance, frozen=True, kw_only=True):
    name: str
    status: Status
    output: str | None
    completed_at_ms: int | None


class InstancePage(Record, frozen=True):
    """Newest first."""

    instances: tuple[InstanceInfo, ...]
    next_cursor: str | None
    """Hand it back for the next page; None: this was the last."""


class ExecutionInfo(Record, frozen=True):
    execution_id: int
    status: Status
    output: str | None
    started_at_ms: int
    completed_at_ms: int | None
    event_count: int
    framework_version: Version | None


class SystemMetrics(Record, frozen=True):
    total_instances: int
    total_executions: int
    total_events: int
    by_status: dict[Status, int]


class QueueDepth(Record, frozen=True):
    visible: int
    """Ready to be fetched, not locked."""
    delayed: int
    locked: int
    oldest_visible_age_ms: int | None


class ActivityDepth(QueueDepth, frozen=True, kw_only=True):
    """The work items of one activity and tag."""

    name: str
    tag: str | None


class QueueDepths(Record, frozen=True):
    orchestrator: QueueDepth
    worker: QueueDepth
    dead_letters: int
    activities: tuple[ActivityDepth, ...] = ()
    """The worker queue by name and tag."""

    @classmethod
    def of(
        cls, orchestrator: QueueDepth, activities: Iterable[ActivityDepth], dead_letters: int
    ) -> Self:
        """Return the depths; those of the worker queue are the sum over its activities."""
        by_name = sorted(activities, key=lambda each: (each.name, each.tag or ""))
        ages = [each.oldest_visible_age_ms for each in by_name]
        worker = QueueDepth(
            visible=sum(each.visible for each in by_name),
            delayed=sum(each.delayed for each in by_name),
            locked=sum(each.locked for each in by_name),
            oldest_visible_age_ms=max((age for age in ages if age is not None), default=None),
        )
        return cls(orchestrator, worker, dead_letters, tuple(by_name))


class QueuedMessage(Record, frozen=True):
    """A message as it lies in the orchestrator queue."""

    message_id: int
    message: OrchestratorMessage
    visible_at_ms: int
    enqueued_at_ms: int
    attempt_count: int
    locked: bool


class QueuedWork(Record, frozen=True):
    """A message as it lies in the worker queue."""

    message_id: int
    message: WorkerMessage
    visible_at_ms: int
    enqueued_at_ms: int
    attempt_count: int
    locked_until_ms: int | None
    heartbeat: str | None


class DeadLetter(Record, frozen=True):
    """A message for which no instance appeared; kept until it is requeued or deleted."""

    letter_id: int
    reason: str
    dead_since_ms: int
    message: OrchestratorMessage


class InstanceTree(Record, frozen=True):
    root_id: str
    instance_ids: tuple[str, ...]
    """All of them, the root included, parents before their children."""


class Counts(Record, frozen=True):
    """Numbers of what a call has changed."""

    def plus(self, other: Self) -> Self:
        """Return the sum of both, field by field."""
        return type(self)(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class DeleteResult(Counts, frozen=True):
    instances: int = 0
    executions: int = 0
    events: int = 0
    messages: int = 0


class PruneOptions(Record, frozen=True, omit_defaults=True):
    """Which past executions to drop; all conditions must fit. The current one always stays."""

    keep_last: int | None = None
    completed_before: datetime | None = None

    def __post_init__(self) -> None:
        _check_bounds(self, "completed_before")

    @property
    def completed_before_ms(self) -> int | None:
        return _before_ms(self.completed_before)


class PruneResult(Counts, frozen=True):
    instances_processed: int = 0
    executions: int = 0
    events: int = 0


class KeepRule(Record, frozen=True, omit_defaults=True):
    """The time for which roots are kept that ended with a status; None: forever."""

    status: Status
    kept_ms: int | None
    name: str | None = None
    """The orchestration. None: each one that has no rule of its own for the status."""


class WorkerInfo(Record, frozen=True, omit_defaults=True):
    """A runtime that serves this store."""

    worker_id: str
    host: str
    process_id: int
    started_at_ms: int
    framework_version: str
    handlers: tuple[tuple[str, str], ...] = ()
    activities: tuple[str, ...] = ()
    slots: int = 0
    busy: int = 0
    seen_at_ms: int = 0
    schedules: tuple[str, ...] = ()
    """Ids of the schedules that its code declares."""
    keep: tuple[KeepRule, ...] = ()

    @property
    def startable(self) -> frozenset[tuple[str, str]]:
        """Name and version of what can be started there: orchestrations, and jobs."""
        jobs = ((f"{JOB_PREFIX}{name}", JOB_VERSION) for name in self.activities)
        return frozenset(self.handlers).union(jobs)


# --- moving


class ExecutionSnapshot(Record, frozen=True):
    execution_id: int
    status: Status
    output: str | None
    started_at_ms: int
    completed_at_ms: int | None
    framework_version: Version | None
    history: tuple[HistoryRecord, ...]


class InstanceSnapshot(_Instance, frozen=True, kw_only=True):
    """One instance, whole: enough to go on in another store. Locks are not part of it."""

    name: str | None
    """None: only messages exist so far."""
    suspended: bool
    not_before_ms: int | None
    executions: tuple[ExecutionSnapshot, ...]
    kv_store: dict[str, KvEntry]
    """State at the end of the previous execution."""
    kv_delta: dict[str, KvEntry | None]
    """Changes of the current execution; None: cleared."""
    messages: tuple[QueuedMessage, ...]
    work: tuple[QueuedWork, ...]


DAMAGED: Final = "damaged: "


class StoreInfo(Record, frozen=True):
    """The location of the data and the versions of its format."""

    provider: str
    provider_version: str
    location: str
    format_version: int
    schema_version: int
    size_bytes: int | None
    moved_to: str | None
    details: dict[str, str]
    """Details for people. The key of an unreadable file that was left aside begins with DAMAGED."""

    @property
    def damages(self) -> dict[str, str]:
        """Return the reason for each part of the store that is left aside, by its place."""
        found = self.details.items()
        return {key.removeprefix(DAMAGED): why for key, why in found if key.startswith(DAMAGED)}
