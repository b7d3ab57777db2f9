"""Evicting a suspended execution: its code unwinds, nothing is heard of it, nothing is left."""

import asyncio
import collections.abc
import gc
import os
import subprocess
import sys
import types
import weakref

import pytest
from engine_driver import Driver, drivers

from perdure import activity, current, orchestration, set_custom_status, state


@activity
def step(label: str) -> str:
    return label


def test_finally_blocks_run_and_emit_nothing():
    log: list[str] = []

    @orchestration
    async def code() -> None:
        try:
            await step("a")
        finally:
            log.append("finally")
            step("b")
            state["k"] = 1
            log.append("to the end")

    run = Driver(code, is_checked=False)
    run.start()
    before = len(run.history)
    run.close()

    assert log == ["finally", "to the end"]
    assert len(run.history) == before
    assert run.execution._decisions.last_event_id == before


def test_clean_up_that_awaits_is_unwound_as_well():
    log: list[str] = []

    @orchestration
    async def code() -> None:
        async def branch() -> None:
            try:
                await asyncio.sleep(100)
            except BaseException:
                log.append("branch")
                await asyncio.sleep(0)
                raise

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(branch())
                group.create_task(step("b"))
                await step("a")
        finally:
            log.append("root")

    run = Driver(code, is_checked=False)
    run.start()
    run.close()

    assert sorted(log) == ["branch", "root"]


def test_code_that_swallows_everything_is_given_up():
    @orchestration
    async def code() -> None:
        for _ in range(20):
            try:
                await step("a")
            except BaseException:
                set_custom_status("still here")

    run = Driver(code, is_checked=False)
    run.start()
    run.close()

    assert run.kinds() == ["OrchestrationStarted", "ActivityScheduled"]


def test_a_task_that_never_began_leaves_no_warning():
    @orchestration
    async def code() -> str:
        async def branch() -> None:
            await step("never")

        asyncio.create_task(branch())  # noqa: RUF006
        return "done"

    run = Driver(code)
    run.start()
    run.close()
    gc.collect()

    assert run.result == "done"


def test_clean_up_inside_a_generator_is_unwound_however_often_it_awaits(monkeypatch):
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: lost.append(given.exc_value))
    log: list[str] = []

    async def careful(depth: int) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            log.append(f"clean up {depth}")
            if depth:
                await careful(depth - 1)

    @orchestration
    async def code() -> None:
        async def values() -> collections.abc.AsyncGenerator[int]:
            await careful(3)
            yield 1

        async for _ in values():
            pass

    run = Driver(code, is_checked=False)
    run.start()
    run.close()
    gc.collect()

    assert log == ["clean up 3", "clean up 2", "clean up 1", "clean up 0"]
    assert lost == []


def test_an_open_async_generator_is_closed():
    log: list[str] = []

    @orchestration
    async def code() -> str:
        async def numbers():
            try:
                while True:
                    yield await step("a")
            finally:
                log.append("closed")

        async for number in numbers():
            return await step(number)
        return "none"

    run = Driver(code, is_checked=False)
    run.start()
    run.turn(run.completed("step", "x"))

    assert log == []

    run.close()

    assert log == ["closed"]


def test_a_coroutine_of_another_kind_is_closed_in_its_own_way():
    closed: list[str] = []

    class Foreign(collections.abc.Coroutine):
        def __await__(self):
            yield

        def send(self, value):
            waiter = asyncio.get_running_loop().create_future()
            waiter._asyncio_future_blocking = True  # what awaiting it would do
            return waiter

        def throw(self, *error):
            raise error[0]

        def close(self):
            closed.append("yes")

    @orchestration
    async def code() -> None:
        asyncio.create_task(Foreign())  # noqa: RUF006
        await step("a")

    run = Driver(code, is_checked=False)
    run.start()
    run.close()

    assert closed == ["yes"]


def test_the_logger_is_silent_while_closing(caplog):
    @orchestration
    async def code() -> None:
        try:
            await step("a")
        finally:
            current().logger.error("evicted")

    run = Driver(code, is_checked=False)
    run.start()
    run.close()

    assert caplog.records == []


def test_closing_twice_and_closing_unstarted_is_harmless():
    @orchestration
    async def code() -> None:
        await step("a")

    run = Driver(code, is_checked=False)
    run.close()
    run.close()


def test_a_closed_execution_is_freed_at_once():
    class Big:
        pass

    references: list[weakref.ref[Big]] = []

    @orchestration
    async def code() -> None:
        big = Big()
        references.append(weakref.ref(big))
        await asyncio.gather(step("a"), asyncio.sleep(5))
        del big

    run = Driver(code, is_checked=False)
    run.start()
    gc.disable()
    try:
        run.close()
        del run
        assert references[0]() is None
    finally:
        gc.enable()


