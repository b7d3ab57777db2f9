"""Decides how a turn ends: the code waits, or the execution ends with a result."""

from __future__ import annotations

import asyncio
import logging
import traceback
from typing import TYPE_CHECKING, Any

from perdure import limits
from perdure.engine.closing import Unwinding
from perdure.engine.matching import is_same_payload
from perdure.engine.outcome import (
    WAITING,
    Cancelled,
    Completed,
    ContinuedAsNew,
    Failed,
    TurnResult,
    Waiting,
)
from perdure.engine.recorder import history_too_long
from perdure.engine.sites import list_sites
from perdure.errors import (
    CannotUnwrap,
    ForbiddenInOrchestration,
    InternalError,
    InvalidValue,
    PayloadError,
)
from perdure.model import events
from perdure.model.failures import Category, describe_exception

if TYPE_CHECKING:
    from perdure.engine.journal import Journal
    from perdure.engine.loop import DurableTimer
    from perdure.engine.recorder import CodeRecorder


_log = logging.getLogger("perdure.orchestration")

_CLEANUP_ERROR_CHARACTERS_MAX = 500


class TurnEnding:
    """Decides the result of a turn, in the same way live and on replay."""

    def __init__(self, recorder: CodeRecorder, journal: Journal) -> None:
        self._recorder = recorder
        self._journal = journal
        self._cleanup_timer: DurableTimer | None = None
        self._is_cut_off = False

    @staticmethod
    def is_from_outside(end: events.Event | None) -> bool:
        """Return True if the execution was ended without running its code."""
        if isinstance(end, events.OrchestrationFailed):
            return end.failure.category is not Category.APPLICATION
        return isinstance(end, events.OrchestrationTerminated)

    def conclude_live(self) -> TurnResult:
        result = self._conclude()
        if result is not WAITING:
            self._journal.end(self._terminal_event(result))
            if type(result) is Cancelled:
                self._log_bad_cleanup(result)
        return result

    def conclude_replayed(self) -> bool:
        """Compare the end of the turn with history; return True if the execution has ended."""
        result = self._conclude()
        if result is WAITING:
            return False
        event = self._terminal_event(result)
        recorded = self._journal.recorded_end()
        self._journal.end(event, is_repeated=self._is_same_end(recorded, event))
        return True

    def _conclude(self) -> TurnResult:
        recorder = self._recorder
        loop = recorder.loop
        # True if the root task has ended and a task or generator of it still cleans up.
        has_left = not loop.is_over and loop.root is not None and loop.root.done()
        if has_left and not self._has_open_step():
            loop.stop_with(None)  # no open step is left that could wake the clean-up
        if loop.is_over:
            result = self._result()
        else:
            if has_left or recorder.cancel_reason is not None:
                self._bound_cleanup()
            result = self._check_waiting()
        if result is not WAITING and recorder.operations.open:
            self._close_steps(result)
        return result

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
        self._is_cut_off = True
        recorder.loop.stop_with(None)
        if recorder.cancel_reason is None and not recorder.is_replaying:
            _log.warning(
                "instance %r has ended: the clean-up of what it left behind was cut off after %g s",
                recorder.instance_id,
                limits.CLEANUP_SECONDS,
            )

    def _cancelled(self, reason: str) -> Cancelled:
        """Return Cancelled. The reason also names a clean-up that failed or was cut off."""
        error = self._cleanup_error()
        if error is not None:
            text = str(describe_exception(error))
            if len(text) > _CLEANUP_ERROR_CHARACTERS_MAX:
                text = text[:_CLEANUP_ERROR_CHARACTERS_MAX] + "..."
            return Cancelled(f"{reason}; its clean-up raised {text}")
        if self._is_cut_off:
            seconds = f"{limits.CLEANUP_SECONDS:g} s"
            return Cancelled(f"{reason}; its clean-up was cut off after {seconds}")
        return Cancelled(reason)

    def _cleanup_error(self) -> BaseException | None:
        loop = self._recorder.loop
        if loop.crash is not None:
            return loop.crash
        root = loop.root
        if root is None or not root.done() or root.cancelled():
            return None
        if self._recorder.is_cancelled_late:
            return None
        error = root.exception()
        return None if isinstance(error, Unwinding) else error

    def _log_bad_cleanup(self, result: Cancelled) -> None:
        error = self._cleanup_error()
        if error is None and not self._is_cut_off:
            return
        _log.warning(
            "instance %r was cancelled without a whole clean-up: %s",
            self._recorder.instance_id,
            result.reason,
            exc_info=error,
        )

    def _result(self) -> TurnResult:
        recorder = self._recorder
        if isinstance(recorder.loop.crash, CannotUnwrap):
            raise recorder.loop.crash  # the turn has no result and is not committed
        if recorder.cancel_reason is not None:
            return self._cancelled(recorder.cancel_reason)
        if recorder.loop.crash is not None:
            return Failed(describe_exception(recorder.loop.crash))
        if recorder.continued is not None:
            return self._continue(*recorder.continued)
        return self._finish()

    def _check_waiting(self) -> TurnResult:
        recorder = self._recorder
        if not recorder.operations.open:
            return Failed(describe_exception(_stuck(recorder)))
        if self._journal.last_event_id >= limits.HISTORY_EVENTS_MAX:
            return Failed(describe_exception(history_too_long()))
        return WAITING

    def _continue(self, payload: Any, version: str | None) -> TurnResult:
        carried = self._recorder.mailboxes.unread()
        size = sum(len(message.name) + len(bytes(message.data)) for message in carried)
        if size > limits.CARRY_FORWARD_BYTES_MAX:
            error = InvalidValue(
                f"continue_as_new() would carry {len(carried)} unread events and messages of "
                f"{size} bytes, at most {limits.CARRY_FORWARD_BYTES_MAX} are allowed; "
                "read them before, or send references"
            )
            return Failed(describe_exception(error))
        return ContinuedAsNew(payload, version, carried)

    def _finish(self) -> TurnResult:
        recorder = self._recorder
        root = recorder.loop.root
        assert root is not None
        if root.cancelled():
            error = asyncio.CancelledError("the code cancelled itself; no client asked for it")
            return Failed(describe_exception(error))
        failure = root.exception()
        if failure is not None:
            return Failed(describe_exception(_explained(failure)))
        try:
            output = recorder.handler.signature.encode_result(root.result(), recorder.codec)
        except PayloadError as error:
            return Failed(describe_exception(error))
        return Completed(output)

    def _close_steps(self, result: TurnResult) -> None:
        """Give up every open step, except children with on_parent_close='abandon'."""
        reason = f"orchestration {_REASONS[type(result)]}"
        recorder = self._recorder
        for operation in list(recorder.operations.open.values()):
            if getattr(operation.event, "on_parent_close", "cancel") != "abandon":
                recorder.give_up(operation, reason)

    def _terminal_event(self, result: TurnResult) -> events.Terminal:
        journal = self._journal
        if isinstance(result, Completed):  # the most common: keywords cost a quarter of a dict
            return events.OrchestrationCompleted(
                event_id=journal.last_event_id + 1,
                instance_id=journal.instance_id,
                execution_id=journal.execution_id,
                timestamp_ms=journal.now_ms,
                turn=journal.turn,
                output=result.output,
            )
        envelope: dict[str, Any] = {
            "event_id": journal.last_event_id + 1,
            "instance_id": journal.instance_id,
            "execution_id": journal.execution_id,
            "timestamp_ms": journal.now_ms,
            "turn": journal.turn,
        }
        match result:
            case Failed():
                return events.OrchestrationFailed(**envelope, failure=result.failure)
            case Cancelled():
                return events.OrchestrationCancelled(**envelope, reason=result.reason)
            case ContinuedAsNew():
                return events.OrchestrationContinuedAsNew(
                    **envelope, input=result.input, version=result.version
                )
            case Waiting():
                raise InternalError("an execution that waits has not ended")

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


