"""Write one instance as a readable JSON document, and read it back.

A document comes from outside, so every value in it is checked like an argument of a call.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.errors import InvalidValue
from perdure.limits import HISTORY_EVENTS_MAX, KV_KEYS_MAX, KV_VALUE_BYTES_MAX
from perdure.providers import documents, validation
from perdure.providers.documents import Document, extract
from perdure.providers.records import (
    ExecutionSnapshot,
    HistoryRecord,
    InstanceSnapshot,
    KvEntry,
    QueuedMessage,
    QueuedWork,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPORT_FORMAT: Final = 1
"""Version of the document; one with a higher number is refused."""


_EVENT: Final = Document("Event", documents.EVENT)
_EXECUTION: Final = Document("Execution", documents.EXECUTION, [("history", _EVENT.several, ())])
_MESSAGE: Final = Document("Message", documents.MESSAGE)
_WORK: Final = Document("Work", documents.WORK)
_INSTANCE: Final = Document(
    "Instance",
    documents.INSTANCE,
    [
        ("kv_store", dict[str, KvEntry], {}),
        ("kv_delta", dict[str, KvEntry | None], {}),
        ("executions", _EXECUTION.several, ()),
        ("messages", _MESSAGE.several, ()),
        ("work", _WORK.several, ()),
    ],
)


class _Export(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    perdure_export: int
    sha256: str
    instance: msgspec.Raw


class _Header(msgspec.Struct, frozen=True):
    perdure_export: int


_TIME_MAX: Final = 2**63 - 1
_encoder = msgspec.json.Encoder()


def encode_snapshot(snapshot: InstanceSnapshot, *, indent: int = -1) -> str:
    """Return the document on one line, or on many lines with an indent."""
    body = _encoder.encode(_instance(snapshot))
    digest = hashlib.sha256(body).hexdigest()
    export = _Export(perdure_export=EXPORT_FORMAT, sha256=digest, instance=msgspec.Raw(body))
    return msgspec.json.format(_encoder.encode(export), indent=indent).decode()


def decode_snapshot(text: str) -> InstanceSnapshot:
    """Return the instance in a document. Raises InvalidValue for a damaged or wrong one."""
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
        snapshot = _snapshot(msgspec.json.decode(export.instance, type=_INSTANCE.struct))
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidValue(f"not an instance written by perdure: {error}") from error
    _check(snapshot)
    return snapshot


def snapshot_hash(snapshot: InstanceSnapshot) -> str:
    """Return a hash that is equal for an instance and its copy. Queue positions do not count."""
    return hashlib.sha256(_encoder.encode(_instance(snapshot))).hexdigest()


# --- out


def _instance(snapshot: InstanceSnapshot) -> Any:
    return _INSTANCE.write(
        snapshot,
        kv_store=dict(sorted(snapshot.kv_store.items())),
        kv_delta=dict(sorted(snapshot.kv_delta.items())),
        executions=tuple(
            _EXECUTION.write(each, history=tuple(map(_EVENT.write, each.history)))
            for each in snapshot.executions
        ),
        messages=tuple(map(_MESSAGE.write, snapshot.messages)),
        work=tuple(map(_WORK.write, snapshot.work)),
    )


# --- in


def _snapshot(instance: Any) -> InstanceSnapshot:
    instance_id = instance.instance_id
    snapshot: InstanceSnapshot = _INSTANCE.read(
        instance,
        InstanceSnapshot,
        kv_store=instance.kv_store,
        kv_delta=instance.kv_delta,
        executions=tuple(map(_execution, instance.executions)),
        messages=tuple(
            _MESSAGE.read(
                _with_content(each, each.body, each.body_text, "a message"),
                QueuedMessage,
                message_id=number,
                message__instance_id=instance_id,
                locked=False,
            )
            for number, each in enumerate(instance.messages, 1)
        ),
        work=tuple(
            _WORK.read(
                _with_content(each, each.body, each.body_text, "a work item"),
                QueuedWork,
                message_id=number,
                message__identity__instance_id=instance_id,
                locked_until_ms=None,
            )
            for number, each in enumerate(instance.work, 1)
        ),
    )
    return snapshot


def _execution(execution: Any) -> ExecutionSnapshot:
    history = tuple(
        _EVENT.read(_with_content(each, each.event, each.text, "an event"), HistoryRecord)
        for each in execution.history
    )
    snapshot: ExecutionSnapshot = _EXECUTION.read(execution, ExecutionSnapshot, history=history)
    return snapshot


def _with_content(document: Any, json: msgspec.Raw, text: str | None, what: str) -> Any:
    """Return the document. Raises InvalidValue if its payload is missing."""
    if extract(json, text) is None:
        raise InvalidValue(f"{what} in the document has no content")
    return document


def _check(snapshot: InstanceSnapshot) -> None:
    """Check the rules that the types of the document do not hold."""
    validation.check_snapshot(snapshot)
    numbers = {
        "execution_id": (snapshot.execution_id, 1),
        "created_at_ms": (snapshot.created_at_ms, 0),
        "updated_at_ms": (snapshot.updated_at_ms, 0),
        "custom_status_version": (snapshot.custom_status_version, 0),
    }
    for what, (number, minimum) in numbers.items():
        validation.check_number(number, what, minimum=minimum)
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
        validation.check_text(work.heartbeat, "heartbeat")
    _check_state(snapshot.kv_store)
    _check_state(snapshot.kv_delta)


def _check_entry(visible_at_ms: int, enqueued_at_ms: int, attempt_count: int) -> None:
    validation.check_number(visible_at_ms, "visible_at_ms", minimum=-_TIME_MAX)
    validation.check_number(enqueued_at_ms, "enqueued_at_ms", minimum=0)
    validation.check_number(attempt_count, "attempt_count", minimum=0)


def _check_state(values: Mapping[str, KvEntry | None]) -> None:
    if len(values) > 2 * KV_KEYS_MAX:  # a layer may clear what the other one holds
        raise InvalidValue(f"the document has {len(values)} keys of state")
    for key, entry in values.items():
        validation.check_text(key, "key of a value")
        if entry is not None:
            validation.check_text(entry.value, "value", KV_VALUE_BYTES_MAX)
