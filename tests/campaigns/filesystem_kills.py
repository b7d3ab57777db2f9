"""Kill a process that uses a directory as its store, again and again, and look at what is left.

    python -m campaigns.filesystem_kills --kills 2000      (with tests/ on the path)

Two ways: before every operation on the files (and in the middle of every write), in each of two
lives, and at random moments. After each kill the store must open unaided, hold all that was
acknowledged, hold no half turn, and go on to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from campaigns.filesystem_ops import CountedFileOps, KillingFileOps
from campaigns.filesystem_workload import (
    BUSY,
    SMALL,
    check_finished,
    check_reported,
    check_whole,
    print_report,
    provider_of_life,
    run_to_the_end,
    start_instances,
)
from campaigns.filesystem_workload import live as live_under

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from campaigns.filesystem_workload import Load
    from perdure.providers.directory.fileops import FileOps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=2000, help="at random moments")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    points = kill_at_every_operation(every=1)
    print(f"{points} points in two lives: 0 lost, 0 doubled, 0 stuck", flush=True)
    kills = kill_at_random(options.kills, random.Random(options.seed))
    print(f"{kills} random kills: 0 lost, 0 doubled, 0 stuck", flush=True)


# --- before every operation


def kill_at_every_operation(*, every: int, offset: int = 0) -> int:
    """Kill the first life at each point, and the recovery from it at the same one."""
    points = 0
    for at in _points(every, offset):
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/store"
            reports, was_killed = live(path, 0, KillingFileOps(at))
            if not was_killed:
                return points
            more, was_killed_again = live(path, 1, KillingFileOps(at))
            recover(path, 2, [*reports, *more])
        points += 1 + was_killed_again
    raise AssertionError("unreachable")


def _points(every: int, offset: int) -> Iterator[int]:
    at = 1 + offset
    while True:
        yield at
        at += every


# --- at random moments


def kill_at_random(kills: int, rng: random.Random) -> int:
    """Several lives on one store, each killed after a while; then it is finished and judged."""
    done = 0
    while done < kills:
        with tempfile.TemporaryDirectory() as directory:
            path, reports, load = f"{directory}/store", list[str](), rng.choice((SMALL, BUSY))
            for life in range(6):
                after = rng.uniform(0, 0.12)
                more, was_killed = live(path, life, CountedFileOps(), after, load=load)
                reports += more
                done += was_killed
                if not was_killed:
                    break
            recover(path, 7, reports, load=load)
        if done % 100 < 6:
            print(f"{done} of {kills} random kills", flush=True)
    return done


# --- lives


def live(
    path: str,
    life: int,
    file_ops: FileOps,
    kill_after_seconds: float | None = None,
    *,
    load: Load = SMALL,
) -> tuple[list[str], bool]:
    """Return the reports of a process before its end, and whether it was killed."""
    child, read_end = fork_life(path, life, file_ops, load=load)
    if kill_after_seconds is not None:
        time.sleep(kill_after_seconds)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(read_end, "rb") as reader:
        lines = reader.read().decode().splitlines()
    _, status = os.waitpid(child, 0)
    was_killed = os.WIFSIGNALED(status)
    assert was_killed or status == 0, f"the process failed: {lines}"
    return lines, was_killed


def fork_life(
    path: str,
    life: int,
    file_ops: FileOps | None = None,
    *,
    load: Load = SMALL,
    is_quiet: bool = False,
) -> tuple[int, int]:
    """A process that uses the store, and the pipe on which it reports."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write_end, 1)
        if is_quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        exit_after(lambda: asyncio.run(_live(path, life, file_ops, load)))
    os.close(write_end)
    return child, read_end


def exit_after(body: Callable[[], None]) -> None:
    """Never returns: a fork of the campaign must not go on with the campaign."""
    try:
        body()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


async def _live(path: str, life: int, file_ops: FileOps | None, load: Load) -> None:
    async with provider_of_life(path, life, file_ops) as provider:
        await live_under(provider, load, print_report)


def recover(path: str, life: int, reports: list[str], *, load: Load = SMALL) -> None:
    """Open what is left, judge it, go on to the end; on failure keep it for a look."""
    kept = tempfile.mkdtemp(prefix="perdure-killed-")
    if Path(path).exists():
        shutil.copytree(path, f"{kept}/before")
    try:
        asyncio.run(_recover(path, life, reports, load))
    except BaseException:
        shutil.copytree(path, f"{kept}/after")
        print(f"kept in {kept}; reported: {reports}", file=sys.stderr)
        raise
    shutil.rmtree(kept)


async def _recover(path: str, life: int, reports: list[str], load: Load) -> None:
    async with provider_of_life(path, life) as provider:
        await check_whole(provider, load.instances)
        await check_reported(provider, reports)
        await start_instances(provider, load.instances, lambda _: None)
        await run_to_the_end(provider, load.turns, lambda _: None)
        await check_finished(provider, load.instances, load.turns)
    async with provider_of_life(path, life + 1) as provider:
        await check_finished(provider, load.instances, load.turns)
        assert not list((Path(path) / "tmp").iterdir())


if __name__ == "__main__":
    main()
