"""Where a database file may lie: refuses unsafe places before SQLite touches anything."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from perdure.errors import StoreRefused, StoreUnavailable
from perdure.providers._shared.directories import sync_directory

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
_HEADER_BYTES: Final = 100

LOG_BYTES_RESERVED: Final = 4 * 1024 * 1024
_ZEROS_BYTES: Final = 64 * 1024
_TEMPORARY_FILE: Final[int | None] = getattr(os, "O_TMPFILE", None)
_MEMORY_FILE_SYSTEMS: Final = frozenset({"ramfs", "tmpfs"})
"""They have no disk to wait for."""


def prepare_file(path: Path) -> None:
    """Check the place and make sure that a private file is there.

    A new file is readable by its owner only, whatever the umask; SQLite gives the same mode to the
    files that it creates beside it. A file that exists is never opened here: closing it would take
    away the locks that other connections of this process hold on it.
    """
    _check_directory(path)
    _check_file_system(path)
    if path.exists() or path.is_symlink():
        check_existing(path)
    else:
        _create(path)


def create_draft(path: Path) -> Path:
    """An empty private file beside a path, to be put in its place."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreUnavailable(
            "open", f"cannot create {str(path)!r}: {error.strerror}; choose a writable directory"
        ) from error
    return draft


def put_in_place(draft: Path, path: Path) -> None:
    """Give a draft its name, durably. Errors: FileExistsError."""
    os.link(draft, path)
    sync_directory(path.parent)


def reserve_log(path: Path) -> None:
    """Put a log of zeros beside a new file that nobody has open: SQLite takes it for empty.

    A commit that overwrites blocks waits for the disk about half as long as one that makes its file
    longer, because the new length is written too. It is only a matter of speed: where it cannot be
    done, SQLite makes the log as it goes.
    """
    log = path.with_name(f"{path.name}-wal")
    if _TEMPORARY_FILE is None or _file_system(path) in _MEMORY_FILE_SYSTEMS or log.exists():
        return
    try:
        model = path.stat()
        # Without a name until it is whole: a crash leaves nothing behind.
        descriptor = os.open(path.parent, _TEMPORARY_FILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, stat.S_IMODE(model.st_mode))
            if (model.st_uid, model.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, model.st_uid, model.st_gid)
            for _ in range(LOG_BYTES_RESERVED // _ZEROS_BYTES):
                os.write(descriptor, bytes(_ZEROS_BYTES))
            os.fsync(descriptor)
            if os.fstat(descriptor).st_size == LOG_BYTES_RESERVED:
                os.link(f"/proc/self/fd/{descriptor}", log, src_dir_fd=descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        pass  # no room, no such files here, or somebody was faster


def _create(path: Path) -> None:
    """Put an empty file in place in one step, so that nobody can have opened it before."""
    draft = create_draft(path)
    try:
        put_in_place(draft, path)
    except FileExistsError:
        pass  # another process was faster, and that is as good
    except OSError as error:
        raise StoreUnavailable("open", f"cannot create {str(path)!r}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


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


def _file_system(path: Path) -> str | None:
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None  # not Linux: the system does not say
    return find_file_system(os.path.realpath(path), mounts)


def _check_file_system(path: Path) -> None:
    kind = _file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreRefused(
            "open",
            f"{str(path)!r} lies on a network file system ({kind}), where SQLite would lose data; "
            "use a local disk, or a postgresql:// store for several machines",
        )


def _check_names(path: Path) -> None:
    """SQLite names the log after the file, so a file with two names would get two logs."""
    if path.stat().st_nlink > 1:
        _remove_drafts(path.resolve())
    names = path.stat().st_nlink
    if names > 1:
        raise StoreRefused(
            "open",
            f"{str(path)!r} has {names} names (hard links); if it were opened under another one as "
            "well, commits would be lost. Remove the other names, or copy the file",
        )


def _remove_drafts(path: Path) -> None:
    """Of whoever is just creating the file, or was killed while doing so."""
    for each in path.parent.iterdir():
        if each.name.startswith(f".{path.name}."):
            with suppress(FileNotFoundError):  # whoever made it has just removed it
                if each.samefile(path):
                    each.unlink()


def not_a_database(path: Path) -> StoreRefused:
    return StoreRefused(
        "open", f"{str(path)!r} is not an SQLite database; name another file for the store"
    )


def check_existing(path: Path) -> None:
    """Whether what is there may be a store of ours, without opening it."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise StoreRefused("open", f"{str(path)!r} is not a regular file; name a database file")
        _check_names(path)
        if 0 < found.st_size < _HEADER_BYTES:
            # SQLite would take it for an empty database, and overwrite it.
            raise not_a_database(path)
        if not os.access(path, os.R_OK | os.W_OK):
            raise StoreUnavailable(
                "open", f"{str(path)!r} cannot be read and written; change its permissions"
            )
    except OSError as error:
        raise StoreUnavailable("open", f"cannot read {str(path)!r}: {error.strerror}") from error
