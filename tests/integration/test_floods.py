"""More messages than one turn may have: none is lost, each is heard once and in order."""

import asyncio

import pytest

from integration.conditions import until
from patience import HANG_SECONDS
from perdure import (
    Client,
    Status,
    activity,
    continue_as_new,
    next_message,
    orchestration,
    wait_for_event,
)
from perdure.errors import OrchestrationCancelled
from perdure.limits import BATCH_MESSAGES_MAX, UNREAD_MESSAGES_MAX

COUNT = 4 * BATCH_MESSAGES_MAX + 40


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def actor(heard: int = 0) -> int:
    """Continues as new every 40 messages, and fails if one is not the next."""
    for _ in range(40):
        number = int((await next_message("work", str)).partition(" ")[0])
        if number != heard:
            raise ValueError(f"expected {heard}, not {number}")
        heard += 1
        if heard == COUNT:
            return heard
    return continue_as_new(heard)


@orchestration
async def calling_actor(heard: int = 0) -> int:
    """Like ``actor``, with a step for each message."""
    for _ in range(40):
        number = await echo(int((await next_message("work", str)).partition(" ")[0]))
        if number != heard:
            raise ValueError(f"expected {heard}, not {number}")
        heard += 1
        if heard == COUNT:
            return heard
    return continue_as_new(heard)


@orchestration
async def deaf() -> int:
    """Reads no message before its step has ended."""
    await asyncio.sleep(3600)
    return 0


@orchestration
async def late_reader() -> list[int]:
    async with asyncio.TaskGroup() as group:
        group.create_task(quiet())
    return [int((await next_message("work", str)).partition(" ")[0]) for _ in range(COUNT)]


async def quiet() -> None:
    await asyncio.sleep(0.3)
    await echo(1)


@orchestration
async def greeting() -> str:
    return await wait_for_event("name", str)


def numbers(size=1):
    return [f"{number} {'x' * size}" for number in range(COUNT)]


async def send(client, instance_id, messages):
    for message in messages:
        await client.send_message(instance_id, "work", message)


@pytest.mark.parametrize("code", [actor, calling_actor], ids=lambda code: code.name)
async def test_an_actor_hears_a_flood_that_came_while_no_worker_ran(
    code, make_provider, make_runtime
):
    async with make_provider() as provider, Client(provider) as client:
        await client.start(code, id="a")
        await send(client, "a", numbers(1000))
        async with make_runtime([actor, calling_actor, echo], provider):
            assert await client.get("a").result(HANG_SECONDS) == COUNT
        first = await client.history("a", execution_id=1)
        assert len(first) < 4 * UNREAD_MESSAGES_MAX


async def test_a_flood_to_a_live_actor(make_runtime):
    async with make_runtime([actor, calling_actor, echo]) as runtime:
        handles = [await runtime.start(code, id=code.name) for code in (actor, calling_actor)]
        await asyncio.gather(*(send(runtime, each.id, numbers(1000)) for each in handles))
        for handle in handles:
            assert await handle.result(HANG_SECONDS) == COUNT


async def test_code_that_wants_no_message_yet_gets_all_of_them_later(make_runtime):
    async with make_runtime([late_reader, echo]) as runtime:
        handle = await runtime.start(late_reader, id="a")
        await send(runtime, "a", numbers())

        assert await handle.result(HANG_SECONDS) == list(range(COUNT))


async def test_held_mail_is_heard_once(make_runtime, caplog):
    """If heard mail came again with the next turn, the store would refuse that turn."""
    caplog.set_level("INFO", "perdure.runtime")
    gate = asyncio.Event()

    @activity
    async def opened() -> None:
        await gate.wait()
        gate.clear()

    @orchestration
    async def reader() -> list[int]:
        await opened()
        heard = [await next_message("work", int) for _ in range(UNREAD_MESSAGES_MAX + 2)]
        await opened()
        return [*heard, await next_message("work", int)]

    async with make_runtime([reader, opened]) as runtime:
        handle = await runtime.start(reader, id="a")
        await send(runtime, "a", range(UNREAD_MESSAGES_MAX + 2))
        await until(lambda: _is_settled(runtime, "a"))
        gate.set()
        await until(lambda: not gate.is_set())
        await send(runtime, "a", [UNREAD_MESSAGES_MAX + 2])
        gate.set()

        assert await handle.result(HANG_SECONDS) == list(range(UNREAD_MESSAGES_MAX + 3))
    assert "refused" not in caplog.text


async def _is_settled(runtime, instance_id):
    """Return True if the code has as much mail as it may have, and no turn is under way."""
    events = [type(event).__name__ for event in await runtime.history(instance_id)]
    return events.count("QueueEventDelivered") == UNREAD_MESSAGES_MAX and not (
        runtime._running.orchestrations.is_busy
    )


async def test_a_cancellation_overtakes_a_flood(make_provider, make_runtime):
    async with make_provider() as provider, Client(provider) as client:
        await client.start(deaf, id="a")
        async with make_runtime([deaf], provider):
            await until(lambda: _is_running(client))
            await send(client, "a", numbers())
            await client.cancel("a", "enough")

            with pytest.raises(OrchestrationCancelled):
                await client.get("a").result(HANG_SECONDS)
        events = [type(event).__name__ for event in await client.history("a")]
        assert events.count("QueueEventDelivered") <= UNREAD_MESSAGES_MAX


async def _is_running(client):
    return (await client.describe("a")).status is Status.RUNNING


async def test_mail_that_the_code_does_not_want_keeps_no_worker_busy(make_provider, make_runtime):
    async with make_provider() as provider, Client(provider) as client:
        await client.start(deaf, id="a")
        await send(client, "a", numbers())
        # The cache holds one instance: the second one evicts the first, mail or not.
        async with make_runtime([deaf, greeting], provider, cached_instances=1) as runtime:
            await until(lambda: _is_running(client))
            for number in range(5):
                handle = await client.start(greeting, id=f"g-{number}")
                await client.raise_event(handle.id, "name", "Ada")
                assert await handle.result(HANG_SECONDS) == "Ada"
            await until(lambda: _is_quiet(runtime))
        assert await provider.fetch_orchestration_item(1000, 0) is None
        messages = await provider.admin.list_messages("a", limit=COUNT)
        assert len(messages) == COUNT - UNREAD_MESSAGES_MAX + 1  # and the timer


async def _is_quiet(runtime):
    return not runtime.is_busy