_REASONS: dict[type[Any], str] = {
    Completed: "completed",
    Failed: "failed",
    Cancelled: "cancelled",
    ContinuedAsNew: "continued as new",
}


def _stuck(recorder: CodeRecorder) -> ForbiddenInOrchestration:
    places = ", ".join(list_sites(recorder.loop)) or "an unknown place"
    return ForbiddenInOrchestration(
        f"the orchestration waits at {places}, but no step is open that could ever wake it: "
        "await steps, timers, events or messages; to wait until it is cancelled, await an event"
    )


def _explained(error: BaseException) -> BaseException:
    """Replace asyncio's error for a foreign awaitable by one that says what to do."""
    text = str(error) if type(error) is RuntimeError else ""
    if not any(words in text for words in _FOREIGN):
        return error
    places = [summary for summary in traceback.extract_tb(error.__traceback__) if summary.line]
    last = places[-1] if places else None
    where = f" at {last.filename}:{last.lineno}" if last is not None else ""
    explained = ForbiddenInOrchestration(
        f"the orchestration awaited something foreign{where}; "
        "only steps and asyncio's own awaitables can be awaited, make it an activity"
    )
    explained.__cause__ = error
    return explained


_FOREIGN = ("attached to a different loop", "bound to a different event loop", "Task got bad yield")
