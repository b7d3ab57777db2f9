"""Checkpoints: bring the readable files up to date with the journal, then shorten the journal.

A checkpoint may be interrupted anywhere: the journal is kept until every file of it is durable, and
applying it again over files that are already newer changes nothing. Its parts, in this order, each
durable before the next: the journal goes on in a new segment; histories; documents; removals;
``store.json``, which says how far the files are; the old segments go.

It runs in the thread of the writer, a slice at a time, so that commits can pass between slices. A
slice reads what is committed by then, so a file may be newer than the checkpoint's mark.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from perdure.errors import CorruptData
from perdure.model.wire import FORMAT_VERSION
from perdure.providers.directory import layout
from perdure.providers.directory.documents import (
    LAYOUT_VERSION,
    StoreDocument,
    event,
    ranges_text,
    seal,
    time_text,
)
from perdure.providers.directory.file_batch import FileBatch
from perdure.providers.directory.histories import (
    IN_FILE,
    HistoryFile,
    compress,
    encode_lines,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import apsw

    from perdure.providers.directory.changes import Changes, Execution, RowKey
    from perdure.providers.directory.damage import DamagedFiles
    from perdure.providers.directory.documents import Documents
    from perdure.providers.directory.histories import Histories
    from perdure.providers.directory.layout import InstanceNames
    from perdure.providers.directory.root import Root

SHORT_HISTORY_BYTES: Final = 16_384
"""A history up to this length is part of a document."""
EXECUTIONS_IN_DOCUMENT: Final = 4
"""An instance with more executions gets a directory."""
SLICE: Final = 64
"""Instances or queue entries in a slice: bounds the time that a commit waits."""

QUEUES: Final = {
    "orchestrator_queue": (layout.ORCHESTRATOR_QUEUE, "message_id", "kind"),
    "worker_queue": (layout.WORKER_QUEUE, "message_id", "name"),
    "dead_letters": (layout.DEAD_LETTERS, "letter_id", "kind"),
}
"""The directory of each queue, and the columns that name its files."""
_LISTS: Final = {"sessions": layout.SESSIONS_FILE, "workers": layout.WORKERS_FILE}
_FACTS: Final = ("lock_token", "suspended", "not_before", "block", "touched_at")
"""A readiness row without any of these follows from the queue, and is in no file."""


class Files:
    """The files of a store, as they are on the disk, and the rows that they do not hold yet."""

    def __init__(
        self,
        root: Root,
        connection: apsw.Connection,
        documents: Documents,
        histories: Histories,
        names: InstanceNames,
        damage: DamagedFiles,
        changes: Changes,
    ) -> None:
        self.root = root
        self.connection = connection
        self.documents = documents
        self.histories = histories
        self.names = names
        self.damage = damage
        self.changes = changes
        self.created_at = 0
        self.dirty: set[RowKey] = set()
        """Rows that were changed since the last checkpoint began."""
        self.dropped: set[Execution] = set()
        """Histories that were deleted since the last checkpoint began."""
        self.ids: dict[int, str] = {}
        """Ids of the instances that have files, by key. A key may be given to a new instance."""
        self.entries: dict[tuple[str, int], str] = {}
        """The file of each queue entry that has one, by table and id."""
        self.stale: set[str] = set()
        """Files to be removed: a crash kept the checkpoint before from doing so."""


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
        self._execute = files.connection.execute
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
        """Files that are on the disk, perhaps, if this checkpoint fails."""
        self._notes: list[tuple[str, Callable[[], object]]] = []
        """To be done when a file is in place, or, without a path, when all removals are done."""

    def run(self, drop_segments: Callable[[int], None]) -> Iterator[None]:
        """Write the files; commits may pass at each yield. Errors: OSError, SyncFailed."""
        try:
            work = self._instances()
            for number, (instance_id, executions) in enumerate(work.items(), 1):
                try:
                    self._capture(instance_id, executions)
                except CorruptData as damage:
                    self._leave_aside(instance_id, damage)
                if number % SLICE == 0:
                    yield
            yield from self._capture_entries()
            for name, path in _LISTS.items():
                if any(key[0] == name for key in self._dirty):
                    self._capture_list(name, path)
            yield
            self._history_files.place()
            self._document_files.place()
            written = self._history_files.placed | self._document_files.placed
            written |= {path.rpartition("/executions/")[0] for path in written}
            written |= {path.removesuffix("/meta.json") for path in written}
            self._document_files.remove((self._removals | self._stale) - written)
            self._write_store()
            drop_segments(self._first_sequence)
        except BaseException:
            self._history_files.give_up()
            self._document_files.give_up()
            self._files.dirty |= self._dirty
            self._files.stale |= self._stale | self._tried
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
        finally:
            changes.watch(is_watching=True)

    def _leave_aside(self, instance_id: str, damage: CorruptData) -> None:
        """Keep the files of an instance as they are: its history is needed and is damaged."""
        files = self._files
        name = files.names.name_of(instance_id)
        path = layout.instance_directory(name)
        if name not in files.names.directories:
            path = layout.document_file(name)
        files.damage.add(path, damage.message, name, is_lost=True)

    # --- choosing

    def _instances(self) -> dict[str, set[int]]:
        """Return the instances that are out of date, with the executions that are."""
        keys: dict[int, set[int]] = {}
        work: dict[str, set[int]] = {}
        self._dirty.update(("executions", *each) for each in self._due_for_archive())
        for key in self._dirty:
            table = key[0]
            if table == "instance_locks":
                work.setdefault(key[1], set())
            elif table in {"executions", "history"}:
                keys.setdefault(key[1], set()).add(key[2])
            elif table in {"instances", "kv_store", "kv_delta"}:
                keys.setdefault(key[1], set())
        for key, executions in keys.items():
            before = self._files.ids.get(key)
            if before is not None:
                work.setdefault(before, set()).update(executions)
            now = self._execute(
                "SELECT instance_id FROM instances WHERE instance_key = ?", (key,)
            ).get
            if now is not None:
                work.setdefault(now, set()).update(executions)
            elif before is not None:
                self._notes.append(("", partial(self._files.ids.pop, key, None)))
        return work

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

    def _capture(self, instance_id: str, dirty_executions: set[int]) -> None:
        files, table = self._files, self._tables["instances"]
        if files.damage.is_lost(instance_id):
            return
        name = files.names.name_of(instance_id)
        row: Any = self._execute(f"{table.select} WHERE instance_id = ?", (instance_id,)).fetchone()
        lock = self._lock(instance_id)
        if row is None and lock is None:
            if name in files.names:
                self._remove_instance(name)
            return
        files.names.add(name, instance_id)
        fields: dict[str, Any] = {"instance_id": instance_id} if row is None else table.values(row)
        if lock is not None:
            fields["lock"] = lock
        key: int | None = None if row is None else row[0]
        is_directory = name in files.names.directories
        if key is not None:
            fields |= self._values(key)
            executions = self._execution_ids(key)
            for gone in dirty_executions - executions:
                self._remove_execution(name, gone)
            if is_directory or not self._fits_document(key, executions):
                fields["execution_ids"] = ranges_text(sorted(executions))
                dirty = dirty_executions & executions if is_directory else executions
                self._write_executions(name, key, dirty)
                if not is_directory:
                    self._removals.add(layout.document_file(name))
                is_directory = True
            else:
                document = layout.document_file(name)
                fields["executions"] = tuple(
                    self._execution(name, (key, each), document)
                    for each in sorted(executions)
                )
        self._tried |= {layout.document_file(name), layout.instance_directory(name)}
        path = layout.meta_file(name) if is_directory else layout.document_file(name)
        self._document_files.write(path, seal(files.documents.instance(**fields)))
        if is_directory:
            self._notes.append((path, partial(files.names.directories.add, name)))
        if key is not None:
            self._notes.append((path, partial(files.ids.__setitem__, key, instance_id)))

    def _remove_instance(self, name: str) -> None:
        files = self._files
        self._removals |= {
            layout.instance_directory(name)
            if name in files.names.directories
            else layout.document_file(name),
            layout.archive_directory(name),
        }
        self._notes.append(("", partial(files.names.discard, name)))

    def _lock(self, instance_id: str) -> Any:
        """Return the document of a lock or a hold; None if there is none."""
        table = self._tables["instance_locks"]
        row: Any = self._execute(f"{table.select} WHERE instance_id = ?", (instance_id,)).fetchone()
        if row is None:
            return None
        values = dict(zip(table.columns, row, strict=True))
        if not any(values[name] for name in _FACTS):
            return None
        fields = table.values(row)
        del fields["instance_id"]
        return self._files.documents.lock(**fields)

    def _values(self, key: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in ("kv_store", "kv_delta"):
            table, found = self._tables[name], {}
            rows: list[Any] = self._execute(
                f"{table.select} WHERE instance_key = ? ORDER BY key", (key,)
            ).fetchall()
            for row in rows:
                fields = table.values(row)
                del fields["instance_key"], fields["key"]
                found[row[1]] = self._files.documents.value(**fields)
            values[name] = found
        return values

    # --- executions

    def _execution_ids(self, key: int) -> set[int]:
        rows: list[Any] = self._execute(
            "SELECT execution_id FROM executions WHERE instance_key = ?1"
            " UNION SELECT execution_id FROM history WHERE instance_key = ?1",
            (key,),
        ).fetchall()
        return {row[0] for row in rows}

    def _fits_document(self, key: int, executions: Iterable[int]) -> bool:
        files = self._files.histories.files
        places = [files.get((key, each)) for each in executions]
        if len(places) > EXECUTIONS_IN_DOCUMENT:
            return False
        if any(place is not None and not place.is_archived for place in places):
            return False
        sizes: int | None = self._execute(
            "SELECT sum(octet_length(data)) FROM history WHERE instance_key = ?", (key,)
        ).get
        return (sizes or 0) <= SHORT_HISTORY_BYTES

    def _is_short(self, execution: Execution) -> bool:
        size: int | None = self._execute(
            "SELECT sum(octet_length(data)) FROM history"
            " WHERE instance_key = ? AND execution_id = ?",
            execution,
        ).get
        return (size or 0) <= SHORT_HISTORY_BYTES

    def _write_executions(self, name: str, key: int, executions: Iterable[int]) -> None:
        for each in sorted(executions):
            path = layout.execution_file(name, each)
            self._document_files.write(path, seal(self._execution(name, (key, each), path)))

    def _remove_execution(self, name: str, execution_id: int) -> None:
        self._removals |= {
            layout.execution_file(name, execution_id),
            layout.history_file(name, execution_id),
            layout.archived_history(name, execution_id),
        }

    def _execution(self, name: str, execution: Execution, path: str) -> Any:
        """Return the document of an execution, which will be in a file, alone or with others.

        Writes its history if that has a file of its own.
        """
        table, histories = self._tables["executions"], self._files.histories
        row: Any = self._execute(
            f"{table.select} WHERE instance_key = ? AND execution_id = ?", execution
        ).fetchone()
        fields: dict[str, Any] = {"execution_id": execution[1]}
        completed_at: int | None = None
        if row is not None:
            fields |= table.values(row)
            del fields["instance_key"]
            completed_at = row[table.columns.index("completed_at")]
        fields["events"] = histories.id_ranges(execution)
        if fields["events"]:
            is_old = (
                self._archive is not None
                and completed_at is not None
                and completed_at <= self._archive[1]
            )
            file = self._write_history(name, execution, path, is_old=is_old)
            if file is None:
                events = histories.events(execution)
                fields["history"] = tuple(event(*each) for each in events)
                # A history that still grows stays in memory: its document is written again.
                written = events if completed_at is not None else ()
                self._note_history(path, execution, None, written)
            else:
                fields |= {"history_bytes": file.size, "archived": file.is_archived}
        return self._files.documents.execution(**fields)

    def _write_history(
        self, name: str, execution: Execution, document: str, *, is_old: bool
    ) -> HistoryFile | None:
        """Write new events into the file of the history; None if the history needs no file."""
        histories, number = self._files.histories, execution[1]
        file = histories.files.get(execution)
        unwritten = histories.unwritten(execution)
        if file is not None and not unwritten and file.is_archived >= is_old:
            return file
        lines = encode_lines(unwritten)
        if file is not None and not file.is_archived and not is_old:
            self._history_files.append(layout.history_file(name, number), file.size, lines)
            new = HistoryFile(file.size + len(lines))
        else:
            is_small = document == layout.document_file(name)
            if not is_old and (is_small or self._is_short(execution)):
                if file is not None:
                    self._removals.add(histories.path(name, number, file))
                return None
            if file is not None:
                data = histories.read_file(name, number, file) + lines
            else:
                data = encode_lines(histories.events(execution))
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
        written: Iterable[tuple[int, str]],
    ) -> None:
        """When the document is in place, drop the texts from memory."""
        histories = self._files.histories

        def note() -> None:
            if execution in self._files.dropped:
                histories.files.pop(execution, None)
                return
            if file is None:
                histories.files.pop(execution, None)
            else:
                histories.files[execution] = file
            event_ids = [event_id for event_id, data in written if data != IN_FILE]
            histories.forget_texts(execution, event_ids)

        self._notes.append((document, note))

    # --- the rest

    def _capture_entries(self) -> Iterator[None]:
        number = 0
        for table, (queue, id_column, kind_column) in QUEUES.items():
            ids = sorted(key[1] for key in self._dirty if key[0] == table)
            described = self._tables[table]
            kind_position = described.columns.index(kind_column)
            instance_position = described.columns.index("instance_id")
            for entry_id in ids:
                row: Any = self._execute(
                    f"{described.select} WHERE {id_column} = ?", (entry_id,)
                ).fetchone()
                path: str | None = None
                if row is not None:
                    instance_id, kind = row[instance_position], row[kind_position]
                    path = layout.entry_file(queue, entry_id, instance_id, kind)
                    self._tried.add(path)
                    document = self._files.documents.entries[table](**described.values(row))
                    self._document_files.write(path, seal(document))
                self._note_entry((table, entry_id), path)
                number += 1
                if number % SLICE == 0:
                    yield

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
        moved_to, next_message_id = self._execute(
            "SELECT moved_to, next_message_id FROM store_info"
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
        )
        self._root.replace(layout.STORE_FILE, seal(document))
