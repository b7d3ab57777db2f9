"""``perdure list`` and ``perdure count``: instances by filters, a page at a time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from perdure.cli.command import command
from perdure.cli.filters import filter_options, selection_of
from perdure.cli.options import output_option
from perdure.cli.render import (
    Column,
    is_terminal,
    note,
    print_ids,
    print_json,
    print_json_line,
    print_table,
    warn,
)
from perdure.cli.session import run
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.client.search import Selection

_LIMIT_MAX: Final = 10_000


@command(
    "list",
    short_help="List instances, newest first.",
    examples=[
        "perdure list --since 1h",
        "perdure ls --status failed,blocked --name order",
        "perdure list 'name:import_* created:>2h' --limit 100",
        "perdure list status:failed --limit 1000 -o ids | xargs -n1 perdure show",
    ],
)
@filter_options
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, _LIMIT_MAX),
    default=20,
    show_default=True,
    help="At most so many; it is said if there are more.",
)
@click.option("--cursor", help="Go on where the last page ended.")
@output_option("table", "json", "jsonl", "ids")
def list_command(limit: int, cursor: str | None, output: str, **filters: Any) -> None:
    """List instances, newest first, with what each is doing.

    QUERY is any of status:failed name:order* version:2.0.0 id:ord-* text:timeout parent:ID
    parent:none created:<2h (younger) created:>7d (older) completed:..., all of which must fit.
    Other words are searched for in ids, names, outputs and custom statuses, by reading whatever
    else fits: on a big store narrow a rare text with created:<1d.
    """

    async def body(session: Session) -> None:
        selection = selection_of(filters, session.now_ms())
        infos, following = await selection.page(session.admin, cursor=cursor, limit=limit)
        if output == "ids":
            print_ids(info.instance_id for info in infos)
            _print_footer(selection, len(infos), following, limit)
            return
        from perdure.cli.documents import instance_document
        from perdure.cli.rows import COLUMNS, insight_of, row_of

        workers = await session.admin.list_workers()
        pairs = [(info, await insight_of(session, info, workers)) for info in infos]
        if output == "table":
            now_ms = session.now_ms()
            print_table(COLUMNS, [row_of(info, insight, now_ms) for info, insight in pairs])
            _print_footer(selection, len(infos), following, limit)
            return
        documents = [instance_document(info, insight) for info, insight in pairs]
        if output == "json":
            print_json({"instances": documents, "next_cursor": following})
        else:
            for document in documents:
                print_json_line(document)
            _print_footer(selection, len(infos), following, limit)

    run(body)


def _print_footer(selection: Selection, count: int, following: str | None, limit: int) -> None:
    """A pipe that ends early looks complete: there it is said beside the output."""
    if following is not None:
        larger = min(limit * 5, _LIMIT_MAX)
        # What the store does not filter is known only when it is read.
        is_tested = bool(selection.tests or selection.name_patterns)
        told = f"{count} shown, more {'may follow' if is_tested else 'follow'}:"
        if larger > limit:
            told += f" --limit {larger}, or"
        if is_terminal():
            note(told)
            note(f"--cursor {following}")
        else:
            warn(f"{told} --cursor {following}")
    elif not count:
        note("none; 'perdure start NAME' starts one, 'perdure count' counts all")


@command(
    "count",
    short_help="Count instances.",
    examples=[
        "perdure count",
        "perdure count --by status",
        "perdure count status:failed created:<1d",
    ],
)
@filter_options
@click.option("--by", type=click.Choice(["status", "name"]), help="A line for each.")
@output_option("table", "json")
def count(by: str | None, output: str, **filters: Any) -> None:
    """Count the instances that fit, all of them without a filter. QUERY as for list."""

    async def body(session: Session) -> None:
        selection = selection_of(filters, session.now_ms())
        if by is None:
            total = await selection.count(session.admin)
            if output == "json":
                print_json({"count": total})
            else:
                sys.stdout.write(f"{total}\n")
            return
        groups = await (_by_status if by == "status" else _by_name)(session, selection)
        if output == "json":
            print_json({"count": sum(groups.values()), f"by_{by}": groups})
            return
        rows = [[group, str(number)] for group, number in groups.items()]
        print_table([Column(by.upper()), Column("COUNT", is_right=True)], rows)

    run(body)


async def _by_status(session: Session, selection: Selection) -> dict[str, int]:
    from perdure.cli.overview import merged

    asked = selection.query.statuses
    counts: dict[Status, int] = {}
    for status in Status:
        if asked is None or status in asked:
            of_status = selection.with_query(statuses=frozenset({status}))
            counts[status] = await of_status.count(session.admin)
    return {status.value: number for status, number in merged(counts).items()}


async def _by_name(session: Session, selection: Selection) -> dict[str, int]:
    return await selection.count_by_name(session.admin)
