"""Writing many files so that after a power cut each has its old or its new content, whole.

First all contents are written and made durable, then all names are changed and made durable.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from perdure.providers.directory import layout
from perdure.providers.directory.root import SyncFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.providers.directory.root import Root

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
        descriptor = root.ops.open_for_append(path, dir_fd=root.descriptor)
        try:
            if root.ops.size_of(descriptor) > size:
                root.ops.truncate(descriptor, size)
            root.write_all(descriptor, data)
            if self._flush_each:
                root.sync_descriptor(descriptor)
        finally:
            root.ops.close(descriptor)
        self.placed.add(path)

    def place(self) -> None:
        """Make the contents durable, then put them in place."""
        if not self._renames and not self.placed:
            return
        root = self._root
        if not self._flush_each:
            self._sync_filesystem()
        while self._renames:
            scratch, path = self._renames[-1]
            root.ops.rename(scratch, path, dir_fd=root.descriptor)
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
                if root.ops.is_directory(path, dir_fd=root.descriptor):
                    root.ops.rename(path, scratch, dir_fd=root.descriptor)
                    removed.append(scratch)
                else:
                    root.ops.unlink(path, dir_fd=root.descriptor)
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
            self._root.ops.make_directory(path, dir_fd=self._root.descriptor)
            self._directories.add(parent)
        self._made.add(path)

    def _sync_directories(self) -> None:
        directories, self._directories = self._directories, set()
        if not self._flush_each:
            self._sync_filesystem()
            return
        for path in sorted(directories):
            # Removed since: then its parent is in the list.
            with contextlib.suppress(FileNotFoundError):
                self._root.sync_directory(path or ".")

    def _sync_filesystem(self) -> None:
        try:
            self._root.ops.sync_filesystem(self._root.descriptor)
        except OSError as error:
            raise SyncFailed(f"syncfs: {error}") from error
