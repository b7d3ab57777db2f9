"""The journal: the one place where a commit happens, and the changed rows that it holds.

A record is a line: checksum, length, JSON. Records lie in segments named after their first sequence
number; a torn end is cut, anything else that does not check out is damage and is refused. A segment
is filled with blanks ahead of its records, because overwriting is flushed faster than appending.

A record has the final values of the columns that its commit has changed. So applying records again,
in order, over rows that are already newer gives the newest rows: every value that changed since is
in a later record.
"""

# apsw's own stubs leave the type of a change open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import apsw
import msgspec

from perdure.errors import CorruptData, StoreClosed
from perdure.providers.directory import layout
from perdure.providers.directory.documents import TABLES, Table
from perdure.providers.directory.root import Root, SyncFailed, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from perdure.providers.directory.checkpoint import Files
    from perdure.providers.directory.histories import Histories

_HEADER_BYTES: Final = 18  # "cccccccc llllllll "
_BLANK: Final = b" "
_NOTHING: Final = b" \0"
"""Bytes that may lie behind the last record: blanks, or zeros where they did not reach the disk."""
_AHEAD_BYTES_MIN: Final = 1 << 16
_AHEAD_BYTES_MAX: Final = 1 << 20


class Record:
    """One commit."""

    __slots__ = ("body", "sequence", "synced")

    def __init__(self, body: Any) -> None:
        self.body = body
        """A list (sequence, rows, dropped histories); a dict in the layout of version 1."""
        self.sequence: int
        self.synced: int
        if isinstance(body, dict):
            self.sequence, self.synced = body["sequence"], body["synced"]
        else:
            self.sequence, self.synced = body[0], body[0] - 1
        # Every record up to ``synced`` was durable when this one was written.


def frame(body: bytes) -> bytes:
    """Return the line of a record."""
    return b"%08x %08x %b\n" % (zlib.crc32(body), len(body), body)


def parse_record(line: bytes) -> Record | None:
    """Return the record of one line without its newline; None if the line is damaged or torn."""
    body = line[_HEADER_BYTES:]
    if line[:_HEADER_BYTES] != b"%08x %08x " % (zlib.crc32(body), len(body)):
        return None
    try:
        return Record(msgspec.json.decode(body))
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        # The checksum fits, so these bytes are what was written: by another version.
        raise CorruptData("open", f"a journal record cannot be understood: {error}") from error


class Journal:
    """Writes to the newest segment. Used by one thread at a time."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._path = ""
        self._descriptor = -1
        self._size = 0
        """Length of the records; blanks follow."""
        self._filled = 0
        """Length of the file."""
        self._is_torn = False

    def append(self, data: bytes) -> None:
        """Make one record durable. After an OSError nothing of it is left in the file."""
        root = self._root
        if self._is_torn:
            self._cut()
        end = self._size + len(data)
        self._is_torn = True  # until it is whole, also for a signal that breaks in
        try:
            root.write_all(self._descriptor, data, self._size)
        except OSError:
            self._cut()
            raise
        if end > self._filled:
            self._fill_ahead(end)
        try:
            root.ops.fdatasync(self._descriptor)
        except OSError as error:
            raise SyncFailed(f"fdatasync of the journal: {error}") from error
        if not root.is_in_place or not root.ops.has_name(self._descriptor):
            # Durable, and yet no process will find it again.
            raise SyncFailed(f"{root.path} was removed or replaced while it was open")
        self._size = end
        self._is_torn = False

    def _fill_ahead(self, end: int) -> None:
        """Write blanks: a flush of bytes that are overwritten records no new length of the file."""
        self._filled = end
        ahead = min(max(end, _AHEAD_BYTES_MIN), _AHEAD_BYTES_MAX)
        with contextlib.suppress(OSError):  # no space: then the next ones are appended
            self._root.write_all(self._descriptor, _BLANK * ahead, end)
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
        descriptor = self._root.ops.open_for_update(path, at=self._root.directory)
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
                self._root.ops.unlink(f"{layout.JOURNAL}/{name}", at=self._root.directory)

    def finish(self) -> None:
        """Close, and leave no segment behind if nothing is in it: the sign of an orderly end."""
        is_empty = self._size == 0 and self._descriptor >= 0 and not self._is_torn
        self.close()
        if is_empty:
            with contextlib.suppress(OSError):
                self._root.ops.unlink(self._path, at=self._root.directory)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._root.ops.close(self._descriptor)
            self._descriptor = -1


def read_records(root: Root, after_sequence: int) -> Iterator[Record]:
    """Return every committed record past that one, in order; cut the torn end of the last segment.

    Errors: CorruptData if records are missing or damaged that had been committed.
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
    """Return True if the record with that number can have been cut off by a crash.

    A later record that was written after it had been synced shows that it was damaged later. (In
    the layout of version 1 the records of one batch reached the disk in any order.)
    """
    lines = (line.strip(_NOTHING) for line in end.split(b"\n"))
    return not any(
        record.synced >= sequence for line in lines if (record := parse_record(line)) is not None
    )


