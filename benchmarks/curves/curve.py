"""A measured curve: the cost of one unit of work against a size. Flat is what is wanted."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass(frozen=True)
class Scale:
    """The largest sizes. Short runs end at the first sizes."""

    history: tuple[int, ...] = (10, 100, 1_000, 5_000, 20_000)
    fan_out: tuple[int, ...] = (10, 100, 1_000, 10_000)
    stored: tuple[int, ...] = (1_000, 10_000, 100_000)
    delayed: int = 100_000
    workflows: tuple[int, ...] = (1_000, 5_000, 20_000)
    waiting: tuple[int, ...] = (1_000, 5_000, 20_000)
    workers: tuple[int, ...] = (1, 2, 4)
    worker_workflows: int = 4_000
    steady_seconds: float = 300.0


FULL = Scale(stored=(1_000, 10_000, 100_000, 1_000_000))
SHORT = Scale(
    history=(10, 100, 1_000),
    fan_out=(10, 100, 1_000),
    stored=(1_000, 10_000),
    delayed=10_000,
    workflows=(1_000, 2_000),
    waiting=(1_000, 2_000),
    workers=(1, 2),
    worker_workflows=500,
    steady_seconds=20.0,
)


@dataclass
class Curve:
    name: str
    title: str
    size: str
    """The name of the things that the sizes count."""
    unit: str
    """Of the cost of one unit of work."""
    points: list[tuple[float, float]] = field(default_factory=list)
    higher_is_better: bool = False

    def add(self, size: float, value: float) -> None:
        self.points.append((size, value))

    @property
    def growth(self) -> float:
        """Return the cost of one unit at the largest size, divided by that at its cheapest."""
        values = [value for _, value in self.points]
        if self.higher_is_better:
            return max(values) / values[-1]
        return values[-1] / min(values)


async def median_us(action: Callable[[], Awaitable[object]], times: int = 30) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        await action()
        taken.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(taken)


def rss_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6
