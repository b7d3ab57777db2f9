"""The verbs that a store implements; ``Provider`` and ``ProviderAdmin`` call them.

Each has the name of a public verb with an underscore, and its docstring there is what it must do.
When a verb is called here, the store is open, the arguments are valid and defaults are filled in.
A verb may be a coroutine function, or return a future. Verbs with a body have a default, which is
made of other verbs, or refuses what the store does not declare.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from perdure.errors import LockLost, NotSupported

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.model.failures import Block
    from perdure.providers.records import (
        DeadLetter,
        DeleteFilter,
        DeleteResult,
        EnqueueCondition,
        ExecutionInfo,
        FetchedOrchestration,
        FetchedWork,
        HistoryRecord,
        InstanceInfo,
        InstancePage,
        InstanceQuery,
        InstanceSnapshot,
        InstanceTree,
        KvEntry,
        OrchestrationFilter,
        OrchestratorMessage,
        PruneOptions,
        PruneResult,
        QueueDepths,
        QueuedMessage,
        QueuedWork,
        SessionFetch,
        StoreInfo,
        SystemMetrics,
        TagFilter,
        TurnCommit,
        WorkerInfo,
        WorkerMessage,
    )
    from perdure.providers.waiting import Watch


class Backend(ABC):
    """The verbs behind ``Provider``."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def _require_open(self, operation: str) -> None:
        """Raise StoreClosed unless this handle is open in this process."""

    # --- turns

    @abstractmethod
    def _fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None,  # noqa: A002
        owner: str | None,
    ) -> Awaitable[FetchedOrchestration | None]: ...

    @abstractmethod
    def _ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> Awaitable[None]: ...

    @abstractmethod
    def _abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None,
        *,
        ignore_attempt: bool,
        block: Block | None,
    ) -> Awaitable[None]: ...

    @abstractmethod
    def _renew_orchestration_item_lock(
        self, lock_token: str, extend_for_ms: int
    ) -> Awaitable[None]: ...

    async def _renew_orchestration_item_locks(
        self, lock_tokens: tuple[str, ...], extend_for_ms: int
    ) -> frozenset[str]:
        """Renew one lock after the other."""
        lost: set[str] = set()
        for token in lock_tokens:
            try:
                await self._renew_orchestration_item_lock(token, extend_for_ms)
            except LockLost:
                lost.add(token)
        return frozenset(lost)

    def _start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> Awaitable[bool]:
        raise NotSupported("start_orchestration_item", f"{self.name} does not declare hot_path")

    # --- history

    @abstractmethod
    def _read(self, instance_id: str) -> Awaitable[list[HistoryRecord]]: ...

    @abstractmethod
    def _read_with_execution(
        self, instance_id: str, execution_id: int, after_event_id: int, limit: int | None
    ) -> Awaitable[list[HistoryRecord]]: ...

    @abstractmethod
    def _append_with_execution(
        self, instance_id: str, execution_id: int, records: tuple[HistoryRecord, ...]
    ) -> Awaitable[None]: ...

    # --- worker queue

    @abstractmethod
    def _enqueue_for_worker(self, message: WorkerMessage) -> Awaitable[None]: ...

    @abstractmethod
    def _fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None,
        tags: TagFilter,
        activities: frozenset[str] | None,
    ) -> Awaitable[FetchedWork | None]: ...

    async def _fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None,
        tags: TagFilter,
        activities: frozenset[str] | None,
    ) -> list[FetchedWork]:
        """Fetch one after the other, and wait only for the first."""
        fetched = await self._fetch_work_item(
            lock_timeout_ms, poll_timeout_ms, session, tags, activities
        )
        found: list[FetchedWork] = []
        while fetched is not None:
            found.append(fetched)
            if len(found) == limit:
                break
            fetched = await self._fetch_work_item(lock_timeout_ms, 0, session, tags, activities)
        return found

    @abstractmethod
    def _ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None,
        retry: WorkerMessage | None,
    ) -> Awaitable[None]: ...

    def _settle_in_transaction(
        self, lock_token: str, settle: Callable[[Any], OrchestratorMessage]
    ) -> Awaitable[None]:
        raise NotSupported("settle_in_transaction", f"{self.name} does not declare transactions")

    @abstractmethod
    def _abandon_work_item(
        self, lock_token: str, delay_ms: int | None, *, ignore_attempt: bool
    ) -> Awaitable[None]: ...

    @abstractmethod
    def _renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None
    ) -> Awaitable[None]: ...

    async def _renew_work_item_locks(
        self, lock_tokens: tuple[str, ...], extend_for_ms: int
    ) -> frozenset[str]:
        """Renew one lock after the other."""
        lost: set[str] = set()
        for token in lock_tokens:
            try:
                await self._renew_work_item_lock(token, extend_for_ms, None)
            except LockLost:
                lost.add(token)
        return frozenset(lost)

    # --- sessions

    @abstractmethod
    def _renew_session_lock(
        self, owner_ids: tuple[str, ...], extend_for_ms: int, idle_timeout_ms: int
    ) -> Awaitable[int]: ...

    @abstractmethod
    def _cleanup_orphaned_sessions(self) -> Awaitable[int]: ...

    # --- orchestrator queue

    @abstractmethod
    def _enqueue_for_orchestrator(
        self, message: OrchestratorMessage, delay_ms: int | None, condition: EnqueueCondition
    ) -> Awaitable[bool]: ...

    async def _enqueue_many_for_orchestrator(
        self,
        messages: tuple[OrchestratorMessage, ...],
        delay_ms: int | None,
        condition: EnqueueCondition,
    ) -> list[bool]:
        """Enqueue one after the other."""
        return [
            await self._enqueue_for_orchestrator(message, delay_ms, condition)
            for message in messages
        ]

    # --- what clients read

    @abstractmethod
    def _get_custom_status(
        self, instance_id: str, last_seen_version: int
    ) -> Awaitable[tuple[str | None, int] | None]: ...

    @abstractmethod
    def _get_kv_value(self, instance_id: str, key: str) -> Awaitable[str | None]: ...

    @abstractmethod
    def _get_kv_all_values(self, instance_id: str) -> Awaitable[dict[str, KvEntry]]: ...

    @abstractmethod
    def _watch(self, instance_id: str) -> Watch: ...


