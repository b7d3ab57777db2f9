"""Time limits of activities, and code that does not keep to them."""

import asyncio
import threading
import time

import pytest

from integration.conditions import reached, until
from patience import HANG_SECONDS
from perdure import (
    ActivityFailed,
    OrchestrationFailed,
    Runtime,
    RuntimeOptions,
    Status,
    activity,
    is_cancelled,
    orchestration,
)


def calling(handler, times=1):
    @orchestration
    async def call() -> list[str]:
        outcomes = await asyncio.gather(*(handler(n) for n in range(times)), return_exceptions=True)
        return [str(each) for each in outcomes]

    return call


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        ({"history_events_max": 20}, "at most 20 (history_events_max)"),
        ({"history_bytes_max": 20_000}, "20000 (history_bytes_max)"),
    ],
)
async def test_a_history_past_its_bound_blocks_the_instance_at_once(
    make_provider, make_runtime, bound, told
):
    @activity
    async def text(n: int) -> str:
        return str(n) * 1_000

    @orchestration
    async def endless() -> None:
        for n in range(10, 100):
            await text(n)

    async with make_provider() as provider:
        async with make_runtime([endless, text], provider, **bound) as runtime:
            await runtime.start(endless, id="long")
            await reached(runtime, "long", Status.BLOCKED)
            block = (await runtime.describe("long")).block
            assert block.reason == "limit"
            assert told in block.message
            assert len(await runtime.history("long")) <= 20
        # With larger bounds it goes on from where it was.
        async with make_runtime([endless, text], provider) as runtime:
            await runtime.resume("long")
            assert await runtime.get("long").result(HANG_SECONDS) is None


@pytest.mark.parametrize("bound", [{"timeout": 2}, {"heartbeat_timeout": 2}])
async def test_a_limit_counts_from_when_a_thread_begins_the_code(bound):
    @activity(**bound)
    def work(n: int) -> int:
        time.sleep(0.5)
        return n

    flow = calling(work, times=10)
    options = RuntimeOptions(threads=2)
    async with Runtime("memory:", [flow, work], options=options) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == [str(n) for n in range(10)]


async def test_what_is_given_up_before_a_thread_is_free_never_begins(make_runtime):
    begun, may_end = [], threading.Event()

    @activity(timeout=0.2)
    def work(n: int) -> int:
        begun.append(n)
        may_end.wait(30)
        return n

    @orchestration
    async def flow() -> None:
        # The first to fail is the one that has begun; the others are given up with the flow.
        await asyncio.gather(*(work(n) for n in range(5)))

    try:
        async with make_runtime([flow, work], threads=1) as runtime:
            with pytest.raises(OrchestrationFailed):
                await (await runtime.start(flow)).result(HANG_SECONDS)

            async def is_idle():
                return not runtime.is_busy

            await until(is_idle)
            may_end.set()
    finally:
        may_end.set()
    assert len(begun) == 1


async def test_a_timeout_says_how_long_it_was(make_runtime):
    @activity(timeout=0.05)
    async def on_loop(n: int) -> None:
        await asyncio.Event().wait()

    @activity(timeout=0.05)
    def in_thread(n: int) -> None:
        while not is_cancelled():
            time.sleep(0.005)

    @orchestration
    async def flow() -> list[str]:
        told = []
        for handler in (on_loop, in_thread):
            try:
                await handler(0)
            except ActivityFailed as error:
                told.append(f"{error.type_name}: {error.message}")
        return told

    async with make_runtime([flow, on_loop, in_thread]) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == [
            "TimeoutError: no result within 0.05 s",
            "TimeoutError: no result within 0.05 s",
        ]


async def test_threads_that_are_taken_for_good_are_named_in_the_log(caplog):
    may_end = threading.Event()

    @activity(timeout=0.05)
    def hang(n: int) -> None:
        may_end.wait(60)

    flow = calling(hang, times=2)
    options = RuntimeOptions(threads=2, cancel_grace=60, drain_timeout=0)
    async with Runtime("memory:", [flow, hang], options=options) as runtime:
        try:
            await (await runtime.start(flow)).result(HANG_SECONDS)

            assert "activity 'hang' still runs in its thread" in caplog.text
            assert "2 of 2 threads are taken" in caplog.text
        finally:
            may_end.set()


async def test_a_thread_that_does_not_end_in_time_is_named_once(caplog):
    may_end = threading.Event()

    @activity(timeout=0.02)
    def hang(n: int) -> None:
        may_end.wait(60)

    flow = calling(hang, times=3)
    try:
        options = RuntimeOptions(cancel_grace=0.02, drain_timeout=0)
        async with Runtime("memory:", [flow, hang], options=options) as runtime:
            await (await runtime.start(flow)).result(HANG_SECONDS)

            async def is_named():
                return "still runs in its thread" in caplog.text

            await until(is_named)
            await asyncio.sleep(0.1)
            assert caplog.text.count("still runs in its thread") == 1
    finally:
        may_end.set()


@pytest.mark.parametrize("bound", [{"timeout": 0.05}, {"heartbeat_timeout": 0.05}, {}])
async def test_an_activity_that_swallows_its_cancellation_is_named_in_the_log(caplog, bound):
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @activity(**bound)
    async def deaf(n: int) -> None:
        has_begun.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    flow = calling(deaf)
    options = RuntimeOptions(cancel_grace=0.02, drain_timeout=1)
    async with Runtime("memory:", [flow, deaf], options=options) as runtime:
        handle = await runtime.start(flow)
        await asyncio.wait_for(has_begun.wait(), HANG_SECONDS)
        if not bound:
            await handle.cancel("enough")

        async def is_named():
            return "activity 'deaf' goes on" in caplog.text

        await until(is_named)
        may_end.set()


@activity
def exit_in_thread(n: int) -> int:
    raise SystemExit("bye")


@activity
async def exit_on_loop(n: int) -> int:
    raise SystemExit("bye")


@activity(heartbeat_timeout=5)
async def exit_while_beating(n: int) -> int:
    raise SystemExit("bye")


@activity(executor="process")
def exit_in_process(n: int) -> int:
    raise SystemExit("bye")


@pytest.mark.parametrize(
    "handler", [exit_in_thread, exit_on_loop, exit_while_beating, exit_in_process]
)
async def test_sys_exit_is_the_same_failure_wherever_the_code_runs(make_runtime, handler):
    @orchestration
    async def flow() -> str:
        try:
            await handler(0)
        except ActivityFailed as error:
            return f"{error.type_name}: {error.message}"
        return "went on"

    async with make_runtime([flow, handler]) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == "SystemExit: bye"


@pytest.mark.parametrize("kind", ["sync", "async", "beating"])
@pytest.mark.parametrize("error", [GeneratorExit, KeyboardInterrupt, SystemExit])
async def test_what_would_end_a_worker_only_fails_its_activity(make_runtime, kind, error):
    @activity
    def in_thread() -> None:
        raise error("gone")

    @activity(heartbeat_timeout=5 if kind == "beating" else None)
    async def on_loop() -> None:
        raise error("gone")

    @activity
    async def fine() -> str:
        return "fine"

    @orchestration
    async def flow() -> str:
        try:
            await (in_thread if kind == "sync" else on_loop)()
        except ActivityFailed as failed:
            return f"{failed.type_name} {await fine()}"
        return "went on"

    async with make_runtime([flow, in_thread, on_loop, fine]) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == f"{error.__name__} fine"
