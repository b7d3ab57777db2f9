"""Administration of a store in a directory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from perdure.errors import InstanceFinished, NotFound
from perdure.limits import check_id
from perdure.model.wire import FORMAT_VERSION
from perdure.providers import rules, validation
from perdure.providers.filesystem import deletion, queues, snapshots, turns, waiting
from perdure.providers.filesystem.checkpoints import LAYOUT_VERSION
from perdure.providers.filesystem.depths import depth_of_messages, depth_of_work
from perdure.providers.filesystem.rows import HoldRow, MovedRow, WorkerRow
from perdure.providers.records import (
    DeadLetter,
    DeleteResult,
    ExecutionInfo,
    InstanceTree,
    PruneResult,
    QueueDepths,
    StoreInfo,
    SystemMetrics,
)
from perdure.providers.whole import WholeAdmin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.filesystem.provider import FileSystemProvider
    from perdure.providers.filesystem.rows import LetterRow
    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.store import OpenStore
    from perdure.providers.filesystem.tables import Transaction
    from perdure.providers.records import (
        FetchedOrchestration,
        HistoryRecord,
        InstanceInfo,
        InstancePage,
        InstanceQuery,
        InstanceSnapshot,
        PruneOptions,
        QueuedMessage,
        QueuedWork,
        WorkerInfo,
    )


class FileSystemAdmin(WholeAdmin):  # type: ignore[misc]
    """See ``ProviderAdmin``; open as long as the handle that it belongs to."""

    def __init__(self, provider: FileSystemProvider) -> None:
        self._provider = provider

    # --- instances

    async def list_instances(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> InstancePage:
        store = self._provider.store("list_instances")
        validation.check_page(limit)
        before = None if cursor is None else rules.decode_cursor(cursor)
        return await store.look(
            "list_instances", lambda: store.state.listing.page(query, before, limit)
        )

    async def count_instances(self, query: InstanceQuery | None = None) -> int:
        store = self._provider.store("count_instances")
        return await store.look(
            "count_instances", lambda: sum(1 for _ in store.state.listing.matching(query))
        )

    async def get_instance_info(self, instance_id: str) -> InstanceInfo:
        verb = "get_instance_info"
        store = self._store_for(verb, instance_id)

        def look() -> InstanceInfo:
            _require_existing(store.state, instance_id)
            return store.state.standing.info(instance_id)

        return await store.look(verb, look)

    async def list_executions(self, instance_id: str) -> list[int]:
        store = self._store_for("list_executions", instance_id)
        return await store.look(
            "list_executions",
            lambda: sorted(store.state.lookups.executions.get(instance_id, ())),
        )

    async def latest_execution_id(self, instance_id: str) -> int:
        store = self._store_for("latest_execution_id", instance_id)
        ids = await store.look(
            "latest_execution_id", lambda: snapshots.execution_ids(store.state, instance_id)
        )
        if not ids:
            raise NotFound(f"{instance_id!r} has no execution")
        return ids[-1]

    async def get_execution_info(self, instance_id: str, execution_id: int) -> ExecutionInfo:
        verb = "get_execution_info"
        store = self._store_for(verb, instance_id)
        key, tables = (instance_id, execution_id), store.state.tables
        row, history = await store.look(
            verb, lambda: (tables.executions.get(key), tables.histories.get(key))
        )
        if row is None:
            raise NotFound(f"there is no execution {execution_id} of {instance_id!r}")
        return ExecutionInfo(
            execution_id=execution_id,
            status=row.status,
            output=row.output,
            started_at_ms=row.started_at_ms,
            completed_at_ms=row.completed_at_ms,
            event_count=history.count if history is not None else 0,
            framework_version=row.framework_version,
        )

    async def read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> list[HistoryRecord]:
        return await self._provider.read_with_execution(instance_id, execution_id)

    async def list_children(self, instance_id: str) -> list[str]:
        store = self._store_for("list_children", instance_id)
        return await store.look(
            "list_children", lambda: deletion.children_of(store.state, instance_id)
        )

    async def get_parent_id(self, instance_id: str) -> str | None:
        return (await self.get_instance_info(instance_id)).parent_instance_id

    async def get_instance_tree(self, instance_id: str) -> InstanceTree:
        verb = "get_instance_tree"
        store = self._store_for(verb, instance_id)

        def look() -> InstanceTree:
            _require_existing(store.state, instance_id)
            tree = deletion.tree_of(store.state, instance_id)
            return InstanceTree(root_id=instance_id, instance_ids=tuple(tree))

        return await store.look(verb, look)

    # --- control

    async def suspend_instance(self, instance_id: str) -> None:
        verb = "suspend_instance"
        store = self._store_for(verb, instance_id)

        def suspend(tx: Transaction) -> None:
            hold = _hold_of_living(store.state, instance_id)
            if not hold.suspended:
                turns.put_hold(store.state, tx, msgspec.structs.replace(hold, suspended=True))
                turns.release(store.state, tx, instance_id)

        await store.change(verb, suspend)

    async def resume_instance(self, instance_id: str) -> None:
        verb = "resume_instance"
        store = self._store_for(verb, instance_id)

        def resume(tx: Transaction) -> None:
            _hold_of_living(store.state, instance_id)
            turns.put_hold(store.state, tx, HoldRow(instance_id=instance_id))
            turns.reset_attempts(store.state, tx, instance_id)

        await store.change(verb, resume)

    async def lock_instance(self, instance_id: str, lock_timeout_ms: int) -> FetchedOrchestration:
        verb = "lock_instance"
        store = self._store_for(verb, instance_id)
        validation.check_number(lock_timeout_ms, "lock_timeout_ms", minimum=1)

        def lock(tx: Transaction) -> turns.LockedInstance:
            if not store.state.standing.exists(instance_id):
                raise NotFound(f"there is no instance {instance_id!r}")
            return turns.take_over(store.state, tx, instance_id, lock_timeout_ms)

        return await waiting.with_history(store, await store.change(verb, lock))

    # --- queues

    async def get_queue_depths(self) -> QueueDepths:
        verb = "get_queue_depths"
        store = self._provider.store(verb)
        state = store.state

        def look() -> QueueDepths:
            now_ms = store.clock.now_ms()
            return QueueDepths(
                orchestrator=depth_of_messages(state, now_ms),
                worker=depth_of_work(state, now_ms),
                dead_letters=len(state.tables.letters.rows),
            )

        return await store.look(verb, look)

    async def list_messages(self, instance_id: str, *, limit: int = 1000) -> list[QueuedMessage]:
        store = self._store_for("list_messages", instance_id)
        validation.check_number(limit, "limit", minimum=1)
        return await store.look(
            "list_messages",
            lambda: snapshots.queued_messages(store.state, instance_id, store.clock.now_ms())[
                :limit
            ],
        )

    async def list_work(self, instance_id: str, *, limit: int = 1000) -> list[QueuedWork]:
        store = self._store_for("list_work", instance_id)
        validation.check_number(limit, "limit", minimum=1)
        return await store.look(
            "list_work",
            lambda: snapshots.queued_work(store.state, instance_id, store.clock.now_ms())[:limit],
        )

    async def list_dead_letters(self, *, limit: int = 1000) -> list[DeadLetter]:
        store = self._provider.store("list_dead_letters")
        validation.check_number(limit, "limit", minimum=1)
        letters = await store.look(
            "list_dead_letters", lambda: sorted(store.state.tables.letters.rows.items())[:limit]
        )
        return [
            DeadLetter(
                letter_id=row.letter_id,
                reason=row.reason,
                dead_since_ms=row.dead_since_ms,
                message=row.message,
            )
            for _, row in letters
        ]

    async def requeue_dead_letter(self, letter_id: int) -> None:
        verb = "requeue_dead_letter"
        store = self._provider.store(verb)

        def requeue(tx: Transaction) -> None:
            letter = _take_letter(store.state, tx, letter_id)
            queues.add_message(store.state, tx, letter.message)

        await store.change(verb, requeue)

    async def delete_dead_letter(self, letter_id: int) -> None:
        verb = "delete_dead_letter"
        store = self._provider.store(verb)
        await store.change(verb, lambda tx: _take_letter(store.state, tx, letter_id))

    # --- deletion

    async def delete_instances_atomic(
        self, instance_ids: Sequence[str], *, force: bool = False
    ) -> DeleteResult:
        verb = "delete_instances_atomic"
        store = self._provider.store(verb)
        for instance_id in instance_ids:
            self._store_for(verb, instance_id)
        return await store.change(
            verb, lambda tx: deletion.delete_atomic(store.state, tx, instance_ids, force=force)
        )

    async def delete_instance_bulk(
        self, query: InstanceQuery, *, limit: int | None = None
    ) -> DeleteResult:
        verb = "delete_instance_bulk"
        store = self._provider.store(verb)
        validation.check_bulk_limit(limit)
        state = store.state
        trees = await store.look(
            verb, lambda: deletion.finished_trees(state, deletion.matching(state, query))
        )
        roots = [tree[0] for tree in trees[:limit]]
        return deletion.total(
            [
                await store.change(verb, partial(deletion.delete_finished_tree, state, root))
                for root in roots
            ]
        )

    async def prune_executions(self, instance_id: str, options: PruneOptions) -> PruneResult:
        verb = "prune_executions"
        store = self._store_for(verb, instance_id)
        validation.check_prune_options(options)

        def prune(tx: Transaction) -> PruneResult:
            _require_existing(store.state, instance_id)
            return deletion.prune(store.state, instance_id, options, tx)

        return await store.change(verb, prune)

    async def prune_executions_bulk(
        self, query: InstanceQuery, options: PruneOptions, *, limit: int | None = None
    ) -> PruneResult:
        verb = "prune_executions_bulk"
        store = self._provider.store(verb)
        validation.check_bulk_limit(limit)
        validation.check_prune_options(options)
        state = store.state
        found = await store.look(
            verb,
            lambda: [
                instance_id
                for instance_id in deletion.matching(state, query)
                if state.standing.has_turns(instance_id)
            ],
        )
        results = [
            await store.change(verb, partial(deletion.prune, state, instance_id, options))
            for instance_id in found[:limit]
        ]
        return PruneResult(
            instances_processed=len(results),
            executions=sum(result.executions for result in results),
            events=sum(result.events for result in results),
        )

    # --- the store

    async def get_system_metrics(self) -> SystemMetrics:
        store = self._provider.store("get_system_metrics")
        state = store.state
        return await store.look(
            "get_system_metrics",
            lambda: SystemMetrics(
                total_instances=len(state.listing),
                total_executions=len(state.tables.executions.rows),
                total_events=state.lookups.event_count,
                by_status=state.listing.counts(),
            ),
        )

    async def get_store_info(self) -> StoreInfo:
        store = self._provider.store("get_store_info")
        moved = await store.look("get_store_info", lambda: store.state.tables.moved.get(""))
        return StoreInfo(
            provider=self._provider.name,
            provider_version=self._provider.version,
            location=self._provider.path,
            format_version=FORMAT_VERSION,
            schema_version=LAYOUT_VERSION,
            size_bytes=await store.size_bytes(),
            moved_to=moved.location if moved is not None else None,
            details=store.details(),
        )

    async def register_worker(self, worker: WorkerInfo, ttl_ms: int) -> None:
        verb = "register_worker"
        store = self._provider.store(verb)
        validation.check_worker(worker, ttl_ms)
        table = store.state.tables.workers

        def register(tx: Transaction) -> None:
            if ttl_ms == 0:
                tx.drop(table, worker.worker_id)
            else:
                seen = msgspec.structs.replace(worker, seen_at_ms=tx.now_ms)
                tx.put(table, WorkerRow(worker=seen, lapses_at_ms=tx.now_ms + ttl_ms))

        await store.change(verb, register)

    async def list_workers(self) -> list[WorkerInfo]:
        store = self._provider.store("list_workers")
        rows = await store.look(
            "list_workers", lambda: sorted(store.state.tables.workers.rows.items())
        )
        now_ms = store.clock.now_ms()
        return [row.worker for _, row in rows if rules.is_live(row.lapses_at_ms, now_ms)]

    async def export_instance(self, instance_id: str) -> InstanceSnapshot:
        verb = "export_instance"
        store = self._store_for(verb, instance_id)
        return await snapshots.export(store, verb, instance_id)

    async def import_instance(self, snapshot: InstanceSnapshot, *, replace: bool = False) -> None:
        verb = "import_instance"
        validation.check_snapshot(snapshot)
        store = self._store_for(verb, snapshot.instance_id)
        await store.change(
            verb, lambda tx: snapshots.restore(store.state, tx, snapshot, replace=replace)
        )

    async def mark_moved(self, location: str | None) -> None:
        verb = "mark_moved"
        store = self._provider.store(verb)
        validation.check_text(location, "location")
        table = store.state.tables.moved

        def mark(tx: Transaction) -> None:
            if location is None:
                tx.drop(table, "")
            else:
                tx.put(table, MovedRow(location=location))

        await store.change(verb, mark)

    def _store_for(self, operation: str, instance_id: str) -> OpenStore:
        store = self._provider.store(operation)
        check_id(instance_id, "instance id")
        store.state.quarantine.check(operation, instance_id)
        return store


def _require_existing(state: State, instance_id: str) -> None:
    if not state.standing.exists(instance_id):
        raise NotFound(f"there is no instance {instance_id!r}")


def _hold_of_living(state: State, instance_id: str) -> HoldRow:
    _require_existing(state, instance_id)
    if state.standing.has_ended(instance_id):
        status = state.standing.status(instance_id)
        raise InstanceFinished(f"{instance_id!r} has ended: {status}")
    return turns.hold_of(state, instance_id)


def _take_letter(state: State, tx: Transaction, letter_id: int) -> LetterRow:
    letter = state.tables.letters.get(letter_id)
    if letter is None:
        raise NotFound(f"there is no dead letter {letter_id}")
    tx.drop(state.tables.letters, letter_id)
    return letter
