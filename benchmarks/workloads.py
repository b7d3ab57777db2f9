"""The seven workloads, each defined once for every engine. Results are checked, never trusted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.peers.peer import Peer

Mark = Callable[[str], None]
"""Asks the driver to note time, CPU and memory of this process tree at this moment."""
Phase = Callable[..., Awaitable[dict[str, Any]]]


class WrongResult(AssertionError):
    """The engine did not do the work; the measurement is worth nothing."""


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    unit: str
    higher_is_better: bool
    run: Phase
    parameters: Mapping[str, int]
    prepare: Phase | None = None
    """Runs first, in a process of its own that ends before ``run`` starts."""
    summary: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda _marks: {})
    """Returns the figures that the driver's notes at the marks add to the result."""


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise WrongResult(f"{what}: {found!r} instead of {wanted!r}")


async def one_step(peer: Peer, _mark: Mark, *, runs: int) -> dict[str, Any]:
    await peer.open(worker=True)
    milliseconds = []
    for number in range(-5, runs):  # the first five warm up
        begin = time.perf_counter()
        result = await peer.result(await peer.start("chain", f"w1-{number}", 1))
        if number >= 0:
            milliseconds.append((time.perf_counter() - begin) * 1000)
        expect(f"w1-{number}", result, "ok-0")
    milliseconds.sort()
    return {
        "value": milliseconds[runs // 2],
        "p95_ms": milliseconds[runs * 95 // 100],
        "p99_ms": milliseconds[runs * 99 // 100],
        "max_ms": milliseconds[-1],
    }


async def chain(peer: Peer, _mark: Mark, *, steps: int) -> dict[str, Any]:
    await peer.open(worker=True)
    await peer.result(await peer.start("chain", "warm", 1))
    begin = time.perf_counter()
    result = await peer.result(await peer.start("chain", "w2", steps))
    seconds = time.perf_counter() - begin
    expect("w2", result, f"ok-{steps - 1}")
    return {"value": steps / seconds, "seconds": seconds}


async def fan_out(peer: Peer, _mark: Mark, *, steps: int) -> dict[str, Any]:
    await peer.open(worker=True)
    await peer.result(await peer.start("fan", "warm", 5))
    begin = time.perf_counter()
    result = await peer.result(await peer.start("fan", "w3", steps))
    seconds = time.perf_counter() - begin
    expect("w3", result, steps)
    return {"value": steps / seconds, "seconds": seconds}


async def many(peer: Peer, mark: Mark, *, workflows: int, steps: int) -> dict[str, Any]:
    await peer.open(worker=True)
    await peer.result(await peer.start("fan", "warm", steps))
    ids = [f"w4-{number}" for number in range(workflows)]
    mark("before")
    begin = time.perf_counter()
    results = await peer.run_all("fan", ids, steps)
    seconds = time.perf_counter() - begin
    mark("after")
    expect("w4", results, [steps] * workflows)
    return {"value": workflows / seconds, "seconds": seconds}


async def starts(peer: Peer, _mark: Mark, *, workflows: int) -> dict[str, Any]:
    await peer.open(worker=False)
    ids = [f"w5-{number}" for number in range(workflows)]
    begin = time.perf_counter()
    await peer.start_all("chain", ids, 1)
    seconds = time.perf_counter() - begin
    expect("w5: workflows in the store", await peer.count(), workflows)
    return {"value": workflows / seconds, "seconds": seconds}


async def prepare_resume(peer: Peer, _mark: Mark, *, steps: int) -> dict[str, Any]:
    await peer.open(worker=True)
    begin = time.perf_counter()
    await peer.start("gate", "w6", steps)
    await peer.wait_ready("w6")
    return {"prepare_seconds": time.perf_counter() - begin}


async def resume(peer: Peer, _mark: Mark, *, steps: int) -> dict[str, Any]:
    begin = time.perf_counter()
    await peer.open(worker=True)
    opened = time.perf_counter()
    await peer.signal("w6")
    result = await peer.result(await peer.attach("w6"))
    end = time.perf_counter()
    expect("w6", result, f"ok-{steps}")
    return {
        "value": end - begin,
        "open_seconds": opened - begin,
        "signal_to_result_seconds": end - opened,
    }


async def idle(peer: Peer, mark: Mark, *, seconds: int) -> dict[str, Any]:
    await peer.open(worker=True)
    expect("w7", await peer.result(await peer.start("chain", "warm", 1)), "ok-0")
    await asyncio.sleep(3)
    mark("idle")
    await asyncio.sleep(seconds)
    mark("rested")
    return {}


def memory_of_many(marks: Mapping[str, Any]) -> dict[str, Any]:
    return {f"rss_{name}_mb": note["rss_mb"] for name, note in marks.items()}


def cost_of_idling(marks: Mapping[str, Any]) -> dict[str, Any]:
    begin, end = marks["idle"], marks["rested"]
    busy = end["cpu_seconds"] - begin["cpu_seconds"]
    return {"value": 100 * busy / (end["time"] - begin["time"]), "rss_mb": end["rss_mb"]}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w1", "one-step workflow, p50", "ms", False, one_step, {"runs": 200}),
        Workload("w2", "chain of 100 steps", "steps/s", True, chain, {"steps": 100}),
        Workload("w3", "fan-out of 1,000", "steps/s", True, fan_out, {"steps": 1000}),
        Workload(
            "w4",
            "1,000 workflows x 5 steps",
            "workflows/s",
            True,
            many,
            {"workflows": 1000, "steps": 5},
            summary=memory_of_many,
        ),
        Workload("w5", "starts, no worker", "starts/s", True, starts, {"workflows": 2000}),
        Workload(
            "w6", "resume after 1,000 steps", "s", False, resume, {"steps": 1000}, prepare_resume
        ),
        Workload("w7", "idle CPU", "%", False, idle, {"seconds": 20}, summary=cost_of_idling),
    )
}
