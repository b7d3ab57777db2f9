"""The orchestration dispatcher: fetch an instance, run its turns, commit them, keep it live.

Turns run in plain callbacks of the event loop, one at a time per instance, paced. A
turn's commit may carry the completion that caused it and hand over new activities already locked
(the hot path); whatever goes wrong there, the instance is dropped and comes back by fetch and
replay.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from perdure.authoring.definitions import parse_version
from perdure.client.messages import envelope
from perdure.client.view import Ending
from perdure.errors import (
    CorruptData,
    DuplicateEvent,
    LockLost,
    Nondeterminism,
    NotRegistered,
    PayloadError,
    PerdureError,
    ProviderError,
)
from perdure.limits import HISTORY_EVENTS_MAX, HISTORY_EVENTS_WARN
from perdure.model import wire, work
from perdure.model.failures import BlockReason
from perdure.model.status import Status
from perdure.providers._shared.rules import new_lock_token
from perdure.providers.items import (
    FetchedOrchestration,
    OrchestrationFilter,
    VersionRange,
)
from perdure.runtime.background import Background
from perdure.runtime.cache import LiveCache
from perdure.runtime.commits import commit_of, facts_of, final_status
from perdure.runtime.intake import Drop, Intake, Park, Run, Verdict, replies_to
from perdure.runtime.live import Arrival, LiveInstance
from perdure.runtime.missing import Missing
from perdure.runtime.observe import log
from perdure.runtime.pacing import Pacer
from perdure.runtime.patience import Patience
from perdure.runtime.retrying import Backoff
from perdure.runtime.returns import Returns
from perdure.runtime.turns import Created, TakenIn, Turn
from perdure.runtime.watchdog import TurnAborted

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from perdure.authoring.registry import Registry
    from perdure.client.view import Finished
    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.engine.outcome import TurnOutcome
    from perdure.providers.contract import Provider
    from perdure.runtime.activities import ActivityDispatcher
    from perdure.runtime.observe import Observer
    from perdure.runtime.options import RuntimeOptions
    from perdure.runtime.retrying import FetchTrouble
    from perdure.runtime.watchdog import Watchdog

_BURST_MAX = 64


class OrchestrationDispatcher:
    """Runs the turns of one runtime."""

    def __init__(
        self,
        provider: Provider,
        registry: Registry,
        activities: ActivityDispatcher,
        *,
        codec: Codec,
        clock: Clock,
        options: RuntimeOptions,
        owner: str,
        framework_version: str,
        observer: Observer,
        watchdog: Watchdog,
        trouble: FetchTrouble,
    ) -> None:
        self._provider = provider
        self._activities = activities
        self._clock = clock
        self._options = options
        self._owner = owner
        self._observer = observer
        self._watchdog = watchdog
        self._trouble = trouble
        self._missing = Missing(registry)
        self.intake = Intake(registry, codec, framework_version, options.max_attempts)
        self._version = parse_version(framework_version)
        self._filter = OrchestrationFilter(
            framework_versions=(VersionRange(minimum=(0, 0, 0), maximum=self._version),),
            handlers=registry.orchestration_keys,
        )
        self._poll_ms = round(options.poll_seconds * 1000)
        self._lock_ms = round(options.orchestration_lock_seconds * 1000)
        self._keeps_locks = provider.capabilities.hot_path and not options.always_replay
        self._live = LiveCache(options.cached_instances, options.cached_events)
        self._loop = asyncio.get_running_loop()
        self._pacer = Pacer(self._begin)
        self._patience = Patience(clock)
        self._duties: list[asyncio.Task[None]] = []
        self._background = Background()
        self._returns = Returns(provider, clock, observer, self._background)
        self._stopping = False
        self._is_aborted = False

    # --- life

    def start(self) -> None:
        if self._options.run_orchestrations:
            self._duties = [
                self._loop.create_task(self._fetch_loop(), name="perdure-fetch-turns"),
                self._loop.create_task(self._tidy_loop(), name="perdure-tidy"),
            ]

    async def stop(self) -> None:
        """Fetch no more, let commits under way finish, give every lock back."""
        self._stopping = True
        self._live.wake()
        for task in self._duties:
            task.cancel()
        await asyncio.gather(*self._duties, return_exceptions=True)
        while self.is_busy:
            pending = {live.finished for live in self._live if live.busy} | self._background.tasks
            if pending:
                await asyncio.wait(pending, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)
        for live in self._live:
            self._release(live)
        await asyncio.gather(*self._background.tasks)

    def abort(self) -> None:
        """Leave everything as it is in the store; whoever waits here is told to look there."""
        self._stopping = self._is_aborted = True
        self._background.cancel()
        for task in self._duties:
            task.cancel()
        for created in self._pacer.clear():
            self._tell(created, None)
        for live in self._live:
            live.leave()

    @property
    def lock_tokens(self) -> list[str]:
        """Every instance lock that must be renewed; may be asked from another thread."""
        return [live.lock_token for live in self._live if live.start is None]

    def lost_locks(self, tokens: frozenset[str]) -> None:
        """Somebody else has these instances now."""
        for live in self._live:
            if (
                live.lock_token in tokens and not live.busy
            ):  # a commit under way finds out by itself
                self._forget(live)

    def live_instance(self, instance_id: str) -> LiveInstance | None:
        return self._live.get(instance_id)

    @property
    def is_busy(self) -> bool:
        return (
            bool(self._pacer)
            or bool(self._background.tasks)
            or any(live.busy for live in self._live)
        )

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def room(self) -> int:
        """New instances that fit beside the live ones."""
        return self._live.room

    # --- what comes in

    def begin(self, item: work.StartOrchestration) -> Created | None:
        """Create an instance and commit its first turn; None: go through the queue."""
        if self._stopping or not self._keeps_locks or not self._options.run_orchestrations:
            return None
        created = Created(item, self._loop)
        self._pacer.begin(created)
        return created

    def _begin(self, created: Created) -> None:
        item = created.item
        if (
            created.done()  # nobody waits for it any more
            or self._stopping
            or item.instance_id in self._live
            or not self._has_room()
        ):
            self._tell(created, None)
            return
        try:
            execution = self.intake.begin(item, kv={}, now_ms=self._clock.now_ms())
        except NotRegistered:
            self._missing.orchestration(item.name, item.version)
            self._tell(created, None)
            return
        facts = facts_of(execution, None, self._version)
        live = LiveInstance(new_lock_token(), execution, facts, envelope(item))
        self._live.add(live)
        live.busy = True
        self._run_turn(live, [Arrival(item)], created)

    def _tell(self, created: Created, answer: Finished | BaseException | None) -> None:
        """Answer whoever asked for a new instance."""
        self._pacer.begun()
        if created.done():
            return
        if isinstance(answer, BaseException):
            created.set_exception(answer)
        else:
            created.set_result(answer)

    def complete(self, item: work.ActivityCompleted | work.ActivityFailed, work_token: str) -> bool:
        """Take the completion of an activity that ran here, if its instance is live here."""
        live = self._live.get(item.instance_id)
        if live is None or live.execution.execution_id != item.execution_id:
            return False
        live.inbox.append(Arrival(item, None, work_token))
        if not live.busy:
            live.busy = True
            self._pacer.run(partial(self._take_turn, live))
        return True

    async def _fetch_loop(self) -> None:
        burst = 1
        while not self._stopping:
            if not self._has_room():
                await self._live.wait_for_room()
                continue
            fetches = [self._fetch(0 if burst > 1 else self._poll_ms) for _ in range(burst)]
            answers = await asyncio.gather(*fetches, return_exceptions=True)
            # What one of them has found is ours, whatever became of the others.
            found = [each for each in answers if isinstance(each, FetchedOrchestration)]
            for fetched in found:
                self._pacer.run(partial(self._take, fetched))
            error = next((each for each in answers if isinstance(each, BaseException)), None)
            if error is not None:
                await self._clock.sleep(self._trouble.seconds_after(error))
                continue
            self._trouble.is_over()
            self._patience.renew()
            burst = min(burst * 2, _BURST_MAX) if len(found) == burst else 1

    async def _fetch(self, poll_ms: int) -> FetchedOrchestration | None:
        return await self._provider.fetch_orchestration_item(
            self._lock_ms, poll_ms, self._filter, self._owner if self._keeps_locks else None
        )

    def _take(self, fetched: FetchedOrchestration) -> None:
        if fetched.continues:
            self._take_more(fetched)
            return
        stale = self._live.get(fetched.item.instance_id)
        if stale is not None and not stale.busy:
            self._forget(stale)  # its lock had expired: what it knows may be old
        if self._returns.park_remembered(fetched):
            return
        match self._read(fetched):
            case Park() as verdict:
                self._returns.park(fetched.item.instance_id, fetched.lock_token, verdict.block)
            case Drop() as verdict:
                self._returns.drop(fetched, verdict)
            case Run() as verdict:
                facts = facts_of(verdict.execution, verdict.parent, self._version)
                live = LiveInstance(fetched.lock_token, verdict.execution, facts)
                self._live.add(live)
                live.busy = True
                self._run_turn(live, verdict.arrivals)

    def _read(self, fetched: FetchedOrchestration) -> Verdict:
        verdict: Verdict | None = None
        try:
            with self._watchdog.guard(fetched.item.instance_id):
                verdict = self.intake.read(fetched, self._clock.now_ms())
        except TurnAborted:
            if not self._watchdog.aborted_at:
                raise
        too_long = self._watchdog.too_long()
        if too_long is None:
            assert verdict is not None
            return verdict
        if isinstance(verdict, Run):
            verdict.execution.close()
        return self.intake.park(fetched.item, BlockReason.LIMIT, str(too_long))

    def _take_more(self, fetched: FetchedOrchestration) -> None:
        live = self._live.get(fetched.item.instance_id)
        if live is None or live.lock_token != fetched.lock_token:
            self._returns.release(fetched.lock_token)
            return
        try:
            arrivals = [
                Arrival(wire.decode_item(delivery.body), delivery.message_id)
                for delivery in fetched.item.messages
            ]
        except CorruptData:
            # Come back by fetch and replay: that path parks the instance with the reason.
            self._forget(live)
            self._returns.release(fetched.lock_token)
            return
        live.inbox.extend(arrivals)
        if not live.busy:
            live.busy = True
            self._take_turn(live)

    # --- turns

    def _take_turn(self, live: LiveInstance) -> None:
        arrivals = list(live.inbox)
        live.inbox.clear()
        self._run_turn(live, arrivals)

    def _run_turn(
        self,
        live: LiveInstance,
        arrivals: list[Arrival],
        created: Created | None = None,
    ) -> None:
        now_ms = self._clock.now_ms()
        taken = TakenIn(arrivals)
        outcome = self._compute(live, taken, created, now_ms)
        if outcome is None:
            return
        self._live.used(live, now_ms, len(outcome.delta))
        if outcome.ignored or outcome.children or outcome.detached:
            self._warn(live, outcome)
        events = live.execution.event_count
        if events - len(outcome.delta) < HISTORY_EVENTS_WARN <= events:
            log.warning(
                "%r has %d events of history; at %d it fails. Use continue_as_new() in long loops",
                live.instance_id,
                events,
                HISTORY_EVENTS_MAX,
            )
        self._commit(live, taken, outcome, now_ms, created)

    def _warn(self, live: LiveInstance, outcome: TurnOutcome) -> None:
        """Tell what is no error, but hardly meant."""
        for line in outcome.ignored:
            log.debug("%s: %s", live.instance_id, line)  # completions and races cross every day
        for child in outcome.children:
            self._missing.orchestration(child.name, child.version)
        for chained in outcome.detached:
            self._missing.orchestration(chained.name, chained.version)

    def _compute(
        self,
        live: LiveInstance,
        taken: TakenIn,
        created: Created | None,
        now_ms: int,
    ) -> TurnOutcome | None:
        """What the turn decides; None if it could not be computed, and was failed."""
        reason: BlockReason | None = None
        failure: BaseException
        try:
            with self._watchdog.guard(live.instance_id):
                outcome = live.execution.run_turn(taken.items, now_ms)
            if not self._watchdog.aborted_at:
                return outcome
            failure = TurnAborted()
        except Nondeterminism as error:
            reason, failure = BlockReason.NONDETERMINISM, error
        except (CorruptData, PayloadError) as error:
            reason, failure = BlockReason.UNDECODABLE, error
        except (Exception, TurnAborted) as error:  # noqa: BLE001
            failure = error
        except BaseException as error:  # a signal that breaks into it: there was no turn
            self._fail_turn(live, taken, created, None, error)
            raise
        if (too_long := self._watchdog.too_long()) is not None:
            reason, failure = BlockReason.LIMIT, too_long
        elif reason is None:
            log.error("a turn of %r broke", live.instance_id, exc_info=failure)
        self._fail_turn(live, taken, created, reason, failure)
        return None

    def _commit(
        self,
        live: LiveInstance,
        taken: TakenIn,
        outcome: TurnOutcome,
        now_ms: int,
        created: Created | None,
    ) -> None:
        final = final_status(outcome.result)
        keep = self._keeps_locks and final is None and not self._stopping
        commit, claimed = commit_of(
            live.facts,
            outcome,
            self._activities.claim,
            now_ms=now_ms,
            custom_status=live.execution.custom_status,
            final=final,
            consumed=taken.consumed,
            settled_work=taken.settled_work,
            keep_lock_ms=self._lock_ms if keep else None,
        )
        replies = replies_to(taken.starts, live.facts.parent) if taken.starts else ()
        if replies:
            # Kept locks are fenced by history: a commit without any gives its lock back.
            commit = msgspec.structs.replace(
                commit,
                orchestrator_items=(*commit.orchestrator_items, *replies),
                keep_lock_ms=commit.keep_lock_ms if commit.history_delta else None,
            )
        self._send(Turn(live, taken, outcome, commit, claimed, final, created, now_ms))

    def _send(self, turn: Turn) -> None:
        live = turn.live
        answer: Awaitable[bool | None]
        try:
            if live.start is not None:
                answer = self._provider.start_orchestration_item(
                    live.start, turn.commit, live.lock_token, self._owner
                )
            else:
                answer = self._provider.ack_orchestration_item(live.lock_token, turn.commit)
        except PerdureError as error:  # refused before anything was under way
            self._undo(turn, error)
        else:
            future = asyncio.ensure_future(answer)
            if future.done():  # a store that has answered at once: no pass of the loop for it
                self._answered(turn, future)
            else:
                future.add_done_callback(partial(self._answered, turn))

    def _answered(self, turn: Turn, future: asyncio.Future[bool | None]) -> None:
        error = None if future.cancelled() else future.exception()
        if self._is_aborted:
            if turn.created is not None:
                self._tell(turn.created, error)
        elif future.cancelled():
            self._undo(turn, None)
        elif error is None:
            self._patience.renew()
            if future.result() is False:
                self._undo(turn, None)  # the id is taken
            else:
                self._committed(turn)
        elif isinstance(error, ProviderError) and self._may_repeat(turn, error):
            self._background.spawn(self._send_again(turn, error))
        else:
            self._undo(turn, error)

    def _may_repeat(self, turn: Turn, error: ProviderError) -> bool:
        # A start may be repeated by its caller, because of its id: it is told, and no one else is.
        return error.retryable and (
            turn.created is None or not self._patience.is_over(turn.computed_at_ms, error)
        )

    async def _send_again(self, turn: Turn, error: ProviderError) -> None:
        """Repeat a commit whose outcome is unknown or that the store could not take now.

        Repeating is safe: if it was applied after all, the answer is LockLost or DuplicateEvent,
        and the instance comes back by fetch and replay.
        """
        log.warning("commit of %r is repeated: %s", turn.live.instance_id, error)
        turn.backoff = turn.backoff or Backoff()
        await self._clock.sleep(turn.backoff.next_delay(retryable=True))
        self._send(turn)

    def _committed(self, turn: Turn) -> None:
        live, outcome = turn.live, turn.outcome
        live.start = None
        for work_token in turn.commit.settled_work:
            self._activities.settled(work_token)
        for item, claim in turn.claimed:
            self._activities.run_claimed(item, claim)
        for activity_id in outcome.cancelled_activities:
            self._activities.cancel(live.instance_id, live.execution.execution_id, activity_id)
        self._observer.turn_committed(live.execution, outcome)
        if turn.created is not None:
            self._tell(turn.created, live.finished)
        if turn.final is not None:
            self._live.remove(live)
            status, output = turn.final
            ended = status is not Status.CONTINUED_AS_NEW
            name = live.execution.handler.name
            live.leave(Ending(status, output, name) if ended else None)
            self._settle_leftovers(live)
        elif turn.commit.keep_lock_ms is None:
            self._forget(live)
        elif live.inbox:
            self._pacer.run(partial(self._take_turn, live))
        else:
            live.busy = False

    def _undo(self, turn: Turn, error: BaseException | None) -> None:
        """The turn is not in the store: drop the instance; it comes back by fetch and replay."""
        live = turn.live
        for item, claim in turn.claimed:
            self._activities.unclaim(item, claim)
        if isinstance(error, (LockLost, DuplicateEvent)):
            log.info("%r is no longer ours: %s", live.instance_id, error)
        elif error is not None:
            log.error("commit of %r failed: %s", live.instance_id, error)
            if live.start is None:
                self._returns.fail(live.instance_id, live.lock_token, error)
        if turn.created is not None:
            self._tell(turn.created, error)
        live.inbox.extendleft(reversed(turn.taken.arrivals))
        self._forget(live)

    def _fail_turn(
        self,
        live: LiveInstance,
        taken: TakenIn,
        created: Created | None,
        reason: BlockReason | None,
        error: BaseException,
    ) -> None:
        """The turn could not be computed: give the lock back, Blocked if the code is at fault."""
        handler = live.execution.handler
        if live.start is not None:
            # Nothing is stored yet: the start goes through the queue and is parked there.
            if reason is BlockReason.LIMIT:
                block = self.intake.block(handler.name, handler.version, reason, str(error))
                self._returns.remember(live.instance_id, block)
            if created is not None:
                self._tell(created, None)
        elif reason is None:
            self._returns.fail(live.instance_id, live.lock_token, error)
        elif reason is BlockReason.NONDETERMINISM and taken.settled_work:
            # Its activity may have been that of an earlier instance with this id, which was deleted
            # or replaced: through the queue, the store refuses what is not this one's.
            self._returns.release(live.lock_token)
        else:
            detail = error.report if isinstance(error, Nondeterminism) else ""
            block = self.intake.block(handler.name, handler.version, reason, str(error), detail)
            self._returns.park(live.instance_id, live.lock_token, block)
        live.inbox.extendleft(reversed(taken.arrivals))
        self._forget(live)

    # --- the cache

    def _has_room(self) -> bool:
        if not self._live.is_full:
            return True
        oldest = self._live.oldest_idle()
        if oldest is None:
            return False
        self._release(oldest)
        return True

    def _forget(self, live: LiveInstance) -> None:
        """Drop an instance whose lock is gone or was given back."""
        self._live.remove(live)
        live.leave()
        self._settle_leftovers(live)

    def _settle_leftovers(self, live: LiveInstance) -> None:
        """Completions that no turn here will consume go through the queue, like anybody's."""
        for arrival in live.inbox:
            if arrival.work_token is not None:
                self._activities.settle_by_queue(arrival.work_token)
        live.inbox.clear()

    def _release(self, live: LiveInstance) -> None:
        """Drop an idle instance and give its lock back; whatever comes next goes to the queue."""
        self._forget(live)
        if live.start is None:
            self._returns.release(live.lock_token)

    async def _tidy_loop(self) -> None:
        """Give back the locks of instances that wait for long."""
        idle_ms = round(self._options.idle_seconds * 1000)
        while True:
            await self._clock.sleep(max(self._options.idle_seconds / 4, 0.05))
            for live in self._live.idle_since(self._clock.now_ms() - idle_ms):
                self._release(live)
