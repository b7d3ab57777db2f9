"""Administration through a client: the verbs of the provider, with decoded values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.arguments import (
    check_flag,
    check_kind,
    check_moment,
    check_number,
    check_string,
    whole_milliseconds,
)
from perdure.client.instance import InstanceStatus, view_of
from perdure.client.moving import export_lines, trees_of
from perdure.client.rerun import fresh_id, rerun
from perdure.client.retry import Retried, retry
from perdure.client.terminate import operator_lock
from perdure.errors import InstanceStillRunning
from perdure.limits import BULK_INSTANCES_MAX, PAGE_ITEMS_MAX, check_id
from perdure.providers.records import (
    DeadLetter,
    DeleteResult,
    ExecutionInfo,
    InstanceInfo,
    InstanceQuery,
    InstanceTree,
    KvClear,
    PruneOptions,
    PruneResult,
    QueueDepths,
    StoreInfo,
    SystemMetrics,
    TurnCommit,
    WorkerInfo,
)

if TYPE_CHECKING:
    import datetime
    from collections.abc import AsyncIterator, Sequence

    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider


class Administration:
    """The verbs of operators. The verbs of the provider itself are at ``provider.admin``."""

    def __init__(self, provider: Provider, codec: Codec, clock: Clock) -> None:
        self._provider = provider
        self._admin = provider.admin
        self._codec = codec
        self._clock = clock

    async def page(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[InstanceStatus], str | None]:
        """Return the instances that fit, newest first, and the cursor of the next page.

        The cursor of the last page is None.
        """
        _check_query(InstanceQuery() if query is None else query)
        check_number(limit, "limit of a page", minimum=1, maximum=PAGE_ITEMS_MAX)
        if cursor is not None:
            check_string(cursor, "cursor")
        page = await self._admin.list_instances(query, cursor=cursor, limit=limit)
        return [view_of(info, self._codec) for info in page.instances], page.next_cursor

    async def instances(self, query: InstanceQuery | None = None) -> AsyncIterator[InstanceStatus]:
        """Iterate over all instances that fit, newest first, page by page."""
        _check_query(InstanceQuery() if query is None else query)
        async for info in read_instances(self._admin, query):
            yield view_of(info, self._codec)

    async def count(self, query: InstanceQuery | None = None) -> int:
        """Return the number of instances that fit."""
        _check_query(InstanceQuery() if query is None else query)
        return await self._admin.count_instances(query)

    async def executions(self, instance_id: str) -> list[ExecutionInfo]:
        """Return the executions of the instance, oldest first; none before its first turn.

        Raises NotFound for an unknown id.
        """
        ids = await self._admin.list_executions(instance_id)
        if not ids:
            await self._admin.get_instance_info(instance_id)  # raises NotFound for an unknown id
        return [await self._admin.get_execution_info(instance_id, each) for each in ids]

    async def tree(self, instance_id: str) -> InstanceTree:
        """Return the instance with all its sub-orchestrations."""
        return await self._admin.get_instance_tree(instance_id)

    async def delete(self, instance_id: str, *, force: bool = False) -> DeleteResult:
        """Delete a root instance with its tree; with ``force`` even while it runs."""
        check_flag(force, "force")
        return await self._admin.delete_instance(instance_id, force=force)

    async def delete_many(self, query: InstanceQuery, *, limit: int | None = None) -> DeleteResult:
        """Delete the ended root instances that fit, each with its tree.

        ``limit`` is the largest number of roots to delete; the oldest go first.
        """
        _check_query(query)
        if limit is not None:
            check_number(limit, "limit", minimum=1, maximum=BULK_INSTANCES_MAX)
        return await self._admin.delete_instance_bulk(query, limit=limit)

    async def prune(self, instance_id: str, options: PruneOptions | None = None) -> PruneResult:
        """Drop past executions of an instance. The current one and the state stay."""
        return await self._admin.prune_executions(instance_id, _checked_options(options))

    async def prune_many(
        self, query: InstanceQuery, options: PruneOptions | None = None
    ) -> PruneResult:
        """Drop past executions of every instance that fits, running ones and children included."""
        _check_query(query)
        return await self._admin.prune_executions_bulk(query, _checked_options(options))

    async def prune_state(self, instance_id: str, *, updated_before: datetime.datetime) -> int:
        """Drop the keys of an ended instance's state that were not written since; count them.

        Raises InstanceStillRunning for others: their code has the state in memory, and deletes keys
        itself with ``del state[key]``.
        """
        check_moment(updated_before, "updated_before")
        bound_ms = whole_milliseconds(updated_before, round_up=True)
        check_id(instance_id, "id")
        async with operator_lock(self._provider, instance_id) as (item, token):
            info = await self._admin.get_instance_info(instance_id)
            if not info.status.is_final:
                raise InstanceStillRunning(
                    f"{instance_id!r} is {info.status}, and its code has its state in memory; "
                    "delete keys there with del state[key], or wait until it has ended"
                )
            values = await self._provider.get_kv_all_values(instance_id)
            old = [key for key, entry in values.items() if entry.updated_at_ms < bound_ms]
            commit = TurnCommit(
                execution_id=item.execution_id,
                kv_changes=tuple(KvClear(key=key) for key in old),
                after_event_id=item.history[-1].event_id if item.history else 0,
            )
            await self._provider.ack_orchestration_item(token, commit)
        return len(old)

    async def retry(self, instance_id: str, *, leave_out: str | None = None) -> Retried | None:
        """Let an instance go on from where it failed, was cancelled or was terminated.

        Finished steps stay finished. A Blocked or Paused instance continues, and None is returned.
        Raises InstanceFinished for a Completed instance, InstanceStillRunning for others.

        ``leave_out``: the name of an event or message that did not fit; the code does not get the
        last of this name that it received. Raises InvalidValue if it received none.
        """
        if leave_out is not None:
            check_string(leave_out, "leave_out")
        checked = check_id(instance_id, "id")
        return await retry(self._provider, checked, self._clock, leave_out=leave_out)

    async def rerun(
        self,
        instance_id: str,
        *,
        id: str | None = None,  # noqa: A002
        args: Sequence[Any] | None = None,
        version: str | None = None,
    ) -> str:
        """Start the orchestration again as a new instance, and return its id.

        Without ``args`` it gets the same arguments, without ``version`` the latest version. Without
        ``id`` the new id begins with the old one.
        """
        new_id = fresh_id(check_id(instance_id, "id")) if id is None else id
        given = None if args is None else self._codec.encode(tuple(args), where="args of a rerun")
        await rerun(self._provider, instance_id, new_id, input=given, version=version)
        return new_id

    async def export(self, *instance_ids: str) -> AsyncIterator[str]:
        """Yield the lines that ``perdure export`` writes: the instances with their children.

        ``perdure import`` reads them into any store. Raises NotFound for an unknown id, and
        InstanceStillRunning if one of several went on meanwhile.
        """
        chosen = await trees_of(self._admin, instance_ids)
        async for line in export_lines(self._admin, chosen):
            yield line

    async def metrics(self) -> SystemMetrics:
        """Return totals over the store."""
        return await self._admin.get_system_metrics()

    async def queue_depths(self) -> QueueDepths:
        """Return the numbers of queued messages and activities."""
        return await self._admin.get_queue_depths()

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the messages whose instance never started."""
        return await self._admin.list_dead_letters()

    async def requeue_dead_letter(self, letter_id: int) -> None:
        """Put a dead letter back into the queue."""
        await self._admin.requeue_dead_letter(letter_id)

    async def delete_dead_letter(self, letter_id: int) -> None:
        """Delete a dead letter."""
        await self._admin.delete_dead_letter(letter_id)

    async def workers(self) -> list[WorkerInfo]:
        """Return the runtimes that serve this store."""
        return await self._admin.list_workers()

    async def store(self) -> StoreInfo:
        """Return the location and the format of the store."""
        return await self._admin.get_store_info()


async def read_instances(
    admin: ProviderAdmin, query: InstanceQuery | None = None, page_items: int = PAGE_ITEMS_MAX
) -> AsyncIterator[InstanceInfo]:
    """Iterate over all instances that fit, newest first, page by page."""
    cursor: str | None = None
    while True:
        page = await admin.list_instances(query, cursor=cursor, limit=page_items)
        for info in page.instances:
            yield info
        if (cursor := page.next_cursor) is None:
            return


async def read_by_ids(admin: ProviderAdmin, ids: Sequence[str]) -> AsyncIterator[InstanceInfo]:
    """Iterate over the instances of these ids that exist."""
    for first in range(0, len(ids), PAGE_ITEMS_MAX):
        query = InstanceQuery(instance_ids=tuple(ids[first : first + PAGE_ITEMS_MAX]))
        async for info in read_instances(admin, query):
            yield info


def _check_query(query: object) -> None:
    check_kind(query, InstanceQuery, "query", "an InstanceQuery(...)")


def _checked_options(options: PruneOptions | None) -> PruneOptions:
    if options is None:
        return PruneOptions()
    check_kind(options, PruneOptions, "options", "PruneOptions(...)")
    return options
