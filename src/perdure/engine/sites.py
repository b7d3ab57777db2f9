"""Where user code stands: ``file:line`` of the nearest frame that belongs to the author."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_PACKAGE = Path(__file__).parent.parent
_LIBRARY = str(Path(asyncio.__file__).parent.parent) + os.sep
_NOT_USERS = (
    *(f"{_PACKAGE / part}{os.sep}" for part in ("engine", "authoring", "runtime")),
    str(_PACKAGE / "codec.py"),
    "<frozen ",
)

# Functions of the engine that no author calls: below them on the stack is the host.
_BOUNDARIES = frozenset({"run_dry", "_conclude", "_close_code"})


class _Source:
    """A file of the author's: how it is shown, and the places in it from which calls came."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        # By what tells the line: where the code begins, its table of lines, and how far it came.
        self.sites: dict[tuple[int, bytes, int], str] = {}


_sources: dict[str, _Source | None] = {}
"""By file name; None for the library's own. As many entries as there are files."""
_UNSEEN = _Source("")


def call_site(depth: int = 1) -> str:
    """``file:line`` of the author's call, or an empty text when none is on the stack.

    The caller knows that so many frames are the engine's own.
    """
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001
    while frame is not None:
        code = frame.f_code
        source = _sources.get(code.co_filename, _UNSEEN)
        if source is _UNSEEN:
            source = _look_up(frame)
        if source is not None:
            # To find the line takes long, the longer the function.
            place = (code.co_firstlineno, code.co_linetable, frame.f_lasti)
            site = source.sites.get(place)
            if site is None:
                site = source.sites[place] = f"{source.shown}:{frame.f_lineno}"
            return site
        if code.co_name in _BOUNDARIES:
            return ""
        frame = frame.f_back
    return ""


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if _look_up(frame) is not None:
            return frame
        if frame.f_code.co_name in _BOUNDARIES:
            return None
        frame = frame.f_back
    return None


def site_of(frame: FrameType) -> str:
    source = _look_up(frame)
    file = frame.f_code.co_filename if source is None else source.shown
    return f"{file}:{frame.f_lineno}"


def _look_up(frame: FrameType) -> _Source | None:
    file = frame.f_code.co_filename
    if file not in _sources:
        shown = _show(file, frame.f_globals.get("__name__", ""))
        _sources[file] = None if shown is None else _Source(shown)
    return _sources[file]


def _show(file: str, module: str) -> str | None:
    """The path from the top package on: the same on every machine, None for library code."""
    if file.startswith(_NOT_USERS):
        return None
    if file.startswith(_LIBRARY) and "site-packages" not in file:
        return None
    parts = file.replace(os.sep, "/").split("/")
    depth = module.count(".") + 1
    if parts[-1] == "__init__.py":
        depth += 1
    return "/".join(parts[-depth:])
