"""Calls of child processes: when their time counts, and what is left when they are given up."""

import asyncio
import gc
import os
import sys
import warnings
from pathlib import Path

import pytest

from integration import slow_import
from integration.conditions import until
from integration.slow_activities import whoami
from perdure.authoring.context import ActivityInfo
from perdure.runtime import executors
from perdure.runtime.executors import ProcessPool

MOMENTS = range(8)
"""Passes of the event loop between the call and its cancellation; its process starts in these."""

INFO = ActivityInfo(
    instance_id="i",
    execution_id=1,
    orchestration_name="flow",
    orchestration_version="1.0.0",
    activity_name="whoami",
    activity_id=2,
    attempt=1,
)


def children():
    """The processes that this one has started and not seen the end of."""
    listed = (path.name for path in Path("/proc").iterdir() if path.name.isdecimal())
    return {each for each in listed if parent_of(each) == os.getpid()}


def parent_of(process_id):
    try:
        stat = Path("/proc", process_id, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])


def descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize("passes", MOMENTS)
def test_a_call_that_is_given_up_while_its_process_starts_leaves_nothing(passes):
    async def scenario():
        pool = ProcessPool(1)
        before = children()
        call = asyncio.ensure_future(pool.run(whoami, ([1],), {}, INFO))
        for _ in range(passes):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        assert children() - before == set()

    gc.collect()
    before = descriptors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(scenario())
        gc.collect()

    assert [str(each.message) for each in caught] == []
    assert descriptors() - before == set()


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """A pipe that children wait for while they import."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    monkeypatch.setenv("GATE", str(path))
    return path


def test_the_time_of_a_call_counts_from_the_moment_when_its_code_begins(gate):
    bounded, writers = [], []

    async def bound(call):
        bounded.append(call)
        return await call

    async def a_call_waits():
        try:
            writers.append(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    async def scenario():
        pool = ProcessPool(1)
        call = asyncio.ensure_future(pool.run(slow_import.work, (), {}, INFO, bound))
        await until(a_call_waits)
        assert bounded == []
        os.close(writers.pop())
        assert await call == "done"
        await pool.close()

    asyncio.run(scenario())

    assert len(bounded) == 1


def test_a_process_that_never_gets_to_the_code_is_given_up(gate, monkeypatch):
    monkeypatch.setattr(executors, "_BEGIN_SECONDS", 0.01)

    async def scenario():
        before = children()
        with pytest.raises(TimeoutError, match=r"did not begin work within 0.01 s"):
            await ProcessPool(1).run(slow_import.work, (), {}, INFO)
        assert children() - before == set()

    asyncio.run(scenario())
