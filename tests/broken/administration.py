"""Faults in administration: deletion, pruning, control, listing and moving."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from model import ModelProvider, rules
from model.admin import ModelAdmin
from perdure.providers.records import DeleteResult, InstancePage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.records import (
        InstanceQuery,
        InstanceSnapshot,
        PruneOptions,
        PruneResult,
        QueueDepths,
    )


class _WithBrokenAdmin(ModelProvider):
    admin_class: ClassVar[type[ModelAdmin]]

    @property
    def admin(self) -> ProviderAdmin:
        return self.admin_class(self._store, self._require_open)


class LeavesWorkBehind(_WithBrokenAdmin):
    """A deletion forgets the worker queue: the next instance of that name gets old work."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def delete_instances_atomic(
            self, instance_ids: Sequence[str], *, force: bool = False
        ) -> DeleteResult:
            found = [self._store.instances.get(each) for each in instance_ids]
            left = [
                item.message for each in found if each is not None for item in each.work.values()
            ]
            result = await super().delete_instances_atomic(instance_ids, force=force)
            for message in left:
                self._store.add_work(message, self._store.clock.now_ms())
            return result


class DeletesBetweenExecutions(_WithBrokenAdmin):
    """An instance that has continued as new counts as finished while its start is queued."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def delete_instances_atomic(
            self, instance_ids: Sequence[str], *, force: bool = False
        ) -> DeleteResult:
            found = [self._store.instances.get(each) for each in instance_ids]
            ended = all(
                each is None or (each.current is not None and each.current.status.ends_execution)
                for each in found
            )
            return await super().delete_instances_atomic(instance_ids, force=force or ended)


class OrphansChildren(_WithBrokenAdmin):
    """A parent is deleted although a child was not named."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def delete_instances_atomic(
            self, instance_ids: Sequence[str], *, force: bool = False
        ) -> DeleteResult:
            everybody = {
                member.instance_id: member
                for each in instance_ids
                if (found := self._store.instances.get(each)) is not None
                for member in self._store.tree_of(found)
            }
            hidden = {name: everybody[name] for name in everybody if name not in instance_ids}
            for child in hidden.values():
                child.parent_instance_id = None
                self._store.settle(child, self._store.clock.now_ms())
            return await super().delete_instances_atomic(instance_ids, force=force)


class DeletesOneByOne(_WithBrokenAdmin):
    """A deletion that must be refused has already removed those before."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def delete_instances_atomic(
            self, instance_ids: Sequence[str], *, force: bool = False
        ) -> DeleteResult:
            results = [
                await super(DeletesOneByOne.admin_class, self).delete_instances_atomic(
                    [each], force=force
                )
                for each in instance_ids
            ]
            return DeleteResult(
                instances=sum(result.instances for result in results),
                executions=sum(result.executions for result in results),
                events=sum(result.events for result in results),
                messages=sum(result.messages for result in results),
            )


class DeletesWhatEndedLater(_WithBrokenAdmin):
    """A bulk deletion without ids deletes every finished root, whenever it ended."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def delete_instance_bulk(
            self, query: InstanceQuery, *, limit: int | None = None
        ) -> DeleteResult:
            if query.instance_ids is None:
                query = replace(query, completed_before=None)
            return await super().delete_instance_bulk(query, limit=limit)


class PrunesWhatEndedLater(_WithBrokenAdmin):
    """A bulk pruning prunes every instance, whenever it ended."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def prune_executions_bulk(
            self, query: InstanceQuery, options: PruneOptions, *, limit: int | None = None
        ) -> PruneResult:
            query = replace(query, completed_before=None)
            return await super().prune_executions_bulk(query, options, limit=limit)


class PrunesState(_WithBrokenAdmin):
    """Pruning takes the state along that the pruned executions wrote."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def prune_executions(self, instance_id: str, options: PruneOptions) -> PruneResult:
            result = await super().prune_executions(instance_id, options)
            if result.executions:
                self._store.instances[instance_id].kv_store.clear()
            return result


