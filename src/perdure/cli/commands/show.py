"""``perdure show``, ``tree``, ``stack``, ``peek``: an instance, its children, its code."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Final

import click
from msgspec.structs import asdict

from perdure.cli.command import command, id_argument, module_option, output_option
from perdure.cli.details import print_details, shown_status
from perdure.cli.render import Cell, echo, glyph, note, print_ids, print_json, status_style
from perdure.cli.session import current_settings, run
from perdure.client.formats import iso_time, shown_duration
from perdure.client.insights import read_last_steps
from perdure.client.json_documents import details_document, tree_document, wait_document
from perdure.client.retention import deleted_at_ms
from perdure.client.steps import shown_call
from perdure.codec import JSON
from perdure.errors import InstanceFinished, PayloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.cli.session import Session
    from perdure.client.json_documents import TreeDocument
    from perdure.engine.waits import Wait
    from perdure.providers.records import InstanceInfo, WorkerInfo


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

    Of one that has ended it says until when the workers keep it, or keep in pyproject.toml
    [tool.perdure] if no worker runs.
    """
    details = await session.details(instance_id)
    deleted_ms = deleted_at_ms(details.info, session.retentions(details.around.workers))
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


class _Family:
    """The members of a tree; what a member is doing is read when it is shown."""

    def __init__(
        self,
        session: Session,
        children: dict[str, list[InstanceInfo]],
        workers: Sequence[WorkerInfo],
    ) -> None:
        self._session = session
        self._children = children
        self._workers = workers

    async def document(self, info: InstanceInfo) -> TreeDocument:
        below = [await self.document(child) for child in self._children.get(info.instance_id, ())]
        return tree_document(info, await self._session.insight(info, self._workers), below)

    async def show(
        self, info: InstanceInfo, head: str = "", indent: str = "", *, is_whole: bool
    ) -> None:
        insight = await self._session.insight(info, self._workers)
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
        return self._children.get(info.instance_id, [])

    def _likeness(self, info: InstanceInfo) -> tuple[str, str, str]:
        # One that has children of its own is never folded.
        own = info.instance_id if self._below(info) else ""
        return info.name, shown_status(info), own

    async def _call(self, info: InstanceInfo) -> str:
        last = await read_last_steps(self._session.provider, info, 0, with_input=True)
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
@module_option()
@output_option("table", "json")
def stack(instance_id: str, modules: tuple[str, ...], output: str) -> None:
    """Show where each branch of the code waits: file, line, source and local variables.

    Replays the stored history with the code at hand, and with the Codec at the top of its module if
    there is one; nothing is written and no worker is disturbed.
    """
    from perdure.cli.modules import load_codec, load_registry

    named = current_settings().modules(modules)
    registry = load_registry(named, f"perdure stack {instance_id} -m")
    codec = load_codec(named)

    async def body(session: Session) -> None:
        from perdure.client.recorded import read_recorded, replayed

        info = await session.info(instance_id)
        if info.status.is_final:
            raise InstanceFinished(f"{instance_id!r} has ended ({info.status}): nothing waits")
        recorded = await read_recorded(session.provider, info)
        with replayed(recorded, registry, codec) as execution:
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
@module_option()
def peek(instance_id: str, expression: str, modules: tuple[str, ...]) -> None:
    """Print a local variable of the code of an instance, or a part of it, as JSON.

    EXPR is a name, followed by attributes and items; it runs no code. Replays the stored history as
    perdure stack does: nothing is written, and no worker is needed. A value that has no JSON is
    printed as Python shows it.
    """
    from perdure.cli.modules import load_codec, load_registry

    named = current_settings().modules(modules)
    registry = load_registry(named, f"perdure peek {instance_id} {expression} -m")
    codec = load_codec(named)

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
