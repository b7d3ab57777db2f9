"""Checks of stored executions: for damage, by a replay with the code at hand, with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from perdure.client.admin import read_instances
from perdure.client.moving import current_execution
from perdure.client.steps import StepView, started_of, steps_of
from perdure.client.terminate import QUEUE_LIMIT
from perdure.errors import (
    CorruptData,
    Nondeterminism,
    NotFound,
    NotRegistered,
    PayloadError,
    PerdureError,
)
from perdure.model import events, wire
from perdure.model.status import Status
from perdure.providers.records import KvEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from perdure.authoring.definitions import Registry
    from perdure.codec import Codec
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo, InstanceSnapshot

Verdict: TypeAlias = Literal["ok", "diverges", "no code", "bad data"]

_ENDS: dict[Status, type[events.Terminal]] = {
    Status.COMPLETED: events.OrchestrationCompleted,
    Status.FAILED: events.OrchestrationFailed,
    Status.CANCELLED: events.OrchestrationCancelled,
    Status.TERMINATED: events.OrchestrationTerminated,
}


# --- damage


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    message: str


async def check_instances(provider: Provider) -> AsyncIterator[Damage | None]:
    """Yield the damages of each instance, then one None for the instance."""
    async for info in read_instances(provider.admin):
        try:
            messages = await _damages(provider, info)
        except NotFound:
            continue  # deleted since the page was read
        for message in messages:
            yield Damage(instance_id=info.instance_id, message=message)
        yield None


async def _damages(provider: Provider, info: InstanceInfo) -> list[str]:
    admin = provider.admin
    found: list[str] = []
    missing: list[str] = []
    executions = await admin.list_executions(info.instance_id)
    for execution_id in executions:
        try:
            records = await provider.read_with_execution(info.instance_id, execution_id)
            history = wire.decode_history(record.data for record in records)
        except PerdureError as error:
            found.append(f"execution {execution_id}: {error}")
            continue
        found += [f"execution {execution_id}: {text}" for text in _gaps(info.instance_id, history)]
        missing += _missing_end(info, execution_id, history)
    has_start = False
    for queued in await admin.list_messages(info.instance_id, limit=QUEUE_LIMIT):
        has_start |= queued.message.start is not None
        try:
            wire.decode_item(queued.message.body)
        except PerdureError as error:
            found.append(f"message {queued.message_id}: {error}")
    for item in await admin.list_work(info.instance_id, limit=QUEUE_LIMIT):
        try:
            wire.decode_activity(item.message.body)
        except PerdureError as error:
            found.append(f"work item {item.message_id}: {error}")
    if info.execution_id not in executions and (executions or not has_start):
        missing.append(f"execution {info.execution_id}, its current one, is missing")
    # The reads are not one snapshot. An instance that ran meanwhile has no missing data.
    if missing and await admin.get_instance_info(info.instance_id) == info:
        found += missing
    return found


def _missing_end(info: InstanceInfo, execution_id: int, history: list[events.Event]) -> list[str]:
    """Report an execution whose status is final and whose history has no end event."""
    if not history or execution_id > info.execution_id:
        return []
    expected: type[events.Envelope] | tuple[type[events.Envelope], ...] = events.TERMINAL_KINDS
    status = Status.CONTINUED_AS_NEW
    if execution_id == info.execution_id:
        status = info.status
        expected = _ENDS.get(status, expected)
    if not status.ends_execution or isinstance(history[-1], expected):
        return []
    return [f"execution {execution_id}: {status}, but it ends with {type(history[-1]).__name__}"]


def _gaps(instance_id: str, history: list[events.Event]) -> list[str]:
    """Report faults in a history that would block its instance."""
    if not history:
        return ["no events"]
    found: list[str] = []
    if not isinstance(history[0], events.OrchestrationStarted):
        found.append(f"begins with {type(history[0]).__name__}")
    for place, event in enumerate(history, 1):
        if event.event_id != place:
            found.append(f"event {event.event_id} stands at place {place}")
            break
    found += [
        f"event {event.event_id} belongs to {event.instance_id!r}"
        for event in history
        if event.instance_id != instance_id
    ][:1]
    return found


# --- recorded executions, and their replay


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded data that a replay needs."""

    instance_id: str
    name: str
    version: str
    history: list[events.Event]
    kv: dict[str, str]
    """State that the execution began with."""


async def read_recorded(provider: Provider, info: InstanceInfo) -> Recorded:
    """Return the current execution of an instance. Raises NotFound before its first turn.

    One read of the store gives all of it, so an instance that runs meanwhile does no harm.
    """
    records = await provider.read(info.instance_id)
    history = wire.decode_history(record.data for record in records)
    started = history[0] if history else None
    if isinstance(started, events.OrchestrationStarted) and _lacks_state(started):
        return recorded_in(await provider.admin.export_instance(info.instance_id))
    return recorded_history(info.instance_id, history)


def recorded_in(snapshot: InstanceSnapshot) -> Recorded:
    """Return the current execution of a snapshot."""
    execution = current_execution(snapshot)
    records = () if execution is None else execution.history
    history = wire.decode_history(record.data for record in records)
    return recorded_history(snapshot.instance_id, history, snapshot)


