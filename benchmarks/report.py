"""Shows a record: tables in the terminal, or as Markdown for the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.chart import draw
from benchmarks.contenders import GOALS, IDLE_RSS_MB_GOAL
from benchmarks.pages import between, renew
from benchmarks.results import Outcome, Record
from benchmarks.workloads import WORKLOADS

NOISE = (
    "Medians of {n} repetitions in fresh processes and directories, engines taking turns; "
    "(lowest..highest) shows how noisy the machine was. Compare within one run only."
)
DURABILITY = (
    "F: on disk before it is acknowledged. N: WAL without fsync, the last commits may be lost "
    "with the power. none: lost with the process."
)


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def rows(record: Record, field: str) -> list[list[str]]:
    """A heading, a row per contender, then the ratio to the best peer, which it is, the goal."""
    workloads = record.workloads(field)
    units = [f"{name.upper()} {WORKLOADS[name].unit}" for name in workloads]
    table = [["engine", *units]]
    for name in record.contenders(field):
        outcomes = {one.workload: one for one in record.outcomes if one.contender == name}
        durability = next(iter(outcomes.values())).durability
        cells = [cell(outcomes.get(workload)) for workload in workloads]
        table.append([f"{name} ({durability})", *cells])
    verdicts = [verdict(record, workload, field) for workload in workloads]
    ratios, rivals, goals = zip(*verdicts, strict=True)
    table += [["ratio", *ratios], ["to best peer", *rivals], ["goal", *goals]]
    return table


def cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    if outcome.median is None:
        return "failed"
    text = number(outcome.median)
    low, high = outcome.spread
    if len(outcome.values) > 1:
        text += f" ({number(low)}..{number(high)})"
    rss = outcome.detail("rss_mb")
    if rss is not None:
        text += f" {rss:.0f} MB"
    if outcome.errors:
        text += f", {len(outcome.errors)} of {len(outcome.trials)} failed"
    return text


def verdict(record: Record, workload: str, field: str) -> tuple[str, str, str]:
    """The ratio of our reference to the best peer, the name of that peer, the goal."""
    mine, goal = record.reference(workload, field), GOALS[field].get(workload)
    if mine is None or mine.median is None:
        return "-", "-", "-"
    higher = WORKLOADS[workload].higher_is_better
    rival = record.best_peer(workload, field)
    ratio = mine.median / rival.median if rival and rival.median else None
    shown = "-" if ratio is None else f"{number(ratio)} x"
    name = rival.contender if rival else "-"
    if goal is None:
        return shown, name, "-"
    text = goal.text(higher_is_better=higher)
    measured = ratio if goal.is_ratio else mine.median
    if measured is None:
        return shown, name, text
    met = goal.is_met(measured, higher_is_better=higher)
    rss = mine.detail("rss_mb")
    if rss is not None:
        text += f", {IDLE_RSS_MB_GOAL:.0f} MB"
        met = met and rss < IDLE_RSS_MB_GOAL
    return shown, name, f"{text} {'met' if met else 'MISSED'}"


def show(record: Record, console: Console) -> None:
    for field in record.fields():
        heading, *body = rows(record, field)
        last = body[-4][0]
        table = Table(title=f"engines on {field}", title_justify="left")
        for name in heading:
            table.add_column(name, overflow="fold")
        for row in body:
            table.add_row(*[colour(text) for text in row], end_section=row[0] == last)
        console.print(table)
    console.print(NOISE.format(n=record.repetitions), DURABILITY)
    console.print(f"machine: {json.dumps(record.machine)}", soft_wrap=True)
    for name, about in settings(record).items():
        console.print(f"{name}: {about}", soft_wrap=True, highlight=False)
    for reason in record.failures():
        console.print(f"[red]failed[/red] {reason}", soft_wrap=True)


def colour(text: str) -> str:
    if text.endswith(" met"):
        return f"[green]{text}[/green]"
    return f"[red]{text}[/red]" if text.endswith("MISSED") else text


def settings(record: Record) -> dict[str, str]:
    """Each contender with its versions, and the settings of each group of workloads."""
    found: dict[str, dict[str, list[str]]] = {}
    for outcome in record.outcomes:
        about = next((trial["about"] for trial in outcome.trials if "about" in trial), None)
        if about is not None:
            shown = {name: value for name, value in about.items() if name not in {"url", "server"}}
            text = ", ".join(f"{name} {value}" for name, value in shown.items())
            found.setdefault(outcome.contender, {}).setdefault(text, []).append(outcome.workload)
    return {
        name: "; ".join(f"{text} ({', '.join(on)})" for text, on in groups.items())
        for name, groups in found.items()
    }


def markdown(record: Record) -> str:
    lines: list[str] = []
    for name, workload in WORKLOADS.items():
        lines.append(f"- {name.upper()}: {workload.title} ({workload.unit})")
    lines.append("")
    for field in record.fields():
        heading, *body = rows(record, field)
        lines += ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
        lines += ["| " + " | ".join(row) + " |" for row in body]
        lines.append("")
    lines += [NOISE.format(n=record.repetitions), "", DURABILITY, "", "Versions and settings:", ""]
    lines += [f"- {name}: {about}" for name, about in settings(record).items()]
    machine = ", ".join(f"{name} {value}" for name, value in record.machine.items())
    lines += ["", f"Machine: {machine}."]
    return "\n".join(lines) + "\n"


def summary(record: Record) -> str:
    """The short table of the README: our default store beside the best peer, one line each."""
    lines = ["| workload | perdure, FULL | best peer | ratio |", "|---|---|---|---|"]
    for workload in record.workloads("files"):
        mine, rival = record.reference(workload, "files"), record.best_peer(workload, "files")
        ratio, _, _ = verdict(record, workload, "files")
        about = WORKLOADS[workload]
        lines.append(f"| {about.title} | {brief(mine)} {about.unit} | {named(rival)} | {ratio} |")
    return "\n".join(lines) + "\n"


def brief(outcome: Outcome | None) -> str:
    return "-" if outcome is None or outcome.median is None else number(outcome.median)


def named(rival: Outcome | None) -> str:
    return "-" if rival is None else f"{brief(rival)}, {rival.contender} ({rival.durability})"


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--into", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--readme",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Renew the short table of this page.",
)
@click.option("--chart", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG.")
def main(
    path: Path, *, as_markdown: bool, into: Path | None, readme: Path | None, chart: Path | None
) -> None:
    """Show a result file again; --into and --readme renew a page between its two marks."""
    record = Record.load(path)
    if as_markdown:
        click.echo(markdown(record))
    elif into is None and readme is None:
        show(record, Console())
    if into is not None:
        into.write_text(renew(into.read_text(), "benchmarks", markdown(record)))
    if readme is not None:
        readme.write_text(
            between(
                readme.read_text(),
                "<!-- measured:begin -->",
                "<!-- measured:end -->",
                summary(record),
            )
        )
    if chart is not None:
        chart.write_text(draw(record))


if __name__ == "__main__":
    main()
