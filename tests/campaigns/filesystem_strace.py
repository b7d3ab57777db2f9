"""Kill a process at its n-th system call of a kind, for every n, with strace's fault injection.

The counter of strace is one per thread, so each scenario keeps one thread busy: committing (fetch,
ack, abandon, renew), or writing the files (compaction) after recovering what a killed process left.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from campaigns.filesystem_faults import KillingFileOps
from campaigns.filesystem_kills import INSTANCES, TURNS, live, recover

CHANGING_CALLS = (
    "write",
    "fdatasync",
    "fsync",
    "syncfs",
    "rename",
    "renameat",
    "unlink",
    "unlinkat",
    "mkdir",
    "mkdirat",
    "ftruncate",
    "fchmod",
    "flock",
)
SCENARIOS = {"committing": (), "compacting": ("--only-checkpoint",)}
KILL_LEFTOVER_AT = 150
"""An operation late in the life whose leftovers the second scenario recovers and compacts."""


def is_available() -> bool:
    return shutil.which("strace") is not None


def kill_at_every_system_call(*, every: int) -> int:
    """The number of kills; raises at the first violation."""
    if not is_available():
        raise SystemExit("NOT RUN: strace is not installed")
    with tempfile.TemporaryDirectory() as directory:
        leftover = Path(directory) / "leftover"
        reports, was_killed = live(str(leftover), 0, KillingFileOps(KILL_LEFTOVER_AT))
        assert was_killed
        bases = {"committing": (None, list[str]()), "compacting": (leftover, reports)}
        return sum(
            _kill_at_each(scenario, call, *bases[scenario], every)
            for scenario in SCENARIOS
            for call in CHANGING_CALLS
        )


def _kill_at_each(
    scenario: str, call: str, base: Path | None, reports: list[str], every: int
) -> int:
    kills, at = 0, 1
    while True:
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/store"
            if base is not None:
                shutil.copytree(base, path)
            more, was_killed = _live_under_strace(path, call, at, SCENARIOS[scenario])
            if not was_killed:
                return kills
            recover(path, 2, [*reports, *more])
        kills, at = kills + 1, at + every


def _live_under_strace(
    path: str, call: str, at: int, arguments: tuple[str, ...]
) -> tuple[list[str], bool]:
    # Without --seccomp-bpf, which silently turns the injection off.
    command = [
        *("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}"),
        *("-e", f"inject={call}:signal=KILL:when={at}"),
        *(sys.executable, "-B", "-m", "campaigns.filesystem_child", path, "--life", "1"),
        *("--instances", str(INSTANCES), "--turns", str(TURNS), *arguments),
    ]
    result = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    was_killed = result.returncode in {-signal.SIGKILL, 128 + signal.SIGKILL}
    assert was_killed or result.returncode == 0, result.stderr
    reports = [line for line in result.stdout.splitlines() if line not in {"opened", "closed"}]
    return reports, was_killed
