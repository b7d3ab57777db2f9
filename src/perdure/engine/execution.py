"""One execution of an orchestration: replayed or live, turn by turn, and how each turn ends."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from perdure import limits
from perdure.engine.decisions import TurnDecisions, is_same_payload
from perdure.engine.inbox import (
    APPLY,
    COMPLETION_FAMILIES,
    add_beginning,
    add_messages,
    before_mail,
    is_for_next,
    is_mail,
)
from perdure.engine.outcome import TurnOutcome
from perdure.engine.recorder import CodeRecorder
from perdure.engine.tasks import Unwinding
from perdure.engine.user_code import boundary, explain
from perdure.engine.waits import Scope, Wait, list_scopes, list_sites, list_waits
from perdure.errors import (
    CannotUnwrap,
    CorruptData,
    ForbiddenInOrchestration,
    InternalError,
    LimitReached,
    Nondeterminism,
    PayloadError,
)
from perdure.logs import get_logger
from perdure.model import events, work
from perdure.model.failures import Category, describe_exception

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perdure.authoring.definitions import Orchestration
    from perdure.codec import Codec
    from perdure.engine.loop import DurableTimer

_log = get_logger("perdure.orchestration")

_COMPLETED = events.OrchestrationCompleted
_FAILED = events.OrchestrationFailed
_CANCELLED = events.OrchestrationCancelled
_CONTINUED = events.OrchestrationContinuedAsNew
_TERMINAL = frozenset(events.Terminal.__subclasses__())
_STARTED = events.OrchestrationStarted
_FIRED = events.TimerFired
_CLEANUP_ERROR_CHARACTERS_MAX = 500
_REASONS: dict[type[Any], str] = {
    _COMPLETED: "completed",
    _FAILED: "failed",
    _CANCELLED: "cancelled",
    _CONTINUED: "continued as new",
}
_End: TypeAlias = tuple[type[events.Terminal], dict[str, Any]]
"""The class of the event that ends an execution, and its own fields."""


class Execution:
    """The suspended code of one execution, with everything that its next turn needs.

    A turn returns its outcome or raises. After an exception the execution must be closed:

    - Nondeterminism: code and history disagree.
    - PayloadError: the arguments, or the result of a step, do not fit the annotation of the code.
    - CorruptData: the history is damaged.
    """

    def __init__(
        self,
        handler: Orchestration[Any, Any],
        started: events.OrchestrationStarted,
        kv: Mapping[str, str],
        codec: Codec,
    ) -> None:
        self.handler = handler
        self.started = started
        self.instance_id = started.instance_id
        self.execution_id = started.execution_id
        self.is_finished = False
        self.event_count = 0
        """Number of events of the history after the last turn."""
        self.custom_status = started.initial_custom_status
        """JSON text of the custom status after the last turn."""
        self._carried: Sequence[work.CarriedMessage] = ()
        self._watchers: Sequence[events.Watcher] = ()
        self._decisions = decisions = TurnDecisions(started, codec)
        self._recorder = recorder = CodeRecorder(handler, started, decisions, kv, codec)
        self._ending = TurnEnding(recorder, decisions)
        self._is_dead = False

    @classmethod
    def begin(
        cls,
        handler: Orchestration[Any, Any],
        started: events.OrchestrationStarted,
        *,
        codec: Codec,
        carried: Sequence[work.CarriedMessage] = (),
        watchers: Sequence[events.Watcher] = (),
    ) -> Execution:
        """Return a new execution; the delta of its first turn begins with ``started``."""
        if started.event_id != 1 or started.turn != 1:
            raise InternalError("the first event of an execution has id 1 and turn 1")
        execution = cls(handler, started, started.initial_state or {}, codec)
        execution._carried = carried
        execution._watchers = watchers
        return execution

    @classmethod
    def replay(
        cls,
        handler: Orchestration[Any, Any],
        history: Sequence[events.Event],
        *,
        kv: Mapping[str, str],
        codec: Codec,
    ) -> Execution:
        """Replay the history and return the execution, ready for its next turn.

        ``kv``: the state that the execution began with, for a history that does not hold it.
        """
        started = _check_history(history)
        if started.initial_state is not None:
            kv = started.initial_state
        if not _TERMINAL.isdisjoint(map(type, history[:-1])):
            history = events.without_undone(history)
            if started.execution_id == 1:
                kv = {}  # the state of the store may come from turns that a retry has undone
        execution = cls(handler, started, kv, codec)
        if not _TERMINAL.isdisjoint(map(type, history[:-1])):
            # An end that is not the last event: there is no code left to run.
            execution.is_finished = True
            execution._end_of_history(history[-1])
            return execution
        try:
            execution._replay(history)
        except BaseException:
            execution.close()
            raise
        return execution

    @property
    def turn(self) -> int:
        """The number of the last turn that wrote history."""
        return self._decisions.turn

    def run_turn(self, inbox: Sequence[work.OrchestratorItem], now_ms: int) -> TurnOutcome:
        """Apply the messages in order, run the code until it waits, and return what to commit."""
        if self._is_dead:
            raise InternalError("this execution was closed or has failed; replay it")
        if self.is_finished:
            ignored = [f"{type(item).__name__}: the execution has ended" for item in inbox]
            return TurnOutcome(turn=self._decisions.turn, ignored=ignored)
        try:
            return self._run_live(inbox, now_ms)
        except BaseException:
            self._is_dead = True
            raise

    @property
    def wants_mail(self) -> bool:
        """False if a turn with nothing but mail would postpone it."""
        return self._recorder.wants_mail

    def waits(self) -> list[Wait]:
        """Return every open step with the suspended frames of its branch."""
        return list_waits(self._recorder.loop, self._recorder.operations)

    def scopes(self) -> list[Scope]:
        """Return the variables of the suspended code."""
        return list_scopes(self._recorder.loop)

    def check_arrival(self, item: work.ExternalRaised | work.QueueMessage) -> bool:
        """Return True if a wait is open for it; raise PayloadError if it does not fit that wait."""
        wait = self._recorder.mailboxes.find_wait(
            item.name, is_message=type(item) is work.QueueMessage
        )
        if wait is None:
            return False
        try:
            self._recorder.codec.decode(item.data, wait.definition, where="")
        except CannotUnwrap:
            pass  # the orchestration tells it
        except PayloadError as error:
            raise PayloadError(
                f"{item.name!r} is not sent to {item.instance_id!r}, which waits for it with "
                f"another type at {wait.event.site}{error}"
            ) from None
        return True

    def close(self) -> None:
        """Close the code. Its finally blocks run, but steps that they ask for are not recorded."""
        self._is_dead = True
        self._recorder.close()

    def _run_live(self, inbox: Sequence[work.OrchestratorItem], now_ms: int) -> TurnOutcome:
        decisions, recorder = self._decisions, self._recorder
        before_ms = decisions.now_ms
        if decisions.turn == 0:
            decisions.begin_live(self.started.timestamp_ms)
            add_beginning(self.started, self._carried, self._watchers, decisions)
        else:
            # Time never runs backwards in the code, even if the clock of the machine does.
            decisions.begin_live(max(now_ms, before_ms))
        inbox, mail = before_mail(inbox, self._carried, recorder)
        ignored = add_messages(inbox, recorder)
        delta = decisions.delta
        outcome = TurnOutcome(turn=decisions.turn, delta=delta, ignored=ignored)
        if delta or mail:
            recorder.outcome = outcome
            loop = recorder.loop
            loop.now_ms = decisions.now_ms
            loop.enter()
            try:
                self._apply([*delta])
                if mail:
                    self._add_and_apply(mail, outcome)
            finally:
                loop.leave()
        if delta:
            self._complete(outcome)
        else:
            recorder.outcome = None
            decisions.undo_begin(before_ms)
            outcome.turn = decisions.turn
            outcome.activities = recorder.take_retried()
        return outcome

    def _complete(self, outcome: TurnOutcome) -> None:
        """Decide how the turn ends, and complete the outcome."""
        recorder = self._recorder
        if recorder.completed_elsewhere:
            outcome.cancelled_activities = [
                *recorder.completed_elsewhere,
                *outcome.cancelled_activities,
            ]
            recorder.completed_elsewhere = ()
        outcome.end = self._ending.conclude_live()
        if recorder.state_reads:
            recorder.check_state_reads()
        recorder.outcome = None
        if recorder.has_cancelled_in_turn:
            recorder.drop_cancelled_in_turn(outcome)
        if recorder.retried:
            outcome.activities = [*recorder.take_retried(), *outcome.activities]
        self.event_count = self._decisions.last_event_id
        self.custom_status = recorder.custom_status
        if outcome.end is not None:
            self.is_finished = True
            outcome.watchers = recorder.watchers
            recorder.loop.log_unretrieved_errors()

    def _add_and_apply(self, items: Sequence[work.OrchestratorItem], outcome: TurnOutcome) -> None:
        """Add and apply messages one by one: mail only while the code wants it."""
        decisions, recorder = self._decisions, self._recorder
        postponed: deque[work.OrchestratorItem] = deque()
        coming = deque(items)
        while coming:
            item = coming.popleft()
            if (is_mail(item) and not recorder.wants_mail) or is_for_next(item, recorder):
                postponed.append(item)
                continue
            applied = len(decisions.delta)
            outcome.ignored = [*outcome.ignored, *add_messages((item,), recorder)]
            self._apply(decisions.delta[applied:])
            if postponed and recorder.wants_mail:
                coming.extendleft(reversed(postponed))
                postponed.clear()
        outcome.postponed = tuple(postponed)

    def _replay(self, history: Sequence[events.Event]) -> None:
        recorder = self._recorder
        recorder.marked_patches = frozenset(
            event.name for event in history if type(event) is events.PatchMarked
        )
        # Entered once for all turns: entering takes as long as the code of a turn.
        recorder.loop.enter()
        try:
            for recorded in _turns(history):
                self._replay_turn(recorded)
                if self.is_finished:
                    break
        finally:
            recorder.loop.leave()
        self._end_of_history(history[-1])

    def _end_of_history(self, last: events.Event) -> None:
        self._decisions.end_of_history(last)
        self.event_count = last.event_id
        self.custom_status = self._recorder.custom_status

    def _replay_turn(self, recorded: Sequence[events.Event]) -> None:
        decisions = self._decisions
        first, last = recorded[0], recorded[-1]
        arrived: list[events.Event] = []
        performed: list[events.Event] = []
        for event in recorded:
            (arrived if type(event) in APPLY else performed).append(event)
        if type(last) in _TERMINAL and self._ending.is_from_outside(last):
            self.is_finished = True
            return
        now_ms = max(first.timestamp_ms, decisions.now_ms)
        decisions.begin_replay(first.turn, now_ms, performed)
        self._recorder.loop.now_ms = now_ms
        for event in arrived:
            self._check_completion(event)
        self._apply(arrived)
        self.is_finished = self._ending.conclude_replayed()
        decisions.end_replay()

    def _apply(self, arrived: Sequence[events.Event]) -> None:
        """Apply the events one by one, and run the code until it waits after each.

        Timers of one moment fire together, as in asyncio.
        """
        recorder = self._recorder
        loop = recorder.loop
        for position, event in enumerate(arrived, 1):
            kind = type(event)
            APPLY[kind](recorder, event)
            if kind is _STARTED:
                self._cancel_at_start(arrived)
            elif kind is _FIRED and _fires_with_next(arrived, position):
                continue
            if not loop.is_over:
                loop.run_until_idle()

    def _cancel_at_start(self, arrived: Sequence[events.Event]) -> None:
        """Apply a cancellation of the batch that starts the execution.

        No line of a first execution runs. A later one runs to its first await: the executions
        before it may have left something to clean up.
        """
        if self.execution_id > 1:
            self._recorder.loop.run_until_idle()
        for event in arrived:
            if type(event) is events.OrchestrationCancelRequested:
                APPLY[type(event)](self._recorder, event)

    def _check_completion(self, event: events.Event) -> None:
        if not isinstance(event, events.Resolving):
            return
        source, family = event.source_event_id, COMPLETION_FAMILIES[type(event)]
        if not self._recorder.operations.accept(source, family, event):
            raise Nondeterminism(
                f"history event {event.event_id} ({type(event).__name__}) "
                f"completes event {source} a second time",
                event_id=event.event_id,
            )


def run_turn(
    handler: Orchestration[Any, Any],
    history: Sequence[events.Event],
    inbox: Sequence[work.OrchestratorItem],
    *,
    kv: Mapping[str, str],
    now_ms: int,
    codec: Codec,
) -> TurnOutcome:
    """Replay the history and run one turn: a pure function of its arguments."""
    execution = Execution.replay(handler, history, kv=kv, codec=codec)
    try:
        return execution.run_turn(inbox, now_ms)
    finally:
        execution.close()


def _fires_with_next(arrived: Sequence[events.Event], position: int) -> bool:
    """Return True if the timer before that position fires at the moment of the one there."""
    fired: Any = arrived[position - 1]
    following: Any = arrived[position] if position < len(arrived) else None
    return type(following) is _FIRED and following.fire_at_ms == fired.fire_at_ms


def _turns(history: Sequence[events.Event]) -> Iterator[Sequence[events.Event]]:
    """Yield the events of each turn."""
    start, turn = 0, history[0].turn
    for position, event in enumerate(history):
        if event.turn != turn:
            yield history[start:position]
            start, turn = position, event.turn
    yield history[start:]


def _check_history(history: Sequence[events.Event]) -> events.OrchestrationStarted:
    """Raise CorruptData for a missing event, a foreign event or a wrong first event."""
    if not history:
        raise CorruptData("replay", "the history is empty")
    started = history[0]
    if not isinstance(started, events.OrchestrationStarted):
        raise CorruptData("replay", f"the history begins with {type(started).__name__}")
    turn, execution_id, instance_id = 1, started.execution_id, started.instance_id
    for position, event in enumerate(history, 1):
        if event.event_id != position:
            raise CorruptData(
                "replay", f"event {event.event_id} stands at position {position} of the history"
            )
        if event.execution_id != execution_id or event.instance_id != instance_id:
            raise CorruptData("replay", f"event {position} belongs to another execution")
        if event.turn != turn:
            if event.turn != turn + 1:
                raise CorruptData("replay", f"event {position} belongs to turn {event.turn}")
            turn = event.turn
    return started


# --- the end of a turn


class TurnEnding:
    """Decides the result of a turn, in the same way live and on replay."""

    def __init__(self, recorder: CodeRecorder, decisions: TurnDecisions) -> None:
        self._recorder = recorder
        self._decisions = decisions
        self._cleanup_timer: DurableTimer | None = None
        self._is_cut_off = False

    @staticmethod
    def is_from_outside(end: events.Event | None) -> bool:
        """Return True if the execution was ended without running its code."""
        if isinstance(end, events.OrchestrationFailed):
            return end.failure.category is not Category.APPLICATION
        return isinstance(end, events.OrchestrationTerminated)

    def conclude_live(self) -> events.Terminal | None:
        """Return the event that ends the execution; None if the code waits."""
        event = self._conclude()
        if event is not None:
            self._decisions.end(event)
            if type(event) is _COMPLETED:
                if not self._recorder.name.startswith("perdure."):  # a second answer of a promise
                    self._recorder.note_unwanted_mail()
            elif isinstance(event, _CANCELLED):
                self._log_bad_cleanup(event.reason)
        return event

    def conclude_replayed(self) -> bool:
        """Compare the end of the turn with history; return True if the execution has ended."""
        event = self._conclude()
        if event is None:
            return False
        recorded = self._decisions.recorded_end()
        self._decisions.end(event, is_repeated=self._is_same_end(recorded, event))
        return True

    @boundary
    def _conclude(self) -> events.Terminal | None:
        recorder = self._recorder
        loop = recorder.loop
        # True if the root task has ended and a task or generator of it still cleans up.
        has_left = not loop.is_over and loop.root is not None and loop.root.done()
        if has_left and not self._has_open_step():
            loop.stop_with(None)  # no open step is left that could wake the clean-up
        if loop.is_over:
            kind, content = self._end()
        else:
            is_cleaning_up = has_left or recorder.cancel_reason is not None
            if is_cleaning_up and not recorder.compensations:
                self._bound_cleanup()
            if recorder.operations.open:
                return None
            kind, content = _failed(_stuck(recorder))
        if recorder.operations.open:
            self._close_steps(kind)
        decisions = self._decisions
        return kind(**decisions.common_fields(decisions.last_event_id + 1), **content)

    def _has_open_step(self) -> bool:
        """Return True if a step is open besides the timer that bounds the clean-up."""
        timer = self._cleanup_timer
        return any(each.target is not timer for each in self._recorder.operations.open.values())

    def _bound_cleanup(self) -> None:
        if self._cleanup_timer is None:
            self._cleanup_timer = self._recorder.start_cleanup_timer(
                self._force_end, limits.CLEANUP_SECONDS
            )

    def _force_end(self) -> None:
        recorder = self._recorder
        if recorder.compensations:
            self._cleanup_timer = None  # the time counts again when the saga has ended
            return
        self._is_cut_off = True
        recorder.loop.stop_with(None)
        if recorder.cancel_reason is None and not recorder.is_replaying:
            _log.warning(
                "instance %r has ended: the clean-up of what it left behind was cut off after %g s",
                recorder.instance_id,
                limits.CLEANUP_SECONDS,
            )

    def _cancelled(self, reason: str) -> _End:
        """End as cancelled. The reason also names a clean-up that failed or was cut off."""
        error = self._cleanup_error()
        if error is not None:
            text = str(describe_exception(error))
            if len(text) > _CLEANUP_ERROR_CHARACTERS_MAX:
                text = text[:_CLEANUP_ERROR_CHARACTERS_MAX] + "..."
            reason = f"{reason}; its clean-up raised {text}"
        elif self._is_cut_off:
            reason = f"{reason}; its clean-up was cut off after {limits.CLEANUP_SECONDS:g} s"
        return _CANCELLED, {"reason": reason}

    def _cleanup_error(self) -> BaseException | None:
        loop = self._recorder.loop
        if loop.crash is not None:
            return loop.crash
        root = loop.root
        if root is None or not root.done() or root.cancelled():
            return None
        error = root.exception()
        return None if isinstance(error, Unwinding) else error

    def _log_bad_cleanup(self, reason: str) -> None:
        error = self._cleanup_error()
        if error is None and not self._is_cut_off:
            return
        _log.warning(
            "instance %r was cancelled without a whole clean-up: %s",
            self._recorder.instance_id,
            reason,
            exc_info=error,
        )

    def _end(self) -> _End:
        recorder = self._recorder
        if isinstance(recorder.loop.crash, CannotUnwrap):
            raise recorder.loop.crash  # the turn has no result and is not committed
        if recorder.cancel_reason is not None:
            return self._cancelled(recorder.cancel_reason)
        if recorder.loop.crash is not None:
            return _failed(recorder.loop.crash)
        if recorder.continued is not None:
            payload, version = recorder.continued
            if recorder.outcome is not None:
                self._hand_over(recorder.outcome)
            return _CONTINUED, {"input": payload, "version": version}
        return self._finish()

    def _hand_over(self, outcome: TurnOutcome) -> None:
        """Note the unread mail, and a cancellation, for the next execution."""
        outcome.carried = carried = self._recorder.mailboxes.unread()
        outcome.cancel_reason = self._recorder.cancel_next_reason
        size = sum(len(message.name) + len(message.data) for message in carried)
        if size > limits.CARRY_FORWARD_BYTES_MAX:
            raise LimitReached(
                f"continue_as_new() would carry {len(carried)} unread events and messages of "
                f"{size} bytes, at most {limits.CARRY_FORWARD_BYTES_MAX} are allowed; "
                "let the code read them before"
            )

    def _finish(self) -> _End:
        recorder = self._recorder
        root = recorder.loop.root
        assert root is not None
        if root.cancelled():
            error = asyncio.CancelledError("the code cancelled itself; no client asked for it")
            return _failed(error)
        failure = root.exception()
        if failure is not None:
            return _failed(explain(failure))
        try:
            output = recorder.handler.signature.encode_result(root.result(), recorder.codec)
        except PayloadError as error:
            return _failed(error)
        return _COMPLETED, {"output": output}

    def _close_steps(self, kind: type[events.Terminal]) -> None:
        """Give up every open step, except children with on_parent_close='abandon'."""
        reason = f"orchestration {_REASONS[kind]}"
        recorder = self._recorder
        has_returned = kind in {_COMPLETED, _CONTINUED}
        for operation in list(recorder.operations.open.values()):
            if has_returned:
                recorder.check_awaited(operation)
            if getattr(operation.event, "on_parent_close", "cancel") != "abandon":
                recorder.give_up(operation, reason)

    def _is_same_end(self, recorded: events.Event | None, event: events.Terminal) -> bool:
        codec = self._recorder.codec
        match recorded, event:
            case events.OrchestrationCompleted(), events.OrchestrationCompleted():
                return is_same_payload(recorded.output, event.output, codec)
            case events.OrchestrationContinuedAsNew(), events.OrchestrationContinuedAsNew():
                same = is_same_payload(recorded.input, event.input, codec)
                return same and recorded.version == event.version
            case events.OrchestrationFailed(), events.OrchestrationFailed():
                # Messages may hold addresses and times, so only the type of the error is compared.
                return recorded.failure.type_name == event.failure.type_name
            case _:
                return type(recorded) is type(event)


def _failed(error: BaseException) -> _End:
    return _FAILED, {"failure": describe_exception(error)}


def _stuck(recorder: CodeRecorder) -> ForbiddenInOrchestration:
    places = ", ".join(list_sites(recorder.loop)) or "an unknown place"
    return ForbiddenInOrchestration(
        f"the orchestration waits at {places}, but no step is open that could ever wake it: "
        "await steps, timers, events or messages; to wait until it is cancelled, await an event"
    )
