"""Floods of messages: python -m campaigns.floods --store sqlite --messages 1000000 --actor 10000

Three floods on a new store each:

- one instance gets many small messages while a worker runs;
- an actor that continues as new every 40 messages gets messages of 1 KB while no worker runs;
- the same again, and a reader in another process pins the log (SQLite only).

Every message that was acknowledged must be heard, once and in order; nothing may fail; the store
grows with the messages and not faster. Beside the first flood other instances run: their latency
is measured before and during it, and may grow less than threefold. A queue that is full refuses its
sender, which then waits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from perdure import (
    Client,
    FileSystemProvider,
    InMemoryProvider,
    QueueFull,
    Runtime,
    SqliteProvider,
    activity,
    continue_as_new,
    next_message,
    orchestration,
)
from perdure.model import work
from perdure.model.wire import envelope

STORES = ("memory", "directory", "sqlite", "postgres")
SENT_AT_ONCE = 100
PIN = """
import sys, apsw
connection = apsw.Connection(sys.argv[1], flags=apsw.SQLITE_OPEN_READONLY)
connection.execute("BEGIN")
connection.execute("SELECT count(*) FROM instances").fetchall()
print("pinned", flush=True)
sys.stdin.read()
"""


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def probe(value: int) -> int:
    return await echo(value)


@orchestration
async def counter(expected: int, heard: int = 0) -> int:
    """Hears numbers in order; continues as new every 2,000."""
    for _ in range(2_000):
        number = await next_message("numbers", int)
        if number != heard:
            raise ValueError(f"message {number} came instead of {heard}")
        heard += 1
        if heard == expected:
            return heard
    return continue_as_new(expected, heard)


@orchestration
async def actor(expected: int, heard: int = 0) -> int:
    """Hears texts that begin with a number, in order; continues as new every 40."""
    for _ in range(40):
        number = int((await next_message("texts", str)).partition(" ")[0])
        if number != heard:
            raise ValueError(f"message {number} came instead of {heard}")
        heard += 1
        if heard == expected:
            return heard
    return continue_as_new(expected, heard)


HANDLERS = (echo, probe, counter, actor)


@dataclass
class Report:
    """The figures of one flood, and the checks that failed."""

    name: str
    lines: list[str] = field(default_factory=list[str])
    failures: list[str] = field(default_factory=list[str])

    def check(self, holds: bool, text: str) -> None:
        self.lines.append(text)
        if not holds:
            self.failures.append(f"{self.name}: {text}")


def provider_of(store: str, root: Path):
    match store:
        case "memory":
            return InMemoryProvider()
        case "directory":
            return FileSystemProvider(root / "store")
        case "sqlite":
            return SqliteProvider(root / "store.db")
        case _:
            from perdure.providers.postgres import PostgresProvider
            from postgres_server import shared_server

            return PostgresProvider(shared_server().dsn, schema=f"flood_{time.time_ns()}")


def bytes_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


async def send(provider, instance_id: str, queue: str, values) -> None:
    """Send values in order, and return when all are acknowledged; wait while the queue is full."""
    for some in batched(values, SENT_AT_ONCE):
        items = [
            work.QueueMessage(
                instance_id=instance_id, name=queue, data=msgspec.Raw(msgspec.json.encode(value))
            )
            for value in some
        ]
        while True:
            try:
                await provider.enqueue_many_for_orchestrator([envelope(item) for item in items])
                break
            except QueueFull:
                await asyncio.sleep(0.1)


def batched(values, size: int):
    iterator = iter(values)
    while some := list(islice(iterator, size)):
        yield some


async def probe_until(client: Client, stop: asyncio.Event, seen: list[float]) -> None:
    """Run one small instance after the other and note how long each took."""
    while not stop.is_set():
        begun = time.perf_counter()
        await (await client.start(probe, len(seen))).result(600)
        seen.append(time.perf_counter() - begun)
        await asyncio.sleep(0.02)


def p99(seen: list[float]) -> float:
    return sorted(seen)[int(len(seen) * 0.99)] * 1_000 if seen else 0.0


async def flood_one_instance(store: str, root: Path, count: int, baseline_seconds: float) -> Report:
    report = Report(f"{count} messages to one instance")
    sizes: list[tuple[int, int]] = []
    async with provider_of(store, root) as provider, Runtime(provider, HANDLERS) as runtime:
        before: list[float] = []
        during: list[float] = []
        stop = asyncio.Event()
        probing = asyncio.ensure_future(probe_until(runtime, stop, before))
        await asyncio.sleep(baseline_seconds)
        stop.set()
        await probing

        handle = await runtime.start(counter, count, id="flooded")
        stop = asyncio.Event()
        probing = asyncio.ensure_future(probe_until(runtime, stop, during))
        begun = time.perf_counter()
        part = max(count // 10, 1)
        for first in range(0, count, part):
            await send(provider, "flooded", "numbers", range(first, min(first + part, count)))
            sizes.append((min(first + part, count), bytes_of(root)))
        sent = time.perf_counter()
        heard = await handle.result(36_000)
        ended = time.perf_counter()
        stop.set()
        await probing
    report.check(heard == count, f"heard {heard} of {count}, in order")
    report.lines.append(f"sent in {sent - begun:.1f} s, heard after {ended - begun:.1f} s")
    ratio = p99(during) / p99(before) if p99(before) else 0.0
    report.check(
        ratio < 3 or not baseline_seconds,
        f"others: p99 {p99(before):.1f} ms of {len(before)} before, {p99(during):.1f} ms of "
        f"{len(during)} during the flood ({ratio:.1f} x)",
    )
    if store in {"sqlite", "directory"}:
        final = bytes_of(root)
        report.check(
            final < 1_500 * count + 64_000_000,
            f"the store has {final / 1e6:.1f} MB, {final / count:.0f} bytes for each message",
        )
    return report


async def flood_actor(store: str, root: Path, count: int, *, pinned: bool) -> Report:
    name = f"{count} messages of 1 KB to an actor" + (" beside a pinned reader" if pinned else "")
    report = Report(name)
    with contextlib.ExitStack() as stack:
        async with provider_of(store, root) as provider, Client(provider) as client:
            handle = await client.start(actor, count, id="actor")
            if pinned:
                stack.enter_context(pin(root / "store.db"))
            begun = time.perf_counter()
            await send(provider, "actor", "texts", (f"{n} " + "x" * 1_000 for n in range(count)))
            sent = time.perf_counter()
            async with Runtime(provider, HANDLERS):
                heard = await handle.result(36_000)
            ended = time.perf_counter()
            stored = bytes_of(root)
    report.check(heard == count, f"heard {heard} of {count}, in order")
    report.lines.append(f"sent in {sent - begun:.1f} s, heard {ended - sent:.1f} s later")
    if store in {"sqlite", "directory"}:
        most = (12 if pinned else 5) * 1_000 * count + 64_000_000
        report.check(
            stored < most, f"the store has {stored / 1e6:.1f} MB for {count / 1e3:.1f} MB of text"
        )
    return report


@contextlib.contextmanager
def pin(path: Path):
    """Keep a read transaction open in another process."""
    reader = subprocess.Popen(
        [sys.executable, "-c", PIN, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "pinned\n"
        yield
    finally:
        reader.communicate("")


async def run(
    store: str, messages: int, actor_messages: int, baseline_seconds: float = 5.0
) -> list[Report]:
    """Run the floods, each on a new store, and return their reports."""
    reports: list[Report] = []

    async def add(flood, *arguments, **options) -> None:
        with tempfile.TemporaryDirectory() as folder:
            report = await flood(store, Path(folder), *arguments, **options)
        reports.append(report)
        print(report.name, *report.lines, sep="\n  ", flush=True)

    await add(flood_actor, actor_messages, pinned=False)
    if store == "sqlite":
        await add(flood_actor, actor_messages, pinned=True)
    await add(flood_one_instance, messages, baseline_seconds)
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=STORES, default="sqlite")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--actor", type=int, default=10_000)
    options = parser.parse_args()
    reports = asyncio.run(run(options.store, options.messages, options.actor))
    failures = [failure for report in reports for failure in report.failures]
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
