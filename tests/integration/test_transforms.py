"""Payloads that a worker cannot unwrap: nothing fails, and another worker goes on."""

import asyncio

import pytest

from integration.conditions import reached, until, waiting
from patience import HANG_SECONDS
from perdure import (
    Client,
    Codec,
    Runtime,
    RuntimeOptions,
    Status,
    activity,
    next_message,
    orchestration,
    side_effect,
    state,
    wait_for_event,
)
from perdure.errors import CannotUnwrap
from perdure.model.events import ActivityScheduled
from perdure.model.failures import BlockReason


class Keyed:
    """Encrypts, as far as these tests are concerned."""

    name = "keyed"

    def __init__(self, key):
        self._key = key

    def wrap(self, data, context):
        return self._key + data

    def unwrap(self, data, context):
        if not data.startswith(self._key):
            raise ValueError("another key")
        return data.removeprefix(self._key)


RIGHT = Codec(Keyed(b"right"))
UNABLE = {"none": Codec(), "another key": Codec(Keyed(b"wrong"))}


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def plain(value: int) -> int:
    return await echo(value)


@orchestration
async def hears() -> int:
    return await wait_for_event("go", int)


@orchestration
async def hears_late() -> int:
    await wait_for_event("first", int)
    try:
        return await wait_for_event("go", int)
    except TypeError:
        return -1


@orchestration
async def reads() -> int:
    return await next_message("go", int)


@orchestration
async def remembers() -> int:
    state["value"] = 4
    recorded = side_effect(lambda: 4, int)
    await wait_for_event("first", int)
    assert recorded == state["value"]
    return state["value"]


@orchestration
async def catches() -> int:
    """Asks for the same again when it is replayed, and catches every exception."""
    await wait_for_event("first", int)
    try:
        return await echo(4) + await plain(0)
    except Exception:
        return -1


HANDLERS = [catches, plain, hears, hears_late, reads, remembers, echo]


async def send(client, flow):
    if flow is reads:
        await client.send_message("x", "go", 4)
    else:
        await client.raise_event("x", "go", 4)
        if flow is not hears:
            await client.raise_event("x", "first", 4)


@pytest.mark.parametrize("unable", UNABLE)
@pytest.mark.parametrize("flow", [hears, hears_late, reads, remembers])
async def test_what_cannot_be_unwrapped_blocks_and_is_intact(tmp_path, flow, unable):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS, codec=RIGHT if flow is remembers else Codec()) as first:
        await first.start(flow, id="x")
        await waiting(first, "x")
    async with Client(store, codec=RIGHT) as client:
        await send(client, flow)
    async with Runtime(store, HANDLERS, codec=UNABLE[unable]) as second:
        await reached(second, "x", Status.BLOCKED)
        block = (await second.describe("x", waits=False)).block
        assert block is not None
        assert block.reason is BlockReason.UNDECODABLE
        assert "keyed" in block.message
    async with Runtime(store, HANDLERS, codec=RIGHT) as third:
        await third.resume("x")
        assert await third.get("x", flow).result(HANG_SECONDS) == 4


@pytest.mark.parametrize("unable", UNABLE)
async def test_requests_that_cannot_be_compared_are_no_error_of_the_code(tmp_path, unable):
    store = tmp_path / "store.db"
    flows_only = RuntimeOptions(run_activities=False)
    async with Runtime(store, HANDLERS) as first:
        await first.start(catches, id="x")
        await waiting(first, "x")
    async with Runtime(store, HANDLERS, codec=RIGHT, options=flows_only) as second:
        async with Client(store) as client:
            await client.raise_event("x", "first", 1)

        async def has_asked():
            return any(event.__class__ is ActivityScheduled for event in await second.history("x"))

        await until(has_asked)
    async with Runtime(store, HANDLERS, codec=UNABLE[unable], options=flows_only) as third:
        await third.raise_event("x", "more")
        await reached(third, "x", Status.BLOCKED)
        block = (await third.describe("x", waits=False)).block
        assert block is not None
        assert block.reason is BlockReason.UNDECODABLE
    async with Runtime(store, HANDLERS, codec=RIGHT) as fourth:
        await fourth.resume("x")
        assert await fourth.get("x", catches).result(HANG_SECONDS) == 4


async def test_a_worker_with_the_transform_goes_on_by_itself(tmp_path):
    store = tmp_path / "store.db"
    async with Client(store, codec=RIGHT) as client:
        await client.start(plain, 4, id="x")
        async with Runtime(store, HANDLERS) as unable:
            await reached(unable, "x", Status.BLOCKED)
        async with Runtime(store, HANDLERS, codec=RIGHT):
            assert await client.get("x", plain).result(HANG_SECONDS) == 4


@pytest.mark.parametrize("unable", UNABLE)
async def test_an_activity_is_left_to_a_worker_that_can_unwrap_its_arguments(
    tmp_path, unable, caplog
):
    store = tmp_path / "store.db"
    flows_only = RuntimeOptions(run_activities=False)
    async with Runtime(store, HANDLERS, codec=RIGHT, options=flows_only) as flows:
        handle = await flows.start(plain, 4, id="x")
        async with Runtime(store, HANDLERS, codec=UNABLE[unable]):

            async def is_refused():
                return "keyed" in caplog.text

            await until(is_refused)
        assert not (await flows.describe("x")).status.is_final
        left = await flows.provider.admin.list_work("x")
        assert [entry.attempt_count for entry in left] == [0]
        async with Runtime(store, HANDLERS, codec=RIGHT):
            assert await handle.result(HANG_SECONDS) == 4


async def test_a_client_without_the_transform_sees_everything_but_the_value(tmp_path):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS, codec=RIGHT) as runtime:
        assert await (await runtime.start(plain, 4, id="x")).result(HANG_SECONDS) == 4
    async with Client(store) as client:
        view = await client.describe("x")
        assert view.status is Status.COMPLETED
        assert view.output["$perdure"] == "keyed"
        assert [each.id async for each in client.admin.instances()] == ["x"]
        with pytest.raises(CannotUnwrap, match="keyed"):
            await asyncio.wait_for(client.get("x", plain).result(), HANG_SECONDS)
