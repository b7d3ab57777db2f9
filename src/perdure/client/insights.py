"""One sentence for people: the current activity of an instance, and since when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from perdure.client.durations import shown_duration
from perdure.client.instance import failure_of
from perdure.client.steps import StepView, read_steps
from perdure.errors import CorruptData, NotFound
from perdure.model import events, wire, work
from perdure.model.status import Status
from perdure.providers.records import QueuedMessage, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo, QueuedWork

Activity: TypeAlias = Literal[
    "pending", "running", "retrying", "waiting", "sleeping", "paused", "blocked", "ended"
]

TAIL_EVENTS: Final = 200
"""Events at the end of a history that are read for the sentence, even of a long history."""
QUEUE_LIMIT: Final = 200


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """The current activity of an instance."""

    doing: Activity
    sentence: str
    since_ms: int
    due_ms: int | None = None
    """The time at which it continues by itself, if known."""
    error: str | None = None
    """The last error: of the instance, or of the attempt that is being repeated."""


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
        steps = await read_steps(provider, *key, after_event_id=left_out)
        first = await provider.read_with_execution(*key, limit=1) if with_input else []
        begun = [wire.decode_event(record.data) for record in first]
    except CorruptData as error:
        problem = f"the history cannot be read: {error.message}"
        return LastSteps(event_count=count, left_out=left_out, problem=problem)
    given = next((e.input for e in begun if isinstance(e, events.OrchestrationStarted)), None)
    return LastSteps(steps=steps, event_count=count, left_out=left_out, input=given)


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
    info: InstanceInfo, steps: Iterable[StepView], context: QueueContext, now_ms: int
) -> Insight:
    """Return the sentence. ``steps`` may be the last steps only."""
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
        return "; no worker is running"
    served = {
        version for worker in context.workers for name, version in worker.handlers
        if name == info.name
    }  # fmt: skip
    if not served:
        return f"; no running worker has the orchestration {info.name!r}"
    if info.version is None or info.version in served:
        return ""
    known = ", ".join(sorted(served))
    return f"; no running worker has version {info.version} of {info.name!r}, only {known}"


def _blocked(info: InstanceInfo, now_ms: int) -> Insight:
    block = info.block
    if block is None:
        return Insight(doing="blocked", sentence="Blocked", since_ms=info.updated_at_ms)
    since_ms = block.since_ms or info.updated_at_ms
    return Insight(
        doing="blocked",
        sentence=f"Blocked for {shown_duration(now_ms - since_ms)}: {block.reason}",
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
    counted = ", ".join(_counted(kind, count) for kind, count in kinds.items())
    waited = shown_duration(now_ms - first.since_ms)
    is_running = any(attempt.is_running for attempt in context.attempts)
    return Insight(
        doing="running" if is_running else "waiting",
        sentence=f"Waiting {waited} for {counted}{_limit(due_ms, now_ms)}",
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
    doing: Activity = "waiting"
    match step.kind:
        case "activity":
            attempt = next((a for a in context.attempts if a.activity_id == step.event_id), None)
            if attempt is not None and not attempt.is_running:
                sentence = f"{step.name} waits {waited} for a worker{_taking(attempt.tag)}"
                if not any(step.name in worker.activities for worker in context.workers):
                    sentence += "; no running worker has that activity"
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
        case "message":
            sentence = f"Waiting {waited} for a message in '{step.name}'"
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
        what = "message is" if len(ready) == 1 else "messages are"
        sentence = f"{len(ready)} {what} on the way to it{_missing_worker(info, context)}"
        return Insight(doing="running", sentence=sentence, since_ms=since_ms)
    return Insight(doing="running", sentence="Running", since_ms=info.updated_at_ms)


def _counted(kind: str, count: int) -> str:
    plural = {"activity": "activities"}.get(kind, f"{kind}s")
    return f"{count} {kind if count == 1 else plural}"


def _attempt(queued: QueuedWork) -> Attempt:
    message = queued.message
    try:
        item = wire.decode_activity(message.body)
    except CorruptData as error:
        item = work.ActivityExecute(
            instance_id=message.identity.instance_id,
            execution_id=message.identity.execution_id,
            activity_id=message.identity.activity_id,
            name=message.name,
        )
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
