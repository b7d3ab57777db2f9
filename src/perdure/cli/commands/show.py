"""``perdure show``, ``tree``, ``stack``, ``peek``, ``history``: everything about one instance."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec.structs import asdict

from perdure.cli.command import command, id_argument, module_option, output_option
from perdure.cli.details import print_details, shown_status
from perdure.cli.render import (
    Cell,
    echo,
    glyph,
    note,
    print_ids,
    print_json,
    status_style,
    terminal_width,
)
from perdure.cli.session import Session, current_settings, run
from perdure.client.formats import iso_time, shown_duration
from perdure.client.insights import read_last_steps
from perdure.client.json_documents import details_document, tree_document, wait_document
from perdure.client.retention import deleted_at_ms
from perdure.client.steps import check_execution, payload_text, read_records, shortened, shown_call
from perdure.codec import JSON, shown_text
from perdure.errors import (
    CorruptData,
    InvalidValue,
    PayloadError,
    UsageError,
)
from perdure.escape import clean_json
from perdure.model import events, wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from perdure.client.json_documents import TreeDocument
    from perdure.engine.waits import Wait
    from perdure.providers.records import HistoryRecord, InstanceInfo, WorkerInfo


@command(
    "show",
    examples=[
        "perdure show o-1",
        "perdure show o-1 --all",
        "perdure show o-1 -o json | jq .sentence",
    ],
)
@id_argument()
@click.option("--all", "is_whole", is_flag=True, help="Every step: nothing folded or left out.")
@output_option("table", "json")
async def show(session: Session, instance_id: str, is_whole: bool, output: str) -> None:
    """Say what an instance is doing or waiting for, and since when; show its steps.

    For an ended instance it says until when it is kept: by the running workers, or by keep in
    pyproject.toml [tool.perdure] if no worker runs.
    """
    details = await session.details(instance_id)
    deleted_ms = deleted_at_ms(details.info, session.retentions(details.queues.workers))
    if output == "json":
        deleted_at = None if deleted_ms is None else iso_time(deleted_ms)
        print_json({**asdict(details_document(details)), "deleted_at": deleted_at})
    else:
        print_details(details, session.now_ms(), is_whole=is_whole, deleted_ms=deleted_ms)


@command("tree", examples=["perdure tree o-1", "perdure tree o-1 -o ids | wc -l"])
@id_argument()
@click.option("--all", "is_whole", is_flag=True, help="A line for each child: none folded.")
@output_option("table", "json", "ids")
async def tree(session: Session, instance_id: str, is_whole: bool, output: str) -> None:
    """Show an instance with its children and theirs, and what each is doing.

    Many children of one name and status in a row are one line.
    """
    await session.info(instance_id)
    root, *others = (await session.admin.get_instance_tree(instance_id)).instance_ids
    members = [root, *sorted(others, key=_in_numeric_order)]
    if output == "ids":
        print_ids(members)
        return
    children: dict[str, list[InstanceInfo]] = {}
    infos = [await session.info(member) for member in members]
    for info in infos[1:]:
        children.setdefault(info.parent_instance_id or "", []).append(info)
    family = _Family(session, children, await session.admin.list_workers())
    if output == "json":
        print_json(await family.document(infos[0]))
    else:
        await family.show(infos[0], is_whole=is_whole)


_FOLD_FROM: Final = 6
"""This many consecutive children of one name and status are shown as one line."""


def _in_numeric_order(instance_id: str) -> list[tuple[int, int | str]]:
    """Sort ``o-1::1.2`` before ``o-1::1.10``."""
    parts = re.split(r"([0-9]+)", instance_id)
    return [(0, int(each)) if each.isdecimal() else (1, each) for each in parts]


@dataclass(frozen=True, slots=True)
class _Family:
    """The members of a tree. The insight of a member is read when it is shown."""

    session: Session
    children: dict[str, list[InstanceInfo]]
    workers: Sequence[WorkerInfo]

    async def document(self, info: InstanceInfo) -> TreeDocument:
        below = [await self.document(child) for child in self.children.get(info.instance_id, ())]
        return tree_document(info, await self.session.insight(info, self.workers), below)

    async def show(
        self, info: InstanceInfo, head: str = "", indent: str = "", *, is_whole: bool
    ) -> None:
        insight = await self.session.insight(info, self.workers)
        self._line(info, head, f"{await self._call(info)} ", info.instance_id, insight.sentence)
        groups = [list(each) for _, each in groupby(self._below(info), key=self._likeness)]
        if is_whole:
            groups = [[child] for group in groups for child in group]
        for group in groups:
            is_last = group is groups[-1]
            if len(group) >= _FOLD_FROM:
                head = f"{indent}{'└─ ' if is_last else '├─ '}"
                what = f"{len(group)} x {group[0].name} "
                self._line(group[0], head, what, f"{group[0].instance_id} ...", "folded, see --all")
                continue
            for child in group:
                is_end = is_last and child is group[-1]
                head = f"{indent}{'└─ ' if is_end else '├─ '}"
                rest = f"{indent}{'   ' if is_end else '│  '}"
                await self.show(child, head, rest, is_whole=is_whole)

    def _below(self, info: InstanceInfo) -> list[InstanceInfo]:
        return self.children.get(info.instance_id, [])

    def _likeness(self, info: InstanceInfo) -> tuple[str, str, str]:
        # One that has children of its own is never folded.
        own = info.instance_id if self._below(info) else ""
        return info.name, shown_status(info), own

    async def _call(self, info: InstanceInfo) -> str:
        last = await read_last_steps(self.session.provider, info, 0, with_input=True)
        return info.name if last.input is None else shown_call(info.name, last.input, _CALL_MAX)

    def _line(self, info: InstanceInfo, head: str, call: str, shown_id: str, said: str) -> None:
        status = shown_status(info)
        echo(
            Cell(head, "dim"),
            Cell(f"{glyph(status)} ", status_style(info.status)),
            call,
            Cell(shown_id, "bold"),
            Cell(f"  {said}", "dim"),
        )


_CALL_MAX: Final = 40


@command(
    "stack",
    examples=["perdure stack o-1 -m shop.flows", "perdure stack o-1 -m flows.py -o json"],
)
@id_argument()
@module_option
@output_option("table", "json")
def stack(instance_id: str, modules: tuple[str, ...], output: str) -> None:
    """Show where each branch of the code waits: file, line, source and local variables.

    Replays the stored history with the code of MODULE, and with the Codec at its top level if there
    is one; nothing is written and no worker is disturbed.
    """
    from perdure.cli.modules import load_code

    named = current_settings().modules(modules)
    registry, codec = load_code(named, f"perdure stack {instance_id} -m")

    async def body(session: Session) -> None:
        from perdure.client.recorded import suspended

        await session.info(instance_id)  # names similar ids
        async with suspended(session.provider, instance_id, registry, codec) as execution:
            waits = execution.waits()
            main_file = execution.handler.fn.__code__.co_filename
        if output == "json":
            print_json([wait_document(wait) for wait in waits])
        else:
            _print_waits(waits, main_file, session.now_ms())

    run(body)


@command(
    "peek",
    examples=[
        "perdure peek cart-7 items -m shop.flows",
        "perdure peek o-1 'order.lines[0].price' -m flows.py",
    ],
)
@id_argument()
@click.argument("expression", metavar="EXPR")
@module_option
def peek(instance_id: str, expression: str, modules: tuple[str, ...]) -> None:
    """Print a local variable of the code of an instance, or a part of it, as JSON.

    EXPR is a name, followed by attributes and items; it runs no code. Replays the stored history as
    perdure stack does: nothing is written, and no worker is needed. A value that has no JSON is
    printed as Python shows it.
    """
    from perdure.cli.modules import load_code

    named = current_settings().modules(modules)
    registry, codec = load_code(named, f"perdure peek {instance_id} {expression} -m")

    async def body(session: Session) -> None:
        from perdure.client.recorded import read_variable

        await session.info(instance_id)
        value = await read_variable(session.provider, instance_id, expression, registry, codec)
        try:
            plain = JSON.decode(JSON.encode(value, where=expression))
        except PayloadError:
            echo(repr(value))
        else:
            print_json(plain)

    run(body)


def _print_waits(waits: list[Wait], main_file: str, now_ms: int) -> None:
    branches: dict[str, list[Wait]] = {}
    for wait in waits:
        branches.setdefault(wait.op.partition("/")[0], []).append(wait)
    for path, members in branches.items():
        listed = ", ".join(
            f"{wait.kind} {wait.name}".rstrip() + f" ({shown_duration(now_ms - wait.since_ms)})"
            for wait in members[:5]
        )
        more = f" and {len(members) - 5} more" if len(members) > 5 else ""
        echo(Cell(f"branch {path}", "bold"), f" waits for {listed}{more}")
        for frame in members[0].frames:
            echo(f"  {frame.file}:{frame.line} in ", Cell(frame.function, "cyan"))
            source = _source_line(frame.file, frame.line, main_file)
            if source:
                echo("    ", Cell(source, "bold"))
            for name, value in frame.locals.items():
                echo(Cell(f"      {name} = ", "dim"), value)
    if not waits:
        note("nothing is open: its next turn is on the way")


def _source_line(file: str, line: int, main_file: str) -> str:
    """Return the source line; a site holds a short path, so match it against loaded modules."""
    import linecache
    import sys

    loaded = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    for name in (main_file, *loaded):
        if name.replace("\\", "/").endswith(file):
            return linecache.getline(name, line).strip()
    return ""


# --- the events

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
            left_out = "".join(f", event {each} is left out" for each in event.left_out)
            return f"the turns after turn {event.kept_turn} are undone{left_out}"
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
@click.option(
    "--execution",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of the execution. Default: the latest. continue-as-new begins the next one.",
)
@click.option("--type", "kind", metavar="TEXT", help="Only events whose type contains it.")
@click.option("--failed", is_flag=True, help="Only failures, cancellations and terminations.")
@click.option("--grep", metavar="REGEX", help="Only events whose stored text matches.")
@click.option("--follow", "-f", is_flag=True, help="Continue until the instance ends.")
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
        await check_execution(session.admin, instance_id, execution)
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
