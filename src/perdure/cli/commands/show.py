"""``perdure show``, ``tree`` and ``stack``: one instance, its children, where its code waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure.cli.command import command, id_argument, module_option, output_option
from perdure.cli.details import print_details, read_details
from perdure.cli.render import Cell, echo, glyph, note, print_ids, print_json, status_style
from perdure.cli.session import current_settings, run
from perdure.cli.shapes import (
    details_document,
    insight_of,
    instance_document,
    shown_status,
    wait_document,
)
from perdure.client.durations import shown_duration
from perdure.errors import InstanceFinished

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.client.insights import Insight
    from perdure.engine.inbox import Wait
    from perdure.providers.records import InstanceInfo


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
    """Say what an instance is doing or waiting for, and since when; show its steps."""
    details = await read_details(session, instance_id)
    if output == "json":
        print_json(details_document(details))
    else:
        print_details(details, session.now_ms(), is_whole=is_whole)


@command("tree", examples=["perdure tree o-1", "perdure tree o-1 -o ids | wc -l"])
@id_argument()
@output_option("table", "json", "ids")
async def tree(session: Session, instance_id: str, output: str) -> None:
    """Show an instance with its children and theirs, and what each is doing."""
    await session.info(instance_id)
    members = await session.admin.get_instance_tree(instance_id)
    if output == "ids":
        print_ids(members.instance_ids)
        return
    workers = await session.admin.list_workers()
    infos = [await session.info(member) for member in members.instance_ids]
    insights = {i.instance_id: await insight_of(session, i, workers) for i in infos}
    children: dict[str, list[InstanceInfo]] = {}
    for info in infos[1:]:
        children.setdefault(info.parent_instance_id or "", []).append(info)
    if output == "json":
        print_json(_tree_document(infos[0], children, insights))
    else:
        _print_tree(infos[0], children, insights, "", "")


def _tree_document(
    info: InstanceInfo, children: dict[str, list[InstanceInfo]], insights: dict[str, Insight]
) -> dict[str, Any]:
    below = children.get(info.instance_id, [])
    return instance_document(info, insights[info.instance_id]) | {
        "children": [_tree_document(child, children, insights) for child in below]
    }


def _print_tree(
    info: InstanceInfo,
    children: dict[str, list[InstanceInfo]],
    insights: dict[str, Insight],
    head: str,
    indent: str,
) -> None:
    status = shown_status(info)
    echo(
        Cell(head, "dim"),
        Cell(f"{glyph(status)} ", status_style(info.status)),
        f"{info.name} ",
        Cell(info.instance_id, "bold"),
        Cell(f"  {insights[info.instance_id].sentence}", "dim"),
    )
    below = children.get(info.instance_id, [])
    for child in below:
        is_last = child is below[-1]
        head = f"{indent}{'└─ ' if is_last else '├─ '}"
        _print_tree(child, children, insights, head, f"{indent}{'   ' if is_last else '│  '}")


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
        from perdure.client.checks import read_recorded
        from perdure.engine.execution import Execution

        info = await session.info(instance_id)
        if info.status.is_final:
            raise InstanceFinished(f"{instance_id!r} has ended ({info.status}): nothing waits")
        recorded = await read_recorded(session.provider, info)
        handler = registry.resolve_orchestration(recorded.name, recorded.version)
        execution = Execution.replay(handler, recorded.history, kv=recorded.kv, codec=codec)
        try:
            waits = execution.waits()
        finally:
            execution.close()
        if output == "json":
            print_json([wait_document(wait) for wait in waits])
        else:
            _print_waits(waits, handler.fn.__code__.co_filename, session.now_ms())

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
