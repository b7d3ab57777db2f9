"""Administration through a client: the verbs of the provider, with decoded values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.arguments import check_flag, check_kind, check_number, check_string
from perdure.client.instance import InstanceStatus, view_of
from perdure.limits import BULK_INSTANCES_MAX, PAGE_ITEMS_MAX
from perdure.providers.records import (
    DeleteResult,
    InstanceQuery,
    PruneOptions,
    PruneResult,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perdure.codec import Codec
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.records import (
        DeadLetter,
        ExecutionInfo,
        InstanceInfo,
        InstanceTree,
        QueueDepths,
        StoreInfo,
        SystemMetrics,
        WorkerInfo,
    )


class Administration:
    """The verbs of operators. The verbs of the provider itself are at ``provider.admin``."""

    def __init__(self, admin: ProviderAdmin, codec: Codec) -> None:
        self._admin = admin
        self._codec = codec

    async def page(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[InstanceStatus], str | None]:
        """Return the instances that fit, newest first, and the cursor of the next page.

        The cursor of the last page is None.
        """
        if query is not None:
            _check_query(query)
        check_number(limit, "limit of a page", minimum=1, maximum=PAGE_ITEMS_MAX)
        if cursor is not None:
            check_string(cursor, "cursor")
        page = await self._admin.list_instances(query, cursor=cursor, limit=limit)
        return [view_of(info, self._codec) for info in page.instances], page.next_cursor

    async def instances(self, query: InstanceQuery | None = None) -> AsyncIterator[InstanceStatus]:
        """Iterate over all instances that fit, newest first, page by page."""
        if query is not None:
            _check_query(query)
        async for info in read_instances(self._admin, query):
            yield view_of(info, self._codec)

    async def count(self, query: InstanceQuery | None = None) -> int:
        """Return the number of instances that fit."""
        if query is not None:
            _check_query(query)
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
    admin: ProviderAdmin, query: InstanceQuery | None = None
) -> AsyncIterator[InstanceInfo]:
    """Iterate over all instances that fit, newest first, page by page."""
    cursor: str | None = None
    while True:
        page = await admin.list_instances(query, cursor=cursor, limit=PAGE_ITEMS_MAX)
        for info in page.instances:
            yield info
        if (cursor := page.next_cursor) is None:
            return


def _check_query(query: object) -> None:
    check_kind(query, InstanceQuery, "query", "an InstanceQuery(...)")


def _checked_options(options: PruneOptions | None) -> PruneOptions:
    if options is None:
        return PruneOptions()
    check_kind(options, PruneOptions, "options", "PruneOptions(...)")
    return options
