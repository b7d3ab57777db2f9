"""Runs turns: when a turn runs, what it takes in, its commit, and what follows the commit.

Turns run in plain callbacks of the event loop, one at a time for each instance. A commit may carry
the completions that caused the turn, and hand over new activities already locked. When a commit
fails for good, the instance is dropped here; it comes back by fetch and replay.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.client.waiting import Ending, PendingStart
from perdure.engine.outcome import TurnOutcome
from perdure.errors import (
    CorruptData,
    DuplicateEvent,
    LockLost,
    Nondeterminism,
    PayloadError,
    PerdureError,
    ProviderError,
    StoreFull,
)
from perdure.limits import HISTORY_EVENTS_MAX, HISTORY_EVENTS_WARN
from perdure.model import work
from perdure.model.failures import BlockReason
from perdure.model.status import Status
from perdure.providers.records import Claim, TurnCommit
from perdure.runtime.background import Backoff
from perdure.runtime.commit_builder import build_commit, final_status
from perdure.runtime.intake import replies_to
from perdure.runtime.live_instances import Arrival, LiveInstance
from perdure.runtime.metrics import log
from perdure.runtime.watchdog import TurnAborted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.clock import Clock
    from perdure.providers.contract import Provider
    from perdure.runtime.activities import ActivityDispatcher
    from perdure.runtime.background import BackgroundTasks
    from perdure.runtime.intake import Intake
    from perdure.runtime.live_instances import LiveCache, LockReleaser
    from perdure.runtime.metrics import Observer, UnregisteredHandlerLog
    from perdure.runtime.watchdog import Watchdog

SLICE_SECONDS: Final = 0.005
FIRST_TURNS_MAX: Final = 128
"""First turns whose commits are under way: enough for a group commit to be worth it."""
START_DEADLINE_SECONDS: Final = 8.0
"""A little less than a store waits for a server that is out, so that a start waits only once."""


class TurnScheduler:
    """Runs due turns in slices of the event loop's time, running instances before new ones.

    A program may start 20,000 instances at once. If all their first turns ran before any second
    one, all other code on the event loop would wait for seconds, and memory would hold all of them
    half done. So a slice ends after a few milliseconds, and new instances begin only as fast as the
    store commits them. Until then their starts are not answered.
    """

    def __init__(self, begin: Callable[[PendingStart], None]) -> None:
        self._begin = begin
        """Runs the first turn of a new instance."""
        self._loop = asyncio.get_running_loop()
        self._due: deque[Callable[[], None]] = deque()
        self._new: deque[PendingStart] = deque()
        self._first_turns = 0
        self._is_scheduled = False

    def __bool__(self) -> bool:
        """Return True if a turn waits to be run."""
        return bool(self._due or self._new)

    def run(self, turn: Callable[[], None]) -> None:
        """Run a turn soon."""
        self._due.append(turn)
        if not self._is_scheduled:
            self._schedule()

    def begin(self, new: PendingStart) -> None:
        """Begin a new instance when there is room for its commit; ``begun`` must follow."""
        self._new.append(new)
        if not self._is_scheduled and self._may_begin():
            self._schedule()

    def begun(self) -> None:
        """Note that the commit of a first turn is durable, or will never be."""
        self._first_turns -= 1
        if not self._is_scheduled and self._may_begin():
            self._schedule()

    def clear(self) -> list[PendingStart]:
        """Drop all due turns; return the starts that had not begun."""
        new = list(self._new)
        self._due.clear()
        self._new.clear()
        return new

    def _may_begin(self) -> bool:
        return bool(self._new) and self._first_turns < FIRST_TURNS_MAX

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        until = perf_counter() + SLICE_SECONDS
        due = self._due
        # Collect garbage once after the slice instead of once every few turns: objects that die
        # within the slice are never visited, and full collections happen half as often.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            if self._may_begin():
                self._begin_one()  # at least one each slice, however many turns are due
            while perf_counter() < until:
                if due:
                    due.popleft()()
                elif self._may_begin():
                    self._begin_one()
                else:
                    break
        finally:
            if was_collecting:
                gc.enable()
            self._is_scheduled = False
            if due or self._may_begin():
                self._schedule()

    def _begin_one(self) -> None:
        self._first_turns += 1
        self._begin(self._new.popleft())


class StartDeadline:
    """Decides when a start whose commit fails stops being retried, and its caller gets the error.

    The time counts from the first commit that failed, so a start that waited behind others does not
    wait that long again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failing_since_ms: int | None = None

    def reset(self) -> None:
        """Note that the store has answered."""
        self._failing_since_ms = None

    def is_over(self, sent_at_ms: int, error: ProviderError) -> bool:
        """Return True if a start that was first sent then is to fail with this error."""
        if self._failing_since_ms is None:
            self._failing_since_ms = sent_at_ms
        waited_ms = self._clock.now_ms() - min(sent_at_ms, self._failing_since_ms)
        return isinstance(error, StoreFull) or waited_ms >= START_DEADLINE_SECONDS * 1000


