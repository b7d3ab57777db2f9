"""The whole store on one screen: how many of each status, the queues, the newest instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.render import Cell, glyph, status_style, table_of, text_of
from perdure.cli.rows import COLUMNS, insight_of, row_of
from perdure.cli.settings import shown_store
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from perdure.cli.session import Session

_OWN_LINES = 6


async def overview(session: Session, height: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    workers = await session.admin.list_workers()
    counts = await count_statuses(session)
    page = await session.admin.list_instances(None, limit=max(5, height - _OWN_LINES))
    now_ms = session.now_ms()
    rows = [
        row_of(info, await insight_of(session, info, workers), now_ms) for info in page.instances
    ]
    running = "1 worker" if len(workers) == 1 else f"{len(workers)} workers"
    totals = Text()
    for status, number in counts.items():
        totals.append(f"{glyph(status)} {number} {status.lower()}   ", status_style(status))
    return Group(
        text_of(Cell(shown_store(session.url), "bold")),
        totals,
        text_of(Cell(f"{running} · {await _queues(session)}", "dim")),
        "",
        table_of(COLUMNS, rows),
    )


async def overview_line(session: Session) -> str:
    counts = await count_statuses(session)
    listed = ", ".join(f"{number} {status.lower()}" for status, number in counts.items())
    return f"{listed or 'no instances'}; {await _queues(session)}"


async def count_statuses(session: Session) -> dict[Status, int]:
    """How many of each, in the order of the enumeration; one read of the store."""
    metrics = await session.admin.get_system_metrics()
    return merged({status: metrics.by_status.get(status, 0) for status in Status})


def merged(counts: Mapping[Status, int]) -> dict[Status, int]:
    """Between two executions an instance is alive, whatever the store calls the first one."""
    found: dict[Status, int] = {}
    for status, number in counts.items():
        if number:
            shown = Status.RUNNING if status is Status.CONTINUED_AS_NEW else status
            found[shown] = found.get(shown, 0) + number
    return found


async def _queues(session: Session) -> str:
    depths = await session.admin.get_queue_depths()
    turns, work = depths.orchestrator, depths.worker
    dead = f" · {depths.dead_letters} dead letters" if depths.dead_letters else ""
    return (
        f"turns {turns.visible} ready {turns.delayed} timed · "
        f"activities {work.visible} ready {work.locked} running {work.delayed} later{dead}"
    )
