"""Administration through a client: the provider's verbs with decoded values and friendly input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.arguments import check_flag, check_kind, check_number, check_string
from perdure.client.view import InstanceStatus, view_of
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
        _check_query(query)
        check_number(limit, "limit of a page", minimum=1, maximum=PAGE_ITEMS_MAX)
        if cursor is not None:
            check_string(cursor, "cursor")
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
        _check_query(query)
        return await self._admin.count_instances(query)

    async def executions(self, instance_id: str) -> list[ExecutionInfo]:
        """Every execution of the instance, oldest first; none before it has begun."""
        ids = await self._admin.list_executions(instance_id)
        if not ids:
            await self._admin.get_instance_info(instance_id)  # NotFound, if nobody knows it
        return [await self._admin.get_execution_info(instance_id, each) for each in ids]

    async def tree(self, instance_id: str) -> InstanceTree:
        return await self._admin.get_instance_tree(instance_id)

    async def delete(self, instance_id: str, *, force: bool = False) -> DeleteResult:
        """Delete a root with its tree; ``force`` also while it runs."""
        check_flag(force, "force")
        return await self._admin.delete_instance(instance_id, force=force)

    async def delete_many(self, filter: DeleteFilter) -> DeleteResult:  # noqa: A002
        """Delete finished roots that fit, each with its tree: all of them, or up to the limit."""
        _check_filter(filter)
        total = DeleteResult()
        while True:
            done = await self._admin.delete_instance_bulk(filter)
            total = total.plus(done)
            if filter.limit is not None or not done.instances:
                return total

    async def prune(self, instance_id: str, options: PruneOptions | None = None) -> PruneResult:
        """Drop past executions of an instance; the current one and its state stay."""
        return await self._admin.prune_executions(instance_id, _checked_options(options))

    async def prune_many(
        self,
        filter: DeleteFilter,  # noqa: A002
        options: PruneOptions | None = None,
    ) -> PruneResult:
        _check_filter(filter)
        return await self._admin.prune_executions_bulk(filter, _checked_options(options))

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


def _check_query(query: object) -> None:
    if query is not None:
        check_kind(query, InstanceQuery, "query", "an InstanceQuery(...)")


def _check_filter(filter: object) -> None:  # noqa: A002
    check_kind(filter, DeleteFilter, "filter", "a DeleteFilter(...)")


def _checked_options(options: PruneOptions | None) -> PruneOptions:
    if options is None:
        return PruneOptions()
    check_kind(options, PruneOptions, "options", "PruneOptions(...)")
    return options
