"""Every touch of the file system, one method per system call, so that tests can make any one fail.

Paths are relative to a directory descriptor; nothing here knows what the files mean.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
from typing import Final

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""A umask can only take rights away from these, and only the owner has any."""


def _load_syncfs() -> ctypes._NamedFuncPointer | None:
    """Return Linux' syncfs, or None. Linux can flush one file system in one call;
    elsewhere files are flushed one by one.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int,)
    function.restype = ctypes.c_int
    return function


class FileOps:
    """The real file system."""

    def __init__(self) -> None:
        self._syncfs = _load_syncfs()

    # --- directories

    def open_directory(self, path: str, *, dir_fd: int | None = None) -> int:
        """Descriptor of a directory that is not reached through a symbolic link."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)

    def make_directory(self, path: str, *, dir_fd: int | None = None) -> None:
        os.mkdir(path, DIRECTORY_MODE, dir_fd=dir_fd)

    def list_directory(self, dir_fd: int) -> list[str]:
        return os.listdir(dir_fd)

    def remove_directory(self, path: str, *, dir_fd: int) -> None:
        os.rmdir(path, dir_fd=dir_fd)

    # --- files

    def create_file(self, path: str, *, dir_fd: int) -> int:
        """Descriptor of a file that did not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return os.open(path, flags, FILE_MODE, dir_fd=dir_fd)

    def open_file(self, path: str, *, dir_fd: int) -> int:
        """Descriptor for reading."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)

    def open_for_append(self, path: str, *, dir_fd: int) -> int:
        """Descriptor whose writes go to the end; the file is created if it is missing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.open(path, flags, FILE_MODE, dir_fd=dir_fd)

    def open_for_update(self, path: str, *, dir_fd: int) -> int:
        """Descriptor for writing anywhere; the file is created if it is missing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        return os.open(path, flags, FILE_MODE, dir_fd=dir_fd)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        return os.write(descriptor, data)

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int, size: int) -> bytes:
        return os.read(descriptor, size)

    def has_name(self, descriptor: int) -> bool:
        """Return whether the file still has a name in some directory."""
        return os.fstat(descriptor).st_nlink > 0

    def size_of(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        os.unlink(path, dir_fd=dir_fd)

    def is_directory(self, path: str, *, dir_fd: int) -> bool:
        return stat.S_ISDIR(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode)

    # --- durability

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        os.fdatasync(descriptor) if hasattr(os, "fdatasync") else os.fsync(descriptor)

    @property
    def can_sync_filesystem(self) -> bool:
        return self._syncfs is not None

    def sync_filesystem(self, descriptor: int) -> None:
        """Flush everything that was written to the file system of the descriptor."""
        assert self._syncfs is not None, "ask can_sync_filesystem first"
        if self._syncfs(descriptor) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    # --- locking

    def try_lock(self, descriptor: int) -> bool:
        """Exclusive lock that the kernel drops with the last copy of the descriptor."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
