"""Cut the power under a store on a real ext4 and see that nothing acknowledged is lost.

    python -m campaigns.filesystem_power_cuts --cuts 500      (with tests/ on the path, as root)

The store lies on a file system of its own, in a loop-mounted image. A cut is the kernel's shutdown
call for file systems: from that moment on nothing reaches the image, and what was only cached is
gone. It says loudly when it cannot run.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from campaigns.filesystem_kills import fork_life, recover
from campaigns.filesystem_workload import BUSY

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSH = 2
_IMAGE_MEGABYTES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"NOT RUN: {reason}")
    print(f"seed {options.seed}", flush=True)
    acknowledged = cut_power(options.cuts, random.Random(options.seed))
    print(f"{options.cuts} power cuts, {acknowledged} acknowledged operations, 0 lost", flush=True)


def why_not() -> str | None:
    """Return why the campaign cannot run here, or None if it can."""
    if os.geteuid() != 0:
        return "power cuts need root, to mount a file system in a file"
    for tool in ("mkfs.ext4", "mount", "umount"):
        if shutil.which(tool) is None:
            return f"power cuts need {tool}"
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            _image(Path(directory)) as image,
            _mounted(image) as mount_point,
        ):
            _cut(mount_point)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"a loop-mounted ext4 cannot be cut here: {error}"
    return None


def cut_power(cuts: int, rng: random.Random) -> int:
    """The number of operations that had been acknowledged; raises at the first that is lost."""
    acknowledged = 0
    with tempfile.TemporaryDirectory() as directory, _image(Path(directory)) as image:
        for cut in range(cuts):
            with _mounted(image) as mount_point:
                reports = _live_until_cut(mount_point, rng)
            with _mounted(image) as mount_point:
                recover(f"{mount_point}/store", 1, reports, load=BUSY)
                shutil.rmtree(f"{mount_point}/store")
            acknowledged += len(reports)
            if cut % 50 == 49:
                print(f"{cut + 1} of {cuts} cuts, {acknowledged} operations", flush=True)
    return acknowledged


def _live_until_cut(mount_point: str, rng: random.Random) -> list[str]:
    child, reader = fork_life(f"{mount_point}/store", 0, load=BUSY, is_quiet=True)
    time.sleep(rng.uniform(0.005, 0.25))
    # Only what was reported before the cut: a flush that races with the shutdown call may return
    # success although it came too late, which no power failure can do to a program.
    os.set_blocking(reader, False)
    with os.fdopen(reader, "rb") as lines:
        reports = (lines.read() or b"").decode()
        _cut(mount_point)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return reports[: reports.rfind("\n") + 1].splitlines()


def _cut(mount_point: str) -> None:
    descriptor = os.open(mount_point, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, array.array("I", [_WITHOUT_FLUSH]))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _image(directory: Path) -> Iterator[Path]:
    image = directory / "image"
    with image.open("wb") as file:
        file.truncate(_IMAGE_MEGABYTES << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
    yield image


@contextlib.contextmanager
def _mounted(image: Path) -> Iterator[str]:
    mount_point = image.with_name("mount")
    mount_point.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, mount_point], check=True, capture_output=True)
    try:
        yield str(mount_point)
    finally:
        subprocess.run(["umount", mount_point], check=True, capture_output=True)


if __name__ == "__main__":
    main()
