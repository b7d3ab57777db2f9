"""Move many instances with work in flight from store to store, interrupted, and let them finish.

    python -m campaigns.filesystem_copy --instances 10000      (with tests/ on the path)

From memory to SQLite to a directory to another SQLite file. Each copy from a file runs first in a
process that is killed in the middle, then again to its end. All hashes must be equal, and at the
last store every instance must go all the way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from campaigns.filesystem_workload import (
    LifeClock,
    check_finished,
    check_whole,
    run_to_the_end,
    start_instances,
    take_some_steps,
)
from perdure.client.moving import copy_store, snapshot_hash
from perdure.errors import StoreMoved
from perdure.providers.directory import FileSystemProvider
from perdure.providers.sqlite import SqliteProvider
from perdure.providers.sqlite.memory import InMemoryProvider

if TYPE_CHECKING:
    from perdure.providers.contract import Provider

TURNS = 3
_AT_ONCE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        kills = run(Path(directory), options.instances, random.Random(options.seed))
    print(f"{options.instances} instances in 3 copies, {kills} killed: equal hashes, all completed")


def run(directory: Path, instances: int, rng: random.Random) -> int:
    """Return how many copies were killed; raise if anything is lost."""
    stores = ("first.db", "store", "second.db")
    expected = asyncio.run(_fill(directory, stores[0], instances, rng))
    kills = 0
    for source, target in pairwise(stores):
        kills += _kill_a_copy(directory, source, target, rng, instances)
        began = time.monotonic()
        found = asyncio.run(_copy(directory, source, target))
        print(f"{source} -> {target}: {time.monotonic() - began:.1f} s", flush=True)
        assert found == expected, "the copy differs from the original"
    asyncio.run(_finish(directory, stores[-1], instances))
    return kills


def _provider(directory: Path, name: str, *, allow_moved: bool = False) -> Provider:
    clock = LifeClock(1)
    if name.endswith(".db"):
        return SqliteProvider(directory / name, clock=clock, allow_moved=allow_moved)
    return FileSystemProvider(directory / name, clock=clock, allow_moved=allow_moved)


async def _fill(directory: Path, target: str, instances: int, rng: random.Random) -> dict[str, str]:
    async with InMemoryProvider(clock=LifeClock(0)) as memory:
        await start_instances(memory, instances, lambda _: None)
        await take_some_steps(memory, TURNS, instances + rng.randrange(instances))
        async with _provider(directory, target) as first:
            await copy_store(memory, first)
        return await _hashes(memory)


async def _hashes(provider: Provider) -> dict[str, str]:
    admin = provider.admin
    assert admin is not None
    hashes: dict[str, str] = {}
    cursor = None
    while True:
        page = await admin.list_instances(cursor=cursor, limit=500)
        for info in page.instances:
            hashes[info.instance_id] = snapshot_hash(await admin.export_instance(info.instance_id))
        if (cursor := page.next_cursor) is None:
            return hashes


def _kill_a_copy(
    directory: Path, source: str, target: str, rng: random.Random, instances: int
) -> bool:
    child = os.fork()
    if child == 0:
        asyncio.run(_copy(directory, source, target))
        os._exit(0)
    time.sleep(rng.uniform(0.1, 0.2 + instances / 2000))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


async def _copy(directory: Path, source: str, target: str) -> dict[str, str]:
    async with (
        _provider(directory, source, allow_moved=True) as origin,
        _provider(directory, target) as destination,
    ):
        with suppress(StoreMoved):  # by one that was killed after its last step
            await copy_store(origin, destination, mark_moved=True)
        return await _hashes(destination)


async def _finish(directory: Path, name: str, instances: int) -> None:
    try:
        await _provider(directory, "store").open()
    except StoreMoved:
        pass
    else:
        raise AssertionError("the moved store can still be opened")
    async with _provider(directory, name) as provider:
        await check_whole(provider, instances)
        runs = (run_to_the_end(provider, TURNS, lambda _: None) for _ in range(_AT_ONCE))
        await asyncio.gather(*runs)
        await check_finished(provider, instances, TURNS)


if __name__ == "__main__":
    main()
