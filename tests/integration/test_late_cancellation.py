"""A cancellation that arrives in the turn that continues as new reaches the next execution."""

import asyncio

import pytest

from integration.conditions import until
from patience import HANG_SECONDS
from perdure import activity, continue_as_new, next_message, orchestration
from perdure.errors import OrchestrationCancelled

undone: list[int] = []


@activity
async def undo(number: int) -> None:
    undone.append(number)


@orchestration
async def actor(number: int) -> None:
    try:
        await next_message("in", str)
    except asyncio.CancelledError:
        await undo(number)
        raise
    continue_as_new(number + 1)


async def test_the_clean_up_runs_in_the_next_execution(make_runtime):
    undone.clear()
    async with make_runtime([actor, undo]) as runtime:
        handle = await runtime.start(actor, 1, id="a")
        await until(handle.history)
        await handle.pause()
        await handle.send_message("in", "one")
        await handle.cancel("enough")
        await handle.resume()

        with pytest.raises(OrchestrationCancelled, match="enough"):
            await handle.result(HANG_SECONDS)

    assert undone == [2]
