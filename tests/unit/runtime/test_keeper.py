"""The thread of the lock keepers ends whenever it is told to."""

import asyncio
import threading

import pytest

from perdure.clock import SystemClock
from perdure.errors import StoreBusy
from perdure.runtime.keeper import KeeperThread, LockKeeper


def keeper_thread(*, renewed):
    async def renew(tokens, lock_ms):
        renewed.set()
        return frozenset()

    keeper = LockKeeper(SystemClock(), 0.01, lambda: ["token"], renew, print)
    return KeeperThread([keeper], own_thread=True)


def running():
    return {thread for thread in threading.enumerate() if thread.name == "perdure-keeper"}


def test_a_keeper_that_is_stopped_before_its_thread_runs_ends():
    async def scenario():
        keeper = keeper_thread(renewed=threading.Event())
        keeper.abort()
        keeper.start()
        for thread in running() - before:
            await asyncio.to_thread(thread.join, 10)

    before = running()
    asyncio.run(scenario())
    assert running() == before


@pytest.mark.parametrize("again", ["abort", "stop"])
def test_a_keeper_may_be_stopped_again_after_it_has_ended(again):
    async def scenario():
        renewed = threading.Event()
        keeper = keeper_thread(renewed=renewed)
        keeper.start()
        assert await asyncio.to_thread(renewed.wait, 10)
        await keeper.stop()
        if again == "abort":
            keeper.abort()
        else:
            await keeper.stop()

    before = running()
    asyncio.run(scenario())
    assert running() == before


def test_a_renewal_that_breaks_is_repeated(caplog):
    async def scenario():
        renewed = asyncio.Event()
        errors = [ValueError("not thought of"), StoreBusy("renew", "later")]

        async def renew(tokens, lock_ms):
            if errors:
                raise errors.pop(0)
            renewed.set()
            return frozenset()

        keeper = LockKeeper(SystemClock(), 0.01, lambda: ["token"], renew, print)
        task = asyncio.create_task(keeper.keep())
        await asyncio.wait_for(renewed.wait(), 10)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())
    assert "not thought of" in caplog.text
