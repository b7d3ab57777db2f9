"""Runs turns: the time limit of the code, the commit of a turn, and what follows the commit.

One turn runs at a time for each instance, in a plain callback of the event loop. A commit may carry
the completions that caused the turn, and hand over new activities already locked. When a commit
fails for good, the instance is dropped here; it comes back by fetch and replay.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from perdure.arguments import in_seconds
from perdure.client.endings import Ending, PendingStart
from perdure.engine.user_code import is_boundary
from perdure.errors import (
    CorruptData,
    DuplicateEvent,
    LimitReached,
    LockLost,
    Nondeterminism,
    PayloadError,
    PerdureError,
    ProviderError,
    StoreFull,
)
from perdure.model import events, work
from perdure.model.failures import BlockReason
from perdure.model.status import Status
from perdure.runtime.commit_builder import build_commit, ending_of
from perdure.runtime.instances import Arrival, Intake, LiveCache, LiveInstance, LockReleaser
from perdure.runtime.metrics import log
from perdure.runtime.worker import BackgroundTasks, Backoff, Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import FrameType

    from perdure.clock import Clock
    from perdure.engine.outcome import TurnOutcome
    from perdure.providers.records import Claim, TurnCommit
    from perdure.runtime.activities import ActivityDispatcher
    from perdure.runtime.orchestrations import TurnScheduler

T = TypeVar("T")

START_DEADLINE_SECONDS: Final = 8.0
"""A little less than a store waits for a server that is out, so that a start waits only once."""
_CHECK_SECONDS: Final = 0.5
_STARTS: Final = (work.StartOrchestration, work.ContinueAsNew)
_WAY_OUT: Final = (
    "a turn ends when all branches wait for steps, timers or events: move long work into an "
    "activity, and do not loop around asyncio.sleep(0)"
)


class TurnAborted(BaseException):
    """Raised inside user code whose turn takes too long. User code should not catch it."""


class TurnTooLong(PerdureError):
    """Code between two awaits did not return in time."""

    result: object = None
    """The result of code that returned although it was interrupted."""


class Watchdog:
    """Limits the time of a turn: logs a warning, then interrupts code that does not return.

    Turns run on the thread of the event loop, so code that loops for ever would stop the whole
    worker. Another thread watches, and raises an exception inside the turn when its time is up.
    """

    def __init__(self, warn_seconds: float, abort_seconds: float) -> None:
        self._warn_seconds = warn_seconds
        self._abort_seconds = abort_seconds
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._turn_thread = 0
        self._instance_id: str | None = None
        self._since = 0.0
        self._warned = False
        self._aborted_at = ""
        """The line of user code where the last turn was interrupted, or empty."""

    def start(self) -> None:
        self._turn_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="perdure-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def run(self, instance_id: str, call: Callable[..., T], *args: Any) -> T:
        """Return the result of a turn or a replay; raise TurnTooLong if it was interrupted."""
        self._since = time.monotonic()
        self._warned = False
        self._aborted_at = ""
        self._instance_id = instance_id
        result: Any = None
        try:
            try:
                result = call(*args)
            finally:
                self._end()
        except (Exception, TurnAborted) as error:
            if self._aborted_at:
                raise self._too_long(result) from error
            raise
        if self._aborted_at:
            raise self._too_long(result)
        answer: T = result
        return answer

    def elapsed(self) -> float:
        """Return the seconds since the last turn began."""
        return time.monotonic() - self._since

    def _end(self) -> None:
        with self._mutex:
            self._instance_id = None
            if self._aborted_at:
                # The exception may not have been raised yet: withdraw it.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._turn_thread), None)

    def _too_long(self, result: object) -> TurnTooLong:
        error = TurnTooLong(
            f"a turn ran for more than {self._abort_seconds:g} s and was interrupted at "
            f"{self._aborted_at}; {_WAY_OUT}"
        )
        error.result = result
        return error

    def _watch(self) -> None:
        while not self._stop.wait(_CHECK_SECONDS):
            with self._mutex:
                instance_id = self._instance_id
                if instance_id is None:
                    continue
                elapsed = time.monotonic() - self._since
                if elapsed > self._abort_seconds and not self._aborted_at:
                    self._aborted_at = self._place()
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._turn_thread), ctypes.py_object(TurnAborted)
                    )
                elif elapsed > self._warn_seconds and not self._warned:
                    self._warned = True
                    log.warning(
                        "a turn of %r has run for %.1f s, now at %s; %s",
                        instance_id,
                        elapsed,
                        self._place(),
                        _WAY_OUT,
                    )

    def _place(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._turn_thread)  # noqa: SLF001
        while frame is not None and not is_boundary(frame):
            module = str(frame.f_globals.get("__name__", ""))
            if not module.startswith(("perdure.", "asyncio")):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return "no line of its own"


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


@dataclass(slots=True, eq=False)
class Turn:
    """A turn, from its arrivals to the answer to its commit."""

    live: LiveInstance
    arrivals: list[Arrival]
    pending: PendingStart | None
    """The start that waits for this commit, if it is the first of a new instance."""
    now_ms: int
    outcome: TurnOutcome = field(init=False)
    """Set when the code has run."""
    final: tuple[Status, str] | None = field(init=False)
    """Status and output of an execution that ends with this turn."""
    commit: TurnCommit = field(init=False)
    claimed: list[tuple[work.ActivityExecute, Claim]] = field(init=False)
    """The activities that the commit hands over already locked."""
    backoff: Backoff | None = None
    """Set when the commit has to be repeated."""
    items: list[work.OrchestratorItem] = field(init=False)
    """The items for the execution: all but the starts, which have created it."""
    starts: list[work.StartOrchestration | work.ContinueAsNew] = field(init=False)
    consumed: list[int] = field(init=False)
    """Ids of messages in the orchestrator queue."""
    completed_work: list[str] = field(init=False)
    """Lock tokens of activities that ran here."""
    postponed: list[Arrival] = field(init=False)
    """Mail that the code does not want yet; it stays in the store's queue."""

    def __post_init__(self) -> None:
        self.items, self.starts, self.postponed = [], [], []
        self.consumed, self.completed_work = [], []
        for arrival in self.arrivals:
            item = arrival.item
            if isinstance(item, _STARTS):
                self.starts.append(item)
            else:
                self.items.append(item)
            if arrival.message_id is not None:
                self.consumed.append(arrival.message_id)
            if arrival.work_token is not None:
                self.completed_work.append(arrival.work_token)

    def postpone(self, items: Sequence[work.OrchestratorItem]) -> None:
        """Consume none of these items."""
        given = {id(item) for item in items}
        self.postponed = [arrival for arrival in self.arrivals if id(arrival.item) in given]
        kept = {arrival.message_id for arrival in self.postponed}
        self.consumed = [message_id for message_id in self.consumed if message_id not in kept]


