"""The outcome of one turn: the engine returns it and the runtime commits it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.model import events, work


class ScheduledActivity(msgspec.Struct, frozen=True, gc=False):
    """A schedule event, and options that are not stored in history."""

    event: events.ActivityScheduled
    retry: work.RetryPlan | None = None
    timeout_ms: int | None = None
    heartbeat_ms: int | None = None
    deadline_ms: int | None = None
    """Bound over all attempts, counted from this turn."""


class TurnOutcome(msgspec.Struct, kw_only=True, gc=False):
    """Everything that the runtime must commit for one turn."""

    turn: int
    end: events.Terminal | None = None
    """The event that ends the execution, the last one of ``delta``; None while the code waits."""
    carried: Sequence[work.CarriedMessage] = ()
    """Arrivals that the code did not read before ``continue_as_new()``, in order."""
    cancel_reason: str | None = None
    """Reason of a cancellation that the next execution is to get; None without one."""
    delta: list[events.Event] = []
    """New events in order; a terminal event is last and the only one."""
    activities: list[ScheduledActivity] = []
    """Activities to dispatch: scheduled in this turn and still wanted at its end."""
    timers: Sequence[events.TimerCreated] = ()
    children: Sequence[events.SubOrchestrationScheduled] = ()
    detached: Sequence[events.OrchestrationChained] = ()
    sent: Sequence[events.MessageSent] = ()
    watchers: Sequence[events.Watcher] = ()
    """Those who wait for the end of the instance, if the execution has ended."""
    cancelled_activities: Sequence[int] = ()
    """Ids of activities that earlier turns scheduled and the code has given up."""
    cancelled_timers: Sequence[int] = ()
    cancelled_children: Sequence[str] = ()
    """Instance ids of children that earlier turns started and the code has given up."""
    postponed: Sequence[work.OrchestratorItem] = ()
    """Messages that are not part of the turn, in order: mail that the code does not want yet, and
    what came after ``continue_as_new()``."""
    custom_status: events.CustomStatusUpdated | None = None
    """The last one of the turn."""
    kv_writes: Sequence[events.StateChange] = ()
    mistakes: Sequence[str] = ()
    """One line for each step without ``await`` that ends now, each change of a value of ``state``
    that was not written back, and each arrival that is unread at the end."""
    ignored: Sequence[str] = ()
    """One line for each ignored message: duplicate, of another execution, or too late."""
