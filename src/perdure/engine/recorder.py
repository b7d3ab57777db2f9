"""Implements the recorder of authoring: each call of user code becomes a decision or a value."""

from __future__ import annotations

import asyncio
import math
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import msgspec

from perdure import limits
from perdure.authoring.context import Step, running
from perdure.authoring.definitions import Activity, Orchestration, parse_version
from perdure.engine import user_code
from perdure.engine.inbox import (
    ACTIVITY,
    CHILD,
    EVENT,
    MESSAGE,
    TIMER,
    Mailboxes,
    Operation,
    Operations,
    StateRead,
    is_dropped,
    is_let_go,
)
from perdure.engine.loop import DurableLoop, DurableTimer
from perdure.engine.outcome import ScheduledActivity, TurnOutcome
from perdure.engine.tasks import ArrivalStep, Branch, Unwinding, release_future
from perdure.errors import CannotUnwrap, ForbiddenInOrchestration, InvalidValue, PayloadError
from perdure.ids import child_id
from perdure.model import events, work

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from perdure.codec import Codec
    from perdure.engine.decisions import TurnDecisions
    from perdure.engine.inbox import Family

S = TypeVar("S", bound=events.Scheduled)

_CANCELLING: Final[Mapping[Family, type[events.Cancelling]]] = {
    ACTIVITY: events.ActivityCancelRequested,
    TIMER: events.TimerCancelled,
    EVENT: events.ExternalSubscribedCancelled,
    MESSAGE: events.QueueSubscriptionCancelled,
    CHILD: events.SubOrchestrationCancelRequested,
}
_CALLED: Final[Mapping[Family, str]] = {
    ACTIVITY: "activity {!r}",
    CHILD: "orchestration {!r}",
    EVENT: "wait_for_event({!r})",
    MESSAGE: "next_message({!r})",
}
_CONSTANTS: Final = (str, int, float, bytes, type(None))
"""Classes of values that cannot be changed; bool is an int."""
_STEP: Final[type[Step[Any]]] = Step


