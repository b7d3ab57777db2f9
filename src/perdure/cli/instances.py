"""Instances as JSON documents and as rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from perdure.cli.render import Cell, Column, glyph, status_style
from perdure.client.durations import iso_time, shown_age, shown_duration
from perdure.client.insights import (
    Insight,
    QueueContext,
    explain,
    read_last_steps,
    read_queue_context,
)
from perdure.client.instance import failure_of
from perdure.client.steps import shortened
from perdure.errors import NotFound
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.cli.session import Session
    from perdure.client.insights import Insight
    from perdure.client.steps import StepView
    from perdure.providers.records import InstanceInfo, WorkerInfo


def instance_document(info: InstanceInfo, insight: Insight | None = None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": info.instance_id,
        "name": info.name,
        "version": info.version,
        "status": shown_status(info),
        "execution": info.execution_id,
        "parent": info.parent_instance_id,
        "created_at": iso_time(info.created_at_ms),
        "updated_at": iso_time(info.updated_at_ms),
        "completed_at": optional_time(info.completed_at_ms),
        "custom_status": raw(info.custom_status),
        "output": raw(info.output) if info.status is Status.COMPLETED else None,
        "failure": failure_of(info),
        "block": info.block,
    }
    if insight is not None:
        document["doing"] = insight.doing
        document["sentence"] = insight.sentence
        document["due_at"] = optional_time(insight.due_ms)
    return document


def step_document(step: StepView) -> dict[str, Any]:
    return {
        "event": step.event_id,
        "op": step.op,
        "kind": step.kind,
        "call": step.call,
        "state": step.state,
        "since": iso_time(step.since_ms),
        "ended_at": optional_time(step.ended_ms),
        "due_at": optional_time(step.due_ms),
        "result": step.result,
        "error": step.error,
        "attempts": step.attempts,
        "child": step.child_id,
        "site": step.site,
    }


def shown_status(info: InstanceInfo) -> str:
    """Return the status of the instance, between two executions as well."""
    return info.status.of_instance.value


def optional_time(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else iso_time(milliseconds)


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
    steps = []
    if info.status.of_instance is Status.RUNNING:
        try:
            steps = await read_last_steps(session.provider, session.admin, info)
        except NotFound:  # deleted, or its next execution has just begun
            steps = []
    return explain(info, steps, around, session.now_ms())


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
