"""Fingerprints tell a deploy that changed the code: every fix is noticed, and nothing else is."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

FLOW = """
import dataclasses
import enum
import functools
import threading

import msgspec
import pydantic

import helper
import tools.deep
from helper import Service, shared
from perdure import activity, orchestration

LOCK = threading.Lock()
CACHE = {}
SIZES = ("a", "b")
STEPS = {"first": helper.in_a_dict, "second": [helper.in_a_list]}
PARTIAL = functools.partial(helper.in_a_partial, 1)
SERVICE = Service()

class Size(enum.Enum):
    SMALL = "small"

class Record(msgspec.Struct):
    title: str
    pages: int = 1

class Model(pydantic.BaseModel):
    name: str
    rank: int = 1

@dataclasses.dataclass(slots=True)
class Order:
    number: int
    note: str = "none"

    def total(self):
        return self.number * 2

def decorate(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args) + "wrapped"
    return wrapper

@decorate
def decorated():
    return "decorated"

@functools.lru_cache
def cached():
    return "cached"

def given(order: Order, record: "Record", models: list[Model], size: Size = Size.SMALL):
    return order.total()

@activity
async def find(x: int, y: int = 5) -> int:
    return x

@orchestration
async def flow(x: int = 1, *, mode: str = "fast") -> int:
    with LOCK:
        CACHE[x] = x
    helper.by_attribute()
    tools.deep.in_a_package()
    shared()
    SERVICE.run()
    STEPS["first"](); PARTIAL(); decorated(); cached(); given(None, None, [])
    return [await find(1) for _ in SIZES]

def make(captured):
    @orchestration(name="inner")
    async def inner():
        return captured
    return inner
"""

HELPER = """
def by_attribute(): return other() + 1
def other(): return 2
def in_a_dict(): return 3
def in_a_list(): return 4
def in_a_partial(x): return 5
def shared(): return 6
def unused(): return 7

class Base:
    LIMIT = 8
    def inherited(self): return 9

class Service(Base):
    def run(self): return self.inherited() + self.called()
    def called(self): return 10
    @property
    def size(self): return 11
    @staticmethod
    def fixed(): return 12
"""

DEEP = """
def in_a_package(): return 13
"""


class Project:
    """A small program in a directory, imported anew for each version of its text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._versions = 0

    def write(self, old: str = "", new: str = "") -> Path:
        self._versions += 1
        folder = self.path / f"v{self._versions}"
        (folder / "tools").mkdir(parents=True)
        texts = {"flow.py": FLOW, "helper.py": HELPER, "tools/deep.py": DEEP}
        if old:
            assert sum(text.count(old) for text in texts.values()) == 1, old
        for name, text in {**texts, "tools/__init__.py": "", "tools/extra.py": "X = 1"}.items():
            (folder / name).write_text(text.replace(old, new) if old else text)
        return folder

    def fingerprint(self, old: str = "", new: str = "") -> str:
        folder = self.write(old, new)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            return importlib.import_module("flow").flow.fingerprint
        finally:
            sys.path.remove(str(folder))
            for name in ("flow", "helper", "tools", "tools.deep"):
                sys.modules.pop(name, None)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return other() + 1", "return other() + 2"),
        ("def other(): return 2", "def other(): return 20"),
        ("def in_a_dict(): return 3", "def in_a_dict(): return 30"),
        ("def in_a_list(): return 4", "def in_a_list(): return 40"),
        ("return 5", "return 50"),
        ("return 6", "return 60"),
        ("LIMIT = 8", "LIMIT = 80"),
        ("def inherited(self): return 9", "def inherited(self): return 90"),
        ("def called(self): return 10", "def called(self): return 100"),
        ("return 11", "return 110"),
        ("return 12", "return 120"),
        ("return 13", "return 130"),
        ('SIZES = ("a", "b")', 'SIZES = ("a", "c")'),
        ("y: int = 5) -> int:", "y: int = 5) -> int | None:"),
        ("y: int = 5", "y: int = 6"),
        ("y: int = 5", "y: float = 5"),
        ("x: int = 1, *", "x: int | None = 1, *"),
        ("x: int = 1, *", "x: int = 2, *"),
        ('mode: str = "fast"', 'mode: str = "slow"'),
        ('SMALL = "small"', 'SMALL = "s"'),
        ("pages: int = 1", "pages: int = 2"),
        ("pages: int = 1", "pages: int | None = 1"),
        ("rank: int = 1", "rank: int = 2"),
        ("rank: int = 1", "rank: int | str = 1"),
        ('note: str = "none"', 'note: str = "some"'),
        ('note: str = "none"', 'note: str | None = "none"'),
        ("self.number * 2", "self.number * 3"),
        ('"wrapped"', '"packed"'),
        ('"decorated"', '"changed"'),
        ('return "cached"', 'return "fresh"'),
    ],
)
def test_a_fix_in_every_part_of_the_code_is_noticed(project, old, new):
    assert project.fingerprint(old, new) != project.fingerprint()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def unused(): return 7", "def unused(): return 70"),
        ("def shared", "\n\n# moved\ndef shared"),
        ("CACHE = {}", "CACHE = {7: 7}"),
    ],
)
def test_what_the_handler_does_not_reach_changes_nothing(project, old, new):
    assert project.fingerprint(old, new) == project.fingerprint()


