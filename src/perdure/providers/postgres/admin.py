"""Administration of a Postgres store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, LiteralString

import msgspec

from perdure.errors import (
    CorruptData,
    InstanceStillRunning,
    NotFound,
    TreeChanged,
)
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.administration import ProviderAdmin
from perdure.providers.postgres import records, statements
from perdure.providers.postgres.neighbours import Process, is_dead
from perdure.providers.records import (
    ActivityDepth,
    DeadLetter,
    DeleteResult,
    ExecutionInfo,
    FetchedOrchestration,
    HistoryRecord,
    InstanceInfo,
    InstanceQuery,
    InstanceSnapshot,
    InstanceTree,
    OrchestrationItem,
    OrchestratorMessage,
    PruneOptions,
    PruneResult,
    QueueDepth,
    QueueDepths,
    QueuedMessage,
    QueuedWork,
    StoreInfo,
    SystemMetrics,
    WorkerInfo,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from perdure.providers.postgres.fetching import TokenCache
    from perdure.providers.postgres.hosts import Row
    from perdure.providers.postgres.store import PostgresStore

_PAGE_ROWS: Final = 500
_NO_DEPTH: Final = QueueDepth(visible=0, delayed=0, locked=0, oldest_visible_age_ms=None)


class PostgresAdmin(ProviderAdmin):
    """See ``ProviderAdmin``; open as long as the handle that it belongs to."""

    def __init__(self, store: PostgresStore, tokens: TokenCache) -> None:
        self._store = store
        self._ask = store.ask
        self._write = store.write
        self._tokens = tokens
        self._wanted: dict[str, asyncio.Future[Row | None]] = {}
        """Instances that the next look reads, for all that wait for it."""
        self._looking: asyncio.Task[None] | None = None

    def _require_open(self, operation: str) -> None:
        self._store.require_open(operation)

    # --- instances

    async def _list_instances(
        self, query: InstanceQuery | None, before: tuple[int, str] | None, limit: int
    ) -> list[InstanceInfo]:
        page: list[InstanceInfo] = []
        async for info in self._infos(query, before, limit):
            page.append(info)
            if len(page) == limit:
                break
        return page

    async def _count_instances(self, query: InstanceQuery | None) -> int:
        if query is not None and query.text is not None:
            return sum([1 async for _ in self._infos(query, None, _PAGE_ROWS)])
        template, parameters = statements.select_count(query)
        ((count,),) = await self._ask("count_instances", template, parameters)
        return int(count)

    async def _infos(
        self, query: InstanceQuery | None, before: tuple[int, str] | None, at_once: int
    ) -> AsyncIterator[InstanceInfo]:
        at_once = max(at_once, _PAGE_ROWS) if query is not None and query.text else at_once
        while True:
            template, parameters = statements.select_page(query, before, at_once)
            found = await self._ask("list_instances", template, parameters)
            for row in found:
                info = records.instance_info(row)
                before = (info.created_at_ms, info.instance_id)
                if rules.fits_query(info, query):
                    yield info
            if len(found) < at_once:
                return

    async def _get_instance_info(self, instance_id: str) -> InstanceInfo:
        self._store.require_here("get_instance_info")
        wanted = self._wanted.get(instance_id)
        if wanted is None:
            wanted = self._wanted[instance_id] = asyncio.get_running_loop().create_future()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="perdure-look")
        row = await asyncio.shield(wanted)
        if row is None:
            raise rules.no_instance(instance_id)
        return records.instance_info(row)

    async def _look(self) -> None:
        """Read all wanted instances with one statement, until none is wanted.

        Thousands of callers that wait for results look at the same time.
        """
        try:
            while self._wanted:
                wanted, self._wanted = self._wanted, {}
                await self._read_infos(wanted)
        finally:
            self._looking = None
            self._wanted.clear()  # nothing, unless the task was cancelled

    async def _read_infos(self, wanted: dict[str, asyncio.Future[Row | None]]) -> None:
        ids = list(wanted)
        is_one = len(ids) == 1
        template = statements.GET_INFO if is_one else statements.GET_INFOS
        try:
            found = await self._ask("get_instance_info", template, ids if is_one else [ids])
        except Exception as error:  # noqa: BLE001 - all that wait for the look raise it
            if isinstance(error, CorruptData) and not is_one:
                for instance_id, future in wanted.items():  # one of them cannot be read
                    await self._read_infos({instance_id: future})
            else:
                _fail(wanted.values(), error)
        else:
            rows = {row[0]: row for row in found}
            for instance_id, future in wanted.items():
                future.set_result(rows.get(instance_id))

    async def _list_executions(self, instance_id: str) -> list[int]:
        found = await self._ask("list_executions", statements.LIST_EXECUTIONS, (instance_id,))
        return [execution_id for (execution_id,) in found]

    async def _latest_execution_id(self, instance_id: str) -> int:
        ((latest,),) = await self._ask(
            "latest_execution_id", statements.LATEST_EXECUTION_ID, (instance_id,)
        )
        if latest is None:
            raise rules.no_execution(instance_id)
        return int(latest)

    async def _get_execution_info(self, instance_id: str, execution_id: int) -> ExecutionInfo:
        found = await self._ask(
            "get_execution_info", statements.GET_EXECUTION, (instance_id, execution_id)
        )
        if not found:
            raise rules.no_execution(instance_id, execution_id)
        return records.execution_info(found[0])

    async def _read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> list[HistoryRecord]:
        found = await self._ask(
            "read_history_with_execution_id",
            statements.READ_HISTORY,
            (instance_id, execution_id, 0, None),
        )
        return list(records.records(found))

    async def _list_children(self, instance_id: str) -> list[str]:
        found = await self._ask("list_children", statements.LIST_CHILDREN, (instance_id,))
        return [child for (child,) in found]

    async def _get_instance_tree(self, instance_id: str) -> InstanceTree:
        found = await self._ask("get_instance_tree", statements.GET_TREE, (instance_id,))
        if not found:
            raise rules.no_instance(instance_id)
        return InstanceTree(root_id=instance_id, instance_ids=tuple(found[0][0]))

    # --- control

    async def _suspend_instance(self, instance_id: str) -> None:
        await self._control(instance_id, "suspend_instance", statements.SUSPEND_INSTANCE)

    async def _resume_instance(self, instance_id: str) -> None:
        await self._control(instance_id, "resume_instance", statements.RESUME_INSTANCE)
        self._store.released()

    async def _control(self, instance_id: str, operation: str, template: LiteralString) -> None:
        ((refused,),) = await self._write(operation, template, (instance_id,))
        if refused == "missing":
            raise rules.no_instance(instance_id)
        if refused is not None:
            raise rules.instance_finished(instance_id)
        self._store.changed((instance_id,))

    async def _lock_instance(self, instance_id: str, lock_timeout_ms: int) -> FetchedOrchestration:
        operation = "lock_instance"
        token = self._store.new_lock_token()
        ((refused,),) = await self._write(
            operation, statements.LOCK_INSTANCE, (instance_id, token, lock_timeout_ms)
        )
        if refused is not None:
            raise rules.no_instance(instance_id)
        self._tokens.note(token, instance_id)
        # The lock is held, so the instance does not change between these reads.
        info = await self._get_instance_info(instance_id)
        history: list[HistoryRecord] = []
        history_error: str | None = None
        try:
            history = await self._read_history_with_execution_id(instance_id, info.execution_id)
        except CorruptData as error:
            history_error = str(error.__cause__)
        kv_store = await self._ask(operation, statements.GET_KV_STORE, (instance_id,))
        return FetchedOrchestration(
            item=OrchestrationItem(
                instance_id=instance_id,
                name=info.name,
                version=info.version,
                execution_id=info.execution_id,
                history=tuple(history),
                messages=(),
                kv_snapshot=records.kv_entries(kv_store),
                parent_instance_id=info.parent_instance_id,
                history_error=history_error,
            ),
            lock_token=token,
            attempt_count=0,
        )

    # --- queues

    async def _get_queue_depths(self) -> QueueDepths:
        found = await self._ask("get_queue_depths", statements.GET_DEPTHS)
        depths = {(queue, name, tag): QueueDepth(*counts) for queue, name, tag, *counts in found}
        return QueueDepths.of(
            depths.get(("orchestrator", None, None), _NO_DEPTH),
            [
                ActivityDepth(*msgspec.structs.astuple(depth), name=name, tag=tag)
                for (queue, name, tag), depth in depths.items()
                if queue == "worker"
            ],
            dead_letters=depths["dead_letters", None, None].visible,
        )

    async def _list_messages(self, instance_id: str, limit: int) -> list[QueuedMessage]:
        text = await self._listed(instance_id, "list_messages", statements.LIST_MESSAGES, limit)
        return msgspec.json.decode(text, type=list[QueuedMessage])

    async def _list_work(self, instance_id: str, limit: int) -> list[QueuedWork]:
        text = await self._listed(instance_id, "list_work", statements.LIST_WORK, limit)
        return msgspec.json.decode(text, type=list[QueuedWork])

    async def _listed(
        self, instance_id: str, operation: str, template: LiteralString, limit: int
    ) -> str:
        ((text,),) = await self._ask(operation, template, (instance_id, limit))
        return str(text)

    async def _list_dead_letters(self, limit: int) -> list[DeadLetter]:
        found = await self._ask("list_dead_letters", statements.LIST_DEAD_LETTERS, (limit,))
        return [
            DeadLetter(
                letter_id=letter_id,
                reason=reason,
                dead_since_ms=dead_since_ms,
                message=msgspec.json.decode(message, type=OrchestratorMessage),
            )
            for letter_id, reason, dead_since_ms, message in found
        ]

    async def _requeue_dead_letter(self, letter_id: int) -> None:
        ((refused,),) = await self._write(
            "requeue_dead_letter", statements.REQUEUE_LETTER, (letter_id,)
        )
        if refused is not None:
            raise rules.no_dead_letter(letter_id)
        self._store.released()

    async def _delete_dead_letter(self, letter_id: int) -> None:
        found = await self._write("delete_dead_letter", statements.DELETE_LETTER, (letter_id,))
        if not found:
            raise rules.no_dead_letter(letter_id)

    # --- deletion

    async def _delete_instances_atomic(
        self,
        instance_ids: tuple[str, ...],
        *,
        force: bool = False,
        root_id: str | None = None,
        completed_before_ms: int | None = None,
    ) -> DeleteResult:
        """``root_id`` must be a root that was completed before that time, or none is deleted."""
        named = sorted(set(instance_ids))
        ((text,),) = await self._write(
            "delete_instances_atomic",
            statements.DELETE_INSTANCES,
            (named, force, root_id, completed_before_ms),
        )
        answer: dict[str, Any] = msgspec.json.decode(text)
        match answer.get("refused"):
            case None:
                self._store.changed(named)
                return msgspec.convert(answer, DeleteResult)
            case "missing":
                raise rules.none_exists(named)
            case "running":
                raise rules.still_running(answer["instance_id"], answer["status"])
            case _:
                raise rules.would_orphan(answer["status"], answer["instance_id"])

    async def _list_oldest(
        self,
        instance_ids: tuple[str, ...] | None,
        completed_before_ms: int | None,
        after: tuple[int, str],
        limit: int,
        *,
        finished_roots: bool,
    ) -> list[tuple[int, str]]:
        named = None if instance_ids is None else list(instance_ids)
        found = await self._ask(
            "list_oldest",
            statements.LIST_FINISHED_ROOTS if finished_roots else statements.LIST_BEGUN,
            (named, completed_before_ms, *after, limit),
        )
        return [(created_at_ms, instance_id) for created_at_ms, instance_id in found]

    async def _delete_finished_tree(
        self, root_id: str, completed_before_ms: int | None
    ) -> DeleteResult:
        while True:
            try:
                tree = await self._get_instance_tree(root_id)
                return await self._delete_instances_atomic(
                    tree.instance_ids, root_id=root_id, completed_before_ms=completed_before_ms
                )
            except (NotFound, InstanceStillRunning):
                return DeleteResult()
            except TreeChanged:
                continue

    async def _prune_executions(self, instance_id: str, options: PruneOptions) -> PruneResult:
        ((text,),) = await self._write(
            "prune_executions",
            statements.PRUNE_INSTANCE,
            (instance_id, options.keep_last or 0, options.completed_before_ms),
        )
        if text is None:
            raise rules.no_instance(instance_id)
        return msgspec.json.decode(text, type=PruneResult)

    # --- the store

    async def _get_system_metrics(self) -> SystemMetrics:
        operation = "get_system_metrics"
        ((instances, executions, events),) = await self._ask(operation, statements.GET_TOTALS)
        by_status = await self._ask(operation, statements.COUNT_BY_STATUS)
        return SystemMetrics(
            total_instances=instances,
            total_executions=executions,
            total_events=events,
            by_status={Status(status): count for status, count in by_status},
        )

    async def integrity_check(self) -> None:
        """Look for messages that no fetch can find. Errors: CorruptData."""
        found = await self._ask("integrity_check", statements.WITHOUT_READINESS)
        rules.check_readiness([instance_id for (instance_id,) in found])

    async def _get_store_info(self) -> StoreInfo:
        operation = "get_store_info"
        ((format_version, moved_to, schema_version, _),) = await self._ask(
            operation, statements.GET_STORE
        )
        ((size,),) = await self._ask(operation, statements.GET_SIZE, (self._store.address.schema,))
        return StoreInfo(
            provider="postgres",
            provider_version="1",
            location=self._store.address.location,
            format_version=format_version,
            schema_version=schema_version,
            size_bytes=size,
            moved_to=moved_to,
            details={"schema": self._store.address.schema},
        )

    async def _register_worker(self, worker: WorkerInfo, ttl_ms: int) -> None:
        operation = "register_worker"
        if ttl_ms == 0:
            await self._ask(operation, statements.REMOVE_WORKER, (worker.worker_id,))
            return
        neighbours = self._store.neighbours
        info = msgspec.to_builtins(worker)
        process = neighbours.process
        if process is not None:
            info |= {"holder": neighbours.holder, "process": process}
        values = (
            worker.worker_id,
            msgspec.json.encode(info).decode(),
            ttl_ms,
            None if process is None else process.place,
        )
        found = await self._ask(operation, statements.REGISTER_WORKER, values)
        marks = [_decode_mark(info) for (info,) in found]
        neighbours.meet([(each.holder, each.process) for each in marks if each.process])

    async def _list_workers(self) -> list[WorkerInfo]:
        found = await self._ask("list_workers", statements.LIST_WORKERS)
        here = self._store.neighbours.process
        return [
            msgspec.json.decode(info, type=WorkerInfo)
            for (info,) in found
            if (process := _decode_mark(info).process) is None or not is_dead(process, here)
        ]

    async def _export_instance(self, instance_id: str) -> InstanceSnapshot:
        ((text,),) = await self._ask("export_instance", statements.EXPORT_INSTANCE, (instance_id,))
        if text is None:
            raise rules.no_instance(instance_id)
        return msgspec.json.decode(text, type=InstanceSnapshot)

    async def _import_instance(self, snapshot: InstanceSnapshot, *, replace: bool) -> None:
        text = msgspec.json.encode(snapshot).decode()
        ((refused,),) = await self._write(
            "import_instance", statements.IMPORT_INSTANCE, (text, replace)
        )
        if refused is not None:
            raise rules.already_exists(snapshot.instance_id)
        self._store.changed((snapshot.instance_id,))
        self._store.released()

    async def _mark_moved(self, location: str | None) -> None:
        await self._write("mark_moved", statements.MARK_MOVED, (location,))


def _fail(waiting: Iterable[asyncio.Future[Row | None]], error: Exception) -> None:
    for future in waiting:
        future.set_exception(error)
        future.exception()  # all that waited for it may have been cancelled


class _Mark(msgspec.Struct):
    """The part of a worker's entry by which its process is recognised."""

    holder: str = ""
    process: Process | None = None


_decode_mark: Final = msgspec.json.Decoder(_Mark).decode
