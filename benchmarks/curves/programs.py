"""The orchestrations that the curves run, through the public face."""

from __future__ import annotations

import asyncio
import time

from perdure import activity, orchestration, wait_for_event

moments: list[float] = []
"""The time of each ``timed_step`` of this process."""


@activity
async def step(i: int) -> int:
    return i


@activity
async def timed_step(i: int) -> int:
    moments.append(time.perf_counter())
    return i


@orchestration
async def timed_chain(n: int) -> int:
    result = 0
    for i in range(n):
        result = await timed_step(i)
    return result


@orchestration
async def fan(n: int) -> int:
    return len(await asyncio.gather(*[step(i) for i in range(n)]))


@orchestration
async def waiting() -> str:
    return await wait_for_event("go", str)


@orchestration
async def nothing() -> int:
    return 1


HANDLERS = [step, timed_step, timed_chain, fan, waiting, nothing]
