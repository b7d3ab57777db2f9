"""Finds likely mistakes in orchestrations: by reading the source, without running it.

It finds calls that return another value on replay, steps that are not awaited, and locks that all
instances share. A line with the comment ``# perdure: allow`` is left out.
"""

from __future__ import annotations

import ast
import asyncio
import datetime
import inspect
import os
import random
import secrets
import textwrap
import time
import uuid
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from perdure.authoring import api
from perdure.authoring.communication import instance
from perdure.authoring.definitions import Activity, Orchestration, Registry
from perdure.errors import ForbiddenInOrchestration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


_CLOCKS: Final[tuple[Callable[..., Any], ...]] = (
    time.time,
    time.time_ns,
    time.monotonic,
    time.monotonic_ns,
    time.perf_counter,
    time.perf_counter_ns,
    datetime.datetime.now,
    datetime.datetime.utcnow,  # pyright: ignore[reportDeprecated]
    datetime.datetime.today,
    datetime.date.today,
)
_RANDOM: Final = tuple(
    getattr(random, name) for name in random.__all__ if inspect.isroutine(getattr(random, name))
)
_SECRETS: Final = tuple(
    getattr(secrets, name) for name in secrets.__all__ if inspect.isroutine(getattr(secrets, name))
)
_INSTEAD: Final[Mapping[Callable[..., Any], str]] = {
    **dict.fromkeys(_CLOCKS, "now()"),
    **dict.fromkeys(_RANDOM, "random()"),
    **dict.fromkeys((*_SECRETS, os.urandom), "side_effect()"),
    **dict.fromkeys((uuid.uuid1, uuid.uuid4), "uuid4()"),
    os.getenv: "side_effect(), or pass it as an argument",
}
_STEPS: Final = (api.wait_for_event, api.next_message)
_SHARED: Final = (
    *(asyncio.Lock, asyncio.Event, asyncio.Condition, asyncio.Semaphore, asyncio.Barrier),
    *(asyncio.Queue, asyncio.Future),
)
_TASK_STARTERS: Final = (asyncio.create_task, asyncio.ensure_future)
_SETS: Final = (set, frozenset)
_IN_ORDER: Final = (list, tuple, enumerate, iter, reversed, zip, map)
_FUNCTIONS_MAX: Final = 200
_ALLOW: Final = "# perdure: allow"
_OWN_PACKAGE: Final = "perdure"
"""Its handlers are left out: reading their source took most of the time of opening a runtime."""


class Finding(NamedTuple):
    """One line that is likely a mistake."""

    handler: str
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f"{Path(self.file).name}:{self.line}"
        return f"{self.handler} {self.text.replace('{at}', f'at {place}')}"


def check_lines(handlers: Registry) -> None:
    """Raise ForbiddenInOrchestration for likely mistakes in orchestrations, if there is one."""
    found = "\n".join(map(str, _in_orchestrations(handlers)))
    if found:
        raise ForbiddenInOrchestration(
            f"{found}\nIf such a line is harmless, end it with the comment {_ALLOW}"
        )


def findings_in(registry: Registry) -> Iterator[Finding]:
    """Yield likely mistakes in the orchestrations and in the functions that they call by name.

    Also yields calls that block the event loop in async activities. This helps authors and proves
    nothing. A function without source is left out.
    """
    yield from _in_orchestrations(registry)
    for name in sorted(registry.activity_names):
        activity = registry.resolve_activity(name)
        fn = cast("FunctionType", activity.fn)
        if activity.is_async and _package(fn) != _OWN_PACKAGE:
            reader = _Reader(fn, _blocking_finding)
            for line, text in reader.findings():
                yield Finding(f"activity {name!r}", reader.file, line, text)


def _in_orchestrations(registry: Registry) -> Iterator[Finding]:
    for name, version in sorted(registry.orchestration_keys):
        fn = cast("FunctionType", registry.resolve_orchestration(name, version).fn)
        if _package(fn) == _OWN_PACKAGE:
            continue
        for file, line, text in _found_from(fn):
            yield Finding(f"orchestration {name!r}", file, line, text)


def _found_from(fn: FunctionType) -> Iterator[tuple[str, int, str]]:
    package = _package(fn)
    waiting, seen = [fn], {fn.__code__}
    while waiting and len(seen) < _FUNCTIONS_MAX:
        reader = _Reader(waiting.pop(0))
        for line, text in reader.findings():
            yield reader.file, line, text
        for called in reader.called:
            if called.__code__ not in seen and _package(called) == package:
                seen.add(called.__code__)
                waiting.append(called)


def _package(fn: FunctionType) -> str:
    # Code that was made by exec() has no module.
    return (cast("str | None", fn.__module__) or "").partition(".")[0]


