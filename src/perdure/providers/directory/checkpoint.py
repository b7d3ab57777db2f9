"""Checkpoints: bring the readable files up to date with the journal, then shorten the journal.

A checkpoint may be interrupted anywhere: the journal is kept until every file of it is durable, and
applying it again over files that are already newer changes nothing. Its parts, in this order, each
durable before the next: the journal goes on in a new segment; histories; documents; removals;
``store.json``, which says how far the files are; the old segments go.

It runs in the thread of the writer, a slice at a time, so that commits can pass between slices. A
slice reads what is committed by then, so a file may be newer than the checkpoint's mark.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from perdure.errors import CorruptData
from perdure.model.wire import FORMAT_VERSION
from perdure.providers.directory import layout
from perdure.providers.directory.documents import (
    LAYOUT_VERSION,
    Documents,
    StoreDocument,
    history,
    range_text,
    ranges_text,
    seal,
    time_text,
)
from perdure.providers.directory.histories import (
    IN_FILE,
    Histories,
    HistoryFile,
    compress,
    encode_lines,
)
from perdure.providers.directory.journal import Changes, Execution, RowKey
from perdure.providers.directory.root import FileBatch, Root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import apsw

    from perdure.providers.directory.documents import Table
    from perdure.providers.directory.histories import EventRow

_Key = TypeVar("_Key")
_encode: Final = msgspec.json.Encoder().encode

SHORT_HISTORY_BYTES: Final = 16_384
"""A history up to this length is part of a document."""
EXECUTIONS_IN_DOCUMENT: Final = 4
"""An instance with more executions gets a directory."""
SLICE: Final = 64
"""Instances or queue entries in a slice: bounds the time that a commit waits."""

LISTS: Final = {"sessions": layout.SESSIONS_FILE, "workers": layout.WORKERS_FILE}
"""The files of tables that have one file for all rows."""
QUEUES: Final = {
    "orchestrator_queue": (layout.ORCHESTRATOR_QUEUE, "kind"),
    "worker_queue": (layout.WORKER_QUEUE, "name"),
    "dead_letters": (layout.DEAD_LETTERS, "kind"),
}
"""The directory of each queue, and the column that ends the names of its files."""
_EXTENTS: Final = """
SELECT instance_key, execution_id, count(*), min(event_id), max(event_id), sum(octet_length(data))
FROM history WHERE instance_key"""
_EVENTS: Final = """
SELECT instance_key, execution_id, rowid, event_id, data FROM history WHERE instance_key"""
_FACTS: Final = ("lock_token", "suspended", "not_before", "block", "touched_at", "mail_held")
"""A readiness row without any of these follows from the queue, and is in no file."""


class Files:
    """The files of a store, as they are on the disk, and the rows that they do not hold yet."""

    def __init__(self, root: Root, connection: apsw.Connection) -> None:
        self.root = root
        self.connection = connection
        self.documents = Documents(connection)
        self.names = layout.InstanceNames()
        self.histories = Histories(root, connection, self.documents, self.names)
        self.damage = layout.DamagedFiles(root.path)
        self.changes = Changes(connection, self.documents.tables)
        self.created_at = 0
        self.dirty: set[RowKey] = set()
        """Rows that were changed since the last checkpoint began."""
        self.dropped: set[Execution] = set()
        """Histories that were deleted since the last checkpoint began."""
        self.ids: dict[int, str] = {}
        """Ids of the instances that have files, by key. A key may be given to a new instance."""
        self.entries: dict[tuple[str, int], str] = {}
        """The file of each queue entry that has one, by table and id."""
        self.first_key = 1
        """New instances get no key below it: instances with damaged files may have those."""
        self.is_closing = False
        """Nothing will be read any more, so texts need not leave memory one by one."""
        self.stale: set[str] = set()
        """Files to be removed: a crash kept the checkpoint before from doing so."""


@dataclass(slots=True)
class _ExecutionRows:
    """The row of an execution, if it has one, and the extent of its history."""

    row: Any = None
    events: int = 0
    first_id: int = 0
    last_id: int = 0
    history_bytes: int = 0
    """Bytes of the texts in memory."""
    history: list[EventRow] = field(default_factory=list["EventRow"])
    """Read already if the instance is small."""


class _Rows:
    """The rows of some instances, read with few queries."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        select: Callable[..., list[Any]],
        ids: Iterable[str],
    ) -> None:
        table, locks = tables["instances"], tables["instance_locks"]
        self.instances = {row[1]: row for row in select(f"{table.select} WHERE instance_id", ids)}
        facts = " OR ".join(f"coalesce({name}, 0) != 0" for name in _FACTS)
        sql = f"{locks.select} WHERE ({facts}) AND instance_id"
        self.locks = {row[0]: row for row in select(sql, ids)}
        """Those with a lock or a hold."""
        keys = [row[0] for row in self.instances.values()]
        self.values: dict[int, list[tuple[str, Any]]] = {}
        self.executions: dict[int, dict[int, _ExecutionRows]] = {}
        if not keys:
            return
        for name in ("kv_store", "kv_delta"):
            for row in select(f"{tables[name].select} WHERE instance_key", keys):
                self.values.setdefault(row[0], []).append((name, row))
        for row in select(f"{tables['executions'].select} WHERE instance_key", keys):
            self.executions.setdefault(row[0], {})[row[1]] = _ExecutionRows(row)
        for key, number, *extent in select(_EXTENTS, keys, "GROUP BY 1, 2"):
            executions = self.executions.setdefault(key, {})
            found = executions.get(number)
            if found is None:
                found = executions[number] = _ExecutionRows()
            found.events, found.first_id, found.last_id, found.history_bytes = extent
        small = [
            key
            for key, executions in self.executions.items()
            if sum(each.history_bytes for each in executions.values()) <= SHORT_HISTORY_BYTES
        ]
        for row in select(_EVENTS, small, "ORDER BY 1, 2, event_id"):
            self.executions[row[0]][row[1]].history.append(row[2:])


