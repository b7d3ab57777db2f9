"""Instances per second over minutes, with a fixed number in flight: it must not decay."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from benchmarks.curves.curve import Curve, Scale, rss_mb
from benchmarks.curves.programs import HANDLERS, fan
from perdure import Runtime

if TYPE_CHECKING:
    from pathlib import Path

IN_FLIGHT = 100
WIDTH = 5
WINDOWS = 10


async def measure(directory: Path, scale: Scale) -> list[Curve]:
    rate = Curve(
        "steady",
        f"5-step workflows, {IN_FLIGHT} in flight",
        "seconds",
        "workflows/s",
        higher_is_better=True,
    )
    memory = Curve("steady-memory", "memory during that run", "seconds", "MB")
    async with Runtime(directory / "steady.db", HANDLERS) as runtime:
        finished = 0
        stop = False

        async def client() -> None:
            nonlocal finished
            while not stop:
                assert await (await runtime.start(fan, WIDTH)).result() == WIDTH
                finished += 1

        clients = [asyncio.create_task(client()) for _ in range(IN_FLIGHT)]
        begin = time.perf_counter()
        for window in range(1, WINDOWS + 1):
            count, since = finished, time.perf_counter()
            await asyncio.sleep(begin + scale.steady_seconds * window / WINDOWS - since)
            now = time.perf_counter()
            rate.add(now - begin, (finished - count) / (now - since))
            memory.add(now - begin, rss_mb())
        stop = True
        await asyncio.gather(*clients)
    return [rate, memory]
