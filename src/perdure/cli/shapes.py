"""Instances as rows of a table, and counts of statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.render import Cell, Column, glyph, status_style
from perdure.client.durations import shown_age, shown_duration
from perdure.client.steps import shortened
from perdure.codec import shown_text
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.cli.session import Session
    from perdure.client.insights import Insight
    from perdure.providers.records import InstanceInfo, QueueDepth


def shown_status(info: InstanceInfo) -> str:
    """Return the status of the instance, between two executions as well."""
    return info.status.of_instance.value


COLUMNS = (
    Column("STATUS"),
    Column("NAME"),
    Column("VERSION", width_min=100),
    Column("ID"),
    Column("STARTED", is_right=True),
    Column("TOOK", is_right=True, width_min=100),
    Column("NOW", is_flexible=True),
)


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


def shown_bytes(size: int) -> str:
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def named(info: InstanceInfo) -> str:
    return f"{info.name}@{info.version}" if info.version else info.name


def _now(info: InstanceInfo, insight: Insight) -> str:
    if info.status is Status.COMPLETED:
        returned = info.output if info.output not in {None, "null"} else ""
        return f"{glyph('returned')} {shortened(returned)}" if returned else ""
    if info.status is Status.FAILED:
        return insight.error or ""
    said = insight.sentence
    if info.status is Status.BLOCKED and insight.error:
        said = f"{said}: {insight.error}"
    if info.custom_status is not None and info.status.of_instance is Status.RUNNING:
        return f"{said} · {shown_text(info.custom_status)}"
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
