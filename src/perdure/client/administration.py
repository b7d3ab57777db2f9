"""Administration through a client: the provider's verbs with decoded values and friendly input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.client.view import InstanceStatus, view_of
from perdure.errors import InvalidValue
from perdure.limits import PAGE_ITEMS_MAX
from perdure.providers.items import (
    DeleteFilter,
    DeleteResult,
    InstanceQuery,
    PruneOptions,
    PruneResult,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perdure.codec import Codec
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.items import (
        DeadLetter,
        ExecutionInfo,
        InstanceTree,
        QueueDepths,
        StoreInfo,
        SystemMetrics,
        WorkerInfo,
    )


class Administration:
    """Everything that operators do. The raw verbs are at ``provider.admin()``."""

    def __init__(self, admin: ProviderAdmin, codec: Codec) -> None:
        self._admin = admin
        self._codec = codec

    async def page(
        self, query: InstanceQuery | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[InstanceStatus], str | None]:
        """Instances that fit, newest first, and the cursor of the next page (None: last page)."""
        if not 1 <= limit <= PAGE_ITEMS_MAX:
            raise InvalidValue(f"limit is {limit}; a page holds 1 to {PAGE_ITEMS_MAX} instances")
        page = await self._admin.list_instances(query, cursor=cursor, limit=limit)
        return [view_of(info, self._codec) for info in page.instances], page.next_cursor

    async def instances(self, query: InstanceQuery | None = None) -> AsyncIterator[InstanceStatus]:
        """All instances that fit, newest first, read page by page."""
        cursor: str | None = None
        while True:
            views, cursor = await self.page(query, cursor=cursor, limit=PAGE_ITEMS_MAX)
            for view in views:
                yield view
            if cursor is None:
                return

    async def count(self, query: InstanceQuery | None = None) -> int:
        return await self._admin.count_instances(query)

    async def executions(self, instance_id: str) -> list[ExecutionInfo]:
        """Every execution of the instance, oldest first."""
        return [
            await self._admin.get_execution_info(instance_id, execution_id)
            for execution_id in await self._admin.list_executions(instance_id)
        ]

    async def tree(self, instance_id: str) -> InstanceTree:
        return await self._admin.get_instance_tree(instance_id)

    async def delete(self, instance_id: str, *, force: bool = False) -> DeleteResult:
        """Delete a root with its tree; ``force`` also while it runs."""
        return await self._admin.delete_instance(instance_id, force=force)

    async def delete_many(self, filter: DeleteFilter) -> DeleteResult:  # noqa: A002
        """Delete finished roots that fit, each with its tree: all of them, or up to the limit."""
        total = DeleteResult()
        while True:
            done = await self._admin.delete_instance_bulk(filter)
            total = total.plus(done)
            if filter.limit is not None or not done.instances:
                return total

    async def prune(self, instance_id: str, options: PruneOptions | None = None) -> PruneResult:
        """Drop past executions of an instance; the current one and its state stay."""
        return await self._admin.prune_executions(instance_id, options or PruneOptions())

    async def prune_many(
        self,
        filter: DeleteFilter,  # noqa: A002
        options: PruneOptions | None = None,
    ) -> PruneResult:
        return await self._admin.prune_executions_bulk(filter, options or PruneOptions())

    async def metrics(self) -> SystemMetrics:
        return await self._admin.get_system_metrics()

    async def queue_depths(self) -> QueueDepths:
        return await self._admin.get_queue_depths()

    async def dead_letters(self) -> list[DeadLetter]:
        return await self._admin.list_dead_letters()

    async def requeue_dead_letter(self, letter_id: int) -> None:
        await self._admin.requeue_dead_letter(letter_id)

    async def delete_dead_letter(self, letter_id: int) -> None:
        await self._admin.delete_dead_letter(letter_id)

    async def workers(self) -> list[WorkerInfo]:
        """Runtimes that serve this store."""
        return await self._admin.list_workers()

    async def store(self) -> StoreInfo:
        return await self._admin.get_store_info()
