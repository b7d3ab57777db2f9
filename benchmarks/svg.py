"""Small building blocks for charts: escaped text, shapes, and a style for light and dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2430; }
.title { font-weight: 600; }
.faint { fill: #68707f; }
.ours { fill: #2f6fdb; stroke: #2f6fdb; }
.theirs { fill: #a9b2c0; stroke: #a9b2c0; }
.second { fill: #d9822b; stroke: #d9822b; }
.grid { stroke: #d5dae2; }
.line { fill: none; stroke-width: 2; }
rect { stroke: none !important; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ef; }
  .faint { fill: #98a1b0; }
  .ours { fill: #6fa2ff; stroke: #6fa2ff; }
  .theirs { fill: #5b6473; stroke: #5b6473; }
  .grid { stroke: #3a414d; }
}
"""


def document(width: float, height: float, label: str, body: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
    style = f"<style>{STYLE}</style>"
    return "\n".join([f"{head} aria-label={quoteattr(label)}>", style, *body, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" '
        f'rx="2" class="{kind}"/>'
    )


def rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>'


def path(points: list[tuple[float, float]], kind: str) -> str:
    steps = " ".join(
        f"{'M' if index == 0 else 'L'}{x:.1f},{y:.1f}" for index, (x, y) in enumerate(points)
    )
    return f'<path d="{steps}" class="line {kind}" fill="none"/>'


def dot(x: float, y: float, kind: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{kind}"/>'
