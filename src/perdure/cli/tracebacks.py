"""Stored tracebacks as people read them: the frames of their own code, without ours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_FRAME: Final = re.compile(r'(\s*)File "([^"]*)", line \d+')
_OURS: Final = re.compile(
    r"[/\\]perdure[/\\](runtime|engine)[/\\]|[/\\]concurrent[/\\]futures[/\\]|[/\\]asyncio[/\\]"
)


def own_frames(text: str) -> str:
    """Leave out the frames of the runtime and of the threads in which it runs activities."""
    return "\n".join(_kept(text.splitlines()))


def _kept(lines: list[str]) -> Iterator[str]:
    indent: int | None = None
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            indent = len(frame[1]) if _OURS.search(frame[2]) else None
        elif indent is not None and len(line) - len(line.lstrip()) <= indent:
            indent = None  # the frame with its source is over
        if indent is None:
            yield line
