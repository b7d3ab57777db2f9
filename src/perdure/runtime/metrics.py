"""The logger, the counts and the spans of a runtime. All names of metrics are defined here.

Counting adds to a dictionary. Exporters (Prometheus, OpenTelemetry) subscribe, and cost nothing
when there are none. No label ever holds an instance id or a session id.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import defaultdict
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    cast,
    runtime_checkable,
)

from perdure.authoring.definitions import Activity, Handler, Orchestration, Registry
from perdure.errors import NotRegistered, UsageError
from perdure.logs import TRACEBACK, get_logger
from perdure.model import events, work
from perdure.model.failures import Block, Failure, author_line, own_frames
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from perdure.clock import Clock
    from perdure.engine.execution import Execution
    from perdure.engine.outcome import TurnOutcome

log = get_logger("perdure.runtime")

Gauge: TypeAlias = tuple[str, "dict[str, str]", float]
"""Name, labels and value of a number that can go down."""
LockKind: TypeAlias = Literal["orchestration", "activity"]

_RESULTS: dict[type[object], str] = {
    events.OrchestrationCompleted: "success",
    events.OrchestrationFailed: "failed",
    events.OrchestrationCancelled: "cancelled",
    events.OrchestrationContinuedAsNew: "continuedAsNew",
}
# The names of counts are built once, because every turn and every activity needs one.
_END_COUNTS: dict[type[object], str] = {
    kind: f"orchestration_{status}" for kind, status in _RESULTS.items()
}
_ACTIVITY_COUNTS = {each: f"activity_{each}" for each in ("success", "failed", "cancelled")}

_EXPORTER_ERRORS: Final = (Exception, asyncio.CancelledError)
"""Errors of an exporter that are logged and then ignored. A CancelledError is always the exporter's
own: a real cancellation arrives at an ``await``, and an exporter has none."""


@runtime_checkable
class Sink(Protocol):
    """An exporter of metrics."""

    def add(self, name: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        """Add to a counter."""
        ...

    def record(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Record a value in a histogram."""
        ...


