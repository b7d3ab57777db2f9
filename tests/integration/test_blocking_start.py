"""Starting instances from code without an event loop."""

import asyncio

import pytest

from patience import HANG_SECONDS
from perdure import (
    AlreadyExists,
    BlockingClient,
    Client,
    OrchestrationTerminated,
    Runtime,
    Status,
    next_message,
    orchestration,
    state,
    wait_for_event,
)
from perdure.errors import StoreClosed


@orchestration
async def double(number: int, plus: int = 0) -> int:
    return 2 * number + plus


def test_a_blocking_client_starts_as_its_client_does():
    with BlockingClient(Runtime("memory:", [double])) as portal:
        handle = portal.start(double, 21, id="d-1")
        again = portal.start(double, 5, id="d-1")
        other = portal.start(double, 5, 1, version="1.0.0", delay=0)

        assert handle.result(HANG_SECONDS) == again.result(HANG_SECONDS) == 42
        assert other.result(HANG_SECONDS) == portal.call(other.handle.result, HANG_SECONDS) == 11
        with pytest.raises(AlreadyExists):
            portal.start(double, 21, id="d-1", if_exists="fail")


@orchestration
async def talking() -> str:
    state["step"] = 1
    said = await next_message("inbox", str)
    return said + await wait_for_event("end", str)


def test_a_blocking_handle_has_the_verbs_of_a_handle():
    with BlockingClient(Runtime("memory:", [talking])) as portal:
        handle = portal.start(talking, id="t-1")
        portal.call(handle.handle.wait_for_state, "step", timeout=HANG_SECONDS)
        assert handle.state("step", int) == 1
        assert handle.describe().status is Status.RUNNING
        handle.pause()
        assert handle.describe(waits=False).status is Status.PAUSED
        handle.resume()
        handle.send_message("inbox", "a")
        handle.raise_event("end", "b")
        assert portal.get("t-1", talking).result(HANG_SECONDS) == "ab"

        other = portal.start(talking)
        other.terminate("enough")
        with pytest.raises(OrchestrationTerminated, match="enough"):
            other.result(HANG_SECONDS)
        assert repr(handle) == "<BlockingHandle 't-1'>"


def test_a_runtime_and_a_client_can_be_opened_and_closed_without_a_block():
    async def main():
        runtime = await Runtime("memory:", [double]).open()
        assert await (await runtime.start(double, 4)).result(HANG_SECONDS) == 8
        await runtime.close()
        await runtime.close()  # does nothing
        with pytest.raises(StoreClosed):
            await runtime.describe("x")

        client = Client("memory:")
        async with client.lifespan(object()):
            assert await client.admin.count() == 0
        with pytest.raises(StoreClosed):
            await client.admin.count()

    asyncio.run(main())
