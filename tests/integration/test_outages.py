"""What a runtime does while its store is out: callers are told, and stopping comes to an end."""

import asyncio

import pytest

from integration.conditions import until
from perdure import InMemoryProvider, Runtime, orchestration
from perdure.clock import ManualClock
from perdure.errors import StoreFull, StoreUnavailable
from perdure.runtime.patience import START_PATIENCE_SECONDS


@orchestration
async def flow() -> str:
    return "done"


class Out(InMemoryProvider):
    """Takes no new instance while ``error`` is set."""

    error = None
    tries = 0

    async def start_orchestration_item(self, start, commit, lock_token, owner):
        self.tries += 1
        if self.error is not None:
            raise self.error
        return await super().start_orchestration_item(start, commit, lock_token, owner)


async def test_a_start_on_a_full_store_is_told_at_once():
    provider = Out()
    provider.error = StoreFull("start", "no space left")
    async with Runtime(provider, [flow]) as runtime, asyncio.timeout(10):
        with pytest.raises(StoreFull, match="no space left"):
            await runtime.start(flow, id="one")
        with pytest.raises(StoreFull, match="no space left"):
            await runtime.start_many(flow, [("two", ()), ("three", ())])

        provider.error = None
        assert await (await runtime.start(flow, id="one")).result(10) == "done"


async def test_a_start_waits_a_while_for_a_store_that_is_out_and_is_told_then():
    clock = ManualClock()
    provider = Out(clock=clock)
    provider.error = StoreUnavailable("start", "no route")
    async with Runtime(provider, [flow], clock=clock) as runtime, asyncio.timeout(10):
        # More than begin at once: those behind the others do not wait as long once more.
        starts = [asyncio.ensure_future(runtime.start(flow, id=f"s-{n}")) for n in range(500)]
        begun_ms = clock.now_ms()
        while not all(start.done() for start in starts):
            clock.advance(100)
            for _ in range(20):
                await asyncio.sleep(0)
        waited_ms = clock.now_ms() - begun_ms

        assert all(isinstance(start.exception(), StoreUnavailable) for start in starts)
        assert START_PATIENCE_SECONDS * 1000 <= waited_ms < START_PATIENCE_SECONDS * 2000
        assert not runtime.is_busy


async def test_a_start_succeeds_when_the_store_is_back_in_time():
    clock = ManualClock()
    provider = Out(clock=clock)
    provider.error = StoreUnavailable("start", "no route")
    async with Runtime(provider, [flow], clock=clock) as runtime, asyncio.timeout(10):
        start = asyncio.ensure_future(runtime.start(flow))

        async def was_repeated():
            clock.advance(100)
            return provider.tries >= 3

        await until(was_repeated)
        provider.error = None
        while not start.done():
            clock.advance(100)
            await asyncio.sleep(0)

        assert await start.result().result(10) == "done"
