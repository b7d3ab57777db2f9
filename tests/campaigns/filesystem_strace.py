"""Kill a process right before its n-th system call of a kind, for every n and every kind.

    python -m campaigns.filesystem_strace      (with tests/ on the path; needs strace)

The counters of strace are one per thread, so each scenario watches the one thread that does its
part: making a store, recovering one, the writer (it commits fetch, ack, abandon and renew, writes
the files, archives and closes) and the event loop, which commits single small operations. After
each kill the store must open unaided, hold all that was acknowledged, hold no half turn, and go on
to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from campaigns.filesystem_kills import exit_after, live, recover
from campaigns.filesystem_ops import KillingFileOps
from campaigns.filesystem_workload import SMALL, print_report, provider_of_life
from campaigns.filesystem_workload import live as live_under

if TYPE_CHECKING:
    import random

CHANGING_CALLS = (
    *("openat", "write", "pwrite64", "fdatasync", "fsync", "syncfs", "rename", "renameat"),
    *("renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "ftruncate", "fchmod"),
    "flock",
)
KILL_LEFTOVER_AT = 150
"""An operation late in the life whose leftovers are recovered."""
_CALL = re.compile(rf"^(?:(\d+) +)?({'|'.join(CHANGING_CALLS)})\(", re.MULTILINE)
"""A call in the log, but none that strace failed to decode: it writes those as numbers."""
_ATTACH_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Scenario:
    """The thread that is watched, the moment when watching begins, and the store before it."""

    name: str
    thread: str | None = None
    """None: from before the opening on, all threads; the process ends after a checkpoint."""
    is_recovery: bool = False


SCENARIOS = (
    Scenario("making a store"),
    Scenario("recovering and compacting", is_recovery=True),
    Scenario("committing, compacting, archiving and closing", "perdure-sqlite"),
    Scenario("committing on the event loop and reporting", "MainThread"),
)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    if not is_available():
        sys.exit("NOT RUN: strace is not installed, or may not trace processes here")
    print(f"{kill_at_every_system_call()} system calls: 0 lost, 0 doubled, 0 stuck", flush=True)


def is_available() -> bool:
    if shutil.which("strace") is None:
        return False
    command = ["strace", "-qq", "-o", os.devnull, "-e", "trace=none", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def kill_at_every_system_call() -> int:
    """The number of kills; raises at the first violation."""
    total = 0
    with tempfile.TemporaryDirectory() as directory:
        base = Base(Path(directory))
        for scenario in SCENARIOS:
            kills = Counter[str]()
            counts = count_calls(scenario, base)
            assert counts, f"{scenario.name}: the watched thread makes no call"
            for call in sorted(counts):
                while kill_at(scenario, base, call, kills[call] + 1):
                    kills[call] += 1
            print(f"{scenario.name}: {dict(kills)}", flush=True)
            total += kills.total()
    return total


def kill_at_some_system_calls(kills: int, rng: random.Random) -> int:
    """Kill at so many chosen points, and return how many were reached; raise at a violation."""
    with tempfile.TemporaryDirectory() as directory:
        base = Base(Path(directory))
        counts = {scenario: count_calls(scenario, base) for scenario in SCENARIOS}
        assert all(counts.values()), "a scenario watches a thread that makes no call"
        points = [
            (scenario, call, at)
            for scenario, calls in counts.items()
            for call, count in sorted(calls.items())
            for at in range(1, count + 1)
        ]
        return sum(
            kill_at(scenario, base, call, at)
            for scenario, call, at in rng.sample(points, min(kills, len(points)))
        )


class Base:
    """The store that is there before a scenario begins."""

    def __init__(self, directory: Path) -> None:
        self._leftover = directory / "leftover"
        self._reports, was_killed = live(str(self._leftover), 0, KillingFileOps(KILL_LEFTOVER_AT))
        assert was_killed

    def lay(self, scenario: Scenario, path: str) -> list[str]:
        """Put the store at the path, and return what it had acknowledged."""
        if not scenario.is_recovery:
            return []
        shutil.copytree(self._leftover, path)
        return list(self._reports)


# --- one life under strace


def count_calls(scenario: Scenario, base: Base) -> Counter[str]:
    """Return how often the watched thread makes each call that changes something.

    If several threads are watched, the highest count is returned.
    """
    with tempfile.TemporaryDirectory() as directory:
        base.lay(scenario, f"{directory}/store")
        log = f"{directory}/log"
        _live_under_strace(scenario, f"{directory}/store", "-e", _trace(*CHANGING_CALLS), "-o", log)
        by_thread = Counter[tuple[str, str]](_CALL.findall(Path(log).read_text(errors="replace")))
    counts = Counter[str]()
    for (_, call), count in by_thread.items():
        counts[call] = max(counts[call], count)
    return counts


def kill_at(scenario: Scenario, base: Base, call: str, at: int) -> bool:
    """Kill a process at a call and check the store; return False if it ended before the call."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/store"
        reports = base.lay(scenario, path)
        # Without --seccomp-bpf, which silently turns the injection off.
        injection = ("-e", _trace(call), "-e", f"inject={call}:signal=KILL:when={at}")
        more, was_killed = _live_under_strace(scenario, path, *injection, "-o", os.devnull)
        if was_killed:
            recover(path, 2, [*reports, *more])
        return was_killed


