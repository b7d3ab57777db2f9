"""Finds damage: of a store, and of an instance in its snapshot.

``perdure db check`` reports it, and ``perdure import`` refuses a file that has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

import msgspec

from perdure.client.admin import read_instances
from perdure.client.moving import current_execution
from perdure.client.recorded import state_after
from perdure.client.steps import RUN_BY_WORKERS, StepView, steps_of
from perdure.codec import check_stored, is_sealed
from perdure.errors import CorruptData, InvalidValue, NotFound, PayloadError, PerdureError
from perdure.limits import TIME_MS_MAX
from perdure.model import events, wire, work
from perdure.model.failures import Failure
from perdure.model.status import Status
from perdure.model.wire import open_activity, open_message
from perdure.model.work import parent_link
from perdure.providers.rules import merge_kv

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import ExecutionSnapshot, InstanceInfo, InstanceSnapshot

_ENDS: Final = {status: kind for kind, status in work.ENDS.items()}
_BAD_ENDS: Final = (
    events.OrchestrationFailed,
    events.OrchestrationCancelled,
    events.OrchestrationTerminated,
)
_TIMES: Final = ("timestamp_ms", "fire_at_ms", "deadline_ms")
_CLOSES: Final[dict[type[events.BaseEvent], type[events.Scheduled]]] = {
    **{answer: step for _, step, answer in work.ANSWERS.values()},
    events.ActivityCancelRequested: events.ActivityScheduled,
    events.TimerCancelled: events.TimerCreated,
    events.ExternalSubscribedCancelled: events.ExternalSubscribed,
    events.QueueSubscriptionCancelled: events.QueueSubscribed,
    events.SubOrchestrationCancelRequested: events.SubOrchestrationScheduled,
}
"""The kind of step that each event completes or gives up."""

_Record: TypeAlias = events.Event | work.OrchestratorItem | work.ActivityExecute


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    message: str


@runtime_checkable
class ChecksItself(Protocol):
    """A ProviderAdmin that can check its storage below the level of instances."""

    def integrity_check(self) -> Awaitable[None]:
        """Errors: CorruptData."""
        ...


async def store_damages(admin: ProviderAdmin) -> list[Damage]:
    """Return the damage that the store itself finds, without reading every history."""
    aside = (await admin.get_store_info()).damages
    damages = [Damage(instance_id="", message=f"{path}: {why}") for path, why in aside.items()]
    if isinstance(admin, ChecksItself):
        try:
            await admin.integrity_check()
        except CorruptData as error:
            damages.append(Damage(instance_id="", message=error.message))
    return damages


async def check_instances(provider: Provider) -> AsyncIterator[Damage | None]:
    """Yield the damages of each instance, then one None for the instance."""
    async for info in read_instances(provider.admin):
        try:
            messages = await _stored_damages(provider, info)
        except NotFound:
            continue  # deleted since the page was read
        for message in messages:
            yield Damage(instance_id=info.instance_id, message=message)
        yield None


async def _stored_damages(provider: Provider, info: InstanceInfo) -> list[str]:
    admin, instance_id = provider.admin, info.instance_id
    try:
        # One consistent read: a change during several reads would look like damage.
        snapshot = await admin.export_instance(instance_id)
    except NotFound:
        raise
    except PerdureError as error:
        return [str(error)]
    found = damages_in(snapshot)
    if not found:
        found = await _lost_children(admin, snapshot)
    listed = _listing_faults(info, snapshot, await admin.list_executions(instance_id))
    # The listing is another read than the snapshot: both count only while nothing has changed.
    if listed and await admin.get_instance_info(instance_id) == info:
        found += [each for each in listed if each not in found]
    return found


async def _lost_children(admin: ProviderAdmin, parent: InstanceSnapshot) -> list[str]:
    """Return a line for each child that cannot answer: it is missing, or its answer is gone."""
    ends: dict[str, str] = {}
    for child_id in open_children(parent):
        try:
            status = (await admin.get_instance_info(child_id)).status
        except NotFound:
            ends[child_id] = "is not in the store"
        else:
            if status.is_final:
                ends[child_id] = f"is {status}, and its answer is gone"
    if ends:
        # A child ends, answers and is deleted while this reads: only the parent's last word counts.
        still_open = set(open_children(await admin.export_instance(parent.instance_id)))
        ends = {child_id: end for child_id, end in ends.items() if child_id in still_open}
    return [f"it waits for its child {child_id!r}, which {end}" for child_id, end in ends.items()]


def _listing_faults(
    info: InstanceInfo, snapshot: InstanceSnapshot, executions: Sequence[int]
) -> list[str]:
    """Return where the listing of an instance differs from its current execution."""
    if info.execution_id not in executions and (executions or not _starts(snapshot)):
        return [f"execution {info.execution_id}, its current one, is missing"]
    current = current_execution(snapshot)
    if current is not None and current.status.is_final and not info.status.ends_execution:
        return [f"{info.status}, but its execution {info.execution_id} is {current.status}"]
    if current is None or not info.status.ends_execution:
        return []
    shown = msgspec.structs.replace(current, status=info.status, output=info.output)
    try:
        history = wire.decode_history(current.history)
    except CorruptData:
        return []
    return [f"execution {info.execution_id}: {fault}" for fault in _end_faults(shown, history)]


def damages_in(snapshot: InstanceSnapshot) -> list[str]:
    """Return a line for each part of the instance that is damaged or false."""
    found: list[str] = []
    histories: dict[int, list[events.Event]] = {}
    for execution in snapshot.executions:
        execution_id = execution.execution_id
        try:
            history = wire.decode_history(execution.history)
        except CorruptData as error:
            found.append(f"execution {execution_id}: {error.message}")
            continue
        histories[execution_id] = history
        faults = (*_history_faults(snapshot, execution, history), *_end_faults(execution, history))
        found += [f"execution {execution_id}: {text}" for text in faults]
    history = histories.get(snapshot.execution_id, [])
    found += _queue_faults(snapshot, history)
    if not snapshot.executions and not _starts(snapshot):
        found.append("it has neither a history nor a queued start")
    if not found and is_open(snapshot, history):
        found += [*_stuck_steps(snapshot, history), *_state_faults(snapshot, history)]
    return found


def is_open(snapshot: InstanceSnapshot, history: Sequence[events.Event]) -> bool:
    """Return True if the current execution has begun and has not ended."""
    execution = current_execution(snapshot)
    return bool(history) and execution is not None and not execution.status.ends_execution


def _starts(snapshot: InstanceSnapshot) -> bool:
    return any(queued.message.start is not None for queued in snapshot.messages)


# --- histories


def _history_faults(
    snapshot: InstanceSnapshot, execution: ExecutionSnapshot, history: Sequence[events.Event]
) -> Iterator[str]:
    """Yield faults in a history that would block its instance, or that no turn writes."""
    if not history:
        yield "no events"
        return
    started = history[0]
    if not isinstance(started, events.OrchestrationStarted):
        yield f"begins with {type(started).__name__}"
    elif started.parent_instance_id != snapshot.parent_instance_id:
        yield (
            f"its parent is {started.parent_instance_id!r}, the instance has "
            f"{snapshot.parent_instance_id!r}"
        )
    elif execution.execution_id == snapshot.execution_id and started.name != snapshot.name:
        yield f"it is a run of {started.name!r}, the instance has the name {snapshot.name!r}"
    for place, (record, event) in enumerate(zip(execution.history, history, strict=True), 1):
        fault = _event_fault(snapshot, execution, record.event_id, place, event, history)
        if fault is not None:
            yield fault
            return


def _event_fault(
    snapshot: InstanceSnapshot,
    execution: ExecutionSnapshot,
    event_id: int,
    place: int,
    event: events.Event,
    history: Sequence[events.Event],
) -> str | None:
    if event.event_id != place or event_id != place:
        return f"event {event.event_id} stands at place {place}"
    if event.instance_id != snapshot.instance_id:
        return f"event {place} belongs to {event.instance_id!r}"
    if event.execution_id != execution.execution_id:
        return f"event {place} belongs to execution {event.execution_id}"
    if (
        isinstance(event, events.Terminal)
        and place < len(history)
        and type(history[place]) is not events.OrchestrationRetried
    ):
        return f"event {place} ends the execution, and others follow"
    if isinstance(event, events.OrchestrationStarted) and place > 1:
        return f"event {place} begins the execution once more"
    last_turn = history[place - 2].turn if place > 1 else 1
    if event.turn not in {last_turn, last_turn + (place > 1)}:
        return f"event {place} belongs to turn {event.turn}, the one before it to {last_turn}"
    opened = _CLOSES.get(type(event))
    if opened is not None and isinstance(event, events.Resolving):
        source = event.source_event_id
        if not 0 < source < place or type(history[source - 1]) is not opened:
            return f"event {place} is {type(event).__name__} of event {source}, which is none"
    return _content_fault(event, f"event {place}")


def _content_fault(record: _Record, where: str) -> str | None:
    """Return the first fault in the times and payloads of an event or a work item."""
    for name in record.__struct_fields__:
        value: Any = getattr(record, name)
        if name in _TIMES and value is not None and not 0 <= value <= TIME_MS_MAX:
            return f"{where}: {name} is {value}, which no calendar has"
        if isinstance(value, msgspec.Raw):
            try:
                check_stored(value, f"{where}: {name}")
            except PayloadError as error:
                return str(error)
    return None


def _end_faults(execution: ExecutionSnapshot, history: Sequence[events.Event]) -> Iterator[str]:
    """Yield where the status, the output and the last event of an execution differ."""
    status, last = execution.status, history[-1] if history else None
    if last is None:
        return
    expected = _ENDS.get(status)
    if expected is None:
        if isinstance(last, events.Terminal):
            yield f"{status}, but it ends with {type(last).__name__}"
    elif status is Status.CONTINUED_AS_NEW and isinstance(last, _BAD_ENDS):
        # It failed in its first turn, and a retry began the next execution with the same input.
        given = bytes(getattr(history[0], "input", b"")).decode()
        if not _may_be_same(execution.output, given):
            yield f"its output is not the input that was retried after {type(last).__name__}"
    elif not isinstance(last, expected):
        yield f"{status}, but it ends with {type(last).__name__}"
    elif not _is_output_of(last, execution.output):
        yield f"its output is not that of {type(last).__name__}, its last event"


def _is_output_of(end: events.Event, output: str | None) -> bool:
    match end:
        case events.OrchestrationCompleted(output=value):
            return _may_be_same(output, bytes(value).decode())
        case events.OrchestrationContinuedAsNew(input=value):
            return _may_be_same(output, bytes(value).decode())
        case events.OrchestrationFailed(failure=failure):
            found = _failure(output)
            if found is None or not _may_be_same(found.message, failure.message):
                return False
            return msgspec.structs.replace(found, message=failure.message) == failure
        case events.OrchestrationCancelled() | events.OrchestrationTerminated():
            found = _failure(output)
            return found is not None and _may_be_same(found.message, end.reason)
        case _:
            return True


def _may_be_same(stored: str | None, written: str | None) -> bool:
    """Return False if the texts differ. A sealed text fits any: each sealing gives another one."""
    if stored is None or written is None:
        return stored == written
    return stored == written or is_sealed(stored) or is_sealed(written)


def _failure(output: str | None) -> Failure | None:
    try:
        return msgspec.json.decode(output or "", type=Failure)
    except (msgspec.MsgspecError, RecursionError):
        return None


# --- queues


def _queue_faults(snapshot: InstanceSnapshot, history: Sequence[events.Event]) -> Iterator[str]:
    """Yield the faults of the queued messages and work items of an instance."""
    openings: list[tuple[str, Callable[[Any], Any], Any]] = [
        *((f"message {each.message_id}", open_message, each) for each in snapshot.messages),
        *((f"work item {each.message_id}", open_activity, each) for each in snapshot.work),
    ]
    for where, opening, queued in openings:
        try:
            item = opening(queued.message)
        except (CorruptData, InvalidValue) as error:
            yield f"{where}: {error}"
            continue
        fault = _content_fault(item, where) or _step_fault(snapshot, item, history, where)
        if fault is not None:
            yield fault


def _step_fault(
    snapshot: InstanceSnapshot, item: Any, history: Sequence[events.Event], where: str
) -> str | None:
    """Return why an item cannot be the work of the step that it names, or its answer."""
    if isinstance(item, work.ActivityExecute):
        step = _step(history, item.activity_id)
        is_its = isinstance(step, events.ActivityScheduled) and step.name == item.name
        if is_its or item.execution_id != snapshot.execution_id:
            return None
        return f"{where}: event {item.activity_id} does not schedule it"
    if isinstance(item, work.ActivityCompleted) and item.seed:
        return None  # it may be for an earlier instance with the same id
    execution_id, event_id, kind = _answered(item)
    if kind is None or execution_id != snapshot.execution_id:
        return None
    step = _step(history, event_id)
    if not isinstance(step, kind):
        return f"{where}: {type(item).__name__} for event {event_id}, which is no such step"
    if isinstance(item, work.SubOrchCompleted | work.SubOrchFailed):
        child_id = getattr(step, "child_instance_id", None)
        if child_id != item.child_instance_id:
            return f"{where}: the answer of {item.child_instance_id!r}, the child is {child_id!r}"
    if isinstance(item, work.TimerFired) and item.fire_at_ms != getattr(step, "fire_at_ms", None):
        return f"{where}: it fires at another time than event {event_id}"
    return None


def _answered(item: Any) -> tuple[int, int, type[events.Scheduled] | None]:
    """Return the execution and the step that a message answers; 0, 0, None if it answers none."""
    if type(item) not in work.ANSWERS:
        return 0, 0, None
    field, kind, _ = work.ANSWERS[type(item)]
    return item.execution_id, getattr(item, field), kind


def _step(history: Sequence[events.Event], event_id: int) -> events.Event | None:
    return history[event_id - 1] if 0 < event_id <= len(history) else None


# --- steps that nothing can end


def open_children(snapshot: InstanceSnapshot) -> list[str]:
    """Return the ids of the children that the instance waits for, without a queued answer."""
    execution = current_execution(snapshot)
    if execution is None:
        return []
    try:
        history = wire.decode_history(execution.history)
        waits = _unanswered(snapshot, history) if is_open(snapshot, history) else []
    except CorruptData:
        return []  # other checks report it
    return [step.child_id for step in waits if step.kind == "orchestration" and step.child_id]


def _unanswered(snapshot: InstanceSnapshot, history: Sequence[events.Event]) -> list[StepView]:
    """Return the open steps whose answer is not among the queued messages."""
    answered: set[int] = set()
    for queued in snapshot.messages:
        item = wire.decode_item(queued.message.body)
        execution_id, event_id, _ = _answered(item)
        if execution_id == snapshot.execution_id:
            answered.add(event_id)
        elif isinstance(item, work.RetrySteps) and item.execution_id == snapshot.execution_id:
            answered.update(item.activity_ids)
    steps = steps_of(history)
    return [step for step in steps if step.state == "open" and step.event_id not in answered]


def _stuck_steps(snapshot: InstanceSnapshot, history: Sequence[events.Event]) -> Iterator[str]:
    """Yield the open activities and timers that no queue holds: they would never end."""
    queued = {
        each.message.identity.activity_id
        for each in snapshot.work
        if each.message.identity.execution_id == snapshot.execution_id
    }
    for step in _unanswered(snapshot, history):
        if step.kind in RUN_BY_WORKERS and step.event_id not in queued:
            what = f"the {step.kind} {step.name}"
            yield f"event {step.event_id}: {what} is open, and no queue holds it"
        elif step.kind == "timer":
            yield f"event {step.event_id}: the timer is open, and no queue holds it"


def _state_faults(snapshot: InstanceSnapshot, history: Sequence[events.Event]) -> Iterator[str]:
    """Yield where the state and the custom status differ from what the history wrote."""
    state, custom_status = state_after(history)
    live = merge_kv(snapshot.kv_store, snapshot.kv_delta)
    stored = {key: entry.value for key, entry in live.items()}
    pairs = {} if state is None else {key: state.get(key) for key in {*state, *stored}}
    if keys := sorted(key for key in pairs if not _may_be_same(stored.get(key), pairs[key])):
        yield f"its state is not what its history wrote: {', '.join(map(repr, keys[:5]))}"
    if not _may_be_same(snapshot.custom_status, custom_status):
        yield "its custom status is not what its history wrote"


# --- parents


def parent_of(snapshot: InstanceSnapshot) -> work.ParentLink | None:
    """Return the step of the parent that the instance claims to complete."""
    execution = current_execution(snapshot)
    if execution is not None and execution.history:
        started = wire.decode_event(execution.history[0].data)
        return parent_link(started) if isinstance(started, events.OrchestrationStarted) else None
    for queued in snapshot.messages:
        item = open_message(queued.message)
        if isinstance(item, work.StartOrchestration | work.ContinueAsNew):
            return item.parent
    return None


def link_fault(link: work.ParentLink, child_id: str, parent: InstanceSnapshot) -> str | None:
    """Return why the link is false; None if it is true, or the execution is gone."""
    found = [each for each in parent.executions if each.execution_id == link.execution_id]
    for execution in found:
        records = [record for record in execution.history if record.event_id == link.event_id]
        events_found = wire.decode_history(records)
        if not any(getattr(event, "child_instance_id", None) == child_id for event in events_found):
            return (
                f"{child_id!r} says that it completes event {link.event_id} of "
                f"{link.instance_id!r}, which did not start it"
            )
    return None
