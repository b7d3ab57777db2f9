"""``if_exists="replace"`` and the trees that it meets."""

import pytest

from integration.conditions import waiting
from patience import HANG_SECONDS
from perdure import Runtime, orchestration, wait_for_event
from perdure.errors import NotARoot


@orchestration
async def child(number: int) -> int:
    return number + await wait_for_event("go", int)


@orchestration
async def parent(number: int) -> int:
    return await child.options(id="the-child")(number)


async def test_a_child_is_not_taken_from_a_parent_that_waits_for_it():
    async with Runtime("memory:", [child, parent]) as runtime:
        handle = await runtime.start(parent, 1)
        await waiting(runtime, "the-child")

        with pytest.raises(NotARoot, match="'the-child' is a sub-orchestration"):
            await runtime.start(child, 100, id="the-child", if_exists="replace")
        await runtime.raise_event("the-child", "go", 5)

        assert await handle.result(HANG_SECONDS) == 6
        replaced = await runtime.start(child, 100, id="the-child", if_exists="replace")
        await runtime.raise_event("the-child", "go", 5)
        assert await replaced.result(HANG_SECONDS) == 105
