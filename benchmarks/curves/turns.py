"""The cost of one more step against the length of the history before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.curves.curve import Curve, Scale
from benchmarks.curves.programs import HANDLERS, moments, timed_chain
from perdure import Runtime

if TYPE_CHECKING:
    from pathlib import Path

EVENTS_PER_STEP = 2


async def measure(directory: Path, scale: Scale) -> list[Curve]:
    curve = Curve("turns", "one more step of a live instance", "events in its history", "µs")
    steps = scale.history[-1] // EVENTS_PER_STEP
    async with Runtime(directory / "turns.db", HANDLERS) as runtime:
        handle = await runtime.start(timed_chain, steps)
        assert await handle.result() == steps - 1
    for events in scale.history:
        last = max(events // EVENTS_PER_STEP, 5) - 1
        first = max(last - max(last // 10, 4), 0)
        seconds = moments[last] - moments[first]
        curve.add(events, seconds / (last - first) * 1e6)
    return [curve]
