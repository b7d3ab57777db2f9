"""Messages that arrive too late: ordinary races are silent, and an unread message is logged."""

import asyncio
import logging

import pytest

from integration.conditions import until, waiting
from patience import HANG_SECONDS
from perdure import (
    Client,
    FileSystemProvider,
    InMemoryProvider,
    Runtime,
    SqliteProvider,
    activity,
    continue_as_new,
    orchestration,
    wait_for_event,
)
from perdure.client.retry import retry
from perdure.clock import SystemClock
from perdure.model import work
from perdure.model.wire import envelope
from perdure.providers.sqlite.memory import MemoryStore


@activity
async def quick(n: int) -> int:
    return n


@orchestration
async def racing() -> int:
    total = 0
    for n in range(20):
        try:
            async with asyncio.timeout(0.002):  # due about when the activity ends
                total += await quick(n)
        except TimeoutError:
            continue
    return total


@orchestration
async def child() -> str:
    return await wait_for_event("never", str)


@orchestration
async def leaves_child() -> str:
    waiting = asyncio.ensure_future(child())
    await quick(1)
    waiting.cancel()
    return "done"


async def drained(runtime):
    async def is_empty():
        depth = (await runtime.admin.queue_depths()).orchestrator
        return not runtime.is_busy and depth.visible + depth.locked == 0

    await until(is_empty)


async def test_ordinary_races_leave_nothing_in_the_log(make_runtime, caplog):
    caplog.set_level(logging.INFO)
    async with make_runtime([racing, leaves_child, child, quick]) as runtime:
        handles = [await runtime.start(racing) for _ in range(5)]
        handles += [await runtime.start(leaves_child, id=f"p-{n}") for n in range(5)]
        for handle in handles:
            await handle.result(HANG_SECONDS)
        late = [
            work.TimerFired(instance_id="p-1", execution_id=1, timer_id=2, fire_at_ms=1),
            work.SubOrchCompleted(
                instance_id="p-2", execution_id=1, event_id=2, child_instance_id="x"
            ),
            work.CancelInstance(instance_id="p-3"),
        ]
        for item in late:
            await runtime.provider.enqueue_for_orchestrator(envelope(item))
        await drained(runtime)

    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_an_unread_event_is_logged(caplog):
    provider = InMemoryProvider()
    async with Runtime(provider, [leaves_child, child, quick]) as runtime:
        await (await runtime.start(leaves_child, id="p")).result(HANG_SECONDS)
        await provider.enqueue_for_orchestrator(
            envelope(work.ExternalRaised(instance_id="p", name="approval"))
        )
        await drained(runtime)

    assert "'p' has ended without reading 1 of approval" in caplog.text


class Shifted(SystemClock):
    """The machine's clock, set back or forward by ``ms``."""

    ms = 0

    def now_ms(self):
        return super().now_ms() + self.ms


@orchestration(name="relay", version="1.0.0")
async def relay() -> str:
    continue_as_new(version="2.0.0")


@orchestration(name="relay", version="2.0.0")
async def relay_on() -> str:
    return await wait_for_event("word", str)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "filesystem"])
@pytest.mark.parametrize("retried", [False, True])
async def test_what_comes_between_two_executions_is_kept_for_the_next(tmp_path, kind, retried):
    clock = Shifted()
    make = {
        "memory": lambda: InMemoryProvider(store=store),
        "sqlite": lambda: SqliteProvider(tmp_path / "s.db", clock=clock),
        "filesystem": lambda: FileSystemProvider(tmp_path / "s", clock=clock),
    }[kind]
    store = MemoryStore(clock)
    async with Runtime(make(), [relay_on if retried else relay], clock=clock) as runtime:
        await runtime.start(relay, id="r")
        if retried:
            await waiting(runtime, "r")
            await runtime.terminate("r")
    async with Client(make(), clock=clock) as client:
        if retried:
            await retry(client.provider, "r", clock)
        # The start of the next execution lies in the queue. The clock is set back, so that it is
        # not visible, but what comes now is.
        clock.ms = -700
        await client.raise_event("r", "word", "heard")
    async with Runtime(make(), [relay_on], clock=clock) as runtime:
        assert await runtime.get("r").result(HANG_SECONDS) == "heard"
