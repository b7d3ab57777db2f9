"""Instances as lines of a table, each with what it is doing. Cost: a few small reads a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.documents import shown_status
from perdure.cli.render import Cell, Column, glyph, status_style
from perdure.client.durations import shown_age, shown_duration
from perdure.client.insights import Insight, Surroundings, explain, read_surroundings, read_tail
from perdure.client.steps import shortened
from perdure.errors import NotFound
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.cli.session import Session
    from perdure.providers.items import InstanceInfo, WorkerInfo

COLUMNS = (
    Column("STATUS"),
    Column("NAME"),
    Column("VERSION", width_min=100),
    Column("ID"),
    Column("STARTED", is_right=True),
    Column("TOOK", is_right=True, width_min=100),
    Column("NOW", is_flexible=True),
)

_STEPS_READ = frozenset({Status.RUNNING, Status.CONTINUED_AS_NEW})


async def insight_of(
    session: Session, info: InstanceInfo, workers: Sequence[WorkerInfo]
) -> Insight:
    """What the instance is doing, from the end of its history and its queues."""
    if info.status.is_final or info.status in {Status.BLOCKED, Status.SUSPENDED}:
        return explain(info, (), Surroundings(), session.now_ms())
    around = await read_surroundings(session.admin, info.instance_id, workers)
    steps = []
    if info.status in _STEPS_READ:
        try:
            steps = await read_tail(session.provider, session.admin, info)
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
    if info.custom_status is not None and info.status in _STEPS_READ:
        return f"{said} · {info.custom_status}"
    return said
