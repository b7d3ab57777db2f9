"""``perdure watch``: one instance or the whole store, live in a terminal, as lines in a pipe."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from perdure.cli.command import command, complete_ids
from perdure.cli.details import COLUMNS, lines_of, named, print_details, row_of
from perdure.cli.exits import Exit
from perdure.cli.render import (
    Cell,
    console,
    echo,
    glyph,
    is_terminal,
    status_style,
    steps_table,
    table_of,
    text_of,
)
from perdure.cli.settings import shown_store
from perdure.client.formats import counted
from perdure.model.status import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

    from perdure.cli.session import Session
    from perdure.client.insights import InstanceDetails

_OWN_LINES = 6


async def overview(session: Session, height: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    workers = await session.admin.list_workers()
    counts = await session.counts()
    page = await session.admin.list_instances(None, limit=max(5, height - _OWN_LINES))
    now_ms = session.now_ms()
    rows = [row_of(info, await session.insight(info, workers), now_ms) for info in page.instances]
    totals = Text()
    for status, number in counts.items():
        totals.append(f"{glyph(status)} {number} {status.lower()}   ", status_style(status))
    return Group(
        text_of(Cell(shown_store(session.url), "bold")),
        totals,
        text_of(Cell(f"{counted(len(workers), 'worker')} · {await _queues(session)}", "dim")),
        "",
        table_of(COLUMNS, rows),
    )


async def overview_line(session: Session) -> str:
    counts = await session.counts()
    listed = ", ".join(f"{number} {status.lower()}" for status, number in counts.items())
    return f"{listed or 'no instances'}; {await _queues(session)}"


async def _queues(session: Session) -> str:
    depths = await session.admin.get_queue_depths()
    turns, work = depths.orchestrator, depths.worker
    dead = f" · {depths.dead_letters} dead letters" if depths.dead_letters else ""
    return (
        f"turns {turns.visible} ready {turns.delayed} timed · "
        f"activities {work.visible} ready {work.locked} running {work.delayed} later{dead}"
    )


_REFRESH_MS: Final = 500
_QUIET_MS: Final = 2_000
# Nothing else prints meanwhile, and redirected streams hide the terminal's encoding.
_PLAIN_LIVE: Final[dict[str, Any]] = {
    "auto_refresh": False,
    "redirect_stdout": False,
    "redirect_stderr": False,
}


@command(
    "watch",
    examples=["perdure watch o-1", "perdure watch", "perdure watch o-1 | tee o-1.log"],
)
@click.argument("instance_id", metavar="[ID]", required=False, shell_complete=complete_ids)
async def watch(session: Session, instance_id: str | None) -> int:
    """Follow an instance until it ends, or the whole store until Ctrl-C.

    Exit code 4 if the instance failed, was cancelled or terminated.
    """
    if instance_id is None:
        return await _watch_store(session)
    if is_terminal():
        return await _watch_live(session, instance_id)
    return await _watch_lines(session, instance_id)


async def _watch_live(session: Session, instance_id: str) -> int:
    from rich.live import Live

    details = await session.details(instance_id)
    with (
        session.provider.watch(instance_id) as changes,
        Live(console=console(), transient=True, **_PLAIN_LIVE) as live,
    ):
        while not details.info.status.is_final:
            live.update(_view(details, session.now_ms()), refresh=True)
            # Refresh without a change too: the shown times count up.
            await changes.wait(_REFRESH_MS)
            details = await session.details(instance_id)
    print_details(details, session.now_ms())
    return _code(details.info.status)


def _view(details: InstanceDetails, now_ms: int) -> RenderableType:
    from rich.console import Group

    info = details.info
    screen = console()
    lines = lines_of(details, now_ms)
    room = max(5, screen.height - 5)
    hidden = [text_of(Cell(f"  … {len(lines) - room} earlier", "dim"))] if len(lines) > room else []
    return Group(
        text_of(Cell(f"{named(info)}  {info.instance_id}", "bold")),
        text_of(Cell(f"  {details.insight.sentence}", status_style(info.status))),
        "",
        *hidden,
        steps_table(lines[-room:], screen.width),
    )


async def _watch_lines(session: Session, instance_id: str) -> int:
    """Print a line for each change of what the instance does, for output to a pipe."""
    last = None
    with session.provider.watch(instance_id) as changes:
        while True:
            info = await session.info(instance_id)
            insight = await session.insight(info, await session.admin.list_workers())
            key = (info.status, insight.doing, insight.since_ms, info.custom_status, insight.error)
            if key != last:
                last = key
                _print_now(f"{info.status.of_instance.lower()}: {insight.explanation}")
            if info.status.is_final:
                return _code(info.status)
            await changes.wait(_QUIET_MS)


async def _watch_store(session: Session) -> int:
    if is_terminal():
        from rich.live import Live

        with Live(console=console(), screen=True, **_PLAIN_LIVE) as live:
            while True:
                began = time.monotonic()
                live.update(await overview(session, console().height), refresh=True)
                await _rest(began)
    last = ""
    while True:
        began = time.monotonic()
        line = await overview_line(session)
        if line != last:
            last = line
            _print_now(line)
        await _rest(began)


async def _rest(began: float) -> None:
    """Sleep four times as long as the last read took, so that a big store is read less often."""
    await asyncio.sleep(max(_REFRESH_MS / 1000, 4 * (time.monotonic() - began)))


def _print_now(line: str) -> None:
    echo(line)
    sys.stdout.flush()


def _code(status: Status) -> int:
    return Exit.OK if status is Status.COMPLETED else Exit.FAILED
