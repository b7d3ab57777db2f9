"""The second half of the storage contract: the verbs of operators and tools.

A provider may do without it. The rules for every method are those of ``contract.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from perdure.errors import InstanceFinished, NotFound, TreeChanged
from perdure.limits import PAGE_ITEMS_MAX, check_id
from perdure.model.status import Status
from perdure.providers import rules, validation
from perdure.providers.contract import Openable
from perdure.providers.records import DeleteResult, InstancePage, InstanceQuery, PruneResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from perdure.providers.records import (
        DeadLetter,
        ExecutionInfo,
        FetchedOrchestration,
        HistoryRecord,
        InstanceInfo,
        InstanceSnapshot,
        InstanceTree,
        PruneOptions,
        QueueDepths,
        QueuedMessage,
        QueuedWork,
        StoreInfo,
        SystemMetrics,
        WorkerInfo,
    )

_PAGE: Final = 200
_BEFORE_ALL: Final = (-(2**63), "")


class ProviderAdmin(Openable):
    """Reading, moving and cleaning up. Never on the path of a turn.

    As in ``Provider``, a store implements the verbs with an underscore. Public verbs without one
    are made of others.
    """

    # --- instances

    def list_instances(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> Awaitable[InstancePage]:
        """A page of instances, newest first, Pending ones included.

        Cost grows with the page, not with the store, for queries without ``text``. A bad cursor
        is InvalidValue.
        """
        self._require_open("list_instances")
        validation.check_page(limit)
        before = None if cursor is None else rules.decode_cursor(cursor)
        return _page_of(self._list_instances(query, before, limit + 1), limit)

    @abstractmethod
    def _list_instances(
        self, query: InstanceQuery | None, before: tuple[int, str] | None, limit: int
    ) -> Awaitable[list[InstanceInfo]]:
        """Return instances behind the one with that creation time and id, newest first."""

    async def list_instances_by_status(self, status: Status) -> list[str]:
        """Ids of all instances with that status, newest first."""
        return await self._list_ids(InstanceQuery(statuses=frozenset({status})))

    async def _list_ids(self, query: InstanceQuery) -> list[str]:
        """Return the ids of all instances that fit, newest first."""
        cursor, ids = None, list[str]()
        while True:
            page = await self.list_instances(query, cursor=cursor, limit=PAGE_ITEMS_MAX)
            ids += [info.instance_id for info in page.instances]
            if (cursor := page.next_cursor) is None:
                return ids

    def count_instances(self, query: InstanceQuery | None = None) -> Awaitable[int]:
        """Return the number of instances that fit."""
        self._require_open("count_instances")
        return self._count_instances(query)

    @abstractmethod
    def _count_instances(self, query: InstanceQuery | None) -> Awaitable[int]: ...

    def get_instance_info(self, instance_id: str) -> Awaitable[InstanceInfo]:
        """One instance: a queued start counts as Pending. Errors: NotFound.

        The status is that of the current execution, over which Paused and Blocked prevail while
        it has not ended.
        """
        self._check_instance("get_instance_info", instance_id)
        return self._get_instance_info(instance_id)

    @abstractmethod
    def _get_instance_info(self, instance_id: str) -> Awaitable[InstanceInfo]: ...

    def list_executions(self, instance_id: str) -> Awaitable[list[int]]:
        """Ascending; empty if unknown."""
        self._check_instance("list_executions", instance_id)
        return self._list_executions(instance_id)

    @abstractmethod
    def _list_executions(self, instance_id: str) -> Awaitable[list[int]]: ...

    def latest_execution_id(self, instance_id: str) -> Awaitable[int]:
        """The highest. Errors: NotFound."""
        self._check_instance("latest_execution_id", instance_id)
        return self._latest_execution_id(instance_id)

    @abstractmethod
    def _latest_execution_id(self, instance_id: str) -> Awaitable[int]: ...

    def get_execution_info(self, instance_id: str, execution_id: int) -> Awaitable[ExecutionInfo]:
        """One execution. Errors: NotFound."""
        self._check_instance("get_execution_info", instance_id)
        return self._get_execution_info(instance_id, execution_id)

    @abstractmethod
    def _get_execution_info(
        self, instance_id: str, execution_id: int
    ) -> Awaitable[ExecutionInfo]: ...

    def read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> Awaitable[list[HistoryRecord]]:
        """Return the whole history of an execution, as ``Provider.read_with_execution`` does."""
        self._check_instance("read_history_with_execution_id", instance_id)
        return self._read_history_with_execution_id(instance_id, execution_id)

    @abstractmethod
    def _read_history_with_execution_id(
        self, instance_id: str, execution_id: int
    ) -> Awaitable[list[HistoryRecord]]: ...

    def list_children(self, instance_id: str) -> Awaitable[list[str]]:
        """Direct children, oldest first; empty for a leaf and for an unknown id."""
        self._check_instance("list_children", instance_id)
        return self._list_children(instance_id)

    @abstractmethod
    def _list_children(self, instance_id: str) -> Awaitable[list[str]]: ...

    async def get_parent_id(self, instance_id: str) -> str | None:
        """The parent, None for a root. Errors: NotFound."""
        return (await self.get_instance_info(instance_id)).parent_instance_id

    def get_instance_tree(self, instance_id: str) -> Awaitable[InstanceTree]:
        """The instance and all its descendants. Errors: NotFound."""
        self._check_instance("get_instance_tree", instance_id)
        return self._get_instance_tree(instance_id)

    @abstractmethod
    def _get_instance_tree(self, instance_id: str) -> Awaitable[InstanceTree]: ...

    # --- control

    def suspend_instance(self, instance_id: str) -> Awaitable[None]:
        """Stop handing it out, and take its lock away, so that no turn commits any more.

        Repeats: nothing. Errors: NotFound, InstanceFinished.
        """
        self._check_instance("suspend_instance", instance_id)
        return self._suspend_instance(instance_id)

    @abstractmethod
    def _suspend_instance(self, instance_id: str) -> Awaitable[None]: ...

    def resume_instance(self, instance_id: str) -> Awaitable[None]:
        """Undo a suspension, a block and a ``not_before``; attempt counts start again at 0.

        Repeats: nothing. Errors: NotFound, InstanceFinished.
        """
        self._check_instance("resume_instance", instance_id)
        return self._resume_instance(instance_id)

    @abstractmethod
    def _resume_instance(self, instance_id: str) -> Awaitable[None]: ...

    def lock_instance(
        self, instance_id: str, lock_timeout_ms: int
    ) -> Awaitable[FetchedOrchestration]:
        """Take the instance's lock, also from its holder, for a change by an operator.

        Effect: an item with history and state but no messages; a previous holder's token is dead;
        suspension, filters and ``not_before`` do not matter, nor that it has not begun. Ack or
        abandon as usual (abandon with no messages changes only the lock). Errors: NotFound without
        an instance and without a queued start.
        """
        self._check_instance("lock_instance", instance_id)
        validation.check_number(lock_timeout_ms, "lock_timeout_ms", minimum=1)
        return self._lock_instance(instance_id, lock_timeout_ms)

    @abstractmethod
    def _lock_instance(
        self, instance_id: str, lock_timeout_ms: int
    ) -> Awaitable[FetchedOrchestration]: ...

    # --- queues

    def get_queue_depths(self) -> Awaitable[QueueDepths]:
        """Both queues, with expired locks counted as visible."""
        self._require_open("get_queue_depths")
        return self._get_queue_depths()

    @abstractmethod
    def _get_queue_depths(self) -> Awaitable[QueueDepths]: ...

    def list_messages(
        self, instance_id: str, *, limit: int = 1000
    ) -> Awaitable[list[QueuedMessage]]:
        """Return the messages in the orchestrator queue for the instance, in queue order."""
        self._check_instance("list_messages", instance_id)
        validation.check_number(limit, "limit", minimum=1)
        return self._list_messages(instance_id, limit)

    @abstractmethod
    def _list_messages(self, instance_id: str, limit: int) -> Awaitable[list[QueuedMessage]]: ...

    def list_work(self, instance_id: str, *, limit: int = 1000) -> Awaitable[list[QueuedWork]]:
        """Return the work items in the worker queue for the instance, in queue order."""
        self._check_instance("list_work", instance_id)
        validation.check_number(limit, "limit", minimum=1)
        return self._list_work(instance_id, limit)

    @abstractmethod
    def _list_work(self, instance_id: str, limit: int) -> Awaitable[list[QueuedWork]]: ...

    def list_dead_letters(self, *, limit: int = 1000) -> Awaitable[list[DeadLetter]]:
        """Return messages for which no instance appeared, oldest first."""
        self._require_open("list_dead_letters")
        validation.check_number(limit, "limit", minimum=1)
        return self._list_dead_letters(limit)

    @abstractmethod
    def _list_dead_letters(self, limit: int) -> Awaitable[list[DeadLetter]]: ...

    def requeue_dead_letter(self, letter_id: int) -> Awaitable[None]:
        """Put it back into the queue as a fresh message. Errors: NotFound."""
        self._require_open("requeue_dead_letter")
        return self._requeue_dead_letter(letter_id)

    @abstractmethod
    def _requeue_dead_letter(self, letter_id: int) -> Awaitable[None]: ...

    def delete_dead_letter(self, letter_id: int) -> Awaitable[None]:
        """Drop it for good. Errors: NotFound."""
        self._require_open("delete_dead_letter")
        return self._delete_dead_letter(letter_id)

    @abstractmethod
    def _delete_dead_letter(self, letter_id: int) -> Awaitable[None]: ...

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
        """Suspend these, so that they start no more children while the tree is deleted."""
        for instance_id in instance_ids:
            with suppress(InstanceFinished, NotFound):
                await self.suspend_instance(instance_id)

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
        self._require_open("delete_instances_atomic")
        named = tuple(check_id(each, "instance id") for each in instance_ids)
        for each in named:
            self._require_sound("delete_instances_atomic", each)
        return self._delete_instances_atomic(named, force=force)

    @abstractmethod
    def _delete_instances_atomic(
        self, instance_ids: tuple[str, ...], *, force: bool
    ) -> Awaitable[DeleteResult]: ...

    async def delete_instance_bulk(
        self, query: InstanceQuery, *, limit: int | None = None
    ) -> DeleteResult:
        """Delete finished roots that fit, oldest first, each with its tree in one transaction.

        Running ones, children and unknown ids are skipped, and so is a tree with a running
        descendant. ``instance_ids=()`` fits nothing; ``limit`` counts roots (None: all).
        """
        self._require_open("delete_instance_bulk")
        validation.check_bulk_limit(limit)
        deleted, roots = DeleteResult(), 0
        async for root_id in self._oldest(query, finished_roots=True):
            result = await self._delete_finished_tree(root_id, query.completed_before_ms)
            deleted = deleted.plus(result)
            roots += bool(result.instances)
            if roots == limit:
                break
        return deleted

    @abstractmethod
    def _delete_finished_tree(
        self, root_id: str, completed_before_ms: int | None
    ) -> Awaitable[DeleteResult]:
        """Delete a root with its tree, atomically.

        Return an empty result, and delete nothing, if it is no root, if one of the tree has not
        ended, if there is none, or if the root was not completed before that time: it may have been
        restarted since it was listed.
        """

    async def _oldest(self, query: InstanceQuery, *, finished_roots: bool) -> AsyncIterator[str]:
        """Yield the ids of instances that fit and have begun, oldest first."""
        plain = InstanceQuery(
            instance_ids=query.instance_ids, completed_before=query.completed_before
        )
        chunks: list[tuple[str, ...] | None] = [query.instance_ids]
        if query != plain:
            # A store finds the oldest by these two conditions only; all others need a listing.
            if finished_roots:
                query = _may_have_ended(query)
            ids = (await self._list_ids(query))[::-1]
            chunks = [tuple(ids[start : start + _PAGE]) for start in range(0, len(ids), _PAGE)]
        for chunk in chunks:
            after = _BEFORE_ALL
            while True:
                page = await self._list_oldest(
                    chunk, query.completed_before_ms, after, _PAGE, finished_roots=finished_roots
                )
                for after in page:
                    yield after[1]
                if len(page) < _PAGE:
                    break

    @abstractmethod
    def _list_oldest(
        self,
        instance_ids: tuple[str, ...] | None,
        completed_before_ms: int | None,
        after: tuple[int, str],
        limit: int,
        *,
        finished_roots: bool,
    ) -> Awaitable[list[tuple[int, str]]]:
        """Return creation time and id of instances that have begun, oldest first.

        Only those with one of the ids, and only those completed before that time, if given.
        ``after`` is the last entry of the page before. With ``finished_roots`` only roots whose
        current execution has ended; a tree may still have a running descendant.
        """

    def prune_executions(self, instance_id: str, options: PruneOptions) -> Awaitable[PruneResult]:
        """Drop past executions of one instance, atomically. Errors: NotFound.

        Never the current one, never a running one; ``keep_last`` None, 0 and 1 mean the same;
        state and custom status stay.
        """
        self._check_instance("prune_executions", instance_id)
        validation.check_prune_options(options)
        return self._prune_executions(instance_id, options)

    @abstractmethod
    def _prune_executions(
        self, instance_id: str, options: PruneOptions
    ) -> Awaitable[PruneResult]: ...

    async def prune_executions_bulk(
        self, query: InstanceQuery, options: PruneOptions, *, limit: int | None = None
    ) -> PruneResult:
        """Prune instances that fit, running ones and children included, oldest first.

        Each is pruned in a transaction of its own. ``limit`` counts instances (None: all).
        """
        self._require_open("prune_executions_bulk")
        validation.check_prune_options(options)
        validation.check_bulk_limit(limit)
        pruned = PruneResult()
        async for instance_id in self._oldest(query, finished_roots=False):
            with suppress(NotFound):  # it was deleted meanwhile
                pruned = pruned.plus(await self.prune_executions(instance_id, options))
            if pruned.instances_processed == limit:
                break
        return pruned

    # --- the store

    def get_system_metrics(self) -> Awaitable[SystemMetrics]:
        """Totals over the store."""
        self._require_open("get_system_metrics")
        return self._get_system_metrics()

    @abstractmethod
    def _get_system_metrics(self) -> Awaitable[SystemMetrics]: ...

    def get_store_info(self) -> Awaitable[StoreInfo]:
        """Return the location of the data and the versions of its format."""
        self._require_open("get_store_info")
        return self._get_store_info()

    @abstractmethod
    def _get_store_info(self) -> Awaitable[StoreInfo]: ...

    def register_worker(self, worker: WorkerInfo, ttl_ms: int) -> Awaitable[None]:
        """Announce a runtime, again before ``ttl_ms`` have passed; 0 removes it."""
        self._require_open("register_worker")
        validation.check_worker(worker, ttl_ms)
        return self._register_worker(worker, ttl_ms)

    @abstractmethod
    def _register_worker(self, worker: WorkerInfo, ttl_ms: int) -> Awaitable[None]: ...

    def list_workers(self) -> Awaitable[list[WorkerInfo]]:
        """Runtimes that announced themselves and have not lapsed, by id."""
        self._require_open("list_workers")
        return self._list_workers()

    @abstractmethod
    def _list_workers(self) -> Awaitable[list[WorkerInfo]]: ...

    def export_instance(self, instance_id: str) -> Awaitable[InstanceSnapshot]:
        """Everything about the instance in one consistent read. Errors: NotFound."""
        self._check_instance("export_instance", instance_id)
        return self._export_instance(instance_id)

    @abstractmethod
    def _export_instance(self, instance_id: str) -> Awaitable[InstanceSnapshot]: ...

    def import_instance(
        self, snapshot: InstanceSnapshot, *, replace: bool = False
    ) -> Awaitable[None]:
        """Write the snapshot, atomically; queue positions are new, their order is kept.

        Errors: AlreadyExists unless ``replace``; InvalidValue for a part that belongs to another
        instance, a body that is not what its envelope says, and a time that no calendar has.
        """
        self._require_open("import_instance")
        validation.check_snapshot(snapshot)
        self._require_sound("import_instance", snapshot.instance_id)
        return self._import_instance(snapshot, replace=replace)

    @abstractmethod
    def _import_instance(self, snapshot: InstanceSnapshot, *, replace: bool) -> Awaitable[None]: ...

    def mark_moved(self, location: str | None) -> Awaitable[None]:
        """Refuse to be opened from now on (StoreMoved), pointing at the new place; None undoes it.

        Effect: no handle writes any more, also one that was open before, in any process. Every verb
        that would change something fails with StoreMoved, except this one. A write is either
        committed before the mark, and seen by reads that begin after it, or refused.
        Handles that are open can still read. ``open`` of a marked store by tools is possible with
        the provider's ``allow_moved=True``.
        """
        self._require_open("mark_moved")
        validation.check_text(location, "location")
        return self._mark_moved(location)

    @abstractmethod
    def _mark_moved(self, location: str | None) -> Awaitable[None]: ...


def _may_have_ended(query: InstanceQuery) -> InstanceQuery:
    """Narrow a query to roots that may have ended, also while they are Blocked or Paused."""
    statuses = frozenset(Status if query.statuses is None else query.statuses)
    return replace(query, statuses=statuses - {Status.PENDING, Status.RUNNING}, roots_only=True)


async def _page_of(listing: Awaitable[list[InstanceInfo]], limit: int) -> InstancePage:
    """Make a page of the first instances; one more of them shows that there is another page."""
    found = await listing
    if len(found) <= limit:
        return InstancePage(instances=tuple(found), next_cursor=None)
    last = found[limit - 1]
    return InstancePage(
        instances=tuple(found[:limit]),
        next_cursor=rules.encode_cursor(last.created_at_ms, last.instance_id),
    )
