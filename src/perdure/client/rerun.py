"""Rerun an instance as a new instance: from the beginning, or from one of its events."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from perdure.authoring.definitions import parse_version
from perdure.client.insights import command_line
from perdure.client.moving import current_execution
from perdure.client.recorded import written_by
from perdure.client.steps import RUN_BY_WORKERS, StepView, read_history, started_of, steps_of
from perdure.client.terminate import operator_lock
from perdure.codec import require_open
from perdure.errors import AlreadyExists, InvalidValue, NotFound
from perdure.ids import child_id
from perdure.limits import ID_CHARACTERS_MAX, check_id
from perdure.model import events, wire, work
from perdure.model.status import Status
from perdure.model.wire import activity_envelope, envelope
from perdure.providers.records import (
    EnqueueCondition,
    ExecutionSnapshot,
    InstanceSnapshot,
    QueuedMessage,
    QueuedWork,
    TurnCommit,
)
from perdure.providers.sealing import export_opened, import_sealed

if TYPE_CHECKING:
    from perdure.clock import Clock
    from perdure.providers.contract import Provider

Bounds: TypeAlias = Callable[[str], tuple[Any, ...]]
"""Retries, timeout and heartbeat of an activity by its name: history does not hold them."""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the events that a rerun keeps, and the steps that it runs again."""

    events_kept: int
    steps_again: int
    """Number of finished steps of the original that the copy has forgotten."""


def fresh_id(instance_id: str) -> str:
    """Return a new id that begins with the id of the original."""
    tail = f"-rerun-{secrets.token_hex(3)}"
    return instance_id[: ID_CHARACTERS_MAX - len(tail)] + tail


async def rerun(
    provider: Provider,
    instance_id: str,
    new_id: str,
    *,
    input: msgspec.Raw | None = None,  # noqa: A002
    version: str | None = None,
) -> Copied:
    """Start the same orchestration as a new instance; all finished steps run again.

    Without ``input`` it gets the same input, without ``version`` the latest version.
    """
    if version is not None:
        parse_version(version)
    info = await provider.admin.get_instance_info(instance_id)
    started = await read_start(provider, instance_id, info.execution_id)
    if input is None:
        require_open(bytes(started.input), f"the input of {instance_id!r}")
    start = work.StartOrchestration(
        instance_id=check_id(new_id, "id"),
        name=started.name,
        input=started.input if input is None else input,
        version=version,
        trace=started.trace,
        scheduled_for_ms=started.scheduled_for_ms,
    )
    if not await provider.enqueue_for_orchestrator(
        envelope(start), condition=EnqueueCondition.ABSENT
    ):
        raise AlreadyExists(f"{new_id!r} exists already; choose another id")
    # Those of a turn that a retry has undone count too: their completions arrive again.
    again = {
        event.source_event_id
        for event in await read_history(provider, instance_id, info.execution_id)
        if isinstance(event, (events.ActivityCompleted, events.SubOrchestrationCompleted))
    }
    return Copied(events_kept=0, steps_again=len(again))


def finished_steps(steps: Iterable[StepView]) -> set[int]:
    """Return the event ids of the activities and children that have finished."""
    kinds = {*RUN_BY_WORKERS, "orchestration"}
    return {step.event_id for step in steps if step.kind in kinds and step.state == "done"}


async def read_start(
    provider: Provider, instance_id: str, execution_id: int
) -> events.OrchestrationStarted | work.StartOrchestration:
    """Return the first event of an execution, or the queued start of one that has not begun."""
    records = await provider.read_with_execution(instance_id, execution_id, limit=1)
    if records:
        return started_of([wire.decode_event(records[0].data)], "rerun")
    for queued in await provider.admin.list_messages(instance_id):
        item = wire.decode_item(queued.message.body)
        if isinstance(item, work.StartOrchestration):
            return item
    raise NotFound(f"{instance_id!r} has neither history nor a queued start")


async def rerun_from_event(
    provider: Provider,
    instance_id: str,
    new_id: str,
    event_id: int,
    *,
    clock: Clock,
    bounds: Bounds | None = None,
) -> Copied:
    """Copy the history up to the end of the turn with the event, and continue from there.

    Steps that were open then are started again, and later events are forgotten. The copy has no
    parent. Code that puts its own instance id into a payload does not repeat its history: such an
    instance becomes Blocked.
    """
    check_id(new_id, "id")
    snapshot = await export_opened(provider, instance_id)
    execution = current_execution(snapshot)
    if execution is None:
        raise InvalidValue(f"{instance_id!r} has not begun: rerun it without an event")
    history = wire.decode_history(execution.history)
    kept = [
        _renamed(event, instance_id, new_id) for event in _prefix(instance_id, history, event_id)
    ]
    started = started_of(kept, "rerun")
    opened = [step.event for step in steps_of(kept) if step.state == "open"]
    children = [
        work.child_item(event, started)
        for event in opened
        if isinstance(event, events.SubOrchestrationScheduled)
    ]
    known = {queued.message.identity.activity_id: queued for queued in snapshot.work}
    activities = [
        _activity(event, started, known.get(event.event_id), bounds)
        for event in opened
        if isinstance(event, events.ActivityScheduled)
    ]
    timers = [event for event in opened if isinstance(event, events.TimerCreated)]
    now_ms = clock.now_ms()
    copy = _copy(
        snapshot,
        execution,
        kept,
        now_ms,
        messages=tuple(_queued_timer(*each, now_ms) for each in enumerate(timers, 1)),
        work=tuple(_queued_work(*each, now_ms) for each in enumerate(activities, 1)),
        # Paused until its children are queued, so that a crash leaves no half-started tree.
        suspended=bool(children),
    )
    await import_sealed(provider, copy)
    if children:
        async with operator_lock(provider, new_id) as (_, token):
            commit = TurnCommit(
                execution_id=copy.execution_id, orchestrator_items=tuple(map(envelope, children))
            )
            await provider.ack_orchestration_item(token, commit)
        await provider.admin.resume_instance(new_id)
    again = finished_steps(steps_of(history)) - finished_steps(steps_of(kept))
    return Copied(events_kept=len(kept), steps_again=len(again))


