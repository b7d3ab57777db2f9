"""``perdure replay`` and ``perdure diff``: histories against the code, and against each other."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from perdure.cli.command import command, id_argument, output_option
from perdure.cli.commands.export import read_recordings
from perdure.cli.exits import Exit
from perdure.cli.render import Cell, echo, glyph, print_json, print_json_line
from perdure.cli.session import Session, run
from perdure.client.formats import counted
from perdure.client.recorded import Recorded, ReplayResult, check_replay, read_recorded
from perdure.client.search import parse_search
from perdure.client.steps import ComparedStep, Comparison, compare
from perdure.errors import NotFound
from perdure.escape import clean_block

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perdure.model import events

_SHOWN_MAX: Final = 20


@command(
    "replay",
    examples=[
        "perdure replay shop.flows",
        "perdure replay shop.flows o-1 --report",
        "perdure replay shop.flows recorded/*.jsonl",
        "perdure replay --query 'name:order status:running' shop.flows",
    ],
)
@click.argument("module")
@click.argument("sources", metavar="[ID|FILE]...", nargs=-1)
@click.option(
    "--query",
    metavar="QUERY",
    default="status:open",
    help="Instances to replay. Default: all in flight.",
)
@click.option("--report", "is_long", is_flag=True, help="The whole report of each divergence.")
@output_option("table", "json", "jsonl")
def replay(module: str, sources: tuple[str, ...], query: str, is_long: bool, output: str) -> int:
    """Replay recorded executions with the code of MODULE and report where they differ.

    Without sources: everything in flight in the store. A source is an instance, or a file written
    by perdure export or perdure history -o jsonl. Nothing is written and no activity runs. A Codec
    at the top of MODULE is used for all payloads. Exit code 1 if one could not continue.
    """
    from perdure.cli.modules import load_code

    registry, codec = load_code([module], "perdure replay")
    files = [source for source in sources if _is_file(source)]
    ids = [source for source in sources if source not in files]
    findings: list[ReplayResult] = []

    async def body(session: Session) -> list[ReplayResult]:
        recorded = _by_ids(session, ids) if ids else _in_flight(session, query)
        return [check_replay(execution, registry, codec) async for execution in recorded]

    for file in files:
        findings += [check_replay(each, registry, codec) for each in read_recordings(Path(file))]
    if ids or not files:
        findings += run(body)
    return _print(findings, output, is_long)


def _is_file(source: str) -> bool:
    return source.endswith((".json", ".jsonl")) or Path(source).is_file()


async def _by_ids(session: Session, ids: list[str]) -> AsyncIterator[Recorded]:
    for instance_id in ids:
        info = await session.info(instance_id)
        yield await read_recorded(session.provider, info)


async def _in_flight(session: Session, query: str) -> AsyncIterator[Recorded]:
    selection = parse_search(query, session.now_ms())
    async for info in selection.instances(session.admin):
        try:
            yield await read_recorded(session.provider, info)
        except NotFound:
            continue  # not begun yet, or deleted: there is no history to compare


def _print(findings: list[ReplayResult], output: str, is_long: bool) -> int:
    counts = Counter(finding.verdict for finding in findings)
    bad = [finding for finding in findings if finding.verdict != "ok"]
    if output == "jsonl":
        for finding in findings:
            print_json_line(finding)
    elif output == "json":
        print_json({"histories": len(findings), "verdicts": counts, "problems": bad})
    else:
        listed = "".join(f" · {number} {verdict}" for verdict, number in counts.most_common())
        echo(f"{counted(len(findings), 'history')}{listed}")
        for finding in bad[:_SHOWN_MAX]:
            _print_finding(finding, is_long)
        if len(bad) > _SHOWN_MAX:
            echo(f"and {len(bad) - _SHOWN_MAX} more; -o jsonl lists them all")
    return Exit.ERROR if bad else Exit.OK


def _print_finding(finding: ReplayResult, is_long: bool) -> None:
    at = "" if finding.event_id is None else f" at event {finding.event_id}"
    echo(
        Cell(f"{glyph('failed')} ", "bold red"),
        Cell(finding.instance_id, "bold"),
        f"{at}  {finding.name}@{finding.version} ",
        Cell(finding.verdict, "red"),
        f"  {finding.site}" if finding.site else "",
    )
    if finding.verdict != "diverges":
        echo(f"    {finding.report}")
        return
    echo("    history says  ", finding.recorded)
    if finding.performed:
        echo("    the code did  ", finding.performed)
    if is_long:
        sys.stdout.write(clean_block(finding.report) + "\n")


@command(
    "diff",
    examples=[
        "perdure diff o-1 o-2",
        "perdure diff poll-main#411 poll-main#412",
        "perdure diff o-1 o-1-rerun-a3 --exit-code",
    ],
)
@id_argument("left", metavar="ID[#N]")
@id_argument("right", metavar="ID[#N]")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when they differ.")
@click.option("--all", "is_whole", is_flag=True, help="Also the steps that are the same.")
@output_option("table", "json")
async def diff(
    session: Session, left: str, right: str, exit_code: bool, is_whole: bool, output: str
) -> int:
    """Compare two instances step by step: calls, results, ends. ID#N names the execution N.

    Steps are matched by their place in the code, not by time: branches may interleave differently.
    """
    comparison = compare(await _read_history(session, left), await _read_history(session, right))
    if output == "json":
        print_json(
            {
                "same": comparison.first_difference is None,
                "first_difference": comparison.first_difference,
                "steps": [*comparison.steps, comparison.ends],
            }
        )
    else:
        _print_comparison(comparison, left, right, is_whole)
    return Exit.ERROR if exit_code and comparison.first_difference else Exit.OK


async def _read_history(session: Session, name: str) -> list[events.Event]:
    instance_id, sign, number = name.rpartition("#")
    if not sign or not number.isdigit():
        await session.info(name)
        return await session.client.history(name)
    await session.info(instance_id)
    return await session.client.history(instance_id, int(number))


def _print_comparison(comparison: Comparison, left: str, right: str, is_whole: bool) -> None:
    echo(Cell("- ", "red"), left)
    echo(Cell("+ ", "green"), right)
    echo("")
    same = 0
    for step in (*comparison.steps, comparison.ends):
        if step.is_same and not is_whole:
            same += 1
            continue
        _print_skipped(same)
        same = 0
        _print_step(step, step is comparison.first_difference)
    _print_skipped(same)
    if comparison.first_difference is None:
        echo(Cell("no difference", "green"))


def _print_skipped(count: int) -> None:
    if count:
        echo(Cell(f"  … {count} the same", "dim"))


def _print_step(step: ComparedStep, is_first: bool) -> None:
    if step.is_same:
        echo(Cell(f"  {step.op:<8} ", "dim"), step.left or "")
        return
    mark = Cell("  ← here they part", "yellow") if is_first else ""
    if step.left is not None:
        echo(Cell(f"- {step.op:<8} ", "red"), step.left, mark)
        mark = ""
    if step.right is not None:
        echo(Cell(f"+ {step.op:<8} ", "green"), step.right, mark)
