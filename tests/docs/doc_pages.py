"""The pages that users read, and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r'^```(\w+)?(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    """The name of the file as which a reader saves it; empty without one."""
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found.groups(default="")) for found in _FENCE.finditer(page.read_text())]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
