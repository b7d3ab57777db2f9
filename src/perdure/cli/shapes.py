"""The shapes of the output: records as JSON documents, instances as rows of a table."""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.cli.render import Cell, Column, glyph, status_style
from perdure.client.durations import iso_time, shown_age, shown_duration
from perdure.client.insights import (
    Insight,
    LastSteps,
    QueueContext,
    explain,
    read_last_steps,
    read_queue_context,
)
from perdure.client.instance import failure_of
from perdure.client.steps import shortened
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perdure.cli.details import InstanceDetails
    from perdure.cli.session import Session
    from perdure.engine.inbox import Wait
    from perdure.providers.records import DeadLetter, InstanceInfo, QueueDepth, WorkerInfo


# The values of -o json by their names, with their paths in the record.
_INSTANCE: Final = {
    "id": "instance_id",
    "name": "name",
    "version": "version",
    "status": "status.of_instance",
    "execution": "execution_id",
    "parent": "parent_instance_id",
    "created_at": "created_at_ms",
    "updated_at": "updated_at_ms",
    "completed_at": "completed_at_ms",
}
_INSIGHT: Final = {"doing": "doing", "sentence": "sentence", "due_at": "due_ms"}
_STEP: Final = {
    "event": "event_id",
    "op": "op",
    "kind": "kind",
    "call": "call",
    "state": "state",
    "since": "since_ms",
    "ended_at": "ended_ms",
    "due_at": "due_ms",
    "result": "result",
    "error": "error",
    "attempts": "attempts",
    "child": "child_id",
    "site": "site",
}
_WAIT: Final = {"op": "op", "called_at": "site", "since": "since_ms", "due_at": "due_ms"}
_WORKER: Final = {
    "id": "worker_id",
    "host": "host",
    "process_id": "process_id",
    "started_at": "started_at_ms",
    "seen_at": "seen_at_ms",
    "version": "framework_version",
    "slots": "slots",
    "busy": "busy",
}
_LETTER: Final = {
    "letter": "letter_id",
    "instance": "message.instance_id",
    "kind": "message.kind",
    "dead_since": "dead_since_ms",
    "reason": "reason",
}


def _values(record: object, shape: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a record under their names in JSON; times in milliseconds as texts."""
    found: dict[str, Any] = {}
    for name, path in shape.items():
        value = attrgetter(path)(record)
        if value is not None and path.endswith("_ms"):
            value = iso_time(value)
        found[name] = value
    return found


def instance_document(info: InstanceInfo, insight: Insight | None = None) -> dict[str, Any]:
    document = _values(info, _INSTANCE) | {
        "custom_status": raw(info.custom_status),
        "output": raw(info.output) if info.status is Status.COMPLETED else None,
        "failure": failure_of(info),
        "block": info.block,
    }
    return document if insight is None else document | _values(insight, _INSIGHT)


def details_document(details: InstanceDetails) -> dict[str, Any]:
    return instance_document(details.info, details.insight) | {
        "input": details.last.input,
        "events": details.last.event_count,
        "events_left_out": details.last.left_out,
        "steps": [_values(step, _STEP) for step in details.last.steps],
        "attempts": list(details.around.attempts),
        "queued_messages": len(details.around.messages),
        "problem": details.last.problem,
    }


def wait_document(wait: Wait) -> dict[str, Any]:
    waits_for = f"{wait.kind} {wait.name}".rstrip()
    frames = [asdict(frame) for frame in wait.frames]
    return {"waits_for": waits_for, **_values(wait, _WAIT), "frames": frames}


def worker_document(worker: WorkerInfo) -> dict[str, Any]:
    return _values(worker, _WORKER) | {
        "handlers": [f"{name}@{version}" for name, version in worker.handlers],
        "activities": list(worker.activities),
    }


def letter_document(letter: DeadLetter) -> dict[str, Any]:
    return _values(letter, _LETTER) | {"message": raw(letter.message.body)}


def shown_status(info: InstanceInfo) -> str:
    """Return the status of the instance, between two executions as well."""
    return info.status.of_instance.value


def raw(text: str | None) -> Any:
    """Return stored JSON unchanged, or as a string if it is damaged."""
    if text is None:
        return None
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
    return msgspec.Raw(text)


COLUMNS = (
    Column("STATUS"),
    Column("NAME"),
    Column("VERSION", width_min=100),
    Column("ID"),
    Column("STARTED", is_right=True),
    Column("TOOK", is_right=True, width_min=100),
    Column("NOW", is_flexible=True),
)


async def insight_of(
    session: Session, info: InstanceInfo, workers: Sequence[WorkerInfo]
) -> Insight:
    """Describe what the instance is doing, from the end of its history and its queues."""
    if info.status.is_final or info.status in {Status.BLOCKED, Status.PAUSED}:
        return explain(info, (), QueueContext(), session.now_ms())
    around = await read_queue_context(session.admin, info.instance_id, workers)
    is_running = info.status.of_instance is Status.RUNNING
    last = await read_last_steps(session.provider, info) if is_running else LastSteps()
    return explain(info, last.steps, around, session.now_ms())


def row_of(info: InstanceInfo, insight: Insight, now_ms: int) -> list[str | Cell]:
    style = status_style(info.status)
    word = "retrying" if insight.doing == "retrying" else shown_status(info).lower()
    ended_ms = info.completed_at_ms if info.status.is_final else None
    took_ms = (ended_ms or now_ms) - info.created_at_ms
    return [
        Cell(f"{glyph(word)} {word}", style),
        info.name,
        info.version or "",
        Cell(info.instance_id, "bold"),
        f"{shown_age(now_ms - info.created_at_ms)} ago",
        shown_duration(took_ms),
        Cell(_now(info, insight), "" if not insight.error else "red"),
    ]


def shown_queue(depth: QueueDepth) -> str:
    return f"{depth.visible} ready, {depth.locked} locked, {depth.delayed} later"


def named(info: InstanceInfo) -> str:
    return f"{info.name}@{info.version}" if info.version else info.name


def _now(info: InstanceInfo, insight: Insight) -> str:
    if info.status is Status.COMPLETED:
        returned = info.output if info.output not in {None, "null"} else ""
        return f"→ {shortened(returned)}" if returned else ""
    if info.status is Status.FAILED:
        return insight.error or ""
    said = insight.sentence
    if info.status is Status.BLOCKED and insight.error:
        said = f"{said}: {insight.error}"
    if info.custom_status is not None and info.status.of_instance is Status.RUNNING:
        return f"{said} · {info.custom_status}"
    return said


async def count_statuses(session: Session) -> dict[Status, int]:
    """Count the instances of each status with one read of the store."""
    metrics = await session.admin.get_system_metrics()
    return merged({status: metrics.by_status.get(status, 0) for status in Status})


def merged(counts: Mapping[Status, int]) -> dict[Status, int]:
    """Count instances between two executions as Running, and leave out statuses without any."""
    found: dict[Status, int] = {}
    for status, number in counts.items():
        if number:
            found[status.of_instance] = found.get(status.of_instance, 0) + number
    return found
