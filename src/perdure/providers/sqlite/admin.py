"""Administration of a store: it reads from snapshots and changes through the writer.

``SqliteAdmin`` also copies the whole file while work goes on: the copy gets its name only if it was
found sound.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import threading
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import apsw

from perdure.errors import AlreadyExists, CorruptData
from perdure.providers import rules
from perdure.providers.administration import ProviderAdmin
from perdure.providers.local_files import draft_beside
from perdure.providers.records import StoreInfo, WorkerInfo
from perdure.providers.sqlite import control, instances, listing, reading, snapshots
from perdure.providers.sqlite.connection import (
    INCREMENTAL,
    BusyHandler,
    connect_writer,
    disconnect,
    translate,
)
from perdure.providers.sqlite.guards import cannot_create
from perdure.providers.sqlite.store import Store, reads, searches, writes
from perdure.providers.sqlite.transaction import Snapshot, Verb

if TYPE_CHECKING:
    import asyncio
    import os
    from collections.abc import Callable, Coroutine

    from perdure.providers.sqlite.database import FileDatabase

_FINDINGS_MAX: Final = 3
_STEPS_BETWEEN_LOOKS: Final = 100_000
_WITHOUT_READINESS: Final = """
SELECT DISTINCT instance_id FROM orchestrator_queue
WHERE instance_id NOT IN (SELECT instance_id FROM instance_locks) LIMIT 20
"""
_WITHOUT_MESSAGE: Final = """
SELECT instance_id FROM instance_locks AS l
WHERE ready_id IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM orchestrator_queue AS q
    WHERE q.message_id = l.ready_id AND q.instance_id = l.instance_id)
LIMIT 20
"""


class EngineAdmin(ProviderAdmin):
    """The administration of a ``Store`` of any kind; open as long as the store is."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _require_open(self, operation: str) -> None:
        if not self._store.is_open:
            raise self._store.closed(operation)

    # --- instances

    _list_instances = searches(Verb("list_instances", listing.list_page))
    _count_instances = searches(Verb("count_instances", listing.count))
    _get_instance_info = reads(Verb("get_instance_info", listing.get_info))
    _list_executions = reads(Verb("list_executions", reading.list_executions))
    _latest_execution_id = reads(Verb("latest_execution_id", reading.latest_execution_id))
    _get_execution_info = reads(Verb("get_execution_info", reading.execution_info))
    _read_history_with_execution_id = reads(
        Verb("read_history_with_execution_id", reading.read_page)
    )
    _list_children = reads(Verb("list_children", instances.list_children))
    _get_instance_tree = searches(Verb("get_instance_tree", listing.get_tree))

    # --- control

    _suspend_instance = writes(Verb("suspend_instance", control.suspend))
    _resume_instance = writes(Verb("resume_instance", control.resume))
    _lock_instance = writes(Verb("lock_instance", control.lock))

    # --- queues

    _get_queue_depths = searches(Verb("get_queue_depths", reading.depths))
    _list_messages = searches(Verb("list_messages", reading.list_messages))
    _list_work = searches(Verb("list_work", reading.list_work))
    _list_dead_letters = searches(Verb("list_dead_letters", reading.list_dead_letters))
    _requeue_dead_letter = writes(Verb("requeue_dead_letter", control.requeue_dead_letter))
    _delete_dead_letter = writes(Verb("delete_dead_letter", control.delete_dead_letter))

    # --- deletion

    _delete_instances_atomic = writes(Verb("delete_instances_atomic", control.delete_atomic))
    _list_oldest = searches(Verb("list_oldest", control.list_oldest))
    _delete_finished_tree = writes(
        Verb("delete_instance_bulk", control.delete_finished_tree, alone=True)
    )
    _prune_executions = writes(Verb("prune_executions", control.prune))

    # --- the store

    _get_system_metrics = searches(Verb("get_system_metrics", listing.system_metrics))

    def _register_worker(self, worker: WorkerInfo, ttl_ms: int) -> asyncio.Future[None]:
        verb = Verb("register_worker", control.register_worker)
        return self._store.write(verb, worker, ttl_ms, self._store.database)

    def _list_workers(self) -> asyncio.Future[list[WorkerInfo]]:
        verb = Verb("list_workers", reading.list_workers)
        return self._store.search(verb, self._store.database)

    _export_instance = searches(Verb("export_instance", snapshots.export))

    _import_instance = writes(Verb("import_instance", snapshots.restore))
    _mark_moved = writes(Verb("mark_moved", control.mark_moved))

    def _get_store_info(self) -> asyncio.Future[StoreInfo]:
        return self._store.search(Verb("get_store_info", self._store_info))

    def _store_info(self, snapshot: Snapshot) -> StoreInfo:
        format_version, moved_to = snapshot.row("SELECT format_version, moved_to FROM store_info")
        return self.describe(snapshot, format_version, moved_to)

    def integrity_check(self) -> asyncio.Future[None]:
        """Read the whole database. Errors: CorruptData with what SQLite or the engine found."""
        verb = Verb("integrity_check", _check_integrity)
        return self._store.search(verb, self._store.database.label)

    @abstractmethod
    def describe(self, snapshot: Snapshot, format_version: int, moved_to: str | None) -> StoreInfo:
        """Return the answer of ``get_store_info``."""


