"""The whole store on one screen: how many of each status, the queues, the newest instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.render import Cell, glyph, status_style, table_of, text_of
from perdure.cli.rows import COLUMNS, insight_of, row_of
from perdure.cli.settings import shown_store
from perdure.model.status import Status
from perdure.providers.items import InstanceQuery

if TYPE_CHECKING:
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
    totals = Text()
    for status, number in counts.items():
        totals.append(f"{glyph(status)} {number} {status.lower()}   ", status_style(status))
    return Group(
        text_of(Cell(shown_store(session.url), "bold")),
        totals,
        text_of(Cell(f"{len(workers)} workers · {await _queues(session)}", "dim")),
        "",
        table_of(COLUMNS, rows),
    )


async def overview_line(session: Session) -> str:
    counts = await count_statuses(session)
    listed = ", ".join(f"{number} {status.lower()}" for status, number in counts.items())
    return f"{listed or 'no instances'}; {await _queues(session)}"


async def count_statuses(session: Session) -> dict[Status, int]:
    counts: dict[Status, int] = {}
    for status in Status:
        number = await session.admin.count_instances(InstanceQuery(statuses=frozenset({status})))
        if number:
            shown = Status.RUNNING if status is Status.CONTINUED_AS_NEW else status
            counts[shown] = counts.get(shown, 0) + number
    return counts


async def _queues(session: Session) -> str:
    depths = await session.admin.get_queue_depths()
    turns, work = depths.orchestrator, depths.worker
    dead = f" · {depths.dead_letters} dead letters" if depths.dead_letters else ""
    return (
        f"turns {turns.visible} ready {turns.delayed} timed · "
        f"activities {work.visible} ready {work.locked} running {work.delayed} later{dead}"
    )
