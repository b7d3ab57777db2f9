"""History files: one event a line, appended; whole histories compressed when they are archived.

A line holds the event as JSON, its id and a checksum of both, so that damage is noticed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from perdure.errors import CorruptData
from perdure.providers.documents import NO_JSON, embed, extract
from perdure.providers.filesystem import layout
from perdure.providers.records import HistoryRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.providers.filesystem.history import History
    from perdure.providers.filesystem.root import Root


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    event_id: int
    event: msgspec.Raw = NO_JSON
    text: str | None = None
    checksum: str


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Line)


# --- lines


def encode_lines(records: Iterable[HistoryRecord]) -> bytes:
    lines: list[bytes] = []
    for record in records:
        event, text = embed(record.data)
        line = _Line(
            event_id=record.event_id,
            checksum=_checksum(record.event_id, record.data),
            event=event,
            text=text,
        )
        lines.append(_encoder.encode(line))
    return b"\n".join(lines) + b"\n" if lines else b""


def _checksum(event_id: int, data: str) -> str:
    return f"{zlib.crc32(b'%d %b' % (event_id, data.encode())):08x}"


def _decode_lines(data: bytes, where: str) -> list[HistoryRecord]:
    records: list[HistoryRecord] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        try:
            entry = _decoder.decode(line)
            text = extract(entry.event, entry.text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptData("read", f"{where}, line {number}: {error}") from error
        if text is None or entry.checksum != _checksum(entry.event_id, text):
            raise CorruptData("read", f"{where}, line {number}: the checksum does not fit")
        records.append(HistoryRecord(event_id=entry.event_id, data=text))
    return records


# --- reading


@dataclass(frozen=True, slots=True)
class HistoryExcerpt:
    """What is to be read of one history: the first part from its file, the rest from memory."""

    instance_id: str
    execution_id: int
    file_bytes: int
    written: int
    is_archived: bool
    pending: Sequence[HistoryRecord]

    @classmethod
    def of(cls, instance_id: str, execution_id: int, history: History) -> HistoryExcerpt:
        log = history.log
        return cls(
            instance_id,
            execution_id,
            log.file_bytes,
            log.written,
            log.is_archived,
            history.pending(),
        )

    def is_at_the_place_of(self, other: HistoryExcerpt) -> bool:
        """Whether the events that both read from a file are in the same file."""
        return self.is_archived == other.is_archived and self.file_bytes >= other.file_bytes

    def read(self, root: Root) -> list[HistoryRecord]:
        """All events in the order of their ids."""
        records = self._read_file(root) if self.written else []
        records.extend(self.pending)
        if any(first.event_id > second.event_id for first, second in pairwise(records)):
            records.sort(key=lambda record: record.event_id)
        return records

    def _read_file(self, root: Root) -> list[HistoryRecord]:
        if self.is_archived:
            path = layout.archived_history(self.instance_id, self.execution_id)
        else:
            path = layout.history_file(self.instance_id, self.execution_id)
        try:
            data = root.read(path)
            if self.is_archived:
                data = _decompress(data, self.file_bytes)
        except (OSError, EOFError, zlib.error) as error:
            raise CorruptData("read", f"{path}: {error}") from error
        records = _decode_lines(data[: self.file_bytes], path)
        if len(records) != self.written:
            raise CorruptData(
                "read", f"{path}: it holds {len(records)} events instead of {self.written}"
            )
        return records


def _decompress(data: bytes, size: int) -> bytes:
    """At most as much as was compressed, whatever the file says."""
    return zlib.decompressobj(wbits=31).decompress(data, size + 1)


# --- writing


def append_history(root: Root, excerpt: HistoryExcerpt, *, sync: bool) -> int:
    """Write the pending events behind the valid part of the file; returns its new length."""
    path = layout.history_file(excerpt.instance_id, excerpt.execution_id)
    if excerpt.is_archived:
        archive = layout.archived_history(excerpt.instance_id, excerpt.execution_id)
        restored = _decompress(root.read(archive), excerpt.file_bytes)
        scratch = root.write_scratch(restored, sync=True)
        root.ops.rename(scratch, path, dir_fd=root.descriptor)
    descriptor = root.ops.open_for_append(path, dir_fd=root.descriptor)
    try:
        size = root.ops.size_of(descriptor)
        if size > excerpt.file_bytes:
            root.ops.truncate(descriptor, excerpt.file_bytes)
            size = excerpt.file_bytes
        data = encode_lines(excerpt.pending)
        root.write_all(descriptor, data)
        if sync:
            root.sync_descriptor(descriptor)
        return size + len(data)
    finally:
        root.ops.close(descriptor)
