"""The open steps of an execution, and what arrives for them from outside.

A live turn turns each message into a history event and applies that event to the code. A replayed
turn has the events already, so it only applies them.
"""

from __future__ import annotations

import sys
from collections import deque
from enum import IntEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.codec import require_open
from perdure.errors import Nondeterminism
from perdure.limits import UNREAD_BYTES_MAX, UNREAD_MESSAGES_MAX, WATCHERS_MAX
from perdure.model import events, work
from perdure.model.failures import activity_error, child_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from perdure.engine.decisions import TurnDecisions
    from perdure.engine.recorder import CodeRecorder

# --- open steps


class Family(IntEnum):
    """The kind of a step; a completion must be of the family of its step."""

    ACTIVITY = 1
    TIMER = 2
    EVENT = 3
    MESSAGE = 4
    CHILD = 5


# Looked up often: an attribute of an enumeration costs more than a name of the module.
ACTIVITY: Final = Family.ACTIVITY
TIMER: Final = Family.TIMER
EVENT: Final = Family.EVENT
MESSAGE: Final = Family.MESSAGE
CHILD: Final = Family.CHILD

_COMPLETED = 0x80
_GROWTH_BYTES = 64


class Operation(msgspec.Struct, gc=False):
    """One open step: the event that opened it and the future or timer that waits for it.

    The garbage collector does not track these: closing an execution releases them.
    """

    family: Family
    event: Any
    target: Any
    """The step or the timer."""
    definition: Any
    """The activity, the child, or the type that arriving data must fit."""


class StateRead(msgspec.Struct, gc=False):
    """A value of ``state`` that the code has read and may change."""

    key: str
    target: Any
    """The value."""
    text: str
    """Its JSON text."""
    type_: Any
    site: str


def _references(holder: Operation | StateRead) -> int:
    return sys.getrefcount(holder.target)


_OWN_REFERENCES: Final = _references(StateRead("", object(), "", None, ""))
"""The number of references to a target that only the engine holds, in this interpreter."""


def is_let_go(holder: Operation | StateRead) -> bool:
    """Return True if no code refers to the target any more."""
    return _references(holder) == _OWN_REFERENCES


def is_dropped(operation: Operation) -> bool:
    """Return True if no code waits for the step, or did, or holds it: it was never awaited."""
    if operation.family is TIMER or operation.target._callbacks:  # noqa: SLF001
        return False
    if getattr(operation.event, "on_parent_close", "") == "abandon":
        return False
    return is_let_go(operation) and not hasattr(operation.target, "was_awaited")


class Operations:
    """Every step by the id of the event that opened it."""

    def __init__(self) -> None:
        self.open: dict[int, Operation] = {}
        """Steps that are neither completed nor given up. The code that closes a step removes it."""
        # One byte for each history event: the family of the step, and a bit for its completion.
        self._families = bytearray()

    def add(self, operation: Operation) -> None:
        event_id: int = operation.event.event_id
        self.open[event_id] = operation
        if event_id > 0:  # a step that history does not have is numbered below zero
            families = self._families
            if event_id >= len(families):
                families.extend(bytes(event_id - len(families) + _GROWTH_BYTES))
            families[event_id] = operation.family

    def accept(self, source_event_id: int, family: Family, completion: object) -> bool:
        """Note the completion of a step; return False if the step was completed before.

        Raise Nondeterminism if no step of that family has this event id.
        """
        families = self._families
        known = families[source_event_id] if 0 < source_event_id < len(families) else 0
        if known == family:
            families[source_event_id] = known | _COMPLETED
            return True
        if known == family | _COMPLETED:
            return False
        found = Family(known & ~_COMPLETED).name.lower() if known else "no step"
        raise Nondeterminism(
            f"{type(completion).__name__} completes event {source_event_id} as "
            f"{family.name.lower()}, but history has {found} there",
            event_id=source_event_id,
        )


# --- mailboxes


_MAIL: Final[Mapping[type[work.Item], type[events.BaseEvent]]] = {
    work.ExternalRaised: events.ExternalEvent,
    work.QueueMessage: events.QueueEventDelivered,
}
"""Events and messages from outside, with the event of each."""
_MAIL_KINDS: Final = frozenset(_MAIL)


