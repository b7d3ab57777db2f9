"""The cost of one step of a fan-out against its width."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.curves.curve import Curve, Scale
from benchmarks.curves.programs import HANDLERS, fan
from perdure import Runtime

if TYPE_CHECKING:
    from pathlib import Path


async def measure(directory: Path, scale: Scale) -> list[Curve]:
    curve = Curve("fan-out", "one step of a fan-out", "steps at once", "µs")
    async with Runtime(directory / "fan.db", HANDLERS) as runtime:
        await (await runtime.start(fan, 10)).result()
        for width in scale.fan_out:
            begin = time.perf_counter()
            handle = await runtime.start(fan, width)
            assert await handle.result() == width
            curve.add(width, (time.perf_counter() - begin) / width * 1e6)
    return [curve]
