"""Retry an instance under its own id: it goes on from where it failed.

The turns of an execution before the one that failed stay as they are, so finished steps stay
finished and open steps keep their idempotency keys. The turn that failed is undone and runs again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from perdure.client.formats import counted
from perdure.client.recorded import state_after
from perdure.client.rerun import finished_steps
from perdure.client.steps import RUN_BY_WORKERS, StepView, started_of, steps_of
from perdure.client.terminate import QUEUED_MAX, operator_lock
from perdure.errors import (
    CorruptData,
    InstanceFinished,
    InstanceStillRunning,
    InvalidValue,
    NotFound,
)
from perdure.limits import HISTORY_EVENTS_MAX
from perdure.model import events, wire, work
from perdure.model.status import Status
from perdure.model.wire import envelope
from perdure.model.work import parent_link
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    HistoryRecord,
    KvChange,
    KvClearAll,
    KvSet,
    OrchestratorMessage,
    TurnCommit,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.clock import Clock
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo, OrchestrationItem

_GOES_ON = frozenset({Status.BLOCKED, Status.PAUSED})
_Mail: TypeAlias = events.ExternalEvent | events.QueueEventDelivered
_MAIL = (events.ExternalEvent, events.QueueEventDelivered)
_ARRIVALS = (
    *_MAIL,
    events.ActivityCompleted,
    events.TimerFired,
    events.SubOrchestrationCompleted,
)
"""Arrivals of an undone turn that come again. Failures do not: their steps run again."""


class Retried(msgspec.Struct, frozen=True, kw_only=True):
    """Names the steps that a retry keeps or runs again, and the mail that arrives again."""

    execution_id: int
    """The execution that goes on."""
    finished: int = 0
    """Number of activities and children that have finished and do not run again."""
    again: tuple[str, ...] = ()
    """Names of the activities and children that were open or had failed."""
    received: tuple[str, ...] = ()
    """Names of the events and messages that the code receives again."""

    def __str__(self) -> str:
        verb = "stays" if self.finished == 1 else "stay"
        kept = f", {counted(self.finished, 'finished step')} {verb} finished"
        words = f"goes on{kept if self.finished else ''}"
        if self.again:
            words += f"; again: {', '.join(self.again)}"
        return f"{words}; receives again: {', '.join(self.received)}" if self.received else words


async def retry(
    provider: Provider, instance_id: str, clock: Clock, *, leave_out: str | None = None
) -> Retried | None:
    """Let an instance go on from where it failed, was cancelled or was terminated.

    Finished steps stay finished. Steps that were open, or whose failure made it fail, run again
    with the same idempotency key. Failed children are retried in the same way. An instance that
    failed in its first turn, where no step can have finished, begins its next execution.

    The code receives the events and messages of the undone turn again. ``leave_out`` is the name of
    one that it does not get again: the last of this name that it received, which did not fit.

    A Blocked or Paused instance continues, and None is returned. Raises InstanceFinished for a
    Completed instance, InstanceStillRunning for others, and InvalidValue for one whose clean-up has
    taken steps, as it cannot go on from before them, and for one that received no ``leave_out``.
    """
    info = await provider.admin.get_instance_info(instance_id)
    if info.status in _GOES_ON:
        if leave_out is not None:
            raise InvalidValue(
                f"{instance_id!r} is {info.status}, so it has received nothing that could be left "
                "out: only a failed turn is undone"
            )
        await provider.admin.resume_instance(instance_id)
        return None
    if info.status is Status.COMPLETED:
        raise InstanceFinished(f"{instance_id!r} has completed; rerun it to do it once more")
    if not info.status.is_bad_end:
        raise InstanceStillRunning(f"{instance_id!r} is {info.status}: there is nothing to retry")
    async with operator_lock(provider, instance_id) as (item, token):
        undone = _Undone(provider, item, clock, leave_out)
        if undone.kept_turn == 0:
            commit, retried = undone.next_execution()
        else:
            commit, retried = await undone.go_on()
        await provider.ack_orchestration_item(token, commit)
    return retried


def _history_of(item: OrchestrationItem) -> list[events.Event]:
    if item.history_error is not None or not item.history:
        raise CorruptData("retry", item.history_error or f"{item.instance_id!r} has no history")
    history = wire.decode_history(item.history)
    if not isinstance(history[-1], events.Terminal):
        raise InstanceStillRunning(f"{item.instance_id!r} is running again; look at it first")
    if isinstance(history[-1], events.OrchestrationCompleted):
        raise InstanceFinished(f"{item.instance_id!r} has completed meanwhile")
    return history


class _Undone:
    """An ended execution: the turns that are kept, and those that the retry undoes."""

    def __init__(
        self, provider: Provider, item: OrchestrationItem, clock: Clock, leave_out: str | None
    ) -> None:
        self.provider, self.item, self.clock = provider, item, clock
        self.now_ms = clock.now_ms()
        history = _history_of(item)
        self.started = started_of(history, "retry")
        self.end = history[-1]
        valid = events.without_undone(history)
        self.kept_turn = _first_undone_turn(item.instance_id, valid) - 1
        received = _received_mail(valid, self.kept_turn)
        self.left_out: tuple[int, ...] = ()
        if leave_out is not None:
            last = _last_of(received, leave_out, item.instance_id)
            valid = [event for event in valid if event is not last]
            received = [event for event in received if event is not last]
            if last.turn <= self.kept_turn:
                self.left_out = (last.event_id,)
        self.received = tuple(dict.fromkeys(event.name for event in received))
        self.kept = [event for event in valid if event.turn <= self.kept_turn]
        self.undone = [event for event in valid if event.turn > self.kept_turn]
        if len(history) >= HISTORY_EVENTS_MAX - 1:
            raise InvalidValue(
                f"{item.instance_id!r} cannot go on: its history has {len(history)} events, at "
                f"most {HISTORY_EVENTS_MAX} are allowed; perdure rerun starts it over"
            )

    def next_execution(self) -> tuple[TurnCommit, Retried]:
        """Return the commit that queues the next execution: the first turn is undone."""
        started = self.started
        state, custom_status = state_after([started])
        following = work.ContinueAsNew(
            instance_id=self.item.instance_id,
            name=started.name,
            execution_id=self.item.execution_id + 1,
            input=started.input,
            version=started.version or None,  # terminated before a worker chose one
            parent=parent_link(started),
            depth=started.depth,
            carried=tuple(
                work.CarriedMessage(
                    name=event.name,
                    data=event.data,
                    mailbox=isinstance(event, events.QueueEventDelivered),
                )
                for event in self.undone
                if isinstance(event, _MAIL)
            ),
            custom_status=custom_status,
            trace=started.trace,
            scheduled_for_ms=started.scheduled_for_ms,
        )
        commit = TurnCommit(
            execution_id=self.item.execution_id,
            orchestrator_items=(envelope(following),),
            metadata=ExecutionMetadata(
                status=Status.CONTINUED_AS_NEW, output=bytes(started.input).decode()
            ),
            kv_changes=_changes_to(state, started.timestamp_ms),
        )
        return commit, Retried(execution_id=following.execution_id, received=self.received)

    async def go_on(self) -> tuple[TurnCommit, Retried]:
        """Return the commit that reopens the execution, and retry its failed children."""
        steps = steps_of(self.kept)
        by_id = {step.event_id: step for step in steps}
        arrived = [event for event in self.undone if isinstance(event, _ARRIVALS)]
        messages = [self._received(event, by_id) for event in arrived]
        received = {getattr(event, "source_event_id", 0) for event in arrived}
        still_open = [
            step for step in steps if step.state == "open" and step.event_id not in received
        ]
        activities = [step for step in still_open if step.kind in RUN_BY_WORKERS]
        children = [step for step in still_open if step.kind == "orchestration"]
        messages += [
            _fire(step.event, step.event.fire_at_ms) for step in still_open if step.kind == "timer"
        ]
        for step in children:
            message = await self._child_message(step)
            if message is not None:
                messages.append(message)
        # Sent in any case: without a message no turn would run.
        again = work.RetrySteps(
            instance_id=self.item.instance_id,
            execution_id=self.item.execution_id,
            activity_ids=tuple(step.event_id for step in activities),
        )
        state, custom_status = state_after(self.kept)
        commit = TurnCommit(
            execution_id=self.item.execution_id,
            history_delta=(self._event(),),
            orchestrator_items=(envelope(again), *messages),
            metadata=ExecutionMetadata(status=Status.RUNNING, output="null"),
            custom_status=CustomStatusChange(value=custom_status),
            kv_changes=_changes_to(state, self.now_ms),
        )
        done = finished_steps(steps) | {
            step.event_id
            for step in steps
            if step.event_id in received and step.kind in {*RUN_BY_WORKERS, "orchestration"}
        }
        names = tuple(step.name for step in (*activities, *children))
        retried = Retried(
            execution_id=self.item.execution_id,
            finished=len(done),
            again=names,
            received=self.received,
        )
        return commit, retried

    def _event(self) -> HistoryRecord:
        event = events.OrchestrationRetried(
            event_id=self.end.event_id + 1,
            instance_id=self.end.instance_id,
            execution_id=self.end.execution_id,
            timestamp_ms=max(self.now_ms, self.end.timestamp_ms),
            turn=self.end.turn + 1,
            kept_turn=self.kept_turn,
            started={
                f"{each.op} {each.name}": each.target_instance_id
                for each in self.undone
                if isinstance(each, (events.OrchestrationChained, events.MessageSent))
            },
            left_out=self.left_out,
        )
        return wire.record_of(event)

    def _received(self, event: events.Event, by_id: dict[int, StepView]) -> OrchestratorMessage:
        """Return the message that brings an arrival of an undone turn again."""
        instance_id, execution_id = event.instance_id, event.execution_id
        item: work.OrchestratorItem
        match event:
            case events.ActivityCompleted():
                item = work.ActivityCompleted(
                    instance_id=instance_id,
                    execution_id=execution_id,
                    activity_id=event.source_event_id,
                    result=event.result,
                    attempts=event.attempts,
                )
            case events.SubOrchestrationCompleted():
                scheduled = by_id[event.source_event_id].event
                link = work.step_link(scheduled)
                item = work.child_completed(link, scheduled.child_instance_id, event.result)
            case events.ExternalEvent():
                item = work.ExternalRaised(
                    instance_id=instance_id, name=event.name, data=event.data
                )
            case events.QueueEventDelivered():
                item = work.QueueMessage(instance_id=instance_id, name=event.name, data=event.data)
            case events.TimerFired():
                timer = by_id[event.source_event_id]
                due_ms: int = timer.event.fire_at_ms
                if self._is_timeout:  # it gets its whole time again, or it would fail at once
                    due_ms = self.now_ms + due_ms - timer.since_ms
                return _fire(timer.event, due_ms)
            case _:
                raise AssertionError(event)
        return envelope(item)

    @property
    def _is_timeout(self) -> bool:
        end = self.end
        return isinstance(end, events.OrchestrationFailed) and "TimeoutError" in end.failure.lineage

    async def _child_message(self, step: StepView) -> OrchestratorMessage | None:
        """Retry an open child that has ended badly; return the message that the parent needs."""
        scheduled: events.SubOrchestrationScheduled = step.event
        child_id = scheduled.child_instance_id
        try:
            info = await self.provider.admin.get_instance_info(child_id)
        except NotFound:
            return envelope(work.child_item(scheduled, self.started))
        if info.status is Status.COMPLETED:
            result = msgspec.Raw((info.output or "null").encode())
            return envelope(work.child_completed(work.step_link(scheduled), child_id, result))
        if info.status.is_bad_end:
            # The parent is locked, so what the child answers stays queued until the commit.
            await retry(self.provider, child_id, self.clock)
        elif await _is_being_cancelled(self.provider, info):
            raise InstanceStillRunning(
                f"{self.item.instance_id!r} waits for its child {child_id!r}, which is being "
                "cancelled; retry when that has ended"
            )
        return None


def _received_mail(history: Sequence[events.Event], kept_turn: int) -> list[_Mail]:
    """Return the events and messages that the code received in the undone turns, in order."""
    return [
        step.outcome
        for step in steps_of(history)
        if isinstance(step.outcome, _MAIL) and max(step.event.turn, step.outcome.turn) > kept_turn
    ]


def _last_of(received: Sequence[_Mail], name: str, instance_id: str) -> _Mail:
    named = [event for event in received if event.name == name]
    if not named:
        known = ", ".join(sorted({repr(event.name) for event in received})) or "none"
        raise InvalidValue(
            f"{instance_id!r} received no event or message {name!r} in the turn that failed; it "
            f"received {known}"
        )
    return named[-1]


def _first_undone_turn(instance_id: str, history: Sequence[events.Event]) -> int:
    """Return the number of the turn that the execution goes on from. Raises InvalidValue."""
    end = history[-1]
    if not isinstance(end, events.OrchestrationCancelled):
        return end.turn
    turns = [e.turn for e in history if isinstance(e, events.OrchestrationCancelRequested)]
    first = min(turns, default=end.turn)
    if first < end.turn:
        raise InvalidValue(
            f"{instance_id!r} was cancelled and has run its clean-up, so it cannot go on from "
            "before that; perdure rerun starts it over as a new instance"
        )
    return first


async def _is_being_cancelled(provider: Provider, info: InstanceInfo) -> bool:
    records = await provider.read(info.instance_id)
    history = wire.decode_history(records)
    if any(
        isinstance(event, events.OrchestrationCancelRequested)
        for event in events.without_undone(history)
    ):
        return True
    queued = await provider.admin.list_messages(info.instance_id, limit=QUEUED_MAX)
    return any(each.message.kind == work.CancelInstance.__name__ for each in queued)


def _fire(timer: events.TimerCreated, due_ms: int) -> OrchestratorMessage:
    return msgspec.structs.replace(envelope(work.timer_item(timer)), visible_at_ms=due_ms)


def _changes_to(state: dict[str, str] | None, now_ms: int) -> tuple[KvChange, ...]:
    """Return the changes that make this the state of the instance."""
    if state is None:
        return ()
    written = (KvSet(key=key, value=value, updated_at_ms=now_ms) for key, value in state.items())
    return (KvClearAll(), *written)
