"""The journal: the one place where a commit happens.

A record is a line: checksum, length, JSON. Records lie in segments named after their first sequence
number; a torn end is cut, anything else that does not check out is damage and is refused. A segment
is filled with blanks ahead of its records, because overwriting is flushed faster than appending.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.errors import CorruptData
from perdure.providers.filesystem import layout
from perdure.providers.filesystem.root import SyncFailed
from perdure.providers.filesystem.rows import Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.providers.filesystem.root import Root

_HEADER_BYTES: Final = 18  # "cccccccc llllllll "
_BLANK: Final = b" "
_NOTHING: Final = b" \0"
"""What may lie behind the last record: blanks, or zeros where they did not reach the disk."""
_AHEAD_BYTES_MIN: Final = 1 << 16
_AHEAD_BYTES_MAX: Final = 1 << 20
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    body = _encoder.encode(record)
    return b"%08x %08x %b\n" % (zlib.crc32(body), len(body), body)


def parse_record(line: bytes) -> Record | None:
    """The record of one line without its newline; None if the line is damaged or torn."""
    body = line[_HEADER_BYTES:]
    if line[:_HEADER_BYTES] != b"%08x %08x " % (zlib.crc32(body), len(body)):
        return None
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        # The checksum fits, so these bytes are what was written: by another version.
        raise CorruptData("open", f"a journal record cannot be understood: {error}") from error


class Journal:
    """Writes to the newest segment. Used by one thread at a time."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._path = ""
        self._descriptor = -1
        self._size = 0
        """Of the records; blanks follow."""
        self._filled = 0
        """Length of the file."""
        self._is_torn = False

    def append(self, data: bytes) -> None:
        """Make whole records durable. After an OSError nothing of them is left in the file."""
        if self._is_torn:
            self._cut()
        end = self._size + len(data)
        try:
            self._root.write_all_at(self._descriptor, data, self._size)
        except OSError:
            self._is_torn = True
            self._cut()
            raise
        if end > self._filled:
            self._fill_ahead(end)
        try:
            self._root.ops.fdatasync(self._descriptor)
        except OSError as error:
            raise SyncFailed(f"fdatasync of the journal: {error}") from error
        if not self._root.is_in_place or not self._root.ops.has_name(self._descriptor):
            # Durable, and yet nobody will find it again.
            raise SyncFailed(f"{self._root.path} was removed or replaced while it was open")
        self._size = end

    def _fill_ahead(self, end: int) -> None:
        """A flush of what is overwritten later need not record a new length of the file."""
        self._filled = end
        ahead = min(max(end, _AHEAD_BYTES_MIN), _AHEAD_BYTES_MAX)
        with contextlib.suppress(OSError):  # no space: then the next ones are appended
            self._root.write_all_at(self._descriptor, _BLANK * ahead, end)
            self._filled = end + ahead

    def _cut(self) -> None:
        # Synced before the callers hear of the failure: a record that was refused must not
        # come back with the next start.
        self._root.ops.truncate(self._descriptor, self._size)
        self._filled = self._size
        self._root.sync_descriptor(self._descriptor)
        self._is_torn = False

    def start_segment(self, first_sequence: int) -> None:
        """Go on in a new file."""
        if self._is_torn:
            self._cut()
        path = layout.segment_file(first_sequence)
        descriptor = self._root.ops.open_for_update(path, dir_fd=self._root.descriptor)
        try:
            self._root.ops.truncate(descriptor, 0)
            self._root.sync_directory(layout.JOURNAL)
        except BaseException:
            self._root.ops.close(descriptor)
            raise
        self.close()
        self._path = path
        self._descriptor, self._size, self._filled = descriptor, 0, 0

    def drop_segments(self, before_sequence: int) -> None:
        """Remove the segments that begin before that one; their content is in the files."""
        for name in self._root.names(layout.JOURNAL):
            first = layout.segment_sequence(name)
            if first is not None and first < before_sequence:
                self._root.ops.unlink(f"{layout.JOURNAL}/{name}", dir_fd=self._root.descriptor)

    def finish(self) -> None:
        """Close, and leave no segment behind if nothing is in it: the sign of an orderly end."""
        is_empty = self._size == 0 and self._descriptor >= 0
        self.close()
        if is_empty:
            with contextlib.suppress(OSError):
                self._root.ops.unlink(self._path, dir_fd=self._root.descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._root.ops.close(self._descriptor)
            self._descriptor = -1


def read_records(root: Root, after_sequence: int) -> Iterator[Record]:
    """Every committed record past that one, in order; cuts the torn end of the last segment.

    Raises CorruptData if records are missing or damaged that had been committed.
    """
    segments = sorted(
        first
        for name in root.names(layout.JOURNAL)
        if (first := layout.segment_sequence(name)) is not None
    )
    expected = after_sequence + 1
    for position, first in enumerate(segments):
        is_last = position == len(segments) - 1
        for record in _read_segment(root, first, is_last=is_last):
            if record.sequence < expected:
                continue
            if record.sequence != expected:
                raise CorruptData(
                    "open",
                    f"{root.path}: the journal lacks records {expected} to {record.sequence - 1}; "
                    "restore the directory from a backup",
                )
            yield record
            expected += 1


def _read_segment(root: Root, first_sequence: int, *, is_last: bool) -> Iterator[Record]:
    path = layout.segment_file(first_sequence)
    data = root.read(path)
    position, expected = 0, first_sequence
    while position < len(data):
        end = data.find(b"\n", position)
        record = parse_record(data[position:end]) if end >= 0 else None
        if record is None:
            break
        yield record
        position, expected = end + 1, record.sequence + 1
    rest = data[position:].strip(_NOTHING)
    if rest and not (is_last and _is_unfinished(rest, expected)):
        raise CorruptData(
            "open",
            f"{root.path}/{path} is damaged at byte {position}; restore the directory from a "
            "backup",
        )
    if is_last:
        _keep(root, path, position)


def _is_unfinished(end: bytes, sequence: int) -> bool:
    """Whether the record with that number can have been cut off by a crash.

    Records of one batch reach the disk in any order, so a good one behind it proves nothing; but
    one that was written after it had been synced shows that it was damaged later.
    """
    lines = (line.strip(_NOTHING) for line in end.split(b"\n"))
    return not any(
        record.synced >= sequence for line in lines if (record := parse_record(line)) is not None
    )


def _keep(root: Root, path: str, size: int) -> None:
    """Cut what lies beyond, and make the rest durable: a killed process may not have got so far."""
    descriptor = root.ops.open_for_update(path, dir_fd=root.descriptor)
    try:
        if root.ops.size_of(descriptor) > size:
            root.ops.truncate(descriptor, size)
        root.sync_descriptor(descriptor)
    finally:
        root.ops.close(descriptor)
