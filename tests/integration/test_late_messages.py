"""What arrives too late: ordinary races are silent, and what nobody reads is told."""

import asyncio
import logging

from integration.conditions import until
from perdure import InMemoryProvider, Runtime, activity, orchestration, wait_for_event
from perdure.client.messages import envelope
from perdure.model import work


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
            await handle.result(20)
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


async def test_an_event_that_nobody_reads_is_told(caplog):
    provider = InMemoryProvider()
    async with Runtime(provider, [leaves_child, child, quick]) as runtime:
        await (await runtime.start(leaves_child, id="p")).result(10)
        await provider.enqueue_for_orchestrator(
            envelope(work.ExternalRaised(instance_id="p", name="approval"))
        )
        await drained(runtime)

    assert "'p' has ended: nobody reads approval" in caplog.text
