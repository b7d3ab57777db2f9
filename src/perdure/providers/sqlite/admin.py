"""Administration of an SQLite store: reads from snapshots, changes through the writer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import apsw

from perdure.errors import CorruptData, NotFound
from perdure.limits import BULK_INSTANCES_MAX, check_id
from perdure.model.status import Status
from perdure.providers._shared import refusals, rules
from perdure.providers.administration import ProviderAdmin
from perdure.providers.items import (
    DeleteResult,
    ExecutionInfo,
    InstanceTree,
    StoreInfo,
)
from perdure.providers.sqlite import control, deletion, listing, moving, queued, reading
from perdure.providers.sqlite.backup import back_up, there_already
from perdure.providers.sqlite.turns import parse_version

if TYPE_CHECKING:
    import asyncio
    import os
    from collections.abc import Coroutine, Sequence

    from perdure.providers.items import (
        DeadLetter,
        DeleteFilter,
        FetchedOrchestration,
        HistoryRecord,
        InstanceInfo,
        InstancePage,
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
    from perdure.providers.sqlite.connection import Durability
    from perdure.providers.sqlite.handle import Handle
    from perdure.providers.sqlite.transaction import Snapshot, Transaction

_DOOMED_ROOTS_PER_LOOK: Final = 200

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


class SqliteAdmin(ProviderAdmin):
    """See ``ProviderAdmin``; open as long as the handle that it belongs to."""

    def __init__(self, handle: Handle, durability: Durability) -> None:
        self._handle = handle
        self._durability: Durability = durability

    # --- instances

    def list_instances(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> asyncio.Future[InstancePage]:
        refusals.check_page(limit)
        before = None if cursor is None else rules.decode_cursor(cursor)
        return self._handle.search("list_instances", listing.list_page, query, before, limit)

    def count_instances(self, query: InstanceQuery | None = None) -> asyncio.Future[int]:
        return self._handle.search("count_instances", listing.count, query)

    def get_instance_info(self, instance_id: str) -> asyncio.Future[InstanceInfo]:
        check_id(instance_id, "instance id")
        return self._handle.read("get_instance_info", listing.get_info, instance_id)

    def list_executions(self, instance_id: str) -> asyncio.Future[list[int]]:
        check_id(instance_id, "instance id")
        return self._handle.read("list_executions", _list_executions, instance_id)

    def latest_execution_id(self, instance_id: str) -> asyncio.Future[int]:
        check_id(instance_id, "instance id")
        return self._handle.read("latest_execution_id", _latest_execution_id, instance_id)

    def get_execution_info(
        self, instance_id: str, execution_id: int
    ) -> asyncio.Future[ExecutionInfo]:
        check_id(instance_id, "instance id")
        return self._handle.read("get_execution_info", _execution_info, instance_id, execution_id)

    def read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> asyncio.Future[list[HistoryRecord]]:
        check_id(instance_id, "instance id")
        return self._handle.read(
            "read_history_with_execution_id", reading.read_page, instance_id, execution_id, 0, -1
        )

    def list_children(self, instance_id: str) -> asyncio.Future[list[str]]:
        check_id(instance_id, "instance id")
        return self._handle.read("list_children", _list_children, instance_id)

    def get_parent_id(self, instance_id: str) -> asyncio.Future[str | None]:
        check_id(instance_id, "instance id")
        return self._handle.read("get_parent_id", _parent_id, instance_id)

    def get_instance_tree(self, instance_id: str) -> asyncio.Future[InstanceTree]:
        check_id(instance_id, "instance id")
        return self._handle.search("get_instance_tree", _tree, instance_id)

    # --- control

    def suspend_instance(self, instance_id: str) -> asyncio.Future[None]:
        check_id(instance_id, "instance id")
        return self._handle.write("suspend_instance", control.suspend, instance_id)

    def resume_instance(self, instance_id: str) -> asyncio.Future[None]:
        check_id(instance_id, "instance id")
        return self._handle.write("resume_instance", control.resume, instance_id)

    def lock_instance(
        self, instance_id: str, lock_timeout_ms: int
    ) -> asyncio.Future[FetchedOrchestration]:
        check_id(instance_id, "instance id")
        refusals.check_number(lock_timeout_ms, "lock_timeout_ms", minimum=1)
        return self._handle.write("lock_instance", control.lock, instance_id, lock_timeout_ms)

    # --- queues

    def get_queue_depths(self) -> asyncio.Future[QueueDepths]:
        return self._handle.search("get_queue_depths", queued.depths)

    def list_messages(
        self, instance_id: str, *, limit: int = 1000
    ) -> asyncio.Future[list[QueuedMessage]]:
        check_id(instance_id, "instance id")
        refusals.check_number(limit, "limit", minimum=1)
        return self._handle.search("list_messages", queued.list_messages, instance_id, limit)

    def list_work(self, instance_id: str, *, limit: int = 1000) -> asyncio.Future[list[QueuedWork]]:
        check_id(instance_id, "instance id")
        refusals.check_number(limit, "limit", minimum=1)
        return self._handle.search("list_work", queued.list_work, instance_id, limit)

    def list_dead_letters(self, *, limit: int = 1000) -> asyncio.Future[list[DeadLetter]]:
        refusals.check_number(limit, "limit", minimum=1)
        return self._handle.search("list_dead_letters", queued.list_dead_letters, limit)

    def requeue_dead_letter(self, letter_id: int) -> asyncio.Future[None]:
        return self._handle.write("requeue_dead_letter", queued.requeue_dead_letter, letter_id)

    def delete_dead_letter(self, letter_id: int) -> asyncio.Future[None]:
        return self._handle.write("delete_dead_letter", queued.delete_dead_letter, letter_id)

    # --- deletion

    def delete_instances_atomic(
        self, instance_ids: Sequence[str], *, force: bool = False
    ) -> asyncio.Future[DeleteResult]:
        named = tuple(check_id(each, "instance id") for each in instance_ids)
        return self._handle.write("delete_instances_atomic", control.delete_atomic, named, force)

    async def delete_instance_bulk(self, filter: DeleteFilter) -> DeleteResult:  # noqa: A002
        refusals.check_delete_filter(filter)
        left = filter.limit or BULK_INSTANCES_MAX
        after, results = (-(2**63), ""), list[DeleteResult]()
        while left:
            roots: list[tuple[int, str]] = await self._handle.search(
                "delete_instance_bulk",
                control.next_doomed_roots,
                filter,
                after,
                _DOOMED_ROOTS_PER_LOOK,
            )
            for root in roots:
                result: DeleteResult = await self._handle.write(
                    "delete_instance_bulk", control.delete_finished_tree, root[1], alone=True
                )
                results.append(result)
                left -= bool(result.instances)
                if not left:
                    break
            if len(roots) < _DOOMED_ROOTS_PER_LOOK:
                break
            after = roots[-1]
        return deletion.add_up(results)

    def prune_executions(
        self, instance_id: str, options: PruneOptions
    ) -> asyncio.Future[PruneResult]:
        check_id(instance_id, "instance id")
        refusals.check_prune_options(options)
        return self._handle.write("prune_executions", control.prune, instance_id, options)

    def prune_executions_bulk(
        self,
        filter: DeleteFilter,  # noqa: A002
        options: PruneOptions,
    ) -> asyncio.Future[PruneResult]:
        refusals.check_delete_filter(filter)
        refusals.check_prune_options(options)
        return self._handle.write("prune_executions_bulk", control.prune_bulk, filter, options)

    # --- the store

    def get_system_metrics(self) -> asyncio.Future[SystemMetrics]:
        return self._handle.search("get_system_metrics", listing.system_metrics)

    def get_store_info(self) -> asyncio.Future[StoreInfo]:
        return self._handle.search("get_store_info", self._store_info)

    def register_worker(self, worker: WorkerInfo, ttl_ms: int) -> asyncio.Future[None]:
        refusals.check_worker(worker, ttl_ms)
        return self._handle.write("register_worker", queued.register_worker, worker, ttl_ms)

    def list_workers(self) -> asyncio.Future[list[WorkerInfo]]:
        return self._handle.search("list_workers", queued.list_workers)

    def export_instance(self, instance_id: str) -> asyncio.Future[InstanceSnapshot]:
        check_id(instance_id, "instance id")
        return self._handle.search("export_instance", moving.export, instance_id)

    def import_instance(
        self, snapshot: InstanceSnapshot, *, replace: bool = False
    ) -> asyncio.Future[None]:
        refusals.check_snapshot(snapshot)
        return self._handle.write("import_instance", moving.restore, snapshot, replace)

    def mark_moved(self, location: str | None) -> asyncio.Future[None]:
        refusals.check_text(location, "location")
        return self._handle.write("mark_moved", _mark_moved, location)

    # --- the file

    def backup(self, path: str | os.PathLike[str]) -> Coroutine[Any, Any, None]:
        """Copy the whole store, as of now, into a new file, while work goes on.

        The copy is checked before it gets its name. Errors: AlreadyExists if there is a file at
        that path; CorruptData if the store is damaged: then there is none.
        """
        target = Path(path).absolute()
        if target.exists():
            raise there_already(target)
        return back_up(self._handle, target)

    def integrity_check(self) -> asyncio.Future[None]:
        """Read the whole file. Errors: CorruptData with what SQLite found."""
        return self._handle.search("integrity_check", _check_integrity, str(self._handle.path))

    def _store_info(self, snapshot: Snapshot) -> StoreInfo:
        format_version, moved_to = snapshot.row("SELECT format_version, moved_to FROM store_info")
        path = self._handle.path
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
                "durability": self._durability,
                "sqlite": apsw.sqlite_lib_version(),
                "journal_mode": snapshot.row("PRAGMA journal_mode")[0],
            },
        )


def _list_executions(snapshot: Snapshot, instance_id: str) -> list[int]:
    return [row[0] for row in snapshot.rows(_EXECUTION_IDS, (instance_id,))]


def _latest_execution_id(snapshot: Snapshot, instance_id: str) -> int:
    row = snapshot.row(_LATEST, (instance_id,))
    if row is None:
        raise NotFound(f"{instance_id!r} has no execution")
    latest: int = row[0]
    return latest


def _execution_info(snapshot: Snapshot, instance_id: str, execution_id: int) -> ExecutionInfo:
    row = snapshot.row(_EXECUTION, (instance_id, execution_id))
    if row is None:
        raise NotFound(f"there is no execution {execution_id} of {instance_id!r}")
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


def _parent_id(snapshot: Snapshot, instance_id: str) -> str | None:
    return listing.get_info(snapshot, instance_id).parent_instance_id


def _tree(snapshot: Snapshot, instance_id: str) -> InstanceTree:
    listing.get_info(snapshot, instance_id)
    return InstanceTree(
        root_id=instance_id, instance_ids=tuple(deletion.tree_of(snapshot, instance_id))
    )


def _mark_moved(tx: Transaction, location: str | None) -> None:
    tx.execute("UPDATE store_info SET moved_to = ?", (location,))


def _check_integrity(snapshot: Snapshot, location: str) -> None:
    found: list[Any] = [row[0] for row in snapshot.rows("PRAGMA integrity_check(20)")]
    if found != ["ok"]:
        raise CorruptData(
            "integrity_check",
            f"{location!r} is damaged: {'; '.join(found)}. Keep it with its -wal, and restore a "
            "backup",
        )
