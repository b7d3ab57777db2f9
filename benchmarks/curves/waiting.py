"""Memory of instances that wait: while they are kept live, and after they have been let go."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from benchmarks.curves.curve import Curve, Scale, rss_mb
from benchmarks.curves.programs import HANDLERS, nothing, waiting
from perdure import Runtime, RuntimeOptions

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 500
IDLE_SECONDS = 1.0


async def measure(directory: Path, scale: Scale) -> list[Curve]:
    live = Curve("waiting", "one instance that waits, kept live", "instances", "KB")
    asleep = Curve("asleep", "one instance that waits, let go", "instances", "KB")
    for count in scale.waiting:
        options = RuntimeOptions(cached_instances=count + 10, idle_timeout=3600)
        live.add(count, await cost_kb(directory / f"live-{count}.db", count, options, pause=0))
        options = RuntimeOptions(idle_timeout=IDLE_SECONDS)
        path = directory / f"asleep-{count}.db"
        asleep.add(count, await cost_kb(path, count, options, pause=4 * IDLE_SECONDS))
    return [live, asleep]


async def cost_kb(path: Path, count: int, options: RuntimeOptions, *, pause: float) -> float:
    async with Runtime(path, HANDLERS, options=options) as runtime:
        await (await runtime.start(nothing)).result()
        gc.collect()
        before = rss_mb()
        for first in range(0, count, BATCH):
            ids = range(first, min(first + BATCH, count))
            await asyncio.gather(*[runtime.start(waiting, id=f"w-{number}") for number in ids])
        await asyncio.sleep(pause)
        gc.collect()
        return max(rss_mb() - before, 0.0) * 1e3 / count
