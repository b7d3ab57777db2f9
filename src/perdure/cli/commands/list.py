"""``perdure list`` and ``perdure count``: instances by filters, a page at a time."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.command import (
    LIMIT_MAX,
    combined,
    command,
    complete_names,
    limit_option,
    output_option,
)
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
from perdure.client.formats import parse_moment
from perdure.client.search import QUALIFIERS, Selection, parse_search
from perdure.errors import InvalidValue
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.cli.session import Session

_ONE_WORD = frozenset({"status", "version", "created", "completed"})
"""Qualifiers whose values contain no spaces."""

filter_options = combined(
    click.argument("words", metavar="[QUERY]...", nargs=-1),
    click.option("--query", metavar="QUERY", help="The same as the argument."),
    click.option(
        "--status",
        metavar="S,...",
        multiple=True,
        help="running, failed, blocked, open, ended, ...",
    ),
    click.option(
        "--name",
        metavar="NAME",
        multiple=True,
        help="Name of the orchestration; order* fits several.",
        shell_complete=complete_names,
    ),
    click.option(
        "--search",
        metavar="TEXT",
        multiple=True,
        help="A text in the id, name, output or custom status.",
    ),
    click.option(
        "--since", metavar="WHEN", help="Started within the last 1h, 7d, or after a date."
    ),
    click.option(
        "--until", metavar="WHEN", help="Started longer ago than 1h, 7d, or before a date."
    ),
    click.option(
        "--parent",
        metavar="ID",
        multiple=True,
        help="Only children of this instance; none: only roots.",
    ),
)


def selection_of(filters: Mapping[str, Any], now_ms: int) -> Selection:
    """Return the selection that the options of ``filter_options`` describe together."""
    words = [_query_of(word) for word in filters["words"]]
    words += [filters["query"]] if filters["query"] else []
    if filters["status"]:
        words.append(shlex.quote(f"status:{','.join(filters['status'])}"))
    for qualifier, option in (("name", "name"), ("text", "search"), ("parent", "parent")):
        words += [shlex.quote(f"{qualifier}:{value}") for value in filters[option]]
    selection = parse_search(" ".join(words), now_ms)
    bounds = {}
    for option, field in (("since", "created_after"), ("until", "created_before")):
        if filters[option]:
            if getattr(selection.query, field) is not None:
                raise InvalidValue(f"--{option} and created: say the same twice; put one of them")
            bounds[field] = parse_moment(filters[option], now_ms)
    return selection.with_query(**bounds)


def _query_of(argument: str) -> str:
    """Split one argument of the shell into words of a query; keep a quoted phrase whole."""
    first, *others = [word.partition(":") for word in argument.split()] or [("", "", "")]
    is_query = first[0] in _ONE_WORD or any(q in QUALIFIERS and colon for q, colon, _ in others)
    return shlex.quote(argument) if " " in argument and not is_query else argument


@command(
    "list",
    examples=[
        "perdure list --since 1h",
        "perdure ls --status failed,blocked --name order",
        "perdure list 'name:import_* created:>2h' --limit 100",
        "perdure list status:failed --limit 1000 -o ids | perdure retry --ids-from - -y",
    ],
)
@filter_options
@limit_option(20)
@click.option("--cursor", help="Continue after the last page.")
@output_option("table", "json", "jsonl", "ids")
async def list_command(
    session: Session, limit: int, cursor: str | None, output: str, **filters: Any
) -> None:
    """List instances, newest first, with what each is doing.

    QUERY is any of status:failed name:order* version:2.0.0 id:ord-* text:timeout parent:ID
    parent:none created:<2h (younger) created:>7d (older) completed:..., all of which must fit.
    Other words are searched for in ids, names, outputs and custom statuses. This reads every
    instance that fits the rest: on a big store narrow a rare text with created:<1d.
    """
    selection = selection_of(filters, session.now_ms())
    infos, following = await selection.page(session.admin, cursor=cursor, limit=limit)
    if output == "ids":
        print_ids(info.instance_id for info in infos)
        _print_footer(selection, len(infos), following, limit)
        return
    from perdure.cli.details import COLUMNS, row_of
    from perdure.client.json_documents import instance_document

    workers = await session.admin.list_workers()
    pairs = [(info, await session.insight(info, workers)) for info in infos]
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


def _print_footer(selection: Selection, count: int, following: str | None, limit: int) -> None:
    """Say that more follows; in a pipe on standard error, because the output looks complete."""
    if following is not None:
        larger = min(limit * 5, LIMIT_MAX)
        # The store does not apply these filters, so the next page may turn out empty.
        is_tested = bool(selection.tests or selection.name_patterns)
        text = f"{count} shown, more {'may follow' if is_tested else 'follow'}:"
        if larger > limit:
            text += f" --limit {larger}, or"
        if is_terminal():
            note(text)
            note(f"--cursor {following}")
        else:
            warn(f"{text} --cursor {following}")
    elif not count:
        note("none; 'perdure start NAME' starts one, 'perdure count' counts all")


@command(
    "count",
    examples=[
        "perdure count",
        "perdure count --by status",
        "perdure count 'status:failed created:<1d'",
    ],
)
@filter_options
@click.option(
    "--by", type=click.Choice(["status", "name"]), help="Print a count for each status or name."
)
@output_option("table", "json")
async def count(session: Session, by: str | None, output: str, **filters: Any) -> None:
    """Count the instances that fit, all of them without a filter. QUERY as for list."""
    selection = selection_of(filters, session.now_ms())
    if by is None:
        total = await selection.count(session.admin)
        if output == "json":
            print_json({"count": total})
        else:
            sys.stdout.write(f"{total}\n")
        return
    groups: dict[str, int] | dict[Status, int]
    if by == "name":
        groups = await selection.count_by_name(session.admin)
    else:
        groups = await _by_status(session, selection)
    if output == "json":
        print_json({"count": sum(groups.values()), f"by_{by}": groups})
        return
    rows = [[group, str(number)] for group, number in groups.items()]
    print_table([Column(by.upper()), Column("COUNT", is_right=True)], rows)


async def _by_status(session: Session, selection: Selection) -> dict[Status, int]:
    from perdure.client.instance import count_by_status

    asked = selection.query.statuses
    counts: dict[Status, int] = {}
    for status in Status:
        if asked is None or status in asked:
            of_status = selection.with_query(statuses=frozenset({status}))
            counts[status] = await of_status.count(session.admin)
    return count_by_status(counts)
