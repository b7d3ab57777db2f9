"""Work items: the records in the two queues, with a ``type`` tag; and the first event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from perdure.codec import require_open
from perdure.ids import new_id
from perdure.model import events
from perdure.model.events import NULL
from perdure.model.failures import Failure
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Mapping


_SEED_CHARACTERS: Final = 8


class Item(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag=str,
    gc=False,
):
    """The field of every work item: the instance that it is for."""

    instance_id: str


class ParentLink(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The step of the parent that a child completes. It is kept through continue-as-new."""

    instance_id: str
    execution_id: int
    event_id: int


class CarriedMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An event or message that goes along with a start, or that an ended execution did not read."""

    name: str
    data: msgspec.Raw = NULL
    mailbox: bool = True
    """True for a mailbox message, False for an external event."""


# --- orchestrator queue


class StartOrchestration(Item, frozen=True, kw_only=True):
    name: str
    input: msgspec.Raw = NULL
    version: str | None = None
    parent: ParentLink | None = None
    depth: int = 0
    trace: str | None = None
    scheduled_for_ms: int | None = None
    carried: tuple[CarriedMessage, ...] = ()
    """Messages that the instance gets with its start."""


class ContinueAsNew(Item, frozen=True, kw_only=True):
    """Starts the next execution of the same instance."""

    name: str
    execution_id: int
    """The execution to start."""
    input: msgspec.Raw = NULL
    version: str | None = None
    parent: ParentLink | None = None
    depth: int = 0
    carried: tuple[CarriedMessage, ...] = ()
    custom_status: str | None = None
    trace: str | None = None
    watchers: tuple[events.Watcher, ...] = ()
    scheduled_for_ms: int | None = None


class ActivityCompleted(Item, frozen=True, kw_only=True):
    execution_id: int
    activity_id: int
    result: msgspec.Raw = NULL
    attempts: int = 1
    seed: str = ""
    """Set if no worker ran it: the awaited instance has ended and told its watcher."""


class ActivityFailed(Item, frozen=True, kw_only=True):
    execution_id: int
    activity_id: int
    failure: Failure


class TimerFired(Item, frozen=True, kw_only=True):
    execution_id: int
    timer_id: int
    fire_at_ms: int


class ExternalRaised(Item, frozen=True, kw_only=True):
    name: str
    data: msgspec.Raw = NULL


class QueueMessage(Item, frozen=True, kw_only=True):
    name: str
    data: msgspec.Raw = NULL


class SubOrchCompleted(Item, frozen=True, kw_only=True):
    """``instance_id`` is the parent's."""

    execution_id: int
    event_id: int
    child_instance_id: str
    result: msgspec.Raw = NULL


class SubOrchFailed(Item, frozen=True, kw_only=True):
    """``instance_id`` is the parent's."""

    execution_id: int
    event_id: int
    child_instance_id: str
    failure: Failure


class CancelInstance(Item, frozen=True, kw_only=True):
    reason: str = ""
    parent_instance_id: str | None = None
    """Set if a parent gives up its child: another instance may have the id by now."""


class WatchEnd(Item, frozen=True, kw_only=True):
    """Asks an instance to tell the watcher about its end."""

    watcher: events.Watcher


class RetrySteps(Item, frozen=True, kw_only=True):
    """Sends activities of a retried execution again. The worker knows their options."""

    execution_id: int
    activity_ids: tuple[int, ...]


# --- worker queue


class RetryPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The retry policy of an activity, fixed when it is scheduled."""

    max_attempts: int = 1
    first_delay_ms: int = 100
    multiplier: float = 2.0
    increment_ms: int = 0
    max_delay_ms: int = 30_000
    jitter: float = 0.1
    never: tuple[str, ...] = ()
    """Names of exception classes after which there is no further attempt."""


class ActivityExecute(Item, frozen=True, kw_only=True):
    execution_id: int
    activity_id: int
    name: str
    input: msgspec.Raw = NULL
    orchestration_name: str = ""
    orchestration_version: str = ""
    session_id: str | None = None
    tag: str | None = None
    retry: RetryPlan | None = None
    timeout_ms: int | None = None
    """Bound of one attempt."""
    heartbeat_ms: int | None = None
    """Bound between two heartbeats."""
    deadline_ms: int | None = None
    """Absolute bound over all attempts."""
    attempt: int = 1
    last_failure: Failure | None = None
    trace: str | None = None
    last_heartbeat: str | None = None
    """Details of the last heartbeat of earlier attempts."""
    redelivered: int = 0
    """Number of deliveries that were repeated because the worker had died."""
    seed: str = ""
    """Seed of the execution: an earlier instance with the same id had another one."""


OrchestratorItem: TypeAlias = (
    StartOrchestration
    | ContinueAsNew
    | ActivityCompleted
    | ActivityFailed
    | TimerFired
    | ExternalRaised
    | QueueMessage
    | SubOrchCompleted
    | SubOrchFailed
    | CancelInstance
    | RetrySteps
    | WatchEnd
)


ANSWERS: Final[Mapping[type[Item], tuple[str, type[events.Scheduled], type[events.Resolving]]]] = {
    ActivityCompleted: ("activity_id", events.ActivityScheduled, events.ActivityCompleted),
    ActivityFailed: ("activity_id", events.ActivityScheduled, events.ActivityFailed),
    TimerFired: ("timer_id", events.TimerCreated, events.TimerFired),
    SubOrchCompleted: (
        "event_id",
        events.SubOrchestrationScheduled,
        events.SubOrchestrationCompleted,
    ),
    SubOrchFailed: ("event_id", events.SubOrchestrationScheduled, events.SubOrchestrationFailed),
}
"""Messages that answer a step: the field with its id, the event of the step, the event of the
answer."""


ENDS: Final[Mapping[type[events.Terminal], Status]] = {
    events.OrchestrationCompleted: Status.COMPLETED,
    events.OrchestrationFailed: Status.FAILED,
    events.OrchestrationCancelled: Status.CANCELLED,
    events.OrchestrationTerminated: Status.TERMINATED,
    events.OrchestrationContinuedAsNew: Status.CONTINUED_AS_NEW,
}
"""The status of an execution by its last event."""


class InstanceEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of the activity by which an instance waits for another one.

    ``output`` is the result, or the failure.
    """

    status: str
    """The final status, or ``MISSING``."""
    output: msgspec.Raw = NULL


def instance_end(instance_id: str, status: Status, output: str | None) -> InstanceEnd:
    """Return the end of an instance for another one that waits for it."""
    text = output or "null"
    failure = msgspec.json.decode(text, type=Failure) if status.is_bad_end else None
    require_open(text if failure is None else failure.message, f"the end of {instance_id!r}")
    return InstanceEnd(status=status, output=msgspec.Raw(text.encode()))


JOB_PREFIX: Final = "activity:"
"""Prefix of the name of the orchestration that runs one activity and nothing else."""
JOB_VERSION: Final = "1.0.0"
INSTANCE_STATE: Final = "perdure.instance_state"
"""Name of the built-in activity by which an instance reads the state of another one."""
INSTANCE_RESULT: Final = "perdure.instance_result"
"""Name of the built-in activity by which an instance waits for another one."""
MISSING: Final = "Missing"
"""``InstanceEnd.status`` if no instance has the id."""


def execution_seed(started: events.OrchestrationStarted) -> str:
    """Return enough of the seed to tell apart executions with the same id and number."""
    return started.key_seed or started.seed[:_SEED_CHARACTERS]


