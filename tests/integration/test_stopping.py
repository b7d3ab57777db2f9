"""A worker that is told to stop ends, also if its store or its activities do not answer."""

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from integration.conditions import until
from integration.stuck_flows import calls
from patience import HANG_SECONDS
from perdure import (
    Client,
    FileSystemProvider,
    InMemoryProvider,
    Runtime,
    RuntimeOptions,
    SqliteProvider,
    activity,
    orchestration,
)
from perdure.errors import StoreClosed, StoreUnavailable, UsageError
from perdure.model import work
from perdure.runtime import runtime as runtime_module

HERE = Path(__file__).parent


IMPATIENT = """
import sys
from perdure.cli.main import main
from perdure.runtime import runtime, worker

runtime._RELEASE_SECONDS = runtime._CLOSE_SECONDS = 0.3
worker.RuntimeOptions.__init__.__kwdefaults__["cancel_grace"] = 0.3
sys.exit(main())
"""
"""The command line, with shorter limits for what does not end."""


@contextlib.contextmanager
def worker_process(store):
    """A worker that drains, cancels and closes for a moment only."""
    arguments = ["worker", "integration.stuck_flows", "--store", str(store), "--drain", "300ms"]
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *arguments],
        cwd=HERE.parent,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def begun_in(store, name, path):
    async with Client(store) as client:
        await client.start(calls, name, str(path))

    async def exists():
        return path.exists()

    await until(exists)


def ended(process):
    """Return what the process logged; fail if it does not end."""
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=HANG_SECONDS)[1]


@pytest.mark.parametrize("name", ["hangs", "deaf"])
async def test_a_worker_ends_although_an_activity_does_not(tmp_path, name):
    store = tmp_path / "s.db"
    with worker_process(store) as process:
        await begun_in(store, name, tmp_path / "begun")
        said = ended(process)

    assert process.returncode == 0
    assert f"still running, and abandoned: {name} (x1)" in said


async def test_a_worker_ends_although_an_activity_holds_the_store(tmp_path):
    store = tmp_path / "s.db"
    with worker_process(store) as process:
        await begun_in(store, "holds_store", tmp_path / "begun")
        said = ended(process)

    assert process.returncode == 0
    assert "the store did not close" in said


async def test_a_worker_ends_although_its_store_is_gone(tmp_path):
    store = tmp_path / "s.db"
    with worker_process(store) as process:
        await begun_in(store, "slow", tmp_path / "begun")
        for file in tmp_path.glob("s.db*"):
            if file.is_file():
                file.unlink()
        (tmp_path / "begun").unlink()
        said = ended(process)

    assert process.returncode in {0, 1}  # 1: it saw the loss before the signal, and says so
    assert "stopping as a crash would" in said
    assert "Traceback" not in said


class GoingOut(InMemoryProvider):
    """Answers nothing once it is out."""

    is_out = False

    def _check(self, operation):
        if self.is_out:
            raise StoreUnavailable(operation, "no route")

    async def ack_orchestration_item(self, lock_token, commit):
        self._check("ack_orchestration_item")
        return await super().ack_orchestration_item(lock_token, commit)

    async def ack_work_item(self, lock_token, completion=None, retry=None):
        self._check("ack_work_item")
        return await super().ack_work_item(lock_token, completion, retry)


@pytest.mark.parametrize("always_replay", [False, True])
async def test_a_runtime_stops_although_its_store_is_out(caplog, monkeypatch, always_replay):
    monkeypatch.setattr(runtime_module, "_RELEASE_SECONDS", 0.1)
    provider = GoingOut()
    begun, may_end = asyncio.Event(), asyncio.Event()

    @activity
    async def step() -> None:
        begun.set()
        await may_end.wait()

    @orchestration
    async def flow() -> str:
        await step()
        return "done"

    options = RuntimeOptions(drain_timeout=0.1, always_replay=always_replay)
    async with asyncio.timeout(HANG_SECONDS):
        async with Runtime(provider, [flow, step], options=options) as runtime:
            handle = await runtime.start(flow, id="one")
            waiter = asyncio.ensure_future(handle.result())
            await begun.wait()
            provider.is_out = True
            may_end.set()
        waiter.cancel()

    assert "stopping as a crash would" in caplog.text
    before = len(caplog.records)
    await asyncio.sleep(0.1)
    assert len(caplog.records) == before, "it goes on behind the scenes"


async def test_a_stopped_runtime_tells_which_threads_it_left_behind(caplog):
    caplog.set_level(logging.WARNING)
    begun, may_end = threading.Event(), threading.Event()

    @activity
    def hang() -> None:
        begun.set()
        may_end.wait(60)

    @orchestration
    async def flow() -> None:
        await hang()

    runtime = Runtime(
        "memory:", [flow, hang], options=RuntimeOptions(drain_timeout=0, cancel_grace=0.1)
    )
    try:
        async with runtime:
            await runtime.start(flow)
            await asyncio.to_thread(begun.wait, HANG_SECONDS)

        assert runtime.left_behind == ("hang",)
        assert "still running, and abandoned: hang (x1)" in caplog.text
    finally:
        may_end.set()


async def until_quiet(before):
    """Wait until no thread that began after ``before`` and no task of ours goes on."""

    async def is_quiet():
        threads = {t for t in threading.enumerate() if "perdure" in t.name} - before
        tasks = {task for task in asyncio.all_tasks() if "perdure" in task.get_name()}
        return not threads and not tasks

    await until(is_quiet)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "filesystem"])
