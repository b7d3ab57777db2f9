"""A rerun from an event: the ids of its children, and the steps that were open."""

import asyncio

from integration.conditions import until
from patience import HANG_SECONDS
from perdure import (
    Retry,
    Runtime,
    activity,
    activity_info,
    orchestration,
    wait_for_event,
)
from perdure.client.rerun import fresh_id, rerun_from_event


@orchestration
async def part() -> str:
    return await wait_for_event("go", str)


@orchestration
async def order() -> list[str]:
    own = part.options(id="order-1/stock")
    of_another_order = part.options(id="order-10/stock")
    return list(await asyncio.gather(own(), of_another_order(), part()))


def child_ids(history):
    return {event.child_instance_id for event in history if hasattr(event, "child_instance_id")}


async def test_only_ids_made_of_the_id_of_the_parent_are_renamed():
    async with Runtime("memory:", [order, part]) as runtime:
        handle = await runtime.start(order, id="order-1")

        async def has_begun():
            return len(child_ids(await handle.history())) == 3

        await until(has_begun)
        await rerun_from_event(runtime.provider, "order-1", "copy", 2, clock=runtime.clock)

        renamed = child_ids(await runtime.history("copy"))

    automatic = {each for each in renamed if each.startswith("copy::")}
    assert len(automatic) == 1
    assert renamed - automatic == {"copy/stock", "order-10/stock"}


@orchestration
async def outer() -> str:
    return await part()


async def test_a_child_of_an_instance_with_a_long_id_gets_an_id_of_its_own():
    async with Runtime("memory:", [outer, part]) as runtime:
        long_id = "o" * 250
        handle = await runtime.start(outer, id=long_id)

        async def waits():
            return len((await handle.describe()).waiting_for) == 1

        await until(waits)
        new_id = fresh_id(long_id)
        await rerun_from_event(runtime.provider, long_id, new_id, 2, clock=runtime.clock)
        (old_child,) = child_ids(await handle.history())
        (new_child,) = child_ids(await runtime.history(new_id))

        await until(lambda: has_begun(runtime, new_child))
        await runtime.raise_event(new_child, "go", "yes")

        assert old_child != new_child
        assert await runtime.get(new_id).result(HANG_SECONDS) == "yes"


KEYS = []


@activity
async def noted() -> None:
    KEYS.append(activity_info().idempotency_key)


@orchestration
async def noting() -> None:
    await noted()


async def test_the_same_rerun_of_a_purged_id_has_other_keys():
    KEYS.clear()
    async with Runtime("memory:", [noting, noted]) as runtime:
        await (await runtime.start(noting, id="order-1")).result(HANG_SECONDS)
        for _ in range(2):
            await rerun_from_event(runtime.provider, "order-1", "copy", 1, clock=runtime.clock)
            await runtime.get("copy").result(HANG_SECONDS)
            await runtime.admin.delete("copy")

    assert len(set(KEYS)) == 3


RUNS = []


@activity(retry=Retry(3))
async def slow(label: str) -> str:
    RUNS.append((activity_info().instance_id, label, activity_info().attempt))
    while len(RUNS) < 2:  # noqa: ASYNC110 - the original waits for its copy
        await asyncio.sleep(0.005)
    return label


@orchestration
async def at_work() -> list[str]:
    nap = asyncio.create_task(asyncio.sleep(0.05))
    words = [await wait_for_event("go", str), await slow("a")]
    await nap
    return words


async def test_a_copy_does_again_what_was_open():
    """An activity and a timer that the code waited for at the event are part of the copy."""
    RUNS.clear()
    async with Runtime("memory:", [at_work, slow]) as runtime:
        handle = await runtime.start(at_work, id="order-1")
        await handle.raise_event("go", "yes")

        async def runs():
            return bool(RUNS)

        await until(runs)
        scheduled = next(
            event.event_id
            for event in await handle.history()
            if type(event).__name__ == "ActivityScheduled"
        )
        copied = await rerun_from_event(
            runtime.provider, "order-1", "copy", scheduled, clock=runtime.clock
        )

        assert copied.events_kept == scheduled
        for instance_id in ("order-1", "copy"):
            assert await runtime.get(instance_id).result(HANG_SECONDS) == ["yes", "a"]
    assert RUNS == [("order-1", "a", 1), ("copy", "a", 1)]


async def has_begun(runtime, instance_id):
    return bool(await runtime.provider.read(instance_id))