def _prefix(instance_id: str, history: Sequence[events.Event], event_id: int) -> list[events.Event]:
    chosen = next((event for event in history if event.event_id == event_id), None)
    if chosen is None:
        raise InvalidValue(
            f"{instance_id!r} has no event {event_id}; its history has 1 to {len(history)}"
        )
    kept = [event for event in history if event.turn <= chosen.turn]
    if isinstance(kept[-1], events.Terminal):
        first = next(event.event_id for event in history if event.turn == chosen.turn)
        earlier = f"an event before {first}" if first > 1 else "none: rerun it without an event"
        raise InvalidValue(
            f"event {event_id} belongs to the turn that ended {instance_id!r}, so nothing would "
            f"run again; choose {earlier}. To run that turn again: perdure "
            f"{command_line('retry ID', instance_id)}"
        )
    return kept


def _renamed(event: events.Event, old_id: str, new_id: str) -> events.Event:
    changes: dict[str, Any] = {"instance_id": new_id}
    if isinstance(event, events.OrchestrationStarted):
        changes |= {
            "parent_instance_id": None,
            "parent_execution_id": None,
            "parent_event_id": None,
            "depth": 0,
            "key_seed": secrets.token_hex(4),
        }
    elif isinstance(event, events.SubOrchestrationScheduled):
        place = (event.execution_id, event.event_id)
        rest = event.child_instance_id.removeprefix(old_id)
        if event.child_instance_id == child_id(old_id, *place):
            changes["child_instance_id"] = child_id(new_id, *place)
        # The code chose the other ids. Rename those that it made of the id of the parent, such as
        # "order-1/stock" of "order-1", but not "order-10".
        elif rest != event.child_instance_id and not rest[:1].isalnum():
            changes["child_instance_id"] = new_id + rest
    return msgspec.structs.replace(event, **changes)


def _copy(
    snapshot: InstanceSnapshot,
    execution: ExecutionSnapshot,
    history: Sequence[events.Event],
    now_ms: int,
    **queued: Any,
) -> InstanceSnapshot:
    """Return the instance as it was after that history, with these messages and work items."""
    started = started_of(history, "rerun")
    written = written_by(history, snapshot)
    return InstanceSnapshot(
        instance_id=started.instance_id,
        name=started.name,
        version=started.version,
        execution_id=snapshot.execution_id,
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        parent_instance_id=None,
        custom_status=written.custom_status,
        custom_status_version=written.status_changes,
        block=None,
        not_before_ms=None,
        executions=(
            msgspec.structs.replace(
                execution,
                status=Status.RUNNING,
                output=None,
                started_at_ms=now_ms,
                completed_at_ms=None,
                history=tuple(map(wire.record_of, history)),
            ),
        ),
        kv_store=written.kv_store,
        kv_delta=written.kv_delta,
        **queued,
    )


def _queued_timer(number: int, event: events.TimerCreated, now_ms: int) -> QueuedMessage:
    """Return the message of an open timer. A timer keeps its time, even a past one."""
    return QueuedMessage(
        message_id=number,
        message=envelope(work.timer_item(event)),
        visible_at_ms=event.fire_at_ms,
        enqueued_at_ms=now_ms,
        attempt_count=0,
        locked=False,
    )


def _queued_work(number: int, item: work.ActivityExecute, now_ms: int) -> QueuedWork:
    return QueuedWork(
        message_id=number,
        message=activity_envelope(item),
        visible_at_ms=now_ms,
        enqueued_at_ms=now_ms,
        attempt_count=0,
        locked_until_ms=None,
        heartbeat=None,
    )


def _activity(
    event: events.ActivityScheduled,
    started: events.OrchestrationStarted,
    queued: QueuedWork | None,
    bounds: Bounds | None,
) -> work.ActivityExecute:
    """Return an open activity, with the options of the original if that is still queued."""
    if queued is not None:
        return msgspec.structs.replace(
            wire.decode_activity(queued.message.body),
            instance_id=event.instance_id,
            attempt=1,
            redelivered=0,
            last_failure=None,
            last_heartbeat=None,
            seed=started.key_seed or "",
        )
    return work.activity_item(event, started, *(() if bounds is None else bounds(event.name)))
