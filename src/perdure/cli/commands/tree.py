"""``perdure tree``: an instance with its children, and theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.cli.command import command
from perdure.cli.documents import instance_document, shown_status
from perdure.cli.options import id_argument, output_option
from perdure.cli.render import Cell, echo, glyph, print_ids, print_json, status_style
from perdure.cli.session import run

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.client.insights import Insight
    from perdure.providers.items import InstanceInfo


@command(
    "tree",
    short_help="Show an instance with its children.",
    examples=["perdure tree o-1", "perdure tree o-1 -o ids | wc -l"],
)
@id_argument()
@output_option("table", "json", "ids")
def tree(instance_id: str, output: str) -> None:
    """Show an instance with its children and theirs, and what each is doing."""

    async def body(session: Session) -> None:
        from perdure.cli.rows import insight_of

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
            print_json(_document(infos[0], children, insights))
        else:
            _print(infos[0], children, insights, "", "")

    run(body)


def _document(
    info: InstanceInfo, children: dict[str, list[InstanceInfo]], insights: dict[str, Insight]
) -> dict[str, Any]:
    below = children.get(info.instance_id, [])
    return instance_document(info, insights[info.instance_id]) | {
        "children": [_document(child, children, insights) for child in below]
    }


def _print(
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
        _print(child, children, insights, head, f"{indent}{'   ' if is_last else '│  '}")
