"""Measure a turn. Prints JSON: us a turn on a live execution, replay events/s, fan-out."""

from __future__ import annotations

import asyncio
import json
import platform
import statistics
import sys
import time
from typing import Any

import msgspec

from perdure import activity, orchestration
from perdure.codec import JSON
from perdure.engine.execution import Execution
from perdure.model import events, wire, work

ROUNDS = 5


@activity
def step(number: int) -> int:
    return number


@orchestration
async def chain(length: int) -> int:
    total = 0
    for number in range(length):
        total += await step(number)
    return total


@orchestration
async def fan_out(width: int) -> int:
    return sum(await asyncio.gather(*(step(number) for number in range(width))))


def begin(handler: Any, size: int, seed: str = "seed") -> Execution:
    started = events.OrchestrationStarted(
        event_id=1,
        instance_id="bench",
        execution_id=1,
        timestamp_ms=1_700_000_000_000,
        turn=1,
        name=handler.name,
        version=handler.version,
        input=JSON.encode([size]),
        framework_version="0.1.0",
        seed=seed,
    )
    return Execution.begin(handler, started, codec=JSON)


def completed(activity_id: int) -> work.ActivityCompleted:
    return work.ActivityCompleted(
        instance_id="bench", execution_id=1, activity_id=activity_id, result=msgspec.Raw(b"7")
    )


def measure_chain(length: int) -> tuple[float, list[events.Event]]:
    """Seconds a turn for: completion in, one new activity out; and the history."""
    execution = begin(chain, length)
    outcome = execution.run_turn([], 1_700_000_000_000)
    history = list(outcome.delta)
    begun = time.process_time()
    for turn in range(length):
        outcome = execution.run_turn([completed(history[-1].event_id)], 1_700_000_000_000 + turn)
        history += outcome.delta
    seconds = time.process_time() - begun
    execution.close()
    return seconds / length, history


def measure_replay(history: list[events.Event]) -> float:
    """Events a second, from stored text to an execution that is ready for its next turn."""
    texts = [wire.encode(event) for event in history[:-2]]  # without the last turn
    begun = time.process_time()
    execution = Execution.replay(chain, wire.decode_history(texts), kv={}, codec=JSON)
    seconds = time.process_time() - begun
    execution.close()
    return len(texts) / seconds


def measure_fan_out(width: int) -> tuple[float, float]:
    """Seconds to schedule that many activities in one turn, and to take all results in one."""
    execution = begin(fan_out, width)
    begun = time.process_time()
    outcome = execution.run_turn([], 1_700_000_000_000)
    scheduled = time.process_time() - begun
    assert len(outcome.activities) == width
    inbox = [completed(entry.event.event_id) for entry in outcome.activities]
    begun = time.process_time()
    execution.run_turn(inbox, 1_700_000_000_001)
    collected = time.process_time() - begun
    execution.close()
    return scheduled, collected


def medians_ms(rounds: list[tuple[float, float]]) -> list[float]:
    return [round(statistics.median(part) * 1e3, 1) for part in zip(*rounds, strict=True)]


def main() -> None:
    turns = []
    replays = []
    for _ in range(ROUNDS):
        seconds, history = measure_chain(10_000)
        turns.append(seconds)
        replays.append(measure_replay(history))
    fans = [measure_fan_out(10_000) for _ in range(ROUNDS)]
    small = [measure_fan_out(1_000) for _ in range(ROUNDS)]
    report = {
        "python": platform.python_version(),
        "turn_us": round(statistics.median(turns) * 1e6, 1),
        "replay_events_per_second": round(statistics.median(replays)),
        "fan_out_1000_ms": medians_ms(small),
        "fan_out_10000_ms": medians_ms(fans),
    }
    json.dump(report, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
