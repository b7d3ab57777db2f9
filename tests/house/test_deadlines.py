"""Time decides no test: a wait that should succeed has the one generous deadline."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from patience import HANG_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[1]
SOURCES = [
    path
    for path in sorted(TESTS.rglob("*.py"))
    # Times of campaigns are part of their load; programs of the engine run on a virtual clock.
    if not path.is_relative_to(TESTS / "campaigns") and "engine" not in path.parts
]
# Where the seconds of a call are: by position, or by the name timeout.
PLACES = {
    "result": 0,
    "wait": 0,
    "join": 0,
    "timeout": 0,
    "wait_for": 1,
    "communicate": 1,
    "run": 9,
}
EXPIRING_MAX = 1.0
"""A shorter time is one that is meant to run out."""


def short_deadlines(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """Yield line and seconds of each wait that names its deadline as a number."""
    for call in _calls_outside_of_definitions(tree):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name not in PLACES:
            continue
        given = [word.value for word in call.keywords if word.arg == "timeout"]
        given += call.args[PLACES[name] : PLACES[name] + 1]
        yield from _short(*given)
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and ast.unparse(node.left).endswith(("time()", "tonic()")):
            yield from _short(node.right)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_SECONDS"):
            yield from _short(node.value)


def _short(*values: ast.AST) -> Iterator[tuple[int, float]]:
    for value in values:
        seconds = value.value if isinstance(value, ast.Constant) else None
        if type(seconds) in {int, float} and EXPIRING_MAX <= seconds < HANG_SECONDS:
            yield value.lineno, seconds


def _calls_outside_of_definitions(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that run in the test itself, not in an orchestration or activity."""
    if isinstance(node, (ast.AsyncFunctionDef, ast.FunctionDef)):
        decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
        if "orchestration" in decorators or "activity" in decorators:
            return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls_outside_of_definitions(child)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(TESTS)))
def test_waits_have_the_one_deadline(path: Path):
    found = [f"{path}:{line}: {seconds} s" for line, seconds in short_deadlines(_parsed(path))]

    assert found == [], "use HANG_SECONDS of tests/patience.py"


@pytest.mark.parametrize(
    "line",
    [
        "await handle.result(10)",
        "process.communicate(timeout=10)",
        "deadline = asyncio.get_running_loop().time() + 10",
        "until = time.monotonic() + 10",
        "PATIENCE_SECONDS = 10",
    ],
)
def test_a_short_deadline_is_found(line: str):
    assert list(short_deadlines(ast.parse(f"async def test():\n    {line}\n"))) == [(2, 10)]


def _parsed(path: Path) -> Any:
    return ast.parse(path.read_text())
