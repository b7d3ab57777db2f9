"""The rules of CONTRIBUTING that a reader of the sources relies on."""

from __future__ import annotations

import ast
import gc
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "perdure"
MODULES = sorted(SOURCES.rglob("*.py"))
TEXTS = [*MODULES, *sorted(SOURCES.rglob("*.sql"))]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PROGRAMS = [
    *MODULES,
    *(
        path
        for folder in ("tests", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
]

LINES_MAX = 650
DEFERRED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
VAGUE = re.compile(r"\b(nobody|whoever|somebody|whatever)\b", re.IGNORECASE)
QUESTION = re.compile(r"(What|Who|Whether|Where|How)\b")
NAME = re.compile(r"`([A-Za-z_]\w*(?:[./]\w+)*(?:\(\))?)`")
FROM_ELSEWHERE = {"fallocate", "SIGSTOP", "note_ms", "md"}
"""Names on the pages about the code that are not of this code."""

SAME_NAME = {
    "__init__": "each package has one",
    "admin": "the administration of the client and of each store",
    "administration": "the contract, and the state machine's rules for it",
    "clock": "the clock of the process and that of the Postgres server",
    "control": "pausing and resuming: the verb and its checks",
    "instances": "the live instances of a runtime, and those of a store",
    "moving": "exports: the client's part, the store's part and its checks",
    "provider": "the provider of each store",
    "records": "the contract's records, and how Postgres stores them",
    "statements": "the SQL of each store",
    "store": "the open store of each backend",
    "turns": "the verbs in each store, and the state machine's rules for them",
    "work": "work items in the model, and in a store",
}
"""Why several packages have a module of that name."""


@cache
def parsed(path: Path) -> ast.Module:
    # Without the garbage collector, which makes CPython 3.11 raise SystemError here now and then.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        if was_enabled:
            gc.enable()


def package_of(path: Path) -> str:
    return path.parent.relative_to(SOURCES).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_the_first_line_of_a_module_says_its_duty(path):
    assert ast.get_docstring(parsed(path))


def test_nothing_is_deferred_by_a_mark():
    marked = [path for path in [*TEXTS, *PAGES] if DEFERRED.search(path.read_text())]

    assert marked == []


def test_a_module_can_be_read_at_one_sitting():
    long = {str(path.relative_to(SOURCES)): len(path.read_text().splitlines()) for path in MODULES}

    assert {name: lines for name, lines in long.items() if lines > LINES_MAX} == {}


def test_a_sentence_has_a_named_subject():
    found = Counter(package_of(path) for path in TEXTS for _ in VAGUE.findall(path.read_text()))

    assert found == {}


def test_a_page_names_its_subjects():
    vague = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in PAGES
        if VAGUE.search(path.read_text())
    }

    assert vague == set()


def test_the_pages_about_the_code_name_what_is_there():
    known = set(re.findall(r"\w+", "\n".join(path.read_text() for path in TEXTS)))
    known.update(FROM_ELSEWHERE, (path.stem for path in (*TEXTS, *PROGRAMS)))
    unknown = {
        (page.name, name)
        for page in (ROOT / "docs" / "internals").glob("*.md")
        for text in NAME.findall(page.read_text())
        for name in re.findall(r"[A-Za-z_]\w+", text)
        if name not in known
    }

    assert unknown == set()


def test_a_docstring_says_what_happens_and_asks_no_question():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PROGRAMS
        for node in docstrings(path)
        if QUESTION.match(node.value.value)
    ]

    assert found == []


def test_docstrings_and_comments_of_programs_name_their_subjects():
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in PROGRAMS
        for text in (*(node.value.value for node in docstrings(path)), *comments(path))
        if VAGUE.search(text)
    ]

    assert found == []


def docstrings(path):
    """Return the strings that document a module, a class, a function or a name."""
    return [
        node
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def comments(path):
    with tokenize.open(path) as lines:
        tokens = tokenize.generate_tokens(lines.readline)
        return [token.string for token in tokens if token.type == tokenize.COMMENT]


def test_a_name_of_a_module_means_one_thing():
    packages = defaultdict(list)
    for path in MODULES:
        packages[path.stem].append(package_of(path))

    shared = {name for name, places in packages.items() if len(places) > 1}
    assert shared <= set(SAME_NAME)


def test_the_library_logs_through_its_own_loggers():
    """Other loggers write what they are given as it is, and raise what a handler raises."""
    own = {"logs.py": "makes them", "cli": "sets handlers up", "authoring": "for the authors' code"}
    others = [
        str(path.relative_to(SOURCES))
        for path in MODULES
        if "logging.getLogger(" in path.read_text()
        and path.relative_to(SOURCES).parts[0] not in own
    ]

    assert others == []


def test_a_loop_over_tasks_yields_to_them():
    """``gather`` of tasks that have all ended returns at once since Python 3.12."""
    found = [
        f"{path.relative_to(SOURCES)}:{loop.lineno}"
        for path in MODULES
        for loop in ast.walk(parsed(path))
        if isinstance(loop, ast.While) and waits_only_by_gather(loop)
    ]

    assert found == []


def waits_only_by_gather(loop):
    awaits = [node.value for node in ast.walk(loop) if isinstance(node, ast.Await)]
    return bool(awaits) and all(
        isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith("gather")
        and any(isinstance(each, ast.Starred) for each in call.args)
        and not any(isinstance(each, ast.Call) for arg in call.args for each in ast.walk(arg))
        for call in awaits
    )


@pytest.mark.parametrize(
    ("loop", "is_wrong"),
    [
        ("while tasks:\n  await gather(*tasks)", True),
        ("while self._tasks:\n  await asyncio.gather(*self._tasks, return_exceptions=True)", True),
        ("while tasks:\n  await asyncio.wait(tasks)", False),
        ("while tasks:\n  await asyncio.gather(*tasks)\n  await asyncio.sleep(0)", False),
        ("while True:\n  await asyncio.gather(*(copy(each) for each in await page()))", False),
    ],
)
def test_a_loop_that_waits_only_by_gather_is_found(loop, is_wrong):
    (node,) = ast.parse(f"async def f():\n  {loop.replace(chr(10), chr(10) + '  ')}").body[0].body

    assert waits_only_by_gather(node) == is_wrong
