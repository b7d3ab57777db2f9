"""The chart of growth curves: one panel each, sizes over several decades on a logarithmic axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from benchmarks import svg

if TYPE_CHECKING:
    from benchmarks.curves.curve import Curve

WIDTH, MARGIN, COLUMNS = 860.0, 20.0, 3
LABELS = 6
PANEL_HEIGHT, HEAD, FOOT, LEFT = 190.0, 40.0, 34.0, 46.0


def draw(curves: list[Curve]) -> str:
    width = (WIDTH - MARGIN * (COLUMNS + 1)) / COLUMNS
    body: list[str] = []
    for index, curve in enumerate(curves):
        row, column = divmod(index, COLUMNS)
        left = MARGIN + column * (width + MARGIN)
        body += panel(curve, left, MARGIN + row * (PANEL_HEIGHT + MARGIN), width)
    rows = math.ceil(len(curves) / COLUMNS)
    height = MARGIN + rows * (PANEL_HEIGHT + MARGIN)
    return svg.document(WIDTH, height, "how costs grow with size", body)


def panel(curve: Curve, left: float, top: float, width: float) -> list[str]:
    bottom, right = top + PANEL_HEIGHT - FOOT, left + width
    sizes = [size for size, _ in curve.points]
    scale = math.log10 if max(sizes) >= 20 * min(sizes) and len(sizes) <= LABELS else float
    span = (scale(max(sizes)) - scale(min(sizes))) or 1.0
    highest = max(value for _, value in curve.points) or 1.0

    def place(size: float, value: float) -> tuple[float, float]:
        x = left + LEFT + (width - LEFT - 10) * (scale(size) - scale(min(sizes))) / span
        return x, bottom - (bottom - top - HEAD) * value / highest

    places = [place(size, value) for size, value in curve.points]
    body = [
        svg.text(left, top + 12, curve.title, "title"),
        svg.text(left, top + 28, f"{curve.unit} against {curve.size}", "faint"),
        svg.rule(left + LEFT, bottom, right, bottom),
        svg.rule(left + LEFT, top + HEAD, right, top + HEAD),
        svg.text(left + LEFT - 6, top + HEAD + 4, short(highest), "faint", "end"),
        svg.text(left + LEFT - 6, bottom + 4, "0", "faint", "end"),
        svg.path(places, "ours"),
        *[svg.dot(x, y, "ours") for x, y in places],
    ]
    every = 1 if len(sizes) <= LABELS else len(sizes) - 1
    for size, (x, _) in list(zip(sizes, places, strict=True))[::every]:
        body.append(svg.text(x, bottom + 16, short(size), "faint", "middle"))
    return body


def short(value: float) -> str:
    for bound, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= bound:
            return f"{value / bound:.3g}{suffix}"
    return f"{value:.3g}"
