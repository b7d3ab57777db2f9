"""Local files: what Linux, macOS and Windows do in different ways, and where a store may lie.

| | Linux | macOS | Windows |
|---|---|---|---|
| lock of a process | flock | flock | LockFileEx |
| data on the disk | fsync, fdatasync | F_FULLFSYNC | FlushFileBuffers |
| names on the disk | fsync of the directory | the same | a move that is written through |
| private to a user | owner and mode | owner and mode | not checked |
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from perdure.errors import StoreRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""A umask can only take rights away from these, and only the owner has any."""

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre",
        "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs",
        "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mfs",
        "fuse.rclone", "fuse.s3fs", "fuse.seaweedfs", "fuse.smbnetfs", "fuse.sshfs",
        "a network drive",
    }
)  # fmt: skip
"""File systems whose locks, flushes or shared memory do not hold between machines."""

if sys.platform == "win32":
    import ctypes
    import msvcrt

    Directory: TypeAlias = str
    """An open directory: its path, because Windows has no descriptors of directories."""
    PLAIN_FILE: Final = os.O_BINARY
    """Flags of every open(): without them Windows changes the ends of lines."""
    _LOCKED_BYTE: Final = {"offset_high": 1 << 30}
    """A locked byte can be neither read nor written, so this one lies behind every content."""
    _OPEN_ELSEWHERE: Final = frozenset({5, 32, 33})
    """Errors of Windows: another program, such as a virus scanner, has the file open."""
    _ATTEMPTS: Final = 40
    _PAUSE_SECONDS: Final = 0.025
    _REPLACE_AND_WRITE_THROUGH: Final = 0x1 | 0x8
    _REMOTE_DRIVE: Final = 4
    _DEVICES: Final[frozenset[str]] = frozenset(
        {
            "AUX",
            "CON",
            "NUL",
            "PRN",
            *(f"{name}{n}" for name in ("COM", "LPT") for n in range(1, 10)),
        }
    )
    _EXCLUSIVE_AT_ONCE: Final = 0x2 | 0x1
    _LOCK_VIOLATION: Final = 33

    class _Overlapped(ctypes.Structure):
        """The place of a lock in a file."""

        _fields_ = (
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", ctypes.c_uint32),
            ("offset_high", ctypes.c_uint32),
            ("event", ctypes.c_void_p),
        )

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)

    def own_user() -> int | None:
        """Return the number of this process's user; None where users have no numbers."""
        return None

    def long_path(path: str) -> str:
        """Return a path in the form that may have any length; others end at 260 characters."""
        full = os.path.abspath(path)  # noqa: PTH100 - as it was named
        if full.startswith("\\\\?\\"):
            return full
        return f"\\\\?\\UNC{full[1:]}" if full.startswith("\\\\") else f"\\\\?\\{full}"

    def place(path: str, at: Directory | None) -> tuple[str, int | None]:
        """Return a path in a directory and the ``dir_fd`` that it is relative to."""
        if at is None:
            return path, None
        return "\\".join([at, *(part for part in path.split("/") if part != ".")]), None

    def open_directory(
        path: str, at: Directory | None = None, *, may_be_link: bool = False
    ) -> Directory:
        """Open a directory. Errors: OSError, also for a link to one."""
        full = long_path(path) if at is None else place(path, at)[0]
        found = os.lstat(full)
        if not may_be_link and (_is_link(found) or not stat.S_ISDIR(found.st_mode)):
            raise NotADirectoryError(errno.ENOTDIR, "is a link or no directory", full)
        return full

    def close_directory(directory: Directory) -> None:
        """Close what ``open_directory`` has opened."""

    def is_plain(entry: os.DirEntry[str]) -> bool:
        """Return True if it is a file or a directory, and no link or special file."""
        return not _is_link(entry.stat(follow_symlinks=False))

    def _is_link(found: os.stat_result) -> bool:
        """Return True if it is a symbolic link or a junction."""
        return (
            stat.S_ISLNK(found.st_mode) or found.st_reparse_tag == stat.IO_REPARSE_TAG_MOUNT_POINT
        )

    def replace(source: str, target: str, at: Directory) -> None:
        """Give a file or a directory another name; what has that name already is replaced."""
        names = place(source, at)[0], place(target, at)[0]

        def move() -> None:
            if not _kernel.MoveFileExW(*names, _REPLACE_AND_WRITE_THROUGH):
                raise ctypes.WinError(ctypes.get_last_error())

        _wait_for_others(move)

    def put_in_place(draft: Path, path: Path) -> None:
        """Give a draft its name, durably. Errors: FileExistsError."""
        _wait_for_others(lambda: os.rename(draft, path))  # noqa: PTH104 - it does not replace here

    def remove(path: str, at: Directory) -> None:
        """Remove a file."""
        _wait_for_others(lambda: os.unlink(place(path, at)[0]))  # noqa: PTH108

    def _wait_for_others(operation: Callable[[], None]) -> None:
        """Repeat an operation for a while if another program has the file open."""
        for _ in range(_ATTEMPTS):
            try:
                operation()
            except FileExistsError:
                raise
            except OSError as error:
                if error.winerror not in _OPEN_ELSEWHERE:
                    raise
                time.sleep(_PAUSE_SECONDS)
            else:
                return
        operation()

    def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
        """Write at a place of an open file. Used by one thread at a time."""
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)

    def try_lock(descriptor: int) -> bool:
        """Lock a file for this process, until the last copy of the descriptor is closed."""
        byte = _Overlapped(**_LOCKED_BYTE)
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(descriptor))
        if _kernel.LockFileEx(handle, _EXCLUSIVE_AT_ONCE, 0, 1, 0, ctypes.byref(byte)):
            return True
        if ctypes.get_last_error() != _LOCK_VIOLATION:
            raise ctypes.WinError(ctypes.get_last_error())
        return False

    def is_locked(descriptor: int) -> bool:
        """Return True if a process has locked the file by ``try_lock``."""
        if not try_lock(descriptor):
            return True
        byte = _Overlapped(**_LOCKED_BYTE)
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(descriptor))
        _kernel.UnlockFileEx(handle, 0, 1, 0, ctypes.byref(byte))
        return False

    def sync_file(descriptor: int) -> None:
        """Make an open file durable."""
        os.fsync(descriptor)

    sync_data = sync_file

    def sync_names(directory: Directory) -> None:
        """Make new names in an open directory durable: the move that gave them has done so."""

    def make_private(opened: int | Directory, mode: int = FILE_MODE) -> None:
        """Let only its owner use an open file or directory: the directory above decides here."""

    def file_system_of(path: Path) -> str | None:
        """Return the type of the file system of a path; None where the system does not tell it."""
        drive, _ = os.path.splitdrive(os.path.abspath(path))  # noqa: PTH100 - it need not exist
        is_remote = _kernel.GetDriveTypeW(f"{drive}\\") == _REMOTE_DRIVE
        return "a network drive" if is_remote else None