def _trace(*calls: str) -> str:
    return "trace=" + ",".join(calls)


def _live_under_strace(scenario: Scenario, path: str, *options: str) -> tuple[list[str], bool]:
    child, reader, gate = _fork(scenario, path)
    lines = os.fdopen(reader, "rb")
    watched = lines.readline().decode().strip()
    follow = ("-f",) if scenario.thread is None else ()
    strace = subprocess.Popen(["strace", "-qq", *follow, *options, "-p", watched])
    _await_tracer(child, watched, strace)
    os.close(gate)
    with lines:
        reports = lines.read().decode().splitlines()
    _, status = os.waitpid(child, 0)
    strace.wait()
    assert os.WIFSIGNALED(status) or status == 0, f"the process failed: {reports}"
    return reports, os.WIFSIGNALED(status)


def _await_tracer(child: int, thread: str, strace: subprocess.Popen[bytes]) -> None:
    status = Path(f"/proc/{child}/task/{thread}/status")
    deadline = time.monotonic() + _ATTACH_SECONDS
    while f"TracerPid:\t{strace.pid}\n" not in status.read_text():
        if strace.poll() is not None or time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise AssertionError(f"strace cannot attach: it ended with {strace.poll()}")
        time.sleep(0.001)


def _fork(scenario: Scenario, path: str) -> tuple[int, int, int]:
    """A process that names the thread to watch and waits until its gate is closed."""
    read_end, write_end = os.pipe()
    gate, gate_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_end)
        os.dup2(write_end, 1)
        exit_after(lambda: asyncio.run(_live(scenario, path, gate)))
    os.close(write_end)
    os.close(gate)
    return child, read_end, gate_end


async def _live(scenario: Scenario, path: str, gate: int) -> None:
    provider = provider_of_life(path, 1)
    if scenario.thread is None:
        _wait_to_be_watched(os.getpid(), gate)
        async with provider:
            await provider.checkpoint()
        return
    async with provider:
        threads = {thread.name: thread.native_id for thread in threading.enumerate()}
        # The main thread's entry still has the number that it had before the fork.
        threads["MainThread"] = threading.get_native_id()
        _wait_to_be_watched(threads[scenario.thread], gate)
        await live_under(provider, SMALL, print_report)


def _wait_to_be_watched(thread: int | None, gate: int) -> None:
    print_report(str(thread))
    os.read(gate, 1)


if __name__ == "__main__":
    main()
