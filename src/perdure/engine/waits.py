"""The suspended branches of an execution: the open step of each, and where its code stands."""

from __future__ import annotations

import inspect
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from perdure.engine.inbox import ACTIVITY, CHILD, EVENT, MESSAGE, TIMER, Operation, Operations
from perdure.engine.user_code import is_user, site_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from perdure.engine.loop import DurableLoop

_KINDS: Final = {
    ACTIVITY: "activity",
    TIMER: "timer",
    EVENT: "event",
    MESSAGE: "message",
    CHILD: "orchestration",
}
_ARRIVALS: Final = frozenset({EVENT, MESSAGE})
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
    type: Any = Any
    """The type that the data of an event or message must fit."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The variables of one suspended function of the author."""

    function: str
    variables: Mapping[str, Any]
    """The values themselves."""


def list_scopes(loop: DurableLoop) -> list[Scope]:
    """Return the scopes of the orchestration and of what it awaits, then those of its tasks."""
    tasks = sorted(loop.live_tasks(), key=lambda task: task is not loop.root)
    frames = [frame for task in tasks for frame in _stack(task.get_coro())]
    return [Scope(frame.f_code.co_qualname, frame.f_locals) for frame in frames]


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
        type=operation.definition if operation.family in _ARRIVALS else Any,
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
        if frame is not None and is_user(frame):
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
