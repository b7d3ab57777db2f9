"""The benchmark command: perdure alone or beside its peers, engines taking turns."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import contenders as line_up
from benchmarks.chart import draw
from benchmarks.environments import ENVIRONMENTS, ROOT, home, prepare
from benchmarks.machine import describe
from benchmarks.report import number, show
from benchmarks.results import Outcome, Record
from benchmarks.server import postgres
from benchmarks.trial import Order, run_trial
from benchmarks.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.contenders import Contender

RESULTS = Path(__file__).parent / "results"


@click.command()
@click.option("--peers", is_flag=True, help="Also run the other engines.")
@click.option("--postgres", "with_postgres", is_flag=True, help="Also run on a Postgres server.")
@click.option(
    "--before",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Interpreter in the .venv of another checkout, measured in turns with this one.",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Only contenders with this in the name."
)
@click.option("--workload", "-w", multiple=True, type=click.Choice(list(WORKLOADS)))
@click.option("--repeat", default=3, show_default=True, help="Repetitions; W7 is run once.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON file.")
@click.option("--chart", type=click.Path(dir_okay=False, path_type=Path), help="SVG file.")
def main(
    *,
    peers: bool,
    with_postgres: bool,
    before: Path | None,
    only: tuple[str, ...],
    workload: tuple[str, ...],
    repeat: int,
    output: Path | None,
    chart: Path | None,
) -> None:
    """Measure W1 to W7. Each repetition has a fresh process and a fresh directory."""
    console = Console()
    with ExitStack() as stack:
        pythons = make_environments(console, peers=peers)
        chosen = line_up.peers() if peers else []
        chosen += line_up.ours()
        if with_postgres:
            chosen += line_up.on_postgres(stack.enter_context(postgres()))
        if before is not None:
            checkout = before.absolute().parents[2]
            chosen += [
                replace(one, name=f"before: {one.name}", checkout=checkout)
                for one in chosen
                if one.is_ours
            ]
        chosen = [
            one
            for one in chosen
            if one.peer in pythons and (not only or any(part in one.name for part in only))
        ]
        workloads = [WORKLOADS[name] for name in workload or WORKLOADS]
        record = Record(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            repetitions=repeat,
            machine=describe(home() / "runs"),
        )
        output = output or RESULTS / f"{record.started.replace(':', '')}.json"
        measure(record, chosen, workloads, pythons, repeat, console)
    record.save(output)
    show(record, console)
    console.print(f"saved {output}")
    if chart is not None:
        chart.parent.mkdir(parents=True, exist_ok=True)
        chart.write_text(draw(record))
        console.print(f"saved {chart}")
    sys.exit(1 if record.failures() else 0)


def make_environments(console: Console, *, peers: bool) -> dict[str, Path]:
    wanted = ENVIRONMENTS.values() if peers else [ENVIRONMENTS["perdure"]]
    with console.status("environments") as status:
        return {one.name: prepare(one, status.update) for one in wanted}


def measure(
    record: Record,
    chosen: list[Contender],
    workloads: list[Workload],
    pythons: dict[str, Path],
    repeat: int,
    console: Console,
) -> None:
    plan = [(one, turns) for one in workloads if (turns := entrants(one, chosen))]
    rounds = {one.name: 1 if one.name == "w7" else repeat for one in workloads}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total = sum(rounds[one.name] * len(turns) for one, turns in plan)
        task = progress.add_task("", total=total)
        for one, turns in plan:
            outcomes = {turn.name: outcome_of(one, turn) for turn in turns}
            record.outcomes += outcomes.values()
            for repetition in range(rounds[one.name]):
                # Another one begins each time: a slow minute of the machine hits everybody.
                first = repetition % len(turns)
                for turn in turns[first:] + turns[:first]:
                    progress.update(task, description=f"{one.name} {turn.name}")
                    outcomes[turn.name].trials.append(run_trial(order_of(one, turn, pythons)))
                    progress.advance(task)
            progress.console.print(line_of(one, outcomes.values()), highlight=False)


def line_of(workload: Workload, outcomes: Iterable[Outcome]) -> str:
    """Return a line with the results so far, for a person who waits."""
    medians = [
        f"{one.contender} {'failed' if one.median is None else number(one.median)}"
        for one in outcomes
    ]
    return f"{workload.name.upper()} {workload.title}, {workload.unit}: {', '.join(medians)}"


def entrants(workload: Workload, chosen: list[Contender]) -> list[Contender]:
    return [one for one in chosen if workload.name not in one.skips]


def outcome_of(workload: Workload, contender: Contender) -> Outcome:
    return Outcome(
        workload=workload.name,
        contender=contender.name,
        field=contender.field,
        durability=contender.durability,
        is_ours=contender.is_ours,
    )


def order_of(workload: Workload, contender: Contender, pythons: dict[str, Path]) -> Order:
    root = contender.checkout
    return Order(
        peer=contender.peer,
        python=pythons[contender.peer] if root is None else root / ".venv" / "bin" / "python",
        root=ROOT if root is None else root,
        settings=contender.settings_for(workload.name),
        workload=workload,
        parameters=workload.parameters,
        base=home() / "runs",
    )


if __name__ == "__main__":
    main()
