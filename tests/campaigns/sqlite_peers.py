"""Kill workers that share one SQLite file while their boards and pipes are damaged.

    python -m campaigns.sqlite_peers --kills 200      (with tests/ on the path)

Four worker processes run a mixed load on one file. At random moments one of them is killed with
SIGKILL and replaced, and in between files beside the store are removed, filled, or replaced by
others. There are two kinds of rounds:

- only pipes are spoiled, and locks last ten minutes: the load ends only because others take over
  from the dead, and no live worker may ever lose a lock;
- boards are spoiled too, which hides the dead: the load ends because locks of a second expire.

Every result must be right in both.
"""

import argparse
import asyncio
import logging
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from campaigns.mixed_load import HANDLERS, load
from campaigns.runtime_kill import _check, _fork, _in_child, _start_load
from patience import HANG_SECONDS
from perdure import Client, Runtime, RuntimeOptions, SqliteProvider

INSTANCES = 28
WORKERS = 4
KILLS_PER_ROUND = 10
LOST = "lost-locks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    kills, spoiled = run(options.kills, seed, report=lambda text: print(text, flush=True))
    print(
        f"{kills} kills, {spoiled} files spoiled: 0 lost, 0 doubled, 0 stuck, "
        "0 locks taken from live processes"
    )


def run(kills: int, seed: int, report=lambda _text: None) -> tuple[int, int]:
    """Do at least that many kills; raises at the first violation."""
    rng, done, spoiled = random.Random(seed), 0, 0
    for hides_dead in cycle([False, True]):
        if done >= kills:
            break
        given = list(load(INSTANCES))
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "store.db"
            _in_child(_start_load, path, given)
            lock_seconds = 1 if hides_dead else 600
            workers = [_fork(_work, path, lock_seconds) for _ in range(WORKERS)]
            try:
                for _ in range(min(KILLS_PER_ROUND, kills - done)):
                    seconds = rng.uniform(0.05, 0.4)
                    spoiled += _spoil_for(seconds, path, rng, "*" if hides_dead else "*.pipe")
                    victim = workers.pop(rng.randrange(len(workers)))
                    _kill(victim)
                    workers.append(_fork(_work, path, lock_seconds))
                    done += 1
                _in_child(_wait_for_results, path, given)
            finally:
                for worker in workers:
                    _kill(worker)
            _in_child(_check, path, given)
            lost = path.with_name(LOST)
            assert hides_dead or not lost.exists(), (
                f"a live process lost a lock: {lost.read_text()}"
            )
        report(f"{done} of {kills} kills, nothing lost, doubled or stuck")
    return done, spoiled


def _kill(worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


def _spoil_for(seconds: float, path: Path, rng: random.Random, pattern: str) -> int:
    """Damage boards and pipes for a while; return how many."""
    until, spoiled = time.monotonic() + seconds, 0
    directory = path.with_name(f"{path.name}-peers")
    while time.monotonic() < until:
        with suppress(OSError):
            files = sorted(directory.glob(pattern))
            if files:
                rng.choice(SPOILERS)(rng.choice(files))
                spoiled += 1
        time.sleep(rng.uniform(0.01, 0.1))
    return spoiled


def _remove(file: Path) -> None:
    file.unlink()


def _fill(file: Path) -> None:
    if file.suffix == ".pipe":
        pipe = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        try:
            for _ in range(32):  # twice what a pipe holds; its reader may be quick
                os.write(pipe, os.urandom(4096))
        finally:
            os.close(pipe)


def _put_a_file(file: Path) -> None:
    file.unlink()
    file.write_bytes(b"x" * 4096)


def _put_a_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/null")


def _open_to_all(file: Path) -> None:
    file.chmod(0o666)


SPOILERS = (_remove, _fill, _put_a_file, _put_a_link, _open_to_all)


class _LostLocks(logging.Handler):
    """Writes down each lock that a live worker has lost."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "lock" in text and "lost" in text:
            with self._path.open("a") as file:
                file.write(f"{os.getpid()}: {text}\n")


async def _work(path: Path, lock_seconds: float) -> None:
    logging.getLogger("perdure").addHandler(_LostLocks(path.with_name(LOST)))
    logging.getLogger("perdure").setLevel(logging.INFO)
    logging.getLogger("perdure").propagate = False
    options = RuntimeOptions(
        orchestration_lock_timeout=lock_seconds,
        activity_lock_timeout=lock_seconds,
        max_attempts=1000,
        threads=4,
    )
    async with Runtime(SqliteProvider(path), HANDLERS, options=options):
        await asyncio.Event().wait()


async def _wait_for_results(path: Path, given) -> None:
    async with Client(SqliteProvider(path)) as client:
        for _, _, instance_id, expected in given:
            result = await client.get(instance_id).result(HANG_SECONDS)
            assert result == expected, f"{instance_id}: {result!r} instead of {expected!r}"


if __name__ == "__main__":
    main()
