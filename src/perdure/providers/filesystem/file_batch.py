"""Writing many files so that after a power cut each has its old or its new content, whole.

First all contents are written and made durable, then all names are changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from perdure.providers.filesystem.documents import seal
from perdure.providers.filesystem.history_files import append_history
from perdure.providers.filesystem.root import SyncFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import msgspec

    from perdure.providers.filesystem.file_steps import Step
    from perdure.providers.filesystem.history_files import HistoryExcerpt
    from perdure.providers.filesystem.root import Root

_FEW: Final = 16
"""Up to so many files are flushed one by one; above, the whole file system is, in one call."""


class FileBatch:
    """Files that are written together."""

    def __init__(self, root: Root, *, is_large: bool) -> None:
        self.root = root
        self._flush_each = not (is_large and root.ops.can_sync_filesystem)
        self._renames: list[tuple[str, str]] = []
        self._removals: list[str] = []
        self.directories: set[str] = set()
        """Those whose entries changed."""

    def write(self, path: str, document: msgspec.Struct) -> None:
        """Replace the file; its directory must exist."""
        scratch = self.root.write_scratch(seal(document), sync=self._flush_each)
        self._renames.append((scratch, path))

    def append(self, excerpt: HistoryExcerpt) -> int:
        return append_history(self.root, excerpt, sync=self._flush_each)

    def make_directory(self, path: str) -> None:
        """The directory with its parents."""
        self.root.make_directories(path)
        while path:
            self.directories.add(path)
            path = path.rpartition("/")[0]

    def remove(self, path: str) -> None:
        """The file or the whole directory, if it is there."""
        self._removals.append(path)

    def finish(self) -> None:
        if not self._flush_each:
            sync_filesystem(self.root)
        for scratch, path in self._renames:
            self.root.ops.rename(scratch, path, dir_fd=self.root.descriptor)
        for path in self._removals:
            self.root.remove_tree(path)
        changed = (*(path for _, path in self._renames), *self._removals)
        self.directories.update(path.rpartition("/")[0] for path in changed)


def write_files(root: Root, steps: Sequence[Step]) -> set[str]:
    """Take the steps as one batch; returns the directories that are still to be flushed."""
    batch = FileBatch(root, is_large=len(steps) > _FEW)
    for step in steps:
        step.take(batch)
    batch.finish()
    return batch.directories


def sync_directories(root: Root, directories: Iterable[str]) -> None:
    """Make the names in these directories durable."""
    directories = sorted(directories)
    if len(directories) > _FEW and root.ops.can_sync_filesystem:
        sync_filesystem(root)
        return
    for path in directories:
        try:
            root.sync_directory(path or ".")
        except FileNotFoundError:  # removed since, and its parent is in the list
            continue


def sync_filesystem(root: Root) -> None:
    try:
        root.ops.sync_filesystem(root.descriptor)
    except OSError as error:
        raise SyncFailed(f"syncfs: {error}") from error