def recorded_history(
    instance_id: str, history: Sequence[events.Event], snapshot: InstanceSnapshot | None = None
) -> Recorded:
    """Return the recorded execution with this history. Raises NotFound if it is empty."""
    if not history:
        raise NotFound(f"{instance_id!r} has no history yet: no turn of it has run")
    started = started_of(history, "replay")
    return Recorded(
        instance_id=instance_id,
        name=started.name,
        version=started.version,
        history=list(history),
        kv={key: entry.value for key, entry in initial_state(started, snapshot).items()},
    )


def initial_state(
    started: events.OrchestrationStarted, snapshot: InstanceSnapshot | None
) -> dict[str, KvEntry]:
    """Return the state that the execution began with.

    History holds it. A history that was written before it did falls back on the snapshot, whose
    ``kv_store`` is right as long as the execution has not ended.
    """
    if _lacks_state(started):
        return {} if snapshot is None else dict(snapshot.kv_store)
    return {
        key: KvEntry(value=value, updated_at_ms=started.timestamp_ms)
        for key, value in (started.initial_state or {}).items()
    }


def _lacks_state(started: events.OrchestrationStarted) -> bool:
    return started.initial_state is None and started.execution_id > 1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one replay."""

    instance_id: str
    name: str
    version: str
    verdict: Verdict
    event_id: int | None = None
    """The recorded event that the code does not repeat."""
    recorded: str = ""
    performed: str = ""
    site: str = ""
    """``file:line`` in the current code, or of the recorded call."""
    report: str = ""


def check(recorded: Recorded, registry: Registry, codec: Codec) -> Finding:
    """Replay one execution. Writes nothing and runs no activity."""
    from perdure.engine.execution import Execution  # commands that only read do not load the engine

    try:
        handler = registry.resolve_orchestration(recorded.name, recorded.version)
        execution = Execution.replay(handler, recorded.history, kv=recorded.kv, codec=codec)
    except Nondeterminism as error:
        mismatch = error.mismatch
        return _finding(
            recorded,
            "diverges",
            error.report,
            event_id=error.event_id,
            recorded=str(error) if mismatch is None else mismatch.recorded,
            performed="" if mismatch is None else mismatch.performed,
            site="" if mismatch is None else mismatch.site,
        )
    except NotRegistered as error:
        return _finding(recorded, "no code", str(error))
    except (CorruptData, PayloadError) as error:
        return _finding(recorded, "bad data", str(error))
    execution.close()
    return _finding(recorded, "ok")


def _finding(execution: Recorded, verdict: Verdict, report: str = "", **places: Any) -> Finding:
    return Finding(
        instance_id=execution.instance_id,
        name=execution.name,
        version=execution.version,
        verdict=verdict,
        report=report,
        **places,
    )


# --- two executions side by side


class ComparedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of both sides under one operation key; None for a side that made none."""

    op: str
    left: str | None
    right: str | None

    @property
    def is_same(self) -> bool:
        return self.left == self.right


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of both sides, in the order of the left one, then the rest of the right one."""

    steps: tuple[ComparedStep, ...]
    ends: ComparedStep

    @property
    def first_difference(self) -> ComparedStep | None:
        different = (step for step in (*self.steps, self.ends) if not step.is_same)
        return next(different, None)


def compare(left: Sequence[events.Event], right: Sequence[events.Event]) -> Comparison:
    """Compare two histories. Times and event ids always differ and are not compared."""
    left_steps = {step.op: _line(step) for step in steps_of(left)}
    right_steps = {step.op: _line(step) for step in steps_of(right)}
    keys = [*left_steps, *(key for key in right_steps if key not in left_steps)]
    beginnings = ComparedStep(op="input", left=_beginning(left), right=_beginning(right))
    steps = (
        ComparedStep(op=key, left=left_steps.get(key), right=right_steps.get(key)) for key in keys
    )
    return Comparison(
        steps=(beginnings, *steps),
        ends=ComparedStep(op="end", left=_end(left), right=_end(right)),
    )


def _line(step: StepView) -> str:
    match step.state:
        case "done":
            outcome = "" if step.result is None else f" -> {step.result}"
        case "failed":
            outcome = f" -> raised {step.error}"
        case "dropped":
            outcome = " (not needed)"
        case "open":
            outcome = " (open)"
    return step.call + outcome


def _beginning(history: Sequence[events.Event]) -> str | None:
    first = history[0] if history else None
    if not isinstance(first, events.OrchestrationStarted):
        return None
    return f"{first.name}@{first.version} {bytes(first.input).decode()}"


def _end(history: Sequence[events.Event]) -> str | None:
    match history[-1] if history else None:
        case events.OrchestrationCompleted(output=output):
            return f"return {bytes(output).decode()}"
        case events.OrchestrationFailed(failure=failure):
            return f"raise {failure}"
        case events.OrchestrationContinuedAsNew(input=input):
            return f"continue_as_new {bytes(input).decode()}"
        case events.OrchestrationCancelled() | events.OrchestrationTerminated() as event:
            return type(event).__name__.removeprefix("Orchestration").lower()
        case _:
            return None
