"""Activities that begin together share tasks, and nothing else."""

import asyncio
from contextvars import ContextVar

import pytest

from patience import HANG_SECONDS
from perdure import activity, orchestration

place: ContextVar[str] = ContextVar("place", default="nowhere")


@activity
async def visit(name: str, wait: bool) -> str:
    """Leaves something in its context, and tells what it found there."""
    found = place.get()
    place.set(name)
    async with asyncio.timeout(30):
        if wait:
            await asyncio.sleep(0.001)
    return f"{found} {place.get()}"


@orchestration
async def tour(waits: list[bool]) -> list[str]:
    return await asyncio.gather(*[visit(f"v{i}", wait) for i, wait in enumerate(waits)])


@pytest.mark.parametrize("waits", [[False] * 30, [True] * 30, [False, True, True] * 10])
async def test_activities_of_a_burst_share_no_context(make_runtime, waits):
    async with make_runtime([tour, visit]) as runtime:
        found = await (await runtime.start(tour, waits)).result(HANG_SECONDS)

        assert found == [f"nowhere v{i}" for i in range(30)]


async def test_an_activity_has_the_context_of_the_runtime_not_of_who_started_it(make_runtime):
    place.set("runtime")
    async with make_runtime([tour, visit]) as runtime:
        found: list[str] = []
        for caller in ("first", "second"):
            place.set(caller)
            found += await (await runtime.start(tour, [False, True])).result(HANG_SECONDS)

    assert found == ["runtime v0", "runtime v1"] * 2


begun: list[asyncio.Event] = []


@activity
async def meet(others: int) -> int:
    """Ends when all are here at once."""
    here = asyncio.Event()
    begun.append(here)
    if len(begun) == others:
        for one in begun:
            one.set()
    await here.wait()
    return len(begun)


@orchestration
async def meeting(others: int) -> int:
    return min(await asyncio.gather(*[meet(others) for _ in range(others)]))


async def test_activities_that_wait_for_each_other_run_at_once(make_runtime):
    begun.clear()
    async with make_runtime([meeting, meet]) as runtime:
        assert await (await runtime.start(meeting, 100)).result(HANG_SECONDS) == 100


@activity
async def cancel_oneself(how: str) -> str:
    if how == "raise":
        raise asyncio.CancelledError("my own")
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    if how == "wait":
        await asyncio.sleep(10)
    return "returned"


@activity
async def innocent() -> str:
    await asyncio.sleep(0)
    return "fine"


@orchestration
async def strange(how: str) -> list[str]:
    steps = [cancel_oneself(how), innocent(), innocent()]
    return [str(one) for one in await asyncio.gather(*steps, return_exceptions=True)]


@pytest.mark.parametrize(
    ("how", "told"), [("raise", "CancelledError"), ("wait", "CancelledError"), ("stay", "returned")]
)
async def test_an_activity_that_cancels_itself_harms_no_other(make_runtime, how, told):
    async with make_runtime([strange, cancel_oneself, innocent]) as runtime:
        first, *others = await (await runtime.start(strange, how)).result(HANG_SECONDS)

        assert told in first
        assert others == ["fine", "fine"]


progress: list[str] = []


@activity
async def note_end(n: int) -> int:
    progress.append(f"work {n}")
    return n


@orchestration
async def noted(n: int) -> int:
    progress.append(f"begin {n}")
    return await note_end(n)


async def test_in_a_burst_the_first_are_worked_on_before_the_last_begin(make_runtime):
    progress.clear()
    async with make_runtime([noted, note_end], always_replay=False) as runtime:
        handles = await asyncio.gather(*[runtime.start(noted, n) for n in range(500)])

        assert [await handle.result(HANG_SECONDS) for handle in handles] == list(range(500))
        assert progress.index("work 0") < progress.index("begin 499")
        assert progress.count("begin 499") == 1


async def test_a_start_that_was_given_up_before_it_began_starts_nothing(make_runtime):
    async with make_runtime([noted, note_end], always_replay=False) as runtime:
        starts = [asyncio.ensure_future(runtime.start(noted, n, id=f"s-{n}")) for n in range(400)]
        await asyncio.sleep(0)
        starts[399].cancel()
        handles = await asyncio.gather(*starts[:399])

        assert [await handle.result(HANG_SECONDS) for handle in handles] == list(range(399))
        assert await runtime.admin.count() == 399
