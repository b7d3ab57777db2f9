"""Starting, fetching and listing against how many finished and delayed instances the store has."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from benchmarks.curves.curve import Curve, Scale, median_us
from benchmarks.curves.programs import HANDLERS, nothing
from perdure import Client, InstanceQuery, Runtime, Status

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 1_000
DAY_SECONDS = 86_400.0


async def measure(directory: Path, scale: Scale) -> list[Curve]:
    path = directory / "stored.db"
    curves = [
        Curve("run", "start and finish one instance", "stored instances", "µs"),
        Curve("fetch", "a fetch that finds nothing", "stored instances", "µs"),
        Curve("list", "a page of 100 instances", "stored instances", "µs"),
        Curve("list-failed", "a page of those that failed", "stored instances", "µs"),
        Curve("status", "the status of one instance", "stored instances", "µs"),
    ]
    async with Client(path) as client:
        delayed = [(f"delayed-{number}", ()) for number in range(scale.delayed)]
        await client.start_many(nothing, delayed, delay=DAY_SECONDS)
    stored = 0
    async with Runtime(path, HANDLERS) as runtime:
        for size in scale.stored:
            stored = await fill(runtime, stored, size)
            for curve, cost in zip(curves, await costs(runtime, size), strict=True):
                curve.add(size, cost)
    return curves


async def fill(runtime: Runtime, stored: int, size: int) -> int:
    while stored < size:
        ids = [f"stored-{stored + number}" for number in range(min(BATCH, size - stored))]
        handles = await asyncio.gather(*[runtime.start(nothing, id=one) for one in ids])
        assert all(await asyncio.gather(*[handle.result() for handle in handles]))
        stored += len(ids)
    return stored


async def costs(runtime: Runtime, size: int) -> list[float]:
    provider, failed = runtime.provider, InstanceQuery(statuses=frozenset({Status.FAILED}))

    async def run() -> None:
        await (await runtime.start(nothing)).result()

    return [
        await median_us(run),
        await median_us(lambda: provider.fetch_orchestration_item(1_000, 0, None, "nobody")),
        await median_us(runtime.admin.page),
        await median_us(lambda: runtime.admin.page(failed)),
        await median_us(lambda: runtime.describe(f"stored-{size // 2}")),
    ]
