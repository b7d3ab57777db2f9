"""Throughput of several worker processes on one Postgres server that is started for this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.curves.curve import Curve, Scale
from benchmarks.curves.workers import throughput
from benchmarks.server import postgres

if TYPE_CHECKING:
    from pathlib import Path


async def measure(directory: Path, scale: Scale) -> list[Curve]:  # noqa: ARG001
    curve = Curve(
        "postgres-workers",
        "5-step workflows, workers on Postgres",
        "processes",
        "workflows/s",
        higher_is_better=True,
    )
    for count in scale.workers:
        with postgres() as url:
            curve.add(count, await throughput(url, count, scale.worker_workflows))
    return [curve]
