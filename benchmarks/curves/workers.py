"""Throughput of several worker processes on one file; the submitting process runs no code."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.curves.curve import Curve, Scale
from benchmarks.curves.programs import HANDLERS, fan, nothing
from benchmarks.environments import ROOT, variables
from perdure import Client, Runtime

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 5


async def measure(directory: Path, scale: Scale) -> list[Curve]:
    curve = Curve(
        "workers",
        "5-step workflows, workers on one file",
        "processes",
        "workflows/s",
        higher_is_better=True,
    )
    for count in scale.workers:
        path = directory / f"workers-{count}.db"
        curve.add(count, await throughput(str(path), count, scale.worker_workflows))
    return [curve]


async def throughput(store: str, processes: int, workflows: int) -> float:
    async with Client(store) as client:
        command = [sys.executable, "-m", "benchmarks.curves.workers", store]
        running = [
            await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=variables())
            for _ in range(processes)
        ]
        try:
            await (await client.start(nothing)).result(timeout=60)
            while len(await client.admin.workers()) < processes:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            begin = time.perf_counter()
            ids = [(f"w-{number}", (WIDTH,)) for number in range(workflows)]
            handles = await client.start_many(fan, ids)
            for handle in handles:
                assert await handle.result(timeout=300) == WIDTH
            return workflows / (time.perf_counter() - begin)
        finally:
            for process in running:
                process.send_signal(signal.SIGTERM)
            for process in running:
                await process.wait()


async def serve(store: str) -> None:
    await Runtime(store, HANDLERS).serve()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
