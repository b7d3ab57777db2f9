"""Rules about work items and sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from perdure.conformance._machine import plans
from perdure.conformance._machine.comparison import HeldWork, Side, action
from perdure.conformance._machine.turns import TurnRules
from perdure.providers.records import OrchestratorMessage, SessionFetch, TagFilter, WorkerMessage

if TYPE_CHECKING:
    from perdure.conformance._machine.plans import WorkPlan

session_fetches = st.sampled_from(
    (("w1", False), ("w1", False), ("w2", False), None, ("w1", True), ("w2", True))
)


follow_ups = st.sampled_from(
    ("completion", "none", "retry", "completion", "retry", "foreign", "both")
)


class WorkRules(TurnRules):
    """Adds the worker queue."""

    @action(2, instance_id=plans.instances, plan=plans.work_plans)
    def enqueue_work(self, instance_id: str, plan: WorkPlan) -> None:
        self.run(
            self.ask(
                "enqueue_for_worker",
                lambda side: side.handle.enqueue_for_worker(
                    self.work_item(side, plan, instance_id, 1, None)
                ),
            )
        )

    @action(
        5,
        lock=plans.lock_ticks,
        lease=plans.lock_ticks,
        session=session_fetches,
        tags=plans.tag_filters,
        activities=plans.activity_names,
    )
    def fetch_work(
        self,
        lock: int,
        lease: int,
        session: tuple[str, bool] | None,
        tags: TagFilter | None,
        activities: frozenset[str] | None,
    ) -> None:
        self.run(self._fetch_work(lock, lease, session, tags, activities))

    async def _fetch_work(
        self,
        lock: int,
        lease: int,
        session: tuple[str, bool] | None,
        tags: TagFilter | None,
        activities: frozenset[str] | None,
    ) -> HeldWork | None:
        wanted = None
        if session is not None:
            owner, only_owned = session
            wanted = SessionFetch(
                owner_id=owner, lock_timeout_ms=self.ticks(lease), only_owned=only_owned
            )
        fetched = await self.ask(
            "fetch_work_item",
            lambda side: side.handle.fetch_work_item(self.ticks(lock), 0, wanted, tags, activities),
        )
        if fetched is None:
            return None
        model, subject = fetched
        if model is None or subject is None:
            return None
        held = HeldWork((model.lock_token, subject.lock_token), model.identity)
        self.remember_work(held)
        return held

    @action(3, pick=plans.picks, follow_up=follow_ups, retry=plans.work_plans)
    def ack_work(self, pick: int, follow_up: str, retry: WorkPlan) -> None:
        self.run(self._ack_work(self.some_work(pick), follow_up, retry))

    @action(4, instance_id=plans.instances, follow_up=follow_ups, plan=plans.work_plans)
    def do_some_work(self, instance_id: str, follow_up: str, plan: WorkPlan) -> None:
        """Something of everything that a work item needs, so that examples get somewhere."""
        self.run(self._do_some_work(instance_id, follow_up, plan))

    async def _do_some_work(self, instance_id: str, follow_up: str, plan: WorkPlan) -> None:
        await self.ask(
            "enqueue_for_worker",
            lambda side: side.handle.enqueue_for_worker(
                self.work_item(side, plan, instance_id, 1, None)
            ),
        )
        held = await self._fetch_work(2, 2, ("w1", False), TagFilter.any(), None)
        if held is not None:
            await self._ack_work(held, follow_up, plan)

    async def _ack_work(self, held: HeldWork, follow_up: str, retry: WorkPlan) -> None:
        await self.ask(
            "ack_work_item",
            lambda side: side.handle.ack_work_item(
                held.tokens[side.index],
                self._completion(held, follow_up),
                self._retry(side, held, retry) if follow_up in {"retry", "both"} else None,
            ),
        )
        if self.refusal in {"", "LockLost"}:
            self.forget_work(held)

    def _completion(self, held: HeldWork, follow_up: str) -> OrchestratorMessage | None:
        if follow_up in {"none", "retry"}:
            return None
        instance_id = "foreign" if follow_up == "foreign" else held.identity.instance_id
        return OrchestratorMessage(instance_id=instance_id, kind="completion", body="done")

    def _retry(self, side: Side, held: HeldWork, plan: WorkPlan) -> WorkerMessage:
        item = self.work_item(
            side, plan, held.identity.instance_id, held.identity.execution_id, None
        )
        return WorkerMessage(
            identity=held.identity,
            name=item.name,
            body="again",
            session_id=item.session_id,
            tag=item.tag,
            visible_at_ms=item.visible_at_ms,
        )

    @action(1, pick=plans.picks, delay=plans.delay_ticks, ignore=st.booleans())
    def abandon_work(self, pick: int, delay: int | None, ignore: bool) -> None:
        held = self.some_work(pick)
        self.run(
            self.ask(
                "abandon_work_item",
                lambda side: side.handle.abandon_work_item(
                    held.tokens[side.index], self.delay(delay), ignore_attempt=ignore
                ),
            )
        )
        self.forget_work(held)

    @action(
        1, pick=plans.picks, extend=plans.lock_ticks, heartbeat=st.sampled_from((None, '"50 %"'))
    )
    def renew_work(self, pick: int, extend: int, heartbeat: str | None) -> None:
        held = self.some_work(pick)
        self.run(
            self.ask(
                "renew_work_item_lock",
                lambda side: side.handle.renew_work_item_lock(
                    held.tokens[side.index], self.ticks(extend), heartbeat
                ),
            )
        )
        if self.refusal:
            self.forget_work(held)

    @action(1, extend=plans.lock_ticks)
    def renew_all_work(self, extend: int) -> None:
        self.run(self._renew_all_work(extend))

    async def _renew_all_work(self, extend: int) -> None:
        """Which of the tokens are lost is compared by their place in our memory."""

        async def lost(side: Side) -> list[bool]:
            tokens = [held.tokens[side.index] for held in (*self.work, *self.lost_work)]
            gone = await side.handle.renew_work_item_locks(tokens, self.ticks(extend))
            return [token in gone for token in tokens]

        await self.ask("renew_work_item_locks", lost)

    @action(
        1,
        owners=st.sampled_from((("w1",), ("w1", "w2"), ())),
        extend=plans.lock_ticks,
        idle=st.sampled_from((0, 1, 5)),
    )
    def renew_sessions(self, owners: tuple[str, ...], extend: int, idle: int) -> None:
        self.run(
            self.ask(
                "renew_session_lock",
                lambda side: side.handle.renew_session_lock(
                    owners, self.ticks(extend), self.ticks(idle)
                ),
            )
        )

    @action(1)
    def cleanup_sessions(self) -> None:
        self.run(
            self.ask(
                "cleanup_orphaned_sessions",
                lambda side: side.handle.cleanup_orphaned_sessions(),
            )
        )
