"""``perdure db prune``: drop past executions of long-lived instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from perdure.cli.asking import is_wanted
from perdure.cli.command import command
from perdure.cli.exits import Exit
from perdure.cli.options import duration_option, output_option
from perdure.cli.render import Cell, echo, glyph, print_json
from perdure.cli.session import run
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.providers.items import PruneOptions

_CHUNK: Final = 500


@command(
    "prune",
    short_help="Drop past executions of instances.",
    examples=[
        "perdure db prune --keep-last 10 --dry-run",
        "perdure db prune --older-than 30d -y",
        "perdure db prune --query name:poller --keep-last 1 -y",
    ],
)
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the last N.")
@duration_option("--older-than", "older_ms", "Only those that ended before.")
@click.option("--query", metavar="QUERY", default="", help="Only of instances that fit.")
@click.option("--dry-run", is_flag=True, help="Only count what would go.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_option("table", "json")
def prune(
    keep_last: int | None,
    older_ms: int | None,
    query: str,
    dry_run: bool,
    yes: bool,
    output: str,
) -> int:
    """Drop past executions that continue-as-new and retry leave behind.

    The current execution, the state and the custom status always stay. To delete instances that
    have ended, see perdure purge.
    """
    if keep_last is None and older_ms is None:
        raise UsageError("say what may go: --keep-last N, --older-than 30d, or both")

    async def body(session: Session) -> int:
        from perdure.client.search import parse_search
        from perdure.providers.items import DeleteFilter, PruneOptions

        bound_ms = None if older_ms is None else session.now_ms() - older_ms
        options = PruneOptions(keep_last=keep_last, completed_before_ms=bound_ms)
        selection = parse_search(query, session.now_ms())
        ids = [
            info.instance_id
            async for info in selection.instances(session.admin)
            if info.execution_id > 1
        ]
        number = await _count(session, ids, options)
        if dry_run or not number:
            _print(
                {"dry_run": dry_run, "instances": len(ids), "executions": number},
                output,
                "would drop" if dry_run else "dropped",
            )
            return Exit.OK
        if not yes and not is_wanted(f"drop {number} past executions"):
            return Exit.OK
        executions = 0
        for start in range(0, len(ids), _CHUNK):
            chosen = DeleteFilter(instance_ids=tuple(ids[start : start + _CHUNK]), limit=_CHUNK)
            executions += (await session.admin.prune_executions_bulk(chosen, options)).executions
        _print(
            {"dry_run": False, "instances": len(ids), "executions": executions}, output, "dropped"
        )
        return Exit.OK

    return run(body)


async def _count(session: Session, ids: list[str], options: PruneOptions) -> int:
    """Exactly what the store would drop: past, ended, beyond the last N, before the bound."""
    number = 0
    for instance_id in ids:
        executions = await session.admin.list_executions(instance_id)
        candidates = executions[: -max(1, options.keep_last or 1)]
        if options.completed_before_ms is None:
            number += len(candidates)
            continue
        for execution_id in candidates:
            info = await session.admin.get_execution_info(instance_id, execution_id)
            ended_ms = info.completed_at_ms
            number += ended_ms is not None and ended_ms < options.completed_before_ms
    return number


def _print(document: dict[str, Any], output: str, words: str) -> None:
    if output == "json":
        print_json(document)
        return
    said = f"{words} {document['executions']} past executions of {document['instances']} instances"
    echo(Cell(f"{glyph('completed')} ", "green"), said)
