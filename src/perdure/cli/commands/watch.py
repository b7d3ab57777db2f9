"""``perdure watch``: one instance or the whole store, live in a terminal, as lines in a pipe."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import click

from perdure.cli.command import command
from perdure.cli.exits import Exit
from perdure.cli.options import complete_ids
from perdure.cli.render import Cell, console, echo, is_terminal, status_style
from perdure.cli.session import run
from perdure.model.status import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

    from perdure.cli.picture import Picture
    from perdure.cli.session import Session

_REFRESH_MS: Final = 500
_QUIET_MS: Final = 2_000
# Nothing else prints meanwhile, and a redirected stream would hide what the terminal can show.
_PLAIN_LIVE: Final[dict[str, Any]] = {
    "auto_refresh": False,
    "redirect_stdout": False,
    "redirect_stderr": False,
}


@command(
    "watch",
    short_help="Follow one instance, or the whole store, live.",
    examples=["perdure watch o-1", "perdure watch", "perdure watch o-1 | tee o-1.log"],
)
@click.argument("instance_id", metavar="[ID]", required=False, shell_complete=complete_ids)
def watch(instance_id: str | None) -> int:
    """Follow an instance until it ends (exit 4 if not well), or the whole store until Ctrl-C."""

    async def body(session: Session) -> int:
        if instance_id is None:
            return await _watch_store(session)
        if is_terminal():
            return await _watch_live(session, instance_id)
        return await _watch_lines(session, instance_id)

    return run(body)


async def _watch_live(session: Session, instance_id: str) -> int:
    from rich.live import Live

    from perdure.cli.picture import print_picture, read_picture

    picture = await read_picture(session, instance_id)
    with (
        session.provider.watch(instance_id) as changes,
        Live(console=console(), transient=True, **_PLAIN_LIVE) as live,
    ):
        while not picture.info.status.is_final:
            live.update(_view(picture, session.now_ms()), refresh=True)
            # Times count up on the screen even where nothing happens.
            await changes.wait(_REFRESH_MS)
            picture = await read_picture(session, instance_id)
    print_picture(picture, session.now_ms())
    return _code(picture.info.status)


def _view(picture: Picture, now_ms: int) -> RenderableType:
    from rich.console import Group

    from perdure.cli.journal import lines_of
    from perdure.cli.render import steps_table, text_of
    from perdure.cli.rows import named

    info = picture.info
    screen = console()
    lines = lines_of(picture.steps, picture.around.attempts, now_ms)
    room = max(5, screen.height - 5)
    hidden = [text_of(Cell(f"  … {len(lines) - room} earlier", "dim"))] if len(lines) > room else []
    return Group(
        text_of(Cell(f"{named(info)}  {info.instance_id}", "bold")),
        text_of(Cell(f"  {picture.insight.sentence}", status_style(info.status))),
        "",
        *hidden,
        steps_table([line.cells() for line in lines[-room:]], screen.width),
    )


async def _watch_lines(session: Session, instance_id: str) -> int:
    """For a pipe: a line for each change of the sentence, without the ticking of its times."""
    from perdure.cli.rows import insight_of

    last = None
    with session.provider.watch(instance_id) as changes:
        while True:
            info = await session.info(instance_id)
            insight = await insight_of(session, info, await session.admin.list_workers())
            key = (info.status, insight.doing, insight.since_ms, info.custom_status, insight.error)
            if key != last:
                last = key
                echo(f"{info.status.lower()}: {insight.sentence}")
                _flush()
            if info.status.is_final:
                return _code(info.status)
            await changes.wait(_QUIET_MS)


async def _watch_store(session: Session) -> int:
    from perdure.cli.overview import overview, overview_line

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
            echo(line)
            _flush()
        await _rest(began)


async def _rest(began: float) -> None:
    """Counting a very big store takes a moment: look at it less often then."""
    await asyncio.sleep(max(_REFRESH_MS / 1000, 4 * (time.monotonic() - began)))


def _flush() -> None:
    import sys

    sys.stdout.flush()


def _code(status: Status) -> int:
    return Exit.OK if status is Status.COMPLETED else Exit.FAILED
