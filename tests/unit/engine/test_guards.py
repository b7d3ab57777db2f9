"""Real work inside an orchestration is refused at once, with the line and the way out."""

# Plain blocking calls are what is tested here.
# ruff: noqa: PTH102, PTH107, PTH123, PTH208, SIM115, PLW0108, PLW1510

import _thread
import asyncio
import logging
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import zoneinfo
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType
from typing import Any

import anyio
import pytest
from engine_driver import Driver

from perdure import activity, current, orchestration
from perdure.errors import ForbiddenInOrchestration
from perdure.model import events


@activity
def step(label: str) -> str:
    return label


def refused(act) -> str:
    @orchestration
    async def code() -> str:
        try:
            result = act()
            if asyncio.iscoroutine(result) or asyncio.isfuture(result):
                await result
        except ForbiddenInOrchestration as error:
            return str(error)
        return "was not refused"

    run = Driver(code)
    run.start()
    run.close()
    return run.result


@pytest.mark.parametrize(
    "act",
    [
        lambda: open(__file__),
        lambda: open("/tmp/x", "w"),
        lambda: os.listdir("."),
        lambda: os.remove("missing"),
        lambda: os.mkdir("missing"),
        lambda: socket.socket(),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: subprocess.run(["true"]),
        lambda: os.system("true"),
        *([lambda: os.fork()] if hasattr(os, "fork") else []),
        lambda: sqlite3.connect(":memory:"),
        lambda: time.sleep(0),
        lambda: threading.Thread(target=print).start(),
    ],
    ids=lambda act: act.__code__.co_names[-1],
)
def test_blocking_calls_are_refused_with_the_line(act):
    message = refused(act)

    assert "at test_guards.py:" in message
    assert "make it an activity" in message
    assert "(<" not in message, "an object inside of the library says nothing to the author"


@pytest.mark.parametrize(
    "act",
    [
        lambda: asyncio.to_thread(print),
        lambda: asyncio.open_connection("localhost", 1),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.get_running_loop().run_in_executor(None, print),
        lambda: asyncio.get_running_loop().add_reader(0, print),
        lambda: asyncio.get_running_loop().call_soon_threadsafe(print),
    ],
    ids=lambda act: act.__code__.co_names[-1],
)
def test_real_work_on_the_loop_is_refused_with_the_line(act):
    message = refused(act)

    assert "make it an activity" in message


def test_the_loop_cannot_be_driven_from_inside():
    for name in ("stop", "close", "run_forever"):
        message = refused(lambda name=name: getattr(asyncio.get_running_loop(), name)())

        assert "driven by its history" in message


def test_a_future_of_another_loop_is_refused():
    other = asyncio.new_event_loop()
    foreign = other.create_future()

    @orchestration
    async def code() -> None:
        await foreign

    run = Driver(code, is_checked=False)
    run.start()
    other.close()

    assert run.result.startswith("ForbiddenInOrchestration: the orchestration awaited something")
    assert "test_guards.py:" in run.result


def test_an_awaitable_that_is_not_asyncios_is_refused():
    class Foreign:
        def __await__(self):
            yield "something else"

    @orchestration
    async def code() -> None:
        await Foreign()

    run = Driver(code)
    run.start()

    assert run.result.startswith("ForbiddenInOrchestration: the orchestration awaited something")


def test_work_in_a_thread_pool_is_noticed():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        @orchestration
        async def code() -> None:
            await asyncio.wrap_future(pool.submit(int))

        run = Driver(code, is_checked=False)
        run.start()

    assert run.result.startswith("ForbiddenInOrchestration")


def test_importing_a_module_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "imported_in_an_orchestration.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)

    @orchestration
    async def code() -> int:
        import imported_in_an_orchestration

        return imported_in_an_orchestration.answer

    run = Driver(code)
    run.start()

    assert run.result == 42


def test_time_zones_logs_and_printing_are_allowed(capsys):
    @orchestration
    async def code() -> str:
        print("hello")
        return str(zoneinfo.ZoneInfo("Europe/Berlin"))

    run = Driver(code, is_checked=False)
    run.start()

    assert run.result == "Europe/Berlin"
    assert capsys.readouterr().out == "hello\n"


def test_a_log_handler_may_start_a_thread():
    class Sends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = threading.Thread(target=sent.append, args=(record.getMessage(),))
            thread.start()
            thread.join()

    @orchestration
    async def code() -> None:
        current().logger.warning("hello")

    sent: list[str] = []
    handler = Sends()
    logging.getLogger("perdure.orchestration").addHandler(handler)
    try:
        run = Driver(code, is_checked=False)
        run.start()
    finally:
        logging.getLogger("perdure.orchestration").removeHandler(handler)

    assert (run.result, sent) == (None, ["hello"])


