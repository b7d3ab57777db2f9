"""Unexpected errors around an activity: none may hold its work item for ever."""

import asyncio
import logging
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import pytest

from integration.conditions import waiting
from patience import HANG_SECONDS
from perdure import (
    InMemoryProvider,
    Retry,
    Runtime,
    RuntimeOptions,
    activity,
    orchestration,
)
from perdure.clock import ManualClock
from perdure.errors import OrchestrationFailed
from perdure.providers.sqlite.memory import MemoryStore

tries: list[int] = []
"""The attempts of an activity that have begun."""


class Defective(InMemoryProvider):
    """Raises what no provider may raise, the first time that an outcome is to be written."""

    error: BaseException | None = None

    async def ack_work_item(self, *args, **kwargs):
        error, self.error = self.error, None
        if error is not None:
            raise error
        await super().ack_work_item(*args, **kwargs)


@activity(retry=Retry(max_attempts=2, first_delay=0))
async def second_time() -> int:
    tries.append(len(tries) + 1)
    if len(tries) == 1:
        raise ValueError("not yet")
    return len(tries)


@orchestration
async def tries_again() -> int:
    return await second_time()


@orchestration
async def fails_once() -> int:
    raise ValueError("a bug")


@activity
async def once() -> int:
    tries.append(len(tries) + 1)
    return len(tries)


@orchestration
async def goes_away() -> int:
    return await once()


async def result_of(handle, clock):
    """Return the result of the instance; move the clock until it has ended."""
    ending = asyncio.ensure_future(handle.result())
    async with asyncio.timeout(HANG_SECONDS):
        while not ending.done():
            clock.advance(100)
            await asyncio.sleep(0.001)
    return await ending


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()])
@pytest.mark.parametrize("flow", [tries_again, goes_away])
async def test_an_activity_whose_outcome_cannot_be_written_is_delivered_again(flow, error, caplog):
    tries.clear()
    clock = ManualClock()
    provider = Defective(clock=clock)
    provider.error = error
    options = RuntimeOptions(always_replay=True)
    runtime = Runtime(provider, [flow, once, second_time], options=options, clock=clock)
    async with runtime:
        assert await result_of(await runtime.start(flow), clock) == 2
    assert "is delivered again" in caplog.text


class DefectiveTurns(InMemoryProvider):
    """Raises what no provider may raise, the first time that a turn is to be written."""

    is_defective = True

    async def ack_orchestration_item(self, *args, **kwargs):
        if self.is_defective:
            self.is_defective = False
            raise RuntimeError("a bug")
        await super().ack_orchestration_item(*args, **kwargs)


async def test_an_instance_whose_turn_cannot_be_written_does_not_wait_for_the_end_of_its_lock():
    tries.clear()
    clock = ManualClock()
    options = RuntimeOptions(orchestration_lock_timeout=1e6)
    provider = DefectiveTurns(clock=clock)
    async with Runtime(provider, [goes_away, once], options=options, clock=clock) as runtime:
        handle = await runtime.start(goes_away, delay=1)
        assert await result_of(handle, clock) == 1
        assert clock.now_ms() < 1_700_000_000_000 + 500_000_000
    assert not provider.is_defective


@dataclass
class Fragile:
    """Can be read in one of two deployments."""

    value: int
    is_refused: ClassVar[bool] = False

    def __post_init__(self):
        if self.is_refused:
            raise KeyError("no such currency")


@activity
async def takes(fragile: Fragile) -> int:
    return fragile.value


@orchestration
async def gives() -> int:
    fragile = object.__new__(Fragile)  # nothing checks it
    fragile.value = 1
    return await takes(fragile)


async def test_an_argument_that_its_own_class_refuses_fails_the_activity(monkeypatch):
    store = MemoryStore()
    async with Runtime(
        InMemoryProvider(store=store), [gives], options=RuntimeOptions(run_activities=False)
    ) as runtime:
        await runtime.start(gives, id="one")
        await waiting(runtime, "one")
    monkeypatch.setattr(Fragile, "is_refused", True)
    async with Runtime(InMemoryProvider(store=store), [gives, takes]) as runtime:
        with pytest.raises(OrchestrationFailed, match="no such currency"):
            await runtime.get("one").result(HANG_SECONDS)


@activity(retry=Retry(max_attempts=3, first_delay=0))
async def cancels_itself() -> int:
    tries.append(len(tries) + 1)
    asyncio.current_task().cancel()
    if len(tries) < 3:
        raise ValueError("not yet")
    return len(tries)


class Waiting(InMemoryProvider):
    """Lets others run while an outcome is written, and is interrupted then."""

    async def ack_work_item(self, *args, **kwargs):
        await asyncio.sleep(0)
        await super().ack_work_item(*args, **kwargs)


@orchestration
async def stubborn() -> int:
    return await cancels_itself()


async def test_an_activity_that_cancels_its_task_and_fails_is_tried_again(caplog):
    tries.clear()
    async with Runtime(Waiting(), [stubborn, cancels_itself]) as runtime:
        assert await (await runtime.start(stubborn)).result(HANG_SECONDS) == 3
    assert "is delivered again" not in caplog.text


class Garbled(InMemoryProvider):
    """Hands out something that is no work item, the first time."""

    is_garbled = True

    async def fetch_work_items(self, *args, **kwargs):
        found = await super().fetch_work_items(*args, **kwargs)
        if found and self.is_garbled:
            self.is_garbled = False
            return [msgspec.structs.replace(each, attempt_count=None) for each in found]
        return found


async def test_a_work_item_that_cannot_be_taken_up_is_delivered_again(caplog):
    tries.clear()
    clock = ManualClock()
    options = RuntimeOptions(activity_slots=1)  # so that none is handed over without a fetch
    async with Runtime(
        Garbled(clock=clock), [goes_away, once], options=options, clock=clock
    ) as runtime:
        for number in (1, 2):
            assert await result_of(await runtime.start(goes_away), clock) == number
    assert caplog.text.count("is delivered again") == 1


class Broken(logging.Handler):
    def emit(self, record):
        raise RuntimeError("the handler is broken")


async def test_a_log_handler_that_raises_repeats_no_work_and_leaves_nothing_running(
    make_every_store,
):
    tries.clear()
    log, handler = logging.getLogger("perdure"), Broken(logging.DEBUG)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        async with Runtime(make_every_store(), [fails_once, second_time, tries_again]) as runtime:
            failed, good = await runtime.start(fails_once), await runtime.start(tries_again)
            with pytest.raises(OrchestrationFailed):
                await failed.result(HANG_SECONDS)
            assert await good.result(HANG_SECONDS) == 2
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert tries == [1, 2]
    assert len(asyncio.all_tasks()) == 1
