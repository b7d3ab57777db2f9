"""Local files and directories: the file system they lie on, and durable names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre",
        "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs",
        "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mfs",
        "fuse.rclone", "fuse.s3fs", "fuse.seaweedfs", "fuse.smbnetfs", "fuse.sshfs",
    }
)  # fmt: skip
"""File systems whose locks, flushes or shared memory do not hold between machines."""

_MOUNTS = Path("/proc/self/mountinfo")


def sync_directory(directory: Path) -> None:
    """Flush a directory, so that new names in it survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_system_of(path: Path) -> str | None:
    """Return the type of the file system of a path; None where the system does not tell it."""
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None  # not Linux
    return find_file_system(os.path.realpath(path), mounts)


def find_file_system(path: str, mounts: str) -> str | None:
    """Type of the file system that a real path lies on, from the text of a mountinfo file."""
    best, found = -1, None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _unescape(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # The last mount on a point covers the earlier ones.
        if inside and len(point) >= best:
            best, found = len(point), after.split(" ")[0]
    return found


def _unescape(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
