"""The best figures of the machine: disk, SQLite, thread hops, event loop, JSON. One figure each."""

from __future__ import annotations

import asyncio
import os
import queue
import statistics
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import apsw
import click
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.environments import home
from benchmarks.machine import commit_ms, median_ms
from perdure.model import events, wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def fdatasync_us(base: Path) -> float:
    """Append 4 KB to a file and wait for the disk."""
    with tempfile.TemporaryFile(dir=base, buffering=0) as file:

        def append() -> None:
            file.write(b"x" * 4096)
            os.fdatasync(file.fileno())

        return median_ms(append, 200) * 1e3


def history_row_us(base: Path) -> float:
    """One row of history inside a large transaction."""
    rows = [(number // 12, 1, number % 12, "x" * 200) for number in range(60_000)]
    with tempfile.TemporaryDirectory(dir=base) as directory:
        connection = apsw.Connection(f"{directory}/rows.db")
        connection.pragma("journal_mode", "wal")
        connection.execute(
            "CREATE TABLE history (instance INTEGER, execution INTEGER, event INTEGER, data TEXT, "
            "PRIMARY KEY (instance, execution, event)) WITHOUT ROWID"
        )
        begin = time.perf_counter()
        with connection:
            connection.executemany("INSERT INTO history VALUES (?, ?, ?, ?)", rows)
        taken = time.perf_counter() - begin
        connection.close()
        return taken / len(rows) * 1e6


def thread_hop_us(_base: Path) -> float:
    """From the event loop to a waiting thread and back: what a commit costs before it begins."""
    inbox: queue.SimpleQueue[asyncio.Future[None] | None] = queue.SimpleQueue()

    def serve(loop: asyncio.AbstractEventLoop) -> None:
        while (future := inbox.get()) is not None:
            loop.call_soon_threadsafe(future.set_result, None)

    async def measure() -> float:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=serve, args=(loop,))
        thread.start()
        taken = []
        for _ in range(1_000):
            begin = time.perf_counter()
            future = loop.create_future()
            inbox.put(future)
            await future
            taken.append(time.perf_counter() - begin)
        inbox.put(None)
        thread.join()
        return statistics.median(taken) * 1e6

    return asyncio.run(measure())


def loop_pass_us(_base: Path) -> float:
    """One pass of the event loop."""

    async def measure() -> float:
        begin = time.perf_counter()
        for _ in range(20_000):
            await asyncio.sleep(0)
        return (time.perf_counter() - begin) / 20_000 * 1e6

    return asyncio.run(measure())


EVENT = events.ActivityCompleted(
    event_id=17,
    instance_id="order-4711",
    execution_id=1,
    timestamp_ms=1_700_000_000_000,
    turn=3,
    source_event_id=4,
    result=msgspec.Raw(b'"receipt-4711"'),
)


def encode_event_us(_base: Path) -> float:
    """Encode one history event."""
    return each_us(lambda: wire.encode(EVENT))


def decode_event_us(_base: Path) -> float:
    """Decode one history event."""
    texts = [wire.encode(EVENT)] * 1_000
    return each_us(lambda: wire.decode_history(texts), times=50) / len(texts)


def each_us(action: Callable[[], object], times: int = 50_000) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - begin) / times * 1e6


FLOORS: dict[str, Callable[[Path], float]] = {
    "append 4 KB and fdatasync": fdatasync_us,
    "SQLite commit, synchronous=FULL": lambda base: commit_ms(base, "FULL") * 1e3,
    "SQLite commit, synchronous=NORMAL": lambda base: commit_ms(base, "NORMAL") * 1e3,
    "SQLite history row in a large transaction": history_row_us,
    "event loop to a thread and back": thread_hop_us,
    "one pass of the event loop": loop_pass_us,
    "encode one event": encode_event_us,
    "decode one event": decode_event_us,
}


@click.command()
def main() -> None:
    """Measure the floors: median of three, in microseconds."""
    base = home() / "runs"
    base.mkdir(parents=True, exist_ok=True)
    table = Table("floor", "µs", "from", "to")
    for name, measure in FLOORS.items():
        values = sorted(measure(base) for _ in range(3))
        table.add_row(name, *[f"{value:.1f}" for value in (values[1], values[0], values[2])])
    Console().print(table)


if __name__ == "__main__":
    main()
