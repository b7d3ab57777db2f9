"""CPython 3.11 and 3.12 find attributes fast only in objects with fewer than 30 of them."""

import asyncio
import gc

from perdure import InMemoryProvider, Runtime, activity, orchestration

ATTRIBUTES_MAX = 29


@activity
async def step(number: int) -> int:
    return number


@orchestration
async def flow() -> int:
    return await step(1)


def objects_of_perdure():
    objects = [
        each for each in gc.get_objects() if str(type(each).__module__).startswith("perdure.")
    ]
    return [each for each in objects if not isinstance(each, type) and hasattr(each, "__dict__")]


def test_no_object_of_a_worker_has_so_many_attributes_that_all_of_them_are_slow():
    async def count():
        async with Runtime(InMemoryProvider(), [step, flow]) as runtime:
            assert await (await runtime.start(flow)).result() == 1
            return {type(each).__qualname__: len(vars(each)) for each in objects_of_perdure()}

    counts = asyncio.run(count())
    assert "ActivityDispatcher" in counts
    assert {name: number for name, number in counts.items() if number > ATTRIBUTES_MAX} == {}
