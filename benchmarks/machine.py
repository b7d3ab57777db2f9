"""The machine of the measurement, and the best figures of its disk and interpreter."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

if TYPE_CHECKING:
    from collections.abc import Callable


def describe(base: Path) -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "commit_full_ms": round(commit_ms(base, "FULL"), 3),
        "commit_normal_ms": round(commit_ms(base, "NORMAL"), 3),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit_ms(base: Path, synchronous: str, commits: int = 200) -> float:
    """Median time of one small SQLite commit in WAL mode."""
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as directory:
        connection = apsw.Connection(f"{directory}/floor.db")
        connection.pragma("journal_mode", "wal")
        connection.pragma("synchronous", synchronous)
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, body TEXT)")

        def commit() -> None:
            with connection:
                connection.execute("INSERT INTO t (body) VALUES (?)", ("x" * 200,))

        try:
            return median_ms(commit, commits)
        finally:
            connection.close()


def median_ms(action: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        taken.append((time.perf_counter() - begin) * 1000)
    return statistics.median(taken)
