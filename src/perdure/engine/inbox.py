"""Messages to events: what is stale, repeated or too late is left out and named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.engine.operations import ACTIVITY, CHILD, TIMER
from perdure.model import events, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from perdure.engine.journal import Journal
    from perdure.engine.operations import Family, Operations


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
        self._operations = operations
        self._now_ms = now_ms
        self._turn = journal.turn + 1
        self._is_cancel_requested = is_cancel_requested
        self._next_event_id = journal.last_event_id + 1
        self.events: list[events.Event] = []
        self.ignored: list[str] | tuple[()] = ()

    def add_started(self, started: events.OrchestrationStarted) -> None:
        self.events.append(started)
        self._next_event_id = started.event_id + 1

    def add_carried(self, messages: Iterable[work.CarriedMessage]) -> None:
        """What the execution before had not consumed comes first."""
        for message in messages:
            kind = events.QueueEventDelivered if message.mailbox else events.ExternalEvent
            self._add(kind, name=message.name, data=message.data)

    def add(self, items: Iterable[work.OrchestratorItem]) -> None:
        for item in items:
            _CONVERT[type(item)](self, item)

    def complete_activity(self, item: work.ActivityCompleted) -> None:
        if self._is_wanted(item, item.activity_id, ACTIVITY):
            self._add(
                events.ActivityCompleted,
                source_event_id=item.activity_id,
                result=item.result,
                attempts=item.attempts,
            )

    def fail_activity(self, item: work.ActivityFailed) -> None:
        if self._is_wanted(item, item.activity_id, ACTIVITY):
            self._add(events.ActivityFailed, source_event_id=item.activity_id, failure=item.failure)

    def fire_timer(self, item: work.TimerFired) -> None:
        was_open = item.timer_id in self._operations.open
        if not self._is_wanted(item, item.timer_id, TIMER):
            return
        if was_open:
            self._add(events.TimerFired, source_event_id=item.timer_id, fire_at_ms=item.fire_at_ms)
        else:
            self._ignore(
                f"TimerFired for event {item.timer_id}: it was completed or given up before"
            )

    def complete_child(self, item: work.SubOrchCompleted) -> None:
        if self._is_wanted(item, item.event_id, CHILD):
            self._add(
                events.SubOrchestrationCompleted,
                source_event_id=item.event_id,
                result=item.result,
            )

    def fail_child(self, item: work.SubOrchFailed) -> None:
        if self._is_wanted(item, item.event_id, CHILD):
            self._add(
                events.SubOrchestrationFailed,
                source_event_id=item.event_id,
                failure=item.failure,
            )

    def raise_event(self, item: work.ExternalRaised) -> None:
        self._add(events.ExternalEvent, name=item.name, data=item.data)

    def deliver_message(self, item: work.QueueMessage) -> None:
        self._add(events.QueueEventDelivered, name=item.name, data=item.data)

    def cancel(self, item: work.CancelInstance) -> None:
        parent_id = self._journal.parent_instance_id
        if item.parent_instance_id is not None and item.parent_instance_id != parent_id:
            self._ignore(f"CancelInstance: {item.parent_instance_id!r} is not its parent")
        elif self._is_cancel_requested:
            self._ignore("CancelInstance: cancellation was requested before")
        else:
            self._is_cancel_requested = True
            self._add(events.OrchestrationCancelRequested, reason=item.reason)

    def start(self, item: work.StartOrchestration | work.ContinueAsNew) -> None:
        # The one that begins the first turn has become its first event already.
        if self._turn > 1:
            self._ignore(f"{type(item).__name__}: the instance runs already")

    def _is_wanted(self, item: Any, source_event_id: int, family: Family) -> bool:
        """Of this execution and the first of its kind; what has no source is an error."""
        if item.execution_id != self._journal.execution_id:
            self._ignore(
                f"{type(item).__name__} for event {source_event_id}: it belongs to execution "
                f"{item.execution_id}, this is {self._journal.execution_id}"
            )
            return False
        if not self._operations.accept(source_event_id, family, item):
            self._ignore(
                f"{type(item).__name__} for event {source_event_id}: "
                "it was completed or given up before"
            )
            return False
        return True

    def _ignore(self, line: str) -> None:
        if not isinstance(self.ignored, list):
            self.ignored = []
        self.ignored.append(line)

    def _add(self, kind: type[Any], **fields: Any) -> None:
        journal = self._journal
        self.events.append(
            kind(
                event_id=self._next_event_id,
                instance_id=journal.instance_id,
                execution_id=journal.execution_id,
                timestamp_ms=self._now_ms,
                turn=self._turn,
                **fields,
            )
        )
        self._next_event_id += 1


_CONVERT: Final[Mapping[type[work.OrchestratorItem], Callable[[Inbox, Any], None]]] = {
    work.StartOrchestration: Inbox.start,
    work.ContinueAsNew: Inbox.start,
    work.ActivityCompleted: Inbox.complete_activity,
    work.ActivityFailed: Inbox.fail_activity,
    work.TimerFired: Inbox.fire_timer,
    work.ExternalRaised: Inbox.raise_event,
    work.QueueMessage: Inbox.deliver_message,
    work.SubOrchCompleted: Inbox.complete_child,
    work.SubOrchFailed: Inbox.fail_child,
    work.CancelInstance: Inbox.cancel,
}