class Code(Protocol):
    """The orchestration of an instance: a registered one, or the names in a fetched item."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str | None: ...


class Alert(NamedTuple):
    """An instance that needs a person: it has failed, or it is Blocked."""

    status: Status
    """``Failed`` or ``Blocked``."""
    instance_id: str
    orchestration: str
    version: str | None
    reason: str
    """The failure, or the cause of the block."""


class SpanNote:
    """The outcome of an attempt, for the span that covers it."""

    __slots__ = ("failure",)

    def __init__(self) -> None:
        self.failure: Failure | None = None


@runtime_checkable
class SpanMaker(Protocol):
    """A tracer."""

    def carrier(self) -> str | None:
        """Return the current trace as text, to be stored with a start."""
        ...

    def activity(self, item: work.ActivityExecute, note: SpanNote) -> AbstractContextManager[None]:
        """Return the span of one attempt."""
        ...


class GuardedSpan:
    """A span whose tracer can neither raise into the work nor swallow an exception of it."""

    __slots__ = ("_item", "_note", "_span", "_spans")

    def __init__(self, spans: SpanMaker, item: work.ActivityExecute, note: SpanNote) -> None:
        self._spans = spans
        self._item = item
        self._note = note
        self._span: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        try:
            span = self._spans.activity(self._item, self._note)
            span.__enter__()
        except _EXPORTER_ERRORS:
            log.exception("a tracer failed")
        else:
            self._span = span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is None:
            return
        try:
            self._span.__exit__(kind, error, traceback)
        except _EXPORTER_ERRORS as raised:
            if raised is not error:
                log.exception("a tracer failed")


class Observer:
    """Counts for ``metrics_snapshot``, and passes each metric on to the sinks, if there are any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.spans: SpanMaker | None = None
        self.sinks: list[Sink] = []
        self.alert: Callable[[Alert], None] = lambda _alert: None
        """Set by the runtime: called once for each instance that fails or is Blocked here."""

    def subscribe(self, exporter: object) -> None:
        if isinstance(exporter, type) or not isinstance(exporter, (Sink, SpanMaker)):
            raise UsageError(
                "observe() takes an exporter, such as PrometheusMetrics() or OpenTelemetry(), "
                f"not {exporter!r}"
            )
        if isinstance(exporter, Sink):
            self.sinks.append(exporter)
        if isinstance(exporter, SpanMaker):
            self.spans = exporter

    def turn_ran(self, execution: Execution, seconds: float) -> None:
        """Record how long the code of a turn ran; called only if there are sinks."""
        name = execution.handler.name
        self._record("turn_duration_seconds", {"orchestration_name": name}, seconds)

    def turn_committed(self, execution: Execution, outcome: TurnOutcome) -> None:
        counts = self.counts
        counts["turns"] += 1
        if outcome.turn == 1:
            counts["orchestration_starts"] += 1
        if outcome.end is not None:
            counts[_END_COUNTS[type(outcome.end)]] += 1
        if self.sinks:
            self._export_turn(execution, outcome)

    def _export_turn(self, execution: Execution, outcome: TurnOutcome) -> None:
        handler, end = execution.handler, outcome.end
        self._add("commits_total", {"kind": "turn"})
        labels = {"orchestration_name": handler.name, "version": handler.version}
        if outcome.turn == 1:
            initiated_by = "continueAsNew" if execution.execution_id > 1 else "client"
            if execution.started.parent_instance_id is not None:
                initiated_by = "suborchestration"
            self._add("orchestration_starts_total", {**labels, "initiated_by": initiated_by})
        if end is None:
            return
        status = _RESULTS[type(end)]
        self._add("orchestration_completions_total", {**labels, "status": status})
        if isinstance(end, events.OrchestrationFailed):
            self._add(
                "orchestration_failures_total",
                {**labels, "error_category": end.failure.category},
            )
        if isinstance(end, events.OrchestrationContinuedAsNew):
            self._add("orchestration_continue_as_new_total", {"orchestration_name": handler.name})
        name_only = {"orchestration_name": handler.name}
        took_ms = outcome.delta[-1].timestamp_ms - execution.started.timestamp_ms
        self._record("orchestration_duration_seconds", {**labels, "status": status}, took_ms / 1000)
        self._record("orchestration_turns", name_only, outcome.turn)
        self._record("orchestration_history_size", name_only, execution.event_count)

    def failed(self, execution: Execution, failure: Failure) -> None:
        """Note the committed failure of an instance. That of a child reaches its parent."""
        log_failed_orchestration(execution, failure)
        if execution.started.parent_instance_id is None:
            code = execution.handler
            self.alert(
                Alert(Status.FAILED, execution.instance_id, code.name, code.version, str(failure))
            )

    def blocked(self, code: Code, instance_id: str, block: Block) -> None:
        """Note that an instance cannot continue with the code of this worker."""
        log.warning("%r is blocked: %s: %s", instance_id, block.reason, block.message)
        self.counts["orchestration_blocked"] += 1
        self._add("orchestration_blocked_total", {"reason": block.reason})
        reason = f"{block.reason}: {block.message}"
        self.alert(Alert(Status.BLOCKED, instance_id, code.name, code.version, reason))

    def activity_committed(self, *, is_retry: bool, name: str) -> None:
        """Count a commit of an activity's outcome that is not part of a turn."""
        self._add("commits_total", {"kind": "activity"})
        if is_retry:
            self.counts["activity_retries"] += 1
            self._add("activity_retries_total", {"activity_name": name})

    def commit_repeated(self) -> None:
        self.counts["commits_repeated"] += 1
        self._add("commits_repeated_total", {})

    def delivered_again(self, kind: LockKind) -> None:
        """Count work whose lock expired or was given up before it had an outcome."""
        self.counts[f"{kind}_locks_expired"] += 1
        self._add("locks_expired_total", {"kind": kind})

    def locks_renewed(self, kind: LockKind, number: int, lost: int) -> None:
        """Count a renewal. Called by one thread for each kind."""
        self.counts[f"{kind}_locks_renewed"] += number - lost
        self._add("locks_renewed_total", {"kind": kind}, number - lost)
        if lost:
            self.counts[f"{kind}_locks_lost"] += lost
            self._add("locks_lost_total", {"kind": kind}, lost)

    def activity_poisoned(self, name: str) -> None:
        self.counts["activity_poison"] += 1
        self._add("activity_poison_total", {"activity_name": name})

    def activity_ended(self, item: work.ActivityExecute, outcome: str, started_ms: int) -> None:
        self.counts[_ACTIVITY_COUNTS[outcome]] += 1
        if self.sinks:
            took_ms = self._clock.now_ms() - started_ms
            labels = {"activity_name": item.name, "outcome": outcome, "tag": item.tag or "default"}
            attempt = str(item.attempt - 1) if item.attempt < 4 else "3+"
            self._add("activity_executions_total", {**labels, "retry_attempt": attempt})
            self._record("activity_duration_seconds", labels, took_ms / 1000)

    def _add(self, name: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        self._export("add", name, labels, value)

    def _record(self, name: str, labels: Mapping[str, str], value: float) -> None:
        self._export("record", name, labels, value)

    def _export(self, verb: str, name: str, labels: Mapping[str, str], value: float) -> None:
        for sink in self.sinks:
            try:
                getattr(sink, verb)(f"perdure_{name}", labels, value)
            except _EXPORTER_ERRORS:
                log.exception("a metrics sink failed")


def log_failed_orchestration(execution: Execution, failure: Failure) -> None:
    """Log the failure of an instance; of a root with its traceback, as no code can catch it."""
    handler, is_root = execution.handler, execution.started.parent_instance_id is None
    line, fields = _fields(failure, handler.place)
    level = logging.WARNING if failure.levels < 2 else logging.DEBUG  # the origin was logged
    log.log(
        logging.ERROR if is_root else level,
        "orchestration %r, instance %r, failed%s: %s",
        handler.name,
        execution.instance_id,
        line,
        failure,
        extra=fields
        | {
            TRACEBACK: own_frames(failure.traceback) if is_root else "",
            "instance_id": execution.instance_id,
            "execution_id": execution.execution_id,
            "orchestration_name": handler.name,
            "orchestration_version": handler.version,
        },
    )


def log_failed_activity(item: work.ActivityExecute, failure: Failure, place: str) -> None:
    """Log the last failure of an activity. Its orchestration may catch it."""
    attempts = f" of {item.retry.max_attempts}" if item.retry is not None else ""
    line, fields = _fields(failure, place)
    log.warning(
        "activity %r of instance %r failed%s, attempt %d%s: %s",
        item.name,
        item.instance_id,
        line,
        item.attempt,
        attempts,
        failure,
        extra=fields
        | {
            "instance_id": item.instance_id,
            "execution_id": item.execution_id,
            "orchestration_name": item.orchestration_name,
            "orchestration_version": item.orchestration_version,
            "activity_name": item.name,
            "activity_id": item.activity_id,
            "attempt": item.attempt,
        },
    )


def _fields(failure: Failure, place: str) -> tuple[str, dict[str, Any]]:
    """Return the author's line for the message, and the fields that describe the failure.

    A failure without a line of the author, such as a result of another type, has the line of the
    handler.
    """
    line = author_line(failure.traceback)
    fields = {
        "error_type": failure.type_name,
        "error_category": failure.category,
        "line": line or place,
    }
    at = f" at {line}" if line else f" (it is defined at {place})" if place else ""
    return at, fields


class UnregisteredHandlerLog:
    """Logs, once for each, the handlers that running code asks for and this runtime does not have.

    That can be intended, because another worker has them. If it is not, the work waits for ever.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._checked: set[tuple[str | None, ...]] = set()
        self._checked_code: set[Callable[..., Any]] = set()
        self._is_interactive = hasattr(sys, "ps1")

    def check_activity(self, name: str) -> None:
        self._check(self._registry.resolve_activity, name)

    def check_orchestration(self, name: str, version: str | None) -> None:
        self._check(self._registry.resolve_orchestration, name, version)

    def check_code(self, started: Orchestration[..., Any]) -> None:
        """Log that another function runs than the one that was defined last, as in a notebook."""
        self._compare(started, self._registry.resolve_orchestration, started.version)
        if self._is_interactive:  # cells are run again at any time
            scope = started.fn.__globals__
            for called in map(scope.get, started.fn.__code__.co_names):
                if isinstance(called, Activity):
                    self._compare(cast("Handler", called), self._registry.resolve_activity)

    def _compare(
        self, defined: Handler, resolve: Callable[..., Handler], *version: str | None
    ) -> None:
        if defined.fn in self._checked_code:
            return
        self._checked_code.add(defined.fn)
        try:
            own = resolve(defined.name, *version)
        except NotRegistered:
            return
        if own.fn is not defined.fn and own.fingerprint != defined.fingerprint:
            log.warning(
                "%s %r is defined at %s, but this runtime has the code at %s and runs that; make "
                "a new Runtime to run the new code",
                defined.kind,
                defined.name,
                defined.place,
                own.place,
            )

    def _check(self, resolve: Callable[..., Any], *key: str | None) -> None:
        if key in self._checked:
            return
        self._checked.add(key)
        try:
            resolve(*key)
        except NotRegistered as error:
            log.warning("%s; it waits for a worker that has it", error)
