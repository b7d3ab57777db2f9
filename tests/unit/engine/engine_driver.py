"""Drives one execution turn by turn and checks on every turn that replay gives the same."""

from __future__ import annotations

import json
import weakref
from typing import TYPE_CHECKING, Any

from perdure.codec import JSON
from perdure.engine.execution import Execution, run_turn
from perdure.model import events, wire, work
from perdure.model.failures import Category, Failure

if TYPE_CHECKING:
    import msgspec

    from perdure.engine.outcome import TurnOutcome

WAITS = "(waits)"
"""The result of an execution that has not ended."""
START_MS = 1_700_000_000_000

drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
"""Closed after every test: what a test leaves suspended must not unwind in another one."""


def raw(value: Any) -> msgspec.Raw:
    return JSON.encode(value)


def started(handler: Any, *args: Any, **fields: Any) -> events.OrchestrationStarted:
    defaults: dict[str, Any] = {
        "event_id": 1,
        "instance_id": "i",
        "execution_id": 1,
        "timestamp_ms": START_MS,
        "turn": 1,
        "name": handler.name,
        "version": handler.version,
        "input": handler.signature.encode_arguments(args, {}, JSON),
        "framework_version": "0.1.0",
        "seed": "seed",
    }
    return events.OrchestrationStarted(**defaults | fields)