def _keep(root: Root, path: str, size: int) -> None:
    """Cut the bytes beyond a size, and flush the rest: a killed process may not have done so."""
    descriptor = root.ops.open_for_update(path, at=root.directory)
    try:
        if root.ops.size_of(descriptor) > size:
            root.ops.truncate(descriptor, size)
        root.sync_descriptor(descriptor)
    finally:
        root.ops.close(descriptor)


# --- changed rows

RowKey: TypeAlias = tuple[Any, ...]
"""The name of a table and a primary key."""
Execution: TypeAlias = tuple[int, int]
"""The key of an instance and the number of an execution."""

_encode: Final = msgspec.json.Encoder().encode
_no_change: Final = apsw.no_change


class Changes:
    """The rows that the open transaction has changed."""

    def __init__(self, connection: apsw.Connection, tables: Mapping[str, Table]) -> None:
        self._connection = connection
        self._tables = tables
        self._columns = {name: table.columns for name, table in tables.items()}
        self._numbered = frozenset([name for name, table in tables.items() if table.has_number])
        self.rows: dict[RowKey, Any] = {}
        """The whole row of one that was added, a dict of columns of one that was changed, or None
        for one that was deleted.
        """
        self.dropped: set[Execution] = set()
        """Executions whose history was deleted; what was added since is a new history."""

    def watch(self, *, is_watching: bool) -> None:
        """Capture changes from now on, or no longer."""
        self._connection.preupdate_hook(self._note if is_watching else None)

    def clear(self) -> None:
        if self.rows:
            self.rows = {}
        if self.dropped:
            self.dropped = set()

    def encode(self, sequence: int) -> bytes:
        """Return the record of the changes."""
        if self.dropped:
            return _encode((sequence, list(self.rows.items()), list(self.dropped)))
        return _encode((sequence, list(self.rows.items())))

    def _note(self, change: Any) -> None:
        """Called by SQLite before it changes a row."""
        table = change.table_name
        width = TABLES.get(table)
        if width is None:  # SQLite's own
            return
        operation = change.op
        if operation == "INSERT":
            values = change.new
            self.rows[(table, *values[:width])] = values
        elif operation == "UPDATE":
            key = self._key(change, table, width)
            known = self.rows.get(key)
            if known.__class__ is tuple:
                self.rows[key] = change.new
                return
            if known is None:
                self.rows[key] = known = {}
            for column, value in zip(self._columns[table], change.update, strict=False):
                if value is not _no_change:
                    known[column] = value
        else:
            key = self._key(change, table, width)
            self.rows[key] = None
            if table == "history":
                self.dropped.add((key[1], key[2]))

    def _key(self, change: Any, table: str, width: int) -> RowKey:
        """Return the key of a row that is there already; the columns are read only if needed."""
        if table in self._numbered:
            return (table, change.rowid)
        return (table, *change.old[:width])

    # --- the other way

    def apply(self, rows: Iterable[tuple[RowKey, Any]], dropped: Iterable[Execution]) -> None:
        """Change rows as a record says. The record may have been applied before."""
        execute = self._connection.execute
        for execution in dropped:
            execute("DELETE FROM history WHERE instance_key = ? AND execution_id = ?", execution)
        rest: list[tuple[RowKey, Any]] = []
        for key, value in rows:
            if value is None:  # first: a row that was added may have its place in an index
                execute(f"DELETE FROM {key[0]} WHERE {self._where(key)}", key[1:])  # noqa: S608 - of constants
            else:
                rest.append((key, value))
        for key, value in rest:
            table = self._tables[key[0]]
            if isinstance(value, dict):
                if not value:  # each column was set to the value that it had
                    continue
                names = ", ".join(f"{name} = ?" for name in value)
                bindings = (*value.values(), *key[1:])
                execute(f"UPDATE {table.name} SET {names} WHERE {self._where(key)}", bindings)  # noqa: S608 - of constants
            elif table.name == "history":
                # An event never changes. One that is there may be in its file already.
                execute(
                    "INSERT OR IGNORE INTO history (instance_key, execution_id, event_id, data)"
                    " VALUES (?, ?, ?, ?)",
                    value[:4],
                )
            else:
                execute(table.put, value)

    def _where(self, key: RowKey) -> str:
        return " AND ".join(f"{name} = ?" for name in self._tables[key[0]].key_columns)


