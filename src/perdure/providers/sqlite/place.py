"""Where a database file may lie: refuses unsafe places before SQLite touches anything."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from perdure.errors import StoreRefused, StoreUnavailable

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre",
        "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs",
        "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mfs",
        "fuse.rclone", "fuse.s3fs", "fuse.seaweedfs", "fuse.smbnetfs", "fuse.sshfs",
    }
)  # fmt: skip
"""Their locks or their shared memory do not hold between machines: WAL would corrupt the file."""

_MOUNTS = Path("/proc/self/mountinfo")
_MAGIC: Final = b"SQLite format 3\x00"


def prepare_file(path: Path) -> bool:
    """Check the place and make sure that a private file is there; True if it was created.

    A new file is readable by its owner only, whatever the umask; SQLite gives the same mode to the
    files that it creates beside it.
    """
    _check_directory(path)
    _check_file_system(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        _check_existing(path)
        return False
    except OSError as error:
        raise StoreUnavailable(
            "open", f"cannot create {str(path)!r}: {error.strerror}; choose a writable directory"
        ) from error
    try:
        os.fchmod(descriptor, 0o600)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _sync_directory(path.parent)
    return True


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


def _check_directory(path: Path) -> None:
    parent = path.parent
    if not parent.is_dir():
        raise StoreUnavailable(
            "open",
            f"the directory {str(parent)!r} of {path.name!r} does not exist; create it first, or "
            "check the path",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreUnavailable(
            "open",
            f"the directory {str(parent)!r} cannot be written; SQLite needs to create files beside "
            f"{path.name!r}. Change its permissions, or choose another place",
        )


def _check_file_system(path: Path) -> None:
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return  # not Linux: the system does not say
    kind = find_file_system(os.path.realpath(path), mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreRefused(
            "open",
            f"{str(path)!r} lies on a network file system ({kind}), where SQLite would lose data; "
            "use a local disk, or a postgresql:// store for several machines",
        )


def _check_existing(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise StoreRefused("open", f"{str(path)!r} is not a regular file; name a database file")
        if not os.access(path, os.R_OK | os.W_OK):
            raise StoreUnavailable(
                "open", f"{str(path)!r} cannot be read and written; change its permissions"
            )
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise StoreUnavailable("open", f"cannot read {str(path)!r}: {error.strerror}") from error
    if head and head != _MAGIC:
        raise StoreRefused(
            "open", f"{str(path)!r} is not an SQLite database; name another file for the store"
        )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