class SqliteAdmin(EngineAdmin):
    """See ``ProviderAdmin``, and what only a file has."""

    def __init__(self, store: Store, database: FileDatabase) -> None:
        super().__init__(store)
        self._database = database

    def backup(self, path: str | os.PathLike[str]) -> Coroutine[Any, Any, None]:
        """Copy the whole store, as of now, into a new file, while work goes on.

        The copy is checked before it gets its name. Errors: AlreadyExists if there is a file at
        that path; CorruptData if the store is damaged: then there is none.
        """
        target = Path(path).absolute()
        if target.exists():
            raise _there_already(target)
        return _back_up(self._store, target)

    async def vacuum(self, *, incremental: bool | None = None) -> None:
        """Write the file anew without its free pages. Writers of all processes wait meanwhile.

        From then on deletions give free pages back bit by bit if ``incremental`` is True, and keep
        them for new instances if it is False; None: as before. Errors: StoreBusy, StoreFull.
        """
        self._require_open("vacuum")
        system = self._store.database.system
        await system.run_in_thread(_vacuum, self._database, incremental)

    def describe(self, snapshot: Snapshot, format_version: int, moved_to: str | None) -> StoreInfo:
        path = self._database.path
        files = [path, path.with_name(path.name + "-wal")]
        return StoreInfo(
            provider="sqlite",
            provider_version="1",
            location=str(path),
            format_version=format_version,
            schema_version=snapshot.row("PRAGMA user_version")[0],
            size_bytes=sum(file.stat().st_size for file in files if file.exists()),
            moved_to=moved_to,
            details={
                "durability": self._database.durability,
                "sqlite": apsw.sqlite_lib_version(),
                "journal_mode": snapshot.row("PRAGMA journal_mode")[0],
                "free_space": _given_back(snapshot),
            },
        )


def _given_back(snapshot: Snapshot) -> str:
    """Say what becomes of the space of instances that are deleted."""
    is_incremental = snapshot.row("PRAGMA auto_vacuum")[0] == INCREMENTAL
    return "given back bit by bit" if is_incremental else "kept for new instances"


def _check_integrity(snapshot: Snapshot, label: str) -> None:
    found: list[Any] = [row[0] for row in snapshot.rows("PRAGMA integrity_check(20)")]
    if found != ["ok"]:
        raise CorruptData(
            "integrity_check",
            f"{label} is damaged: {'; '.join(found)}. Keep it with its -wal, and restore a backup",
        )
    without_row, without_message = (
        [row[0] for row in snapshot.rows(each)] for each in (_WITHOUT_READINESS, _WITHOUT_MESSAGE)
    )
    rules.check_readiness(without_row, without_message)


def _vacuum(database: FileDatabase, incremental: bool | None) -> None:
    try:
        # A connection of its own: its waits for other writers disturb no other statement.
        handler = BusyHandler(database.system)
        connection = connect_writer(database.path, database.durability, handler)
        try:
            connection.pragma("temp_store", 1)  # the copy is as large as the file
            if incremental is not None:
                connection.pragma("auto_vacuum", INCREMENTAL if incremental else 0)
            connection.execute("VACUUM")
            # The file shrinks when the log is copied into it.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            disconnect(connection)
    except apsw.Error as error:
        raise translate("vacuum", error, database.label) from error


# --- a copy of the whole file


async def _back_up(store: Store, target: Path) -> None:
    """Errors: AlreadyExists, CorruptData; then there is nothing at the target."""
    is_over = threading.Event()
    try:
        with draft_beside(target) as draft:
            await store.search(Verb("backup", _copy), draft.path, target)
            # The copy is read, and no snapshot is held meanwhile: workers go on undisturbed.
            await store.database.system.run_in_thread(
                _verify, draft.path, store.database.label, is_over.is_set
            )
            draft.put_in_place()
    except FileExistsError as error:
        raise _there_already(target) from error
    except OSError as error:
        raise cannot_create(target, error) from error
    finally:
        is_over.set()


def _there_already(target: Path) -> AlreadyExists:
    return AlreadyExists(f"{str(target)!r} exists; name a new file for the backup")


def _copy(snapshot: Snapshot, draft: Path, target: Path) -> None:
    try:
        copy = apsw.Connection(str(draft), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            with copy.backup("main", snapshot.connection, "main") as backup:
                backup.step()
        finally:
            copy.close()
    except apsw.Error as error:
        raise translate("backup", error, repr(str(target))) from error


def _verify(draft: Path, source: str, is_over: Callable[[], bool]) -> None:
    """Immutable: SQLite puts no other files beside it. Errors: CorruptData."""
    name = f"file:{quote(str(draft))}?immutable=1"
    try:
        copy = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        try:
            copy.set_progress_handler(is_over, _STEPS_BETWEEN_LOOKS)
            rows: list[Any] = copy.execute(f"PRAGMA integrity_check({_FINDINGS_MAX})").fetchall()
            found = [" ".join(str(row[0]).split()) for row in rows]
        finally:
            copy.close()
    except apsw.Error as error:
        refusal = translate("backup", error, repr(str(draft)))
        if not isinstance(refusal, CorruptData):
            raise refusal from error
        found = [str(error)]
    if found != ["ok"]:
        raise CorruptData(
            "backup",
            f"{source} is damaged: {'; '.join(found)}. No backup was written, lest it take "
            "the place of a good one. Keep the file, and restore an earlier backup; 'perdure db "
            "check' says what is damaged",
        )
