"""Activities in child processes: what they can do, how they end, and where their code is found."""

import asyncio
import errno
import os
import signal

import pytest

from integration import slow_activities
from integration.conditions import until
from patience import HANG_SECONDS
from perdure import OrchestrationFailed, orchestration


def calling(handler, *args):
    """An orchestration that calls one activity."""

    @orchestration
    async def call() -> object:
        return await handler(*args)

    return call


async def test_a_process_activity_runs_in_another_process(make_runtime):
    flow = calling(slow_activities.whoami, [1, 2])
    async with make_runtime([flow, slow_activities]) as runtime:
        result = await (await runtime.start(flow)).result(HANG_SECONDS)

        assert result["sum"] == 3
        assert result["pid"] != os.getpid()


async def test_no_process_is_left_when_the_runtime_has_stopped(make_runtime):
    flow = calling(slow_activities.whoami, [1, 2])
    async with make_runtime([flow, slow_activities]) as runtime:
        result = await (await runtime.start(flow)).result(HANG_SECONDS)

    with pytest.raises(ProcessLookupError):
        os.kill(result["pid"], 0)


async def test_an_activity_for_which_there_is_no_process_waits_for_one(
    make_environment, monkeypatch
):
    refused, spawn = [], asyncio.create_subprocess_exec

    async def spawn_later(*args, **named):
        if not refused:
            refused.append(args)
            raise OSError(errno.EMFILE, "Too many open files")
        return await spawn(*args, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_later)
    flow = calling(slow_activities.whoami, [1, 2])
    async with make_environment([flow, slow_activities]) as environment:
        result = await environment.run(flow)

    assert refused
    assert result["sum"] == 3


async def test_a_process_activity_knows_who_it_is(make_runtime):
    @orchestration
    async def flow() -> list[list[str]]:
        return [await slow_activities.knows_itself() for _ in range(2)]

    async with make_runtime([flow, slow_activities], processes=1) as runtime:
        first, second = await (await runtime.start(flow, id="i")).result(HANG_SECONDS)

    assert first[0].startswith("i/1/2/")
    assert first[1:4] == ["knows_itself", "1", "i"]
    assert [text.split()[0] for text in first[4:]] == [
        "heartbeat()",
        "last_heartbeat()",
        "is_cancelled()",
    ]
    assert all("process of its own" in text for text in first[4:])
    assert second[0] != first[0]


async def test_a_time_limit_really_stops_a_process(make_runtime):
    flow = calling(slow_activities.never_ends)
    async with make_runtime([flow, slow_activities]) as runtime:
        handle = await runtime.start(flow)

        with pytest.raises(OrchestrationFailed, match="TimeoutError"):
            await handle.result(HANG_SECONDS)


async def test_a_process_that_dies_fails_its_activity_only(make_runtime):
    flow = calling(slow_activities.dies)
    async with make_runtime([flow, slow_activities]) as runtime:
        handle = await runtime.start(flow)

        with pytest.raises(OrchestrationFailed, match="exit code 7"):
            await handle.result(HANG_SECONDS)


async def test_a_process_that_leaves_another_behind_fails_its_activity_at_once(make_runtime):
    flow = calling(slow_activities.dies_and_leaves_somebody)
    async with make_runtime([flow, slow_activities], processes=1) as runtime:
        with pytest.raises(OrchestrationFailed, match=r"ProcessDied.*exit code -9"):
            await (await runtime.start(flow)).result(HANG_SECONDS)


async def test_a_process_that_was_ended_while_idle_does_no_harm(make_runtime):
    @orchestration
    async def flow() -> int:
        return (await slow_activities.whoami([1]))["pid"]

    async with make_runtime([flow, slow_activities], processes=1) as runtime:
        first = await (await runtime.start(flow)).result(HANG_SECONDS)
        os.kill(first, signal.SIGKILL)
        await until(lambda: _has_ended(first))
        second = await (await runtime.start(flow)).result(HANG_SECONDS)
        assert len(runtime._running.activities.attempts._processes._all) == 1
    assert first != second


async def _has_ended(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


async def test_signals_to_the_whole_group_leave_it_to_the_worker_what_ends(make_runtime):
    flow = calling(slow_activities.is_told_to_end)
    async with make_runtime([flow, slow_activities], processes=1) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == "not my decision"


async def test_an_exception_of_a_process_keeps_its_type(make_runtime):
    flow = calling(slow_activities.complains)
    async with make_runtime([flow, slow_activities]) as runtime:
        handle = await runtime.start(flow)

        with pytest.raises(OrchestrationFailed, match="LookupError"):
            await handle.result(HANG_SECONDS)


async def test_a_declared_error_of_a_process_arrives_as_it_was_raised(make_runtime):
    @orchestration
    async def flow() -> int:
        try:
            await slow_activities.declines()
        except slow_activities.Declined as error:
            return error.code
        return 0

    async with make_runtime([flow, slow_activities]) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == 7