class Driver:
    """A store and a worker for one execution, in a few lines."""

    def __init__(
        self,
        handler: Any,
        *args: Any,
        kv: dict[str, str] | None = None,
        carried: tuple[work.CarriedMessage, ...] = (),
        is_checked: bool = True,
        **fields: Any,
    ) -> None:
        self.handler = handler
        self.kv = kv or {}
        self.history: list[events.Event] = []
        self.now_ms = START_MS
        self.is_checked = is_checked
        self._carried = carried
        self._started = started(handler, *args, initial_state=kv, **fields)
        self.execution = Execution.begin(handler, self._started, codec=JSON, carried=carried)
        self.outcomes: list[TurnOutcome] = []
        drivers.add(self)

    # --- running

    def start(self, *items: work.OrchestratorItem) -> TurnOutcome:
        return self.turn(*items)

    def turn(self, *items: work.OrchestratorItem, after_ms: int = 10) -> TurnOutcome:
        if self.outcomes:
            items = (*self.outcomes[-1].postponed, *items)
        before = list(self.history) if self.is_checked else []
        if self.history:
            self.now_ms += after_ms
        outcome = self.execution.run_turn(items, self.now_ms)
        self.history += [wire.decode_event(wire.encode(event)) for event in outcome.delta]
        self.outcomes.append(outcome)
        if self.is_checked:
            self.check_cold(before, items, outcome)
        return outcome

    def check_cold(self, before: Any, items: Any, outcome: TurnOutcome) -> None:
        """The same turn on an execution that was replayed from history gives the same outcome."""
        if before:
            cold = run_turn(self.handler, before, items, kv={}, now_ms=self.now_ms, codec=JSON)
        else:
            fresh = Execution.begin(self.handler, self._started, codec=JSON, carried=self._carried)
            cold = fresh.run_turn(items, self.now_ms)
            fresh.close()
        then, now = plain(outcome), plain(cold)
        assert now == then, f"live {then}\ncold {now}"
        again = self.replay()
        assert facts(again) == facts(self.execution)
        again.close()

    def replay(self, handler: Any = None, upto: int | None = None) -> Execution:
        history = self.history if upto is None else self.history[:upto]
        return Execution.replay(handler or self.handler, history, kv={}, codec=JSON)

    def restart(self) -> None:
        """Forget the coroutine and go on from history."""
        self.execution.close()
        self.execution = self.replay()

    def close(self) -> None:
        self.execution.close()

    # --- messages

    def completed(self, activity: int | str, result: Any = None) -> work.ActivityCompleted:
        return work.ActivityCompleted(
            instance_id="i", execution_id=self.execution.execution_id,
            activity_id=self.find(activity), result=raw(result),
        )  # fmt: skip

    def failed(self, activity: int | str, message: str = "bad", **fields: Any) -> Any:
        failure = Failure(**{
            "message": message, "type_name": "ValueError",
            "lineage": ("ValueError", "Exception", "BaseException"), "traceback": "Traceback ...",
        } | fields)  # fmt: skip
        return work.ActivityFailed(
            instance_id="i", execution_id=self.execution.execution_id,
            activity_id=self.find(activity), failure=failure,
        )  # fmt: skip

    def fired(self, timer: int | None = None) -> work.TimerFired:
        if timer is None:
            timer = self.open_ids(events.TimerCreated)[0]
        event: Any = self.history[timer - 1]
        self.now_ms = max(self.now_ms, event.fire_at_ms)
        return work.TimerFired(
            instance_id="i", execution_id=self.execution.execution_id,
            timer_id=timer, fire_at_ms=event.fire_at_ms,
        )  # fmt: skip

    def raised(self, name: str, data: Any = None) -> work.ExternalRaised:
        return work.ExternalRaised(instance_id="i", name=name, data=raw(data))

    def message(self, name: str, data: Any = None) -> work.QueueMessage:
        return work.QueueMessage(instance_id="i", name=name, data=raw(data))

    def cancel(self, reason: str = "enough") -> work.CancelInstance:
        return work.CancelInstance(instance_id="i", reason=reason)

    def child_completed(self, child: int | str, result: Any = None) -> work.SubOrchCompleted:
        event: Any = self.history[self.find(child) - 1]
        return work.SubOrchCompleted(
            instance_id="i", execution_id=self.execution.execution_id, event_id=event.event_id,
            child_instance_id=event.child_instance_id, result=raw(result),
        )  # fmt: skip

    def child_failed(
        self, child: int | str, category: Category = Category.APPLICATION, message: str = "bad"
    ) -> work.SubOrchFailed:
        event: Any = self.history[self.find(child) - 1]
        return work.SubOrchFailed(
            instance_id="i", execution_id=self.execution.execution_id, event_id=event.event_id,
            child_instance_id=event.child_instance_id,
            failure=Failure(category=category, message=message, type_name="ValueError"),
        )  # fmt: skip

    # --- looking

    def find(self, step: int | str) -> int:
        """Id of the first step of that name that is still open."""
        if isinstance(step, int):
            return step
        for event in self.history:
            if getattr(event, "name", None) == step and event.event_id in self.open_ids():
                return event.event_id
        raise AssertionError(f"no open step {step!r}")

    def open_ids(self, kind: type[Any] = events.Scheduled) -> list[int]:
        closed = {e.source_event_id for e in self.history if isinstance(e, events.Resolving)}
        return [
            event.event_id
            for event in self.history
            if isinstance(event, kind)
            and isinstance(event, OPENING)
            and event.event_id not in closed
        ]

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.history]

    @property
    def result(self) -> Any:
        """Return the end of the last turn, as plain data."""
        end = self.outcomes[-1].end
        match end:
            case None:
                return WAITS
            case events.OrchestrationCompleted():
                return json.loads(bytes(end.output))
            case events.OrchestrationFailed():
                return f"{end.failure.type_name}: {end.failure.message}"
            case events.OrchestrationCancelled():
                return f"cancelled: {end.reason}"
            case _:
                return end


OPENING = (
    events.ActivityScheduled,
    events.TimerCreated,
    events.SubOrchestrationScheduled,
    events.ExternalSubscribed,
    events.QueueSubscribed,
)


def facts(execution: Execution) -> Any:
    """Return the public attributes of an execution between two turns."""
    return [
        execution.turn,
        execution.event_count,
        execution.custom_status,
        execution.is_finished,
        execution.wants_mail,
        [wait.op for wait in execution.waits()],
    ]


def plain(outcome: TurnOutcome) -> Any:
    """An outcome as comparable data; tracebacks hold line numbers of the driver itself."""
    encoded = [wire.encode(event) for event in outcome.delta]
    for index, event in enumerate(outcome.delta):
        if isinstance(event, events.OrchestrationFailed):
            encoded[index] = event.failure.type_name
    return [
        encoded,
        type(outcome.end).__name__,
        outcome.carried,
        outcome.cancel_reason,
        [a.event.event_id for a in outcome.activities],
        [t.event_id for t in outcome.timers],
        [c.event_id for c in outcome.children],
        [d.event_id for d in outcome.detached],
        outcome.cancelled_activities,
        outcome.cancelled_timers,
        outcome.cancelled_children,
        outcome.custom_status,
        outcome.kv_writes,
        outcome.ignored,
    ]
