"""Finds the lines of user code: of the call that is running, and of each suspended branch."""

from __future__ import annotations

import asyncio
import inspect
import os
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perdure.engine.operations import Family

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from perdure.engine.loop import DurableLoop
    from perdure.engine.operations import Operation, Operations

_PACKAGE = Path(__file__).parent.parent
_LIBRARY = str(Path(asyncio.__file__).parent.parent) + os.sep
_NOT_USERS = (
    *(f"{_PACKAGE / part}{os.sep}" for part in ("engine", "authoring", "runtime")),
    str(_PACKAGE / "codec.py"),
    "<frozen ",
)

# Functions of the engine that call user code: the frames below them belong to the host.
_BOUNDARIES = frozenset({"run_until_idle", "_conclude", "_close_code"})


class _Source:
    """A file of the author: its shown name, and a cache of its call sites."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        # The key decides the line: first line of the code, its line table, last instruction.
        self.sites: dict[tuple[int, bytes, int], str] = {}


_sources: dict[str, _Source | None] = {}
"""By file name; None for files of the library. One entry for each file."""
_UNSEEN = _Source("")


def call_site(depth: int = 1) -> str:
    """Return ``file:line`` of the nearest frame of user code, or "" if there is none.

    ``depth``: number of frames of the engine above it, which are skipped.
    """
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001
    while frame is not None:
        code = frame.f_code
        source = _sources.get(code.co_filename, _UNSEEN)
        if source is _UNSEEN:
            source = _look_up(frame)
        if source is not None:
            # f_lineno is slow in long functions, so the result is cached.
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
    """Return the path from the top package on, equal on every machine; None for library code."""
    if file.startswith(_NOT_USERS):
        return None
    if file.startswith(_LIBRARY) and "site-packages" not in file:
        return None
    parts = file.replace(os.sep, "/").split("/")
    depth = module.count(".") + 1
    if parts[-1] == "__init__.py":
        depth += 1
    return "/".join(parts[-depth:])


_KINDS: Final = {
    Family.ACTIVITY: "activity",
    Family.TIMER: "timer",
    Family.EVENT: "event",
    Family.MESSAGE: "message",
    Family.CHILD: "orchestration",
}
_DEPTH_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Frame:
    """One suspended function of the author."""

    file: str
    line: int
    function: str
    locals: dict[str, str]
    """Shortened representations by name."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One open step, and the frames of its branch, outermost first."""

    kind: str
    name: str
    op: str
    site: str
    since_ms: int
    due_ms: int | None
    frames: tuple[Frame, ...]


def list_waits(loop: DurableLoop, operations: Operations) -> list[Wait]:
    tasks = {task.branch.path: task for task in loop.live_tasks()}
    waits: list[Wait] = []
    frames: dict[str, tuple[Frame, ...]] = {}
    for operation in operations.open.values():
        path = operation.event.op.partition("/")[0]
        if path not in frames:
            task = tasks.get(path)
            frames[path] = () if task is None else tuple(map(_read, _stack(task.get_coro())))
        waits.append(_wait(operation, frames[path]))
    return waits


def list_sites(loop: DurableLoop) -> list[str]:
    """Return ``file:line`` at which each branch is suspended."""
    stacks = [list(_stack(task.get_coro())) for task in loop.live_tasks()]
    return [site_of(stack[-1]) for stack in stacks if stack]


def _wait(operation: Operation, frames: tuple[Frame, ...]) -> Wait:
    event = operation.event
    return Wait(
        kind=_KINDS[operation.family],
        name=getattr(event, "name", ""),
        op=event.op,
        site=event.site,
        since_ms=event.timestamp_ms,
        due_ms=getattr(event, "fire_at_ms", None),
        frames=frames,
    )


def _stack(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of user code, from the coroutine of the task to the awaited one."""
    for _ in range(_DEPTH_MAX):
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isgenerator(awaited):
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        elif inspect.isasyncgen(awaited):
            frame, awaited = awaited.ag_frame, awaited.ag_await
        else:
            return
        # A suspended frame has no caller, so this finds the frame itself or nothing.
        if frame is not None and find_user_frame(frame) is not None:
            yield frame


def _read(frame: FrameType) -> Frame:
    code = frame.f_code
    shown = {name: _represent(value) for name, value in frame.f_locals.items()}
    return Frame(site_of(frame).rpartition(":")[0], frame.f_lineno, code.co_qualname, shown)


_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 120
_shortener.maxdict = _shortener.maxlist = _shortener.maxtuple = _shortener.maxset = 10


def _represent(value: object) -> str:
    try:
        return _shortener.repr(value)
    except Exception as error:  # noqa: BLE001
        return f"<{type(value).__name__}, unreadable: {type(error).__name__}>"
