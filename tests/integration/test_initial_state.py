"""Replay starts from the state that the execution began with, in any store and any file."""

import asyncio

import pytest

from integration.conditions import until
from patience import HANG_SECONDS
from perdure import activity, continue_as_new, orchestration, state, wait_for_event
from perdure.authoring.definitions import Registry
from perdure.client.recorded import check_replay, read_recorded, recorded_history, recorded_in
from perdure.client.rerun import rerun_from_event
from perdure.codec import JSON
from perdure.testing.environment import assert_replays

paid: list[str] = []


@activity
async def pay(order: str) -> str:
    paid.append(order)
    return order


@orchestration
async def shop(round_: int) -> str:
    """The second execution pays, unless its state says that the first one did."""
    await asyncio.sleep(0)
    if state.get("paid", bool, False):
        return "was paid already"
    state["rounds"] = state.get("rounds", int, 0) + 1
    if round_ < 2:
        continue_as_new(round_ + 1)
    await wait_for_event("go", str)
    await pay("o")
    state["paid"] = True
    del state["rounds"]
    return "paid"


@orchestration
async def counter(left: int) -> int:
    """Rewrites its state in each execution, for as long as the test looks on."""
    state.clear()
    state["left"] = left
    state[f"k{left % 3}"] = [state["left"], len(state)]
    await asyncio.sleep(0)
    await pay("c")
    if left:
        continue_as_new(left - 1)
    return sum(1 for _ in state)


@orchestration
async def reader(left: int) -> int:
    """Decides by its state which steps it takes."""
    for _ in range(state.get("steps", int, 0)):
        await pay("r")
    state["steps"] = left % 4
    if left:
        continue_as_new(left - 1)
    return state["steps"]


async def ended_shop(runtime, instance_id):
    handle = await runtime.start(shop, 1, id=instance_id)
    await until(lambda: is_waiting(runtime, instance_id))
    await handle.raise_event("go", "x")
    assert await handle.result(HANG_SECONDS) == "paid"


async def is_waiting(runtime, instance_id):
    info = await runtime.provider.admin.get_instance_info(instance_id)
    return info.execution_id == 2 and len(await runtime.history(instance_id)) > 1


async def test_a_rerun_from_before_a_payment_pays(make_runtime):
    async with make_runtime([shop, pay]) as runtime:
        await ended_shop(runtime, "o-1")
        paid.clear()

        await rerun_from_event(runtime.provider, "o-1", "copy", 2, clock=runtime.clock)
        copy = runtime.get("copy")
        assert await copy.state("paid", bool) is None
        assert await copy.state("rounds", int) == 2
        await copy.raise_event("go", "x")

        assert await copy.result(HANG_SECONDS) == "paid"
        assert paid == ["o"]
        assert await copy.state("rounds", int) is None


async def test_an_ended_execution_replays_from_store_snapshot_and_history(make_runtime):
    async with make_runtime([shop, pay]) as runtime:
        await ended_shop(runtime, "o-1")
        info = await runtime.provider.admin.get_instance_info("o-1")
        stored = await read_recorded(runtime.provider, info)
        exported = recorded_in(await runtime.provider.admin.export_instance("o-1"))
        history = await runtime.history("o-1")

    for recorded in (stored, exported, recorded_history("o-1", history)):
        assert recorded.kv == {"rounds": "1"}
        finding = check_replay(recorded, Registry([shop, pay]), JSON)
        assert finding.verdict == "ok", finding.report
    assert_replays(history, shop, pay)


@pytest.mark.parametrize("flow", [counter, reader])
async def test_no_false_alarm_while_the_instance_runs(make_runtime, flow):
    registry = Registry([counter, reader, pay])
    async with make_runtime([counter, reader, pay]) as runtime:
        handle = await runtime.start(flow, 25, id="live")
        result = asyncio.ensure_future(handle.result(HANG_SECONDS))
        await until(handle.history)
        seen = set()
        while not result.done():
            info = await runtime.provider.admin.get_instance_info("live")
            await asyncio.sleep(0)  # the store goes on between the two reads
            recorded = await read_recorded(runtime.provider, info)
            finding = check_replay(recorded, registry, JSON)
            assert finding.verdict == "ok", finding.report
            seen.add(recorded.history[0].execution_id)
        await result
        assert len(seen) > 1


async def test_each_past_execution_replays_by_its_own_history(make_runtime):
    async with make_runtime([reader, pay]) as runtime:
        handle = await runtime.start(reader, 6, id="r")
        await handle.result(HANG_SECONDS)
        for execution_id in range(1, 8):
            assert_replays(await runtime.history("r", execution_id), reader, pay)