class CodeRecorder:
    """Answers user code, keeps its open steps and its state, and collects what the turn sends.

    Once closed it answers with steps that never resolve and writes nothing: code that is being
    unwound is stopped at its next ``await``.
    """

    def __init__(
        self,
        handler: Orchestration[Any, Any],
        started: events.OrchestrationStarted,
        decisions: TurnDecisions,
        kv: Mapping[str, str],
        codec: Codec,
    ) -> None:
        self.instance_id = started.instance_id
        self.execution_id = started.execution_id
        self.name = started.name
        self.version = started.version
        self.codec = codec
        self.custom_status = started.initial_custom_status
        self.handler = handler
        self.depth = started.depth
        self.decisions = decisions
        self.loop = DurableLoop(started.seed, self)
        self.operations = Operations()
        self.continued: tuple[msgspec.Raw, str | None] | None = None
        """Arguments and version of the next execution, once the code asked for it."""
        self.unanswered: dict[str, Callable[[], None]] = {}
        self.cancel_reason: str | None = None
        """Reason of the cancellation, once the code has got one."""
        self.cancel_next_reason: str | None = None
        """Reason of a cancellation that came after the code had continued as new."""
        self.is_closed = False
        self.outcome: TurnOutcome | None = None
        """Outcome of the live turn; None while replaying."""
        self.marked_patches: frozenset[str] = frozenset()
        """Names of patches that have a marker in history."""
        self._patches: dict[str, bool] = {}
        self.has_cancelled_in_turn = False
        """True if the turn has given up a step that it opened itself."""
        self.retried: tuple[int, ...] = ()
        """Ids of open activities that an operator wants to be sent again."""
        self.started_before: Mapping[str, str] = {}
        """Ids of detached starts that undone turns have made, by operation key and name."""
        self._kv = dict(kv)
        self.state_reads: list[StateRead] = []
        """Values of ``state`` that the code has read in this turn, or holds since before."""
        self._mailboxes: Mailboxes | None = None
        self._started = started

    watchers: tuple[events.Watcher, ...] = ()
    """Steps of other instances that wait for the end of this one."""
    compensations = 0
    """Number of sagas that undo earlier steps now."""
    completed_elsewhere: tuple[int, ...] = ()
    """Ids of activities that another instance completed in this turn: no worker needs to run them
    any more."""

    @property
    def scheduled_for_ms(self) -> int | None:
        return self._started.scheduled_for_ms

    @property
    def seed(self) -> str:
        return work.execution_seed(self._started)

    @property
    def parent(self) -> work.ParentLink | None:
        return work.parent_link(self._started)

    @property
    def mailboxes(self) -> Mailboxes:
        """Created on first use: most executions never wait for an event or a message."""
        if self._mailboxes is None:
            self._mailboxes = Mailboxes()
        return self._mailboxes

    @property
    def wants_mail(self) -> bool:
        """False if the code has enough unread mail and waits for none, or continues as new."""
        return self.continued is None and (self._mailboxes is None or self._mailboxes.want_more)

    @property
    def is_replaying(self) -> bool:
        return self.decisions.is_replaying or self.is_closed

    @property
    def now_ms(self) -> int:
        return self.decisions.now_ms

    @property
    def turn(self) -> int:
        return self.decisions.turn

    # Steps

    def schedule_activity(
        self, activity: Activity[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Step[Any]:
        branch = self.loop.branch()
        if self.is_closed:
            return self.loop.create_step(_STEP, self, branch)
        signature = activity.signature
        payload = signature.encode_arguments(args, kwargs, self.codec)
        if not signature.are_exact(args, kwargs):
            self._check_call(branch, activity, args, kwargs, payload)
        self._check_going()
        try:
            event = self.decisions.schedule_activity(
                branch.next_operation(), branch, activity.name, payload, activity.settings
            )
        except CannotUnwrap as error:  # as in _schedule()
            self._stop(error)
        outcome = self.outcome
        if outcome is not None:
            retry, timeout_ms, heartbeat_ms, deadline_ms = activity.bounds
            outcome.activities.append(
                ScheduledActivity(event, retry, timeout_ms, heartbeat_ms, deadline_ms)
            )
        step = self.loop.create_step(_STEP, self, branch, event.event_id)
        self.operations.add(Operation(ACTIVITY, event, step, activity))
        return step

    def schedule_child(
        self, child: Orchestration[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Step[Any]:
        branch = self.loop.branch()
        if self.is_closed:
            return self.loop.create_step(_STEP, self, branch)
        if self.depth >= limits.CHILD_DEPTH_MAX:
            raise InvalidValue(
                f"orchestration {child.name!r} would be {self.depth + 1} levels deep; at most "
                f"{limits.CHILD_DEPTH_MAX} are allowed: does a recursion never end? For a long "
                "chain use a loop, continue_as_new() or start_detached()"
            )
        payload = child.signature.encode_arguments(args, kwargs, self.codec)
        self._check_call(branch, child, args, kwargs, payload)
        event = self._schedule(
            branch,
            events.SubOrchestrationScheduled,
            {
                "name": child.name,
                "child_instance_id": child.call.id or self._automatic_id(),
                "input": payload,
                "version": child.call.version,
                "on_parent_close": child.call.on_parent_close,
            },
        )
        self._note("children", event)
        step = self.loop.create_step(_STEP, self, branch, event.event_id)
        self.operations.add(Operation(CHILD, event, step, child))
        return step

    def wait(self, name: str, type_: Any, *, is_message: bool) -> Step[Any]:
        branch = self.loop.branch()
        if self.is_closed:
            return self.loop.create_step(_STEP, self, branch)
        family = MESSAGE if is_message else EVENT
        kind = events.QueueSubscribed if is_message else events.ExternalSubscribed
        event = self._schedule(branch, kind, {"name": name})
        step = self.loop.create_step(ArrivalStep, self, branch, event.event_id)
        operation = Operation(family, event, step, type_)
        self.operations.add(operation)
        arrived = self.mailboxes.wait(operation)
        if arrived is not None:
            number, data = arrived
            self.deliver(operation, data, number)
        return step

    def timer_started(self, timer: DurableTimer, seconds: float) -> None:
        if not self.is_closed:
            event = self._schedule(
                self.loop.branch(), events.TimerCreated, {"fire_at_ms": self._fire_at_ms(seconds)}
            )
            self._open_timer(timer, event)

    def start_detached(
        self,
        orchestration: Orchestration[Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        delay_seconds: float,
    ) -> str:
        if self.is_closed:
            return ""
        branch = self.loop.branch()
        payload = orchestration.signature.encode_arguments(args, kwargs, self.codec)
        self._check_call(branch, orchestration, args, kwargs, payload)
        delay_ms = max(0, self._fire_at_ms(delay_seconds) - self.now_ms)
        # A start of an undone turn was sent. Under its id a second start changes nothing.
        before = self.started_before.get(f"{branch.coming_operation()} {orchestration.name}")
        target_id = orchestration.call.id or before or self._automatic_id()
        return self.start_named(
            orchestration.name,
            payload,
            target_id,
            version=orchestration.call.version,
            delay_ms=delay_ms,
        ).target_instance_id

    def start_named(
        self, name: str, payload: msgspec.Raw, instance_id: str | None, **fields: Any
    ) -> events.OrchestrationChained:
        if self.is_closed:
            raise Unwinding
        called = {"name": name, "target_instance_id": instance_id, "input": payload}
        event = self._schedule(self.loop.branch(), events.OrchestrationChained, called | fields)
        self._note("detached", event)
        return event

    def send_to(self, kind: str, target_id: str, name: str, data: msgspec.Raw) -> None:
        if self.is_closed:
            return
        branch = self.loop.branch()
        # A message of an undone turn was sent: it is not sent a second time.
        is_sent = f"{branch.coming_operation()} {name}" in self.started_before
        event = self._schedule(
            branch,
            events.MessageSent,
            {"kind": kind, "target_instance_id": target_id, "name": name, "data": data},
        )
        if not is_sent:
            self._note("sent", event)

    def start_cleanup_timer(self, callback: Callable[[], None], seconds: float) -> DurableTimer:
        """Start the timer that bounds the clean-up. Its key belongs to no branch."""
        fire_at_ms = self._fire_at_ms(seconds)
        timer = DurableTimer(fire_at_ms / 1000, callback, (), None, self)
        event = self.decisions.schedule(
            events.TimerCreated, "cancel/1", "", {"fire_at_ms": fire_at_ms}
        )
        self._open_timer(timer, event)
        return timer

    # Values

    def rng(self) -> random.Random:
        return self.loop.branch().rng()

    def side_effect(self, fn: Callable[[], Any], type_: Any) -> Any:
        if self.is_closed:
            raise Unwinding
        value = events.NULL
        if not self.decisions.is_replaying:
            value = self._call_once(fn)
        elif (failure := self.decisions.coming_failure()) is not None:
            # The function failed: history holds the end of the execution and not the call.
            self._stop(type(failure.type_name, (Exception,), {})(failure.message))
        event = self._schedule(self.loop.branch(), events.SideEffectRecorded, {"value": value})
        return self.decode(event.value, type_, where="side_effect()")

    def decode(self, raw: msgspec.Raw, type_: Any = Any, *, where: str) -> Any:
        """Decode for the code. CannotUnwrap ends the turn: another codec may read the data."""
        try:
            return self.codec.decode(raw, type_, where=where)
        except CannotUnwrap as error:
            self._stop(error)

    def is_patched(self, name: str) -> bool:
        known = self._patches.get(name)
        if known is None and not self.is_closed:
            known = name in self.marked_patches or not self.decisions.is_replaying
            if known and not self.decisions.is_replaying:
                self.decisions.schedule(events.PatchMarked, f"patch/{name}", "", {"name": name})
            self._patches[name] = known
        return bool(known)

    def continue_as_new(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], version: str | None
    ) -> NoReturn:
        if self.is_closed:
            raise Unwinding
        if self.loop.is_ending:
            raise ForbiddenInOrchestration("continue_as_new() is too late: the function has ended")
        if version is None:
            signature = self.handler.signature
            payload = signature.encode_arguments(args, kwargs, self.codec)
            # Checked here, so that the call fails and not the start of the next execution.
            signature.check_arguments(args, kwargs, payload, self.codec)
        else:
            parse_version(version)
            if kwargs:
                raise TypeError("continue_as_new() with a version takes arguments by position only")
            payload = self.codec.encode(args, where="arguments of continue_as_new()")
        for reject in () if self.continued else self.unanswered.values():
            reject()
        self.continued = self.continued or (payload, version)
        self.loop.stop_with(None)
        raise Unwinding

    def begin_compensation(self) -> bool:
        branch = self.loop.branch()
        before, branch.is_compensation = branch.is_compensation, True
        self.compensations += 1
        return before

    def end_compensation(self, before: bool) -> None:
        self.loop.branch().is_compensation = before
        self.compensations -= 1

    # Status and state

    def set_custom_status(self, text: str | None) -> None:
        if self.is_closed:
            return
        self._check_size(text or "", limits.CUSTOM_STATUS_BYTES_MAX, "the status")
        event = self._schedule(self.loop.branch(), events.CustomStatusUpdated, {"status": text})
        self.custom_status = text
        if self.outcome is not None:
            self.outcome.custom_status = event

    def state_values(self) -> Mapping[str, str]:
        return self._kv

    def state_read(self, key: str, type_: Any) -> Any:
        text = self._kv[key]
        raw = msgspec.Raw(text.encode())
        value = self.decode(raw, type_, where=f"state[{key!r}]")
        if self.outcome is not None and not isinstance(value, _CONSTANTS):
            site = user_code.call_site()
            self.state_reads.append(StateRead(key, value, text, type_, site))
        return value

    def check_state_reads(self) -> None:
        """Note values of ``state`` that the code has changed and let go without writing them."""
        kept: list[StateRead] = []
        for read in self.state_reads:
            if not is_let_go(read):
                kept.append(read)
            elif self._is_changed(read):
                self._note(
                    "mistakes",
                    f"state[{read.key!r}] was read at {read.site} and changed, but not written: "
                    f"reading gives a copy; write state[{read.key!r}] = ... after the change",
                )
        self.state_reads = kept

    def _is_changed(self, read: StateRead) -> bool:
        try:
            before = self.codec.decode(msgspec.Raw(read.text.encode()), read.type_)
            return bool(before != read.target)
        except Exception:  # noqa: BLE001 - code of the author compares
            return False

    def state_set(self, key: str, text: str) -> None:
        if self.is_closed:
            return
        limits.check_id(key, "state key")
        self._check_size(text, limits.KV_VALUE_BYTES_MAX, f"state[{key!r}]")
        if key not in self._kv and len(self._kv) >= limits.KV_KEYS_MAX:
            raise InvalidValue(
                f"state[{key!r}] would be one key too many; "
                f"at most {limits.KV_KEYS_MAX} are allowed"
            )
        self._change_state(events.KeyValueSet, {"key": key, "value": text})
        self._kv[key] = text
        self.state_reads = [read for read in self.state_reads if read.key != key]

    def state_delete(self, key: str) -> None:
        if not self.is_closed:
            self._change_state(events.KeyValueCleared, {"key": key})
            self._kv.pop(key, None)

    def state_clear(self) -> None:
        if not self.is_closed:
            self._change_state(events.KeyValuesCleared, {})
            self._kv.clear()

    def _check_size(self, text: str, limit: int, what: str) -> None:
        size = self.codec.stored_size(text.encode(), limit)
        if size > limit:
            raise InvalidValue(f"{what} takes {size} bytes, at most {limit} are allowed")

    def _change_state(self, kind: type[events.StateChange], fields: dict[str, Any]) -> None:
        self._note("kv_writes", self._schedule(self.loop.branch(), kind, fields))

    # Giving up

    def step_cancelled(self, step: Step[Any]) -> None:
        operation = self.operations.open.get(step.event_id)
        if operation is not None and not self._outlives_parent(operation):
            self.give_up(operation, "cancelled by the code")

    def _outlives_parent(self, operation: Operation) -> bool:
        """Return True for a child that goes on after its parent, which is about to end."""
        is_ending = self.cancel_reason is not None or self.loop.is_ending
        return is_ending and getattr(operation.event, "on_parent_close", "") == "abandon"

    def timer_cancelled(self, timer: DurableTimer) -> None:
        operation = self.operations.open.get(timer.event_id)
        if operation is not None:
            self.give_up(operation, "")

    def give_up(self, operation: Operation, reason: str) -> None:
        """Close an open step that the code has cancelled or left behind."""
        event = operation.event
        if self.is_closed or self.operations.open.pop(event.event_id, None) is None:
            return
        family = operation.family
        fields = {} if family is TIMER else {"reason": reason}
        self.decisions.cancel(_CANCELLING[family], event.event_id, **fields)
        if self.outcome is None:
            return
        if event.turn == self.decisions.turn:
            self.has_cancelled_in_turn = True  # it was not sent yet, so it needs no cancelling
        elif family is ACTIVITY:
            self._note("cancelled_activities", event.event_id)
        elif family is TIMER:
            self._note("cancelled_timers", event.event_id)
        elif family is CHILD:
            self._note("cancelled_children", event.child_instance_id)

    def drop_cancelled_in_turn(self, outcome: TurnOutcome) -> None:
        """Remove steps from the outcome that the turn has both opened and given up."""
        self.has_cancelled_in_turn = False
        is_open = self.operations.open
        outcome.activities = [a for a in outcome.activities if a.event.event_id in is_open]
        outcome.timers = [timer for timer in outcome.timers if timer.event_id in is_open]
        outcome.children = [child for child in outcome.children if child.event_id in is_open]

    def check_awaited(self, operation: Operation) -> None:
        """Note a step that ends and that the code has called without ``await``."""
        if self.outcome is None or not is_dropped(operation):
            return
        called = _CALLED[operation.family].format(operation.event.name)
        self._note(
            "mistakes",
            f"{called} was called at {operation.event.site} without await: its result and its "
            "errors are lost; write await before the call",
        )

    def note_unwanted_mail(self) -> None:
        """Note the events and messages that the code has not waited for, at its end."""
        for is_message, name in self._mailboxes.unwanted() if self._mailboxes is not None else ():
            what = f"message in {name!r}" if is_message else f"event {name!r}"
            self._note("mistakes", f"it has ended without reading the {what}; is that the name?")

    def take_retried(self) -> list[ScheduledActivity]:
        """Return the activities that an operator wants to be sent again and that are still open."""
        wanted, self.retried = self.retried, ()
        found = [self.operations.open.get(event_id) for event_id in wanted]
        return [
            ScheduledActivity(operation.event, *operation.definition.bounds)
            for operation in found
            if operation is not None and operation.family is ACTIVITY
        ]

    def close(self) -> None:
        """Close the code and release everything that it waits for."""
        if self.is_closed:
            return
        self.is_closed = True
        self.loop.abandon()
        for operation in self.operations.open.values():
            if operation.family is not TIMER:
                release_future(operation.target)
        self.operations.open.clear()
        self._mailboxes = None

    def deliver(self, operation: Operation, data: msgspec.Raw, number: int) -> None:
        """Resolve a wait with arrived data; data that does not fit raises at the ``await``.

        ``number``: the number of the arrival among all arrivals.
        """
        event = operation.event
        kind = "event" if operation.family is EVENT else "message in"
        self.operations.open.pop(event.event_id, None)
        if not operation.target._callbacks:  # noqa: SLF001
            self.check_awaited(operation)
        self.mailboxes.note_delivered(number, data, operation)
        try:
            value = self.codec.decode(data, operation.definition, where=f"{kind} {event.name!r}")
        except CannotUnwrap as error:
            self.loop.stop_with(error)
        except PayloadError as error:
            operation.target.set_exception(error)
        else:
            operation.target.set_result(value)

    def arrival_returned(self, step: Step[Any]) -> None:
        """Deliver an arrival to the next wait: its own was cancelled before the code read it."""
        if not self.is_closed:
            number, data, operation = self.mailboxes.put_back(step)
            if operation is not None:
                self.deliver(operation, data, number)

    # Internal

    def _check_call(
        self,
        branch: Branch,
        called: Activity[Any, Any] | Orchestration[Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        payload: msgspec.Raw,
    ) -> None:
        """Raise PayloadError in the call for arguments that do not fit, before they are sent.

        A call that history has is not checked: it fitted the annotation of its time.
        """
        try:
            if not self.decisions.has_call(branch.coming_operation(), called.name, payload):
                called.signature.check_arguments(args, kwargs, payload, self.codec)
        except CannotUnwrap as error:
            self._stop(error)

    def _schedule(self, branch: Branch, kind: type[S], fields: dict[str, Any]) -> S:
        self._check_going()
        if branch.is_compensation:
            fields["compensation"] = True
        try:
            return self.decisions.schedule(kind, branch.next_operation(), branch.site, fields)
        except CannotUnwrap as error:  # the recorded payload cannot be compared
            self._stop(error)

    def _check_going(self) -> None:
        """Stop code that must not ask for another step."""
        decisions = self.decisions
        if self.loop.crash is not None:
            raise Unwinding  # the end is decided: no further step counts
        if decisions.commands >= limits.COMMANDS_PER_TURN_MAX:
            self._stop(
                InvalidValue(
                    f"more than {limits.COMMANDS_PER_TURN_MAX} steps in one turn; "
                    "is there an endless loop?"
                )
            )

    def _stop(self, error: BaseException) -> NoReturn:
        """End the execution with the error, even if the code catches it."""
        self.loop.stop_with(error)
        raise Unwinding

    def _open_timer(self, timer: DurableTimer, event: events.TimerCreated) -> None:
        timer.event_id = event.event_id
        self.operations.add(Operation(TIMER, event, timer, None))
        self._note("timers", event)

    def _note(self, field: str, value: object) -> None:
        """Append to a list of the outcome. Lists are created on first use: most turns need few."""
        outcome = self.outcome
        if outcome is None:
            return
        noted = getattr(outcome, field)
        if noted:
            noted.append(value)
        else:
            setattr(outcome, field, [value])

    def _fire_at_ms(self, seconds: float) -> int:
        if not math.isfinite(seconds):
            raise InvalidValue(f"a durable timer needs a finite delay, not {seconds!r} seconds")
        # Rounded first: the float arithmetic of a deadline must not add a millisecond.
        fire_at_ms = self.now_ms + max(0, math.ceil(round(seconds * 1000, 2)))
        if fire_at_ms > limits.TIME_MS_MAX:
            raise InvalidValue(f"a durable timer must end before the year 10000: {seconds!r} s")
        return fire_at_ms

    def _automatic_id(self) -> str | None:
        """Return an id made of the place in history; None on replay, as the recorded id is used."""
        if self.decisions.is_replaying:
            return None
        return child_id(self.instance_id, self.execution_id, self.decisions.last_event_id + 1)

    def _call_once(self, fn: Callable[[], Any]) -> msgspec.Raw:
        # Called outside of the loop: steps that the function calls must not be recorded.
        asyncio._set_running_loop(None)  # noqa: SLF001
        thread = get_ident()
        del running[thread]
        user_code.leave()
        try:
            return self.codec.encode(fn(), where="side_effect()")
        except BaseException as error:
            if user_code.is_interruption(error):
                raise
            # The code cannot catch it: on replay there is no error to raise again.
            self._stop(user_code.with_author_frames(error))
        finally:
            running[thread] = self
            user_code.enter()
            asyncio._set_running_loop(self.loop)  # noqa: SLF001
