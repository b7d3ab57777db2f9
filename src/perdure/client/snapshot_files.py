"""One instance as one readable JSON document, and back.

A document comes from outside: it is checked like a call, and nothing in it is believed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.errors import InvalidValue
from perdure.limits import HISTORY_EVENTS_MAX, KV_KEYS_MAX, KV_VALUE_BYTES_MAX
from perdure.model.failures import Block
from perdure.model.status import Status
from perdure.providers._shared import refusals
from perdure.providers._shared.embedding import NO_JSON, embed, extract
from perdure.providers.items import (
    ActivityIdentity,
    ExecutionSnapshot,
    HistoryRecord,
    InstanceSnapshot,
    KvEntry,
    OrchestratorMessage,
    QueuedMessage,
    QueuedWork,
    StartRouting,
    TimerIdentity,
    Version,
    WorkerMessage,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPORT_FORMAT: Final = 1
"""Version of the document; one with a higher number is refused."""


class _Part(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    pass


class _Event(_Part, frozen=True, kw_only=True, omit_defaults=True):
    event_id: int
    event: msgspec.Raw = NO_JSON
    text: str | None = None


class _Execution(_Part, frozen=True, kw_only=True, omit_defaults=True):
    execution_id: int
    status: Status
    output: msgspec.Raw = NO_JSON
    output_text: str | None = None
    started_at_ms: int
    completed_at_ms: int | None = None
    framework_version: Version | None = None
    history: tuple[_Event, ...] = ()


class _Message(_Part, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    visible_at_ms: int
    enqueued_at_ms: int
    attempt_count: int = 0
    asked_visible_at_ms: int | None = None
    start: StartRouting | None = None
    timer: TimerIdentity | None = None
    body: msgspec.Raw = NO_JSON
    body_text: str | None = None


class _Work(_Part, frozen=True, kw_only=True, omit_defaults=True):
    execution_id: int
    activity_id: int
    name: str
    visible_at_ms: int
    enqueued_at_ms: int
    attempt_count: int = 0
    asked_visible_at_ms: int | None = None
    session_id: str | None = None
    tag: str | None = None
    heartbeat: str | None = None
    body: msgspec.Raw = NO_JSON
    body_text: str | None = None


class _Instance(_Part, frozen=True, kw_only=True, omit_defaults=True):
    instance_id: str
    name: str | None = None
    version: str | None = None
    execution_id: int
    created_at_ms: int
    updated_at_ms: int
    parent_instance_id: str | None = None
    custom_status: str | None = None
    custom_status_version: int = 0
    suspended: bool = False
    block: Block | None = None
    not_before_ms: int | None = None
    kv_store: dict[str, KvEntry] = {}
    kv_delta: dict[str, KvEntry | None] = {}
    executions: tuple[_Execution, ...] = ()
    messages: tuple[_Message, ...] = ()
    work: tuple[_Work, ...] = ()


class _Export(_Part, frozen=True, kw_only=True):
    perdure_export: int
    sha256: str
    instance: msgspec.Raw


class _Header(msgspec.Struct, frozen=True):
    perdure_export: int


_TIME_MAX: Final = 2**63 - 1
_encoder = msgspec.json.Encoder()


def encode_snapshot(snapshot: InstanceSnapshot, *, indent: int = -1) -> str:
    """The document: on one line, or with an indent on many."""
    body = _encoder.encode(_instance(snapshot))
    digest = hashlib.sha256(body).hexdigest()
    export = _Export(perdure_export=EXPORT_FORMAT, sha256=digest, instance=msgspec.Raw(body))
    return msgspec.json.format(_encoder.encode(export), indent=indent).decode()


def decode_snapshot(text: str) -> InstanceSnapshot:
    """The instance in a document. Raises InvalidValue if anything about it is not right."""
    try:
        compact = msgspec.json.format(text.encode(), indent=-1)
        version = msgspec.json.decode(compact, type=_Header).perdure_export
        if version != EXPORT_FORMAT:
            raise InvalidValue(
                f"the document has export format {version}, this version of perdure reads "
                f"{EXPORT_FORMAT}"
            )
        export = msgspec.json.decode(compact, type=_Export)
        if hashlib.sha256(export.instance).hexdigest() != export.sha256:
            raise InvalidValue("the document was changed or cut: its checksum does not fit")
        snapshot = _snapshot(msgspec.json.decode(export.instance, type=_Instance))
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidValue(f"not an instance written by perdure: {error}") from error
    _check(snapshot)
    return snapshot


def snapshot_hash(snapshot: InstanceSnapshot) -> str:
    """The same for an instance and its copy, whatever their places in the queues."""
    return hashlib.sha256(_encoder.encode(_instance(snapshot))).hexdigest()


# --- out


def _instance(snapshot: InstanceSnapshot) -> _Instance:
    return _Instance(
        instance_id=snapshot.instance_id,
        name=snapshot.name,
        version=snapshot.version,
        execution_id=snapshot.execution_id,
        created_at_ms=snapshot.created_at_ms,
        updated_at_ms=snapshot.updated_at_ms,
        parent_instance_id=snapshot.parent_instance_id,
        custom_status=snapshot.custom_status,
        custom_status_version=snapshot.custom_status_version,
        suspended=snapshot.suspended,
        block=snapshot.block,
        not_before_ms=snapshot.not_before_ms,
        kv_store=dict(sorted(snapshot.kv_store.items())),
        kv_delta=dict(sorted(snapshot.kv_delta.items())),
        executions=tuple(_execution(execution) for execution in snapshot.executions),
        messages=tuple(_message(message) for message in snapshot.messages),
        work=tuple(_work(work) for work in snapshot.work),
    )


def _execution(execution: ExecutionSnapshot) -> _Execution:
    output, output_text = embed(execution.output)
    return _Execution(
        execution_id=execution.execution_id,
        status=execution.status,
        output=output,
        output_text=output_text,
        started_at_ms=execution.started_at_ms,
        completed_at_ms=execution.completed_at_ms,
        framework_version=execution.framework_version,
        history=tuple(_event(record) for record in execution.history),
    )


def _event(record: HistoryRecord) -> _Event:
    event, text = embed(record.data)
    return _Event(event_id=record.event_id, event=event, text=text)


def _message(queued: QueuedMessage) -> _Message:
    body, body_text = embed(queued.message.body)
    return _Message(
        kind=queued.message.kind,
        visible_at_ms=queued.visible_at_ms,
        enqueued_at_ms=queued.enqueued_at_ms,
        attempt_count=queued.attempt_count,
        asked_visible_at_ms=queued.message.visible_at_ms,
        start=queued.message.start,
        timer=queued.message.timer,
        body=body,
        body_text=body_text,
    )


def _work(queued: QueuedWork) -> _Work:
    message = queued.message
    body, body_text = embed(message.body)
    return _Work(
        execution_id=message.identity.execution_id,
        activity_id=message.identity.activity_id,
        name=message.name,
        visible_at_ms=queued.visible_at_ms,
        enqueued_at_ms=queued.enqueued_at_ms,
        attempt_count=queued.attempt_count,
        asked_visible_at_ms=message.visible_at_ms,
        session_id=message.session_id,
        tag=message.tag,
        heartbeat=queued.heartbeat,
        body=body,
        body_text=body_text,
    )


# --- in


def _snapshot(instance: _Instance) -> InstanceSnapshot:
    return InstanceSnapshot(
        instance_id=instance.instance_id,
        name=instance.name,
        version=instance.version,
        execution_id=instance.execution_id,
        created_at_ms=instance.created_at_ms,
        updated_at_ms=instance.updated_at_ms,
        parent_instance_id=instance.parent_instance_id,
        custom_status=instance.custom_status,
        custom_status_version=instance.custom_status_version,
        suspended=instance.suspended,
        block=instance.block,
        not_before_ms=instance.not_before_ms,
        executions=tuple(_execution_snapshot(execution) for execution in instance.executions),
        kv_store=instance.kv_store,
        kv_delta=instance.kv_delta,
        messages=tuple(
            _queued_message(instance.instance_id, number, message)
            for number, message in enumerate(instance.messages, 1)
        ),
        work=tuple(
            _queued_work(instance.instance_id, number, work)
            for number, work in enumerate(instance.work, 1)
        ),
    )


def _execution_snapshot(execution: _Execution) -> ExecutionSnapshot:
    return ExecutionSnapshot(
        execution_id=execution.execution_id,
        status=execution.status,
        output=extract(execution.output, execution.output_text),
        started_at_ms=execution.started_at_ms,
        completed_at_ms=execution.completed_at_ms,
        framework_version=execution.framework_version,
        history=tuple(
            HistoryRecord(
                event_id=event.event_id, data=_required(event.event, event.text, "an event")
            )
            for event in execution.history
        ),
    )


def _queued_message(instance_id: str, number: int, message: _Message) -> QueuedMessage:
    return QueuedMessage(
        message_id=number,
        message=OrchestratorMessage(
            instance_id=instance_id,
            kind=message.kind,
            body=_required(message.body, message.body_text, "a message"),
            visible_at_ms=message.asked_visible_at_ms,
            start=message.start,
            timer=message.timer,
        ),
        visible_at_ms=message.visible_at_ms,
        enqueued_at_ms=message.enqueued_at_ms,
        attempt_count=message.attempt_count,
        locked=False,
    )


def _queued_work(instance_id: str, number: int, work: _Work) -> QueuedWork:
    return QueuedWork(
        message_id=number,
        message=WorkerMessage(
            identity=ActivityIdentity(
                instance_id=instance_id,
                execution_id=work.execution_id,
                activity_id=work.activity_id,
            ),
            name=work.name,
            body=_required(work.body, work.body_text, "a work item"),
            session_id=work.session_id,
            tag=work.tag,
            visible_at_ms=work.asked_visible_at_ms,
        ),
        visible_at_ms=work.visible_at_ms,
        enqueued_at_ms=work.enqueued_at_ms,
        attempt_count=work.attempt_count,
        locked_until_ms=None,
        heartbeat=work.heartbeat,
    )


def _required(json: msgspec.Raw, text: str | None, what: str) -> str:
    payload = extract(json, text)
    if payload is None:
        raise InvalidValue(f"{what} in the document has no content")
    return payload


def _check(snapshot: InstanceSnapshot) -> None:
    """What the document's types do not say and a call would refuse."""
    refusals.check_snapshot(snapshot)
    numbers = {
        "execution_id": (snapshot.execution_id, 1),
        "created_at_ms": (snapshot.created_at_ms, 0),
        "updated_at_ms": (snapshot.updated_at_ms, 0),
        "custom_status_version": (snapshot.custom_status_version, 0),
    }
    for what, (number, minimum) in numbers.items():
        refusals.check_number(number, what, minimum=minimum)
    ids = [execution.execution_id for execution in snapshot.executions]
    if sorted(set(ids)) != ids or (ids and snapshot.execution_id not in ids):
        raise InvalidValue(f"the executions {ids[:10]} do not fit together")
    for execution in snapshot.executions:
        events = [record.event_id for record in execution.history]
        if len(events) > HISTORY_EVENTS_MAX or sorted(set(events)) != events:
            raise InvalidValue(
                f"the events of execution {execution.execution_id} are too many or out of order"
            )
    for message in snapshot.messages:
        _check_entry(message.visible_at_ms, message.enqueued_at_ms, message.attempt_count)
    for work in snapshot.work:
        _check_entry(work.visible_at_ms, work.enqueued_at_ms, work.attempt_count)
        refusals.check_text(work.heartbeat, "heartbeat")
    _check_state(snapshot.kv_store)
    _check_state(snapshot.kv_delta)


def _check_entry(visible_at_ms: int, enqueued_at_ms: int, attempt_count: int) -> None:
    refusals.check_number(visible_at_ms, "visible_at_ms", minimum=-_TIME_MAX)
    refusals.check_number(enqueued_at_ms, "enqueued_at_ms", minimum=0)
    refusals.check_number(attempt_count, "attempt_count", minimum=0)


def _check_state(values: Mapping[str, KvEntry | None]) -> None:
    if len(values) > 2 * KV_KEYS_MAX:  # a layer may clear what the other one holds
        raise InvalidValue(f"the document has {len(values)} keys of state")
    for key, entry in values.items():
        refusals.check_text(key, "key of a value")
        if entry is not None:
            refusals.check_text(entry.value, "value", KV_VALUE_BYTES_MAX)