def test_it_is_the_same_in_every_process_however_the_program_is_run(project):
    folder = project.write()
    show = "print(flow.fingerprint)"
    programs = [
        ["-c", f"from flow import flow; {show}"],
        ["-c", f"import tools.extra, tools.deep, helper, json; from flow import flow; {show}"],
        ["-c", f"import flow as f; f.CACHE[1] = 1; f.SERVICE.x = 5; flow = f.flow; {show}"],
        ["-m", "main"],
        ["main.py"],
    ]
    (folder / "main.py").write_text(f"{FLOW}\n{show}\n")
    found = set()
    for seed, program in enumerate(programs):
        answer = subprocess.run(
            [sys.executable, *program],
            cwd=folder,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join([".", *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(answer.stdout.strip())

    assert len(found) == 1


def test_values_that_the_code_captured_count_and_odd_ones_do_no_harm(project):
    class Proxy:
        def __getattribute__(self, name: str) -> object:
            raise RuntimeError("not here")

    endless: list[object] = []
    endless.append(endless)
    sys.path.insert(0, str(project.write()))
    try:
        make = importlib.import_module("flow").make
        assert make(1).fingerprint == make(1).fingerprint != make(2).fingerprint
        assert make(Proxy()).fingerprint == make(Proxy()).fingerprint
        assert make((endless,)).fingerprint == make((endless,)).fingerprint
    finally:
        sys.path.pop(0)
        for name in ("flow", "helper", "tools", "tools.deep"):
            sys.modules.pop(name, None)


def test_modules_that_name_each_other_are_read_once(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text("import two\nSTEP = 1\n")
    (tmp_path / "two.py").write_text("import one\nSTEP = 2\n")
    (tmp_path / "both.py").write_text(
        "import one\nimport two\nfrom perdure import orchestration\n"
        "@orchestration\nasync def flow() -> int:\n    return one.two.one.STEP + two.STEP\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    assert len(importlib.import_module("both").flow.fingerprint) == 32


def test_code_that_was_made_without_a_module_is_read_as_well():
    def make(answer: int, **named: str):
        made = dict(named)
        exec(
            "from perdure import orchestration\n"
            f"def helper(): return {answer}\n"
            "@orchestration(name='flow')\n"
            "async def flow(): return helper()\n",
            made,
        )
        return made["flow"].fingerprint

    assert make(1) == make(1) != make(2)
    assert make(1, __name__="made") == make(1, __name__="made") != make(2, __name__="made")
