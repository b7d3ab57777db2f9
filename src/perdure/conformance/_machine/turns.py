"""Rules about turns: messages in, batches out, commits of every shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from perdure.conformance._machine import plans
from perdure.conformance._machine.comparison import (
    MODEL,
    SUBJECT,
    Comparison,
    HeldTurn,
    HeldWork,
    Side,
    action,
)
from perdure.conformance._machine.plans import CommitPlan, MessagePlan, WorkPlan
from perdure.limits import BATCH_BYTES_MAX
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    EnqueueCondition,
    ExecutionMetadata,
    HistoryRecord,
    OrchestratorMessage,
    StartRouting,
    TimerIdentity,
    TurnCommit,
    WorkerMessage,
)

if TYPE_CHECKING:
    from perdure.model.failures import Block
    from perdure.providers.records import FetchedOrchestration, OrchestrationFilter


_LARGE = BATCH_BYTES_MAX * 2 // 5


class TurnRules(Comparison):
    """Adds the orchestrator queue."""

    # --- messages

    @action(4, plan=plans.message_plans, delay=plans.delay_ticks, condition=plans.conditions)
    def enqueue(
        self, plan: MessagePlan, delay: int | None, condition: EnqueueCondition | None
    ) -> None:
        self.run(
            self.ask(
                "enqueue_for_orchestrator",
                lambda side: side.handle.enqueue_for_orchestrator(
                    self.message(side, plan), self.delay(delay), condition
                ),
            )
        )

    @action(
        1,
        planned=st.lists(plans.start_plans, min_size=1, max_size=3),
        condition=st.sampled_from((None, EnqueueCondition.ABSENT)),
    )
    def enqueue_many(self, planned: list[MessagePlan], condition: EnqueueCondition | None) -> None:
        """Only what is never refused: how far a refused call of many got is left open."""
        self.run(
            self.ask(
                "enqueue_many_for_orchestrator",
                lambda side: side.handle.enqueue_many_for_orchestrator(
                    [self.message(side, plan) for plan in planned], None, condition
                ),
            )
        )

    def message(self, side: Side, plan: MessagePlan) -> OrchestratorMessage:
        routing = timer = None
        if plan.kind == "start":
            routing = StartRouting(
                name=plan.name,
                version=plan.version,
                parent_instance_id=older(plan.parent, plan.instance_id),
            )
        elif plan.kind == "timer":
            timer = TimerIdentity(execution_id=1, timer_id=plan.number)
        return OrchestratorMessage(
            instance_id=plan.instance_id,
            kind="QueueMessage" if plan.kind in {"event", "large"} else plan.kind,
            body=f"{plan.kind} {plan.number}" + "." * (_LARGE if plan.kind == "large" else 0),
            visible_at_ms=self.at(side, plan.delay),
            start=routing,
            timer=timer,
        )

    def at(self, side: Side, delay: int | None) -> int | None:
        if delay is None:
            return None
        # A clock of its own goes on between two steps, and would decide the order of what the model
        # has at one moment: therefore between two ticks, where nothing else is.
        margin_ms = 0 if self.is_exact else self.tick_ms // 2
        return side.now_ms + self.ticks(delay) + margin_ms

    # --- batches

    @action(4, filter=plans.filters, owner=plans.optional_owners, lock=plans.lock_ticks)
    def fetch(
        self,
        filter: OrchestrationFilter | None,  # noqa: A002
        owner: str | None,
        lock: int,
    ) -> None:
        self.run(self._fetch(filter, owner, lock))

    async def _fetch(
        self,
        filter: OrchestrationFilter | None,  # noqa: A002
        owner: str | None,
        lock: int,
    ) -> HeldTurn | None:
        if not self.declared.hot_path:
            owner = None
        fetched = await self.ask(
            "fetch_orchestration_item",
            lambda side: side.handle.fetch_orchestration_item(self.ticks(lock), 0, filter, owner),
        )
        if fetched is None:
            return None
        model, subject = fetched
        return None if model is None or subject is None else self._hold(model, subject)

    def _hold(self, model: FetchedOrchestration, subject: FetchedOrchestration) -> HeldTurn:
        deliveries = [
            (one.message_id, other.message_id)
            for one, other in zip(model.item.messages, subject.item.messages, strict=True)
        ]
        tokens = (model.lock_token, subject.lock_token)
        for held in (*self.turns, *self.lost_turns):
            if held.tokens[MODEL] == tokens[MODEL]:
                self.compare("continuing the same lock", held.tokens[SUBJECT], tokens[SUBJECT])
                held.deliveries += deliveries
                return held
        held = HeldTurn(tokens, model.item.instance_id, model.item.execution_id or 1, deliveries)
        self.remember_turn(held)
        return held

    @action(2, pick=plans.picks, delay=plans.delay_ticks, ignore=st.booleans(), block=plans.blocks)
    def abandon(self, pick: int, delay: int | None, ignore: bool, block: Block | None) -> None:
        held = self.some_turn(pick)
        self.run(
            self.ask(
                "abandon_orchestration_item",
                lambda side: side.handle.abandon_orchestration_item(
                    held.tokens[side.index],
                    self.delay(delay),
                    ignore_attempt=ignore,
                    block=block,
                ),
            )
        )
        self.forget_turn(held)

    @action(1, pick=plans.picks, extend=plans.lock_ticks)
    def renew(self, pick: int, extend: int) -> None:
        held = self.some_turn(pick)
        self.run(
            self.ask(
                "renew_orchestration_item_lock",
                lambda side: side.handle.renew_orchestration_item_lock(
                    held.tokens[side.index], self.ticks(extend)
                ),
            )
        )
        if self.refusal:
            self.forget_turn(held)

    @action(1, extend=plans.lock_ticks)
    def renew_all(self, extend: int) -> None:
        self.run(self._renew_all(extend))

    async def _renew_all(self, extend: int) -> None:
        """Which of the tokens are lost is compared by their place in our memory."""

        async def lost(side: Side) -> list[bool]:
            tokens = [held.tokens[side.index] for held in (*self.turns, *self.lost_turns)]
            gone = await side.handle.renew_orchestration_item_locks(tokens, self.ticks(extend))
            return [token in gone for token in tokens]

        await self.ask("renew_orchestration_item_locks", lost)

    # --- commits

    @action(5, pick=plans.picks, plan=plans.commit_plans)
    def ack(self, pick: int, plan: CommitPlan) -> None:
        self.run(self._ack(self.some_turn(pick), plan))

    @action(8, start=plans.start_plans, plan=plans.commit_plans, owner=plans.optional_owners)
    def take_a_turn(self, start: MessagePlan, plan: CommitPlan, owner: str | None) -> None:
        """Something of everything that a turn needs, so that examples get somewhere."""
        self.run(self._take_a_turn(start, plan, owner))

    async def _take_a_turn(self, start: MessagePlan, plan: CommitPlan, owner: str | None) -> None:
        event = replace(start, kind="event" if start.number < 3 else "large", delay=None)
        await self.ask(
            "enqueue_for_orchestrator if absent",
            lambda side: side.handle.enqueue_for_orchestrator(
                self.message(side, replace(start, delay=None)), None, EnqueueCondition.ABSENT
            ),
        )
        await self.ask(
            "enqueue_for_orchestrator if alive",
            lambda side: side.handle.enqueue_for_orchestrator(
                self.message(side, event), None, EnqueueCondition.ALIVE
            ),
        )
        held = await self._fetch(None, owner, 5)
        if held is not None:
            await self._ack(held, plan)

    async def _ack(self, held: HeldTurn, plan: CommitPlan) -> None:
        execution = held.execution_id + (1 if plan.next_execution else 0)
        last = await self._last_event_id(held.instance_id, execution)
        claims = [self.new_token() for _ in plan.work]

        answers = await self.ask(
            "ack_orchestration_item",
            lambda side: side.handle.ack_orchestration_item(
                held.tokens[side.index],
                self.commit(side, plan, held.instance_id, execution, last, claims, held),
            ),
        )

        if self.refusal == "LockLost":
            # A settled item may be what was lost, and the turn still held: both are tried again.
            self.forget_turn(held)
        if answers is not None:
            if plan.keep is None or not self.declared.hot_path:
                self.forget_turn(held)
            held.execution_id = execution
            self._remember_claims(plan, held.instance_id, execution, claims)
            consumed = plan.consumed
            held.deliveries = [
                pair
                for number, pair in enumerate(held.deliveries)
                if consumed is not None and not consumed >> number & 1
            ]

    @action(
        2,
        start=plans.start_plans,
        plan=plans.first_commit_plans,
        owner=plans.owners,
    )
    def begin(self, start: MessagePlan, plan: CommitPlan, owner: str) -> None:
        if self.declared.hot_path:
            self.run(self._begin(start, plan, owner))

    async def _begin(self, start: MessagePlan, plan: CommitPlan, owner: str) -> None:
        token = self.new_token()
        claims = [self.new_token() for _ in plan.work]
        held = HeldTurn((token, token), start.instance_id, 1, [])
        last = await self._last_event_id(start.instance_id, 1)

        answers = await self.ask(
            "start_orchestration_item",
            lambda side: side.handle.start_orchestration_item(
                self.message(side, start),
                self.commit(side, plan, start.instance_id, 1, last, claims, held),
                token,
                owner,
            ),
        )

        if answers is not None and answers[MODEL]:
            self._remember_claims(plan, start.instance_id, 1, claims)
            self.remember_turn(held)

    async def _last_event_id(self, instance_id: str, execution: int) -> int:
        records = await self.sides[MODEL].handle.read_with_execution(instance_id, execution)
        return records[-1].event_id if records else 0

    def _remember_claims(
        self, plan: CommitPlan, instance_id: str, execution: int, claims: list[str]
    ) -> None:
        for work, token in zip(plan.work, claims, strict=True):
            if work.claim is not None and self.declared.hot_path:
                identity = ActivityIdentity(
                    instance_id=instance_id, execution_id=execution, activity_id=work.activity_id
                )
                self.remember_work(HeldWork((token, token), identity))

    def commit(
        self,
        side: Side,
        plan: CommitPlan,
        instance_id: str,
        execution: int,
        last_event_id: int,
        claims: list[str],
        held: HeldTurn,
    ) -> TurnCommit:
        """The plan with this side's tokens, positions and times."""
        hot = self.declared.hot_path
        first = max(1, last_event_id if plan.repeats else last_event_id + 1) + plan.skips
        consumed = None
        if plan.consumed is not None:
            consumed = tuple(
                pair[side.index]
                for number, pair in enumerate(held.deliveries)
                if plan.consumed >> number & 1
            )
        keeps = hot and plan.keep is not None
        returned: tuple[int, ...] = ()
        if consumed is not None and plan.returns and not keeps:
            returned = tuple(pair[side.index] for pair in held.deliveries)
        name, version = plan.named or (None, None)
        return TurnCommit(
            execution_id=execution,
            history_delta=tuple(
                HistoryRecord(event_id=first + number, data=f'"{instance_id} {execution}"')
                for number in range(plan.events)
            ),
            worker_items=tuple(
                self.work_item(side, each, instance_id, execution, claim if hot else None)
                for each, claim in zip(plan.work, claims, strict=True)
            ),
            orchestrator_items=tuple(
                self.message(side, each)
                for each in (*plan.messages, *next_start(plan, instance_id))
            ),
            metadata=ExecutionMetadata(
                status=plan.status,
                output=plan.output,
                name=name,
                version=version,
                parent_instance_id=older(plan.parent, instance_id),
                framework_version=plan.framework,
            ),
            custom_status=plan.custom_status,
            kv_changes=plan.kv,
            cancelled_activities=tuple(
                ActivityIdentity(
                    instance_id=instance_id, execution_id=execution, activity_id=number
                )
                for number in plan.cancelled_activities
            ),
            cancelled_timers=tuple(
                TimerIdentity(execution_id=1, timer_id=number) for number in plan.cancelled_timers
            ),
            consumed=consumed,
            returned=returned,
            after_event_id=0 if plan.events else last_event_id + plan.skips,
            keep_lock_ms=self.delay(plan.keep) if hot else None,
            settled_work=tuple(
                self.work[number % len(self.work)].tokens[side.index]
                for number in plan.settled
                if self.work and hot
            ),
        )

    def work_item(
        self, side: Side, plan: WorkPlan, instance_id: str, execution: int, token: str | None
    ) -> WorkerMessage:
        claim = None
        if plan.claim is not None and token is not None:
            claim = Claim(lock_token=token, lock_timeout_ms=self.ticks(plan.claim))
        return WorkerMessage(
            identity=ActivityIdentity(
                instance_id=instance_id, execution_id=execution, activity_id=plan.activity_id
            ),
            name=plan.name,
            body=f"work {plan.activity_id}",
            session_id=plan.session,
            tag=plan.tag,
            visible_at_ms=self.at(side, plan.delay),
            claim=claim,
        )


def next_start(plan: CommitPlan, instance_id: str) -> tuple[MessagePlan, ...]:
    """The start of the next execution, if the plan is to go on with one."""
    if plan.status is not Status.CONTINUED_AS_NEW or plan.output is None:
        return ()
    return (
        MessagePlan(
            instance_id=instance_id,
            kind="start",
            number=1,
            name=plans.NAMES[0],
            version=plans.VERSIONS[0],
            parent=None,
            delay=None,
        ),
    )


def older(parent: str | None, instance_id: str) -> str | None:
    """A parent that comes before its child, so that families have no circles."""
    return parent if parent is not None and parent < instance_id else None