class TurnInput:
    """The arrivals of a turn, sorted by what they are for."""

    __slots__ = ("arrivals", "completed_work", "consumed", "items", "starts")

    def __init__(self, arrivals: list[Arrival]) -> None:
        self.arrivals = arrivals
        self.items: list[work.OrchestratorItem] = []
        """For the execution: all but the starts, which have created it."""
        self.starts: list[work.StartOrchestration | work.ContinueAsNew] = []
        self.consumed: list[int] = []
        """Ids of messages in the orchestrator queue."""
        self.completed_work: list[str] = []
        """Lock tokens of activities that ran here."""
        for arrival in arrivals:
            item = arrival.item
            if isinstance(item, (work.StartOrchestration, work.ContinueAsNew)):
                self.starts.append(item)
            else:
                self.items.append(item)
            if arrival.message_id is not None:
                self.consumed.append(arrival.message_id)
            if arrival.work_token is not None:
                self.completed_work.append(arrival.work_token)


class Turn(msgspec.Struct, gc=False):
    """A turn between its computation and the answer to its commit."""

    live: LiveInstance
    input: TurnInput
    outcome: TurnOutcome
    commit: TurnCommit
    claimed: list[tuple[work.ActivityExecute, Claim]]
    final: tuple[Status, str] | None
    pending: PendingStart | None
    """The start that waits for this commit, if it is the first of a new instance."""
    computed_at_ms: int
    backoff: Backoff | None = None
    """Set when the commit has to be repeated."""


