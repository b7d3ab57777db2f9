"""The second half of the storage seam: what people and tools ask of a store.

A provider may do without it. The rules for every method are those of ``contract.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

from perdure.errors import InstanceFinished, NotFound, TreeChanged
from perdure.providers._shared import rules

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from perdure.model.status import Status
    from perdure.providers.items import (
        DeadLetter,
        DeleteFilter,
        DeleteResult,
        ExecutionInfo,
        FetchedOrchestration,
        HistoryRecord,
        InstanceInfo,
        InstancePage,
        InstanceQuery,
        InstanceSnapshot,
        InstanceTree,
        PruneOptions,
        PruneResult,
        QueueDepths,
        QueuedMessage,
        QueuedWork,
        StoreInfo,
        SystemMetrics,
        WorkerInfo,
    )


class ProviderAdmin(ABC):
    """Reading, moving and cleaning up. Never on the path of a turn."""

    # --- instances

    @abstractmethod
    def list_instances(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> Awaitable[InstancePage]:
        """A page of instances, newest first, Pending ones included.

        Cost grows with the page, not with the store, for queries without ``text``. A bad cursor
        is InvalidValue.
        """

    async def list_instances_by_status(self, status: Status) -> list[str]:
        """Ids of all instances with that status, newest first."""
        from perdure.providers.items import InstanceQuery

        query, cursor, ids = InstanceQuery(statuses=frozenset({status})), None, list[str]()
        while True:
            page = await self.list_instances(query, cursor=cursor, limit=1000)
            ids += [info.instance_id for info in page.instances]
            if (cursor := page.next_cursor) is None:
                return ids

    @abstractmethod
    def count_instances(self, query: InstanceQuery | None = None) -> Awaitable[int]:
        """How many instances fit."""

    @abstractmethod
    def get_instance_info(self, instance_id: str) -> Awaitable[InstanceInfo]:
        """One instance: a queued start counts as Pending. Errors: NotFound.

        The status is that of the current execution, over which Suspended and Blocked prevail while
        it has not ended.
        """

    @abstractmethod
    def list_executions(self, instance_id: str) -> Awaitable[list[int]]:
        """Ascending; empty if unknown."""

    @abstractmethod
    def latest_execution_id(self, instance_id: str) -> Awaitable[int]:
        """The highest. Errors: NotFound."""

    @abstractmethod
    def get_execution_info(self, instance_id: str, execution_id: int) -> Awaitable[ExecutionInfo]:
        """One execution. Errors: NotFound."""

    @abstractmethod
    def read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> Awaitable[list[HistoryRecord]]:
        """As ``Provider.read_with_execution``, whole."""

    @abstractmethod
    def list_children(self, instance_id: str) -> Awaitable[list[str]]:
        """Direct children, oldest first; empty for a leaf and for an unknown id."""

    @abstractmethod
    def get_parent_id(self, instance_id: str) -> Awaitable[str | None]:
        """The parent, None for a root. Errors: NotFound."""

    @abstractmethod
    def get_instance_tree(self, instance_id: str) -> Awaitable[InstanceTree]:
        """The instance and all its descendants. Errors: NotFound."""

    # --- control

    @abstractmethod
    def suspend_instance(self, instance_id: str) -> Awaitable[None]:
        """Stop handing it out, and take its lock away, so that no turn commits any more.

        Repeats: nothing. Errors: NotFound, InstanceFinished.
        """

    @abstractmethod
    def resume_instance(self, instance_id: str) -> Awaitable[None]:
        """Undo a suspension, a block and a ``not_before``; attempt counts start again at 0.

        Repeats: nothing. Errors: NotFound, InstanceFinished.
        """

    @abstractmethod
    def lock_instance(
        self, instance_id: str, lock_timeout_ms: int
    ) -> Awaitable[FetchedOrchestration]:
        """Take the instance's lock, whoever holds it, for a change by an operator.

        Effect: an item with history and state but no messages; a previous holder's token is dead;
        suspension, filters and ``not_before`` do not matter, nor that it has not begun. Ack or
        abandon as usual (abandon with no messages changes only the lock). Errors: NotFound without
        an instance and without a queued start.
        """

    # --- queues

    @abstractmethod
    def get_queue_depths(self) -> Awaitable[QueueDepths]:
        """Both queues, with expired locks counted as visible."""

    @abstractmethod
    def list_messages(
        self, instance_id: str, *, limit: int = 1000
    ) -> Awaitable[list[QueuedMessage]]:
        """What lies in the orchestrator queue for the instance, in queue order."""

    @abstractmethod
    def list_work(self, instance_id: str, *, limit: int = 1000) -> Awaitable[list[QueuedWork]]:
        """What lies in the worker queue for the instance, in queue order."""

    @abstractmethod
    def list_dead_letters(self, *, limit: int = 1000) -> Awaitable[list[DeadLetter]]:
        """Messages that nobody could take, oldest first."""

    @abstractmethod
    def requeue_dead_letter(self, letter_id: int) -> Awaitable[None]:
        """Put it back into the queue as a fresh message. Errors: NotFound."""

    @abstractmethod
    def delete_dead_letter(self, letter_id: int) -> Awaitable[None]:
        """Drop it for good. Errors: NotFound."""

    # --- deletion

    async def delete_instance(self, instance_id: str, *, force: bool = False) -> DeleteResult:
        """Delete a root with its whole tree. Errors: NotFound, NotARoot, InstanceStillRunning."""
        parent = await self.get_parent_id(instance_id)
        if parent is not None:
            raise rules.not_a_root(instance_id, parent)
        while True:
            tree = await self.get_instance_tree(instance_id)
            try:
                return await self.delete_instances_atomic(tree.instance_ids, force=force)
            except TreeChanged:
                if force:
                    await self._hold(tree.instance_ids)

    async def _hold(self, instance_ids: Sequence[str]) -> None:
        """Let these start no more children: what grows all the time would never be deleted."""
        for instance_id in instance_ids:
            with suppress(InstanceFinished, NotFound):
                await self.suspend_instance(instance_id)

    @abstractmethod
    def delete_instances_atomic(
        self, instance_ids: Sequence[str], *, force: bool = False
    ) -> Awaitable[DeleteResult]:
        """Delete these instances and all that belongs to them, or nothing.

        Effect: history, executions, messages of both queues, locks, state, holds, the instance; and
        sessions left without items. Without ``force`` every one must have ended; ContinuedAsNew
        with its next start queued has not. A holder's later ack fails and recreates nothing.
        Errors: NotFound if none of them exists; InstanceStillRunning; TreeChanged if a child is
        not in the list.
        """

    @abstractmethod
    def delete_instance_bulk(self, filter: DeleteFilter) -> Awaitable[DeleteResult]:  # noqa: A002
        """Delete finished roots that fit, each with its tree in a transaction of its own.

        Running ones, children and unknown ids are skipped, and so is a tree with a running
        descendant. ``instance_ids=()`` fits nothing; ``limit`` counts roots (default 1000).
        """

    @abstractmethod
    def prune_executions(self, instance_id: str, options: PruneOptions) -> Awaitable[PruneResult]:
        """Drop past executions of one instance, atomically. Errors: NotFound.

        Never the current one, never a running one; ``keep_last`` None, 0 and 1 mean the same;
        state and custom status stay.
        """

    @abstractmethod
    def prune_executions_bulk(
        self,
        filter: DeleteFilter,  # noqa: A002
        options: PruneOptions,
    ) -> Awaitable[PruneResult]:
        """Prune every instance that fits, running ones and children included."""

    # --- the store

    @abstractmethod
    def get_system_metrics(self) -> Awaitable[SystemMetrics]:
        """Totals over the store."""

    @abstractmethod
    def get_store_info(self) -> Awaitable[StoreInfo]:
        """Where the data lies and in which shape."""

    @abstractmethod
    def register_worker(self, worker: WorkerInfo, ttl_ms: int) -> Awaitable[None]:
        """Announce a runtime, again before ``ttl_ms`` have passed; 0 removes it."""

    @abstractmethod
    def list_workers(self) -> Awaitable[list[WorkerInfo]]:
        """Runtimes that announced themselves and have not lapsed, by id."""

    @abstractmethod
    def export_instance(self, instance_id: str) -> Awaitable[InstanceSnapshot]:
        """Everything about the instance in one consistent read. Errors: NotFound."""

    @abstractmethod
    def import_instance(
        self, snapshot: InstanceSnapshot, *, replace: bool = False
    ) -> Awaitable[None]:
        """Write the snapshot, atomically; queue positions are new, their order is kept.

        Errors: AlreadyExists unless ``replace``.
        """

    @abstractmethod
    def mark_moved(self, location: str | None) -> Awaitable[None]:
        """Refuse to be opened from now on (StoreMoved), pointing at the new place; None undoes it.

        The handle that marked it stays usable for reading. ``open`` of a marked store by tools is
        possible with the provider's ``allow_moved=True``.
        """
