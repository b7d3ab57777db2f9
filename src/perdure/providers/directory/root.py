"""The root directory of a store: checks that it is safe, locks it, reads and writes files in it.

Many files are written so that after a power cut each has its old or its new content, whole: first
all contents are written and made durable, then all names are changed and made durable.

Everything is opened relative to the open root and no link is followed, so that nothing outside can
be touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.errors import ProviderError, StoreClosed, StoreFull, StoreRefused, StoreUnavailable
from perdure.processes import after_fork_in_child
from perdure.providers import local_files
from perdure.providers.directory import layout
from perdure.providers.directory.documents import Time, time_text
from perdure.providers.local_files import DIRECTORY_MODE, Directory

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

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


@contextlib.contextmanager
def _syncing(call: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise SyncFailed(f"{call}: {error}") from error


class Root:
    """One opened and locked root. Methods may be called from any thread."""

    def __init__(self, path: str, ops: FileOps) -> None:
        self.path = path
        self._full_path = local_files.long_path(path)
        self.ops = ops
        self._directory: Directory | None = None
        self._lock = -1
        self._opened = (0, 0)
        """Device and inode of the directory."""
        self._scratch_number = 0

    @property
    def directory(self) -> Directory:
        if self._directory is None:
            raise StoreClosed("root", f"{self.path} is not open")
        return self._directory

    @property
    def is_in_place(self) -> bool:
        """Return True if a process that opens this path now opens this directory and this lock."""
        try:
            found = os.stat(self._full_path)  # noqa: PTH116 - once for each commit
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._opened and self.ops.has_name(self._lock)

    # --- opening

    def open(self) -> None:
        """Open the root, creating it if it is missing. Errors: StoreRefused, StoreUnavailable."""
        try:
            self.ops.make_directory(self._full_path)
            self._sync_parent()
        except FileExistsError:
            pass
        except OSError as error:
            raise StoreUnavailable("open", f"cannot create {self.path}: {error}") from error
        try:
            self._directory = self.ops.open_directory(self._full_path)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise StoreRefused(
                    "open", f"{self.path} is a symbolic link or no directory; name a real directory"
                ) from error
            raise StoreUnavailable("open", f"cannot open {self.path}: {error}") from error
        self._refuse_unsafe()

    def _sync_parent(self) -> None:
        """A new directory is there after a power cut only if the one that it is in was flushed."""
        above = os.path.dirname(self._full_path)  # noqa: PTH120 - as it was named
        parent = self.ops.open_directory(above, may_be_link=True)
        try:
            self._sync_names(parent)
        finally:
            self.ops.close_directory(parent)

    def _refuse_unsafe(self) -> None:
        status, own = self.ops.status(".", at=self.directory), local_files.own_user()
        self._opened = (status.st_dev, status.st_ino)
        if own is not None and status.st_uid != own:
            raise StoreRefused(
                "open",
                f"{self.path} belongs to user {status.st_uid}, this process runs as {own}; run as "
                "its owner",
            )
        if own is not None and status.st_mode & stat.S_IWOTH:
            raise StoreRefused(
                "open", f"every user may write to {self.path}; run chmod 700 {self.path}"
            )
        local_files.refuse_network(Path(self.path))
        names = {entry.name for entry in self.ops.list_directory(self.directory)}
        if (foreign := names - layout.OWN_NAMES) and layout.STORE_FILE not in names:
            raise StoreRefused(
                "open",
                f"{self.path} is no store and has other files ({min(foreign)!r}); "
                "name an empty directory",
            )
        self.names(".")
        local_files.make_private(self.directory, DIRECTORY_MODE)

    def try_lock(self, started_at_ms: int) -> bool:
        """Lock the root for this process; False if another process has it."""
        if self._lock < 0:
            self._lock = self.ops.open_lock(layout.LOCK_FILE, at=self.directory)
        if not local_files.try_lock(self._lock):
            return False
        _locked.add(self)
        since = time_text(started_at_ms)
        holder = Holder(pid=os.getpid(), host=socket.gethostname(), since=since)
        text = msgspec.json.format(msgspec.json.encode(holder), indent=2) + b"\n"
        os.ftruncate(self._lock, 0)
        local_files.write_at(self._lock, text, 0)
        return True

    def holder(self) -> Holder | None:
        """Return the process that has the root locked; None while it has not written its name."""
        try:
            os.lseek(self._lock, 0, os.SEEK_SET)
            return msgspec.json.decode(os.read(self._lock, 4096), type=Holder)
        except msgspec.MsgspecError:  # just locked, or just about to be released
            return None

    def close(self) -> None:
        """Release the root. Closing the descriptor drops the kernel's lock."""
        if self in _locked:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)  # no process has it
        self.let_go()

    def let_go(self) -> None:
        """Close the descriptors; of a copy in a forked child too, else the lock would outlive the
        parent.
        """
        _locked.discard(self)
        if self._lock >= 0:
            os.close(self._lock)
        if self._directory is not None:
            local_files.close_directory(self._directory)
        self._lock, self._directory = -1, None

    # --- reading

    def read(self, path: str) -> bytes:
        """Return the whole content of a file."""
        descriptor = self.ops.open_file(path, at=self.directory)
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
        """Return the names in a directory, sorted. Errors: StoreRefused if one of them is a link.

        A path is used only after the names in each of its directories were read.
        """
        directory = self.ops.open_directory(path, at=self.directory)
        try:
            entries = self.ops.list_directory(directory)
            for entry in entries:
                if not local_files.is_plain(entry):
                    raise StoreRefused(
                        "open",
                        f"{self.path}/{path}/{entry.name} is a link or a special file, and could "
                        "lead out of the store; put the file itself there, or remove the link",
                    )
        finally:
            self.ops.close_directory(directory)
        return sorted(entry.name for entry in entries)

    def size_bytes(self, path: str) -> int:
        """Return the size of all files below a directory, without those that vanish meanwhile."""
        total = 0
        for name in self.names(path):
            entry = f"{path}/{name}"
            try:
                if self.ops.is_directory(entry, at=self.directory):
                    total += self.size_bytes(entry)
                else:
                    total += self.ops.status(entry, at=self.directory).st_size
            except FileNotFoundError:
                continue
        return total

    # --- writing

    def write_all(self, descriptor: int, data: bytes, offset: int | None = None) -> None:
        """Write at the offset, or where the last write ended."""
        view = memoryview(data)
        while view:
            if offset is None:
                written = self.ops.write(descriptor, view)
            else:
                written = self.ops.write_at(descriptor, view, offset)
                offset += written
            view = view[written:]

    def new_scratch(self) -> str:
        """Return an unused path beside the real files."""
        self._scratch_number += 1  # no other process uses the directory, and it was emptied
        return f"{layout.SCRATCH}/{self._scratch_number}"

    def write_scratch(self, data: bytes, *, sync: bool) -> str:
        """Write a new file beside the real ones and return its path."""
        path = self.new_scratch()
        descriptor = self.ops.create_file(path, at=self.directory)
        try:
            try:
                self.write_all(descriptor, data)
                if sync:
                    self.sync_descriptor(descriptor)
            finally:
                self.ops.close(descriptor)
        except BaseException:
            self.discard(path)
            raise
        return path

    def discard(self, scratch: str) -> None:
        """Remove a file that was written in vain: it would use up space until the next start."""
        with contextlib.suppress(OSError):
            self.ops.unlink(scratch, at=self.directory)

    def replace(self, path: str, data: bytes) -> None:
        """Write the file so that after a power cut it has the old or the new content, whole."""
        scratch = self.write_scratch(data, sync=True)
        try:
            self.ops.rename(scratch, path, at=self.directory)
        except BaseException:
            self.discard(scratch)
            raise
        self.sync_directory(path.rpartition("/")[0] or ".")

    def remove_tree(self, path: str) -> None:
        """Remove a file or directory with all that is in it; nothing happens if it is missing."""
        try:
            is_directory = self.ops.is_directory(path, at=self.directory)
        except FileNotFoundError:
            return
        if not is_directory:
            self.ops.unlink(path, at=self.directory)
            return
        for name in self.names(path):
            self.remove_tree(f"{path}/{name}")
        self.ops.remove_directory(path, at=self.directory)

    # --- durability

    def sync_directory(self, path: str) -> None:
        directory = self.ops.open_directory(path, at=self.directory)
        try:
            self._sync_names(directory)
        finally:
            self.ops.close_directory(directory)

    def _sync_names(self, directory: Directory) -> None:
        with _syncing("fsync"):
            self.ops.sync_names(directory)

    def sync_descriptor(self, descriptor: int) -> None:
        with _syncing("fsync"):
            self.ops.fsync(descriptor)

    def sync_filesystem(self) -> None:
        with _syncing("syncfs"):
            self.ops.sync_filesystem(self.directory)


