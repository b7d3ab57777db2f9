"""Histories outside of memory: events that are in files are read from there when they are needed.

A short history is part of the document of its instance or execution. A long one has a file to
which its events are appended, one a line: the event as JSON, its id and a checksum of both. The
history of an execution that ended long ago can be compressed and put into the archive.

In the table ``history`` a row whose text is ``IN_FILE`` stands for an event in a file.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from perdure.errors import CorruptData
from perdure.providers.directory import layout
from perdure.providers.directory.documents import (
    Damaged,
    Event,
    are_json,
    history_texts,
    ranges_text,
    unseal,
)
from perdure.providers.record_documents import embed, extract

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import apsw

    from perdure.providers.directory.documents import Documents
    from perdure.providers.directory.journal import Execution
    from perdure.providers.directory.layout import InstanceNames
    from perdure.providers.directory.root import Root

EventRow: TypeAlias = tuple[int, int, str]
"""The row id, the event id and the text."""
IN_FILE: Final = "\0in a file\0"
"""Stands for the text of an event that is in a file; no JSON text is like this."""


class _Line(Event, frozen=True, kw_only=True):
    checksum: str


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Line)


def encode_lines(events: Sequence[tuple[Any, ...]]) -> bytes:
    """Return the lines of rows that end with the id and the text of an event."""
    rows = [(event_id, data.encode()) for *_, event_id, data in events]
    if are_json([data for _, data in rows]):
        return b"".join(
            [
                b'{"event_id":%d,"event":%b,"checksum":"%08x"}\n'
                % (event_id, data, zlib.crc32(b"%d %b" % (event_id, data)))
                for event_id, data in rows
            ]
        )
    lines: list[bytes] = []
    for *_, event_id, data in events:
        event, text = embed(data)
        checksum = _checksum(event_id, data)
        line = _Line(event_id=event_id, event=event, text=text, checksum=checksum)
        lines.append(_encoder.encode(line) + b"\n")
    return b"".join(lines)


def decode_lines(data: bytes, where: str) -> dict[int, str]:
    """Return the texts by event id. Errors: CorruptData."""
    events: dict[int, str] = {}
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
        events[entry.event_id] = text
    return events


def _checksum(event_id: int, data: str) -> str:
    return f"{zlib.crc32(b'%d %b' % (event_id, data.encode())):08x}"


def compress(data: bytes) -> bytes:
    """Return an archived history; two of one history do not differ by their time."""
    return gzip.compress(data, mtime=0)


def decompress(data: bytes, size: int) -> bytes:
    """Return at most that many bytes and one more. Errors: zlib.error."""
    return zlib.decompressobj(wbits=31).decompress(data, size + 1)


@dataclass(frozen=True, slots=True)
class HistoryFile:
    """The file of a history that is not part of a document."""

    size: int
    """Length of the valid part, uncompressed; later bytes are left from a crash."""
    is_archived: bool = False


class Histories:
    """Finds the events of executions, in memory and in files."""

    def __init__(
        self, root: Root, connection: apsw.Connection, documents: Documents, names: InstanceNames
    ) -> None:
        self._root = root
        self._execute: Callable[..., Any] = connection.execute
        self._documents = documents
        self._names = names
        self.files: dict[Execution, HistoryFile] = {}
        """The files of the executions whose history is not part of a document."""

    def rows(self, execution: Execution) -> list[EventRow]:
        """Return the rows of all events in the order of their ids."""
        rows: list[EventRow] = self._execute(
            "SELECT rowid, event_id, data FROM history"
            " WHERE instance_key = ? AND execution_id = ? ORDER BY event_id",
            execution,
        ).fetchall()
        return rows

    def complete(self, execution: Execution, rows: list[Any]) -> list[tuple[int, str]]:
        """Return (event id, text) of rows that end with these; read the texts that are in a file.

        Errors: CorruptData.
        """
        if IN_FILE not in [row[-1] for row in rows]:
            return rows
        texts = self._texts(execution)
        try:
            return [
                (event_id, texts[event_id] if data == IN_FILE else data)
                for *_, event_id, data in rows
            ]
        except KeyError as missing:
            raise CorruptData("read", f"the file has no event {missing}") from missing

    def unwritten(self, execution: Execution) -> list[EventRow]:
        """Return the events that no file holds, in the order of their commits."""
        rows: list[EventRow] = self._execute(
            "SELECT rowid, event_id, data FROM history"
            " WHERE instance_key = ? AND execution_id = ? AND data != ? ORDER BY rowid",
            (*execution, IN_FILE),
        ).fetchall()
        return rows

    def id_ranges(self, execution: Execution) -> str:
        """Return the ids of the events as ``1-3, 5``."""
        ids: list[Any] = self._execute(
            "SELECT event_id FROM history WHERE instance_key = ? AND execution_id = ?"
            " ORDER BY event_id",
            execution,
        ).fetchall()
        return ranges_text(row[0] for row in ids)

    def forget_texts(self, row_ids: list[int]) -> None:
        """Drop the texts of events from memory; files have them."""
        self._execute(
            "UPDATE history SET data = ? WHERE rowid IN (SELECT value FROM json_each(?))",
            (IN_FILE, _encoder.encode(row_ids)),
        )

    # --- files

    def path(self, name: str, execution_id: int, file: HistoryFile) -> str:
        if file.is_archived:
            return layout.archived_history(name, execution_id)
        return layout.history_file(name, execution_id)

    def read_file(self, name: str, execution_id: int, file: HistoryFile) -> bytes:
        """Return the lines of a history file. Errors: CorruptData."""
        path = self.path(name, execution_id, file)
        try:
            data = self._root.read(path)
            if file.is_archived:
                data = decompress(data, file.size)
        except (OSError, EOFError, zlib.error) as error:
            raise CorruptData("read", f"{path}: {error}") from error
        if len(data) < file.size:
            raise CorruptData("read", f"{path}: {len(data)} bytes instead of {file.size}")
        return data[: file.size]

    def _texts(self, execution: Execution) -> dict[int, str]:
        key, execution_id = execution
        instance_id = self._execute(
            "SELECT instance_id FROM instances WHERE instance_key = ?", (key,)
        ).get
        name = self._names.name_of(instance_id)
        file = self.files.get(execution)
        if file is not None:
            data = self.read_file(name, execution_id, file)
            return decode_lines(data, self.path(name, execution_id, file))
        return self._texts_in_document(name, execution_id)

    def _texts_in_document(self, name: str, execution_id: int) -> dict[int, str]:
        documents = self._documents
        try:
            if name in self._names.directories:
                path = layout.execution_file(name, execution_id)
                executions = [unseal(self._root.read(path), documents.execution)]
            else:
                path = layout.document_file(name)
                executions = unseal(self._root.read(path), documents.instance).executions
        except (OSError, Damaged) as error:
            raise CorruptData("read", f"the history of {name} is damaged: {error}") from error
        for execution in executions:
            if execution.execution_id == execution_id:
                return history_texts(execution.history)
        return {}
