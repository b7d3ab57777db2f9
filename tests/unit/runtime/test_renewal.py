"""Lock renewals: their thread ends when it is stopped, and an error does not end them."""

import asyncio
import threading

import pytest

from patience import HANG_SECONDS
from perdure.clock import SystemClock
from perdure.errors import StoreBusy
from perdure.runtime.housekeeping import LockRenewalThread, LockRenewer


def renewal_thread(*, renewed):
    async def renew(tokens, lock_ms):
        renewed.set()
        return frozenset()

    renewer = LockRenewer(SystemClock(), 0.01, lambda: ["token"], renew, print, print)
    return LockRenewalThread([renewer], own_thread=True)


def running():
    return {thread for thread in threading.enumerate() if thread.name == "perdure-lock-renewal"}


def test_renewals_that_are_stopped_before_their_thread_runs_end():
    async def scenario():
        renewals = renewal_thread(renewed=threading.Event())
        renewals.abort()
        renewals.start()
        for thread in running() - before:
            await asyncio.to_thread(thread.join, 10)

    before = running()
    asyncio.run(scenario())
    assert running() == before


@pytest.mark.parametrize("again", ["abort", "stop"])
def test_renewals_may_be_stopped_again_after_they_have_ended(again):
    async def scenario():
        renewed = threading.Event()
        renewals = renewal_thread(renewed=renewed)
        renewals.start()
        assert await asyncio.to_thread(renewed.wait, 10)
        await renewals.stop()
        if again == "abort":
            renewals.abort()
        else:
            await renewals.stop()

    before = running()
    asyncio.run(scenario())
    assert running() == before


def test_a_renewal_that_raises_is_repeated(caplog):
    async def scenario():
        renewed = asyncio.Event()
        errors = [ValueError("not thought of"), StoreBusy("renew", "later")]

        async def renew(tokens, lock_ms):
            if errors:
                raise errors.pop(0)
            renewed.set()
            return frozenset()

        renewer = LockRenewer(SystemClock(), 0.01, lambda: ["token"], renew, print, print)
        task = asyncio.create_task(renewer.run())
        await asyncio.wait_for(renewed.wait(), HANG_SECONDS)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())
    assert "not thought of" in caplog.text