_locked: weakref.WeakSet[Root] = weakref.WeakSet()
"""Roots that this process holds: a fork copies their descriptors, and only its hook sees it."""


def _after_fork_in_child() -> None:
    for root in list(_locked):
        root.let_go()


after_fork_in_child(_after_fork_in_child)


def refusal(operation: str, error: OSError) -> ProviderError:
    """Return the error for a caller after the operating system has refused."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StoreFull(operation, f"no space left ({error}); nothing was written")
    return StoreUnavailable(operation, f"{error}; nothing was written")


# --- many files

_FEW: Final = 16
"""Up to this many files are flushed one by one; above, the whole file system is, in one call."""


class FileBatch:
    """Files that are written together. Used by one thread at a time."""

    def __init__(self, root: Root, *, files: int) -> None:
        self._root = root
        self._flush_each = files <= _FEW or not root.ops.can_sync_filesystem
        self._renames: list[tuple[str, str]] = []
        self.placed: set[str] = set()
        """Files whose new content can be seen, also if a later one failed."""
        self._directories: set[str] = set()
        """Those whose entries change."""
        self._made: set[str] = {"", *layout.DIRECTORIES}
        """Those that were made, or seen to be there."""

    def write(self, path: str, data: bytes) -> None:
        """Replace the file; its directory is made."""
        directory = path.rpartition("/")[0]
        self._make_directory(directory)
        self._renames.append((self._root.write_scratch(data, sync=self._flush_each), path))
        self._directories.add(directory)

    def append(self, path: str, size: int, data: bytes) -> None:
        """Add to the end of a file after its first ``size`` bytes; later bytes are cut off."""
        root = self._root
        descriptor = root.ops.open_for_append(path, at=root.directory)
        try:
            if root.ops.size_of(descriptor) > size:
                root.ops.truncate(descriptor, size)
            root.write_all(descriptor, data)
            if self._flush_each:
                root.sync_descriptor(descriptor)
        finally:
            root.ops.close(descriptor)
        self.placed.add(path)

    def put_in_place(self) -> None:
        """Make the contents durable, then put them in place."""
        if not self._renames and not self.placed:
            return
        root = self._root
        if not self._flush_each:
            self._root.sync_filesystem()
        while self._renames:
            scratch, path = self._renames[-1]
            root.ops.rename(scratch, path, at=root.directory)
            self._renames.pop()
            self.placed.add(path)
        self._sync_directories()

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files and whole directories, durably. A directory vanishes in one step."""
        root = self._root
        removed: list[str] = []
        for path in sorted(paths):
            scratch = root.new_scratch()
            try:
                if root.ops.is_directory(path, at=root.directory):
                    root.ops.rename(path, scratch, at=root.directory)
                    removed.append(scratch)
                else:
                    root.ops.unlink(path, at=root.directory)
            except FileNotFoundError:
                continue
            self._directories.add(path.rpartition("/")[0])
        if self._directories:
            self._sync_directories()
        for scratch in removed:
            root.remove_tree(scratch)

    def give_up(self) -> None:
        """Remove the files that were written and did not find their place."""
        for scratch, _ in self._renames:
            self._root.discard(scratch)
        self._renames.clear()

    def _make_directory(self, path: str) -> None:
        """Make the directory with its parents."""
        if path in self._made:
            return
        parent = path.rpartition("/")[0]
        self._make_directory(parent)
        with contextlib.suppress(FileExistsError):
            self._root.ops.make_directory(path, at=self._root.directory)
            self._directories.add(parent)
        self._made.add(path)

    def _sync_directories(self) -> None:
        directories, self._directories = self._directories, set()
        if not self._flush_each:
            self._root.sync_filesystem()
            return
        for path in sorted(directories):
            # Removed since: then its parent is in the list.
            with contextlib.suppress(FileNotFoundError):
                self._root.sync_directory(path or ".")
