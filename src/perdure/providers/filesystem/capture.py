"""From rows to documents and back: which rows make up which readable file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.providers.documents import embed, extract
from perdure.providers.filesystem.documents import (
    ExecutionDocument,
    InstanceDocument,
    KvDocument,
    LetterDocument,
    LockDocument,
    MessageDocument,
    WorkDocument,
    required,
)
from perdure.providers.filesystem.history import History, HistoryLog
from perdure.providers.filesystem.readable import (
    optional_time_ms,
    optional_time_text,
    ranges,
    ranges_text,
    time_ms,
    time_text,
    version,
    version_text,
)
from perdure.providers.filesystem.rows import (
    ClaimRow,
    CustomStatusRow,
    ExecutionRow,
    HoldRow,
    InstanceRow,
    KvDeltaRow,
    KvStoreRow,
    LetterRow,
    LockRow,
    MessageRow,
    ProgressRow,
    TagRow,
    WorkRow,
)
from perdure.providers.records import KvEntry, OrchestratorMessage, WorkerMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.providers.filesystem.history import IdRanges
    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.tables import Tables


# --- instances


def instance_document(state: State, instance_id: str) -> InstanceDocument | None:
    """None if nothing of the instance is kept outside the queues."""
    tables, lookups = state.tables, state.lookups
    row, progress = tables.instances.get(instance_id), tables.progress.get(instance_id)
    custom, hold = tables.custom_statuses.get(instance_id), tables.holds.get(instance_id)
    lock = tables.locks.get(instance_id)
    executions = {
        *lookups.executions.get(instance_id, ()),
        *lookups.histories.get(instance_id, ()),
    }
    if row is None and hold is None and lock is None and not executions:
        return None
    hold = hold if hold is not None else HoldRow(instance_id=instance_id)
    status_value, status_text = embed(custom.value if custom is not None else None)
    return InstanceDocument(
        instance_id=instance_id,
        name=row.name if row is not None else None,
        version=row.version if row is not None else None,
        status=state.standing.status(instance_id),
        parent_instance_id=row.parent_instance_id if row is not None else None,
        execution_id=progress.execution_id if progress is not None else None,
        created_at=time_text(row.created_at_ms) if row is not None else None,
        updated_at=time_text(progress.updated_at_ms) if progress is not None else None,
        custom_status=status_value,
        custom_status_text=status_text,
        custom_status_version=custom.version if custom is not None else 0,
        suspended=hold.suspended,
        block=hold.block,
        not_before=optional_time_text(hold.not_before_ms),
        lock=_lock_document(lock),
        start=row.start if row is not None else None,
        executions=ranges_text(_ranges(executions)),
        kv_store={
            key: _kv_document(entry)
            for key, entry in sorted(lookups.kv_store.get(instance_id, {}).items())
        },
        kv_delta={
            key: None if entry is None else _kv_document(entry)
            for key, entry in sorted(lookups.kv_delta.get(instance_id, {}).items())
        },
    )


def _kv_document(entry: KvEntry) -> KvDocument:
    value, value_text = embed(entry.value)
    return KvDocument(value=value, value_text=value_text, updated_at=time_text(entry.updated_at_ms))


def _kv_entry(document: KvDocument) -> KvEntry:
    return KvEntry(
        value=required(extract(document.value, document.value_text)),
        updated_at_ms=time_ms(document.updated_at),
    )


def _lock_document(lock: LockRow | None) -> LockDocument | None:
    if lock is None:
        return None
    return LockDocument(
        lock_token=lock.lock_token,
        locked_until=time_text(lock.locked_until_ms),
        owner=lock.owner,
        is_kept=lock.is_kept,
    )


def _ranges(ids: Iterable[int]) -> IdRanges:
    ranges: list[tuple[int, int]] = []
    for each in sorted(ids):
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1] = (ranges[-1][0], each)
        else:
            ranges.append((each, each))
    return tuple(ranges)


def load_instance(tables: Tables, document: InstanceDocument) -> None:
    instance_id = document.instance_id
    if document.created_at is not None:
        row = InstanceRow(
            instance_id=instance_id,
            name=document.name,
            version=document.version,
            start=document.start,
            parent_instance_id=document.parent_instance_id,
            created_at_ms=time_ms(document.created_at),
        )
        tables.instances.set(instance_id, row)
    if document.execution_id is not None:
        progress = ProgressRow(
            instance_id=instance_id,
            execution_id=document.execution_id,
            updated_at_ms=optional_time_ms(document.updated_at) or 0,
        )
        tables.progress.set(instance_id, progress)
    if document.custom_status_version:
        custom = CustomStatusRow(
            instance_id=instance_id,
            value=extract(document.custom_status, document.custom_status_text),
            version=document.custom_status_version,
        )
        tables.custom_statuses.set(instance_id, custom)
    hold = HoldRow(
        instance_id=instance_id,
        suspended=document.suspended,
        block=document.block,
        not_before_ms=optional_time_ms(document.not_before),
    )
    if hold != HoldRow(instance_id=instance_id):
        tables.holds.set(instance_id, hold)
    _load_lock_and_state(tables, document)


def _load_lock_and_state(tables: Tables, document: InstanceDocument) -> None:
    instance_id, lock = document.instance_id, document.lock
    if lock is not None:
        row = LockRow(
            instance_id=instance_id,
            lock_token=lock.lock_token,
            locked_until_ms=time_ms(lock.locked_until),
            owner=lock.owner,
            is_kept=lock.is_kept,
        )
        tables.locks.set(instance_id, row)
    for key, value in document.kv_store.items():
        kept = KvStoreRow(instance_id=instance_id, key=key, entry=_kv_entry(value))
        tables.kv_store.set((instance_id, key), kept)
    for key, change in document.kv_delta.items():
        entry = None if change is None else _kv_entry(change)
        changed = KvDeltaRow(instance_id=instance_id, key=key, entry=entry)
        tables.kv_delta.set((instance_id, key), changed)


# --- executions


def execution_document(
    key: tuple[str, int], row: ExecutionRow | None, history: History | None
) -> ExecutionDocument:
    """Describes the history file as it is before the events that are still to be written."""
    output, output_text = embed(row.output if row is not None else None)
    return ExecutionDocument(
        instance_id=key[0],
        execution_id=key[1],
        status=row.status if row is not None else None,
        output=output,
        output_text=output_text,
        started_at=time_text(row.started_at_ms) if row is not None else None,
        completed_at=optional_time_text(row.completed_at_ms) if row is not None else None,
        framework_version=version_text(row.framework_version) if row is not None else None,
        events=ranges_text(history.ids) if history is not None else "",
        event_count=history.count if history is not None else 0,
        history_bytes=history.log.file_bytes if history is not None else 0,
        archived=history is not None and history.log.is_archived,
    )


def load_execution(tables: Tables, document: ExecutionDocument) -> None:
    key = (document.instance_id, document.execution_id)
    if document.status is not None:
        row = ExecutionRow(
            instance_id=document.instance_id,
            execution_id=document.execution_id,
            status=document.status,
            output=extract(document.output, document.output_text),
            started_at_ms=optional_time_ms(document.started_at) or 0,
            completed_at_ms=optional_time_ms(document.completed_at),
            framework_version=version(document.framework_version),
        )
        tables.executions.set(key, row)
    if document.event_count:
        log = HistoryLog(
            file_bytes=document.history_bytes,
            written=document.event_count,
            is_archived=document.archived,
        )
        tables.set_history(key, History(log, document.event_count, ranges(document.events)))


# --- queues


def message_document(row: MessageRow, tag: TagRow | None) -> MessageDocument:
    message = row.message
    body, body_text = embed(message.body)
    return MessageDocument(
        message_id=row.message_id,
        instance_id=message.instance_id,
        kind=message.kind,
        visible_at=time_text(row.visible_at_ms),
        enqueued_at=time_text(row.enqueued_at_ms),
        attempt_count=tag.attempt_count if tag is not None else 0,
        lock_token=tag.lock_token if tag is not None else None,
        start=message.start,
        timer=message.timer,
        asked_visible_at=optional_time_text(message.visible_at_ms),
        body=body,
        body_text=body_text,
    )


def load_message(tables: Tables, document: MessageDocument) -> None:
    row = MessageRow(
        message_id=document.message_id,
        message=_message(document),
        visible_at_ms=time_ms(document.visible_at),
        enqueued_at_ms=time_ms(document.enqueued_at),
    )
    tables.messages.set(row.message_id, row)
    if document.lock_token is not None or document.attempt_count:
        tag = TagRow(
            message_id=document.message_id,
            lock_token=document.lock_token,
            attempt_count=document.attempt_count,
        )
        tables.tags.set(tag.message_id, tag)


def _message(document: MessageDocument | LetterDocument) -> OrchestratorMessage:
    return OrchestratorMessage(
        instance_id=document.instance_id,
        kind=document.kind,
        body=required(extract(document.body, document.body_text)),
        visible_at_ms=optional_time_ms(document.asked_visible_at),
        start=document.start,
        timer=document.timer,
    )


def work_document(row: WorkRow, claim: ClaimRow) -> WorkDocument:
    message = row.message
    body, body_text = embed(message.body)
    heartbeat, heartbeat_text = embed(claim.heartbeat)
    return WorkDocument(
        message_id=row.message_id,
        identity=message.identity,
        name=message.name,
        visible_at=time_text(claim.visible_at_ms),
        enqueued_at=time_text(row.enqueued_at_ms),
        attempt_count=claim.attempt_count,
        session_id=message.session_id,
        tag=message.tag,
        lock_token=claim.lock_token,
        locked_until=time_text(claim.locked_until_ms) if claim.locked_until_ms else None,
        heartbeat=heartbeat,
        heartbeat_text=heartbeat_text,
        asked_visible_at=optional_time_text(message.visible_at_ms),
        body=body,
        body_text=body_text,
    )


def load_work(tables: Tables, document: WorkDocument) -> None:
    message = WorkerMessage(
        identity=document.identity,
        name=document.name,
        body=required(extract(document.body, document.body_text)),
        session_id=document.session_id,
        tag=document.tag,
        visible_at_ms=optional_time_ms(document.asked_visible_at),
    )
    row = WorkRow(
        message_id=document.message_id,
        message=message,
        enqueued_at_ms=time_ms(document.enqueued_at),
    )
    tables.work.set(row.message_id, row)
    claim = ClaimRow(
        message_id=document.message_id,
        visible_at_ms=time_ms(document.visible_at),
        lock_token=document.lock_token,
        locked_until_ms=optional_time_ms(document.locked_until) or 0,
        attempt_count=document.attempt_count,
        heartbeat=extract(document.heartbeat, document.heartbeat_text),
    )
    tables.claims.set(claim.message_id, claim)


def letter_document(row: LetterRow) -> LetterDocument:
    message = row.message
    body, body_text = embed(message.body)
    return LetterDocument(
        letter_id=row.letter_id,
        reason=row.reason,
        dead_since=time_text(row.dead_since_ms),
        instance_id=message.instance_id,
        kind=message.kind,
        start=message.start,
        timer=message.timer,
        asked_visible_at=optional_time_text(message.visible_at_ms),
        body=body,
        body_text=body_text,
    )


def load_letter(tables: Tables, document: LetterDocument) -> None:
    row = LetterRow(
        letter_id=document.letter_id,
        reason=document.reason,
        dead_since_ms=time_ms(document.dead_since),
        message=_message(document),
    )
    tables.letters.set(row.letter_id, row)
