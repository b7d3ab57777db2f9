"""One execution of an orchestration: replayed from history or live, stepped turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.engine.ending import TurnEnding
from perdure.engine.inbox import APPLY, COMPLETION_FAMILIES, add_beginning, add_messages
from perdure.engine.journal import Journal
from perdure.engine.outcome import WAITING, TurnOutcome
from perdure.engine.recorder import CodeRecorder
from perdure.engine.sites import Wait, list_waits
from perdure.errors import CorruptData, InternalError, Nondeterminism
from perdure.model import events

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perdure.authoring.definitions import Orchestration
    from perdure.codec import Codec
    from perdure.model import work


_TERMINAL = frozenset(events.TERMINAL_KINDS)


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
        self._journal = journal = Journal(started, codec)
        self._recorder = recorder = CodeRecorder(handler, started, journal, kv, codec)
        self._ending = TurnEnding(recorder, journal)
        self._is_dead = False

    @classmethod
    def begin(
        cls,
        handler: Orchestration[Any, Any],
        started: events.OrchestrationStarted,
        *,
        kv: Mapping[str, str],
        codec: Codec,
        carried: Sequence[work.CarriedMessage] = (),
    ) -> Execution:
        """Return a new execution; the delta of its first turn begins with ``started``."""
        if started.event_id != 1 or started.turn != 1:
            raise InternalError("the first event of an execution has id 1 and turn 1")
        execution = cls(handler, started, kv, codec)
        execution._carried = carried
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
        """Replay the history and return the execution, ready for its next turn."""
        started = _check_history(history)
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
        return self._journal.turn

    @property
    def last_event_id(self) -> int:
        return self._journal.last_event_id

    def run_turn(self, inbox: Sequence[work.OrchestratorItem], now_ms: int) -> TurnOutcome:
        """Apply the messages in order, run the code until it waits, and return what to commit."""
        if self._is_dead:
            raise InternalError("this execution was closed or has failed; replay it")
        if self.is_finished:
            ignored = [f"{type(item).__name__}: the execution has ended" for item in inbox]
            return TurnOutcome(turn=self._journal.turn, result=WAITING, ignored=ignored)
        try:
            return self._run_live(inbox, now_ms)
        except BaseException:
            self._is_dead = True
            raise

    def waits(self) -> list[Wait]:
        """Return every open step with the suspended frames of its branch."""
        return list_waits(self._recorder.loop, self._recorder.operations)

    def close(self) -> None:
        """Close the code. Its finally blocks run, but steps that they ask for are not recorded."""
        self._is_dead = True
        self._recorder.close()

    def _run_live(self, inbox: Sequence[work.OrchestratorItem], now_ms: int) -> TurnOutcome:
        journal, recorder = self._journal, self._recorder
        before_ms = journal.now_ms
        if journal.turn == 0:
            journal.begin_live(self.started.timestamp_ms)
            add_beginning(self.started, self._carried, journal)
        else:
            # Time never runs backwards in the code, even if the clock of the machine does.
            journal.begin_live(max(now_ms, before_ms))
        ignored = add_messages(inbox, journal, recorder)
        delta = journal.delta
        if not delta:
            journal.undo_begin(before_ms)
            return TurnOutcome(turn=journal.turn, result=WAITING, ignored=ignored)
        outcome = TurnOutcome(turn=journal.turn, result=WAITING, delta=delta, ignored=ignored)
        recorder.outcome = outcome
        loop = recorder.loop
        loop.now_ms = journal.now_ms
        loop.enter()
        try:
            self._apply([*delta])
        finally:
            loop.leave()
        outcome.result = result = self._ending.conclude_live()
        recorder.outcome = None
        if recorder.has_cancelled_in_turn:
            recorder.drop_cancelled_in_turn(outcome)
        self.event_count = journal.last_event_id
        self.custom_status = recorder.custom_status
        if result is not WAITING:
            self.is_finished = True
            loop.log_unretrieved_errors()
        return outcome

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
        self._journal.end_of_history(last)
        self.event_count = last.event_id
        self.custom_status = self._recorder.custom_status

    def _replay_turn(self, recorded: Sequence[events.Event]) -> None:
        journal = self._journal
        first, last = recorded[0], recorded[-1]
        arrived: list[events.Event] = []
        decisions: list[events.Event] = []
        for event in recorded:
            (arrived if type(event) in APPLY else decisions).append(event)
        if type(last) in _TERMINAL and self._ending.is_from_outside(last):
            self.is_finished = True
            return
        now_ms = max(first.timestamp_ms, journal.now_ms)
        journal.begin_replay(first.turn, now_ms, len(arrived), decisions)
        self._recorder.loop.now_ms = now_ms
        for event in arrived:
            self._check_completion(event)
        self._apply(arrived)
        self.is_finished = self._ending.conclude_replayed()
        journal.end_replay()
        journal.last_event_id = last.event_id

    def _apply(self, arrived: Sequence[events.Event]) -> None:
        """Apply the events one by one, and run the code until it waits after each."""
        recorder = self._recorder
        loop = recorder.loop
        for event in arrived:
            APPLY[type(event)](recorder, event)
            if event.event_id == 1:
                self._cancel_before_start(arrived)
            if not loop.is_over:
                loop.run_until_idle()

    def _cancel_before_start(self, arrived: Sequence[events.Event]) -> None:
        """Apply a cancellation of the batch that starts the execution: no line of the code runs."""
        for event in arrived:
            if type(event) is events.OrchestrationCancelRequested:
                APPLY[type(event)](self._recorder, event)

    def _check_completion(self, event: events.Event) -> None:
        family = COMPLETION_FAMILIES.get(type(event))
        if family is None:
            return
        source: int = getattr(event, "source_event_id")  # noqa: B009
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
