"""Many processes on one SQLite file at once: no error reaches a caller, and nothing is lost.

python -m campaigns.sqlite_contention --seconds 60      (with tests/ on the path)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaigns.children import Child, await_deaths
from campaigns.sqlite_audit import audit
from campaigns.sqlite_workload import Ledger, Workload
from patience import HANG_SECONDS
from perdure.providers.sqlite import SqliteProvider

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESSES = 8
LOCK_MS = 120_000
"""Longer than any campaign waits for a process: a lock that is lost is an error here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    options = parser.parse_args()
    print(run(options.seconds, options.processes))


def run(seconds: float, processes: int = PROCESSES) -> str:
    """Raises AssertionError if a process met an error or anything is lost, doubled or stuck."""
    with tempfile.TemporaryDirectory() as directory:
        path, ledger = Path(directory) / "store.db", Ledger()
        waits: list[float] = []

        def note(kind: str, *rest: Any) -> None:
            if kind == "fetches":
                waits.extend(rest)
            else:
                ledger.note(kind, *rest)

        # The file does not exist yet: they all try to create it, at once.
        children = [Child(_work, path, seconds) for _ in range(processes)]
        await_deaths(children, seconds + HANG_SECONDS)
        for child in children:
            child.collect(note)
        finisher = Child(_finish, path)
        finisher.collect(note)
        audit(path, ledger, must_be_done=True)
        assert ledger.lost_locks == 0, f"{ledger.lost_locks} locks were lost"
    waits.sort()
    return (
        f"{processes} processes for {seconds:.0f} s: {len(ledger.started)} instances, "
        f"{sum(ledger.events.values())} events, 0 errors, 0 lost, 0 doubled, 0 stuck; fetch median "
        f"{statistics.median(waits) * 1000:.1f} ms, p99 {waits[len(waits) * 99 // 100] * 1000:.0f} "
        f"ms, worst {waits[-1] * 1000:.0f} ms"
    )


async def _work(report: Callable[..., None], path: Path, seconds: float) -> None:
    async with SqliteProvider(path) as provider:
        workload = Workload(provider, report, lock_ms=LOCK_MS)
        until = time.monotonic() + seconds
        await workload.run_until(lambda: time.monotonic() >= until)
        for start in range(0, len(workload.fetch_seconds), 100):
            report("fetches", *workload.fetch_seconds[start : start + 100])


async def _finish(report: Callable[..., None], path: Path) -> None:
    async with SqliteProvider(path) as provider:
        await Workload(provider, report, lock_ms=LOCK_MS).finish()


if __name__ == "__main__":
    main()
