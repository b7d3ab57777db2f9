"""The root directory of a store: checks that it is safe, locks it, reads and writes files in it.

Everything is opened relative to one descriptor of the root, so that nothing outside can be touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from perdure.errors import StoreClosed, StoreRefused, StoreUnavailable
from perdure.providers.directory import layout
from perdure.providers.directory.documents import Time, time_text
from perdure.providers.local_files import NETWORK_FILE_SYSTEMS, file_system_of

if TYPE_CHECKING:
    from perdure.providers.directory.fileops import FileOps

_SMALL_FILE_BYTES = 1 << 13
_READ_BYTES = 1 << 20


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that has the store open; written into the lock file for people."""

    pid: int
    host: str
    since: Time


class SyncFailed(Exception):
    """The kernel could not make data durable; which data it dropped is unknown."""


class Root:
    """One opened and locked root. Methods may be called from any thread."""

    def __init__(self, path: str, ops: FileOps) -> None:
        self.path = path
        self.ops = ops
        self._descriptor = -1
        self._lock = -1
        self._opened = (0, 0)
        """Device and inode of the directory."""
        self._scratch_number = 0

    @property
    def descriptor(self) -> int:
        if self._descriptor < 0:
            raise StoreClosed("root", f"{self.path} is not open")
        return self._descriptor

    @property
    def is_in_place(self) -> bool:
        """Return whether a process that opens this path now opens this directory and this lock."""
        try:
            found = os.stat(self.path)  # noqa: PTH116 - once for each commit
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._opened and self.ops.has_name(self._lock)

    # --- opening

    def open(self) -> None:
        """Open the root, creating it if it is missing. Errors: StoreRefused, StoreUnavailable."""
        try:
            self.ops.make_directory(self.path)
            self._sync_parent()
        except FileExistsError:
            pass
        except OSError as error:
            raise StoreUnavailable("open", f"cannot create {self.path}: {error}") from error
        try:
            descriptor = self.ops.open_directory(self.path)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise StoreRefused(
                    "open", f"{self.path} is a symbolic link or no directory; name a real directory"
                ) from error
            raise StoreUnavailable("open", f"cannot open {self.path}: {error}") from error
        try:
            self._refuse_unsafe(descriptor)
        except BaseException:
            self.ops.close(descriptor)
            raise
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self._opened = (found.st_dev, found.st_ino)

    def _sync_parent(self) -> None:
        """A new directory is there after a power cut only if the one that it is in was flushed."""
        parent = os.open(os.path.dirname(self.path), os.O_RDONLY)  # noqa: PTH120 - as it was named
        try:
            self.sync_descriptor(parent)
        finally:
            self.ops.close(parent)

    def _refuse_unsafe(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise StoreRefused(
                "open",
                f"{self.path} belongs to user {status.st_uid}, this process runs as "
                f"{os.geteuid()}; run as its owner",
            )
        if status.st_mode & stat.S_IWOTH:
            raise StoreRefused(
                "open", f"every user may write to {self.path}; run chmod 700 {self.path}"
            )
        network = file_system_of(Path(self.path))
        if network in NETWORK_FILE_SYSTEMS:
            raise StoreRefused(
                "open",
                f"{self.path} is on a network file system ({network}), where neither locks nor "
                "flushes can be relied upon; use a local disk, or Postgres for several machines",
            )
        foreign = set(self.ops.list_directory(descriptor)) - layout.OWN_NAMES
        is_store = layout.STORE_FILE in self.ops.list_directory(descriptor)
        if foreign and not is_store:
            raise StoreRefused(
                "open",
                f"{self.path} is no store and has other files ({min(foreign)!r}); "
                "name an empty directory",
            )
        os.fchmod(descriptor, 0o700)

    def try_lock(self, started_at_ms: int) -> bool:
        """Lock the root for this process; False if another process has it."""
        if self._lock < 0:
            self._lock = os.open(
                layout.LOCK_FILE,
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW,
                0o600,
                dir_fd=self.descriptor,
            )
        if not self.ops.try_lock(self._lock):
            return False
        _locked.add(self)
        since = time_text(started_at_ms)
        holder = Holder(pid=os.getpid(), host=socket.gethostname(), since=since)
        text = msgspec.json.format(msgspec.json.encode(holder), indent=2) + b"\n"
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, text, 0)
        return True

    def holder(self) -> Holder | None:
        """Return the process that has the root locked; None while it has not written its name."""
        try:
            return msgspec.json.decode(os.pread(self._lock, 4096, 0), type=Holder)
        except msgspec.MsgspecError:  # just locked, or just about to be released
            return None

    def close(self) -> None:
        """Release the root. Closing the descriptor drops the kernel's lock."""
        if self in _locked:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)  # no process has it
        _locked.discard(self)
        for descriptor in (self._lock, self._descriptor):
            if descriptor >= 0:
                self.ops.close(descriptor)
        self._lock = self._descriptor = -1

    # --- reading

    def read(self, path: str) -> bytes:
        """Return the whole content of a file."""
        descriptor = self.ops.open_file(path, dir_fd=self.descriptor)
        try:
            # Most files are small, and a big buffer costs more to get than to fill.
            data = self.ops.read(descriptor, _SMALL_FILE_BYTES)
            if len(data) < _SMALL_FILE_BYTES:
                return data
            parts = [data]
            while part := self.ops.read(descriptor, _READ_BYTES):
                parts.append(part)
            return b"".join(parts)
        finally:
            self.ops.close(descriptor)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        descriptor = self.ops.open_directory(path, dir_fd=self.descriptor)
        try:
            return sorted(self.ops.list_directory(descriptor))
        finally:
            self.ops.close(descriptor)

    def size_bytes(self, path: str) -> int:
        """Return the size of all files below a directory, without those that vanish meanwhile."""
        total = 0
        for name in self.names(path):
            entry = f"{path}/{name}"
            try:
                if self.ops.is_directory(entry, dir_fd=self.descriptor):
                    total += self.size_bytes(entry)
                else:
                    total += os.stat(entry, dir_fd=self.descriptor).st_size
            except FileNotFoundError:
                continue
        return total

    # --- writing

    def make_directories(self, path: str) -> None:
        """Make the directory and its missing parents."""
        try:
            self.ops.make_directory(path, dir_fd=self.descriptor)
        except FileExistsError:
            return
        except FileNotFoundError:
            parent = path.rpartition("/")[0]
            if not parent:
                raise
            self.make_directories(parent)
            self.make_directories(path)

    def write_all(self, descriptor: int, data: bytes) -> None:
        written = self.ops.write(descriptor, data)
        view = memoryview(data)[written:]
        while view:
            view = view[self.ops.write(descriptor, view) :]

    def write_all_at(self, descriptor: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = self.ops.write_at(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def new_scratch(self) -> str:
        """Return an unused path beside the real files."""
        self._scratch_number += 1  # no other process uses the directory, and it was emptied
        return f"{layout.SCRATCH}/{self._scratch_number}"

    def write_scratch(self, data: bytes, *, sync: bool) -> str:
        """Write a new file beside the real ones and return its path."""
        path = self.new_scratch()
        descriptor = self.ops.create_file(path, dir_fd=self.descriptor)
        try:
            self.write_all(descriptor, data)
            if sync:
                self.sync_descriptor(descriptor)
        except BaseException:
            self.discard(path)
            raise
        finally:
            self.ops.close(descriptor)
        return path

    def discard(self, scratch: str) -> None:
        """Remove a file that was written in vain: it would use up space until the next start."""
        with contextlib.suppress(OSError):
            self.ops.unlink(scratch, dir_fd=self.descriptor)

    def replace(self, path: str, data: bytes) -> None:
        """Write the file so that after a power cut it has the old or the new content, whole."""
        scratch = self.write_scratch(data, sync=True)
        try:
            self.ops.rename(scratch, path, dir_fd=self.descriptor)
        except BaseException:
            self.discard(scratch)
            raise
        self.sync_directory(path.rpartition("/")[0] or ".")

    def remove_tree(self, path: str) -> None:
        """Remove a file or directory with all that is in it; nothing happens if it is missing."""
        try:
            is_directory = self.ops.is_directory(path, dir_fd=self.descriptor)
        except FileNotFoundError:
            return
        if not is_directory:
            self.ops.unlink(path, dir_fd=self.descriptor)
            return
        for name in self.names(path):
            self.remove_tree(f"{path}/{name}")
        self.ops.remove_directory(path, dir_fd=self.descriptor)

    # --- durability

    def sync_directory(self, path: str) -> None:
        descriptor = self.ops.open_directory(path, dir_fd=self.descriptor)
        try:
            self.sync_descriptor(descriptor)
        finally:
            self.ops.close(descriptor)

    def sync_descriptor(self, descriptor: int) -> None:
        try:
            self.ops.fsync(descriptor)
        except OSError as error:
            raise SyncFailed(f"fsync: {error}") from error

    def drop_inherited(self) -> None:
        """In a forked child: close the copies, else the lock would outlive the parent."""
        for descriptor in (self._lock, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._descriptor = -1


_locked: weakref.WeakSet[Root] = weakref.WeakSet()
"""Roots that this process holds: a fork copies their descriptors, and only its hook sees it."""


def _after_fork_in_child() -> None:
    for root in list(_locked):
        root.drop_inherited()
    _locked.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
