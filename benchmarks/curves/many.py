"""Throughput and memory against how many workflows are submitted at once."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.curves.curve import Curve, Scale, rss_mb
from benchmarks.curves.programs import HANDLERS, fan
from perdure import Runtime

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 5


async def measure(directory: Path, scale: Scale) -> list[Curve]:
    rate = Curve(
        "many",
        "5-step workflows, submitted at once",
        "workflows",
        "workflows/s",
        higher_is_better=True,
    )
    resident = Curve("many-memory", "memory that the process keeps afterwards", "workflows", "MB")
    used = Curve("many-blocks", "blocks of memory in use afterwards", "workflows", "blocks")
    async with Runtime(directory / "many.db", HANDLERS) as runtime:
        await (await runtime.start(fan, WIDTH)).result()
        for count in scale.workflows:
            begin = time.perf_counter()
            handles = await asyncio.gather(*[runtime.start(fan, WIDTH) for _ in range(count)])
            results = [await handle.result() for handle in handles]
            rate.add(count, count / (time.perf_counter() - begin))
            assert results == [WIDTH] * count
            del handles, results
            gc.collect()
            resident.add(count, rss_mb())
            used.add(count, sys.getallocatedblocks())
    return [rate, resident, used]