else:
    import fcntl

    Directory: TypeAlias = int
    """An open directory: its descriptor."""
    PLAIN_FILE: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    """Flags of every open(): never through a link, and never waiting for a pipe."""
    _DEVICES: Final[frozenset[str]] = frozenset()
    _MOUNTS = Path("/proc/self/mountinfo")

    def own_user() -> int | None:
        """Return the number of this process's user; None where users have no numbers."""
        return os.geteuid()

    def place(path: str, at: Directory | None) -> tuple[str, int | None]:
        """Return a path in a directory and the ``dir_fd`` that it is relative to."""
        return path, at

    def long_path(path: str) -> str:
        """Return a path in the form that may have any length."""
        return path

    def open_directory(
        path: str, at: Directory | None = None, *, may_be_link: bool = False
    ) -> Directory:
        """Open a directory. Errors: OSError, also for a link to one."""
        flags = os.O_RDONLY | os.O_DIRECTORY | PLAIN_FILE
        return os.open(path, flags & ~os.O_NOFOLLOW if may_be_link else flags, dir_fd=at)

    def close_directory(directory: Directory) -> None:
        """Close what ``open_directory`` has opened."""
        os.close(directory)

    def is_plain(entry: os.DirEntry[str]) -> bool:
        """Return True if it is a file or a directory, and no link or special file."""
        return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)

    def replace(source: str, target: str, at: Directory) -> None:
        """Give a file or a directory another name; what has that name already is replaced."""
        os.rename(source, target, src_dir_fd=at, dst_dir_fd=at)

    def put_in_place(draft: Path, path: Path) -> None:
        """Give a draft its name, durably. Errors: FileExistsError."""
        if draft.is_dir():
            draft.rename(path)
        else:
            os.link(draft, path)
        sync_directory(path.parent)

    def remove(path: str, at: Directory) -> None:
        """Remove a file."""
        os.unlink(path, dir_fd=at)

    def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
        """Write at a place of an open file. Used by one thread at a time."""
        return os.pwrite(descriptor, data, offset)

    def try_lock(descriptor: int) -> bool:
        """Lock a file for this process, until the last copy of the descriptor is closed."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_locked(descriptor: int) -> bool:
        """Return True if a process has locked the file by ``try_lock``."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False

    def sync_file(descriptor: int) -> None:
        """Make an open file durable."""
        if sys.platform == "darwin":  # where fsync leaves the data in the cache of the disk
            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            except OSError as error:
                if error.errno not in {errno.ENOTSUP, errno.EINVAL, errno.ENOTTY}:
                    raise
            else:
                return  # some file systems there have only fsync
        os.fsync(descriptor)

    if sys.platform == "darwin":
        sync_data = sync_file
    else:
        sync_data = os.fdatasync

    def sync_names(directory: Directory) -> None:
        """Make new names in an open directory durable."""
        sync_file(directory)

    def make_private(opened: int | Directory, mode: int = FILE_MODE) -> None:
        """Let only its owner use an open file or directory."""
        os.fchmod(opened, mode)

    def file_system_of(path: Path) -> str | None:
        """Return the type of the file system of a path; None where the system does not tell it."""
        try:
            mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None  # not Linux
        return find_file_system(os.path.realpath(path), mounts)


