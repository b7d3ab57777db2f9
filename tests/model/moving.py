"""One instance out of an in-memory store and into it, whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from model import rules, validation
from model.state import Execution, Message, WorkItem
from model.turns import records_of
from perdure.errors import AlreadyExists
from perdure.model.status import Status
from perdure.providers.records import (
    ExecutionSnapshot,
    InstanceSnapshot,
    QueuedMessage,
    QueuedWork,
)

if TYPE_CHECKING:
    from model.state import Instance
    from model.store import ModelStore


def messages_of(instance: Instance, now_ms: int) -> list[QueuedMessage]:
    """In queue order."""
    return [
        QueuedMessage(
            message_id=message_id,
            message=entry.message,
            visible_at_ms=entry.visible_at_ms,
            enqueued_at_ms=entry.enqueued_at_ms,
            attempt_count=entry.attempt_count,
            locked=instance.carries(message_id, now_ms),
        )
        for message_id, entry in sorted(instance.messages.items())
    ]


def work_of(instance: Instance, now_ms: int) -> list[QueuedWork]:
    """In queue order; without claims, which would show live tokens."""
    return [
        QueuedWork(
            message_id=message_id,
            message=msgspec.structs.replace(item.message, claim=None),
            visible_at_ms=item.visible_at_ms,
            enqueued_at_ms=item.enqueued_at_ms,
            attempt_count=item.attempt_count,
            locked_until_ms=(
                item.locked_until_ms if rules.is_live(item.locked_until_ms, now_ms) else None
            ),
            heartbeat=item.heartbeat,
        )
        for message_id, item in sorted(instance.work.items())
    ]


def snapshot(instance: Instance) -> InstanceSnapshot:
    who = instance.who()
    created_at_ms, _ = instance.created_key
    return InstanceSnapshot(
        instance_id=instance.instance_id,
        name=who.name if instance.is_known else None,
        version=who.version if instance.is_known else None,
        execution_id=instance.shown_execution_id,
        created_at_ms=created_at_ms,
        updated_at_ms=instance.updated_at_ms if instance.has_turns else created_at_ms,
        parent_instance_id=who.parent_instance_id,
        custom_status=instance.custom_status,
        custom_status_version=instance.custom_status_version,
        suspended=instance.suspended,
        block=instance.block,
        not_before_ms=instance.not_before_ms,
        executions=tuple(
            _execution(instance, execution_id)
            for execution_id in sorted({*instance.executions, *instance.histories})
        ),
        kv_store=dict(sorted(instance.kv_store.items())),
        kv_delta=dict(sorted(instance.kv_delta.items())),
        messages=tuple(
            msgspec.structs.replace(message, locked=False) for message in messages_of(instance, 0)
        ),
        work=tuple(
            msgspec.structs.replace(item, locked_until_ms=None) for item in work_of(instance, 0)
        ),
    )


def restore(store: ModelStore, snapshot: InstanceSnapshot, *, replace: bool) -> None:
    validation.check_snapshot(snapshot)
    found = store.instances.get(snapshot.instance_id)
    if found is not None:
        if not replace:
            raise AlreadyExists(f"{snapshot.instance_id!r} is already in this store")
        store.delete(found)
    instance = store.instance(snapshot.instance_id)
    now_ms = store.clock.now_ms()
    if snapshot.executions:
        _restore_turns(instance, snapshot)
    instance.suspended = snapshot.suspended
    instance.block = snapshot.block
    instance.not_before_ms = snapshot.not_before_ms
    for message in snapshot.messages:
        entry = Message(
            store.next_id(),
            message.message,
            message.visible_at_ms,
            message.enqueued_at_ms,
            message.attempt_count,
        )
        store.insert_message(entry, now_ms)
    for work in snapshot.work:
        item = WorkItem(
            store.next_id(),
            work.message,
            work.visible_at_ms,
            work.enqueued_at_ms,
            work.attempt_count,
            heartbeat=work.heartbeat,
        )
        store.work.insert(item, now_ms)
        store.insert_work(item)
    store.settle(instance, now_ms)


def _execution(instance: Instance, execution_id: int) -> ExecutionSnapshot:
    execution = instance.executions.get(execution_id) or Execution(Status.RUNNING, 0)
    return ExecutionSnapshot(
        execution_id=execution_id,
        status=execution.status,
        output=execution.output,
        started_at_ms=execution.started_at_ms,
        completed_at_ms=execution.completed_at_ms,
        framework_version=execution.framework_version,
        history=tuple(records_of(instance, execution_id)),
    )


def _restore_turns(instance: Instance, snapshot: InstanceSnapshot) -> None:
    instance.name = snapshot.name
    instance.version = snapshot.version
    instance.parent_instance_id = snapshot.parent_instance_id
    instance.created_at_ms = snapshot.created_at_ms
    instance.updated_at_ms = snapshot.updated_at_ms
    instance.execution_id = snapshot.execution_id
    instance.custom_status = snapshot.custom_status
    instance.custom_status_version = snapshot.custom_status_version
    instance.kv_store = dict(snapshot.kv_store)
    instance.kv_delta = dict(snapshot.kv_delta)
    for execution in snapshot.executions:
        instance.executions[execution.execution_id] = Execution(
            execution.status,
            execution.started_at_ms,
            execution.output,
            execution.completed_at_ms,
            execution.framework_version,
        )
        if execution.history:
            instance.histories[execution.execution_id] = {
                record.event_id: record.data for record in execution.history
            }
