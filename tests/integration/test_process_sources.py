"""Child processes find the functions of activities in modules and in the program itself."""

import functools
import re
import subprocess
import sys
import textwrap
import zipapp
from types import ModuleType

import pytest

from integration import slow_activities
from patience import HANG_SECONDS
from perdure import OrchestrationFailed, Runtime, RuntimeOptions, activity, orchestration
from perdure.errors import UsageError

PROGRAM = """
from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from perdure import Runtime, activity, orchestration

if __package__:
    from .rates import RATE
else:
    RATE = 2
WHAT = sys.argv[1]

@dataclass
class Item:
    price: int

@dataclass
class Order:
    item: Item

@activity(executor="process")
def raised(order: Order) -> Order:
    return Order(Item(order.item.price * RATE))

def rated(price: int) -> int:
    return price * RATE

@activity(executor="process")
def pooled(price: int, method: str) -> int:
    with ProcessPoolExecutor(1, get_context(method)) as pool:
        return pool.submit(rated, price).result()

@orchestration
async def flow() -> int:
    if WHAT in {"fork", "spawn"}:
        return await pooled(21, WHAT)
    return (await raised(Order(Item(21)))).item.price

async def main() -> None:
    async with Runtime("memory:", [flow, raised, pooled]) as runtime:
        print(await (await runtime.start(flow)).result(60))

def run() -> None:
    asyncio.run(main())

"""
GUARDED = PROGRAM + "if __name__ == '__main__':\n    run()\n"
IN_A_PROCESS = (
    PROGRAM
    + """
if __name__ == "__main__":
    process = get_context("spawn").Process(target=run)
    process.start()
    process.join()
"""
)


@pytest.fixture
def python(tmp_path):
    """A function that writes a program, and runs it with these arguments."""

    def run(program, path, *arguments):
        place = tmp_path / path
        place.parent.mkdir(exist_ok=True)
        place.write_text(program)
        (place.parent / "rates.py").write_text("RATE = 2")
        if place.parent.name == "app":
            zipapp.create_archive(place.parent, tmp_path / "app.pyz")
        ran = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        return ran.stdout + ran.stderr

    return run


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("shop.py", ["shop.py"]),
        ("shop.py", ["-m", "shop"]),
        ("shop/__main__.py", ["-m", "shop"]),
        ("shop/worker.py", ["-m", "shop.worker"]),
        ("app/__main__.py", ["app"]),
        ("app/__main__.py", ["app.pyz"]),
    ],
)
def test_activities_of_the_program_itself_are_found_however_it_is_run(python, path, arguments):
    assert python(GUARDED, path, *arguments, "order") == "42\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_functions_of_the_program_can_be_given_to_the_pools_of_an_activity(python, method):
    assert python(GUARDED, "shop.py", "shop.py", method) == "42\n"


def test_activities_of_a_program_are_found_by_a_worker_in_a_process_of_multiprocessing(python):
    assert python(IN_A_PROCESS, "shop.py", "shop.py", "order") == "42\n"


@pytest.mark.parametrize(
    ("path", "arguments"), [("shop.py", ["shop.py"]), ("shop/__main__.py", ["-m", "shop"])]
)
def test_a_program_that_is_not_guarded_is_told_so(python, path, arguments):
    said = python(f"{PROGRAM}\nrun()", path, *arguments, "order")

    assert "UsageError: a process activity is defined in this script" in said


@pytest.mark.parametrize("source", ["-c", "-"])
def test_activities_that_are_in_no_file_are_refused(source):
    typed = f"{PROGRAM}\nRuntime('memory:', [flow, raised])"
    ran = subprocess.run(
        [sys.executable, *(["-c", typed] if source == "-c" else [source]), "order"],
        input=typed,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )

    assert "UsageError: activity 'raised' runs in a process" in ran.stderr
    assert "put it into a module" in ran.stderr


def test_activities_that_are_in_the_guarded_part_of_a_program_are_refused(python):
    definition = PROGRAM[PROGRAM.index("@activity") : PROGRAM.index("def rated")]
    guarded = "if __name__ == '__main__':\n" + textwrap.indent(f"{definition}run()\n", "    ")
    said = python(PROGRAM.replace(definition, "") + guarded, "shop.py", "shop.py", "order")

    assert "UsageError: a child process does not find raised in" in said


def _inner():
    def inside() -> None: ...

    return inside


@functools.wraps(slow_activities.plain)
def _wrapper(number):
    return slow_activities.plain(number)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (_inner(), "_inner.<locals>.inside"),
        (lambda: None, "<lambda>"),
        (_wrapper, "integration.slow_activities.plain"),
    ],
)
async def test_activities_that_no_child_would_find_are_refused(function, name):
    work = activity(executor="process", name="work")(function)

    with pytest.raises(UsageError, match=rf"'work' runs in a process.*{re.escape(name)}, .*level"):
        Runtime("memory:", [work])


async def test_activities_that_others_run_need_not_be_found():
    work = activity(executor="process", name="work")(_inner())

    Runtime("memory:", [work], options=RuntimeOptions(run_activities=False))


async def test_a_plain_function_of_another_module_may_be_made_an_activity(make_environment):
    work = activity(executor="process", name="work")(slow_activities.plain)

    @orchestration
    async def flow() -> int:
        return await work(1)

    async with make_environment([flow, work]) as environment:
        assert await environment.run(flow) == 2


async def test_a_module_that_no_child_can_import_is_named(make_environment, monkeypatch):
    module = ModuleType("made_up")
    monkeypatch.setitem(sys.modules, "made_up", module)
    exec("def plain() -> None: ...", vars(module))
    work = activity(executor="process")(module.plain)

    @orchestration
    async def flow() -> None:
        await work()

    async with make_environment([flow, work]) as environment:
        with pytest.raises(OrchestrationFailed, match=r"UsageError.*cannot import made_up"):
            await environment.run(flow)


async def test_files_of_the_working_directory_do_not_hide_modules_from_a_child(
    make_environment, monkeypatch, tmp_path
):
    (tmp_path / "socket.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])

    @orchestration
    async def flow() -> int:
        return (await slow_activities.whoami([1, 2]))["sum"]

    async with make_environment([flow, slow_activities]) as environment:
        assert await environment.run(flow) == 3


@pytest.mark.parametrize("value", [None, "somewhere"])
async def test_what_an_activity_starts_has_the_python_path_of_the_worker(
    make_environment, monkeypatch, value
):
    if value is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", value)

    @orchestration
    async def flow() -> str | None:
        return await slow_activities.python_path()

    async with make_environment([flow, slow_activities]) as environment:
        assert await environment.run(flow) == value