def entry_path(table: Table, row: Sequence[Any]) -> str:
    """Return the file of a message, a work item or a dead letter."""
    queue, kind_column = QUEUES[table.name]
    columns = table.columns
    instance_id, kind = row[columns.index("instance_id")], row[columns.index(kind_column)]
    return layout.entry_file(queue, row[0], instance_id, kind)


def _slices(keys: Sequence[_Key]) -> Iterator[Sequence[_Key]]:
    for start in range(0, len(keys), SLICE):
        yield keys[start : start + SLICE]


class Checkpoint:
    """One run through the files that are out of date."""

    def __init__(
        self, files: Files, first_sequence: int, archive_before_ms: tuple[int, int] | None
    ) -> None:
        """``first_sequence``: of the journal segment that was just begun.

        ``archive_before_ms``: histories of executions that ended before the second time are
        compressed; those that ended before the first one have been looked at already.
        """
        self._files = files
        self._root = files.root
        self._tables = files.documents.tables
        self._execute: Callable[..., Any] = files.connection.execute
        self._first_sequence = first_sequence
        self._archive = archive_before_ms
        self._dirty, files.dirty = files.dirty, set()
        files.dropped = set()
        self._stale, files.stale = files.stale, set()
        count = len(self._dirty)
        self._history_files = FileBatch(self._root, files=count)
        self._document_files = FileBatch(self._root, files=count)
        self._removals: set[str] = set()
        self._tried: set[str] = set()
        """Files of queues that are on the disk, perhaps, if this checkpoint fails."""
        self._tried_instances: set[str] = set()
        """Names of instances whose files are."""
        self._notes: list[tuple[str, Callable[[], object]]] = []
        """Changes of what is known of the files: to call when the file with that path is in place
        or, without a path, when all removals are done.
        """
        self._written_events: list[int] = []

    def run(self, drop_segments: Callable[[int], None]) -> Iterator[None]:
        """Write the files; commits may pass at each yield. Errors: OSError, SyncFailed."""
        try:
            self._dirty.update(("executions", *each) for each in self._due_for_archive())
            changed: dict[str, list[RowKey]] = {}
            for key in self._dirty:
                changed.setdefault(key[0], []).append(key)
            work = self._instances(changed)
            for instance_ids in _slices(list(work)):
                self._capture_instances({each: work[each] for each in instance_ids})
                yield
            for table in QUEUES:
                entry_ids: list[int] = sorted(key[1] for key in changed.get(table, ()))
                for some_ids in _slices(entry_ids):
                    self._capture_entries(table, some_ids)
                    yield
            for table, path in LISTS.items():
                if table in changed:
                    self._capture_list(table, path)
            self._history_files.put_in_place()
            self._document_files.put_in_place()
            if doomed := self._removals | self._stale:
                written = self._history_files.placed | self._document_files.placed
                written |= {path.rpartition("/executions/")[0] for path in written}
                written |= {path.removesuffix("/meta.json") for path in written}
                self._document_files.remove(doomed - written)
            self._write_store()
            drop_segments(self._first_sequence)
        except BaseException:
            self._history_files.give_up()
            self._document_files.give_up()
            self._files.dirty |= self._dirty
            self._files.stale |= self._stale | self._tried
            for name in self._tried_instances:
                self._files.stale |= {layout.document_file(name), layout.instance_directory(name)}
            self._note(self._document_files.placed)
            raise
        self._note({*self._document_files.placed, ""})

    def _note(self, placed: set[str]) -> None:
        """Take note of the files that are in place, also if others are not."""
        changes = self._files.changes
        changes.watch(is_watching=False)  # texts that leave memory are no change
        try:
            for path, note in self._notes:
                if path in placed:
                    note()
            if not self._files.is_closing:
                self._files.histories.forget_texts(self._written_events)
        finally:
            changes.watch(is_watching=True)

    def _leave_aside(self, instance_id: str, damage: CorruptData) -> None:
        """Keep the files of an instance as they are: its history is needed and is damaged."""
        files = self._files
        name = files.names.name_of(instance_id)
        files.damage.add(files.names.path(name), damage.message, name, is_lost=True)

    # --- choosing

    def _instances(self, changed: dict[str, list[RowKey]]) -> dict[str, set[int]]:
        """Return the instances that are out of date, with the executions that are."""
        keys: dict[int, set[int]] = {}
        for table in ("instances", "kv_store", "kv_delta"):
            for row_key in changed.get(table, ()):
                keys.setdefault(row_key[1], set())
        executions = {row_key[1:3] for row_key in changed.get("history", ())}
        executions.update(row_key[1:] for row_key in changed.get("executions", ()))
        for key, number in executions:
            keys.setdefault(key, set()).add(number)
        work: dict[str, set[int]] = {key[1]: set() for key in changed.get("instance_locks", ())}
        known = "SELECT instance_key, instance_id FROM instances WHERE instance_key"
        now: dict[int, str] = dict(self._select(known, keys))
        for key, numbers in keys.items():
            before = self._files.ids.get(key)
            if before is not None:
                work.setdefault(before, set()).update(numbers)
            if key in now:
                work.setdefault(now[key], set()).update(numbers)
            elif before is not None:
                self._notes.append(("", partial(self._files.ids.pop, key, None)))
        return work

    def _select(self, sql: str, keys: Iterable[Any], tail: str = "") -> list[Any]:
        """Return the rows of a query that ends with the column of the keys, before the tail."""
        sql = f"{sql} IN (SELECT value FROM json_each(?)) {tail}"  # noqa: S608 - of constants
        rows: list[Any] = self._execute(sql, (_encode(list(keys)),)).fetchall()
        return rows

    def _due_for_archive(self) -> list[Execution]:
        if self._archive is None:
            return []
        found: list[Execution] = self._execute(
            "SELECT instance_key, execution_id FROM executions"
            " WHERE completed_at > ? AND completed_at <= ?",
            self._archive,
        ).fetchall()
        files = self._files.histories.files
        return [each for each in found if each not in files or not files[each].is_archived]

    # --- instances

    def _capture_instances(self, work: dict[str, set[int]]) -> None:
        rows = _Rows(self._tables, self._select, work)
        for instance_id, executions in work.items():
            try:
                self._capture(rows, instance_id, executions)
            except CorruptData as damage:
                self._leave_aside(instance_id, damage)

    def _capture(self, rows: _Rows, instance_id: str, dirty_executions: set[int]) -> None:
        files = self._files
        if files.damage.is_lost(instance_id):
            return
        name = files.names.name_of(instance_id)
        row, lock = rows.instances.get(instance_id), rows.locks.get(instance_id)
        if row is None and lock is None:
            if name in files.names:
                self._remove_instance(name)
            return
        files.names.add(name, instance_id)
        fields: dict[str, Any] = {"instance_id": instance_id}
        if lock is not None:
            fields["lock"] = self._lock(lock)
        is_directory = name in files.names.directories
        document = layout.meta_file(name) if is_directory else layout.document_file(name)
        if row is not None:
            key = row[0]
            executions = rows.executions.get(key, {})
            fields |= self._tables["instances"].values(row)
            fields |= self._values(rows.values.get(key, ()))
            for gone in dirty_executions - executions.keys():
                self._remove_execution(name, gone)
            if is_directory or not self._fits_document(key, executions):
                fields["execution_ids"] = ranges_text(sorted(executions))
                dirty = dirty_executions & executions.keys() if is_directory else set(executions)
                for each in sorted(dirty):
                    path = layout.execution_file(name, each)
                    captured = self._execution(name, (key, each), executions[each], path)
                    self._document_files.write(path, seal(captured))
                if not is_directory:
                    self._removals.add(document)
                    document = layout.meta_file(name)
                    self._notes.append((document, partial(files.names.directories.add, name)))
            else:
                fields["executions"] = tuple(
                    self._execution(name, (key, each), executions[each], document)
                    for each in sorted(executions)
                )
            self._notes.append((document, partial(files.ids.__setitem__, key, instance_id)))
        self._tried_instances.add(name)
        self._document_files.write(document, seal(files.documents.instance(**fields)))

    def _remove_instance(self, name: str) -> None:
        names = self._files.names
        self._removals |= {names.path(name), layout.archive_directory(name)}
        self._notes.append(("", partial(names.discard, name)))

    def _lock(self, row: Any) -> Any:
        fields = self._tables["instance_locks"].values(row)
        del fields["instance_id"]
        return self._files.documents.lock(**fields)

    def _values(self, rows: Iterable[Any]) -> dict[str, dict[str, Any]]:
        values: dict[str, dict[str, Any]] = {"kv_store": {}, "kv_delta": {}}
        for table, row in rows:
            fields = self._tables[table].values(row)
            del fields["instance_key"], fields["key"]
            values[table][row[1]] = self._files.documents.value(**fields)
        return values

    # --- executions

    def _fits_document(self, key: int, executions: Mapping[int, _ExecutionRows]) -> bool:
        files = self._files.histories.files
        if len(executions) > EXECUTIONS_IN_DOCUMENT:
            return False
        for each in executions:
            file = files.get((key, each))
            if file is not None and not file.is_archived:
                return False
        return sum(each.history_bytes for each in executions.values()) <= SHORT_HISTORY_BYTES

    def _remove_execution(self, name: str, execution_id: int) -> None:
        self._removals |= {
            layout.execution_file(name, execution_id),
            layout.history_file(name, execution_id),
            layout.archived_history(name, execution_id),
        }

    def _execution(self, name: str, execution: Execution, rows: _ExecutionRows, path: str) -> Any:
        """Return the document of an execution, which will be in a file, alone or with others.

        Writes its history if that has a file of its own.
        """
        table, histories = self._tables["executions"], self._files.histories
        fields: dict[str, Any] = {"execution_id": execution[1]}
        completed_at: int | None = None
        if rows.row is not None:
            fields |= table.values(rows.row)
            del fields["instance_key"]
            completed_at = rows.row[table.columns.index("completed_at")]
        if rows.events:
            if rows.last_id - rows.first_id + 1 == rows.events:
                fields["events"] = range_text(rows.first_id, rows.last_id)
            else:
                fields["events"] = histories.id_ranges(execution)
            is_old = (
                self._archive is not None
                and completed_at is not None
                and completed_at <= self._archive[1]
            )
            is_short = rows.history_bytes <= SHORT_HISTORY_BYTES
            file = self._write_history(name, execution, path, is_old=is_old, is_short=is_short)
            if file is None:
                events = rows.history or histories.rows(execution)
                fields["history"] = history(histories.complete(execution, events))
                # A history that still grows stays in memory: its document is written again.
                written = events if completed_at is not None else ()
                self._note_history(path, execution, None, written)
            else:
                fields |= {"history_bytes": file.size, "archived": file.is_archived}
        return self._files.documents.execution(**fields)

    def _write_history(
        self, name: str, execution: Execution, document: str, *, is_old: bool, is_short: bool
    ) -> HistoryFile | None:
        """Write new events into the file of the history; None if the history needs no file."""
        histories, number = self._files.histories, execution[1]
        file = histories.files.get(execution)
        if file is None and is_short and not is_old:
            return None
        unwritten = histories.unwritten(execution)
        if file is not None and not unwritten and file.is_archived >= is_old:
            return file
        if file is not None and not file.is_archived and not is_old:
            lines = encode_lines(unwritten)
            self._history_files.append(layout.history_file(name, number), file.size, lines)
            new = HistoryFile(file.size + len(lines))
        else:
            if file is not None and is_short and not is_old:
                self._removals.add(histories.path(name, number, file))
                return None
            if file is not None:
                data = histories.read_file(name, number, file) + encode_lines(unwritten)
            else:
                events = histories.complete(execution, histories.rows(execution))
                data = encode_lines(events)
            new = HistoryFile(len(data), is_archived=is_old)
            path = histories.path(name, number, new)
            self._history_files.write(path, compress(data) if is_old else data)
            if file is not None and file.is_archived != is_old:
                self._removals.add(histories.path(name, number, file))
        self._note_history(document, execution, new, unwritten)
        return new

    def _note_history(
        self,
        document: str,
        execution: Execution,
        file: HistoryFile | None,
        written: Iterable[EventRow],
    ) -> None:
        """When the document is in place, drop the texts from memory."""
        histories = self._files.histories

        row_ids = [row_id for row_id, _, data in written if data != IN_FILE]

        def note() -> None:
            is_dropped = execution in self._files.dropped
            if file is None or is_dropped:
                histories.files.pop(execution, None)
            else:
                histories.files[execution] = file
            if not is_dropped:
                self._written_events += row_ids

        self._notes.append((document, note))

    # --- the rest

    def _capture_entries(self, table: str, ids: Sequence[int]) -> None:
        described, struct = self._tables[table], self._files.documents.entries[table]
        sql = f"{described.select} WHERE {described.key_columns[0]}"
        rows = {row[0]: row for row in self._select(sql, ids)}
        for entry_id in ids:
            row = rows.get(entry_id)
            if row is None and (table, entry_id) not in self._files.entries:
                continue  # it came and went between two checkpoints
            path: str | None = None
            if row is not None:
                path = entry_path(described, row)
                self._tried.add(path)
                self._document_files.write(path, seal(struct(**described.values(row))))
            self._note_entry((table, entry_id), path)

    def _note_entry(self, key: tuple[str, int], path: str | None) -> None:
        """Remember the file of an entry, and remove the one that it had before."""
        entries = self._files.entries
        before = entries.get(key)
        if before is not None and before != path:
            self._removals.add(before)

        if path is None:
            self._notes.append(("", partial(entries.pop, key, None)))
        else:
            self._notes.append((path, partial(entries.__setitem__, key, path)))

    def _capture_list(self, name: str, path: str) -> None:
        table, struct = self._tables[name], self._files.documents.lists[name]
        rows: list[Any] = self._execute(f"{table.select} ORDER BY 1").fetchall()
        self._document_files.write(path, seal(struct(rows=[table.values(row) for row in rows])))

    def _write_store(self) -> None:
        moved_to, next_message_id, clock_was_at, clock_set_to = self._execute(
            "SELECT moved_to, next_message_id, clock_was_at, clock_set_to FROM store_info"
        ).fetchone()
        last_letter_id = self._execute(
            "SELECT max(seq) FROM sqlite_sequence WHERE name = 'dead_letters'"
        ).get
        document = StoreDocument(
            format_version=FORMAT_VERSION,
            layout_version=LAYOUT_VERSION,
            created_at=time_text(self._files.created_at),
            moved_to=moved_to,
            checkpoint=self._first_sequence - 1,
            last_message_id=next_message_id - 1,
            last_letter_id=last_letter_id or 0,
            clock_was_at=clock_was_at,
            clock_set_to=clock_set_to,
        )
        self._root.replace(layout.STORE_FILE, seal(document))