def test_code_that_closes_another_execution_goes_on_as_itself():
    @orchestration
    async def inner() -> None:
        await step("inner")

    @orchestration
    async def code() -> str:
        other = Driver(inner, is_checked=False)
        other.start()
        other.close()
        return await step(current().instance_id)

    run = Driver(code, is_checked=False)
    run.start()
    run.turn(run.completed("step", "done"))

    assert run.result == "done"


def test_generators_that_have_ended_are_dropped():
    async def numbers() -> collections.abc.AsyncGenerator[int, None]:
        yield 1
        yield 2

    @orchestration
    async def code() -> int:
        for _ in range(3):
            opened = [numbers() for _ in range(100)]
            started = [await anext(generator) for generator in opened]
            for generator in opened:
                await generator.aclose()
        return len(started) + len(await step("a"))

    run = Driver(code, is_checked=False)
    run.start()

    assert len(run.execution._recorder.loop._generators) <= 100
    run.turn(run.completed("step", "x"))
    assert run.result == 101


def test_a_lost_execution_is_not_heard_in_the_turn_of_another(monkeypatch):
    @orchestration
    async def losing() -> None:
        try:
            await step("lost")
        except GeneratorExit:
            state["lost"] = True
            raise

    def lose() -> None:
        lost = Driver(losing, is_checked=False)
        lost.start()
        lost.cycle = lost
        drivers.discard(lost)

    @orchestration
    async def code() -> int:
        lose()
        return len([[] for _ in range(10_000)])

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    run = Driver(code, is_checked=False)
    run.start()
    gc.collect()

    assert run.kinds() == ["OrchestrationStarted", "OrchestrationCompleted"]


def test_code_that_never_ends_is_kept_rather_than_dropped():
    swallowed = 0

    @orchestration
    async def code() -> None:
        nonlocal swallowed
        while True:
            try:
                await step("again")
            except BaseException:
                swallowed += 1
                state["swallowed"] = True

    run = Driver(code, is_checked=False)
    run.start()
    run.close()
    before = swallowed
    kinds = run.kinds()
    del run
    gc.collect()

    assert kinds == ["OrchestrationStarted", "ActivityScheduled"]
    assert swallowed == before, "the garbage collector ran the code"


def test_ten_thousand_evictions_leak_nothing():
    @orchestration
    async def code() -> None:
        try:
            async with asyncio.timeout(5):
                await step("a")
        finally:
            await step("undo")

    def cycle() -> int:
        run = Driver(code, is_checked=False)
        run.start()
        run.close()
        return len(run.history)

    cycle()
    gc.collect()
    before = len(gc.get_objects())
    lengths = {cycle() for _ in range(10_000)}
    gc.collect()

    assert lengths == {3}
    assert len(gc.get_objects()) - before < 500


KEPT = (asyncio.Future, types.CoroutineType, types.FrameType)


@pytest.mark.parametrize("end", ["evicted", "completed", "failed", "cancelled", "crashed"])
def test_a_closed_execution_leaves_no_cycles_to_the_collector(end):
    @orchestration
    async def code() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(step("a"))
            group.create_task(asyncio.sleep(5))
        await asyncio.gather(step("b"), step("c"))
        if end == "failed":
            raise ValueError
        if end == "crashed":
            raise SystemExit
        return await asyncio.wait_for(step("d"), 5)

    def cycle() -> None:
        run = Driver(code, is_checked=False)
        run.start()
        run.turn(run.completed(2, ""), run.fired(3))
        if end != "evicted":
            run.turn(run.completed("step", ""), run.completed(7, ""))
        if end == "completed":
            run.turn(run.completed("step", ""))
        if end == "cancelled":
            run.turn(run.cancel())
        assert run.execution.is_finished == (end != "evicted")
        run.close()

    cycle()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        cycle()
        gc.collect()
        ours = [o for o in gc.garbage if isinstance(o, KEPT) or "perdure" in type(o).__module__]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert ours == []


@pytest.mark.parametrize("is_collecting", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_a_turn_leaves_the_garbage_collector_as_it_was(is_collecting, fails):
    @orchestration
    async def code() -> None:
        assert not gc.isenabled()
        await asyncio.sleep(1)
        if fails:
            raise ValueError

    run = Driver(code)
    try:
        (gc.enable if is_collecting else gc.disable)()
        run.start()
        assert gc.isenabled() is is_collecting
        run.turn(run.fired())
        assert gc.isenabled() is is_collecting
        run.close()
        assert gc.isenabled() is is_collecting
    finally:
        gc.enable()


STUBBORN = """
from engine_driver import Driver
from perdure import activity, orchestration

@activity
def step() -> None: ...

@orchestration
async def code() -> None:
    while True:
        try:
            await step()
        except BaseException:
            pass

run = Driver(code, is_checked=False)
run.start()
run.close()
print("closed")
"""


def test_code_that_never_ends_does_not_keep_the_interpreter_from_ending():
    answer = subprocess.run(
        [sys.executable, "-c", STUBBORN],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert (answer.stdout, answer.stderr) == ("closed\n", "")