class PrunesTheCurrentExecution(_WithBrokenAdmin):
    """Keeping none keeps none, not even the current execution."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def prune_executions(self, instance_id: str, options: PruneOptions) -> PruneResult:
            result = await super().prune_executions(instance_id, options)
            if options.keep_last == 0:
                instance = self._store.instances[instance_id]
                instance.executions.clear()
                instance.histories.clear()
            return result


class PagesByTimeAlone(_WithBrokenAdmin):
    """The cursor is a time: instances born in the same moment fall between two pages."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def list_instances(
            self,
            query: InstanceQuery | None = None,
            *,
            cursor: str | None = None,
            limit: int = 100,
        ) -> InstancePage:
            page = await super().list_instances(query, cursor=cursor, limit=limit)
            if page.next_cursor is None:
                return page
            created_at_ms, _ = rules.decode_cursor(page.next_cursor)
            return replace(page, next_cursor=rules.encode_cursor(created_at_ms, ""))


class ListsBesideThePrefix(_WithBrokenAdmin):
    """A prefix selects by its text without the last character."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def list_instances(
            self,
            query: InstanceQuery | None = None,
            *,
            cursor: str | None = None,
            limit: int = 100,
        ) -> InstancePage:
            if query is not None and query.id_prefix is not None:
                query = replace(query, id_prefix=query.id_prefix[:-1] or None)
            return await super().list_instances(query, cursor=cursor, limit=limit)


class SuspendsWithoutTheLock(_WithBrokenAdmin):
    """A suspended instance's holder goes on committing."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def suspend_instance(self, instance_id: str) -> None:
            instance = self._store.instances.get(instance_id)
            lock = None if instance is None else instance.lock
            await super().suspend_instance(instance_id)
            if instance is not None and lock is not None:
                instance.lock = lock
                self._store.locks[lock.token] = instance
                for entry in lock.carried.values():
                    instance.free.remove(entry.key)


class ResumesWithOldAttempts(_WithBrokenAdmin):
    """A poisoned instance that is resumed is poisoned again at once."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def resume_instance(self, instance_id: str) -> None:
            instance = self._store.instances.get(instance_id)
            attempts = (
                {}
                if instance is None
                else {each: entry.attempt_count for each, entry in instance.messages.items()}
            )
            await super().resume_instance(instance_id)
            if instance is not None:
                for message_id, count in attempts.items():
                    instance.messages[message_id].attempt_count = count


class CountsDelayedAsVisible(_WithBrokenAdmin):
    """Timers of next month look like a backlog."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def get_queue_depths(self) -> QueueDepths:
            depths = await super().get_queue_depths()
            queue = depths.orchestrator
            backlog = replace(queue, visible=queue.visible + queue.delayed, delayed=0)
            return replace(depths, orchestrator=backlog)


class ImportsEverythingAtOnce(_WithBrokenAdmin):
    """Imported messages are visible at once, timers too."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def import_instance(
            self,
            snapshot: InstanceSnapshot,
            *,
            replace: bool = False,
        ) -> None:
            await super().import_instance(_visible_at_once(snapshot), replace=replace)


class ExportsTheCurrentExecutionOnly(_WithBrokenAdmin):
    """An export leaves past executions behind."""

    class admin_class(ModelAdmin):  # noqa: N801
        async def export_instance(self, instance_id: str) -> InstanceSnapshot:
            snapshot = await super().export_instance(instance_id)
            return replace(snapshot, executions=snapshot.executions[-1:])


class WritesAfterAMove(ModelProvider):
    """Only a new handle looks at the mark: those that are open go on writing."""

    def _require_writable(self, operation: str) -> None:
        pass


def _visible_at_once(snapshot: InstanceSnapshot) -> InstanceSnapshot:
    messages = tuple(replace(each, visible_at_ms=0) for each in snapshot.messages)
    return replace(snapshot, messages=messages)
