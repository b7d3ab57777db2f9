"""The home page and the groups of errors: what needs attention, and numbers over time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.client.formats import iso_time, shown_duration, shown_time, utc_time
from perdure.client.insights import read_queue_context
from perdure.client.instance import block_of, count_by_status, failure_of
from perdure.limits import PAGE_ITEMS_MAX
from perdure.model.failures import author_line
from perdure.model.status import Status
from perdure.providers.records import InstanceQuery

if TYPE_CHECKING:
    from perdure.client.schedules import ScheduleInfo
    from perdure.dashboard.service import Service
    from perdure.providers.records import InstanceInfo, QueueDepth, QueueDepths, WorkerInfo

_SAMPLE: Final = 500
"""Instances that are read to group them; counts are exact."""
_BUCKETS: Final = 30
_BUCKET: Final = timedelta(minutes=2)
_OVERDUE_MS: Final = 60_000
_RETRYING_MS: Final = 60_000
_RETRYING_ATTEMPT: Final = 3
"""An activity is retrying for long from this attempt on, or after that time."""
_RETRYING_SAMPLE: Final = 100
_IDS_MAX: Final = 50
_STARTING_MS: Final = 10_000
_CHANGING: Final = re.compile(
    r"0x[0-9a-f]+|[0-9a-f]{8}-[0-9a-f-]{27}|\b[0-9a-f]{12,}\b|'[^']*'|\"[^\"]*\"|\d+", re.IGNORECASE
)


class Attention(msgspec.Struct, kw_only=True):
    """One cause that keeps instances from going on, or that someone should look at."""

    kind: str
    sentence: str
    advice: str
    severity: str = "warn"
    """``bad`` or ``warn``."""
    count: int = 1
    query: str = ""
    """Finds the instances; empty if it is not about instances."""
    action: str | None = None
    """The action of a button that helps: ``retry`` or ``resume``."""
    page: str = ""
    """The page that tells more."""


class Bucket(msgspec.Struct):
    """Numbers of instances that started, completed or failed in one span of time."""

    at: str
    started: int
    completed: int
    failed: int


class Queue(msgspec.Struct):
    ready: int
    later: int
    locked: int
    oldest_ms: int | None


class StoreStrip(msgspec.Struct):
    provider: str
    location: str
    size_bytes: int | None


class Home(msgspec.Struct, kw_only=True):
    """The home page."""

    attention: list[Attention]
    counts: dict[Status, int]
    series: list[Bucket]
    messages: Queue
    work: Queue
    workers: int
    slots: int
    busy: int
    store: StoreStrip
    now: str


class ErrorGroup(msgspec.Struct, kw_only=True):
    """Failed or blocked instances with the same exception, line and shape of the message."""

    type: str
    line: str
    shape: str
    count: int
    """Among the newest failed and blocked instances that were read."""
    names: dict[str, int]
    first_at: str
    last_at: str
    sample_id: str
    sample_message: str
    ids: list[str]
    command: str


async def read_home(service: Service) -> Home:
    admin = service.admin
    counts = count_by_status((await admin.get_system_metrics()).by_status)
    depths = await admin.get_queue_depths()
    workers = await admin.list_workers()
    store = await admin.get_store_info()
    return Home(
        attention=await _attention(service, counts, depths, workers),
        counts=counts,
        series=await _series(service),
        messages=_messages(depths.orchestrator, counts),
        work=_queue(depths.worker),
        workers=len(workers),
        slots=sum(worker.slots for worker in workers),
        busy=sum(worker.busy for worker in workers),
        store=StoreStrip(store.provider, store.location, store.size_bytes),
        now=iso_time(service.now_ms()),
    )


def _queue(depth: QueueDepth) -> Queue:
    return Queue(depth.visible, depth.delayed, depth.locked, depth.oldest_visible_age_ms)


def _messages(depth: QueueDepth, counts: dict[Status, int]) -> Queue:
    """Return the queue of messages. Those of blocked and paused instances wait on purpose."""
    found = _queue(depth)
    if counts.get(Status.BLOCKED) or counts.get(Status.PAUSED):
        found.oldest_ms = None
    return found


async def _attention(
    service: Service,
    counts: dict[Status, int],
    depths: QueueDepths,
    workers: list[WorkerInfo],
) -> list[Attention]:
    found: list[Attention] = []
    if counts.get(Status.BLOCKED):
        found += await _blocked(service, counts[Status.BLOCKED])
    found += await _without_worker(service, counts, workers)
    oldest = max(
        depths.worker.oldest_visible_age_ms or 0,
        _messages(depths.orchestrator, counts).oldest_ms or 0,
    )
    if workers and oldest > _OVERDUE_MS:
        found.append(
            Attention(
                kind="overdue",
                sentence=f"The oldest ready work has waited {shown_duration(oldest)}",
                count=depths.worker.visible + depths.orchestrator.visible,
                advice="The workers do not keep up, or none has the code or the tag of this work: "
                "see Workers, and start another one.",
                page="workers",
            )
        )
    found += await _retrying(service, depths)
    for schedule in await service.client.schedules.list():
        found += _late(schedule, service.now_ms())
    day_ago = utc_time(service.now_ms()) - timedelta(days=1)
    failed = await service.admin.count_instances(
        InstanceQuery(statuses=frozenset({Status.FAILED}), completed_after=day_ago)
    )
    if failed:
        found.append(
            Attention(
                kind="failed",
                severity="bad",
                sentence=f"{failed} failed in the last 24 hours",
                count=failed,
                query="status:failed completed:<1d",
                advice="Errors groups them. After a fix, retry lets them go on where they failed.",
                action="retry",
                page="errors",
            )
        )
    if depths.dead_letters:
        found.append(
            Attention(
                kind="letters",
                sentence=f"{depths.dead_letters} messages have no instance",
                count=depths.dead_letters,
                advice="Store lists them: requeue or delete each.",
                page="store",
            )
        )
    return found


async def _blocked(service: Service, total: int) -> list[Attention]:
    query = InstanceQuery(statuses=frozenset({Status.BLOCKED}))
    page = await service.admin.list_instances(query, limit=_SAMPLE)
    reasons = Counter(
        f"{info.name}: {info.block.reason}" if info.block else info.name for info in page.instances
    )
    most = ", ".join(f"{reason} ({number})" for reason, number in reasons.most_common(3))
    return [
        Attention(
            kind="blocked",
            severity="bad",
            sentence=f"{total} blocked: {most}",
            count=total,
            query="status:blocked",
            advice="Nothing is lost. A worker with fixed code lets them go on; retry tries now.",
            action="retry",
        )
    ]


async def _without_worker(
    service: Service, counts: dict[Status, int], workers: list[WorkerInfo]
) -> list[Attention]:
    served = {key for worker in workers for key in worker.startable}
    names = {name for name, _ in served}
    waiting = frozenset({Status.PENDING, Status.RUNNING})
    if not any(counts.get(status) for status in waiting):
        return []
    page = await service.admin.list_instances(InstanceQuery(statuses=waiting), limit=_SAMPLE)
    missing: Counter[str] = Counter()
    for info in page.instances:
        is_new = service.now_ms() - info.created_at_ms < _STARTING_MS
        has_code = (
            info.name in names if info.version is None else (info.name, info.version) in served
        )
        if not has_code and not is_new:
            missing[info.name if info.version is None else f"{info.name}@{info.version}"] += 1
    return [
        Attention(
            kind="no worker",
            severity="bad",
            sentence=f"No running worker has {code}"
            if workers
            else f"No worker is running for {code}",
            count=number,
            query=_query_of(code),
            advice="Start a worker with this code: perdure worker MODULE",
        )
        for code, number in missing.most_common(5)
    ]


async def _retrying(service: Service, depths: QueueDepths) -> list[Attention]:
    """Find activities that are tried again and again, among the newest running instances."""
    if not depths.worker.delayed:
        return []
    query = InstanceQuery(statuses=frozenset({Status.RUNNING}))
    page = await service.admin.list_instances(query, limit=_RETRYING_SAMPLE)
    ids: defaultdict[str, list[str]] = defaultdict(list)
    errors: dict[str, str] = {}
    now_ms = service.now_ms()
    for info in page.instances:
        for attempt in (await read_queue_context(service.admin, info.instance_id)).attempts:
            is_long = (
                attempt.number >= _RETRYING_ATTEMPT or now_ms - attempt.enqueued_ms > _RETRYING_MS
            )
            if attempt.last_error and is_long:
                ids[attempt.name].append(info.instance_id)
                errors.setdefault(attempt.name, service.text("error", attempt.last_error) or "")
    return [
        Attention(
            kind="retrying",
            sentence=f"{name} fails and is tried again: {errors[name]}",
            count=len(set(members)),
            query=f"id:{','.join(dict.fromkeys(members[:_IDS_MAX]))}",
            advice="It goes on by itself when the cause is gone. If it stays: fix and deploy, or "
            "cancel the runs.",
        )
        for name, members in ids.items()
    ]


def _late(schedule: ScheduleInfo, now_ms: int) -> list[Attention]:
    """Say that a schedule has missed a slot, has stopped, or has lost its declaration."""
    last = schedule.recent[-1] if schedule.recent else None
    late_ms = 0
    if schedule.next_at is not None:
        late_ms = now_ms - round(schedule.next_at.timestamp() * 1000)
    if schedule.status.is_final or schedule.status is Status.BLOCKED:
        sentence = f"Schedule {schedule.id} has stopped: {schedule.status.lower()}"
        advice = "It starts nothing any more. Its run says why."
    elif late_ms > _OVERDUE_MS:
        sentence = f"Schedule {schedule.id} missed a slot {shown_duration(late_ms)} ago"
        advice = "No worker has started it. Start a worker: perdure worker MODULE"
    elif schedule.paused is not None and schedule.failures:
        sentence = f"Schedule {schedule.id} is paused after {schedule.failures} failures in a row"
        advice = "Fix the cause, then resume it."
    elif last is not None and last.reason == "missed":
        sentence = f"Schedule {schedule.id} missed its slot of {shown_time(last.slot_ms)}"
        advice = "Schedules shows it. A backfill starts the slots that have no instance."
    elif schedule.has_vanished:
        sentence = f"No running worker declares the schedule {schedule.id} any more"
        advice = "It goes on. Remove it if that was meant."
    else:
        return []
    return [
        Attention(
            kind="schedule",
            sentence=sentence,
            advice=advice,
            page="schedules",
        )
    ]


def _query_of(code: str) -> str:
    name, _, version = code.partition("@")
    return f"status:open name:{name}" + (f" version:{version}" if version else "")


async def _series(service: Service) -> list[Bucket]:
    """Count the newest instances of the last hour by the times of their starts and ends.

    One page is read, so that a million instances cost no more than a thousand.
    """
    now_ms, width_ms = service.now_ms(), int(_BUCKET.total_seconds() * 1000)
    first_ms = now_ms - _BUCKETS * width_ms
    found = [Bucket(iso_time(first_ms + number * width_ms), 0, 0, 0) for number in range(_BUCKETS)]
    query = InstanceQuery(created_after=utc_time(first_ms))
    for info in (await service.admin.list_instances(query, limit=PAGE_ITEMS_MAX)).instances:
        started = min(_BUCKETS - 1, (info.created_at_ms - first_ms) // width_ms)
        found[started].started += 1
        if info.completed_at_ms is not None and info.status.is_final:
            ended = min(_BUCKETS - 1, (info.completed_at_ms - first_ms) // width_ms)
            if info.status is Status.COMPLETED:
                found[ended].completed += 1
            else:
                found[ended].failed += info.status is Status.FAILED
    return found


# --- errors


async def group_errors(service: Service) -> list[ErrorGroup]:
    """Group the newest failed and blocked instances, largest group first."""
    groups: defaultdict[tuple[str, str, str], list[InstanceInfo]] = defaultdict(list)
    for status in (Status.FAILED, Status.BLOCKED):
        query = InstanceQuery(statuses=frozenset({status}))
        for info in (await service.admin.list_instances(query, limit=_SAMPLE)).instances:
            groups[_fingerprint(info)].append(info)
    found = [_group(service, key, members) for key, members in groups.items()]
    return sorted(found, key=lambda group: -group.count)


def _fingerprint(info: InstanceInfo) -> tuple[str, str, str]:
    """Return the type of the error, the author's line, and the message without what changes."""
    failure = failure_of(info)
    if failure is not None:
        line = author_line(failure.traceback)
        return failure.type_name or str(failure.category), line, _shape(failure.message)
    if (block := block_of(info)) is not None:
        return f"Blocked: {block.reason}", "", _shape(block.message)
    return str(info.status), "", ""


def _shape(message: str) -> str:
    return _CHANGING.sub("…", message.splitlines()[0] if message else "")[:200]


def _group(service: Service, key: tuple[str, str, str], members: list[InstanceInfo]) -> ErrorGroup:
    kind, line, shape = key
    newest = members[0]
    failure = failure_of(newest)
    block = block_of(newest)
    message = block.message if block else failure.message if failure else ""
    times = [info.completed_at_ms or info.updated_at_ms for info in members]
    names = Counter(info.name for info in members)
    status = "blocked" if kind.startswith("Blocked") else "failed"
    return ErrorGroup(
        type=kind,
        line=line,
        shape=service.text("error", shape) or "",
        count=len(members),
        names=dict(names),
        first_at=iso_time(min(times)),
        last_at=iso_time(max(times)),
        sample_id=newest.instance_id,
        sample_message=service.text("error", message) or "",
        ids=[info.instance_id for info in members],
        command=f"perdure retry --query 'status:{status} name:{','.join(names)}' --dry-run",
    )
