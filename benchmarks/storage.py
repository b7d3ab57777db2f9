"""Measure the SQLite store at full durability, empty and with a past, as table and JSON.

``python -m benchmarks.storage --finished 1000000 --json storage.json``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from benchmarks import machine
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    ExecutionMetadata,
    HistoryRecord,
    OrchestratorMessage,
    StartRouting,
    TurnCommit,
    WorkerMessage,
)
from perdure.providers.sqlite import SqliteProvider

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LOCK_MS = 60_000
TASKS = 64
BODY = json.dumps({"type": "StartOrchestration", "name": "checkout", "input": ["o-1", 1200]})
EVENT = json.dumps(
    {
        "type": "ActivityCompleted",
        "event_id": 12,
        "timestamp_ms": 1_700_000_000_000,
        "op": "0/12",
        "turn": 3,
        "source_event_id": 11,
        "result": "receipt-123456",
    }
)
NAMED = ExecutionMetadata(name="checkout", version="1.0.0")
FINISHED = ExecutionMetadata(
    name="checkout", version="1.0.0", status=Status.COMPLETED, output='"receipt-123456"'
)

KEYS = (
    "WITH RECURSIVE keys (key) AS (SELECT 1 UNION ALL SELECT key + 1 FROM keys WHERE key < :count)"
)
PAST = (
    f"""
    {KEYS}
    INSERT INTO instances
    SELECT key, lower(hex(randomblob(16))), 1, 'checkout', '1.0.0', NULL, 1, 'Completed', NULL,
           NULL, 0, :now + key / 100, :now + key / 100, :now + key / 100
    FROM keys
    """,
    f"""
    {KEYS}
    INSERT INTO executions
    SELECT key, 1, 'Completed', '"receipt"', NULL, :now, :now FROM keys
    """,
    f"""
    {KEYS}
    INSERT INTO history
    SELECT key, 1, event_id, :event FROM keys
    CROSS JOIN (SELECT 1 AS event_id UNION ALL SELECT 2 UNION ALL SELECT 3)
    """,
)


async def main(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        figures = {"empty": await measure(Path(directory) / "empty.db", options)}
        if options.finished:
            path = Path(directory) / "full.db"
            await fill(path, options.finished)
            figures["finished"] = await measure(path, options)
    report: dict[str, Any] = {
        "machine": machine.describe(Path(options.directory)),
        "sqlite": apsw.sqlite_lib_version(),
        "finished_instances": options.finished,
        "per_second": figures,
    }
    return report


async def measure(path: Path, options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with SqliteProvider(path, durability=options.durability) as provider:
        for tasks in (1, TASKS):
            seconds = options.seconds
            # What is enqueued here is what the cycles below fetch.
            figures[f"enqueue, {tasks} tasks"] = await rate(tasks, seconds, enqueuing(provider))
            figures[f"fetch + ack, {tasks} tasks"] = await rate(tasks, seconds, cycling(provider))
        await drain(provider)
        for tasks in (1, TASKS):
            actions = [await chaining(provider) for _ in range(tasks)]
            figures[f"hot-path commit, {tasks} tasks"] = await rate_of(actions, options.seconds)
        figures[f"work fetch + ack, {TASKS} tasks"] = await rate(
            TASKS, options.seconds, working(provider)
        )
    return figures


def enqueuing(provider: SqliteProvider) -> Callable[[], Awaitable[None]]:
    async def enqueue() -> None:
        await provider.enqueue_for_orchestrator(start_message(uuid.uuid4().hex))

    return enqueue


def cycling(provider: SqliteProvider) -> Callable[[], Awaitable[None]]:
    async def cycle() -> None:
        fetched = await provider.fetch_orchestration_item(LOCK_MS, 0)
        if fetched is None:
            raise StopAsyncIteration
        commit = TurnCommit(execution_id=1, history_delta=records(1, 2), metadata=FINISHED)
        await provider.ack_orchestration_item(fetched.lock_token, commit)

    return cycle


async def chaining(provider: SqliteProvider) -> Callable[[], Awaitable[None]]:
    """One instance: each call settles its work item and schedules the next one, lock kept."""
    instance, token = uuid.uuid4().hex, uuid.uuid4().hex
    held = work_item(instance, 2)
    first = TurnCommit(
        execution_id=1,
        history_delta=records(1, 2),
        worker_items=(held,),
        metadata=NAMED,
        keep_lock_ms=LOCK_MS,
    )
    await provider.start_orchestration_item(start_message(instance), first, token, "bench")
    event_id = 2

    async def advance() -> None:
        nonlocal held, event_id
        assert held.claim is not None
        following = work_item(instance, event_id + 2)
        commit = TurnCommit(
            execution_id=1,
            history_delta=records(event_id + 1, event_id + 2),
            worker_items=(following,),
            settled_work=(held.claim.lock_token,),
            keep_lock_ms=LOCK_MS,
            consumed=(),
        )
        await provider.ack_orchestration_item(token, commit)
        held, event_id = following, event_id + 2

    return advance


def working(provider: SqliteProvider) -> Callable[[], Awaitable[None]]:
    """Each call puts one item into the queue, takes one out and completes it."""

    async def work() -> None:
        item = work_item(uuid.uuid4().hex, 2, claimed=False)
        await provider.enqueue_for_worker(item)
        fetched = await provider.fetch_work_item(LOCK_MS, 0)
        assert fetched is not None
        await provider.ack_work_item(fetched.lock_token)

    return work


async def rate(tasks: int, seconds: float, action: Callable[[], Awaitable[None]]) -> float:
    return await rate_of([action] * tasks, seconds)


async def rate_of(actions: list[Callable[[], Awaitable[None]]], seconds: float) -> float:
    """Calls a second, all actions at once, each one after the other."""
    done = 0
    begin = time.perf_counter()
    until = begin + seconds

    async def repeat(action: Callable[[], Awaitable[None]]) -> None:
        nonlocal done
        try:
            while time.perf_counter() < until:
                await action()
                done += 1
        except StopAsyncIteration:
            return

    await asyncio.gather(*(repeat(action) for action in actions))
    return done / (time.perf_counter() - begin)


async def drain(provider: SqliteProvider) -> None:
    async def take_all() -> None:
        cycle = cycling(provider)
        try:
            while True:
                await cycle()
        except StopAsyncIteration:
            return

    await asyncio.gather(*(take_all() for _ in range(TASKS)))


async def fill(path: Path, instances: int) -> None:
    """Write finished instances behind the provider's back: through it would take minutes."""
    async with SqliteProvider(path):
        pass
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "off")
    connection.pragma("synchronous", 0)
    connection.pragma("cache_size", -512_000)
    now = int(time.time() * 1000)
    with connection:
        for statement in PAST:
            connection.execute(statement, {"count": instances, "now": now, "event": EVENT})
    connection.close()


