"""Two workers under one name: nothing goes wrong but the list of workers, and the log says so."""

import asyncio

import pytest

from integration.conditions import until
from patience import HANG_SECONDS
from perdure import (
    Client,
    InMemoryProvider,
    Runtime,
    RuntimeOptions,
    activity,
    next_message,
    orchestration,
)
from perdure.providers.sqlite.memory import MemoryStore
from perdure.runtime import housekeeping


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def mailbox(total: int) -> list[int]:
    return [await echo(await next_message("q", int)) for _ in range(total)]


def runtimes(make_provider):
    options = RuntimeOptions(worker_id="shop")
    return [Runtime(make_provider(), [mailbox, echo], options=options) for _ in range(2)]


@pytest.fixture
def store():
    memory = MemoryStore()
    return lambda: InMemoryProvider(store=memory)


async def test_what_is_live_in_one_is_not_taken_by_the_other(store, caplog):
    one, other = runtimes(store)
    async with Client(store()) as client, one, other:
        handles = [await client.start(mailbox, 20, id=f"m-{n}") for n in range(5)]
        for number in range(20):
            for handle in handles:
                await handle.send_message("q", number)
            await asyncio.sleep(0)

        for handle in handles:
            assert await handle.result(HANG_SECONDS) == list(range(20))
    assert "blocked" not in caplog.text


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_namesake_is_warned_of(store, caplog, monkeypatch, is_alone):
    monkeypatch.setattr(housekeeping, "_ANNOUNCE_SECONDS", 0.02)
    one, other = runtimes(store)
    seen = set()

    async def is_known():
        seen.update(worker.seen_at_ms for worker in await one.admin.workers())
        return len(seen) > 5 if is_alone else "name 'shop' as well" in caplog.text

    async with one:
        await asyncio.sleep(0.01)  # they are told apart by when they began
        if is_alone:
            await until(is_known)
        else:
            async with other:
                await until(is_known)

    assert ("as well" in caplog.text) is not is_alone