class TurnRunner:
    """Runs the turns of one orchestration dispatcher and commits them."""

    def __init__(
        self,
        provider: Provider,
        intake: Intake,
        activities: ActivityDispatcher,
        live: LiveCache,
        scheduler: TurnScheduler,
        releaser: LockReleaser,
        *,
        clock: Clock,
        owner: str,
        observer: Observer,
        watchdog: Watchdog,
        unregistered: UnregisteredHandlerLog,
        background: BackgroundTasks,
        keep_lock_ms: int | None,
    ) -> None:
        self._provider = provider
        self._intake = intake
        self._activities = activities
        self._live = live
        self._scheduler = scheduler
        self._releaser = releaser
        self._clock = clock
        self._owner = owner
        self._observer = observer
        self._watchdog = watchdog
        self._unregistered = unregistered
        self._background = background
        self._keep_lock_ms = keep_lock_ms
        """The time for which a commit keeps the lock; None if instances are not kept live."""
        self.start_deadline = StartDeadline(clock)
        self.is_aborted = False

    def stop_keeping(self) -> None:
        """Release each instance with the commit of its turn."""
        self._keep_lock_ms = None

    def run_inbox(self, live: LiveInstance) -> None:
        """Run a turn with everything that has arrived for a live instance."""
        arrivals = list(live.inbox)
        live.inbox.clear()
        self.run(live, arrivals)

    def run(
        self, live: LiveInstance, arrivals: list[Arrival], pending: PendingStart | None = None
    ) -> None:
        """Run a turn and send its commit. ``pending`` is the start of a new instance."""
        now_ms = self._clock.now_ms()
        taken = TurnInput(arrivals)
        outcome = self._compute(live, taken, pending, now_ms)
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
        self._commit(live, taken, outcome, now_ms, pending)

    def answer_start(
        self, pending: PendingStart, *, committed: bool = False, error: BaseException | None = None
    ) -> None:
        """Tell the caller of a start what became of its first turn."""
        self._scheduler.begun()
        if pending.committed.done():
            return
        if error is not None:
            pending.committed.set_exception(error)
        else:
            pending.committed.set_result(committed)

    # --- computing

    def _compute(
        self, live: LiveInstance, taken: TurnInput, pending: PendingStart | None, now_ms: int
    ) -> TurnOutcome | None:
        """Run the orchestration's code. None: that failed, and the instance is released."""
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
        except BaseException as error:  # a signal interrupted it: the turn did not happen
            self._release_failed(live, taken, pending, None, error)
            raise
        if (too_long := self._watchdog.too_long()) is not None:
            reason, failure = BlockReason.LIMIT, too_long
        elif reason is None:
            log.error("a turn of %r failed", live.instance_id, exc_info=failure)
        self._release_failed(live, taken, pending, reason, failure)
        return None

    def _warn(self, live: LiveInstance, outcome: TurnOutcome) -> None:
        """Log what is no error, but may be a mistake."""
        for line in outcome.ignored:
            log.debug("%s: %s", live.instance_id, line)  # completions and races cross every day
        for child in outcome.children:
            self._unregistered.check_orchestration(child.name, child.version)
        for chained in outcome.detached:
            self._unregistered.check_orchestration(chained.name, chained.version)

    def _release_failed(
        self,
        live: LiveInstance,
        taken: TurnInput,
        pending: PendingStart | None,
        reason: BlockReason | None,
        error: BaseException,
    ) -> None:
        """Release an instance whose turn failed; as Blocked if its code is the cause."""
        handler = live.execution.handler
        if live.start is not None:
            # Nothing is stored yet: the start goes through the queue, and is blocked from there.
            if reason is BlockReason.LIMIT:
                block = self._intake.block(handler.name, handler.version, reason, str(error))
                self._releaser.remember_block(live.instance_id, block)
            if pending is not None:
                self.answer_start(pending)
        elif reason is None:
            self._releaser.fail(live.instance_id, live.lock_token, error)
        elif reason is BlockReason.NONDETERMINISM and taken.completed_work:
            # The completion may belong to a deleted or replaced instance with the same id. It goes
            # through the queue now, where the store refuses it in that case.
            self._releaser.release(live.lock_token)
        else:
            detail = error.mismatch or "" if isinstance(error, Nondeterminism) else ""
            block = self._intake.block(handler.name, handler.version, reason, str(error), detail)
            self._releaser.block(live.instance_id, live.lock_token, block)
        self._forget_with(live, taken)

    # --- committing

    def _commit(
        self,
        live: LiveInstance,
        taken: TurnInput,
        outcome: TurnOutcome,
        now_ms: int,
        pending: PendingStart | None,
    ) -> None:
        final = final_status(outcome.result)
        commit, claimed = build_commit(
            live.facts,
            outcome,
            self._activities.claim,
            now_ms=now_ms,
            custom_status=live.execution.custom_status,
            final=final,
            consumed=taken.consumed,
            completed_work=taken.completed_work,
            keep_lock_ms=None if final else self._keep_lock_ms,
        )
        replies = replies_to(taken.starts, live.facts.parent) if taken.starts else ()
        if replies:
            # A kept lock is fenced by the history: a commit without events must release its lock.
            commit = msgspec.structs.replace(
                commit,
                orchestrator_items=(*commit.orchestrator_items, *replies),
                keep_lock_ms=commit.keep_lock_ms if commit.history_delta else None,
            )
        self._send(Turn(live, taken, outcome, commit, claimed, final, pending, now_ms))

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
        except PerdureError as error:  # refused before anything was sent
            self._undo(turn, error)
        else:
            future = asyncio.ensure_future(answer)
            if future.done():  # the store has answered already: skip one pass of the event loop
                self._on_answer(turn, future)
            else:
                future.add_done_callback(partial(self._on_answer, turn))

    def _on_answer(self, turn: Turn, future: asyncio.Future[bool | None]) -> None:
        error = None if future.cancelled() else future.exception()
        if self.is_aborted:
            if turn.pending is not None:
                self.answer_start(turn.pending, error=error)
        elif future.cancelled():
            self._undo(turn, None)
        elif error is None:
            self.start_deadline.reset()
            if future.result() is False:
                self._undo(turn, None)  # the id is taken
            else:
                self._on_committed(turn)
        elif isinstance(error, ProviderError) and self._may_repeat(turn, error):
            self._background.spawn(self._send_again(turn, error))
        else:
            self._undo(turn, error)

    def _may_repeat(self, turn: Turn, error: ProviderError) -> bool:
        # Only a start has a caller to tell. The caller can repeat it, because it has an id.
        return error.retryable and (
            turn.pending is None or not self.start_deadline.is_over(turn.computed_at_ms, error)
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

    def _on_committed(self, turn: Turn) -> None:
        live, outcome = turn.live, turn.outcome
        live.start = None
        for work_token in turn.commit.settled_work:
            self._activities.forget(work_token)
        for item, claim in turn.claimed:
            self._activities.run_claimed(item, claim)
        for activity_id in outcome.cancelled_activities:
            self._activities.cancel(live.instance_id, live.execution.execution_id, activity_id)
        self._observer.turn_committed(live.execution, outcome)
        if turn.pending is not None:
            self.answer_start(turn.pending, committed=True)
        if turn.final is not None:
            status, output = turn.final
            has_ended = status is not Status.CONTINUED_AS_NEW
            name = live.execution.handler.name
            self._live.forget(live, Ending(status, output, name) if has_ended else None)
        elif turn.commit.keep_lock_ms is None:
            self._live.forget(live)
        elif live.inbox:
            self._scheduler.run(partial(self.run_inbox, live))
        else:
            live.busy = False

    def _undo(self, turn: Turn, error: BaseException | None) -> None:
        """Drop an instance whose commit failed for good; it comes back by fetch and replay."""
        live = turn.live
        for _ in turn.claimed:
            self._activities.release_slot()
        if isinstance(error, (LockLost, DuplicateEvent)):
            log.info("the lock of %r is lost: %s", live.instance_id, error)
        elif error is not None:
            log.error("commit of %r failed: %s", live.instance_id, error)
            if live.start is None:
                self._releaser.fail(live.instance_id, live.lock_token, error)
        if turn.pending is not None:
            self.answer_start(turn.pending, error=error)
        self._forget_with(live, turn.input)

    def _forget_with(self, live: LiveInstance, taken: TurnInput) -> None:
        """Drop an instance; the completions that its turn had taken go through the queue."""
        live.inbox.extendleft(reversed(taken.arrivals))
        self._live.forget(live)