class AdminBackend(ABC):
    """The verbs behind ``ProviderAdmin``."""

    @abstractmethod
    def _require_open(self, operation: str) -> None:
        """Raise StoreClosed unless the handle that this belongs to is open in this process."""

    # --- instances

    @abstractmethod
    def _list_instances(
        self, query: InstanceQuery | None, before: tuple[int, str] | None, limit: int
    ) -> Awaitable[InstancePage]:
        """Return the page behind the instance with that creation time and id."""

    @abstractmethod
    def _count_instances(self, query: InstanceQuery | None) -> Awaitable[int]: ...

    @abstractmethod
    def _get_instance_info(self, instance_id: str) -> Awaitable[InstanceInfo]: ...

    @abstractmethod
    def _list_executions(self, instance_id: str) -> Awaitable[list[int]]: ...

    @abstractmethod
    def _latest_execution_id(self, instance_id: str) -> Awaitable[int]: ...

    @abstractmethod
    def _get_execution_info(
        self, instance_id: str, execution_id: int
    ) -> Awaitable[ExecutionInfo]: ...

    @abstractmethod
    def _read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> Awaitable[list[HistoryRecord]]: ...

    @abstractmethod
    def _list_children(self, instance_id: str) -> Awaitable[list[str]]: ...

    @abstractmethod
    def _get_instance_tree(self, instance_id: str) -> Awaitable[InstanceTree]: ...

    # --- control

    @abstractmethod
    def _suspend_instance(self, instance_id: str) -> Awaitable[None]: ...

    @abstractmethod
    def _resume_instance(self, instance_id: str) -> Awaitable[None]: ...

    @abstractmethod
    def _lock_instance(
        self, instance_id: str, lock_timeout_ms: int
    ) -> Awaitable[FetchedOrchestration]: ...

    # --- queues

    @abstractmethod
    def _get_queue_depths(self) -> Awaitable[QueueDepths]: ...

    @abstractmethod
    def _list_messages(self, instance_id: str, limit: int) -> Awaitable[list[QueuedMessage]]: ...

    @abstractmethod
    def _list_work(self, instance_id: str, limit: int) -> Awaitable[list[QueuedWork]]: ...

    @abstractmethod
    def _list_dead_letters(self, limit: int) -> Awaitable[list[DeadLetter]]: ...

    @abstractmethod
    def _requeue_dead_letter(self, letter_id: int) -> Awaitable[None]: ...

    @abstractmethod
    def _delete_dead_letter(self, letter_id: int) -> Awaitable[None]: ...

    # --- deletion

    @abstractmethod
    def _delete_instances_atomic(
        self, instance_ids: tuple[str, ...], *, force: bool
    ) -> Awaitable[DeleteResult]: ...

    @abstractmethod
    def _list_finished_roots(
        self,
        filter: DeleteFilter,  # noqa: A002
        after: tuple[int, str],
        limit: int,
    ) -> Awaitable[list[tuple[int, str]]]:
        """Return creation time and id of roots that fit and have ended, oldest first.

        ``after`` is the last entry of the page before. A tree may still have a running descendant.
        """

    @abstractmethod
    def _delete_finished_tree(self, root_id: str) -> Awaitable[DeleteResult]:
        """Delete a root with its tree, atomically.

        Return an empty result, and delete nothing, if it is no root, if one of the tree has not
        ended, or if there is none.
        """

    @abstractmethod
    def _prune_executions(
        self, instance_id: str, options: PruneOptions
    ) -> Awaitable[PruneResult]: ...

    @abstractmethod
    def _prune_executions_bulk(
        self,
        filter: DeleteFilter,  # noqa: A002
        options: PruneOptions,
    ) -> Awaitable[PruneResult]: ...

    # --- the store

    @abstractmethod
    def _get_system_metrics(self) -> Awaitable[SystemMetrics]: ...

    @abstractmethod
    def _get_store_info(self) -> Awaitable[StoreInfo]: ...

    @abstractmethod
    def _register_worker(self, worker: WorkerInfo, ttl_ms: int) -> Awaitable[None]: ...

    @abstractmethod
    def _list_workers(self) -> Awaitable[list[WorkerInfo]]: ...

    @abstractmethod
    def _export_instance(self, instance_id: str) -> Awaitable[InstanceSnapshot]: ...

    @abstractmethod
    def _import_instance(self, snapshot: InstanceSnapshot, *, replace: bool) -> Awaitable[None]: ...

    @abstractmethod
    def _mark_moved(self, location: str | None) -> Awaitable[None]: ...
