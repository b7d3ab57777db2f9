"""The JSON documents of instances, steps, workers and dead letters: their only definition.

The command line prints them with ``-o json``, and the HTTP API answers with them. Times are texts
in ISO 8601. ``ScheduleInfo`` and ``PromiseInfo`` are documents themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from perdure.client.formats import iso_time, record_from
from perdure.client.insights import Attempt, Doing, Insight, InstanceDetails
from perdure.client.instance import InstanceStats, block_of, failure_of
from perdure.client.steps import Kind, State, StepView, Unread
from perdure.model.failures import Block, Failure
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.engine.waits import Wait
    from perdure.providers.records import DeadLetter, InstanceInfo, WorkerInfo


class InstanceDocument(msgspec.Struct, kw_only=True):
    """An instance. ``doing``, ``sentence`` and ``due_at`` are there if they were asked for."""

    id: str
    name: str
    version: str | None
    status: Status
    execution: int
    parent: str | None
    created_at: str
    updated_at: str
    completed_at: str | None
    custom_status: Any
    output: Any
    """The result of a Completed instance, as it is stored."""
    failure: Failure | None
    block: Block | None
    doing: Doing | UnsetType = UNSET
    sentence: str | UnsetType = UNSET
    due_at: str | UnsetType | None = UNSET


D = TypeVar("D", bound=InstanceDocument)


class StartedDocument(InstanceDocument, kw_only=True):
    """An instance after a start."""

    created: bool
    """False if the id existed before."""


class TreeDocument(InstanceDocument, kw_only=True):
    """An instance with its children."""

    children: list[TreeDocument]


class StepDocument(msgspec.Struct, kw_only=True):
    """One call of the code and its outcome; texts of arguments and results are shortened."""

    event: int
    op: str
    kind: Kind
    call: str
    state: State
    since: str
    ended_at: str | None
    due_at: str | None
    result: str | None
    error: str | None
    attempts: int
    child: str | None
    site: str


class DetailsDocument(InstanceDocument, kw_only=True):
    """An instance with its last steps and its queues."""

    input: Any
    events: int
    events_left_out: int
    steps: list[StepDocument]
    attempts: tuple[Attempt, ...]
    queued_messages: int
    stats: InstanceStats | None
    """Sizes of the history, the queues and the state; None in the API if the history is long."""
    unread: list[Unread]
    """Events and messages that the code has not asked for yet."""
    problem: str | None
    """Says why the history cannot be read."""


class FrameDocument(msgspec.Struct, kw_only=True):
    """One suspended function of the author."""

    file: str
    line: int
    function: str
    locals: dict[str, str]


class WaitDocument(msgspec.Struct, kw_only=True):
    """One open step, with the frames of its branch, outermost first."""

    waits_for: str
    op: str
    called_at: str
    since: str
    due_at: str | None
    frames: list[FrameDocument]


class WorkerDocument(msgspec.Struct, kw_only=True):
    """A running worker."""

    id: str
    host: str
    process_id: int
    started_at: str
    seen_at: str
    version: str
    slots: int
    busy: int
    handlers: list[str]
    activities: tuple[str, ...]


class LetterDocument(msgspec.Struct, kw_only=True):
    """A message whose instance never started."""

    letter: int
    instance: str
    kind: str
    dead_since: str
    reason: str
    message: Any


def instance_document(info: InstanceInfo, insight: Insight | None = None) -> InstanceDocument:
    return _described(InstanceDocument, info, insight)


def started_document(info: InstanceInfo, *, created: bool) -> StartedDocument:
    return _described(StartedDocument, info, None, created=created)


def tree_document(
    info: InstanceInfo, insight: Insight, children: list[TreeDocument]
) -> TreeDocument:
    return _described(TreeDocument, info, insight, children=children)


def details_document(details: InstanceDetails) -> DetailsDocument:
    last, queues = details.last, details.queues
    return _described(
        DetailsDocument,
        details.info,
        details.insight,
        input=last.input,
        events=last.event_count,
        events_left_out=last.left_out,
        steps=[step_document(step) for step in last.steps],
        attempts=queues.attempts,
        queued_messages=len(queues.messages),
        stats=details.stats,
        unread=details.unread,
        problem=last.problem,
    )


def step_document(step: StepView) -> StepDocument:
    return record_from(
        StepDocument,
        step,
        event=step.event_id,
        since=iso_time(step.since_ms),
        ended_at=_time(step.ended_ms),
        due_at=_time(step.due_ms),
        child=step.child_id,
    )


def wait_document(wait: Wait) -> WaitDocument:
    return WaitDocument(
        waits_for=f"{wait.kind} {wait.name}".rstrip(),
        op=wait.op,
        called_at=wait.site,
        since=iso_time(wait.since_ms),
        due_at=_time(wait.due_ms),
        frames=[record_from(FrameDocument, frame) for frame in wait.frames],
    )


def worker_document(worker: WorkerInfo) -> WorkerDocument:
    return record_from(
        WorkerDocument,
        worker,
        id=worker.worker_id,
        started_at=iso_time(worker.started_at_ms),
        seen_at=iso_time(worker.seen_at_ms),
        version=worker.framework_version,
        handlers=[f"{name}@{version}" for name, version in worker.handlers],
    )


def letter_document(letter: DeadLetter) -> LetterDocument:
    return LetterDocument(
        letter=letter.letter_id,
        instance=letter.message.instance_id,
        kind=letter.message.kind,
        dead_since=iso_time(letter.dead_since_ms),
        reason=letter.reason,
        message=raw(letter.message.body),
    )


def raw(text: str | None) -> Any:
    """Return stored JSON unchanged, or as a string if it is damaged."""
    if text is None:
        return None
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
    return msgspec.Raw(text)


def _described(kind: type[D], info: InstanceInfo, insight: Insight | None, **more: Any) -> D:
    """Return a document of the instance. Fields of the same name are those of the record."""
    if insight is not None:
        more |= {"doing": insight.doing, "sentence": insight.sentence}
        more["due_at"] = _time(insight.due_ms)
    return record_from(
        kind,
        info,
        id=info.instance_id,
        status=info.status.of_instance,
        execution=info.execution_id,
        parent=info.parent_instance_id,
        created_at=iso_time(info.created_at_ms),
        updated_at=iso_time(info.updated_at_ms),
        completed_at=_time(info.completed_at_ms),
        custom_status=raw(info.custom_status),
        output=raw(info.output) if info.status is Status.COMPLETED else None,
        failure=failure_of(info),
        block=block_of(info),
        **more,
    )


def _time(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else iso_time(milliseconds)
