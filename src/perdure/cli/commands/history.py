"""``perdure history``: the events of an execution, streamed, filtered, followed."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

import click

from perdure.cli.command import command
from perdure.cli.escape import clean_json
from perdure.cli.event_text import FAILED_KINDS, content_of
from perdure.cli.options import execution_option, id_argument, output_option
from perdure.cli.render import Cell, echo, note, terminal_width
from perdure.cli.session import run
from perdure.client.durations import shown_duration
from perdure.errors import CorruptData, InvalidValue, NotFound, UsageError
from perdure.model import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from perdure.cli.session import Session
    from perdure.providers.items import HistoryRecord

_PAGE: Final = 2_000
_FOLLOW_MS: Final = 1_000
_SITE_WIDTH_MIN: Final = 120


@command(
    "history",
    short_help="Print the events of an instance.",
    examples=[
        "perdure history o-1",
        "perdure history o-1 --failed",
        "perdure history o-1 --type Activity --grep o-1",
        "perdure history o-1 --follow -o jsonl",
    ],
)
@id_argument()
@execution_option()
@click.option("--type", "kind", metavar="TEXT", help="Only events whose type contains it.")
@click.option("--failed", is_flag=True, help="Only what went wrong.")
@click.option("--grep", metavar="REGEX", help="Only events whose stored text matches.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the instance ends.")
@click.option("--raw", is_flag=True, help="The stored text of each event, as it is.")
@output_option("table", "json", "jsonl")
def history(
    instance_id: str,
    execution: int | None,
    kind: str | None,
    failed: bool,
    grep: str | None,
    follow: bool,
    raw: bool,
    output: str,
) -> None:
    """Print the events of the latest execution of an instance, oldest first."""
    if raw and output == "json":
        raise UsageError("--raw prints the stored texts line by line; leave out -o json")
    fits = _filter(kind, failed, grep)

    async def body(session: Session) -> None:
        records = read_records(session, instance_id, execution, follow)
        if output == "table" and not raw:
            await _print_lines(records, fits)
            return
        shown = (record async for record in records if fits(record))
        if raw or output == "jsonl":
            async for record in shown:
                sys.stdout.write(clean_json(record.data) + "\n")
        else:
            await _print_array(shown)

    run(body)


async def read_records(
    session: Session, instance_id: str, execution: int | None, follow: bool = False
) -> AsyncIterator[HistoryRecord]:
    """Page by page, so that a long history neither waits nor fills memory.

    Following goes on with the next execution when the instance continues as new.
    """
    with session.provider.watch(instance_id) as watch:
        info = await session.info(instance_id)
        chosen = info.execution_id if execution is None else execution
        await _check_execution(session, instance_id, execution)
        after = 0
        while True:
            async for record in _rest(session, instance_id, chosen, after):
                yield record
                after = record.event_id
            sys.stdout.flush()
            if follow and execution is None and info.execution_id > chosen:
                chosen, after = chosen + 1, 0
                continue
            if not follow or info.status.is_final or info.execution_id > chosen:
                return
            await watch.wait(_FOLLOW_MS)
            # Asked before reading: an end that comes after this answer is read in the next round.
            info = await session.info(instance_id)


async def _rest(
    session: Session, instance_id: str, execution: int, after: int
) -> AsyncIterator[HistoryRecord]:
    while True:
        records = await session.provider.read_with_execution(
            instance_id, execution, after_event_id=after, limit=_PAGE
        )
        for record in records:
            yield record
        if len(records) < _PAGE:
            return
        after = records[-1].event_id


async def _check_execution(session: Session, instance_id: str, execution: int | None) -> None:
    if execution is None:
        return
    executions = await session.admin.list_executions(instance_id)
    if execution not in executions:
        known = f"{executions[0]} to {executions[-1]}" if executions else "none yet"
        raise NotFound(f"{instance_id!r} has no execution {execution}; it has: {known}")


def _filter(kind: str | None, failed: bool, grep: str | None) -> Callable[[HistoryRecord], bool]:
    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        raise InvalidValue(f"--grep is no regular expression: {error}") from None
    wanted = kind.lower() if kind else ""
    if not wanted and not failed:
        return lambda record: pattern is None or pattern.search(record.data) is not None

    def fits(record: HistoryRecord) -> bool:
        if pattern is not None and not pattern.search(record.data):
            return False
        try:
            event = wire.decode_event(record.data)
        except CorruptData:
            return True  # what cannot be read must be seen
        if failed and not isinstance(event, FAILED_KINDS):
            return False
        return wanted in type(event).__name__.lower()

    return fits


async def _print_array(records: AsyncIterator[HistoryRecord]) -> None:
    separator = "["
    async for record in records:
        sys.stdout.write(f"{separator}\n  {clean_json(record.data)}")
        separator = ","
    sys.stdout.write("[]\n" if separator == "[" else "\n]\n")


async def _print_lines(
    records: AsyncIterator[HistoryRecord], fits: Callable[[HistoryRecord], bool]
) -> None:
    """Times count from the first event, also where that is not shown."""
    began_ms: int | None = None
    has_printed = False
    has_room = terminal_width() >= _SITE_WIDTH_MIN
    async for record in records:
        try:
            event = wire.decode_event(record.data)
        except CorruptData as error:
            echo(f"{record.event_id:>5}  ", Cell(f"unreadable: {error.message}", "red"))
            continue
        began_ms = event.timestamp_ms if began_ms is None else began_ms
        if not fits(record):
            continue
        has_printed = True
        kind = type(event).__name__
        since = f"+{shown_duration(event.timestamp_ms - began_ms)}"
        site = getattr(event, "site", "") if has_room else ""
        echo(
            Cell(f"{event.event_id:>5} {since:>8} ", "dim"),
            Cell(f"{kind:<23} ", "red" if isinstance(event, FAILED_KINDS) else "cyan"),
            content_of(event),
            Cell(f"  {site}" if site else "", "dim"),
            is_cut=True,
        )
    if not has_printed:
        note("no event yet: no turn of it has run" if began_ms is None else "no event fits")