def is_mail(item: work.OrchestratorItem) -> bool:
    """Return True for an event or a message from outside."""
    return type(item) in _MAIL


def is_for_next(item: work.OrchestratorItem, recorder: CodeRecorder) -> bool:
    """Return True for a message that the next execution is to get, as this one continues as new."""
    return recorder.continued is not None and (is_mail(item) or type(item) is work.CancelInstance)


def before_mail(
    inbox: Sequence[work.OrchestratorItem],
    carried: Sequence[work.CarriedMessage],
    recorder: CodeRecorder,
) -> tuple[Sequence[work.OrchestratorItem], Sequence[work.OrchestratorItem]]:
    """Return the messages before the first mail, and the others; all, if the mail fits unread.

    In the turn that starts the execution a cancellation comes before any mail.
    """
    if _MAIL_KINDS.isdisjoint(map(type, inbox)):
        return inbox, ()
    is_first = recorder.turn == 1
    mail: list[Any] = [item for item in inbox if type(item) in _MAIL]
    if recorder.mailboxes.have_room([*carried, *mail] if is_first else mail):
        return inbox, ()
    if is_first:
        inbox = sorted(inbox, key=lambda item: type(item) is not work.CancelInstance)
    position = next(n for n, item in enumerate(inbox) if type(item) in _MAIL)
    return inbox[:position], inbox[position:]


class Mailbox:
    """Arrivals and waits of one name, each in order; at most one of the two is not empty."""

    __slots__ = ("_arrived", "_waiting")

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, msgspec.Raw]] = deque()
        self._waiting: deque[Operation] = deque()

    def arrive(self, number: int, data: msgspec.Raw) -> Operation | None:
        """Return the wait that receives the data; None if it is kept for the next wait."""
        while self._waiting:
            operation = self._waiting.popleft()
            if not operation.target.done():
                return operation
        self._arrived.append((number, data))
        return None

    def wait(self, operation: Operation) -> tuple[int, msgspec.Raw] | None:
        """Return the oldest kept arrival; without one, queue the wait and return None."""
        if self._arrived:
            return self._arrived.popleft()
        waiting = self._waiting
        waiting.append(operation)
        # In the order of history, even where branches interleave differently on replay.
        index = len(waiting) - 1
        while index > 0 and waiting[index - 1].event.event_id > operation.event.event_id > 0:
            index -= 1
        if index < len(waiting) - 1:
            waiting.pop()
            waiting.insert(index, operation)
        return None

    def find_wait(self) -> Operation | None:
        return next((each for each in self._waiting if not each.target.done()), None)

    def put_back(self, number: int, data: msgspec.Raw) -> Operation | None:
        """Like ``arrive``, for data that arrived before the data that is kept."""
        operation = self.arrive(number, data)
        if operation is None:
            self._arrived = deque(sorted(self._arrived, key=itemgetter(0)))
        return operation

    def unread(self) -> list[tuple[int, msgspec.Raw]]:
        return list(self._arrived)


