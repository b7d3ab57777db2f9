"""The processes of ``benchmarks.processes``: a worker, a client that measures, one that only waits.

Run by path with the interpreter of the installation that is measured:
``python process_roles.py ROLE STORE [ARGUMENT]``.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

from perdure import Client, Runtime, activity, orchestration

SECONDS_MAX = 60.0


@activity
async def step(number: int) -> int:
    return number + 1


@orchestration
async def one_step(number: int) -> int:
    return await step(number)


@orchestration
async def chain(steps: int) -> int:
    number = 0
    for _ in range(steps):
        number = await step(number)
    return number


@orchestration
async def slow_chain(steps: int) -> int:
    for number in range(steps):
        await step(number)
        await asyncio.sleep(0.05)
    return steps


HANDLERS = [one_step, chain, slow_chain, step]


def say(**values: float) -> None:
    print(json.dumps(values), flush=True)


async def work(store: str) -> None:
    """Serve until killed, or asked to stop by SIGTERM."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with Runtime(store, HANDLERS):
        say(up=time.time())
        await stopped.wait()


async def wait(store: str, instance_id: str) -> None:
    """Wait for the result of an instance that never ends."""
    async with Client(store) as client:
        say(up=time.time())
        await client.get(instance_id).result()


async def latencies(store: str, pause: str) -> None:
    """Start one workflow after the other in another process, and wait for each."""
    seconds = float(pause)
    taken: list[float] = []
    async with Client(store) as client:
        for number in range(5 + (20 if seconds else 200)):
            await asyncio.sleep(seconds)
            begin = time.perf_counter()
            handle = await client.start(one_step, number)
            await handle.result(SECONDS_MAX)
            taken.append((time.perf_counter() - begin) * 1000)
    taken = sorted(taken[5:])
    say(p50=taken[len(taken) // 2], p95=taken[len(taken) * 95 // 100], worst=taken[-1])


async def alone(store: str) -> None:
    """Measure a busy process that is client and worker at once."""
    async with Runtime(store, [one_step, chain, step]) as runtime:
        taken: list[float] = []
        for number in range(300):
            begin = time.perf_counter()
            handle = await runtime.start(one_step, number)
            await handle.result(SECONDS_MAX)
            taken.append((time.perf_counter() - begin) * 1000)
        begin = time.perf_counter()
        handle = await runtime.start(chain, 1_000)
        await handle.result(SECONDS_MAX)
        seconds = time.perf_counter() - begin
    say(p50=sorted(taken)[150], steps=1_000 / seconds)


async def fill(store: str) -> None:
    """Start chains that go on for the whole measurement."""
    async with Client(store) as client:
        for number in range(5):
            await client.start(slow_chain, 10_000, id=f"slow-{number}")


ROLES = {
    "work": work,
    "wait": wait,
    "latencies": latencies,
    "alone": alone,
    "fill": fill,
}

if __name__ == "__main__":
    asyncio.run(ROLES[sys.argv[1]](*sys.argv[2:]))
