"""``perdure doctor``: versions, SQLite, file system, clock, permissions, locks, workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from perdure.cli.command import command
from perdure.cli.exits import Exit
from perdure.cli.options import output_option
from perdure.cli.render import Cell, glyph, print_facts, print_json
from perdure.cli.session import current_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from perdure.cli.health import Finding

_SIGNS = {
    "ok": ("completed", "green"),
    "warn": ("blocked", "yellow"),
    "bad": ("failed", "bold red"),
}


@command(
    "doctor",
    short_help="Check the machine, the store and its surroundings.",
    examples=["perdure doctor", "perdure doctor --store shop.db -o json"],
)
@output_option("table", "json")
def doctor(output: str) -> int:
    """Check versions, SQLite, file system, permissions, clock, locks, queues and workers.

    Exit code 1 if something is bad; a warning alone is no error.
    """
    from perdure.cli.health import examine

    findings = asyncio.run(examine(current_settings()))
    if output == "json":
        print_json([finding.document() for finding in findings])
    else:
        print_facts(_facts(findings), indent=0, label_width=14)
    return Exit.ERROR if any(finding.level == "bad" for finding in findings) else Exit.OK


def _facts(findings: Iterable[Finding]) -> Iterator[tuple[Cell, str | Cell]]:
    for finding in findings:
        sign, style = _SIGNS[finding.level]
        yield Cell(f"{glyph(sign)} {finding.subject}", style), finding.text
        if finding.advice:
            yield Cell(""), Cell(finding.advice, "dim")
