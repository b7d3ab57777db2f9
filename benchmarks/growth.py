"""The growth command: measures how costs grow, each curve in a process and directory of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import line_chart
from benchmarks.curves.curve import FULL, SHORT, Curve, Scale
from benchmarks.environments import home
from benchmarks.machine import describe
from benchmarks.pages import renew
from benchmarks.run import RESULTS

CURVES = (
    "turns",
    "fan_outs",
    "resumes",
    "stored",
    "many",
    "waiting",
    "workers",
    "postgres_workers",
    "steady",
)
HEADING = ("what", "against", "size: cost of one unit", "grew")


@click.command()
@click.option("--only", multiple=True, type=click.Choice(CURVES))
@click.option("--short", is_flag=True, help="Small sizes: a minute or two, for a quick look.")
@click.option("--full", is_flag=True, help="Also with a million stored instances.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON file.")
@click.option("--chart", type=click.Path(dir_okay=False, path_type=Path), help="SVG file.")
@click.option("--into", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(
    *,
    only: tuple[str, ...],
    short: bool,
    full: bool,
    output: Path | None,
    chart: Path | None,
    into: Path | None,
) -> None:
    """Measure how costs grow on SQLite with every commit on disk.

    --into renews the table of a page between its two marks.
    """
    scale = SHORT if short else FULL if full else Scale()
    console = Console()
    machine = describe(home() / "runs")
    curves: list[Curve] = []
    failures: list[str] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in only or CURVES:
            task = progress.add_task(name, total=1)
            try:
                curves += run_alone(name, scale)
            except Exception as error:  # noqa: BLE001 - the other curves are still worth having
                failures.append(f"{name}: {type(error).__name__}: {error}")
            progress.advance(task)
    show(curves, console)
    for failure in failures:
        console.print(f"[red]failed[/red] {failure}", soft_wrap=True)
    output = output or RESULTS / "growth.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "curves": [asdict(curve) for curve in curves]}
    output.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"saved {output}")
    if chart is not None:
        chart.parent.mkdir(parents=True, exist_ok=True)
        chart.write_text(line_chart.draw(curves))
        console.print(f"saved {chart}")
    if into is not None:
        into.write_text(renew(into.read_text(), "growth", markdown(curves)))
    sys.exit(1 if failures else 0)


def run_alone(name: str, scale: Scale) -> list[Curve]:
    base = home() / "runs"
    base.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(measure, name, directory, scale).result()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(name: str, directory: Path, scale: Scale) -> list[Curve]:
    module = importlib.import_module(f"benchmarks.curves.{name}")
    return asyncio.run(module.measure(directory, scale))


def show(curves: list[Curve], console: Console) -> None:
    table = Table(*HEADING)
    for curve in curves:
        table.add_row(*row_of(curve), end_section=True)
    console.print(table)
    console.print(
        "'grew' compares the largest size with the cheapest one: near 1 is flat, so the whole "
        "grows linearly with the work. Other load on the machine shows up here too."
    )


def row_of(curve: Curve) -> list[str]:
    points = "  ".join(f"{size:,.0f}: {value:,.1f}" for size, value in curve.points)
    return [f"{curve.title}, {curve.unit}", curve.size, points, f"{curve.growth:.2f} x"]


def markdown(curves: list[Curve]) -> str:
    lines = ["| " + " | ".join(HEADING) + " |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(row_of(curve)) + " |" for curve in curves]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
