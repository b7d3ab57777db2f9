"""What kind of file system a directory lies on: locks and flushes of network ones are not kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from perdure.providers.local_files import NETWORK_FILE_SYSTEMS

_MOUNTS: Final = Path("/proc/self/mountinfo")


def network_file_system(descriptor: int) -> str | None:
    """Its type if the directory is on another machine; None if it is not, or cannot be told."""
    device = os.fstat(descriptor).st_dev
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    kind = find_type(mounts, os.major(device), os.minor(device))
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def find_type(mounts: str, major: int, minor: int) -> str | None:
    """Type of the file system of a device, from the text of a mountinfo file."""
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        if place.split()[2:3] == [f"{major}:{minor}"]:
            return source.split()[0]
    return None