def start_message(instance: str) -> OrchestratorMessage:
    return OrchestratorMessage(
        instance_id=instance,
        kind="StartOrchestration",
        body=BODY,
        start=StartRouting(name="checkout", version="1.0.0"),
    )


def records(*event_ids: int) -> tuple[HistoryRecord, ...]:
    return tuple(HistoryRecord(event_id=event_id, data=EVENT) for event_id in event_ids)


def work_item(instance: str, activity: int, *, claimed: bool = True) -> WorkerMessage:
    return WorkerMessage(
        identity=ActivityIdentity(instance_id=instance, execution_id=1, activity_id=activity),
        name="charge",
        body=BODY,
        claim=Claim(lock_token=uuid.uuid4().hex, lock_timeout_ms=LOCK_MS) if claimed else None,
    )


def show(report: dict[str, Any]) -> str:
    figures = report["per_second"]
    lines = [f"{'per second':<28}{'empty':>12}{'with past':>12}{'ratio':>8}"]
    for name, empty in figures["empty"].items():
        line = f"{name:<28}{empty:>12,.0f}"
        if "finished" in figures:
            full = figures["finished"][name]
            line += f"{full:>12,.0f}{empty / full:>8.2f}"
        lines.append(line)
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--finished", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--durability", choices=("full", "relaxed"), default="full")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    result = asyncio.run(main(chosen))
    print(show(result))
    text = json.dumps(result, indent=2)
    if chosen.json is None:
        print(text)
    else:
        chosen.json.write_text(text + "\n")
