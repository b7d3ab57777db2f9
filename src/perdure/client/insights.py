"""Says in one sentence what an instance is doing, and since when."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from perdure.authoring.communication import ASK_PREFIX, is_promise, promise_key
from perdure.client.formats import counted, shown_duration
from perdure.client.instance import InstanceStats, block_of, failure_of
from perdure.client.steps import MailKind, StepView, Unread, read_records, steps_and_unread
from perdure.errors import CorruptData, NotFound
from perdure.model import events, wire, work
from perdure.model.failures import BlockReason
from perdure.model.status import Status
from perdure.model.wire import unreadable_activity
from perdure.providers.records import InstanceInfo, QueuedMessage, QueuedWork, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider

Doing: TypeAlias = Literal[
    "pending", "running", "retrying", "waiting", "sleeping", "paused", "blocked", "ended"
]

TAIL_EVENTS: Final = 200
"""Events at the end of a history that are read for the sentence, even of a long history."""
QUEUE_LIMIT: Final = 200
"""Queued messages, and queued activities, that are read for the sentence."""
_COUNTED_MAX: Final = 10_000
"""Queued messages and activities that are counted at most."""
_NO_WORKER: Final = "; no worker is running"
_HELD: Final = frozenset({"paused", "blocked"})
"""An operator lets these go on, not a worker."""
_REASONS: Final = {
    BlockReason.NONDETERMINISM: "its code no longer does what its history says",
}
"""Words for the reasons whose name alone does not say what happened."""
DETAILS_EVENTS: Final = 5_000
"""Events at the end of a history that are read for the details."""


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """The current activity of an instance."""

    doing: Doing
    sentence: str
    since_ms: int
    due_ms: int | None = None
    """The time at which it continues by itself, if known."""
    error: str | None = None
    """The last error: of the instance, or of the attempt that is being repeated."""

    @property
    def explanation(self) -> str:
        """The sentence, of a Blocked instance with its error."""
        is_blocked = self.doing == "blocked" and self.error
        return f"{self.sentence}: {self.error}" if is_blocked else self.sentence


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """An activity in the worker queue."""

    activity_id: int
    name: str
    number: int
    of: int
    next_ms: int
    is_running: bool
    enqueued_ms: int
    last_error: str | None
    deliveries: int
    heartbeat: str | None
    tag: str | None = None
    """Only workers that take this tag run it."""


class QueueContext(msgspec.Struct, frozen=True, kw_only=True):
    """Queued messages and activities of one instance, and the workers that could take them."""

    attempts: tuple[Attempt, ...] = ()
    messages: tuple[QueuedMessage, ...] = ()
    workers: tuple[WorkerInfo, ...] = ()


class LastSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The last steps of the current execution."""

    steps: list[StepView] = []
    event_count: int = 0
    """Events of the execution; 0 before its first turn."""
    left_out: int = 0
    """Events before the first of these steps."""
    problem: str | None = None
    """Says why the history cannot be read."""
    input: msgspec.Raw | None = None
    """The input of the execution, if it was asked for."""
    unread: list[Unread] = []
    """Arrivals that the code has not asked for yet; none if a part of the history is left out."""
    cancel_ms: int | None = None
    """The time at which the code was told to stop, if it cleans up."""


async def read_last_steps(
    provider: Provider,
    info: InstanceInfo,
    events_max: int = TAIL_EVENTS,
    *,
    with_input: bool = False,
) -> LastSteps:
    """Read the end of the history only, so that a long one costs no more than a short one."""
    key = (info.instance_id, info.execution_id)
    try:
        count = (await provider.admin.get_execution_info(*key)).event_count
    except NotFound:  # it has not begun, was deleted, or its next execution has just begun
        return LastSteps()
    left_out = max(0, count - events_max)
    try:
        records = await provider.read_with_execution(*key, after_event_id=left_out)
        history = wire.decode_history(records)
        first = await provider.read_with_execution(*key, limit=1) if with_input else []
        begun = [wire.decode_event(record.data) for record in first]
    except CorruptData as error:
        problem = f"the history cannot be read: {error.message}"
        return LastSteps(event_count=count, left_out=left_out, problem=problem)
    given = next((e.input for e in begun if isinstance(e, events.OrchestrationStarted)), None)
    steps, unread = steps_and_unread(history)
    cancelled = [
        event
        for event in events.without_undone(history)
        if isinstance(event, events.OrchestrationCancelRequested)
    ]
    return LastSteps(
        steps=steps,
        event_count=count,
        left_out=left_out,
        input=given,
        unread=[] if left_out else unread,
        cancel_ms=cancelled[-1].timestamp_ms if cancelled else None,
    )


class InstanceDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown of one instance."""

    info: InstanceInfo
    insight: Insight
    queues: QueueContext
    last: LastSteps
    stats: InstanceStats | None
    """None: they were not measured."""

    @property
    def unread(self) -> list[Unread]:
        """Events and messages that the code has not asked for yet, queued ones included."""
        counts: dict[tuple[MailKind, str], int] = {
            (each.kind, each.name): each.count for each in self.last.unread
        }
        for queued in self.queues.messages:
            with suppress(CorruptData):
                item = wire.decode_item(queued.message.body)
                if isinstance(item, work.ExternalRaised | work.QueueMessage):
                    is_event = isinstance(item, work.ExternalRaised)
                    key: tuple[MailKind, str] = ("event" if is_event else "message", item.name)
                    counts[key] = counts.get(key, 0) + 1
        if self.info.status.is_final:
            return []
        return [Unread(kind=kind, name=name, count=n) for (kind, name), n in counts.items()]


async def read_details(
    provider: Provider,
    info: InstanceInfo,
    now_ms: int,
    events_max: int = DETAILS_EVENTS,
    *,
    measure_long: bool = True,
) -> InstanceDetails:
    """Read the last steps and the queues of an instance.

    Measuring reads the whole history. Without ``measure_long`` this is done only if the last steps
    are all steps.
    """
    workers = await provider.admin.list_workers()
    queues = await read_queue_context(provider.admin, info.instance_id, workers)
    last = await read_last_steps(provider, info, events_max, with_input=True)
    is_measured = measure_long or not last.left_out
    return InstanceDetails(
        info=info,
        insight=explain(info, last.steps, queues, now_ms, last.cancel_ms),
        queues=queues,
        last=last,
        stats=await read_stats(provider, info) if is_measured else None,
    )


def command_line(command: str, instance_id: str, options: str = "") -> str:
    """Return a command of ``perdure`` with an id in the place of ``ID``, and with more options.

    An id that looks like an option follows ``--``, behind all options.
    """
    shown = shlex.quote(instance_id)
    before, place, after = command.partition("ID")
    if not place:
        return command + options
    if not instance_id.startswith("-"):
        return f"{before}{shown}{after}{options}"
    words, dash, own_options = after.partition(" -")
    return f"{before.rstrip()}{dash}{own_options}{options} -- {shown}{words}"


def next_commands(details: InstanceDetails, options: str = "") -> list[str]:
    """Return the commands of ``perdure`` that fit the status of an instance, with more options."""
    instance_id = details.info.instance_id
    return [command_line(each, instance_id, options) for each in _next_commands(details)]


def _next_commands(details: InstanceDetails) -> list[str]:
    match details.info.status:
        case Status.PENDING:
            return ["worker MODULE", "watch ID", "cancel ID"]
        case Status.PAUSED:
            return ["resume ID", "history ID"]
        case Status.BLOCKED if not details.last.event_count:  # its start cannot be processed
            return ["retry ID", "rerun ID --input JSON", "terminate ID"]
        case Status.BLOCKED:
            return ["retry ID", "replay MODULE ID"]
        case Status.FAILED | Status.CANCELLED | Status.TERMINATED:
            return ["retry ID", "rerun ID --from-event N", "history ID --failed"]
        case Status.COMPLETED:
            return ["history ID", "rerun ID"]
        case _:
            steps = details.last.steps
            awaited = [s.name for s in steps if s.state == "open" and s.kind == "event"]
            sends = [f"send ID {shlex.quote(awaited[0])} --data JSON"] if awaited else []
            return [*sends, "watch ID", "stack ID -m MODULE"]


async def read_insight(
    provider: Provider, info: InstanceInfo, workers: Sequence[WorkerInfo], now_ms: int
) -> Insight:
    """Describe what an instance is doing, from the end of its history and its queues."""
    if info.status.is_final:
        return explain(info, (), QueueContext(), now_ms)
    around = await read_queue_context(provider.admin, info.instance_id, workers)
    is_running = info.status.of_instance is Status.RUNNING
    last = await read_last_steps(provider, info) if is_running else LastSteps()
    return explain(info, last.steps, around, now_ms, last.cancel_ms)


async def read_stats(provider: Provider, info: InstanceInfo) -> InstanceStats:
    """Measure the current execution, the queues and the state of an instance."""
    sizes: list[int] = []
    with suppress(CorruptData):  # the history is measured as far as it can be read
        async for record in read_records(provider, info.instance_id, info.execution_id):
            sizes.append(len(record.data.encode()))  # noqa: PERF401 - keep what was read
    messages = await provider.admin.list_messages(info.instance_id, limit=_COUNTED_MAX)
    queued = await provider.admin.list_work(info.instance_id, limit=_COUNTED_MAX)
    state = await provider.get_kv_all_values(info.instance_id)
    return InstanceStats(
        history_events=len(sizes),
        history_bytes=sum(sizes),
        pending_messages=len(messages),
        pending_activities=len(queued),
        state_keys=len(state),
        state_bytes=sum(
            len(key.encode()) + len(each.value.encode()) for key, each in state.items()
        ),
    )


async def read_queue_context(
    admin: ProviderAdmin, instance_id: str, workers: Sequence[WorkerInfo] = ()
) -> QueueContext:
    queued = await admin.list_work(instance_id, limit=QUEUE_LIMIT)
    messages = await admin.list_messages(instance_id, limit=QUEUE_LIMIT)
    return QueueContext(
        attempts=tuple(_attempt(item) for item in queued),
        messages=tuple(messages),
        workers=tuple(workers),
    )


def explain(
    info: InstanceInfo,
    steps: Iterable[StepView],
    context: QueueContext,
    now_ms: int,
    cancel_ms: int | None = None,
) -> Insight:
    """Return the sentence. ``steps`` may be the last steps only.

    ``cancel_ms`` is the time at which the code was told to stop.
    """
    insight = _explain(info, steps, context, now_ms)
    if insight.doing == "ended":
        return insight
    sentence = insight.sentence
    asked = [q for q in context.messages if q.message.kind == work.CancelInstance.__name__]
    if asked:
        ago = shown_duration(now_ms - min(queued.enqueued_at_ms for queued in asked))
        sentence += f"; asked to stop {ago} ago, which has not reached its code yet"
    elif cancel_ms is not None:
        sentence += f"; told to stop {shown_duration(now_ms - cancel_ms)} ago, it cleans up"
    if not context.workers and _NO_WORKER not in sentence and insight.doing not in _HELD:
        sentence += _NO_WORKER
    return msgspec.structs.replace(insight, sentence=sentence)


def _explain(
    info: InstanceInfo, steps: Iterable[StepView], context: QueueContext, now_ms: int
) -> Insight:
    match info.status.of_instance:
        case Status.PENDING:
            return _pending(info, context, now_ms)
        case Status.PAUSED:
            return Insight(
                doing="paused",
                sentence="Paused by an operator; it goes on when it is resumed",
                since_ms=info.updated_at_ms,
            )
        case Status.BLOCKED:
            return _blocked(info, now_ms)
        case Status.RUNNING:
            return _alive(info, [step for step in steps if step.state == "open"], context, now_ms)
        case _:
            return _ended(info)


def _pending(info: InstanceInfo, context: QueueContext, now_ms: int) -> Insight:
    starts = [queued.visible_at_ms for queued in context.messages if queued.message.start]
    if starts and min(starts) > now_ms:
        due_ms = min(starts)
        return Insight(
            doing="sleeping",
            sentence=f"Starts in {shown_duration(due_ms - now_ms)}",
            since_ms=info.created_at_ms,
            due_ms=due_ms,
        )
    waited = shown_duration(now_ms - info.created_at_ms)
    return Insight(
        doing="pending",
        sentence=f"Waiting {waited} for a worker{_missing_worker(info, context)}",
        since_ms=info.created_at_ms,
    )


def _missing_worker(info: InstanceInfo, context: QueueContext) -> str:
    if not context.workers:
        return _NO_WORKER
    served = {
        version for worker in context.workers for name, version in worker.startable
        if name == info.name
    }  # fmt: skip
    if not served:
        return f"; no running worker has the orchestration {info.name!r}"
    if info.version is None or info.version in served:
        return ""
    known = ", ".join(sorted(served))
    return f"; no running worker has version {info.version} of {info.name!r}, only {known}"


def _blocked(info: InstanceInfo, now_ms: int) -> Insight:
    block = block_of(info)
    if block is None:
        return Insight(doing="blocked", sentence="Blocked", since_ms=info.updated_at_ms)
    since_ms = block.since_ms or info.updated_at_ms
    reason = _REASONS.get(block.reason, block.reason)
    return Insight(
        doing="blocked",
        sentence=f"Blocked for {shown_duration(now_ms - since_ms)}: {reason}",
        since_ms=since_ms,
        error=block.message,
    )


def _ended(info: InstanceInfo) -> Insight:
    ended_ms = info.completed_at_ms or info.updated_at_ms
    took = shown_duration(ended_ms - info.created_at_ms)
    if info.status is Status.COMPLETED:
        return Insight(doing="ended", sentence=f"Completed in {took}", since_ms=ended_ms)
    failure = failure_of(info)
    text = "" if failure is None else str(failure)
    if info.status is Status.FAILED:
        sentence = f"Failed after {took}: {text}"
        return Insight(doing="ended", sentence=sentence, since_ms=ended_ms, error=text)
    reason = f": {failure.message}" if failure and failure.message else ""
    return Insight(doing="ended", sentence=f"{info.status} after {took}{reason}", since_ms=ended_ms)


def _alive(
    info: InstanceInfo, waits: list[StepView], context: QueueContext, now_ms: int
) -> Insight:
    repeated = [attempt for attempt in context.attempts if attempt.last_error]
    if repeated:
        return _retrying(min(repeated, key=lambda attempt: attempt.next_ms), repeated, now_ms)
    # A timer in the branch of another wait is its time limit, not a sleep.
    limited = {step.branch for step in waits if step.kind != "timer"}
    limits = [s for s in waits if s.kind == "timer" and s.branch in limited]
    steps = [step for step in waits if step not in limits]
    if not steps:
        return _running(info, context, now_ms)
    first = min(steps, key=lambda step: step.since_ms)
    due_ms = min((step.due_ms for step in limits if step.due_ms is not None), default=None)
    if len(steps) == 1:
        return _single(info, first, due_ms, context, now_ms)
    kinds: dict[str, int] = {}
    for step in steps:
        kinds[step.kind] = kinds.get(step.kind, 0) + 1
    awaited = ", ".join(counted(count, kind) for kind, count in kinds.items())
    waited = shown_duration(now_ms - first.since_ms)
    is_running = any(attempt.is_running for attempt in context.attempts)
    return Insight(
        doing="running" if is_running else "waiting",
        sentence=f"Waiting {waited} for {awaited}{_limit(due_ms, now_ms)}",
        since_ms=first.since_ms,
        due_ms=due_ms,
    )


def _retrying(attempt: Attempt, repeated: list[Attempt], now_ms: int) -> Insight:
    number = f"attempt {attempt.number} of {attempt.of}"
    when = (
        f"{number} is running"
        if attempt.is_running
        else f"{number} in {shown_duration(attempt.next_ms - now_ms)}"
        if attempt.next_ms > now_ms
        else f"{number} waits for a worker{_taking(attempt.tag)}"
    )
    more = f" (and {len(repeated) - 1} more)" if len(repeated) > 1 else ""
    return Insight(
        doing="retrying",
        sentence=f"Retrying {attempt.name}{more}: {when}; last error {attempt.last_error}",
        since_ms=attempt.enqueued_ms,
        due_ms=attempt.next_ms,
        error=attempt.last_error,
    )


def _single(
    info: InstanceInfo, step: StepView, due_ms: int | None, context: QueueContext, now_ms: int
) -> Insight:
    waited = shown_duration(now_ms - step.since_ms)
    doing: Doing = "waiting"
    match step.kind:
        case "activity":
            attempt = next((a for a in context.attempts if a.activity_id == step.event_id), None)
            if attempt is not None and not attempt.is_running:
                sentence = f"{step.name} waits {waited} for a worker{_taking(attempt.tag)}"
                if context.workers and not any(
                    step.name in worker.activities for worker in context.workers
                ):
                    sentence += "; no running worker has that activity"
            elif attempt is None and len(context.attempts) < QUEUE_LIMIT:
                sentence = f"{step.name} has ended; its outcome waits for a worker"
            else:
                doing, sentence = "running", f"Running {step.name} for {waited}"
        case "timer":
            doing, due_ms = "sleeping", step.due_ms
            left_ms = (step.due_ms or now_ms) - now_ms
            sentence = (
                f"Sleeping, wakes up in {shown_duration(left_ms)}"
                if left_ms > 0
                else f"Its timer fired {shown_duration(-left_ms)} ago"
                + _missing_worker(info, context)
            )
            return Insight(doing=doing, sentence=sentence, since_ms=step.since_ms, due_ms=due_ms)
        case "event":
            sentence = f"Waiting {waited} for event '{step.name}'"
        case "message" if step.name.startswith(ASK_PREFIX):
            sentence = f"Waiting {waited} for a request '{step.name.removeprefix(ASK_PREFIX)}'"
        case "message":
            sentence = f"Waiting {waited} for a message in '{step.name}'"
        case "instance":
            awaited = (
                f"promise '{promise_key(step.name)}'"
                if is_promise(step.name)
                else f"the end of instance '{step.name}'"
            )
            sentence = f"Waiting {waited} for {awaited}"
        case _:
            sentence = f"Waiting {waited} for {step.name} '{step.child_id}'"
    sentence += _limit(due_ms, now_ms)
    return Insight(doing=doing, sentence=sentence, since_ms=step.since_ms, due_ms=due_ms)


def _taking(tag: str | None) -> str:
    return "" if tag is None else f" that takes the tag {tag!r}"


def _limit(due_ms: int | None, now_ms: int) -> str:
    if due_ms is None:
        return ""
    if due_ms <= now_ms:
        return "; its time is up"
    return f"; times out in {shown_duration(due_ms - now_ms)}"


def _running(info: InstanceInfo, context: QueueContext, now_ms: int) -> Insight:
    ready = [queued for queued in context.messages if queued.visible_at_ms <= now_ms]
    if ready:
        since_ms = min(queued.visible_at_ms for queued in ready)
        verb = "is" if len(ready) == 1 else "are"
        missing = _missing_worker(info, context)
        sentence = f"{counted(len(ready), 'message')} {verb} on the way to it{missing}"
        return Insight(doing="running", sentence=sentence, since_ms=since_ms)
    return Insight(doing="running", sentence="Running", since_ms=info.updated_at_ms)


def _attempt(queued: QueuedWork) -> Attempt:
    message = queued.message
    try:
        item = wire.decode_activity(message.body)
    except CorruptData as error:
        item = unreadable_activity(message.identity, message.name)
        last_error: str | None = error.message
    else:
        last_error = None if item.last_failure is None else str(item.last_failure)
    return Attempt(
        activity_id=item.activity_id,
        name=item.name,
        number=item.attempt,
        of=1 if item.retry is None else item.retry.max_attempts,
        next_ms=queued.visible_at_ms,
        is_running=queued.locked_until_ms is not None,
        enqueued_ms=queued.enqueued_at_ms,
        last_error=last_error,
        deliveries=queued.attempt_count,
        heartbeat=queued.heartbeat,
        tag=item.tag,
    )