def test_other_threads_are_not_disturbed(tmp_path):
    path = tmp_path / "file"
    problems: list[Exception] = []
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            try:
                path.write_text("x")
                time.sleep(0)
            except Exception as error:
                problems.append(error)

    @orchestration
    async def code() -> int:
        return sum([len(await step(str(n))) for n in range(200)])

    thread = threading.Thread(target=busy)
    thread.start()
    run = Driver(code, is_checked=False)
    run.start()
    while not run.execution.is_finished:
        run.turn(run.completed(run.execution.event_count, "x"))
    stop.set()
    thread.join()

    assert problems == []


def test_after_a_turn_everything_is_as_before():
    before = sys.get_asyncgen_hooks()

    @orchestration
    async def code() -> str:
        return await step("a")

    run = Driver(code)
    run.start()

    # Not compared with what they were before: another turn may have left its guards.
    assert isinstance(time.sleep, BuiltinFunctionType)
    starter = "start_joinable_thread" if sys.version_info >= (3, 13) else "start_new_thread"
    assert getattr(threading, f"_{starter}") is getattr(_thread, starter)
    assert sys.get_asyncgen_hooks() == before
    assert asyncio._get_running_loop() is None
    with open(__file__) as file:
        assert file.readline()


def test_the_end_of_a_turn_leaves_the_guards_to_a_turn_in_another_thread():
    @orchestration
    async def short() -> None: ...

    def act() -> None:
        pool.submit(lambda: Driver(short, is_checked=False).start()).result()
        time.sleep(0)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        assert refused(act).startswith("time.sleep")


def test_a_turn_inside_a_running_task_leaves_that_task_in_place():
    @orchestration
    async def code() -> str:
        return await step("a")

    async def host() -> bool:
        me = asyncio.current_task()
        loop = asyncio.get_running_loop()
        run = Driver(code)
        run.start()
        run.turn(run.completed("step", "x"))
        run.close()
        return me is asyncio.current_task() and loop is asyncio.get_running_loop()

    assert asyncio.run(host())


# --- libraries


def installed(source: str, package: str = "library") -> dict[str, Any]:
    """Return the globals of a module that lies in site-packages."""
    namespace: dict[str, Any] = {"__name__": package}
    exec(compile(source, f"/env/lib/site-packages/{package}/core.py", "exec"), namespace)
    return namespace


LIBRARY = """
import asyncio

def fetch():
    return open("/etc/hosts").read()

async def fetch_in_a_task():
    async def run():
        asyncio.get_running_loop().set_debug(True)
    async with asyncio.TaskGroup() as group:
        group.create_task(run())
"""


def test_a_library_may_make_a_future_directly():
    library = installed("import asyncio\ndef make():\n    return asyncio.Future()\n")

    @orchestration
    async def code() -> bool:
        return bool(library["make"]().done())

    run = Driver(code)
    run.start()

    assert run.result is False


def test_a_refusal_in_a_library_names_the_line_of_the_author():
    library = installed(LIBRARY)

    @orchestration
    async def code(kind: str) -> None:
        if kind == "call":
            library["fetch"]()  # first
        await library["fetch_in_a_task"]()  # second

    first = code.fn.__code__.co_firstlineno
    run = Driver(code, "call")
    run.start()
    assert f"at test_guards.py:{first + 3} inside" in run.result
    run = Driver(code, "task")
    run.start()
    assert f"loop.set_debug() at test_guards.py:{first + 4}:" in run.result


def test_a_refusal_in_a_package_of_the_author_that_is_installed_names_its_line():
    library = installed(LIBRARY)
    source = """
async def code() -> None:
    helper()

def helper():
    fetch()
"""
    mine = installed(source, "myapp")
    mine["fetch"] = library["fetch"]
    run = Driver(orchestration(mine["code"]))
    run.start()
    assert "at core.py:6 inside an orchestration" in run.result


def test_anyio_runs_on_the_loop_of_an_orchestration():
    @orchestration
    async def code() -> list[str]:
        found: list[str] = []

        async def one(label: str) -> None:
            found.append(await step(label))

        async with anyio.create_task_group() as group:
            group.start_soon(one, "a")
            group.start_soon(one, "b")
        with anyio.move_on_after(5):
            await anyio.sleep(10)
        return found

    run = Driver(code)
    run.start()
    run.turn(run.completed(2, "a"))
    run.turn(run.completed(3, "b"))
    run.turn(run.fired(run.open_ids(events.TimerCreated)[0]))
    assert run.result == ["a", "b"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda loop: loop.get_task_factory(),
        lambda loop: loop.get_exception_handler(),
        lambda loop: loop.get_debug() or None,
    ],
)
def test_questions_to_the_loop_are_answered(ask):
    @orchestration
    async def code() -> bool:
        return ask(asyncio.get_running_loop()) is None

    run = Driver(code)
    run.start()
    assert run.result is True
