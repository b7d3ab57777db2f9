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

_UNSEEN = ""
_shown: dict[str, str | None] = {}
"""How a source file is shown; None for the library's own. As many entries as there are files."""


def call_site(depth: int = 1) -> str:
    """``file:line`` of the author's call, or an empty text when none is on the stack.

    The caller knows that so many frames are the engine's own.
    """
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001
    shown_by_file = _shown
    while frame is not None:
        code = frame.f_code
        shown = shown_by_file.get(code.co_filename, _UNSEEN)
        if shown is _UNSEEN:
            shown = _look_up(frame)
        if shown is not None:
            return f"{shown}:{frame.f_lineno}"
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
    return f"{_look_up(frame) or frame.f_code.co_filename}:{frame.f_lineno}"


def _look_up(frame: FrameType) -> str | None:
    file = frame.f_code.co_filename
    if file not in _shown:
        _shown[file] = _show(file, frame.f_globals.get("__name__", ""))
    return _shown[file]


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