def is_device(name: str) -> bool:
    """Return True if no file can have the name: it is one of a device, as ``nul.db`` on Windows."""
    return name.partition(".")[0].rstrip(" ").upper() in _DEVICES


def sync_directory(path: Path) -> None:
    """Make new names in a directory durable."""
    directory = open_directory(str(path), may_be_link=True)
    try:
        sync_names(directory)
    finally:
        close_directory(directory)


def create_private(path: Path) -> int:
    """Create a file that only its owner can use, and return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN_FILE
    descriptor = os.open(path, flags, FILE_MODE)
    make_private(descriptor)
    return descriptor


# --- drafts


class Draft:
    """A new private file or directory, to be put in the place of a path when it is complete."""

    def __init__(self, target: Path, *, is_directory: bool) -> None:
        self._target = target
        self._lock: int | None = None
        while self._lock is None:  # another process may remove the draft before it is locked
            self.path = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
            if is_directory:
                self.path.mkdir(mode=DIRECTORY_MODE)
                if sys.platform == "win32":  # where no directory can be locked
                    return
            else:
                os.close(create_private(self.path))
            self._lock = _lock(self.path)

    def put_in_place(self) -> None:
        """Give it its name, durably. Errors: FileExistsError."""
        # Not later: closing a file takes away the locks that SQLite has on it in this process.
        self.unlock()
        put_in_place(self.path, self._target)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def draft_beside(target: Path, *, is_directory: bool = False) -> Generator[Draft]:
    """Give a draft of the target; its own name is gone at the end.

    Drafts of the same target whose process was killed are removed first. Each draft has a lock,
    which the system takes from a process that ends.
    """
    for left in drafts_of(target):
        if (descriptor := _lock(left)) is not None:
            is_own = own_user() in {None, os.fstat(descriptor).st_uid}
            os.close(descriptor)
            if is_own:
                _remove(left)
    draft = Draft(target, is_directory=is_directory)
    try:
        yield draft
    finally:
        draft.unlock()
        _remove(draft.path)


def drafts_of(path: Path) -> Iterator[Path]:
    """Yield the drafts of a target that are there, also those of other processes."""
    form = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}")
    with suppress(OSError):
        yield from [each for each in path.parent.iterdir() if form.fullmatch(each.name)]


def _lock(path: Path) -> int | None:
    """Lock a file or directory; None if another process has the lock, or the name is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | PLAIN_FILE)
    except OSError:
        return None
    with suppress(OSError):
        if try_lock(descriptor) and os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return descriptor
    os.close(descriptor)
    return None


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


# --- file systems


def refuse_network(path: Path) -> None:
    """Raise StoreRefused for a place on a network file system."""
    kind = file_system_of(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreRefused(
            "open",
            f"{str(path)!r} is on a network file system ({kind}), where neither locks nor flushes "
            "can be relied upon, and data would be lost; use a local disk, or a postgresql:// "
            "store for several machines",
        )


def find_file_system(path: str, mounts: str) -> str | None:
    """Return the type of the file system of a real path, from the text of a mountinfo file."""
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
