"""Administration of a store: it reads from snapshots and changes through the writer."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import apsw

from perdure.errors import CorruptData
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.administration import ProviderAdmin
from perdure.providers.records import (
    DeleteResult,
    ExecutionInfo,
    InstanceTree,
    StoreInfo,
)
from perdure.providers.sqlite import control, deletion, listing, queues, reading, snapshots
from perdure.providers.sqlite.backup import back_up, there_already
from perdure.providers.sqlite.instances import parse_version
from perdure.providers.sqlite.verb import Verb

if TYPE_CHECKING:
    import asyncio
    import os
    from collections.abc import Coroutine

    from perdure.providers.records import (
        DeadLetter,
        FetchedOrchestration,
        HistoryRecord,
        InstanceInfo,
        InstanceQuery,
        InstanceSnapshot,
        PruneOptions,
        PruneResult,
        QueueDepths,
        QueuedMessage,
        QueuedWork,
        SystemMetrics,
        WorkerInfo,
    )
    from perdure.providers.sqlite.database import FileDatabase
    from perdure.providers.sqlite.store import Store
    from perdure.providers.sqlite.transaction import Snapshot, Transaction

_EXECUTION: Final = """
SELECT e.status, e.output, e.started_at, e.completed_at, e.framework_version,
       (SELECT count(*) FROM history AS h
        WHERE h.instance_key = e.instance_key AND h.execution_id = e.execution_id)
FROM instances AS i JOIN executions AS e USING (instance_key)
WHERE i.instance_id = ? AND e.execution_id = ?
"""

_EXECUTION_IDS: Final = """
SELECT e.execution_id FROM instances AS i JOIN executions AS e USING (instance_key)
WHERE i.instance_id = ? ORDER BY e.execution_id
"""

_LATEST: Final = """
SELECT max(
    coalesce((SELECT max(e.execution_id) FROM executions AS e
              WHERE e.instance_key = i.instance_key), 0),
    coalesce((SELECT max(h.execution_id) FROM history AS h
              WHERE h.instance_key = i.instance_key), 0))
