"""Administration of an in-memory store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from model import moving, rules, turns, validation
from model.depths import depth_of_messages, depths_of_work
from perdure.errors import (
    InstanceFinished,
    InstanceStillRunning,
    NotFound,
    TreeChanged,
)
from perdure.limits import check_id
from perdure.model.status import Status
from perdure.model.wire import FORMAT_VERSION
from perdure.providers.records import (
    DeleteResult,
    ExecutionInfo,
    InstanceInfo,
    InstancePage,
    InstanceTree,
    PruneResult,
    QueueDepths,
    StoreInfo,
    SystemMetrics,
)
from perdure.testing.crashes import WholeAdmin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from model.state import Instance
    from model.store import ModelStore
    from perdure.providers.records import (
        DeadLetter,
        FetchedOrchestration,
        HistoryRecord,
        InstanceQuery,
        InstanceSnapshot,
        PruneOptions,
        QueuedMessage,
        QueuedWork,
        WorkerInfo,
    )


class ModelAdmin(WholeAdmin):
    """See ``ProviderAdmin``; open as long as the handle that it belongs to."""

    def __init__(self, store: ModelStore, require_open: Callable[[str], None]) -> None:
        self._store = store
        self._require_open = require_open

    # --- instances

    async def list_instances(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> InstancePage:
        self._require_open("list_instances")
        validation.check_page(limit)
        before = None if cursor is None else rules.decode_cursor(cursor)
        page: list[InstanceInfo] = []
        for info in self._infos(query, before):
            if len(page) == limit:
                last = page[-1]
                next_cursor = rules.encode_cursor(last.created_at_ms, last.instance_id)
                return InstancePage(instances=tuple(page), next_cursor=next_cursor)
            page.append(info)
        return InstancePage(instances=tuple(page), next_cursor=None)

    async def count_instances(self, query: InstanceQuery | None = None) -> int:
        self._require_open("count_instances")
        return sum(1 for _ in self._infos(query))

    async def get_instance_info(self, instance_id: str) -> InstanceInfo:
        return _info(self._existing(instance_id, "get_instance_info"))

    async def list_executions(self, instance_id: str) -> list[int]:
        self._require_open("list_executions")
        instance = self._store.instances.get(check_id(instance_id, "instance id"))
        return [] if instance is None else sorted(instance.executions)

    async def latest_execution_id(self, instance_id: str) -> int:
        self._require_open("latest_execution_id")
        instance = self._store.instances.get(check_id(instance_id, "instance id"))
        if instance is None or not instance.is_known:
            raise NotFound(f"{instance_id!r} has no execution")
        return max([*instance.executions, *instance.histories])

    async def get_execution_info(self, instance_id: str, execution_id: int) -> ExecutionInfo:
        self._require_open("get_execution_info")
        instance = self._store.instances.get(check_id(instance_id, "instance id"))
        if instance is None or execution_id not in instance.executions:
            raise NotFound(f"there is no execution {execution_id} of {instance_id!r}")
        execution = instance.executions[execution_id]
        return ExecutionInfo(
            execution_id=execution_id,
            status=execution.status,
            output=execution.output,
            started_at_ms=execution.started_at_ms,
            completed_at_ms=execution.completed_at_ms,
            event_count=len(instance.histories.get(execution_id, ())),
            framework_version=execution.framework_version,
        )

    async def read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> list[HistoryRecord]:
        self._require_open("read_history_with_execution_id")
        instance = self._store.instances.get(check_id(instance_id, "instance id"))
        return turns.records_of(instance, execution_id)

    async def list_children(self, instance_id: str) -> list[str]:
        self._require_open("list_children")
        check_id(instance_id, "instance id")
        return [child.instance_id for child in self._store.children_of(instance_id)]

    async def get_parent_id(self, instance_id: str) -> str | None:
        return self._existing(instance_id, "get_parent_id").who().parent_instance_id

    async def get_instance_tree(self, instance_id: str) -> InstanceTree:
        tree = self._store.tree_of(self._existing(instance_id, "get_instance_tree"))
        return InstanceTree(
            root_id=instance_id, instance_ids=tuple(member.instance_id for member in tree)
        )

    # --- control

    async def suspend_instance(self, instance_id: str) -> None:
        instance = self._alive(instance_id, "suspend_instance")
        if not instance.suspended:
            instance.suspended = True
            self._store.release(instance)
            self._store.settle(instance, self._store.clock.now_ms())

    async def resume_instance(self, instance_id: str) -> None:
        instance = self._alive(instance_id, "resume_instance")
        instance.suspended = False
        instance.block = None
        instance.not_before_ms = None
        for entry in instance.messages.values():
            entry.attempt_count = 0
        self._store.settle(instance, self._store.clock.now_ms())

    async def lock_instance(self, instance_id: str, lock_timeout_ms: int) -> FetchedOrchestration:
        instance = self._existing(instance_id, "lock_instance")
        validation.check_number(lock_timeout_ms, "lock_timeout_ms", minimum=1)
        return turns.take_over(self._store, instance, lock_timeout_ms)

    # --- queues

    async def get_queue_depths(self) -> QueueDepths:
        self._require_open("get_queue_depths")
        now_ms = self._store.clock.now_ms()
        return QueueDepths.of(
            depth_of_messages(self._store.instances.values(), now_ms),
            depths_of_work(self._store.work.items.values(), now_ms),
            dead_letters=len(self._store.dead_letters),
        )

    async def list_messages(self, instance_id: str, *, limit: int = 1000) -> list[QueuedMessage]:
        self._require_open("list_messages")
        validation.check_number(limit, "limit", minimum=1)
        instance = self._store.instances.get(check_id(instance_id, "instance id"))
        if instance is None:
            return []
        return moving.messages_of(instance, self._store.clock.now_ms())[:limit]

    async def list_work(self, instance_id: str, *, limit: int = 1000) -> list[QueuedWork]:
        self._require_open("list_work")
        validation.check_number(limit, "limit", minimum=1)
        instance = self._store.instances.get(check_id(instance_id, "instance id"))
        if instance is None:
            return []
        return moving.work_of(instance, self._store.clock.now_ms())[:limit]

    async def list_dead_letters(self, *, limit: int = 1000) -> list[DeadLetter]:
        self._require_open("list_dead_letters")
        validation.check_number(limit, "limit", minimum=1)
        return [letter for _, letter in sorted(self._store.dead_letters.items())][:limit]

    async def requeue_dead_letter(self, letter_id: int) -> None:
        letter = self._take_letter(letter_id, "requeue_dead_letter")
        self._store.add_message(letter.message, self._store.clock.now_ms())

    async def delete_dead_letter(self, letter_id: int) -> None:
        self._take_letter(letter_id, "delete_dead_letter")

    # --- deletion

    async def delete_instances_atomic(
        self, instance_ids: Sequence[str], *, force: bool = False
    ) -> DeleteResult:
        self._require_open("delete_instances_atomic")
        named = dict.fromkeys(check_id(each, "instance id") for each in instance_ids)
        found = [self._store.instances[each] for each in named if each in self._store.instances]
        if not any(instance.exists for instance in found):
            raise NotFound(f"none of these instances exists: {sorted(named)[:10]}")
        for instance in found:
            if instance.exists and not instance.has_ended and not force:
                raise InstanceStillRunning(
                    f"{instance.instance_id!r} is still running ({instance.status}); "
                    "wait for its end or force the deletion"
                )
        for instance in found:
            for child in self._store.children_of(instance.instance_id):
                if child.instance_id not in named:
                    raise TreeChanged(
                        f"the child {child.instance_id!r} of {instance.instance_id!r} would be "
                        "orphaned; read the tree again and delete it as a whole"
                    )
        return self._delete(found)

    async def delete_instance_bulk(
        self, query: InstanceQuery, *, limit: int | None = None
    ) -> DeleteResult:
        self._require_open("delete_instance_bulk")
        validation.check_bulk_limit(limit)
        roots = [
            instance
            for instance in self._matching(query)
            if instance.who().parent_instance_id is None
        ]
        trees = [self._store.tree_of(root) for root in roots]
        finished = [tree for tree in trees if all(member.has_ended for member in tree)]
        doomed = finished[:limit]
        return _total(self._delete(tree) for tree in doomed)

    async def prune_executions(self, instance_id: str, options: PruneOptions) -> PruneResult:
        instance = self._existing(instance_id, "prune_executions")
        validation.check_prune_options(options)
        return _prune(instance, options)

    async def prune_executions_bulk(
        self, query: InstanceQuery, options: PruneOptions, *, limit: int | None = None
    ) -> PruneResult:
        self._require_open("prune_executions_bulk")
        validation.check_bulk_limit(limit)
        validation.check_prune_options(options)
        matching = [instance for instance in self._matching(query) if instance.has_turns]
        results = [_prune(instance, options) for instance in matching[:limit]]
        return PruneResult(
            instances_processed=len(results),
            executions=sum(result.executions for result in results),
            events=sum(result.events for result in results),
        )

    # --- the store

    async def get_system_metrics(self) -> SystemMetrics:
        self._require_open("get_system_metrics")
        by_status = dict.fromkeys(Status, 0)
        for instance in self._store.instances.values():
            if instance.exists:
                by_status[instance.status] += 1
        everything = self._store.instances.values()
        return SystemMetrics(
            total_instances=len(self._store.listing),
            total_executions=sum(len(each.executions) for each in everything),
            total_events=sum(len(h) for each in everything for h in each.histories.values()),
            by_status={status: number for status, number in by_status.items() if number},
        )

    async def get_store_info(self) -> StoreInfo:
        self._require_open("get_store_info")
        return StoreInfo(
            provider="memory",
            provider_version="1",
            location="memory:",
            format_version=FORMAT_VERSION,
            schema_version=1,
            size_bytes=None,
            moved_to=self._store.moved_to,
            details={"durability": "none: the content is gone with the process"},
        )

    async def register_worker(self, worker: WorkerInfo, ttl_ms: int) -> None:
        self._require_open("register_worker")
        validation.check_worker(worker, ttl_ms)
        now_ms = self._store.clock.now_ms()
        if ttl_ms == 0:
            self._store.workers.pop(worker.worker_id, None)
        else:
            seen = msgspec.structs.replace(worker, seen_at_ms=now_ms)
            self._store.workers[worker.worker_id] = (now_ms + ttl_ms, seen)

    async def list_workers(self) -> list[WorkerInfo]:
        self._require_open("list_workers")
        now_ms = self._store.clock.now_ms()
        return [
            worker
            for _, (lapses_at_ms, worker) in sorted(self._store.workers.items())
            if rules.is_live(lapses_at_ms, now_ms)
        ]

    async def export_instance(self, instance_id: str) -> InstanceSnapshot:
        self._require_open("export_instance")
        instance = self._store.instances.get(check_id(instance_id, "instance id"))
        if instance is None:
            raise NotFound(f"there is no instance {instance_id!r}")
        return moving.snapshot(instance)

    async def import_instance(self, snapshot: InstanceSnapshot, *, replace: bool = False) -> None:
        self._require_open("import_instance")
        moving.restore(self._store, snapshot, replace=replace)

    async def mark_moved(self, location: str | None) -> None:
        self._require_open("mark_moved")
        self._store.moved_to = location

    # --- finding

    def _existing(self, instance_id: str, operation: str) -> Instance:
        self._require_open(operation)
        instance = self._store.instances.get(check_id(instance_id, "instance id"))
        if instance is None or not instance.exists:
            raise NotFound(f"there is no instance {instance_id!r}")
        return instance

    def _alive(self, instance_id: str, operation: str) -> Instance:
        instance = self._existing(instance_id, operation)
        if instance.has_ended:
            raise InstanceFinished(f"{instance_id!r} has ended: {instance.status}")
        return instance

    def _infos(
        self, query: InstanceQuery | None, before: tuple[int, str] | None = None
    ) -> Iterator[InstanceInfo]:
        for _, instance_id in self._store.listing.descending_before(before):
            info = _info(self._store.instances[instance_id])
            if rules.fits_query(info, query):
                yield info

    def _matching(self, query: InstanceQuery) -> list[Instance]:
        """Instances that a bulk query names, oldest first."""
        found = [self._store.instances[instance_id] for _, instance_id in self._store.listing]
        return [instance for instance in found if rules.fits_query(_info(instance), query)]

    def _take_letter(self, letter_id: int, operation: str) -> DeadLetter:
        self._require_open(operation)
        letter = self._store.dead_letters.pop(letter_id, None)
        if letter is None:
            raise NotFound(f"there is no dead letter {letter_id}")
        return letter

    def _delete(self, instances: Iterable[Instance]) -> DeleteResult:
        return _total([self._store.delete(instance) for instance in instances])


def _info(instance: Instance) -> InstanceInfo:
    who = instance.who()
    current = instance.current
    created_at_ms, _ = instance.created_key
    return InstanceInfo(
        instance_id=instance.instance_id,
        name=who.name,
        version=who.version,
        execution_id=instance.shown_execution_id,
        status=instance.status,
        output=None if current is None else current.output,
        created_at_ms=created_at_ms,
        updated_at_ms=instance.updated_at_ms if instance.has_turns else created_at_ms,
        completed_at_ms=None if current is None else current.completed_at_ms,
        parent_instance_id=who.parent_instance_id,
        custom_status=instance.custom_status,
        custom_status_version=instance.custom_status_version,
        block=instance.block,
    )


def _prune(instance: Instance, options: PruneOptions) -> PruneResult:
    executions = {
        execution_id: (execution.status, execution.completed_at_ms)
        for execution_id, execution in instance.executions.items()
    }
    doomed = rules.executions_to_prune(executions, instance.execution_id, options)
    events = 0
    for execution_id in doomed:
        del instance.executions[execution_id]
        events += len(instance.histories.pop(execution_id, ()))
    return PruneResult(instances_processed=1, executions=len(doomed), events=events)


def _total(results: Iterable[DeleteResult]) -> DeleteResult:
    results = list(results)
    return DeleteResult(
        instances=sum(result.instances for result in results),
        executions=sum(result.executions for result in results),
        events=sum(result.events for result in results),
        messages=sum(result.messages for result in results),
    )
