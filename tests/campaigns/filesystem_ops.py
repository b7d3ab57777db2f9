"""File operations that fail or kill the process at a chosen moment."""

from __future__ import annotations

import errno
import os
import signal
from typing import TYPE_CHECKING

from perdure.providers.directory.fileops import FileOps

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.local_files import Directory


class CountedFileOps(FileOps):
    """Tells ``on_change`` before each operation that changes something on the disk."""

    def __init__(self, on_change: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self.on_change = on_change
        self.names: list[str] = []

    def _note(self, name: str) -> None:
        self.names.append(name)
        self.on_change(name)

    def make_directory(self, path: str, *, at: Directory | None = None) -> None:
        self._note("mkdir")
        super().make_directory(path, at=at)

    def remove_directory(self, path: str, *, at: Directory) -> None:
        self._note("rmdir")
        super().remove_directory(path, at=at)

    def create_file(self, path: str, *, at: Directory) -> int:
        self._note("create")
        return super().create_file(path, at=at)

    def open_for_append(self, path: str, *, at: Directory) -> int:
        self._note("open")
        return super().open_for_append(path, at=at)

    def open_for_update(self, path: str, *, at: Directory) -> int:
        self._note("open")
        return super().open_for_update(path, at=at)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        self._note("write")
        return super().write(descriptor, data)

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self._note("write")
        return super().write_at(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        self._note("truncate")
        super().truncate(descriptor, size)

    def rename(self, source: str, target: str, *, at: Directory) -> None:
        self._note("rename")
        super().rename(source, target, at=at)

    def unlink(self, path: str, *, at: Directory) -> None:
        self._note("unlink")
        super().unlink(path, at=at)

    def fsync(self, descriptor: int) -> None:
        self._note("fsync")
        super().fsync(descriptor)

    def sync_names(self, directory: Directory) -> None:
        self._note("fsync")
        super().sync_names(directory)

    def fdatasync(self, descriptor: int) -> None:
        self._note("fdatasync")
        super().fdatasync(descriptor)

    def sync_filesystem(self, directory: Directory) -> None:
        self._note("syncfs")
        super().sync_filesystem(directory)


class KillingFileOps(CountedFileOps):
    """Kills this process before the n-th operation; a write gets half-way first."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def _note(self, name: str) -> None:
        super()._note(name)
        if len(self.names) == self._at and name != "write":
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        self._note("write")
        if len(self.names) == self._at:
            os.write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return os.write(descriptor, data)

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self._note("write")
        if len(self.names) == self._at:
            os.pwrite(descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.pwrite(descriptor, data, offset)


class FailingFileOps(CountedFileOps):
    """Operations with certain names fail with an error, from the n-th of them on, so many times."""

    def __init__(
        self,
        error: int = errno.ENOSPC,
        names: frozenset[str] = frozenset({"write"}),
        *,
        at: int = 1,
        times: int = 1,
    ) -> None:
        super().__init__()
        self._error = error
        self._failing_names = names
        self.at = at
        self.times_left = times
        self.failures = 0
        self._seen = 0

    def fail_next(self) -> None:
        """Let the next of them fail, however many there were."""
        self.at = 1

    def _note(self, name: str) -> None:
        super()._note(name)
        if name not in self._failing_names:
            return
        self._seen += 1
        if self._seen >= self.at and self.times_left:
            self.times_left -= 1
            self.failures += 1
            raise OSError(self._error, os.strerror(self._error))
