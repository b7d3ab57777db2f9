"""What one turn decided: the boundary between the engine and the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from perdure.model import events, work
from perdure.model.failures import Failure


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """The code waits for something; the execution goes on with a later turn."""


WAITING: Final = Waiting()
"""The engine makes no other."""


class Completed(msgspec.Struct, frozen=True, gc=False):
    output: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, gc=False):
    failure: Failure


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    reason: str


class ContinuedAsNew(msgspec.Struct, frozen=True, gc=False):
    input: msgspec.Raw
    version: str | None
    carried: tuple[work.CarriedMessage, ...]
    """Arrivals that nobody consumed, in order."""


TurnResult: TypeAlias = Waiting | Completed | Failed | Cancelled | ContinuedAsNew


class KvWrite(msgspec.Struct, frozen=True, gc=False):
    """A change of the instance's state; value None clears the key, key None clears all."""

    key: str | None
    value: str | None


class CustomStatusWrite(msgspec.Struct, frozen=True, gc=False):
    value: str | None


class ScheduledActivity(msgspec.Struct, frozen=True, gc=False):
    """A schedule event and the options that do not belong into history."""

    event: events.ActivityScheduled
    retry: work.RetryPlan | None = None
    timeout_ms: int | None = None
    heartbeat_ms: int | None = None
    deadline_ms: int | None = None
    """From now on, over all attempts."""


class TurnOutcome(msgspec.Struct, kw_only=True, gc=False):
    """Everything that a turn asks the runtime to commit."""

    turn: int
    result: TurnResult
    delta: list[events.Event] = []
    """New events in order; a terminal event is last and the only one."""
    activities: list[ScheduledActivity] = []
    """To dispatch: scheduled in this turn and still wanted at its end."""
    timers: Sequence[events.TimerCreated] = ()
    children: Sequence[events.SubOrchestrationScheduled] = ()
    detached: Sequence[events.OrchestrationChained] = ()
    cancelled_activities: Sequence[int] = ()
    """Ids of activities scheduled in earlier turns that nobody wants any more."""
    cancelled_timers: Sequence[int] = ()
    cancelled_children: Sequence[str] = ()
    """Instance ids of dispatched children that nobody wants any more."""
    custom_status: CustomStatusWrite | None = None
    """The last one of the turn."""
    kv_writes: Sequence[KvWrite] = ()
    ignored: Sequence[str] = ()
    """One line for each message that was dropped: duplicate, stale, or too late."""