def started_by(
    start: StartOrchestration | ContinueAsNew,
    *,
    version: str,
    framework_version: str,
    now_ms: int,
    state: Mapping[str, str],
) -> events.OrchestrationStarted:
    """Return the first event of the execution that this message starts.

    ``state``: the state of the instance. A first execution has none.
    """
    parent = start.parent
    # At most 15 arguments: Python passes more in a dict, which takes longer than the rest here.
    started = events.OrchestrationStarted(
        event_id=1,
        instance_id=start.instance_id,
        execution_id=1,
        timestamp_ms=now_ms,
        turn=1,
        name=start.name,
        version=version,
        input=start.input,
        framework_version=framework_version,
        seed=new_id(),
        parent_instance_id=parent.instance_id if parent else None,
        parent_execution_id=parent.execution_id if parent else None,
        parent_event_id=parent.event_id if parent else None,
        depth=start.depth,
        trace=start.trace,
    )
    if start.scheduled_for_ms is not None:
        started = msgspec.structs.replace(started, scheduled_for_ms=start.scheduled_for_ms)
    if isinstance(start, StartOrchestration):
        return started
    return msgspec.structs.replace(
        started,
        execution_id=start.execution_id,
        initial_custom_status=start.custom_status,
        initial_state=dict(state),
    )


# --- work items of steps: the code of a turn sends them, and an operator sends them again


def activity_item(
    event: events.ActivityScheduled,
    started: events.OrchestrationStarted,
    retry: RetryPlan | None = None,
    timeout_ms: int | None = None,
    heartbeat_ms: int | None = None,
    deadline_ms: int | None = None,
) -> ActivityExecute:
    """Return the work item of an activity. History does not hold its retries and time limits."""
    return ActivityExecute(
        instance_id=event.instance_id,
        execution_id=event.execution_id,
        activity_id=event.event_id,
        name=event.name,
        input=event.input,
        orchestration_name=started.name,
        orchestration_version=started.version,
        session_id=event.session_id,
        tag=event.tag,
        retry=retry,
        timeout_ms=timeout_ms,
        heartbeat_ms=heartbeat_ms,
        deadline_ms=deadline_ms,
        trace=started.trace,
        seed=execution_seed(started),
    )


def timer_item(event: events.TimerCreated) -> TimerFired:
    """Return the message by which a timer fires."""
    return TimerFired(
        instance_id=event.instance_id,
        execution_id=event.execution_id,
        timer_id=event.event_id,
        fire_at_ms=event.fire_at_ms,
    )


def child_item(
    event: events.SubOrchestrationScheduled, started: events.OrchestrationStarted
) -> StartOrchestration:
    """Return the message that starts a child."""
    return StartOrchestration(
        instance_id=event.child_instance_id,
        name=event.name,
        input=event.input,
        version=event.version,
        parent=step_link(event),
        depth=started.depth + 1,
        trace=started.trace,
    )


def child_completed(parent: ParentLink, child_id: str, result: msgspec.Raw) -> SubOrchCompleted:
    """Return the message by which a child completes the step of its parent."""
    require_open(bytes(result), f"the result of {child_id!r}")
    return SubOrchCompleted(
        instance_id=parent.instance_id,
        execution_id=parent.execution_id,
        event_id=parent.event_id,
        child_instance_id=child_id,
        result=result,
    )


def child_failed(parent: ParentLink, child_id: str, failure: Failure) -> SubOrchFailed:
    """Return the message by which a child fails the step of its parent."""
    require_open(failure.message, f"the failure of {child_id!r}")
    return SubOrchFailed(
        instance_id=parent.instance_id,
        execution_id=parent.execution_id,
        event_id=parent.event_id,
        child_instance_id=child_id,
        failure=failure,
    )


def step_link(event: events.SubOrchestrationScheduled) -> ParentLink:
    """Return the link of a child to the step that started it."""
    return ParentLink(
        instance_id=event.instance_id, execution_id=event.execution_id, event_id=event.event_id
    )


def parent_link(started: events.OrchestrationStarted) -> ParentLink | None:
    """Return the link to the parent, or None for a root."""
    if (
        started.parent_instance_id is None
        or started.parent_execution_id is None
        or started.parent_event_id is None
    ):
        return None
    return ParentLink(
        instance_id=started.parent_instance_id,
        execution_id=started.parent_execution_id,
        event_id=started.parent_event_id,
    )
