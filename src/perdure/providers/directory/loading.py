"""Opening a store: first the readable files, then the journal over them, before anything else.

A file that does not check out is left as it is and reported; its instance is refused, and the rest
of the store works.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from perdure.errors import CorruptData, StoreRefused
from perdure.model.wire import FORMAT_VERSION
from perdure.providers.directory import layout
from perdure.providers.directory.checkpoint import LISTS, QUEUES, Files, entry_path
from perdure.providers.directory.documents import (
    LAYOUT_VERSION,
    Damaged,
    StoreDocument,
    history_texts,
    ranges,
    seal,
    time_ms,
    time_text,
    unseal,
)
from perdure.providers.directory.histories import IN_FILE, HistoryFile
from perdure.providers.directory.journal import Execution, Record, read_records
from perdure.providers.directory.old_layout import OldStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.directory.root import Root

_DAMAGE = (Damaged, OSError, ValueError)

_HOLD = """
CREATE TEMP TRIGGER hold_damaged_{event} AFTER {event} ON main.instance_locks
WHEN new.state != 3 AND perdure_is_damaged(new.instance_id)
BEGIN
    UPDATE instance_locks SET state = 3, wake_at = NULL WHERE instance_id = new.instance_id;
END
"""
"""Keeps a damaged instance from being handed out, also when messages for it arrive later."""


def create_layout(root: Root, now_ms: int) -> None:
    """Make a new store, or finish one whose making was interrupted."""
    for path in layout.DIRECTORIES:
        with suppress(FileExistsError):
            root.ops.make_directory(path, at=root.directory)
    _clear_scratch(root)
    root.sync_directory("queues")
    if layout.README_FILE not in root.names("."):
        root.replace(layout.README_FILE, layout.README.encode())
    document = StoreDocument(
        format_version=FORMAT_VERSION, layout_version=LAYOUT_VERSION, created_at=time_text(now_ms)
    )
    root.replace(layout.STORE_FILE, seal(document))


def _clear_scratch(root: Root) -> None:
    for name in root.names(layout.SCRATCH):
        root.remove_tree(f"{layout.SCRATCH}/{name}")


_FORGET_WORKERS: Final = """
DELETE FROM workers WHERE record ->> 'host' = ? AND record ->> 'process_id' <> ?
"""


class Loader:
    """Fills the empty database with the content of the disk."""

    def __init__(self, files: Files, now_ms: int) -> None:
        self._files = files
        self._root = files.root
        self._execute: Callable[..., Any] = files.connection.execute
        self._tables = files.documents.tables
        self._now_ms = now_ms
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self._tables}
        self._on_disk: set[str] = set()
        """Names of instances with readable files."""
        self._entry_files: set[str] = set()
        self._entry_ids: set[tuple[str, int]] = set()
        self._same_ids: list[tuple[Any, ...]] = []
        """Work items with the id of another one."""
        self._nameless: set[str] = set()
        """Names of directories without the document that has the id of their instance."""
        self._missing: dict[Execution, str] = {}
        """Executions that an instance names and that have no document, with the instance's name."""
        self._added_in_journal: set[str] = set()
        self.last_sequence = 0
        self.old: OldStore | None = None
        """The store has the layout of version 1 and must be written anew."""

    def load(self) -> None:
        """Errors: CorruptData, StoreRefused, OSError."""
        root, execute = self._root, self._execute
        if layout.STORE_FILE not in root.names("."):
            create_layout(root, self._now_ms)
        root.names("queues")  # refuses links
        _clear_scratch(root)
        store = self._load_store()
        if store.layout_version < LAYOUT_VERSION:
            self.old = OldStore(self._files)
        self.last_sequence = store.checkpoint
        execute("BEGIN")
        values = (
            store.last_message_id + 1,
            time_ms(store.created_at),
            store.moved_to,
            store.clock_was_at,
            store.clock_set_to,
        )
        execute(
            "UPDATE store_info SET next_message_id = ?, created_at = ?, moved_to = ?,"
            " clock_was_at = ?, clock_set_to = ?",
            values,
        )
        execute("INSERT INTO sqlite_sequence VALUES ('dead_letters', ?)", (store.last_letter_id,))
        old = self.old
        self._note_other_version()
        if old is not None:
            old.load()
            old.moved_to = store.moved_to
        else:
            self._load_files()
        for record in read_records(root, store.checkpoint):
            if old is not None:
                old.apply(record.body)
            else:
                self._apply(record)
            self.last_sequence = record.sequence
        if old is not None:
            old.import_rows()
        self._judge_gaps()
        self._renumber_work()
        self._hold_damaged()
        self._note_files()
        # One process at a time has the directory: other processes of this host are gone.
        execute(_FORGET_WORKERS, (socket.gethostname(), os.getpid()))
        execute("COMMIT")

    def _load_store(self) -> StoreDocument:
        root = self._root
        try:
            document: StoreDocument = unseal(root.read(layout.STORE_FILE), StoreDocument)
        except Damaged as damage:
            raise CorruptData(
                "open",
                f"{root.path}/{layout.STORE_FILE} is damaged ({damage}); restore the directory "
                "from a backup",
            ) from damage
        if document.format_version > FORMAT_VERSION or document.layout_version > LAYOUT_VERSION:
            raise StoreRefused(
                "open",
                f"{root.path} was written by a newer version of perdure (format "
                f"{document.format_version}, layout {document.layout_version}); upgrade perdure",
            )
        self._files.created_at = time_ms(document.created_at)
        return document

    def _note_other_version(self) -> None:
        """Note the files that an upgrade has left: new ones beside those that count, or old ones.

        The new ones are written again, or removed.
        """
        for directory in (layout.INSTANCES, *(queue for queue, _ in QUEUES.values())):
            for name in self._root.names(directory):
                is_old = layout.is_old_instance(name) or layout.is_old_entry(name)
                if is_old != (self.old is not None):
                    self._files.stale.add(f"{directory}/{name}")

    # --- files

    def _load_files(self) -> None:
        for table, (queue, _) in QUEUES.items():
            for name in self._root.names(queue):
                if not layout.is_old_entry(name):
                    self._load_entry(table, queue, name)
        for table, path in LISTS.items():
            self._load_list(table, path)
        names = self._root.names(layout.INSTANCES)
        small = {name.removesuffix(".json") for name in names if name.endswith(".json")}
        for name in sorted(small):
            self._load_instance(name, is_directory=False)
        for name in names:
            if name.endswith(".json") or layout.is_old_instance(name):
                continue
            if name in small:  # about to be replaced by the directory, which may not be whole
                self._files.stale.add(layout.instance_directory(name))
            else:
                self._load_instance(name, is_directory=True)
        for table, rows in self._rows.items():
            if rows:
                self._files.connection.executemany(self._tables[table].put, rows)

    def _load_entry(self, table: str, queue: str, file_name: str) -> None:
        files, path = self._files, f"{queue}/{file_name}"
        instance = layout.instance_of_entry(file_name)
        try:
            document = unseal(self._root.read(path), files.documents.entries[table])
            row = self._tables[table].row(document)
            if path != entry_path(self._tables[table], row):
                instance = layout.instance_names(document.instance_id)[0]
                raise Damaged("its name does not fit its content")
            if (table, row[0]) in self._entry_ids and table == "worker_queue":
                self._same_ids.append(row)
            else:
                self._rows[table].append(row)
                self._entry_ids.add((table, row[0]))
        except _DAMAGE as damage:
            files.damage.add(path, damage, instance)
        else:
            self._entry_files.add(path)

    def _load_list(self, table: str, path: str) -> None:
        """Load sessions or workers; without them all sessions are free, as after their expiry."""
        try:
            document = unseal(self._root.read(path), self._files.documents.lists[table])
            self._rows[table] = [self._tables[table].row(each) for each in document.rows]
        except FileNotFoundError:
            pass
        except _DAMAGE as damage:
            self._files.damage.add(path, damage, None)

    def _load_instance(self, name: str, *, is_directory: bool) -> None:
        path = layout.meta_file(name) if is_directory else layout.document_file(name)
        kept = {table: len(rows) for table, rows in self._rows.items()}
        found: set[str] = set()
        try:
            if is_directory and "executions" in self._root.names(layout.instance_directory(name)):
                found.update(self._root.names(layout.executions_directory(name)))
            document = unseal(self._root.read(path), self._files.documents.instance)
            self._load_document(name, document, found, is_directory=is_directory)
        except FileNotFoundError:
            self._nameless.add(name)
        except _DAMAGE as damage:
            for table, count in kept.items():
                del self._rows[table][count:]
            place = layout.instance_directory(name) if is_directory else path
            self._files.damage.add(place, damage, name, is_lost=True)
        else:
            self._on_disk.add(name)

    def _load_document(
        self, name: str, document: Any, found: set[str], *, is_directory: bool
    ) -> None:
        """Load an instance; ``found``: the files of its executions."""
        instance_id: str = document.instance_id
        if name not in layout.instance_names(instance_id)[:2]:
            raise Damaged(f"it holds another instance, {instance_id!r}")
        if document.lock is not None:
            given = {"instance_id": instance_id, "state": 1}
            self._rows["instance_locks"].append(
                self._tables["instance_locks"].row(document.lock, **given)
            )
        key: int | None = document.instance_key
        expected: set[str] = set()
        if key is not None:
            self._rows["instances"].append(self._tables["instances"].row(document))
            for table in ("kv_store", "kv_delta"):
                for each, value in getattr(document, table).items():
                    given = {"instance_key": key, "key": each}
                    self._rows[table].append(self._tables[table].row(value, **given))
            for execution in document.executions:
                self._load_execution(key, execution)
            for numbers in ranges(document.execution_ids):
                for number in numbers:
                    self._load_execution_file(name, key, number)
                    expected.add(f"{number}.json")
                    file = self._files.histories.files.get((key, number))
                    if file is not None and not file.is_archived:
                        expected.add(f"{number}.jsonl")
        self._files.names.add(name, instance_id, is_directory=is_directory)
        # Files that no document names are left from a crash.
        self._files.stale |= {
            f"{layout.executions_directory(name)}/{each}" for each in found - expected
        }

    def _load_execution_file(self, name: str, key: int, number: int) -> None:
        path = layout.execution_file(name, number)
        try:
            document = unseal(self._root.read(path), self._files.documents.execution)
        except FileNotFoundError:
            self._missing[key, number] = name
            return
        if document.execution_id != number:
            raise Damaged(f"{path} holds another execution")
        self._load_execution(key, document)

    def _load_execution(self, key: int, document: Any) -> None:
        number = document.execution_id
        if document.status is not None:
            row = self._tables["executions"].row(document, instance_key=key)
            self._rows["executions"].append(row)
        texts = history_texts(document.history) if document.completed_at is None else {}
        self._rows["history"] += [
            (key, number, event_id, texts.get(event_id, IN_FILE))
            for ids in ranges(document.events)
            for event_id in ids
        ]
        self._files.histories.files.pop((key, number), None)
        if document.history_bytes:
            file = HistoryFile(document.history_bytes, is_archived=document.archived)
            self._files.histories.files[key, number] = file

    # --- the journal

    def _apply(self, record: Record) -> None:
        body: list[Any] = record.body
        rows: list[tuple[Any, Any]] = [(tuple(key), value) for key, value in body[1]]
        dropped: list[Execution] = [(key, number) for key, number in (body[2:] or [[]])[0]]
        files = self._files
        files.changes.apply(rows, dropped)
        files.dirty.update(key for key, _ in rows)
        for execution in dropped:
            files.histories.files.pop(execution, None)
        for key, value in rows:
            if key[0] == "instances" and value.__class__ is list:
                self._added_in_journal.add(value[1])

    # --- after the journal

    def _judge_gaps(self) -> None:
        """Report missing files, unless the journal tells that they were being written."""
        files = self._files
        explained = {
            name for each in self._added_in_journal for name in layout.instance_names(each)
        }
        for name in self._nameless:
            path = layout.instance_directory(name)
            if name in explained:
                files.stale.add(path)
            else:
                files.damage.add(path, "meta.json is missing", name, is_lost=True)
        changed = {key[1:3] for key in files.dirty if key[0] in {"executions", "history"}}
        for execution, name in self._missing.items():
            if execution not in changed:
                reason = f"the file of execution {execution[1]} is missing"
                path = layout.instance_directory(name)
                files.damage.add(path, reason, name, is_lost=True)
                # None of its files is a leftover: they are what a backup is compared with.
                self._on_disk.discard(name)
                files.stale = {each for each in files.stale if not each.startswith(f"{path}/")}

    def _renumber_work(self) -> None:
        """Give an id of its own to an item whose file was repaired after its id was used again.

        If the journal has the id, one of both files is a leftover, and the journal counts.
        """
        table = self._tables["worker_queue"]
        for message_id, *row in self._same_ids:
            if ("worker_queue", message_id) not in self._files.dirty:
                self._execute(table.put, (None, *row))
                new_id = self._files.connection.last_insert_rowid()
                self._files.dirty.add(("worker_queue", new_id))

    def _hold_damaged(self) -> None:
        """Drop all rows of an instance that has a damaged file; keep its messages back."""
        files, execute = self._files, self._execute
        if not files.damage.reasons:
            return
        rows: list[Any] = execute("SELECT instance_key, instance_id FROM instances").fetchall()
        for key, instance_id in rows:
            if files.damage.is_lost(instance_id):
                for table in ("instances", "executions", "history", "kv_store", "kv_delta"):
                    execute(f"DELETE FROM {table} WHERE instance_key = ?", (key,))  # noqa: S608 - of constants
        rows = execute("SELECT instance_id FROM instance_locks").fetchall()
        for (instance_id,) in rows:
            if files.damage.is_lost(instance_id):
                execute("DELETE FROM instance_locks WHERE instance_id = ?", (instance_id,))
        if files.damage.lost:
            # Their keys are not known, and their files may be repaired. Keys are counted from the
            # last one, so none has come as far as this.
            files.first_key = self._now_ms << 10
        is_refused: Any = files.damage.is_refused
        files.connection.create_scalar_function("perdure_is_damaged", is_refused, 1)
        for event in ("INSERT", "UPDATE"):
            execute(_HOLD.format(event=event))

    def _note_files(self) -> None:
        """Find out which file belongs to which row; a file without a row is a leftover."""
        files, execute = self._files, self._execute
        names: set[str] = set()
        rows: list[Any] = execute("SELECT instance_key, instance_id FROM instances").fetchall()
        for key, instance_id in rows:
            name = files.names.name_of(instance_id)
            names.add(name)
            if name in self._on_disk:
                files.ids[key] = instance_id
        rows = execute("SELECT instance_id FROM instance_locks").fetchall()
        names.update(files.names.name_of(row[0]) for row in rows)
        for name in self._on_disk - names:
            files.stale |= {layout.document_file(name), layout.instance_directory(name)}
            files.names.discard(name)
        for table in QUEUES:
            for row in execute(self._tables[table].select).fetchall():
                path = entry_path(self._tables[table], row)
                if path in self._entry_files:
                    files.entries[table, row[0]] = path
        files.stale |= self._entry_files - set(files.entries.values())
        self._find_archive_leftovers(names)

    def _find_archive_leftovers(self, names: set[str]) -> None:
        if layout.ARCHIVE not in self._root.names("."):
            return
        for name in self._root.names(layout.ARCHIVE):
            if self.old is not None and layout.is_old_instance(name):
                continue  # it counts until the new files are whole
            if name not in names and name not in self._files.damage.lost:
                self._files.stale.add(layout.archive_directory(name))