class Mailboxes:
    """The mailboxes of all names. External events and messages have separate ones."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[bool, str], Mailbox] = {}
        self.arrivals = 0
        """Number of arrivals so far, which is the number of the last one."""
        self._kept = 0
        self._kept_bytes = 0
        # Number, data and wait of each arrival that was delivered to a wait.
        self._delivered: list[tuple[int, msgspec.Raw, Operation]] = []
        self._delivered_pruned = 0

    def arrive(self, name: str, data: msgspec.Raw, *, is_message: bool) -> Operation | None:
        self.arrivals += 1
        operation = self._find(name, is_message).arrive(self.arrivals, data)
        if operation is None:
            self._keep(data, 1)
        return operation

    def wait(self, operation: Operation) -> tuple[int, msgspec.Raw] | None:
        arrived = self._find(operation.event.name, operation.family is MESSAGE).wait(operation)
        if arrived is not None:
            self._keep(arrived[1], -1)
        return arrived

    def _keep(self, data: msgspec.Raw, count: int) -> None:
        self._kept += count
        self._kept_bytes += count * len(data)

    def have_room(self, mail: Sequence[Any]) -> bool:
        """Return True if all of the mail can be kept until the code reads it."""
        kept_bytes = self._kept_bytes + sum([len(item.data) for item in mail])
        return self._kept + len(mail) <= UNREAD_MESSAGES_MAX and kept_bytes <= UNREAD_BYTES_MAX

    @property
    def want_more(self) -> bool:
        """True if there is room for an arrival that no wait gets, or if the code waits for one."""
        if self._kept < UNREAD_MESSAGES_MAX and self._kept_bytes < UNREAD_BYTES_MAX:
            return True
        return any(mailbox.find_wait() for mailbox in self._by_name.values())

    def find_wait(self, name: str, *, is_message: bool) -> Operation | None:
        """Return the wait that the next arrival of that name goes to, if there is one."""
        mailbox = self._by_name.get((is_message, name))
        return None if mailbox is None else mailbox.find_wait()

    def note_delivered(self, number: int, data: msgspec.Raw, operation: Operation) -> None:
        """Remember a delivered arrival until the code reads it from its wait."""
        operation.target.is_unread = True
        self._delivered.append((number, data, operation))
        if len(self._delivered) > 2 * self._delivered_pruned + 16:
            self._delivered = [entry for entry in self._delivered if entry[2].target.is_unread]
            self._delivered_pruned = len(self._delivered)

    def put_back(self, target: object) -> tuple[int, msgspec.Raw, Operation | None]:
        """Return number and data of what that wait received, and the wait that gets it now."""
        index = next(n for n, (*_, wait) in enumerate(self._delivered) if wait.target is target)
        number, data, operation = self._delivered.pop(index)
        mailbox = self._find(operation.event.name, operation.family is MESSAGE)
        receiver = mailbox.put_back(number, data)
        if receiver is None:
            self._keep(data, 1)
        return number, data, receiver

    def unread(self) -> tuple[work.CarriedMessage, ...]:
        """Return everything that the code did not read, in the order of arrival."""
        found = [
            (number, work.CarriedMessage(name=name, data=data, mailbox=is_message))
            for (is_message, name), mailbox in self._by_name.items()
            for number, data in mailbox.unread()
        ]
        for number, data, operation in self._delivered:
            if operation.target.is_unread:
                name, is_message = operation.event.name, operation.family is MESSAGE
                found.append(
                    (number, work.CarriedMessage(name=name, data=data, mailbox=is_message))
                )
        return tuple(message for _, message in sorted(found, key=itemgetter(0)))

    def unwanted(self) -> list[tuple[bool, str]]:
        """Return kind and name of the arrivals that no wait has taken."""
        return [key for key, mailbox in self._by_name.items() if mailbox.unread()]

    def _find(self, name: str, is_message: bool) -> Mailbox:
        mailbox = self._by_name.get((is_message, name))
        if mailbox is None:
            mailbox = self._by_name[is_message, name] = Mailbox()
        return mailbox


# --- from messages to events


def add_beginning(
    started: events.OrchestrationStarted,
    carried: Iterable[work.CarriedMessage],
    watchers: Iterable[events.Watcher],
    decisions: TurnDecisions,
) -> None:
    """Add the first event, and the unread arrivals and watchers of the previous execution."""
    decisions.delta.append(started)
    decisions.last_event_id = started.event_id
    for message in carried:
        kind = events.QueueEventDelivered if message.mailbox else events.ExternalEvent
        decisions.arrive(kind, name=message.name, data=message.data)
    for watcher in watchers:
        decisions.arrive(events.WatcherAdded, watcher=watcher)


def add_messages(items: Iterable[work.OrchestratorItem], recorder: CodeRecorder) -> Sequence[str]:
    """Add an event for each message of a turn; return a line for each message that is ignored."""
    ignored: list[str] | None = None
    for item in items:
        reason = _ADD[type(item)](item, recorder)
        if reason is not None:
            ignored = ignored or []
            ignored.append(f"{type(item).__name__}{reason}")
    return ignored or ()


def _add_result(item: work.ActivityCompleted, recorder: CodeRecorder) -> str | None:
    if item.seed and item.seed != recorder.seed:
        return f" for event {item.activity_id}: it was for an earlier instance with this id"
    unwanted = _unwanted(item, item.activity_id, ACTIVITY, recorder)
    if unwanted is None:
        recorder.decisions.arrive_completed(item.activity_id, item.result, item.attempts)
        if item.seed:
            recorder.completed_elsewhere += (item.activity_id,)
    return unwanted


_FAMILIES: Final[Mapping[type[events.Scheduled], Family]] = {
    events.ActivityScheduled: ACTIVITY,
    events.TimerCreated: TIMER,
    events.SubOrchestrationScheduled: CHILD,
}
_COMPLETIONS: Final = {
    item: (answer, _FAMILIES[step], field) for item, (field, step, answer) in work.ANSWERS.items()
}
"""Messages for open steps: the event, the family, and the field that holds the id of the step."""

COMPLETION_FAMILIES: Final[Mapping[type[events.BaseEvent], Family]] = {
    kind: family for kind, family, _ in _COMPLETIONS.values()
}
_COMMON_FIELDS: Final = frozenset(events.Resolving.__struct_fields__)


def _add_completion(item: Any, recorder: CodeRecorder) -> str | None:
    kind, family, id_field = _COMPLETIONS[type(item)]
    source_event_id: int = getattr(item, id_field)
    if family is CHILD:
        step = recorder.operations.open.get(source_event_id)
        child_id = getattr(None if step is None else step.event, "child_instance_id", None)
        if child_id not in {None, item.child_instance_id}:
            return (
                f" for event {source_event_id}: it comes from {item.child_instance_id!r}, "
                f"the child is {child_id!r}"
            )
    unwanted = _unwanted(item, source_event_id, family, recorder)
    if unwanted is None:
        if family is TIMER and source_event_id not in recorder.operations.open:
            return _too_late(source_event_id)
        # The event has the result, the failure or the time under the name of the message.
        names = (name for name in kind.__struct_fields__ if name not in _COMMON_FIELDS)
        content = {name: getattr(item, name) for name in names}
        recorder.decisions.arrive(kind, source_event_id=source_event_id, **content)
    return unwanted


def _add_mail(item: work.ExternalRaised | work.QueueMessage, recorder: CodeRecorder) -> None:
    recorder.decisions.arrive(_MAIL[type(item)], name=item.name, data=item.data)


def _add_cancellation(item: work.CancelInstance, recorder: CodeRecorder) -> str | None:
    parent_id = item.parent_instance_id
    if parent_id is not None and parent_id != recorder.decisions.parent_instance_id:
        return f": {parent_id!r} is not its parent"
    came = (
        type(event) is events.OrchestrationCancelRequested for event in recorder.decisions.delta
    )
    if recorder.cancel_reason is not None or any(came):
        return ": cancellation was requested before"
    root = recorder.loop.root
    if root is not None and root.done():
        return ": the function has ended, and what it left running cleans up"
    recorder.decisions.arrive(events.OrchestrationCancelRequested, reason=item.reason)
    return None


def _add_retry(item: work.RetrySteps, recorder: CodeRecorder) -> str | None:
    if item.execution_id != recorder.execution_id:
        return f" for execution {item.execution_id}: this is {recorder.execution_id}"
    recorder.retried += item.activity_ids
    return None


def _add_watcher(item: work.WatchEnd, recorder: CodeRecorder) -> str | None:
    if item.watcher in recorder.watchers:
        return f": {item.watcher.instance_id!r} waits for it already"
    if len(recorder.watchers) >= WATCHERS_MAX:
        return f": {WATCHERS_MAX} others wait for it; {item.watcher.instance_id!r} looks itself"
    recorder.decisions.arrive(events.WatcherAdded, watcher=item.watcher)
    return None


def _add_start(
    _: work.StartOrchestration | work.ContinueAsNew, recorder: CodeRecorder
) -> str | None:
    # The start message of the first turn is its first event already.
    return ": the instance runs already" if recorder.decisions.turn > 1 else None


def _unwanted(
    item: Any, source_event_id: int, family: Family, recorder: CodeRecorder
) -> str | None:
    """Return why a completion is ignored, or None if it is the first one for its open step.

    Raise Nondeterminism for a completion without a step.
    """
    if item.execution_id != recorder.execution_id:
        return (
            f" for event {source_event_id}: it belongs to execution {item.execution_id}, "
            f"this is {recorder.execution_id}"
        )
    if not recorder.operations.accept(source_event_id, family, item):
        return _too_late(source_event_id)
    return None


def _too_late(source_event_id: int) -> str:
    return f" for event {source_event_id}: it was completed or given up before"


_ADD: Final[Mapping[type[work.Item], Callable[[Any, CodeRecorder], str | None]]] = {
    **dict.fromkeys(_COMPLETIONS, _add_completion),
    work.ActivityCompleted: _add_result,  # the most common message: no dict of fields
    work.StartOrchestration: _add_start,
    work.ContinueAsNew: _add_start,
    **dict.fromkeys(_MAIL, _add_mail),
    work.CancelInstance: _add_cancellation,
    work.RetrySteps: _add_retry,
    work.WatchEnd: _add_watcher,
}


# --- from events to the code


def _start(recorder: CodeRecorder, event: events.OrchestrationStarted) -> None:
    args, kwargs = recorder.handler.signature.decode_arguments(event.input, recorder.codec)
    recorder.loop.start_root(recorder.handler.fn(*args, **kwargs))


def _complete(
    recorder: CodeRecorder, event: events.ActivityCompleted | events.SubOrchestrationCompleted
) -> None:
    operation = recorder.operations.open.pop(event.source_event_id, None)
    # A child that goes on after its parent stays open although the code has cancelled its step.
    if operation is not None and not operation.target.done():
        if not operation.target._callbacks:  # noqa: SLF001 - no code waits for it now
            recorder.check_awaited(operation)
        value = operation.definition.signature.decode_result(event.result, recorder.codec)
        operation.target.set_result(value)


def _fail(
    recorder: CodeRecorder, event: events.ActivityFailed | events.SubOrchestrationFailed
) -> None:
    operation = recorder.operations.open.pop(event.source_event_id, None)
    if operation is not None and not operation.target.done():
        if not operation.target._callbacks:  # noqa: SLF001
            recorder.check_awaited(operation)
        name, failure = operation.event.name, event.failure
        require_open(failure.message, f"the failure of {name!r}")
        if operation.family is ACTIVITY:
            raises = operation.definition.settings.raises
            error = activity_error(failure, name, raises, recorder.codec)
        else:
            error = child_error(failure, name)
        operation.target.set_exception(error)


def _fire_timer(recorder: CodeRecorder, event: events.TimerFired) -> None:
    operation = recorder.operations.open.pop(event.source_event_id, None)
    if operation is not None:
        recorder.loop.fire(operation.target)


def _deliver(
    recorder: CodeRecorder, event: events.ExternalEvent | events.QueueEventDelivered
) -> None:
    mailboxes, is_message = recorder.mailboxes, type(event) is events.QueueEventDelivered
    operation = mailboxes.arrive(event.name, event.data, is_message=is_message)
    if operation is not None:
        recorder.deliver(operation, event.data, mailboxes.arrivals)


def _cancel(recorder: CodeRecorder, event: events.OrchestrationCancelRequested) -> None:
    """Cancel the code, unless it has ended already: then it ends as it would have.

    If it has continued as new, the next execution is cancelled.
    """
    root = recorder.loop.root
    if root is None or recorder.cancel_reason is not None:
        return
    require_open(event.reason, "the reason of the cancellation")
    if recorder.continued is not None:
        recorder.cancel_next_reason = event.reason
    elif not root.done() and not recorder.loop.is_over:
        recorder.cancel_reason = event.reason
        root.cancel(event.reason)


def _retry(recorder: CodeRecorder, event: events.OrchestrationRetried) -> None:
    recorder.started_before = {**recorder.started_before, **event.started}


def _watch(recorder: CodeRecorder, event: events.WatcherAdded) -> None:
    recorder.watchers += (event.watcher,)


APPLY: Final[Mapping[type[events.Event], Callable[[CodeRecorder, Any], None]]] = {
    events.OrchestrationStarted: _start,
    events.OrchestrationCancelRequested: _cancel,
    events.OrchestrationRetried: _retry,
    events.WatcherAdded: _watch,
    events.ActivityCompleted: _complete,
    events.ActivityFailed: _fail,
    events.TimerFired: _fire_timer,
    events.ExternalEvent: _deliver,
    events.QueueEventDelivered: _deliver,
    events.SubOrchestrationCompleted: _complete,
    events.SubOrchestrationFailed: _fail,
}
"""Applies each kind of event from outside. Every other kind is a decision of the code."""
