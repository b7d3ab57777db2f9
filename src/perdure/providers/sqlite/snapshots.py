"""Export of one whole instance, and its import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import ExecutionSnapshot, InstanceSnapshot, QueuedWork
from perdure.providers.sqlite import (
    instances,
    listing,
    messages,
    readiness,
    reading,
    statements,
    work,
)
from perdure.providers.sqlite.instances import (
    InstanceRow,
    event_rows,
    format_version,
    parse_version,
)

if TYPE_CHECKING:
    from perdure.providers.sqlite.transaction import Snapshot, Transaction

_INSTANCE: Final = f"""
SELECT i.instance_key, coalesce(l.touched_at, i.updated_at), {InstanceRow.columns()}
FROM instances AS i LEFT JOIN instance_locks AS l ON l.instance_id = i.instance_id
WHERE i.instance_id = ?
"""  # noqa: S608 - of constants

_COPIED: Final = {
    field: column
    for field in InstanceSnapshot.__struct_fields__
    if (column := field.removesuffix("_ms")) in InstanceRow._fields
}
"""Fields of a snapshot that are columns of ``instances``, with their columns."""

_HOLDS: Final = """
SELECT suspended, not_before, block, pending_since FROM instance_locks WHERE instance_id = ?
"""

_NO_HOLDS: Final[Any] = (0, None, None, None)

_EXECUTIONS: Final = """
SELECT execution_id, status, output, started_at, completed_at, framework_version
FROM executions WHERE instance_key = ?1
UNION ALL
SELECT DISTINCT execution_id, 'Running', NULL, 0, NULL, NULL
FROM history WHERE instance_key = ?1 AND execution_id NOT IN
    (SELECT execution_id FROM executions WHERE instance_key = ?1)
ORDER BY execution_id
"""


def export(snapshot: Snapshot, instance_id: str) -> InstanceSnapshot:
    row: Any = snapshot.row(_INSTANCE, (instance_id,))
    holds: Any = snapshot.row(_HOLDS, (instance_id,))
    queued = reading.list_messages(snapshot, instance_id, -1)
    items = reading.list_work(snapshot, instance_id, -1)
    if row is None and not queued and not items:
        raise rules.no_instance(instance_id)
    suspended, not_before, block, pending_since = holds or _NO_HOLDS
    key, updated_at, *columns = row or (None, 0, *instances.NO_INSTANCE)
    instance = InstanceRow._make(columns)._replace(updated_at=updated_at)
    if instance.name is None:
        name, version, parent = listing.identity(snapshot, instance_id)
        instance = instance._replace(parent_instance_id=parent)
        if key is not None:
            instance = instance._replace(name=name, version=version)
    if not instance.execution_id:
        begun = pending_since or 0
        last = snapshot.row(instances.LAST_HISTORY_EXECUTION, (key,))[0]
        instance = instance._replace(created_at=begun, updated_at=begun, execution_id=last or 1)
    return InstanceSnapshot(
        **{field: getattr(instance, column) for field, column in _COPIED.items()},
        instance_id=instance_id,
        suspended=bool(suspended),
        block=listing.decode_block(block),
        not_before_ms=not_before,
        executions=_executions(snapshot, instance_id, key),
        kv_store={} if key is None else reading.kv_store(snapshot, key),
        kv_delta={} if key is None else reading.kv_delta(snapshot, key),
        messages=tuple(msgspec.structs.replace(each, locked=False) for each in queued),
        work=tuple(msgspec.structs.replace(each, locked_until_ms=None) for each in items),
    )


def restore(tx: Transaction, snapshot: InstanceSnapshot, replace: bool) -> None:
    instance_id = snapshot.instance_id
    if instances.have_anything(tx, (instance_id,)):
        if not replace:
            raise rules.already_exists(instance_id)
        instances.delete_instances(tx, (instance_id,))
    key: int | None = None
    if snapshot.executions:
        key = _restore_turns(tx, snapshot)
    block = snapshot.block
    if snapshot.suspended or block is not None or snapshot.not_before_ms is not None:
        tx.write(statements.INSERT_BARE_LOCK, (instance_id, key))
        text = None if block is None else msgspec.json.encode(block).decode()
        holds = (int(snapshot.suspended), snapshot.not_before_ms, text, instance_id)
        tx.write(statements.SET_HOLDS, holds)
    queued = [
        messages.queue_row(
            tx.new_message_id(),
            each.message,
            each.visible_at_ms,
            each.enqueued_at_ms,
            each.attempt_count,
        )
        for each in snapshot.messages
    ]
    statements.INSERT_MESSAGE.execute(tx, queued)
    work.INSERT_WORK.execute(tx, [_work_row(tx, each) for each in snapshot.work])
    readiness.refresh(tx, instance_id)
    tx.work_changed = True
    tx.changed_instances.append(instance_id)


def _executions(
    snapshot: Snapshot, instance_id: str, key: int | None
) -> tuple[ExecutionSnapshot, ...]:
    if key is None:
        return ()
    return tuple(
        ExecutionSnapshot(
            execution_id=execution_id,
            status=Status(status),
            output=output,
            started_at_ms=started_at,
            completed_at_ms=completed_at,
            framework_version=parse_version(pinned),
            history=tuple(reading.read_page(snapshot, instance_id, execution_id)),
        )
        for execution_id, status, output, started_at, completed_at, pinned in snapshot.rows(
            _EXECUTIONS, (key,)
        )
    )


def _restore_turns(tx: Transaction, snapshot: InstanceSnapshot) -> int:
    current = next(
        (each for each in snapshot.executions if each.execution_id == snapshot.execution_id), None
    )
    shown = rules.shown_status(
        Status.RUNNING if current is None else current.status,
        suspended=snapshot.suspended,
        blocked=snapshot.block is not None,
    )
    pinned = None if current is None else format_version(current.framework_version)
    row = InstanceRow(
        **{column: getattr(snapshot, field) for field, column in _COPIED.items()},
        is_named=1,
        status=shown,
        framework_version=pinned,
        completed_at=None if current is None else current.completed_at_ms,
    )
    key = instances.next_key(tx)
    instances.INSERT_INSTANCE.execute(tx, [(key, snapshot.instance_id, *row)])
    for each in snapshot.executions:
        execution = (
            key, each.execution_id, each.status, each.output,
            format_version(each.framework_version), each.completed_at_ms, each.started_at_ms,
        )  # fmt: skip
        instances.PUT_EXECUTION.execute(tx, [execution])
        events = event_rows(tx, key, each.execution_id, each.history)
        instances.INSERT_EVENT.execute(tx, events)
    for name, entry in snapshot.kv_store.items():
        tx.write(instances.PUT_KV_STORE, (key, name, entry.value, entry.updated_at_ms))
    for name, change in snapshot.kv_delta.items():
        value, updated_at = (None, None) if change is None else (change.value, change.updated_at_ms)
        tx.write(instances.PUT_KV_DELTA, (key, name, value, updated_at))
    return key


def _work_row(tx: Transaction, entry: QueuedWork) -> tuple[Any, ...]:
    message, identity = entry.message, entry.message.identity
    is_visible = rules.is_visible(entry.visible_at_ms, tx.now)
    state, wake_at = (
        (readiness.READY, None) if is_visible else (readiness.WAITING, entry.visible_at_ms)
    )
    return (
        identity.instance_id, identity.execution_id, identity.activity_id,
        message.name, message.body, message.session_id, message.tag, entry.visible_at_ms,
        entry.enqueued_at_ms, entry.attempt_count, state, wake_at, None, None, None,
        entry.heartbeat, message.visible_at_ms,
    )  # fmt: skip
