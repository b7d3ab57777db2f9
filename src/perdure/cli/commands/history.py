"""``perdure history``: the events of an execution, streamed, filtered, followed."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from perdure.cli.command import command, execution_option, id_argument, output_option
from perdure.cli.render import Cell, echo, note, terminal_width
from perdure.client.formats import shown_duration
from perdure.client.steps import payload_text, read_records, shortened, shown_call
from perdure.codec import shown_text
from perdure.errors import CorruptData, InvalidValue, NotFound, UsageError
from perdure.escape import clean_json
from perdure.model import events, wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from perdure.cli.session import Session
    from perdure.providers.records import HistoryRecord

FAILED_KINDS = (
    events.ActivityFailed,
    events.SubOrchestrationFailed,
    events.OrchestrationFailed,
    events.OrchestrationCancelled,
    events.OrchestrationTerminated,
)


def content_of(event: events.Event) -> str:
    """Return the content of an event: a call, a JSON value or an error message."""
    match event:
        case events.OrchestrationStarted():
            version = f"@{event.version}" if event.version else ""  # it ended before it began
            return f"{event.name}{version} {payload_text(event.input)}"
        case events.ActivityScheduled():
            return shown_call(event.name, event.input)
        case events.SubOrchestrationScheduled():
            return f"{shown_call(event.name, event.input)} as {event.child_instance_id}"
        case events.OrchestrationChained():
            return f"{shown_call(event.name, event.input)} as {event.target_instance_id}"
        case events.TimerCreated():
            return shown_duration(event.fire_at_ms - event.timestamp_ms)
        case events.CustomStatusUpdated():
            return shown_text(event.status or "None")
        case events.KeyValueSet():
            return f"{event.key} = {shortened(event.value)}"
        case events.ExternalEvent() | events.QueueEventDelivered():
            return f"{event.name} {payload_text(event.data)}"
        case events.MessageSent():
            named = f" {event.name}" if event.name else ""
            return f"{event.kind}{named} {payload_text(event.data)} to {event.target_instance_id}"
        case events.WatcherAdded():
            return f"{event.watcher.instance_id} waits for the end"
        case events.ActivityFailed() | events.SubOrchestrationFailed():
            return f"of {event.source_event_id}: {event.failure}"
        case events.OrchestrationFailed():
            return str(event.failure)
        case events.OrchestrationRetried():
            return f"the turns after turn {event.kept_turn} are undone"
        case _:
            return _shown_fields(event)


def _shown_fields(event: events.Event) -> str:
    parts: list[str] = []
    for name in ("source_event_id", "name", "key", "input", "output", "result", "value", "reason"):
        value: Any = getattr(event, name, None)
        if value in {None, ""} if not isinstance(value, msgspec.Raw) else False:
            continue
        shown = payload_text(value) if isinstance(value, msgspec.Raw) else shown_text(str(value))
        parts.append(f"of {shown}" if name == "source_event_id" else shown)
    return " ".join(parts)


_FOLLOW_MS: Final = 1_000
_SITE_WIDTH_MIN: Final = 120


@command(
    "history",
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
async def history(
    session: Session,
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
    records = _records(session, instance_id, execution, follow)
    if output == "table" and not raw:
        await _print_lines(records, fits)
        return
    shown = (record async for record in records if fits(record))
    if raw or output == "jsonl":
        async for record in shown:
            sys.stdout.write(clean_json(record.data) + "\n")
    else:
        await _print_array(shown)


async def _records(
    session: Session, instance_id: str, execution: int | None, follow: bool = False
) -> AsyncIterator[HistoryRecord]:
    """Yield the events; with ``follow`` go on until the end, in the next executions as well."""
    with session.provider.watch(instance_id) as watch:
        info = await session.info(instance_id)
        chosen = info.execution_id if execution is None else execution
        await _check_execution(session, instance_id, execution)
        after = 0
        while True:
            async for record in read_records(session.provider, instance_id, chosen, after):
                yield record
                after = record.event_id
            sys.stdout.flush()
            if follow and execution is None and info.execution_id > chosen:
                chosen, after = chosen + 1, 0
                continue
            if not follow or info.status.is_final or info.execution_id > chosen:
                return
            await watch.wait(_FOLLOW_MS)
            # Read the status before the events: the next round reads what is added after this.
            info = await session.info(instance_id)


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
            return True  # show an event that cannot be decoded
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
    """Print a line for each event; times count from the first event, shown or not."""
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
