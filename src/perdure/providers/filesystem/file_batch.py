"""Writing many files so that after a power cut each has its old or its new content, whole.

First all contents are written and made durable, then all names are changed and made durable.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from perdure.providers.filesystem.documents import seal
from perdure.providers.filesystem.history_files import append_history
from perdure.providers.filesystem.root import SyncFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import msgspec

    from perdure.providers.filesystem.file_steps import Step
    from perdure.providers.filesystem.history_files import HistoryExcerpt
    from perdure.providers.filesystem.root import Root

_FEW: Final = 16
"""Up to so many files are flushed one by one; above, the whole file system is, in one call."""


class FileBatch:
    """Files that are written together. Used by one thread at a time."""

    def __init__(self, root: Root, *, files: int) -> None:
        self.root = root
        self._flush_each = files <= _FEW or not root.ops.can_sync_filesystem
        self._renames: list[tuple[str, str, Step]] = []
        self._removals: list[tuple[str, Step]] = []
        self._directories: set[str] = set()
        """Those whose entries change."""
        self._made: set[str] = set()
        """Those that were made, or seen to be there."""
        self.placed: list[Step] = []
        """Steps whose result can be seen, also if a later one failed."""

    # --- steps

    def take(self, steps: Iterable[Step]) -> None:
        for step in steps:
            step.take(self)

    def write(self, path: str, document: msgspec.Struct, step: Step) -> None:
        """Replace the file; its directory must exist."""
        self.write_data(path, seal(document), step)

    def write_data(self, path: str, data: bytes, step: Step) -> None:
        """Replace the file; its directory must exist."""
        scratch = self.root.write_scratch(data, sync=self._flush_each)
        self._renames.append((scratch, path, step))
        self._directories.add(path.rpartition("/")[0])

    def append(self, excerpt: HistoryExcerpt) -> int:
        """Add the pending events to their file; returns its new length."""
        return append_history(self.root, excerpt, sync=self._flush_each)

    def make_directory(self, path: str) -> None:
        """The directory with its parents."""
        if path in self._made:
            return
        parent = path.rpartition("/")[0]
        if parent:
            self.make_directory(parent)
        with contextlib.suppress(FileExistsError):
            self.root.ops.make_directory(path, dir_fd=self.root.descriptor)
        self._made.add(path)

    def remove(self, path: str, step: Step) -> None:
        """The file or the whole directory, if it is there."""
        self._removals.append((path, step))
        self._directories.add(path.rpartition("/")[0])

    # --- the end

    def finish(self) -> None:
        """Make the contents durable, then put them in place."""
        if not self._flush_each:
            self._sync_filesystem()
        while self._renames:
            scratch, path, step = self._renames[-1]
            self.root.ops.rename(scratch, path, dir_fd=self.root.descriptor)
            self._renames.pop()
            self.placed.append(step)
        for path, step in self._removals:
            self.root.remove_tree(path)
            self.placed.append(step)
        self._sync_directories()

    def give_up(self) -> None:
        """Remove what was written and has not found its place."""
        for scratch, _, _ in self._renames:
            self.root.discard(scratch)
        self._renames.clear()

    def _sync_directories(self) -> None:
        if not self._flush_each:
            self._sync_filesystem()
            return
        for path in sorted({*self._directories, *self._made}):
            # Removed since: then its parent is in the list.
            with contextlib.suppress(FileNotFoundError):
                self.root.sync_directory(path or ".")

    def _sync_filesystem(self) -> None:
        try:
            self.root.ops.sync_filesystem(self.root.descriptor)
        except OSError as error:
            raise SyncFailed(f"syncfs: {error}") from error
