"""What a checkpoint does to one file: picked on the event loop, taken on the thread for files."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from perdure.providers.filesystem import layout
from perdure.providers.filesystem.capture import execution_document
from perdure.providers.filesystem.history_files import HistoryExcerpt

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.filesystem.file_batch import FileBatch
    from perdure.providers.filesystem.history import History
    from perdure.providers.filesystem.rows import ExecutionRow


class Step(Protocol):
    """One change of the files."""

    def take(self, batch: FileBatch) -> None:
        """Do it; on the thread for files."""
        ...

    def done(self) -> None:
        """Take note that it was done; on the event loop."""
        ...


@dataclass(slots=True)
class WriteDocument:
    """Replaces a file. Building the document waits for the thread: payloads may be big."""

    path: str
    build: Callable[[], msgspec.Struct]
    directory: str | None = None
    """To be made first."""

    def take(self, batch: FileBatch) -> None:
        if self.directory is not None:
            batch.make_directory(self.directory)
        batch.write(self.path, self.build(), self)

    def done(self) -> None:
        pass


@dataclass(slots=True)
class WriteQueueEntry:
    """Writes the file of a queue entry and remembers its name, which goes by the content."""

    files: dict[tuple[str, int], str]
    key: tuple[str, int]
    path: str
    build: Callable[[], msgspec.Struct]

    def take(self, batch: FileBatch) -> None:
        batch.write(self.path, self.build(), self)

    def done(self) -> None:
        self.files[self.key] = self.path


@dataclass(slots=True)
class RemoveQueueEntry:
    files: dict[tuple[str, int], str]
    key: tuple[str, int]
    path: str

    def take(self, batch: FileBatch) -> None:
        batch.remove(self.path, self)

    def done(self) -> None:
        del self.files[self.key]


@dataclass(slots=True)
class RemovePaths:
    paths: tuple[str, ...]

    def take(self, batch: FileBatch) -> None:
        for path in self.paths:
            batch.remove(path, self)

    def done(self) -> None:
        pass


class WriteExecution:
    """Appends new events to the history file, then replaces the file that says how long it is."""

    def __init__(
        self, key: tuple[str, int], row: ExecutionRow | None, history: History | None
    ) -> None:
        self._key = key
        self._row = row
        self._history = history
        self._excerpt = HistoryExcerpt.of(*key, history) if history is not None else None
        self._file_bytes = self._excerpt.file_bytes if self._excerpt is not None else 0

    def take(self, batch: FileBatch) -> None:
        directory = layout.execution_directory(*self._key)
        batch.make_directory(directory)
        document = execution_document(self._key, self._row, self._history)
        if self._excerpt is not None and self._excerpt.pending:
            self._file_bytes = batch.append(self._excerpt)
            document = msgspec.structs.replace(
                document, history_bytes=self._file_bytes, archived=False
            )
        batch.write(f"{directory}/{layout.EXECUTION_FILE}", document, self)

    def done(self) -> None:
        if self._history is not None and self._excerpt is not None and self._excerpt.pending:
            self._history.log.is_archived = False
            self._history.log.note_written(len(self._excerpt.pending), self._file_bytes)


class CompressHistory:
    """Puts a compressed copy of a history aside."""

    def __init__(self, key: tuple[str, int], history: History) -> None:
        self._key = key
        self._excerpt = HistoryExcerpt.of(*key, history)

    def take(self, batch: FileBatch) -> None:
        data = batch.root.read(layout.history_file(*self._key))[: self._excerpt.file_bytes]
        batch.make_directory(layout.archive_directory(self._key[0]))
        # The time would make two copies of one history differ.
        batch.write_data(layout.archived_history(*self._key), gzip.compress(data, mtime=0), self)

    def done(self) -> None:
        pass


class MarkArchived:
    """Says in the file of the execution that its history is in the archive."""

    def __init__(self, key: tuple[str, int], row: ExecutionRow | None, history: History) -> None:
        self._key = key
        self._history = history
        self._document = msgspec.structs.replace(
            execution_document(key, row, history), archived=True
        )

    def take(self, batch: FileBatch) -> None:
        directory = layout.execution_directory(*self._key)
        batch.write(f"{directory}/{layout.EXECUTION_FILE}", self._document, self)

    def done(self) -> None:
        self._history.log.is_archived = True
