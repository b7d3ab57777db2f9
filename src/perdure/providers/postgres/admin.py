"""Administration of a Postgres store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, LiteralString

import msgspec

from perdure.errors import (
    AlreadyExists,
    InstanceFinished,
    InstanceStillRunning,
    NotFound,
    TreeChanged,
)
from perdure.limits import BULK_INSTANCES_MAX, check_id
from perdure.model.status import Status
from perdure.providers._shared import refusals, rules
from perdure.providers.administration import ProviderAdmin
from perdure.providers.items import (
    DeadLetter,
    DeleteResult,
    FetchedOrchestration,
    InstancePage,
    InstanceSnapshot,
    InstanceTree,
    OrchestrationItem,
    OrchestratorMessage,
    PruneResult,
    QueueDepth,
    QueueDepths,
    QueuedMessage,
    QueuedWork,
    StoreInfo,
    SystemMetrics,
    WorkerInfo,
)
from perdure.providers.postgres import listing, queries, rows
from perdure.providers.postgres.connections import Rank

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from perdure.providers.items import (
        DeleteFilter,
        ExecutionInfo,
        HistoryRecord,
        InstanceInfo,
        InstanceQuery,
        PruneOptions,
    )
    from perdure.providers.postgres.handle import Handle
    from perdure.providers.postgres.tokens import TokenBook

_PAGE_ROWS: Final = 500
_NO_DEPTH: Final = QueueDepth(visible=0, delayed=0, locked=0, oldest_visible_age_ms=None)


class PostgresAdmin(ProviderAdmin):
    """See ``ProviderAdmin``; open as long as the handle that it belongs to."""

    def __init__(self, handle: Handle, tokens: TokenBook) -> None:
        self._handle = handle
        self._tokens = tokens

    # --- instances

    async def list_instances(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> InstancePage:
        refusals.check_page(limit)
        before = None if cursor is None else rules.decode_cursor(cursor)
        page: list[InstanceInfo] = []
        async for info in self._infos(query, before, limit + 1):
            if len(page) == limit:
                last = page[-1]
                next_cursor = rules.encode_cursor(last.created_at_ms, last.instance_id)
                return InstancePage(instances=tuple(page), next_cursor=next_cursor)
            page.append(info)
        return InstancePage(instances=tuple(page), next_cursor=None)

    async def count_instances(self, query: InstanceQuery | None = None) -> int:
        if query is not None and query.text is not None:
            return sum([1 async for _ in self._infos(query, None, _PAGE_ROWS)])
        template, parameters = listing.select_count(query)
        ((count,),) = await self._ask("count_instances", template, parameters)
        return int(count)

    async def _infos(
        self, query: InstanceQuery | None, before: tuple[int, str] | None, at_once: int
    ) -> AsyncIterator[InstanceInfo]:
        at_once = max(at_once, _PAGE_ROWS) if query is not None and query.text else at_once
        while True:
            template, parameters = listing.select_page(query, before, at_once)
            found = await self._ask("list_instances", template, parameters)
            for row in found:
                info = rows.instance_info(row)
                before = (info.created_at_ms, info.instance_id)
                if rules.fits_query(info, query):
                    yield info
            if len(found) < at_once:
                return

    async def get_instance_info(self, instance_id: str) -> InstanceInfo:
        check_id(instance_id, "instance id")
        # A client may be waiting for the result.
        found = await self._handle.ask("get_instance_info", listing.INFO, (instance_id,))
        if not found:
            raise _no_instance(instance_id)
        return rows.instance_info(found[0])

    async def list_executions(self, instance_id: str) -> list[int]:
        found = await self._of(instance_id, "list_executions", queries.LIST_EXECUTIONS)
        return [execution_id for (execution_id,) in found]

    async def latest_execution_id(self, instance_id: str) -> int:
        check_id(instance_id, "instance id")
        ((latest,),) = await self._ask(
            "latest_execution_id", queries.LATEST_EXECUTION_ID, {"id": instance_id}
        )
        if latest is None:
            raise NotFound(f"{instance_id!r} has no execution")
        return int(latest)

    async def get_execution_info(self, instance_id: str, execution_id: int) -> ExecutionInfo:
        check_id(instance_id, "instance id")
        found = await self._ask(
            "get_execution_info", queries.GET_EXECUTION, (instance_id, execution_id)
        )
        if not found:
            raise NotFound(f"there is no execution {execution_id} of {instance_id!r}")
        return rows.execution_info(found[0])

    async def read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> list[HistoryRecord]:
        check_id(instance_id, "instance id")
        found = await self._ask(
            "read_history_with_execution_id",
            queries.READ_HISTORY,
            (instance_id, execution_id, 0, None),
        )
        return list(rows.records(found))

    async def list_children(self, instance_id: str) -> list[str]:
        found = await self._of(instance_id, "list_children", queries.LIST_CHILDREN)
        return [child for (child,) in found]

    async def get_parent_id(self, instance_id: str) -> str | None:
        found = await self._of(instance_id, "get_parent_id", queries.GET_PARENT)
        if not found:
            raise _no_instance(instance_id)
        parent: str | None = found[0][0]
        return parent

    async def get_instance_tree(self, instance_id: str) -> InstanceTree:
        found = await self._of(instance_id, "get_instance_tree", queries.GET_TREE)
        if not found:
            raise _no_instance(instance_id)
        return InstanceTree(root_id=instance_id, instance_ids=tuple(found[0][0]))

    # --- control

    async def suspend_instance(self, instance_id: str) -> None:
        await self._control(instance_id, "suspend_instance", queries.SUSPEND_INSTANCE)

    async def resume_instance(self, instance_id: str) -> None:
        await self._control(instance_id, "resume_instance", queries.RESUME_INSTANCE)
        self._handle.released()

    async def _control(self, instance_id: str, operation: str, template: LiteralString) -> None:
        ((refused,),) = await self._of(instance_id, operation, template)
        if refused == "missing":
            raise _no_instance(instance_id)
        if refused is not None:
            raise InstanceFinished(f"{instance_id!r} has ended")
        self._handle.changed((instance_id,))

    async def lock_instance(self, instance_id: str, lock_timeout_ms: int) -> FetchedOrchestration:
        operation = "lock_instance"
        check_id(instance_id, "instance id")
        refusals.check_number(lock_timeout_ms, "lock_timeout_ms", minimum=1)
        token = rules.new_lock_token()
        ((refused,),) = await self._ask(
            operation, queries.LOCK_INSTANCE, (instance_id, token, lock_timeout_ms)
        )
        if refused is not None:
            raise NotFound(f"there is no instance {instance_id!r}")
        self._tokens.note(token, instance_id)
        # The lock is held, so nobody changes what is read now.
        info = await self.get_instance_info(instance_id)
        history = await self.read_history_with_execution_id(instance_id, info.execution_id)
        kv_store = await self._ask(operation, queries.GET_KV_STORE, (instance_id,))
        return FetchedOrchestration(
            item=OrchestrationItem(
                instance_id=instance_id,
                name=info.name,
                version=info.version,
                execution_id=info.execution_id,
                history=tuple(history),
                messages=(),
                kv_snapshot=rows.kv_entries(kv_store),
                parent_instance_id=info.parent_instance_id,
            ),
            lock_token=token,
            attempt_count=0,
        )

    # --- queues

    async def get_queue_depths(self) -> QueueDepths:
        found = await self._ask("get_queue_depths", queries.GET_DEPTHS)
        depths = {
            queue: QueueDepth(
                visible=visible, delayed=delayed, locked=locked, oldest_visible_age_ms=age
            )
            for queue, visible, delayed, locked, age in found
        }
        return QueueDepths(
            orchestrator=depths.get("orchestrator", _NO_DEPTH),
            worker=depths.get("worker", _NO_DEPTH),
            dead_letters=depths["dead_letters"].visible,
        )

    async def list_messages(self, instance_id: str, *, limit: int = 1000) -> list[QueuedMessage]:
        text = await self._listed(instance_id, "list_messages", queries.LIST_MESSAGES, limit)
        return msgspec.json.decode(text, type=list[QueuedMessage])

    async def list_work(self, instance_id: str, *, limit: int = 1000) -> list[QueuedWork]:
        text = await self._listed(instance_id, "list_work", queries.LIST_WORK, limit)
        return msgspec.json.decode(text, type=list[QueuedWork])

    async def _listed(
        self, instance_id: str, operation: str, template: LiteralString, limit: int
    ) -> str:
        check_id(instance_id, "instance id")
        refusals.check_number(limit, "limit", minimum=1)
        ((text,),) = await self._ask(operation, template, (instance_id, limit))
        return str(text)

    async def list_dead_letters(self, *, limit: int = 1000) -> list[DeadLetter]:
        refusals.check_number(limit, "limit", minimum=1)
        found = await self._ask("list_dead_letters", queries.LIST_DEAD_LETTERS, (limit,))
        return [
            DeadLetter(
                letter_id=letter_id,
                reason=reason,
                dead_since_ms=dead_since_ms,
                message=msgspec.json.decode(message, type=OrchestratorMessage),
            )
            for letter_id, reason, dead_since_ms, message in found
        ]

    async def requeue_dead_letter(self, letter_id: int) -> None:
        ((refused,),) = await self._ask("requeue_dead_letter", queries.REQUEUE_LETTER, (letter_id,))
        if refused is not None:
            raise _no_letter(letter_id)
        self._handle.released()

    async def delete_dead_letter(self, letter_id: int) -> None:
        found = await self._ask("delete_dead_letter", queries.DELETE_LETTER, (letter_id,))
        if not found:
            raise _no_letter(letter_id)

    # --- deletion

    async def delete_instances_atomic(
        self, instance_ids: Sequence[str], *, force: bool = False
    ) -> DeleteResult:
        named = sorted({check_id(each, "instance id") for each in instance_ids})
        ((text,),) = await self._ask(
            "delete_instances_atomic", queries.DELETE_INSTANCES, (named, force)
        )
        answer: dict[str, Any] = msgspec.json.decode(text)
        match answer.get("refused"):
            case None:
                self._handle.changed(named)
                return msgspec.convert(answer, DeleteResult)
            case "missing":
                raise NotFound(f"none of these instances exists: {named[:10]}")
            case "running":
                raise InstanceStillRunning(
                    f"{answer['instance_id']!r} is still running ({answer['status']}); wait for "
                    "its end or force the deletion"
                )
            case _:
                raise TreeChanged(
                    f"the child {answer['status']!r} of {answer['instance_id']!r} would be "
                    "orphaned; read the tree again and delete it as a whole"
                )

    async def delete_instance_bulk(self, filter: DeleteFilter) -> DeleteResult:  # noqa: A002
        refusals.check_delete_filter(filter)
        results: list[DeleteResult] = []
        async for root in self._matching(filter, queries.LIST_FINISHED_ROOTS):
            try:
                results.append(await self.delete_instance(root))
            except (NotFound, InstanceStillRunning, TreeChanged):
                continue  # it has changed since it was found
            if len(results) == (filter.limit or BULK_INSTANCES_MAX):
                break
        return DeleteResult(
            instances=sum(result.instances for result in results),
            executions=sum(result.executions for result in results),
            events=sum(result.events for result in results),
            messages=sum(result.messages for result in results),
        )

    async def prune_executions(self, instance_id: str, options: PruneOptions) -> PruneResult:
        check_id(instance_id, "instance id")
        refusals.check_prune_options(options)
        pruned = await self._prune(instance_id, options)
        if pruned is None:
            raise _no_instance(instance_id)
        return pruned

    async def prune_executions_bulk(
        self,
        filter: DeleteFilter,  # noqa: A002
        options: PruneOptions,
    ) -> PruneResult:
        refusals.check_delete_filter(filter)
        refusals.check_prune_options(options)
        results: list[PruneResult] = []
        async for instance_id in self._matching(filter, queries.LIST_BEGUN):
            pruned = await self._prune(instance_id, options)
            if pruned is not None:
                results.append(pruned)
            if len(results) == (filter.limit or BULK_INSTANCES_MAX):
                break
        return PruneResult(
            instances_processed=len(results),
            executions=sum(result.executions for result in results),
            events=sum(result.events for result in results),
        )

    async def _prune(self, instance_id: str, options: PruneOptions) -> PruneResult | None:
        ((text,),) = await self._ask(
            "prune_executions",
            queries.PRUNE_INSTANCE,
            (instance_id, options.keep_last or 0, options.completed_before_ms),
        )
        return None if text is None else msgspec.json.decode(text, type=PruneResult)

    async def _matching(
        self,
        filter: DeleteFilter,  # noqa: A002
        template: LiteralString,
    ) -> AsyncIterator[str]:
        """Ids that a bulk filter names, oldest first."""
        after: tuple[int, str] = (-(2**63), "")
        named = None if filter.instance_ids is None else list(filter.instance_ids)
        while True:
            before_ms = filter.completed_before_ms
            parameters = (named, named, before_ms, before_ms, *after, _PAGE_ROWS)
            found = await self._ask("list_matching", template, parameters)
            for created_at_ms, instance_id in found:
                after = (created_at_ms, instance_id)
                yield instance_id
            if len(found) < _PAGE_ROWS:
                return

    # --- the store

    async def get_system_metrics(self) -> SystemMetrics:
        operation = "get_system_metrics"
        ((instances, executions, events),) = await self._ask(operation, queries.GET_TOTALS)
        by_status = await self._ask(operation, queries.COUNT_BY_STATUS)
        return SystemMetrics(
            total_instances=instances,
            total_executions=executions,
            total_events=events,
            by_status={Status(status): count for status, count in by_status},
        )

    async def get_store_info(self) -> StoreInfo:
        operation = "get_store_info"
        ((format_version, moved_to, schema_version, _),) = await self._ask(
            operation, queries.GET_STORE
        )
        ((size,),) = await self._ask(operation, queries.GET_SIZE, (self._handle.place.schema,))
        return StoreInfo(
            provider="postgres",
            provider_version="1",
            location=self._handle.place.location,
            format_version=format_version,
            schema_version=schema_version,
            size_bytes=size,
            moved_to=moved_to,
            details={"schema": self._handle.place.schema},
        )

    async def register_worker(self, worker: WorkerInfo, ttl_ms: int) -> None:
        operation = "register_worker"
        refusals.check_worker(worker, ttl_ms)
        if ttl_ms == 0:
            await self._ask(operation, queries.REMOVE_WORKER, (worker.worker_id,))
        else:
            info = msgspec.json.encode(worker).decode()
            await self._ask(
                operation,
                queries.REGISTER_WORKER,
                {"id": worker.worker_id, "info": info, "ttl": ttl_ms},
            )

    async def list_workers(self) -> list[WorkerInfo]:
        found = await self._ask("list_workers", queries.LIST_WORKERS)
        return [msgspec.json.decode(info, type=WorkerInfo) for (info,) in found]

    async def export_instance(self, instance_id: str) -> InstanceSnapshot:
        ((text,),) = await self._of(instance_id, "export_instance", queries.EXPORT_INSTANCE)
        if text is None:
            raise _no_instance(instance_id)
        return msgspec.json.decode(text, type=InstanceSnapshot)

    async def import_instance(self, snapshot: InstanceSnapshot, *, replace: bool = False) -> None:
        refusals.check_snapshot(snapshot)
        text = msgspec.json.encode(snapshot).decode()
        ((refused,),) = await self._ask("import_instance", queries.IMPORT_INSTANCE, (text, replace))
        if refused is not None:
            raise AlreadyExists(f"{snapshot.instance_id!r} is already in this store")
        self._handle.changed((snapshot.instance_id,))
        self._handle.released()

    async def mark_moved(self, location: str | None) -> None:
        await self._ask("mark_moved", queries.MARK_MOVED, (location,))

    # --- asking

    async def _ask(
        self, operation: str, template: LiteralString, parameters: Any = ()
    ) -> list[Any]:
        return await self._handle.ask(operation, template, parameters, rank=Rank.CHORE)

    async def _of(self, instance_id: str, operation: str, template: LiteralString) -> list[Any]:
        check_id(instance_id, "instance id")
        return await self._ask(operation, template, (instance_id,))


def _no_instance(instance_id: str) -> NotFound:
    return NotFound(f"there is no instance {instance_id!r}")


def _no_letter(letter_id: int) -> NotFound:
    return NotFound(f"there is no dead letter {letter_id}")
