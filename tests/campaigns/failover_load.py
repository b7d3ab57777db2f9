"""The load of the failover campaign: processes that record everything that was acknowledged.

Each process has a file of its own with a line for each call before it is made and, on disk before
the next call, a line for each answer. ``time`` is monotonic, and the same for all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import logging
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaigns import mixed_load
from campaigns.mixed_load import add, chain, eternal, family, fan, saga, timed
from perdure import Client, Runtime, next_message, orchestration, wait_for_event
from perdure.errors import InstanceFinished, NotFound, PerdureError
from perdure.providers.postgres import PostgresProvider

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

STOP = "stop"
CLIENT_TASKS = 12
PAUSE_SECONDS = 0.05
RESULT_SECONDS = 90.0
NAP_SECONDS = (0.2, 0.5, 1.0)
WAITING_MAX = 50
_DIE_WITH_PARENT = 1
WRITES = ("start", "event", "message")


@orchestration
async def nap(seconds: list[float]) -> int:
    """Sleep some times, each time after a step: no sleep begins before its step was scheduled."""
    for number, each in enumerate(seconds):
        await add(number, 1)
        await asyncio.sleep(each)
    return len(seconds)


@orchestration
async def hear_events() -> list[str]:
    heard: list[str] = []
    while (value := await wait_for_event("said", str)) != STOP:
        heard.append(value)
    return heard


@orchestration
async def hear_messages() -> list[str]:
    heard: list[str] = []
    while (value := await next_message("said", str)) != STOP:
        heard.append(value)
    return heard


HEARERS = (hear_events, hear_messages)
HANDLERS = [*mixed_load.HANDLERS, nap, *HEARERS]
_CALCULATED = {
    chain: lambda n: ((n,), n + 10),
    fan: lambda n: ((n,), 6 * n + 15),
    timed: lambda n: ((n,), f"timed out {n + 1}"),
    family: lambda n: ((n,), n + 10 + 6 * n + 15),
    saga: lambda n: ((n,), [str(n + 1), "undone after ValueError"]),
    eternal: lambda n: ((4, n), n + 10),
    nap: lambda _: ((list(NAP_SECONDS),), len(NAP_SECONDS)),
}
FLOWS = [*_CALCULATED, *HEARERS, nap, *HEARERS]


@dataclass(frozen=True, slots=True)
class Place:
    """The store, the directory of the records, and the options of every handle."""

    dsn: str
    records: Path
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def provider(self) -> PostgresProvider:
        return PostgresProvider(self.dsn, **self.options)


class Record:
    """Writes the lines of one process."""

    def __init__(self, place: Place, name: str) -> None:
        self._file = os.open(
            place.records / f"{name}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY
        )

    def trying(self, what: str, instance_id: str, value: object = None) -> None:
        self._write("try", what, instance_id, value)

    def acknowledged(self, what: str, instance_id: str, value: object = None) -> None:
        self._write("ack", what, instance_id, value)
        os.fsync(self._file)

    def failed(self, what: str, instance_id: str, error: BaseException) -> None:
        self._write("fail", what, instance_id, f"{type(error).__name__}: {error}"[:300])

    def _write(self, outcome: str, what: str, instance_id: str, value: object) -> None:
        line = {
            "outcome": outcome,
            "what": what,
            "id": instance_id,
            "value": value,
            "time": time.monotonic(),
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")

    async def call(
        self, what: str, instance_id: str, value: object, call: Awaitable[Any]
    ) -> Any | None:
        """Record the call and its outcome; None if it failed. No call is made twice."""
        self.trying(what, instance_id, value)
        try:
            answer = await call
        except PerdureError as error:
            self.failed(what, instance_id, error)
            return None
        self.acknowledged(what, instance_id, answer if what == "result" else value)
        return True if answer is None else answer


# --- processes


def _record_of_process(place: Place, name: str) -> Record:
    """Return the record of this process, and send its log to a file beside the record."""
    logging.basicConfig(filename=place.records / f"{name}.log", level=logging.WARNING, force=True)
    return Record(place, name)


async def work(place: Place, name: str) -> None:
    """A worker that also starts instances of its own, by the shorter way of a runtime.

    Told to stop, it starts no more and works on until it is killed.
    """
    record = _record_of_process(place, name)
    results: set[asyncio.Task[Any]] = set()
    async with until_told() as told, Runtime(place.provider(), HANDLERS) as runtime:
        for number in itertools.count():
            if told.is_set():
                break
            flow = nap if number % 4 == 3 else chain
            handle = await _start(record, runtime, flow, f"{name}-{number}", number)
            if handle is not None and len(results) < WAITING_MAX:
                waiting = record.call("result", handle.id, None, handle.result(RESULT_SECONDS))
                task = asyncio.create_task(waiting)
                results.add(task)
                task.add_done_callback(results.discard)
            await _pause(told, 4 * PAUSE_SECONDS)
        await asyncio.Event().wait()


async def call(place: Place, name: str, seed: int) -> None:
    """A client: starts instances, tells them things and reads their results."""
    record = _record_of_process(place, name)
    async with until_told() as told, Client(place.provider()) as client:
        numbers = itertools.count()
        rng = random.Random(seed)

        async def go_on() -> None:
            while not told.is_set():
                number = next(numbers)
                flow = FLOWS[number % len(FLOWS)]
                instance_id = f"{name}-{number}"
                if flow in HEARERS:
                    await _talk(record, client, flow, instance_id, told, rng)
                else:
                    handle = await _start(record, client, flow, instance_id, number)
                    if handle is not None:
                        result = handle.result(RESULT_SECONDS)
                        await record.call("result", instance_id, None, result)
                await _pause(told, rng.uniform(0, 2 * PAUSE_SECONDS))

        tasks = [asyncio.create_task(go_on()) for _ in range(CLIENT_TASKS)]
        await told.wait()
        # A call that hangs is cancelled: it was tried, and has no answer.
        _, hanging = await asyncio.wait(tasks, timeout=2)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stop_hearers(place: Place, ids: list[str]) -> None:
    """Tell those instances to end."""
    async with Client(place.provider()) as client:
        for instance_id in ids:
            with contextlib.suppress(InstanceFinished, NotFound):
                handle = client.get(instance_id)
                if (await handle.describe(waits=False)).name == hear_events.name:
                    await handle.raise_event("said", STOP)
                else:
                    await handle.send_message("said", STOP)


async def _start(
    record: Record, client: Client, flow: Any, instance_id: str, number: int
) -> Any | None:
    arguments, _ = _CALCULATED[flow](number)
    return await record.call(
        "start", instance_id, None, client.start(flow, *arguments, id=instance_id)
    )


async def _talk(
    record: Record,
    client: Client,
    flow: Any,
    instance_id: str,
    told: asyncio.Event,
    rng: random.Random,
) -> None:
    handle = await record.call("start", instance_id, None, client.start(flow, id=instance_id))
    if handle is None:
        return
    what, send = (
        ("event", handle.raise_event) if flow is hear_events else ("message", handle.send_message)
    )
    for number in range(8):
        value = f"{instance_id}:{number}"
        await record.call(what, instance_id, value, send("said", value))
        await _pause(told, rng.uniform(0, 3 * PAUSE_SECONDS))


def expected(instance_id: str, name: str) -> Any:
    """Return the result of an instance of that orchestration, or None if it depends on calls."""
    number = int(instance_id.rpartition("-")[2])
    calculate = {flow.name: rule for flow, rule in _CALCULATED.items()}.get(name)
    return None if calculate is None else calculate(number)[1]


@contextlib.asynccontextmanager
async def until_told() -> AsyncIterator[asyncio.Event]:
    """Give an event that SIGTERM sets. The process dies with the campaign."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    yield told


async def _pause(told: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(told.wait(), seconds)
