"""Trees that have ended go by retention while workers run: nothing that runs is touched.

    python -m campaigns.retention --store sqlite --trees 25000 --running 200

Trees of four instances end. Others run: their children have ended, and they wait. Then two workers
(one on a directory) that keep nothing delete the ended trees, while more trees start and end, and
short instances are started one after the other and timed. Deletions are held up now and then,
so that the latency beside them is compared with that of the same minutes. Every running tree
stays whole and answers afterwards.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

from patience import HANG_SECONDS
from perdure import (
    FileSystemProvider,
    Runtime,
    SqliteProvider,
    Status,
    activity,
    orchestration,
    wait_for_event,
)
from perdure.providers.administration import ProviderAdmin
from perdure.providers.records import DeleteResult, InstanceQuery
from perdure.runtime import housekeeping

ROUND_PROBES = 60
ROUNDS_BESIDE = 3
"""Rounds of probes beside deletions, after each round without."""


@activity
async def echo(value: int) -> int:
    return value


@orchestration
async def leaf(value: int) -> int:
    return await echo(value)


@orchestration
async def tree(value: int) -> int:
    return sum(await asyncio.gather(*(leaf(value) for _ in range(3))))


@orchestration(keep={"completed": "forever"})
async def long(value: int) -> int:
    return await leaf(value) + await wait_for_event("go", int)


@orchestration(keep={"completed": "forever"})
async def probe(value: int) -> int:
    return await echo(value)


HANDLERS = [echo, leaf, tree, long, probe]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "filesystem", "postgres"], default="sqlite")
    parser.add_argument("--trees", type=int, default=25_000)
    parser.add_argument("--running", type=int, default=200)
    options = parser.parse_args()
    run(options.store, options.trees, options.running)


def run(store: str, trees: int, running: int) -> None:
    """Raise at the first violation."""
    server = nullcontext()
    if store == "postgres":
        from postgres_server import PostgresServer

        server = PostgresServer()
    with server as opened, tempfile.TemporaryDirectory() as directory:
        place = opened.dsn if store == "postgres" else Path(directory) / "store"
        campaign = Campaign(store, place)
        # Trees that end while others are deleted go in a later round.
        with (
            patch.object(housekeeping, "_DELETE_SECONDS", 0.5),
            patch.object(ProviderAdmin, "delete_instance_bulk", campaign.deleting()),
        ):
            asyncio.run(campaign.run(trees, running))


class Campaign:
    """One store."""

    def __init__(self, store: str, place: object) -> None:
        self._store = store
        self._place = place
        self._deletion = asyncio.Lock()
        """Held while one tree is deleted, and while none may be."""

    def deleting(self) -> Callable[..., Coroutine[None, None, DeleteResult]]:
        """Return the bulk deletion for ``ProviderAdmin``, which waits while it is held up."""
        delete = ProviderAdmin.delete_instance_bulk

        async def delete_instance_bulk(admin: ProviderAdmin, query: InstanceQuery) -> DeleteResult:
            async with self._deletion:
                return await delete(admin, query)

        return delete_instance_bulk

    def _runtime(self, keep: dict[str, float] | None = None) -> Runtime:
        if self._store == "postgres":
            from perdure import PostgresProvider

            return Runtime(PostgresProvider(self._place), HANDLERS, keep=keep)
        kind = FileSystemProvider if self._store == "filesystem" else SqliteProvider
        return Runtime(kind(self._place), HANDLERS, keep=keep)

    async def run(self, trees: int, running: int) -> None:
        async with self._workers() as runtimes:
            await _start(runtimes[0], tree, "tree", trees)
            await _start(runtimes[0], long, "long", running)
            ended, count = 4 * trees + running, 4 * trees + 2 * running
            await _until(runtimes[0], InstanceQuery(), count)
            await _until(runtimes[0], InstanceQuery(statuses=frozenset({Status.COMPLETED})), ended)
        begun = time.monotonic()
        async with self._workers({"completed": 0}) as runtimes:
            without, beside = await self._delete(runtimes, running)
            took = time.monotonic() - begun
            await _until(runtimes[0], InstanceQuery(name="tree"), 0)
            await self._check(runtimes[0], running)
        print(
            f"{self._store}: {trees} ended trees gone in {took:.0f} s, {running} running "
            f"ones whole; {_figures(without)} without deletions, {_figures(beside)} beside them: "
            f"p99 {_quantile(beside, 99) / _quantile(without, 99):.2f} x",
            flush=True,
        )

    @asynccontextmanager
    async def _workers(self, keep: dict[str, float] | None = None) -> AsyncGenerator[list[Runtime]]:
        """Open two workers; one on a directory, which belongs to one process."""
        async with AsyncExitStack() as opened:
            number = 1 if self._store == "filesystem" else 2
            yield [await opened.enter_async_context(self._runtime(keep)) for _ in range(number)]

    async def _delete(
        self, runtimes: list[Runtime], running: int
    ) -> tuple[list[float], list[float]]:
        """Probe until no ended tree is left but the last ones that began.

        Return the latencies without deletions and beside them.
        """
        without: list[float] = []
        beside: list[float] = []
        while await runtimes[0].admin.count(InstanceQuery(name="tree", id_prefix="tree-")):
            assert await runtimes[0].admin.count(InstanceQuery(name="long")) == running
            async with self._deletion:
                without += await _probe(runtimes, f"without-{len(without)}", ROUND_PROBES)
            for _ in range(ROUNDS_BESIDE):
                beside += await _probe(runtimes, f"beside-{len(beside)}", ROUND_PROBES)
        return without, beside

    async def _check(self, runtime: Runtime, running: int) -> None:
        for each in range(running):
            found = await runtime.admin.tree(f"long-{each}")
            assert len(found.instance_ids) == 2, f"{found} has lost its child"
        for each in range(running):
            await runtime.raise_event(f"long-{each}", "go", 1)
        for each in range(running):
            assert await runtime.get(f"long-{each}", long).result() == each + 1
        assert await runtime.admin.count(InstanceQuery(name="leaf")) == running


async def _start(runtime: Runtime, flow: object, prefix: str, number: int) -> None:
    await runtime.start_many(flow, [(f"{prefix}-{each}", (each,)) for each in range(number)])


async def _until(runtime: Runtime, query: InstanceQuery, expected: int) -> None:
    """Wait until so many instances fit; the bound is for a hang, and grows with the work."""
    deadline = time.monotonic() + HANG_SECONDS + expected / 100
    while await runtime.admin.count(query) != expected:
        assert time.monotonic() < deadline, f"never {expected} of {query}"
        await asyncio.sleep(0.05)


async def _probe(runtimes: list[Runtime], prefix: str, number: int) -> list[float]:
    """Return the milliseconds that each of so many instances took, beside a tree that begins."""
    runtime, *_ = runtimes
    latencies: list[float] = []
    await _start(runtimes[-1], tree, f"more-{prefix}", 1)
    for each in range(number):
        begun = time.perf_counter()
        handle = await runtime.start(probe, each, id=f"probe-{prefix}-{each}")
        assert await handle.result() == each
        latencies.append((time.perf_counter() - begun) * 1000)
        await asyncio.sleep(0.002)
    return latencies


def _quantile(latencies: list[float], percent: int) -> float:
    return sorted(latencies)[len(latencies) * percent // 100]


def _figures(latencies: list[float]) -> str:
    p50, p99 = _quantile(latencies, 50), _quantile(latencies, 99)
    return f"p50 {p50:.1f} and p99 {p99:.1f} ms of {len(latencies)}"


if __name__ == "__main__":
    main()