class _Reader:
    """Reads the source of one function."""

    def __init__(
        self, fn: FunctionType, find: Callable[[_Reader, ast.AST], str | None] | None = None
    ) -> None:
        self._fn = fn
        self._find = find or _Reader.find_in_orchestration
        self.file = fn.__code__.co_filename
        self.called: list[FunctionType] = []
        """Functions that it calls by name."""
        self._scope: dict[str, Any] = {}
        self._sets: set[str] = set()
        """Names of variables that hold sets."""

    def findings(self) -> Iterator[tuple[int, str]]:
        try:
            lines, first = inspect.getsourcelines(self._fn)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):  # no source file, or changed since the import
            return
        except (SystemError, RecursionError):  # Python 3.11: two threads parse at once; deep code
            return
        self._scope = self._fn.__globals__ | dict(inspect.getclosurevars(self._fn).nonlocals)
        self._sets = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and self._is_set(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Call) and self.named(node.func) is api.side_effect:
                continue  # side_effect() records what it calls
            text = self._find(self, node)
            line = getattr(node, "lineno", 1) - 1
            if text is not None and _ALLOW not in lines[line]:
                yield first + line, text
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))

    def find_in_orchestration(self, node: ast.AST) -> str | None:
        match node:
            case ast.Expr(value=ast.Call() as call) if self._is_step(call):
                shown = ast.unparse(call.func)
                return (
                    f"calls {shown}() {{at}} without await: its result and its errors are lost, "
                    f"and it is cancelled when the function ends; write await {shown}(...)"
                )
            case ast.Expr(value=ast.Call() as call) if self._is_coroutine(call):
                shown = ast.unparse(call.func)
                return f"calls {shown}() {{at}} without await, so it does not run; write await"
            case ast.Expr(value=ast.Call(func=starter)) if self.named(starter) in _TASK_STARTERS:
                return (
                    "starts a task {at} and drops it: it is cancelled when the function ends, and "
                    "its errors are lost; keep the task and await it, or use asyncio.TaskGroup"
                )
            case ast.Call():
                called = self.named(node.func)
                if isinstance(called, FunctionType):
                    self.called.append(called)
                if inspect.isroutine(called) and called in _INSTEAD:
                    return (
                        f"calls {ast.unparse(node.func)}() {{at}}, which gives another value when "
                        f"it is replayed; use perdure's {_INSTEAD[called]}"
                    )
            case ast.Name() | ast.Attribute() if self.named(node) is os.environ:
                return (
                    "reads os.environ {at}, which another worker may have with other values; use "
                    "perdure's side_effect(), or pass it as an argument"
                )
            case ast.Name() | ast.Attribute() if isinstance(self.named(node), _SHARED):
                return (
                    f"uses {ast.unparse(node)} {{at}}, which all instances of this process share "
                    "and which is lost when the process ends; make it inside of the orchestration"
                )
            case ast.For(iter=source) if self._is_set(source) and self._takes_steps(node):
                return _SET_TEXT
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                if self._is_set(node.generators[0].iter) and self._takes_steps(node):
                    return _SET_TEXT
            case _:
                pass
        return None

    def _is_step(self, call: ast.Call) -> bool:
        """Return True for a call of an activity, an orchestration, or a wait."""
        func = call.func
        if isinstance(func, ast.Call) and isinstance(func.func, ast.Attribute):
            # charge.options(...)(...)
            is_options = func.func.attr == "options"
            if any(keyword.arg == "on_parent_close" for keyword in func.keywords):
                return False  # a child that goes on after its parent needs no await
            return is_options and isinstance(self.named(func.func.value), (Activity, Orchestration))
        called = self.named(func)
        return isinstance(called, (Activity, Orchestration)) or any(
            called is each for each in _STEPS
        )

    def _is_coroutine(self, call: ast.Call) -> bool:
        """Return True for a call of an async function, or of a method of ``instance(...)``."""
        func = call.func
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call):
            return self.named(func.value.func) is instance
        return inspect.iscoroutinefunction(self.named(func))

    def _takes_steps(self, loop: ast.AST) -> bool:
        return any(
            isinstance(node, ast.Await) or (isinstance(node, ast.Call) and self._is_step(node))
            for node in ast.walk(loop)
        )

    def _is_set(self, node: ast.expr) -> bool:
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Name(id=name):
                return name in self._sets or isinstance(self._scope.get(name), _SETS)
            case ast.Call(func=ast.Name(id=name), args=args) if name not in self._scope:
                if name in {kind.__name__ for kind in _SETS}:
                    return True
                is_in_order = name in {kind.__name__ for kind in _IN_ORDER}
                return is_in_order and any(self._is_set(each) for each in args)
            case _:
                return False

    def named(self, node: ast.expr) -> Any:
        """Return the object of a dotted name, or None if that would require running code."""
        if isinstance(node, ast.Name):
            return self._scope.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.named(node.value)
            if isinstance(owner, (ModuleType, type)):
                return getattr(owner, node.attr, None)
        return None


_SET_TEXT: Final = (
    "takes steps in the order of a set {at}, which differs between processes; use sorted(...)"
)


def _blocking_finding(reader: _Reader, node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call) or reader.named(node.func) is not time.sleep:
        return None
    return (
        f"calls {ast.unparse(node.func)}() {{at}}, which stops everything in this process; use "
        "await asyncio.sleep(...), or make the activity a plain def, which runs in a thread"
    )
