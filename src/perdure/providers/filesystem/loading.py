"""Opening a store: the readable files first, then the journal over them, before anything else.

A file that does not check out is left as it is and reported; what it stood for is refused, the rest
of the store works.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from perdure.errors import CorruptData, StoreRefused
from perdure.model.wire import FORMAT_VERSION
from perdure.providers.filesystem import capture, layout
from perdure.providers.filesystem.checkpoints import LAYOUT_VERSION
from perdure.providers.filesystem.documents import (
    Damaged,
    ExecutionDocument,
    InstanceDocument,
    LetterDocument,
    MessageDocument,
    SessionsDocument,
    StoreDocument,
    WorkDocument,
    WorkersDocument,
    seal,
    unseal,
)
from perdure.providers.filesystem.journal import read_records
from perdure.providers.filesystem.readable import ranges, time_ms, time_text
from perdure.providers.filesystem.rows import MovedRow

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.filesystem.root import Root
    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.tables import Tables

_Document = TypeVar("_Document", bound=msgspec.Struct)
_log = logging.getLogger("perdure.filesystem")


@dataclass(slots=True)
class Loaded:
    """What opening found out besides the content."""

    created_at_ms: int
    last_sequence: int
    files: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    """Queue entries that are on the disk, by queue and id."""
    after_crash: bool = False
    """The store was not closed properly."""


def create_layout(root: Root, now_ms: int) -> None:
    """Make a new store, or finish one whose making was interrupted."""
    for path in layout.DIRECTORIES:
        root.make_directories(path)
    _clear_scratch(root)
    root.sync_directory("queues")
    if layout.README_FILE not in root.names("."):
        root.replace(layout.README_FILE, layout.README.encode())
    document = StoreDocument(
        format_version=FORMAT_VERSION, layout_version=LAYOUT_VERSION, created_at=time_text(now_ms)
    )
    root.replace(layout.STORE_FILE, seal(document))


def load(root: Root, state: State, now_ms: int) -> Loaded:
    """Fill the empty state with what is on the disk."""
    if layout.STORE_FILE not in root.names("."):
        create_layout(root, now_ms)
    _clear_scratch(root)
    store = _load_store(root)
    tables = state.tables
    tables.last_message_id = store.last_message_id
    tables.last_letter_id = store.last_letter_id
    if store.moved_to is not None:
        tables.moved.set("", MovedRow(location=store.moved_to))
    loader = _Loader(root, state)
    loader.load_files()
    tables.forget_dirty()  # what came from the files need not be written to them
    last_sequence = store.checkpoint
    after_crash = bool(root.names(layout.JOURNAL))
    for record in read_records(root, store.checkpoint):
        tables.apply(record)
        last_sequence = record.sequence
    loader.judge_gaps()
    state.load_schedules(now_ms)
    return Loaded(time_ms(store.created_at), last_sequence, loader.files, after_crash)


def _clear_scratch(root: Root) -> None:
    for name in root.names(layout.SCRATCH):
        root.remove_tree(f"{layout.SCRATCH}/{name}")


def _load_store(root: Root) -> StoreDocument:
    try:
        document = unseal(root.read(layout.STORE_FILE), StoreDocument)
    except Damaged as damage:
        raise CorruptData(
            "open",
            f"{root.path}/{layout.STORE_FILE} is damaged ({damage}); restore the directory from "
            "a backup",
        ) from damage
    if document.format_version > FORMAT_VERSION or document.layout_version > LAYOUT_VERSION:
        raise StoreRefused(
            "open",
            f"{root.path} was written by a newer version of perdure (format "
            f"{document.format_version}, layout {document.layout_version}); upgrade perdure",
        )
    return document


class _Loader:
    """Goes through the files once."""

    def __init__(self, root: Root, state: State) -> None:
        self._root = root
        self._tables = state.tables
        self._lookups = state.lookups
        self._quarantine = state.quarantine
        self.files: dict[tuple[str, int], str] = {}
        self._nameless: list[str] = []
        """Directories of instances without the file that says whose they are."""
        self._missing: list[tuple[str, int]] = []
        """Executions that an instance names and that have no file."""

    def load_files(self) -> None:
        self._load_queue(
            layout.ORCHESTRATOR_QUEUE, MessageDocument, capture.load_message, _message_path
        )
        self._load_queue(layout.WORKER_QUEUE, WorkDocument, capture.load_work, _work_path)
        self._load_queue(layout.DEAD_LETTERS, LetterDocument, capture.load_letter, _letter_path)
        self._load_leases()
        for name in self._root.names(layout.INSTANCES):
            directory = f"{layout.INSTANCES}/{name}"
            try:
                self._load_instance(directory)
            except FileNotFoundError:
                self._nameless.append(directory)
            except (Damaged, OSError, ValueError) as damage:
                self._set_aside(directory, str(damage))

    def _load_queue(
        self,
        queue: str,
        kind: type[_Document],
        load_document: Callable[[Tables, _Document], None],
        path_of: Callable[[_Document], tuple[int, str]],
    ) -> None:
        for name in self._root.names(queue):
            path = f"{queue}/{name}"
            try:
                document = unseal(self._root.read(path), kind)
                entry_id, expected = path_of(document)
                if path != expected:
                    raise Damaged(f"its name does not fit its content, which is {expected}")
                load_document(self._tables, document)
            except (Damaged, OSError, ValueError) as damage:
                self._set_aside(path, str(damage))
            else:
                self.files[queue, entry_id] = path

    def _load_leases(self) -> None:
        """Sessions and workers; without them all sessions are free, as after their expiry."""
        try:
            for row in unseal(self._root.read(layout.SESSIONS_FILE), SessionsDocument).sessions:
                self._tables.sessions.set(row.session_id, row)
        except FileNotFoundError:
            pass
        except Damaged as damage:
            self._set_aside(layout.SESSIONS_FILE, str(damage))
        try:
            for worker in unseal(self._root.read(layout.WORKERS_FILE), WorkersDocument).workers:
                self._tables.workers.set(worker.worker.worker_id, worker)
        except FileNotFoundError:
            pass
        except Damaged as damage:
            self._set_aside(layout.WORKERS_FILE, str(damage))

    def _load_instance(self, directory: str) -> None:
        data = self._root.read(f"{directory}/{layout.INSTANCE_FILE}")
        document = unseal(data, InstanceDocument)
        if layout.instance_directory(document.instance_id) != directory:
            raise Damaged(f"it holds another instance, {document.instance_id!r}")
        executions = [
            execution
            for first, last in ranges(document.executions)
            for execution_id in range(first, last + 1)
            if (execution := self._load_execution(directory, document.instance_id, execution_id))
            is not None
        ]
        capture.load_instance(self._tables, document)
        for execution in executions:
            capture.load_execution(self._tables, execution)

    def _load_execution(
        self, directory: str, instance_id: str, execution_id: int
    ) -> ExecutionDocument | None:
        path = f"{directory}/executions/{execution_id}/{layout.EXECUTION_FILE}"
        try:
            document = unseal(self._root.read(path), ExecutionDocument)
        except FileNotFoundError:
            self._missing.append((instance_id, execution_id))
            return None
        if (document.instance_id, document.execution_id) != (instance_id, execution_id):
            raise Damaged(f"{path} holds another execution")
        return document

    # --- after the journal

    def judge_gaps(self) -> None:
        """A file may be missing only if the journal says what was being written or removed."""
        changed = {
            *self._tables.instances.dirty,
            *self._tables.locks.dirty,
            *self._tables.holds.dirty,
            *(instance_id for instance_id, _ in self._changed_executions()),
        }
        explained = {layout.instance_directory(instance_id) for instance_id in changed}
        for directory in self._nameless:
            if directory not in explained:
                self._set_aside(directory, f"{layout.INSTANCE_FILE} is missing")
        for instance_id, execution_id in set(self._missing) - self._changed_executions():
            directory = layout.instance_directory(instance_id)
            self._set_aside(directory, f"the file of execution {execution_id} is missing")
        for instance_id in {*self._tables.instances.rows, *changed}:
            if self._quarantine.bars(instance_id):
                self._forget(instance_id)

    def _changed_executions(self) -> set[tuple[str, int]]:
        return self._tables.executions.dirty | self._tables.dirty_histories

    def _forget(self, instance_id: str) -> None:
        """Half an instance is worse than none: nothing of it may be acted upon."""
        tables = self._tables
        for table in (
            tables.instances,
            tables.progress,
            tables.custom_statuses,
            tables.holds,
            tables.locks,
        ):
            table.set(instance_id, None)
        lookups = self._lookups
        for execution_id in list(lookups.executions.get(instance_id, ())):
            tables.executions.set((instance_id, execution_id), None)
        for execution_id in list(lookups.histories.get(instance_id, ())):
            tables.set_history((instance_id, execution_id), None)
        for key in list(lookups.kv_store.get(instance_id, ())):
            tables.kv_store.set((instance_id, key), None)
        for key in list(lookups.kv_delta.get(instance_id, ())):
            tables.kv_delta.set((instance_id, key), None)

    def _set_aside(self, path: str, reason: str) -> None:
        _log.error("%s/%s cannot be read and is left aside: %s", self._root.path, path, reason)
        self._quarantine.add(path, reason)


def _message_path(document: MessageDocument) -> tuple[int, str]:
    path = layout.message_file(document.message_id, document.instance_id, document.kind)
    return document.message_id, path


def _work_path(document: WorkDocument) -> tuple[int, str]:
    instance_id = document.identity.instance_id
    path = layout.work_file(document.message_id, instance_id, document.name)
    return document.message_id, path


def _letter_path(document: LetterDocument) -> tuple[int, str]:
    path = layout.letter_file(document.letter_id, document.instance_id, document.kind)
    return document.letter_id, path
