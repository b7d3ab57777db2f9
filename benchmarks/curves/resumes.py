"""Resuming in a fresh process against the length of the history: cost per event, and in all."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from benchmarks.curves.curve import Curve, Scale
from benchmarks.trial import Order, run_trial
from benchmarks.workloads import WORKLOADS


async def measure(directory: Path, scale: Scale) -> list[Curve]:
    each = Curve("resume", "resuming, for each event", "events", "µs")
    total = Curve("resume-total", "resuming, store opened to result", "events", "ms")
    for events in scale.history:
        order = Order(
            peer="perdure",
            python=Path(sys.executable),
            settings={"store": "sqlite", "durability": "full"},
            workload=WORKLOADS["w6"],
            parameters={"steps": events // 2},
            base=directory,
        )
        result = await asyncio.to_thread(run_trial, order)
        if "error" in result:
            raise RuntimeError(result["error"])
        each.add(events, result["signal_to_result_seconds"] / events * 1e6)
        total.add(events, result["value"] * 1e3)
    return [each, total]
