"""A signal that breaks into the code is no outcome of the code, wherever it meets it."""

import asyncio
import gc
import signal
import sys
from functools import partial

import pytest

from patience import HANG_SECONDS
from perdure import (
    Runtime,
    RuntimeOptions,
    activity,
    orchestration,
    side_effect,
)

ARMED = []


def interrupt(kind):
    """Once: what comes next must be spared."""
    if ARMED:
        number = ARMED.pop()
        signal.raise_signal(number)
    return kind


@activity
async def on_loop() -> str:
    return interrupt("on the loop")


@activity(heartbeat_timeout=60)
async def beating() -> str:
    return interrupt("beating")


@orchestration
async def activity_on_loop() -> str:
    return await on_loop()


@orchestration
async def activity_beating() -> str:
    return await beating()


@orchestration
async def own_code() -> str:
    return interrupt("own code")


@orchestration
async def in_a_branch() -> str:
    async def branch() -> str:
        await asyncio.sleep(0)
        return interrupt("in a branch")

    return (await asyncio.gather(branch(), branch()))[0]


@orchestration
async def in_a_side_effect() -> str:
    return side_effect(lambda: interrupt("in a side effect"))


FLOWS = [activity_on_loop, activity_beating, own_code, in_a_branch, in_a_side_effect]
HANDLERS = [*FLOWS, on_loop, beating]


def ends(_number, _frame):
    sys.exit(3)


def interrupts(_reason, _number, _frame):
    """Raise, like the handler of asyncio.run() at the second Ctrl-C."""
    raise KeyboardInterrupt


class Exits:
    def __call__(self, _number, _frame):
        sys.exit(3)


WAYS = {
    "Ctrl-C": (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
    "a second Ctrl-C": (signal.SIGINT, partial(interrupts, "again"), KeyboardInterrupt),
    "a handler that exits": (signal.SIGTERM, ends, SystemExit),
    "an object that exits": (signal.SIGTERM, Exits(), SystemExit),
}


@pytest.fixture(params=WAYS)
def raised(request):
    """The exception that the signal raises."""
    number, handler, error = WAYS[request.param]
    before = signal.signal(number, handler)
    ARMED[:] = [number]
    yield error
    ARMED.clear()
    signal.signal(number, before)
    gc.collect()  # asyncio tells of the tasks that ended by it, which is for this test alone


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_what_a_signal_broke_into_goes_on_with_the_next_start(tmp_path, raised, flow):
    async def run():
        options = RuntimeOptions(drain_timeout=0)
        async with Runtime(tmp_path / "s.db", HANDLERS, options=options) as runtime:
            return await (await runtime.start(flow, id="x")).result(HANG_SECONDS)

    with pytest.raises(raised), asyncio.Runner() as runner:
        runner.get_loop().run_until_complete(run())

    assert not ARMED
    assert asyncio.run(run()) == flow.name.replace("_", " ").removeprefix("activity ").replace(
        "on loop", "on the loop"
    )


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_a_program_that_outlives_the_signal_finishes_its_work(raised, flow):
    loop = asyncio.new_event_loop()
    runtime = Runtime("memory:", HANDLERS)
    loop.run_until_complete(runtime.__aenter__())
    starting = loop.create_task(runtime.start(flow, id="x"))

    async def finish():
        return await (await starting).result(HANG_SECONDS)

    with pytest.raises(raised):
        loop.run_until_complete(finish())

    assert loop.run_until_complete(finish())
    loop.run_until_complete(runtime.__aexit__(None, None, None))
    loop.close()
