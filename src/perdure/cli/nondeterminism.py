"""Find calls in the source of orchestrations that return another value on replay.

This helps authors and proves nothing: only the orchestration function itself is read.
"""

from __future__ import annotations

import ast
import datetime
import inspect
import os
import random
import secrets
import textwrap
import time
import uuid
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from perdure.authoring import side_effect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from perdure.authoring.definitions import Registry

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
    os.getenv: "an argument or side_effect()",
}


def warnings_of(registry: Registry) -> Iterator[str]:
    """Yield a warning for each call in an orchestration that differs on replay."""
    for name, version in sorted(registry.orchestration_keys):
        fn = registry.resolve_orchestration(name, version).fn
        for line, call, instead in _unrepeatable(fn):
            file = Path(fn.__code__.co_filename).name
            yield (
                f"orchestration {name!r} calls {call} at {file}:{line}, which gives another value "
                f"when it is replayed; use perdure's {instead}"
            )


def _unrepeatable(fn: Callable[..., Any]) -> Iterator[tuple[int, str, str]]:
    try:
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # no source file, or changed since the import
        return
    scope = fn.__globals__ | dict(inspect.getclosurevars(fn).nonlocals)
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        called = _named(node.func, scope) if isinstance(node, ast.Call) else None
        if called is side_effect:
            continue  # side_effect() records what it calls
        if isinstance(node, ast.Call) and inspect.isroutine(called) and called in _INSTEAD:
            yield first + node.lineno - 1, f"{ast.unparse(node.func)}()", _INSTEAD[called]
        waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def _named(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Return the object of a dotted name, or None if that would require running code."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _named(node.value, scope)
        if isinstance(owner, (ModuleType, type)):
            return getattr(owner, node.attr, None)
    return None
