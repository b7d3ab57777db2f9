"""Work items: what travels in the two queues, as typed records with a ``type`` tag."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from perdure.model.events import NULL
from perdure.model.failures import Failure


class Item(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag=str,
    gc=False,
):
    """What every work item carries: the instance that it goes to."""

    instance_id: str


class ParentLink(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a child reports its end. Travels with the child through continue-as-new."""

    instance_id: str
    execution_id: int
    event_id: int


class CarriedMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An arrival that the ended execution had not consumed."""

    name: str
    data: msgspec.Raw = NULL
    mailbox: bool = True
    """True for a mailbox message, False for an external event."""


# --- orchestrator queue


class StartOrchestration(Item, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    input: msgspec.Raw = NULL
    version: str | None = None
    parent: ParentLink | None = None
    depth: int = 0
    trace: str | None = None


class ContinueAsNew(Item, frozen=True, kw_only=True, omit_defaults=True):
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


class ActivityCompleted(Item, frozen=True, kw_only=True, omit_defaults=True):
    execution_id: int
    activity_id: int
    result: msgspec.Raw = NULL
    attempts: int = 1


class ActivityFailed(Item, frozen=True, kw_only=True, omit_defaults=True):
    execution_id: int
    activity_id: int
    failure: Failure


class TimerFired(Item, frozen=True, kw_only=True, omit_defaults=True):
    execution_id: int
    timer_id: int
    fire_at_ms: int


class ExternalRaised(Item, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    data: msgspec.Raw = NULL


class QueueMessage(Item, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    data: msgspec.Raw = NULL


class SubOrchCompleted(Item, frozen=True, kw_only=True, omit_defaults=True):
    """``instance_id`` is the parent's."""

    execution_id: int
    event_id: int
    child_instance_id: str
    result: msgspec.Raw = NULL


class SubOrchFailed(Item, frozen=True, kw_only=True, omit_defaults=True):
    """``instance_id`` is the parent's."""

    execution_id: int
    event_id: int
    child_instance_id: str
    failure: Failure


class CancelInstance(Item, frozen=True, kw_only=True, omit_defaults=True):
    reason: str = ""
    parent_instance_id: str | None = None
    """Set when a parent gives up its child: an instance of somebody else may have that id."""


# --- worker queue


class RetryPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How an activity is retried, fixed when it is scheduled."""

    max_attempts: int = 1
    first_delay_ms: int = 100
    multiplier: float = 2.0
    max_delay_ms: int = 30_000
    jitter: float = 0.1
    never: tuple[str, ...] = ()
    """Exception class names that are not worth another attempt."""


class ActivityExecute(Item, frozen=True, kw_only=True, omit_defaults=True):
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
    """What earlier attempts told last."""
    redelivered: int = 0
    """How often earlier attempts were begun once more because their worker was gone."""
    seed: str = ""
    """Of the execution: tells it from others of the same number, if its id is used again."""


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
)
