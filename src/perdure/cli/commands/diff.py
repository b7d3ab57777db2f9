"""``perdure diff``: two instances side by side, and where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.command import command
from perdure.cli.exits import Exit
from perdure.cli.options import id_argument, output_option
from perdure.cli.render import Cell, echo, print_json
from perdure.cli.session import run

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.client.comparing import ComparedStep, Comparison
    from perdure.model import events


@command(
    "diff",
    short_help="Compare the steps of two instances.",
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
def diff(left: str, right: str, exit_code: bool, is_whole: bool, output: str) -> int:
    """Compare two instances step by step: calls, results, ends. ID#N names the execution N.

    Steps are matched by their place in the code, not by time: branches may interleave differently.
    """

    async def body(session: Session) -> int:
        from perdure.client.comparing import compare

        comparison = compare(await _read(session, left), await _read(session, right))
        if output == "json":
            print_json(
                {
                    "same": comparison.first_difference is None,
                    "first_difference": comparison.first_difference,
                    "steps": [*comparison.steps, comparison.ends],
                }
            )
        else:
            _print(comparison, left, right, is_whole)
        return Exit.ERROR if exit_code and comparison.first_difference else Exit.OK

    return run(body)


async def _read(session: Session, name: str) -> list[events.Event]:
    instance_id, sign, number = name.rpartition("#")
    if not sign or not number.isdigit():
        await session.info(name)
        return await session.client.history(name)
    await session.info(instance_id)
    return await session.client.history(instance_id, int(number))


def _print(comparison: Comparison, left: str, right: str, is_whole: bool) -> None:
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
