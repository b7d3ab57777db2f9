"""Messages to events: what is stale, repeated or too late is left out and named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.engine.operations import Family
from perdure.model import events, work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.engine.journal import Journal
    from perdure.engine.operations import Operations


class Inbox:
    """Turns the messages of one turn into events with their ids, in the order of arrival."""

    def __init__(
        self,
        journal: Journal,
        operations: Operations,
        *,
        now_ms: int,
        is_cancel_requested: bool,
    ) -> None:
        self._journal = journal
        self._now_ms = now_ms
        self._operations = operations
        self._is_cancel_requested = is_cancel_requested
        self._next_event_id = journal.last_event_id + 1
        self.events: list[events.Event] = []
        self.ignored: list[str] = []

    def add_carried(self, messages: Iterable[work.CarriedMessage]) -> None:
        """What the execution before had not consumed comes first."""
        for message in messages:
            kind = events.QueueEventDelivered if message.mailbox else events.ExternalEvent
            self._add(kind, name=message.name, data=message.data)

    def add_started(self, started: events.OrchestrationStarted) -> None:
        self.events.append(started)
        self._next_event_id = started.event_id + 1

    def add(self, items: Iterable[work.OrchestratorItem]) -> None:
        for item in items:
            self._convert(item)

    def _convert(self, item: work.OrchestratorItem) -> None:
        match item:
            case work.ActivityCompleted():
                if self._is_wanted(item, item.activity_id, Family.ACTIVITY):
                    self._add(
                        events.ActivityCompleted,
                        source_event_id=item.activity_id,
                        result=item.result,
                        attempts=item.attempts,
                    )
            case work.ActivityFailed():
                if self._is_wanted(item, item.activity_id, Family.ACTIVITY):
                    self._add(
                        events.ActivityFailed,
                        source_event_id=item.activity_id,
                        failure=item.failure,
                    )
            case work.TimerFired():
                self._convert_timer(item)
            case work.SubOrchCompleted():
                if self._is_wanted(item, item.event_id, Family.CHILD):
                    self._add(
                        events.SubOrchestrationCompleted,
                        source_event_id=item.event_id,
                        result=item.result,
                    )
            case work.SubOrchFailed():
                if self._is_wanted(item, item.event_id, Family.CHILD):
                    self._add(
                        events.SubOrchestrationFailed,
                        source_event_id=item.event_id,
                        failure=item.failure,
                    )
            case work.ExternalRaised():
                self._add(events.ExternalEvent, name=item.name, data=item.data)
            case work.QueueMessage():
                self._add(events.QueueEventDelivered, name=item.name, data=item.data)
            case work.CancelInstance():
                if self._is_cancel_requested:
                    self.ignored.append("CancelInstance: cancellation was requested before")
                else:
                    self._is_cancel_requested = True
                    self._add(events.OrchestrationCancelRequested, reason=item.reason)
            case work.StartOrchestration() | work.ContinueAsNew():
                if self._journal.turn > 0:
                    self.ignored.append(f"{type(item).__name__}: the instance runs already")

    def _convert_timer(self, item: work.TimerFired) -> None:
        if not self._is_wanted(item, item.timer_id, Family.TIMER):
            return
        if item.timer_id not in self._operations.open:
            self.ignored.append(f"TimerFired for event {item.timer_id}: the timer was cancelled")
            return
        self._add(events.TimerFired, source_event_id=item.timer_id, fire_at_ms=item.fire_at_ms)

    def _is_wanted(self, item: Any, source_event_id: int, family: Family) -> bool:
        """Of this execution and the first of its kind; what has no source is an error."""
        what = f"{type(item).__name__} for event {source_event_id}"
        if item.execution_id != self._journal.execution_id:
            self.ignored.append(
                f"{what}: it belongs to execution {item.execution_id}, "
                f"this is {self._journal.execution_id}"
            )
            return False
        if not self._operations.accept(source_event_id, family, what):
            self.ignored.append(f"{what}: it was completed before")
            return False
        return True

    def _add(self, kind: type[Any], **fields: Any) -> None:
        self.events.append(
            kind(
                event_id=self._next_event_id,
                instance_id=self._journal.instance_id,
                execution_id=self._journal.execution_id,
                timestamp_ms=self._now_ms,
                turn=self._journal.turn + 1,
                **fields,
            )
        )
        self._next_event_id += 1