class JournalHook:
    """Writes the changed rows of each commit into the journal, before COMMIT."""

    def __init__(self, enforce_moved_mark: Callable[[], None]) -> None:
        self.enforce_moved_mark = enforce_moved_mark
        self.files: Files
        self.changes: Changes
        self.histories: Histories
        self.journal: Journal
        self.sequence = 0
        """Sequence number of the newest record."""
        self.journal_bytes = 0
        """Written since the last checkpoint began."""
        self.failure: str | None = None
        """The reason why nothing can be committed any more."""
        self._is_in_doubt = False
        """A record is durable, and its transaction is not committed in memory yet."""

    def attach(self, files: Files, journal: Journal, sequence: int) -> None:
        self.files, self.changes, self.histories = files, files.changes, files.histories
        self.journal, self.sequence = journal, sequence
        self.journal_bytes = 0
        self.failure = None

    def before_commit(self) -> None:
        changes = self.changes
        if not changes.rows:
            return
        line = frame(changes.encode(self.sequence + 1))
        try:
            self.journal.append(line)
        except OSError as error:
            raise refusal("commit", error) from error
        except SyncFailed as error:
            raise self.fail(error) from error
        self._is_in_doubt = True
        self.sequence += 1
        self.journal_bytes += len(line)
        files = self.files
        files.dirty.update(changes.rows)
        if changes.dropped:
            files.dropped |= changes.dropped
            for execution in changes.dropped:
                files.histories.files.pop(execution, None)

    def committed(self) -> None:
        self._is_in_doubt = False
        self.changes.clear()

    def rolled_back(self) -> None:
        if self._is_in_doubt:
            # A signal came between the journal and COMMIT. The journal decides.
            changes = self.changes
            changes.watch(is_watching=False)
            changes.apply(list(changes.rows.items()), changes.dropped)
            changes.watch(is_watching=True)
            self.enforce_moved_mark()
            self._is_in_doubt = False
        self.changes.clear()

    def fail(self, error: SyncFailed) -> StoreClosed:
        """Close for good: which bytes are on the disk is unknown from now on."""
        self.failure = (
            f"the store was closed because data could not be made durable ({error}); check the "
            "disk, then start again"
        )
        return StoreClosed("commit", self.failure)