class TurnRunner:
    """Runs the turns of one orchestration dispatcher and commits them."""

    def __init__(
        self,
        worker: Worker,
        owner: str,
        *,
        intake: Intake,
        activities: ActivityDispatcher,
        live: LiveCache,
        scheduler: TurnScheduler,
        keep_lock_ms: int | None,
    ) -> None:
        options = worker.options
        self._provider = worker.provider
        self._clock = worker.clock
        self._observer = worker.observer
        self._unregistered = worker.unregistered
        self._owner = owner
        self._intake = intake
        self._activities = activities
        self._live = live
        self._scheduler = scheduler
        self.background = BackgroundTasks()
        self.releaser = LockReleaser(worker, self.background)
        self.watchdog = Watchdog(
            in_seconds(options.turn_warn_after), in_seconds(options.turn_abort_after)
        )
        self._keep_lock_ms = keep_lock_ms
        """The time for which a commit keeps the lock; None if instances are not kept live."""
        self._events_max = options.history_events_max
        self._many_events = options.history_events_max // 2
        """The length of a history is checked from this number of events on: half of the maximum."""
        self._bytes_max = options.history_bytes_max
        self.start_deadline = StartDeadline(worker.clock)
        self.is_aborted = False
        self._warned_lines: set[str] = set()
        """Lines of code that the log has warned of: it warns of each once."""

    def stop_keeping(self) -> None:
        """Release each instance with the commit of its turn."""
        self._keep_lock_ms = None

    def run_inbox(self, live: LiveInstance) -> None:
        """Run a turn with everything that has arrived for a live instance."""
        arrivals = [*live.mail, *live.inbox]
        live.inbox.clear()
        self.run(live, arrivals)

    def run(
        self, live: LiveInstance, arrivals: list[Arrival], pending: PendingStart | None = None
    ) -> None:
        """Run a turn and send its commit. ``pending`` is the start of a new instance."""
        turn = Turn(live, arrivals, pending, self._clock.now_ms())
        outcome = self._compute(turn)
        if outcome is None:
            return
        if self._observer.sinks:
            self._observer.turn_ran(live.execution, self.watchdog.elapsed())
        self._live.used(live, turn.now_ms, len(outcome.delta))
        if outcome.ignored or outcome.children or outcome.detached or outcome.mistakes:
            self._warn(live, outcome)
        turn.outcome = outcome
        turn.final = None if outcome.end is None else ending_of(outcome.end)
        keep_lock_ms = None if turn.final else self._keep_lock_ms
        if outcome.postponed and (turn.final is None or not turn.final[0].is_final):
            turn.postpone(outcome.postponed)
        live.mail = turn.postponed
        turn.commit, turn.claimed = build_commit(turn, self._activities.claim, keep_lock_ms)
        live.history_bytes += sum([len(record.data) for record in turn.commit.history_delta])
        is_long = (
            live.execution.event_count >= self._many_events or live.history_bytes > self._bytes_max
        )
        if is_long and self._is_too_long(turn):
            for _ in turn.claimed:
                self._activities.release_slot()
            self._release_failed(turn, BlockReason.LIMIT, self._too_long(live))
        else:
            self._send(turn)

    def _is_too_long(self, turn: Turn) -> bool:
        """Return True if the history must not grow; log once that it has half of its events."""
        live, events = turn.live, turn.live.execution.event_count
        if events - len(turn.outcome.delta) < self._many_events <= events:
            log.warning(
                "%r has %d events of history; at %d it is blocked. Use continue_as_new() in long "
                "loops",
                live.instance_id,
                events,
                self._events_max,
            )
        return turn.final is None and (
            events >= self._events_max or live.history_bytes > self._bytes_max
        )

    def _too_long(self, live: LiveInstance) -> LimitReached:
        return LimitReached(
            f"the history would have {live.execution.event_count} events and {live.history_bytes} "
            f"bytes; at most {self._events_max} (history_events_max) and {self._bytes_max} "
            "(history_bytes_max) are allowed. Use continue_as_new() in long loops, and references "
            "for large values"
        )

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

    def _compute(self, turn: Turn) -> TurnOutcome | None:
        """Run the orchestration's code. None: that failed, and the instance is released."""
        live = turn.live
        reason: BlockReason | None = None
        failure: BaseException
        try:
            run_turn = live.execution.run_turn
            return self.watchdog.run(live.instance_id, run_turn, turn.items, turn.now_ms)
        except (TurnTooLong, LimitReached) as error:
            reason, failure = BlockReason.LIMIT, error
        except Nondeterminism as error:
            reason, failure = BlockReason.NONDETERMINISM, error
        except (CorruptData, PayloadError) as error:
            reason, failure = BlockReason.UNDECODABLE, error
        except (Exception, TurnAborted) as error:  # noqa: BLE001
            log.error("a turn of %r failed", live.instance_id, exc_info=error)
            failure = error
        except BaseException as error:  # a signal interrupted it: the turn did not happen
            self._release_failed(turn, None, error)
            raise
        self._release_failed(turn, reason, failure)
        return None

    def _warn(self, live: LiveInstance, outcome: TurnOutcome) -> None:
        """Log ignored messages, likely mistakes, and children that no handler here can run."""
        for line in outcome.ignored:
            log.debug("%s: %s", live.instance_id, line)  # completions and races cross every day
        for line in outcome.mistakes:
            if line not in self._warned_lines:
                self._warned_lines.add(line)
                name, instance_id = live.execution.handler.name, live.instance_id
                log.warning("orchestration %r, instance %r: %s", name, instance_id, line)
        for child in outcome.children:
            self._unregistered.check_orchestration(child.name, child.version)
        for chained in outcome.detached:
            self._unregistered.check_orchestration(chained.name, chained.version)

    def _release_failed(self, turn: Turn, reason: BlockReason | None, error: BaseException) -> None:
        """Release an instance whose turn failed; as Blocked if its code is the cause."""
        live, handler = turn.live, turn.live.execution.handler
        if live.start is not None:
            # Nothing is stored yet: the start goes through the queue, and is blocked from there.
            if reason is BlockReason.LIMIT:
                block = self._intake.block(handler, reason, str(error))
                self.releaser.remember_block(live.instance_id, block)
            if turn.pending is not None:
                self.answer_start(turn.pending)
        elif reason is None:
            self.releaser.fail(live.instance_id, live.lock_token, error)
        elif reason is BlockReason.NONDETERMINISM and turn.completed_work:
            # The completion may belong to a deleted or replaced instance with the same id. It goes
            # through the queue now, where the store refuses it in that case.
            self.releaser.release(live.lock_token)
        else:
            detail = error.mismatch or "" if isinstance(error, Nondeterminism) else ""
            block = self._intake.block(handler, reason, str(error), detail)
            self.releaser.block(handler, live.instance_id, live.lock_token, block)
        self._forget_with_input(turn)

    # --- committing

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
            future = answer if asyncio.isfuture(answer) else asyncio.ensure_future(answer)
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
            self.background.spawn(self._send_again(turn, error))
        else:
            self._undo(turn, error)

    def _may_repeat(self, turn: Turn, error: ProviderError) -> bool:
        # Only a start has a caller to tell. The caller can repeat it, because it has an id.
        return error.retryable and (
            turn.pending is None or not self.start_deadline.is_over(turn.now_ms, error)
        )

    async def _send_again(self, turn: Turn, error: ProviderError) -> None:
        """Repeat a commit whose outcome is unknown or that the store could not take now.

        Repeating is safe: if it was applied after all, the answer is LockLost or DuplicateEvent,
        and the instance comes back by fetch and replay.
        """
        log.warning("commit of %r is repeated: %s", turn.live.instance_id, error)
        if turn.pending is not None:
            turn.pending.unsure = turn.commit.history_delta[0].data
        self._observer.commit_repeated()
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
            if isinstance(outcome.end, events.OrchestrationFailed):
                self._observer.failed(live.execution, outcome.end.failure)
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
            log.info("a turn of %r is refused: %s", live.instance_id, error)
            if live.start is None:
                self.releaser.replay(live.lock_token)
        elif error is not None:
            log.error("commit of %r failed: %s", live.instance_id, error)
            if live.start is None:
                self.releaser.fail(live.instance_id, live.lock_token, error)
        if turn.pending is not None:
            self.answer_start(turn.pending, error=error)
        self._forget_with_input(turn)

    def _forget_with_input(self, turn: Turn) -> None:
        """Drop an instance; the completions that its turn had taken go through the queue."""
        turn.live.inbox.extendleft(reversed(turn.arrivals))
        self._live.forget(turn.live)
