"""Kill processes that work on one SQLite file, and check the file after each life.

    python -m campaigns.sqlite_kill --kills 2000      (with tests/ on the path)

A life is a few processes on the file, or one alone that does one thing at a time. Each dies by
SIGKILL: at a random moment, at a named point around a commit, or inside one, before, in the middle
of or after the n-th write or sync of the database or its log. After each life the file must be
sound and hold everything that was acknowledged, each activity in exactly one place; in the end a
process that is left alone must finish all of it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from campaigns.children import Child, await_deaths
from campaigns.sqlite_audit import audit
from campaigns.sqlite_workload import Ledger, ShiftedClock, Workload
from commit_points import ObservedProvider
from patience import HANG_SECONDS
from perdure.providers.sqlite import SqliteProvider

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESSES = 2
LIVES_PER_FILE = 25
LOCK_MS = 30_000
SHIFT_MS = 60_000
"""The clock of each process is so far ahead of the one before that its locks have expired."""
LIFE_SECONDS_MAX = 10.0
RANDOM = "at a random moment"
POINTS = ("begun", "before commit", "after commit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    begin = time.monotonic()
    done = run(options.kills, options.seed, report=lambda text: print(text, flush=True))
    print(f"{done} in {time.monotonic() - begin:.0f} s: 0 lost, 0 doubled, 0 stuck, 0 damaged")


def run(kills: int, seed: int, report: Callable[[str], None] = lambda _: None) -> Tally:
    """At least that many kills; raises AssertionError at the first violation."""
    rng, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        with tempfile.TemporaryDirectory() as directory:
            path, ledger = Path(directory) / "store.db", Ledger()
            for life in range(LIVES_PER_FILE):
                tally.add(_live_and_die(path, life, rng, ledger))
                audit(path, ledger)
                if tally.kills >= kills:
                    break
            _finish(path, LIVES_PER_FILE, ledger)
            audit(path, ledger, must_be_done=True)
            tally.instances += len(ledger.started)
            tally.events += sum(ledger.events.values())
        report(f"{tally}; nothing lost, doubled, stuck or damaged")
    return tally


class Tally:
    """The counts of a campaign."""

    def __init__(self) -> None:
        self.by_way: dict[str, int] = {}
        self.instances = 0
        self.events = 0

    @property
    def kills(self) -> int:
        return sum(self.by_way.values())

    def add(self, ways: list[str]) -> None:
        for way in ways:
            self.by_way[way] = self.by_way.get(way, 0) + 1

    def __str__(self) -> str:
        ways = ", ".join(f"{count} {way}" for way, count in sorted(self.by_way.items()))
        return f"{self.kills} kills ({ways}), {self.instances} instances, {self.events} events"


# --- one life


def _live_and_die(path: Path, life: int, rng: random.Random, ledger: Ledger) -> list[str]:
    plan = _plan_from_outside if rng.random() < 0.3 else _plan_from_inside
    work, processes = (_work_alone, 1) if rng.random() < 0.3 else (_work, PROCESSES)
    plans = [plan(rng) for _ in range(processes)]
    children = [Child(work, path, life, plan) for plan in plans]
    await_deaths(children, min(plan.get("after", LIFE_SECONDS_MAX) for plan in plans))
    ways: list[str] = []
    for child, plan in zip(children, plans, strict=True):
        # One that has not reached its point by now dies like the others: at a random moment.
        ways.append(RANDOM if child.kill() else plan["way"])
        child.collect(ledger.note)
    return ways


def _plan_from_outside(rng: random.Random) -> dict[str, Any]:
    return {"way": RANDOM, "after": rng.uniform(0.01, 0.15)}


def _plan_from_inside(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        point = rng.choice(POINTS)
        return {"way": point, "point": point, "number": rng.randrange(1, 60)}
    operation = rng.choice(("write", "sync"))
    moment = rng.choice(
        ("before", "half-way", "after") if operation == "write" else ("before", "after")
    )
    return {
        "way": f"{moment} a {operation}",
        "operation": operation,
        "moment": moment,
        "number": rng.randrange(1, 400 if operation == "write" else 60),
    }


async def _work(report: Callable[..., None], path: Path, life: int, plan: dict[str, Any]) -> None:
    provider = await _open_mortal(path, life, plan)
    await Workload(provider, report, lock_ms=LOCK_MS).run_until(lambda: False)


async def _work_alone(
    report: Callable[..., None], path: Path, life: int, plan: dict[str, Any]
) -> None:
    provider = await _open_mortal(path, life, plan)
    await Workload(provider, report, lock_ms=LOCK_MS).run_alone()


async def _open_mortal(path: Path, life: int, plan: dict[str, Any]) -> SqliteProvider:
    if "operation" in plan:
        _die_inside(plan)
    provider = _Mortal(path, ShiftedClock(life * SHIFT_MS), plan)
    await provider.open()
    return provider


async def _do_the_rest(report: Callable[..., None], path: Path, life: int) -> None:
    async with SqliteProvider(path, clock=ShiftedClock(life * SHIFT_MS)) as provider:
        await Workload(provider, report, lock_ms=LOCK_MS).finish()


def _finish(path: Path, life: int, ledger: Ledger) -> None:
    child = Child(_do_the_rest, path, life)
    await_deaths([child], HANG_SECONDS)
    assert child.is_dead, "the rest was not done in time"
    child.collect(ledger.note)


# --- ways to die


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Mortal(ObservedProvider):
    """Dies at the n-th time that a commit reaches a point."""

    def __init__(self, path: Path, clock: ShiftedClock, plan: dict[str, Any]) -> None:
        super().__init__(path, clock=clock)
        self._point = plan.get("point")
        self._left = plan.get("number", 0)

    def reached(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                _die()


def _die_inside(plan: dict[str, Any]) -> None:
    """From now on every file of SQLite is opened through a layer that counts, and kills."""
    countdown, base = [plan["number"]], apsw.vfs_names()[0]

    class MortalFile(apsw.VFSFile):
        def __init__(self, name: Any, flags: list[int]) -> None:
            super().__init__(base, name, flags)

        def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - SQLite's name
            if self._is_time("write"):
                if plan["moment"] == "half-way":
                    super().xWrite(data[: len(data) // 2], offset)
                elif plan["moment"] == "after":
                    super().xWrite(data, offset)
                _die()
            super().xWrite(data, offset)

        def xSync(self, flags: int) -> None:  # noqa: N802 - SQLite's name
            if self._is_time("sync"):
                if plan["moment"] == "after":
                    super().xSync(flags)
                _die()
            super().xSync(flags)

        def _is_time(self, operation: str) -> bool:
            if operation == plan["operation"]:
                countdown[0] -= 1
            return operation == plan["operation"] and countdown[0] == 0

    class MortalVFS(apsw.VFS):
        def __init__(self) -> None:
            super().__init__("mortal", base, makedefault=True)

        def xOpen(self, name: Any, flags: list[int]) -> MortalFile:  # noqa: N802 - SQLite's name
            return MortalFile(name, flags)

    _layers.append(MortalVFS())


_layers: list[apsw.VFS] = []
"""Kept alive for as long as the process lives."""


if __name__ == "__main__":
    main()
