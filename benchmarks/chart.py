"""The chart of a record: one panel of bars per workload, drawn from zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import svg
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from benchmarks.results import Outcome, Record

WIDTH, MARGIN, COLUMNS = 860.0, 16.0, 2
LABEL, VALUE, BAR, GAP, HEAD = 118.0, 92.0, 14.0, 6.0, 46.0


def draw(record: Record) -> str:
    panels: list[tuple[str, list[Outcome]]] = [
        (workload, outcomes)
        for field in record.fields()
        for workload in record.workloads(field)
        if (outcomes := [one for one in record.of(workload, field) if one.median is not None])
    ]
    body: list[str] = []
    top = MARGIN
    panel_width = (WIDTH - MARGIN * (COLUMNS + 1)) / COLUMNS
    for first in range(0, len(panels), COLUMNS):
        row = panels[first : first + COLUMNS]
        for column, (workload, outcomes) in enumerate(row):
            left = MARGIN + column * (panel_width + MARGIN)
            body += panel(workload, outcomes, left, top, panel_width)
        top += HEAD + max(len(outcomes) for _, outcomes in row) * (BAR + GAP) + MARGIN
    return svg.document(WIDTH, top, "perdure and other engines, workload by workload", body)


def panel(
    workload: str, outcomes: list[Outcome], left: float, top: float, width: float
) -> list[str]:
    definition = WORKLOADS[workload]
    better = "higher" if definition.higher_is_better else "lower"
    body = [
        svg.text(left, top + 14, f"{workload.upper()} {definition.title}", "title"),
        svg.text(left, top + 30, f"{definition.unit}, {better} is better", "faint"),
    ]
    longest = max(one.median or 0.0 for one in outcomes) or 1.0
    room = width - LABEL - VALUE
    for index, one in enumerate(outcomes):
        value = one.median or 0.0
        y = top + HEAD + index * (BAR + GAP)
        length = room * value / longest
        kind = "ours" if one.is_ours else "theirs"
        body += [
            svg.text(left + LABEL - 8, y + BAR - 3, one.contender, anchor="end"),
            svg.bar(left + LABEL, y, length, BAR, kind),
            svg.text(left + LABEL + length + 6, y + BAR - 3, label(value, one.durability)),
        ]
    return body


def label(value: float, durability: str) -> str:
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{shown} ({durability})"