FROM instances AS i WHERE i.instance_id = ?
"""


class EngineAdmin(ProviderAdmin):
    """The administration of a ``Store`` of any kind; open as long as the store is."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _require_open(self, operation: str) -> None:
        self._store.require_open(operation)

    # --- instances

    def _list_instances(
        self, query: InstanceQuery | None, before: tuple[int, str] | None, limit: int
    ) -> asyncio.Future[list[InstanceInfo]]:
        return self._store.search(Verb("list_instances", listing.list_page), query, before, limit)

    def _count_instances(self, query: InstanceQuery | None) -> asyncio.Future[int]:
        return self._store.search(Verb("count_instances", listing.count), query)

    def _get_instance_info(self, instance_id: str) -> asyncio.Future[InstanceInfo]:
        return self._store.read(Verb("get_instance_info", listing.get_info), instance_id)

    def _list_executions(self, instance_id: str) -> asyncio.Future[list[int]]:
        return self._store.read(Verb("list_executions", _list_executions), instance_id)

    def _latest_execution_id(self, instance_id: str) -> asyncio.Future[int]:
        return self._store.read(Verb("latest_execution_id", _latest_execution_id), instance_id)

    def _get_execution_info(
        self, instance_id: str, execution_id: int
    ) -> asyncio.Future[ExecutionInfo]:
        return self._store.read(
            Verb("get_execution_info", _execution_info), instance_id, execution_id
        )

    def _read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> asyncio.Future[list[HistoryRecord]]:
        return self._store.read(
            Verb("read_history_with_execution_id", reading.read_page),
            instance_id,
            execution_id,
            0,
            -1,
        )

    def _list_children(self, instance_id: str) -> asyncio.Future[list[str]]:
        return self._store.read(Verb("list_children", _list_children), instance_id)

    def _get_instance_tree(self, instance_id: str) -> asyncio.Future[InstanceTree]:
        return self._store.search(Verb("get_instance_tree", _tree), instance_id)

    # --- control

    def _suspend_instance(self, instance_id: str) -> asyncio.Future[None]:
        return self._store.write(Verb("suspend_instance", control.suspend), instance_id)

    def _resume_instance(self, instance_id: str) -> asyncio.Future[None]:
        return self._store.write(Verb("resume_instance", control.resume), instance_id)

    def _lock_instance(
        self, instance_id: str, lock_timeout_ms: int
    ) -> asyncio.Future[FetchedOrchestration]:
        return self._store.write(Verb("lock_instance", control.lock), instance_id, lock_timeout_ms)

    # --- queues

    def _get_queue_depths(self) -> asyncio.Future[QueueDepths]:
        return self._store.search(Verb("get_queue_depths", queues.depths))

    def _list_messages(self, instance_id: str, limit: int) -> asyncio.Future[list[QueuedMessage]]:
        return self._store.search(Verb("list_messages", queues.list_messages), instance_id, limit)

    def _list_work(self, instance_id: str, limit: int) -> asyncio.Future[list[QueuedWork]]:
        return self._store.search(Verb("list_work", queues.list_work), instance_id, limit)

    def _list_dead_letters(self, limit: int) -> asyncio.Future[list[DeadLetter]]:
        return self._store.search(Verb("list_dead_letters", queues.list_dead_letters), limit)

    def _requeue_dead_letter(self, letter_id: int) -> asyncio.Future[None]:
        return self._store.write(Verb("requeue_dead_letter", queues.requeue_dead_letter), letter_id)

    def _delete_dead_letter(self, letter_id: int) -> asyncio.Future[None]:
        return self._store.write(Verb("delete_dead_letter", queues.delete_dead_letter), letter_id)

    # --- deletion

    def _delete_instances_atomic(
        self, instance_ids: tuple[str, ...], *, force: bool
    ) -> asyncio.Future[DeleteResult]:
        return self._store.write(
            Verb("delete_instances_atomic", control.delete_atomic), instance_ids, force
        )

    def _list_oldest(
        self,
        instance_ids: tuple[str, ...] | None,
        completed_before_ms: int | None,
        after: tuple[int, str],
        limit: int,
        *,
        finished_roots: bool,
    ) -> asyncio.Future[list[tuple[int, str]]]:
        return self._store.search(
            Verb("list_oldest", control.list_oldest),
            instance_ids,
            completed_before_ms,
            after,
            limit,
            finished_roots,
        )

    def _delete_finished_tree(self, root_id: str) -> asyncio.Future[DeleteResult]:
        return self._store.write(
            Verb("delete_instance_bulk", control.delete_finished_tree, alone=True), root_id
        )

    def _prune_executions(
        self, instance_id: str, options: PruneOptions
    ) -> asyncio.Future[PruneResult]:
        return self._store.write(Verb("prune_executions", control.prune), instance_id, options)

    # --- the store

    def _get_system_metrics(self) -> asyncio.Future[SystemMetrics]:
        return self._store.search(Verb("get_system_metrics", listing.system_metrics))

    def _get_store_info(self) -> asyncio.Future[StoreInfo]:
        return self._store.search(Verb("get_store_info", self._store_info))

    def _register_worker(self, worker: WorkerInfo, ttl_ms: int) -> asyncio.Future[None]:
        return self._store.write(Verb("register_worker", queues.register_worker), worker, ttl_ms)

    def _list_workers(self) -> asyncio.Future[list[WorkerInfo]]:
        return self._store.search(Verb("list_workers", queues.list_workers))

    def _export_instance(self, instance_id: str) -> asyncio.Future[InstanceSnapshot]:
        return self._store.search(Verb("export_instance", snapshots.export), instance_id)

    def _import_instance(
        self, snapshot: InstanceSnapshot, *, replace: bool
    ) -> asyncio.Future[None]:
        return self._store.write(Verb("import_instance", snapshots.restore), snapshot, replace)

    def _mark_moved(self, location: str | None) -> asyncio.Future[None]:
        return self._store.write(Verb("mark_moved", _mark_moved), location)

    @abstractmethod
    def describe(self, snapshot: Snapshot, format_version: int, moved_to: str | None) -> StoreInfo:
        """Return the answer of ``get_store_info``."""

    def _store_info(self, snapshot: Snapshot) -> StoreInfo:
        format_version, moved_to = snapshot.row("SELECT format_version, moved_to FROM store_info")
        return self.describe(snapshot, format_version, moved_to)


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
            raise there_already(target)
        return back_up(self._store, target)

    def integrity_check(self) -> asyncio.Future[None]:
        """Read the whole file. Errors: CorruptData with what SQLite found."""
        return self._store.search(Verb("integrity_check", _check_integrity), self._database.label)

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
            },
        )


def _list_executions(snapshot: Snapshot, instance_id: str) -> list[int]:
    return [row[0] for row in snapshot.rows(_EXECUTION_IDS, (instance_id,))]


def _latest_execution_id(snapshot: Snapshot, instance_id: str) -> int:
    row = snapshot.row(_LATEST, (instance_id,))
    if row is None:
        raise rules.no_execution(instance_id)
    latest: int = row[0]
    return latest


def _execution_info(snapshot: Snapshot, instance_id: str, execution_id: int) -> ExecutionInfo:
    row = snapshot.row(_EXECUTION, (instance_id, execution_id))
    if row is None:
        raise rules.no_execution(instance_id, execution_id)
    status, output, started_at, completed_at, pinned, events = row
    return ExecutionInfo(
        execution_id=execution_id,
        status=Status(status),
        output=output,
        started_at_ms=started_at,
        completed_at_ms=completed_at,
        event_count=events,
        framework_version=None if pinned is None else parse_version(pinned),
    )


def _list_children(snapshot: Snapshot, instance_id: str) -> list[str]:
    return [row[0] for row in snapshot.rows(deletion.CHILDREN, (instance_id,))]


def _tree(snapshot: Snapshot, instance_id: str) -> InstanceTree:
    listing.get_info(snapshot, instance_id)
    return InstanceTree(
        root_id=instance_id, instance_ids=tuple(deletion.tree_of(snapshot, instance_id))
    )


def _mark_moved(tx: Transaction, location: str | None) -> None:
    tx.execute("UPDATE store_info SET moved_to = ?", (location,))


def _check_integrity(snapshot: Snapshot, label: str) -> None:
    found: list[Any] = [row[0] for row in snapshot.rows("PRAGMA integrity_check(20)")]
    if found != ["ok"]:
        raise CorruptData(
            "integrity_check",
            f"{label} is damaged: {'; '.join(found)}. Keep it with its -wal, and restore a backup",
        )
