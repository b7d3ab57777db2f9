"""Rules about administration: control, deletion, pruning, moving, looking, and the store itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from perdure.client.formats import utc_time
from perdure.conformance._machine import plans
from perdure.conformance._machine.comparison import MODEL, SUBJECT, Side, action
from perdure.conformance._machine.working import WorkRules
from perdure.conformance.observation import list_whole
from perdure.errors import NotFound
from perdure.model.status import Status
from perdure.providers.records import (
    HistoryRecord,
    InstanceQuery,
    OrchestrationFilter,
    OrchestratorMessage,
    PruneOptions,
    WorkerInfo,
)

if TYPE_CHECKING:
    from datetime import datetime

instance_lists = st.lists(plans.instances, max_size=3)
small_executions = st.integers(1, 2)
names = st.sampled_from((None, None, *plans.NAMES))
bounds = st.sampled_from((None, None, -1, 0, 5))
"""A time around now, in ticks, moved by half of one so that clocks need not agree exactly."""


class AdminRules(WorkRules):
    """Adds administration and the life of the store."""

    # --- control

    @action(1, instance_id=plans.instances)
    def suspend(self, instance_id: str) -> None:
        self.run(
            self.ask("suspend_instance", lambda side: side.admin.suspend_instance(instance_id))
        )

    @action(1, instance_id=plans.instances)
    def resume(self, instance_id: str) -> None:
        self.run(self.ask("resume_instance", lambda side: side.admin.resume_instance(instance_id)))

    @action(1, instance_id=plans.instances, lock=plans.lock_ticks)
    def lock_instance(self, instance_id: str, lock: int) -> None:
        self.run(self._lock_instance(instance_id, lock))

    async def _lock_instance(self, instance_id: str, lock: int) -> None:
        locked = await self.ask(
            "lock_instance", lambda side: side.admin.lock_instance(instance_id, self.ticks(lock))
        )
        if locked is not None:
            self._hold(*locked)

    # --- deletion and pruning

    @action(2, instance_id=plans.instances, force=st.sampled_from((False, False, True)))
    def delete(self, instance_id: str, force: bool) -> None:
        self.run(
            self.ask(
                "delete_instance",
                lambda side: side.admin.delete_instance(instance_id, force=force),
            )
        )

    @action(1, instance_ids=instance_lists, force=st.booleans())
    def delete_several(self, instance_ids: list[str], force: bool) -> None:
        self.run(
            self.ask(
                "delete_instances_atomic",
                lambda side: side.admin.delete_instances_atomic(instance_ids, force=force),
            )
        )

    @action(1, instance_ids=st.one_of(st.none(), instance_lists), name=names, bound=bounds)
    def delete_bulk(
        self, instance_ids: list[str] | None, name: str | None, bound: int | None
    ) -> None:
        self.run(
            self.ask(
                "delete_instance_bulk",
                lambda side: side.admin.delete_instance_bulk(
                    self._bulk_query(side, instance_ids, name, bound)
                ),
            )
        )

    @action(
        2,
        instance_id=plans.instances,
        keep_last=st.sampled_from((None, 0, 1, 2)),
        bound=bounds,
    )
    def prune(self, instance_id: str, keep_last: int | None, bound: int | None) -> None:
        self.run(
            self.ask(
                "prune_executions",
                lambda side: side.admin.prune_executions(
                    instance_id,
                    PruneOptions(keep_last=keep_last, completed_before=self._bound(side, bound)),
                ),
            )
        )

    @action(1, instance_ids=st.one_of(st.none(), instance_lists), name=names, bound=bounds)
    def prune_bulk(
        self, instance_ids: list[str] | None, name: str | None, bound: int | None
    ) -> None:
        self.run(
            self.ask(
                "prune_executions_bulk",
                lambda side: side.admin.prune_executions_bulk(
                    self._bulk_query(side, instance_ids, name, bound), PruneOptions()
                ),
            )
        )

    def _bulk_query(
        self, side: Side, instance_ids: list[str] | None, name: str | None, bound: int | None
    ) -> InstanceQuery:
        return InstanceQuery(
            name=name,
            instance_ids=None if instance_ids is None else tuple(instance_ids),
            completed_before=self._bound(side, bound),
        )

    def _bound(self, side: Side, ticks: int | None) -> datetime | None:
        if ticks is None:
            return None
        return utc_time(side.now_ms + self.ticks(ticks) + self.tick_ms // 2)

    # --- history by hand

    @action(
        1,
        instance_id=plans.instances,
        execution=small_executions,
        event_ids=st.lists(st.integers(0, 4), min_size=1, max_size=2),
    )
    def append(self, instance_id: str, execution: int, event_ids: list[int]) -> None:
        records = [HistoryRecord(event_id=number, data="{}") for number in event_ids]
        self.run(
            self.ask(
                "append_with_execution",
                lambda side: side.handle.append_with_execution(instance_id, execution, records),
            )
        )

    # --- moving

    @action(2, instance_id=plans.instances)
    def export(self, instance_id: str) -> None:
        self.run(self._export(instance_id))

    async def _export(self, instance_id: str) -> None:
        # Whether the snapshots agree is part of comparing the whole store.
        pair: list[Any] = []
        for side in self.sides:
            try:
                pair.append(await side.admin.export_instance(instance_id))
            except NotFound:
                return
        self.snapshots = [(pair[MODEL], pair[SUBJECT]), *self.snapshots][:3]

    @action(2, pick=plans.picks, replace=st.booleans(), crossed=st.booleans())
    def import_snapshot(self, pick: int, replace: bool, crossed: bool) -> None:
        if not self.snapshots:
            return
        pair = self.snapshots[pick % len(self.snapshots)]
        self.run(
            self.ask(
                "import_instance",
                lambda side: side.admin.import_instance(
                    pair[1 - side.index if crossed and self.is_exact else side.index],
                    replace=replace,
                ),
            )
        )

    # --- dead letters and workers

    @action(2, instance_id=plans.instances, requeue=st.booleans())
    def decide_about_a_dead_letter(self, instance_id: str, requeue: bool) -> None:
        self.run(self._decide(instance_id, requeue=requeue))

    async def _decide(self, instance_id: str, *, requeue: bool) -> None:
        letters = [await side.admin.list_dead_letters() for side in self.sides]
        if not letters[MODEL]:
            await self._let_a_message_die(instance_id)
            return

        async def decide(side: Side) -> None:
            chosen = letters[side.index][0].letter_id
            if requeue:
                await side.admin.requeue_dead_letter(chosen)
            else:
                await side.admin.delete_dead_letter(chosen)

        await self.ask("deciding about a dead letter", decide)

    async def _let_a_message_die(self, instance_id: str) -> None:
        """Let the orphan become a dead letter if its instance is unknown; fetch nothing else."""
        message = OrchestratorMessage(instance_id=instance_id, kind="event", body="too late")
        await self.ask(
            "enqueue_for_orchestrator",
            lambda side: side.handle.enqueue_for_orchestrator(message),
        )
        await self._advance(self.ticks(61))
        nothing = OrchestrationFilter(framework_versions=())
        await self.ask(
            "fetch_orchestration_item",
            lambda side: side.handle.fetch_orchestration_item(self.tick_ms, 0, nothing),
        )

    @action(1, worker_id=plans.owners, ttl=st.sampled_from((0, 1, 5)), busy=st.integers(0, 2))
    def register_worker(self, worker_id: str, ttl: int, busy: int) -> None:
        worker = WorkerInfo(
            worker_id=worker_id,
            host="host",
            process_id=1,
            started_at_ms=1,
            framework_version="1.0.0",
            busy=busy,
        )
        self.run(
            self.ask(
                "register_worker",
                lambda side: side.admin.register_worker(worker, self.ticks(ttl)),
            )
        )

    # --- looking

    @action(
        1,
        instance_id=plans.instances,
        execution=small_executions,
        after=st.integers(0, 2),
        limit=st.sampled_from((None, 1, 2)),
        seen=st.integers(0, 2),
        key=st.sampled_from(plans.KEYS),
    )
    def look_at_an_instance(
        self, instance_id: str, execution: int, after: int, limit: int | None, seen: int, key: str
    ) -> None:
        self.run(self._look(instance_id, execution, after, limit, seen, key))

    async def _look(
        self, instance_id: str, execution: int, after: int, limit: int | None, seen: int, key: str
    ) -> None:
        await self.ask(
            "read_with_execution",
            lambda side: side.handle.read_with_execution(
                instance_id, execution, after_event_id=after, limit=limit
            ),
        )
        await self.ask(
            "get_custom_status", lambda side: side.handle.get_custom_status(instance_id, seen)
        )
        await self.ask("get_kv_value", lambda side: side.handle.get_kv_value(instance_id, key))
        await self.ask("get_instance_info", lambda side: side.admin.get_instance_info(instance_id))
        await self.ask("get_parent_id", lambda side: side.admin.get_parent_id(instance_id))
        await self.ask("get_instance_tree", lambda side: side.admin.get_instance_tree(instance_id))
        await self.ask("list_executions", lambda side: side.admin.list_executions(instance_id))
        await self.ask(
            "latest_execution_id", lambda side: side.admin.latest_execution_id(instance_id)
        )
        await self.ask(
            "get_execution_info",
            lambda side: side.admin.get_execution_info(instance_id, execution),
        )
        await self.ask("list_children", lambda side: self._children(side, instance_id))

    async def _children(self, side: Side, instance_id: str) -> list[str]:
        children = await side.admin.list_children(instance_id)
        # Born in the same millisecond, they may come in either order on different clocks.
        return children if self.is_exact else sorted(children)

    @action(
        1,
        statuses=st.one_of(st.none(), st.frozensets(st.sampled_from(tuple(Status)), max_size=3)),
        name=names,
        roots_only=st.booleans(),
        parent=st.sampled_from((None, None, "a")),
        text=st.sampled_from((None, None, "SHOP", "out", "busy", "%")),
        bound=bounds,
        page_size=st.integers(1, 3),
    )
    def list_instances(
        self,
        statuses: frozenset[Status] | None,
        name: str | None,
        roots_only: bool,
        parent: str | None,
        text: str | None,
        bound: int | None,
        page_size: int,
    ) -> None:
        def query(side: Side) -> InstanceQuery:
            return InstanceQuery(
                statuses=statuses,
                name=name,
                roots_only=roots_only,
                parent_instance_id=parent,
                text=text,
                created_before=self._bound(side, bound),
            )

        self.run(
            self.ask(
                "list_instances",
                lambda side: list_whole(side.admin, query(side), page_size=page_size),
            )
        )
        self.run(self.ask("count_instances", lambda side: side.admin.count_instances(query(side))))

    # --- the store

    @action(3, ticks=plans.jump_ticks)
    def let_time_pass(self, ticks: int) -> None:
        self.run(self._advance(self.ticks(ticks)))

    @action(1)
    def reopen(self) -> None:
        if self.declared.durable:
            self.run(self._reopen())

    async def _reopen(self) -> None:
        subject = self.sides[SUBJECT]
        await subject.store.reopen()
        subject.handle = subject.store.provider
        subject.handles = [subject.handle]

    @action(1)
    def use_another_handle(self) -> None:
        if self.declared.several_handles:
            self.run(self._use_another_handle())

    async def _use_another_handle(self) -> None:
        subject = self.sides[SUBJECT]
        if len(subject.handles) == 1:
            subject.handles.append(await subject.store.second())
        first, second = subject.handles
        subject.handle = second if subject.handle is first else first
