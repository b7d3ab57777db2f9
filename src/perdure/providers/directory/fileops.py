"""Every touch of the file system, one method per system call, so that tests can make any one fail.

Paths are relative to an open directory; nothing here knows what the files mean.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys

from perdure.providers import local_files
from perdure.providers.local_files import DIRECTORY_MODE, FILE_MODE, PLAIN_FILE, Directory, place


def _load_syncfs() -> ctypes._NamedFuncPointer | None:
    """Return Linux' syncfs, or None. Linux can flush one file system in one call;
    elsewhere files are flushed one by one.
    """
    if sys.platform == "win32":
        return None
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

    def open_directory(
        self, path: str, *, at: Directory | None = None, may_be_link: bool = False
    ) -> Directory:
        return local_files.open_directory(path, at, may_be_link=may_be_link)

    def close_directory(self, directory: Directory) -> None:
        local_files.close_directory(directory)

    def make_directory(self, path: str, *, at: Directory | None = None) -> None:
        name, dir_fd = place(path, at)
        os.mkdir(name, DIRECTORY_MODE, dir_fd=dir_fd)

    def list_directory(self, directory: Directory) -> list[os.DirEntry[str]]:
        """Return the entries of an open directory; ask them before it is closed."""
        with os.scandir(directory) as entries:
            return list(entries)

    def remove_directory(self, path: str, *, at: Directory) -> None:
        name, dir_fd = place(path, at)
        os.rmdir(name, dir_fd=dir_fd)

    # --- files

    def create_file(self, path: str, *, at: Directory) -> int:
        """Descriptor of a file that did not exist."""
        return self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, at)

    def open_file(self, path: str, *, at: Directory) -> int:
        """Descriptor for reading."""
        return self._open(path, os.O_RDONLY, at)

    def open_for_append(self, path: str, *, at: Directory) -> int:
        """Descriptor whose writes go to the end; the file is created if it is missing."""
        return self._open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, at)

    def open_for_update(self, path: str, *, at: Directory) -> int:
        """Descriptor for writing anywhere; the file is created if it is missing."""
        return self._open(path, os.O_WRONLY | os.O_CREAT, at)

    def open_lock(self, path: str, *, at: Directory) -> int:
        """Descriptor of the file that is locked; it is created if it is missing."""
        return self._open(path, os.O_RDWR | os.O_CREAT, at)

    def _open(self, path: str, flags: int, at: Directory) -> int:
        name, dir_fd = place(path, at)
        return os.open(name, flags | PLAIN_FILE, FILE_MODE, dir_fd=dir_fd)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        return os.write(descriptor, data)

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        return local_files.write_at(descriptor, data, offset)

    def read(self, descriptor: int, size: int) -> bytes:
        return os.read(descriptor, size)

    def has_name(self, descriptor: int) -> bool:
        """Return True if the file still has a name in some directory."""
        return os.fstat(descriptor).st_nlink > 0

    def size_of(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: str, target: str, *, at: Directory) -> None:
        local_files.replace(source, target, at)

    def unlink(self, path: str, *, at: Directory) -> None:
        local_files.remove(path, at)

    def status(self, path: str, *, at: Directory) -> os.stat_result:
        """Return what is known of a file, or of a link itself."""
        name, dir_fd = place(path, at)
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def is_directory(self, path: str, *, at: Directory) -> bool:
        return stat.S_ISDIR(self.status(path, at=at).st_mode)

    # --- durability

    def fsync(self, descriptor: int) -> None:
        local_files.sync_file(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        local_files.sync_data(descriptor)

    def sync_names(self, directory: Directory) -> None:
        local_files.sync_names(directory)

    @property
    def can_sync_filesystem(self) -> bool:
        return self._syncfs is not None

    def sync_filesystem(self, directory: Directory) -> None:
        """Flush everything that was written to the file system of the directory."""
        assert self._syncfs is not None, "ask can_sync_filesystem first"
        if self._syncfs(directory) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