@pytest.mark.parametrize("passes", [1, 2, 3, 5, 8, 13])
async def test_nothing_goes_on_after_a_stop_that_was_cancelled(tmp_path, kind, passes):
    urls = {"memory": "memory:", "sqlite": tmp_path / "s.db", "filesystem": f"file:{tmp_path}/s"}
    before = set(threading.enumerate())
    runtime = Runtime(urls[kind], [calls], options=RuntimeOptions(drain_timeout=5))
    await runtime.__aenter__()
    stop = asyncio.ensure_future(runtime.__aexit__(None, None, None))
    for _ in range(passes):
        await asyncio.sleep(0)
    stop.cancel()
    await asyncio.gather(stop, return_exceptions=True)

    await until_quiet(before)


@pytest.mark.parametrize("kind", ["sqlite", "filesystem"])
async def test_a_provider_that_is_opened_twice_at_once_is_opened_once(tmp_path, kind):
    make = {"sqlite": SqliteProvider, "filesystem": FileSystemProvider}[kind]
    before = set(threading.enumerate())
    provider = make(tmp_path / "store")
    await asyncio.gather(*(provider.open() for _ in range(4)))
    await provider.close()

    await until_quiet(before)


@pytest.mark.parametrize("kind", ["sqlite", "files"])
async def test_serving_ends_with_an_error_when_the_store_is_gone_for_good(tmp_path, kind):
    path = tmp_path / "store"
    provider = SqliteProvider(path) if kind == "sqlite" else FileSystemProvider(path)
    runtime = Runtime(provider, [calls], options=RuntimeOptions(poll_interval=0.1))
    serving = asyncio.create_task(runtime.serve())

    async def is_running():
        return runtime._running is not None

    await until(is_running)
    path.rename(tmp_path / "elsewhere")
    with contextlib.suppress(StoreClosed):
        await runtime.start(calls, "hangs", "")

    with pytest.raises(StoreClosed, match="removed or replaced"):
        await asyncio.wait_for(serving, HANG_SECONDS)


async def test_a_runtime_serves_a_second_time(tmp_path):
    runtime = Runtime(tmp_path / "s.db", [calls])

    async def is_running():
        return runtime._running is not None

    for _ in range(2):
        serving = asyncio.create_task(runtime.serve())
        await until(is_running)
        assert not serving.done()
        runtime._on_signal(signal.SIGTERM)
        await serving


async def test_serving_says_what_it_cannot_do(tmp_path):
    async with Runtime(tmp_path / "s.db", [calls]) as runtime:
        with pytest.raises(UsageError, match="leave out the async with"):
            await runtime.serve()

    def serve():
        with pytest.raises(UsageError, match="main thread"):
            asyncio.run(Runtime(tmp_path / "s.db", [calls]).serve())

    await asyncio.to_thread(serve)


async def test_nothing_of_a_runtime_goes_on_after_it_was_aborted():
    @activity
    async def hold() -> None:
        await asyncio.Event().wait()

    @orchestration
    async def flow() -> None:
        await hold()

    async with InMemoryProvider() as provider:
        before = asyncio.all_tasks()
        runtime = Runtime(provider, [flow, hold])
        async with runtime:
            await runtime.start(flow)
            await until(lambda: runtime.is_busy)
            runtime.abort()

            await until(lambda: asyncio.all_tasks() == before)


async def test_a_stop_does_not_wait_for_tasks_that_have_nothing_to_do():
    @activity
    async def quick() -> None: ...

    item = work.ActivityExecute(
        instance_id="gone", execution_id=1, activity_id=1, name="quick", input=msgspec.Raw(b"[]")
    )
    async with Runtime(InMemoryProvider(), [quick]) as runtime, asyncio.timeout(HANG_SECONDS):
        activities = runtime._running.activities
        scheduled = SimpleNamespace(event=SimpleNamespace(name="quick", session_id=None, tag=None))
        activities.run_claimed(item, activities.claim(scheduled))
        await activities.drain(3600)
        assert runtime.metrics_snapshot() == {"activity_success": 1}


class SlowCommits(InMemoryProvider):
    """Answers a commit only when it is let go."""

    def __init__(self):
        super().__init__()
        self.arrived, self.may_go = asyncio.Event(), asyncio.Event()

    async def _wait(self, commit):
        self.arrived.set()
        await self.may_go.wait()
        return await commit

    def start_orchestration_item(self, *args):
        return self._wait(super().start_orchestration_item(*args))

    def ack_orchestration_item(self, *args):
        return self._wait(super().ack_orchestration_item(*args))


@pytest.mark.parametrize("by", ["runtime", "client"])
async def test_a_runtime_that_stops_waits_for_the_commit_of_a_first_turn(by):
    @orchestration
    async def one() -> int:
        return 1

    provider = SlowCommits()
    runtime = await Runtime(provider, [one]).open()
    try:
        starter = runtime if by == "runtime" else Client(provider)
        starting = asyncio.create_task(starter.start(one, id="one"))
        await asyncio.wait_for(provider.arrived.wait(), HANG_SECONDS)
        assert runtime.is_busy
        closing = asyncio.create_task(runtime.close())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not closing.done()
    finally:
        provider.may_go.set()
        await asyncio.wait_for(asyncio.gather(starting, closing), HANG_SECONDS)
    assert not runtime.is_busy
