"""One instance out of the state and into it, whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.errors import AlreadyExists, NotFound
from perdure.providers import rules
from perdure.providers.filesystem import deletion, turns
from perdure.providers.filesystem.lookups import NOTHING
from perdure.providers.filesystem.rows import (
    ClaimRow,
    CustomStatusRow,
    ExecutionRow,
    HoldRow,
    InstanceRow,
    KvDeltaRow,
    KvStoreRow,
    MessageRow,
    ProgressRow,
    TagRow,
    WorkRow,
)
from perdure.providers.records import (
    ExecutionSnapshot,
    InstanceSnapshot,
    QueuedMessage,
    QueuedWork,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.providers.filesystem.history_files import HistoryExcerpt
    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.store import OpenStore
    from perdure.providers.filesystem.tables import Transaction
    from perdure.providers.records import HistoryRecord


def queued_messages(state: State, instance_id: str, now_ms: int | None) -> list[QueuedMessage]:
    """In queue order; without a time as if nothing was locked."""
    lock = state.tables.locks.get(instance_id)
    is_live = lock is not None and now_ms is not None and lock.locked_until_ms > now_ms
    carried = state.lookups.tagged.get(lock.lock_token, NOTHING) if lock and is_live else NOTHING
    found: list[QueuedMessage] = []
    for message_id in state.lookups.messages_of(instance_id):
        row = state.tables.messages.rows[message_id]
        tag = state.tables.tags.get(message_id)
        found.append(
            QueuedMessage(
                message_id=message_id,
                message=row.message,
                visible_at_ms=row.visible_at_ms,
                enqueued_at_ms=row.enqueued_at_ms,
                attempt_count=tag.attempt_count if tag is not None else 0,
                locked=message_id in carried,
            )
        )
    return found


def queued_work(state: State, instance_id: str, now_ms: int | None) -> list[QueuedWork]:
    """In queue order; without a time as if nothing was locked."""
    found: list[QueuedWork] = []
    for message_id in state.lookups.work_of(instance_id):
        row = state.tables.work.rows[message_id]
        claim = state.tables.claims.rows[message_id]
        is_live = now_ms is not None and rules.is_live(claim.locked_until_ms, now_ms)
        found.append(
            QueuedWork(
                message_id=message_id,
                message=row.message,
                visible_at_ms=claim.visible_at_ms,
                enqueued_at_ms=row.enqueued_at_ms,
                attempt_count=claim.attempt_count,
                locked_until_ms=claim.locked_until_ms if is_live else None,
                heartbeat=claim.heartbeat,
            )
        )
    return found


def execution_ids(state: State, instance_id: str) -> list[int]:
    return sorted(
        {
            *state.lookups.executions.get(instance_id, ()),
            *state.lookups.histories.get(instance_id, ()),
        }
    )


async def export(store: OpenStore, verb: str, instance_id: str) -> InstanceSnapshot:
    """A consistent picture: repeated if the instance changed while its history was read."""
    state = store.state
    while True:
        picture, excerpts = await store.look(verb, lambda: _picture(store, instance_id))
        histories = {
            excerpt.execution_id: tuple(await store.read_history(excerpt)) for excerpt in excerpts
        }
        if picture == await store.look(verb, lambda: _picture(store, instance_id)[0]):
            return take(state, instance_id, histories)


def _picture(store: OpenStore, instance_id: str) -> tuple[InstanceSnapshot, list[HistoryExcerpt]]:
    state = store.state
    if not state.standing.is_there(instance_id):
        raise NotFound(f"there is no instance {instance_id!r}")
    excerpts = [
        excerpt
        for execution_id in execution_ids(state, instance_id)
        if (excerpt := store.excerpt(instance_id, execution_id)) is not None
    ]
    return take(state, instance_id, {}), excerpts


def take(
    state: State, instance_id: str, histories: Mapping[int, tuple[HistoryRecord, ...]]
) -> InstanceSnapshot:
    standing, lookups = state.standing, state.lookups
    info = standing.info(instance_id)
    is_known = standing.is_known(instance_id)
    hold = turns.hold_of(state, instance_id)
    return InstanceSnapshot(
        instance_id=instance_id,
        name=info.name if is_known else None,
        version=info.version if is_known else None,
        execution_id=info.execution_id,
        created_at_ms=info.created_at_ms,
        updated_at_ms=info.updated_at_ms,
        parent_instance_id=info.parent_instance_id,
        custom_status=info.custom_status,
        custom_status_version=info.custom_status_version,
        suspended=hold.suspended,
        block=hold.block,
        not_before_ms=hold.not_before_ms,
        executions=tuple(
            _execution(state, instance_id, execution_id, histories.get(execution_id, ()))
            for execution_id in execution_ids(state, instance_id)
        ),
        kv_store=dict(sorted(lookups.kv_store.get(instance_id, {}).items())),
        kv_delta=dict(sorted(lookups.kv_delta.get(instance_id, {}).items())),
        messages=tuple(queued_messages(state, instance_id, None)),
        work=tuple(queued_work(state, instance_id, None)),
    )


def _execution(
    state: State, instance_id: str, execution_id: int, history: tuple[HistoryRecord, ...]
) -> ExecutionSnapshot:
    row = state.tables.executions.get((instance_id, execution_id))
    if row is None:
        row = ExecutionRow(instance_id=instance_id, execution_id=execution_id, started_at_ms=0)
    return ExecutionSnapshot(
        execution_id=execution_id,
        status=row.status,
        output=row.output,
        started_at_ms=row.started_at_ms,
        completed_at_ms=row.completed_at_ms,
        framework_version=row.framework_version,
        history=history,
    )


# --- into the state


def restore(state: State, tx: Transaction, snapshot: InstanceSnapshot, *, replace: bool) -> None:
    instance_id = snapshot.instance_id
    if state.standing.is_there(instance_id):
        if not replace:
            raise AlreadyExists(f"{instance_id!r} is already in this store")
        deletion.delete(state, tx, instance_id)
    if snapshot.executions:
        _restore_turns(state, tx, snapshot)
    hold = HoldRow(
        instance_id=instance_id,
        suspended=snapshot.suspended,
        block=snapshot.block,
        not_before_ms=snapshot.not_before_ms,
    )
    turns.put_hold(state, tx, hold)
    for message in snapshot.messages:
        _restore_message(state, tx, message)
    for work in snapshot.work:
        _restore_work(state, tx, work)


def _restore_turns(state: State, tx: Transaction, snapshot: InstanceSnapshot) -> None:
    tables, instance_id = state.tables, snapshot.instance_id
    row = InstanceRow(
        instance_id=instance_id,
        name=snapshot.name,
        version=snapshot.version,
        parent_instance_id=snapshot.parent_instance_id,
        created_at_ms=snapshot.created_at_ms,
    )
    tx.put(tables.instances, row)
    progress = ProgressRow(
        instance_id=instance_id,
        execution_id=snapshot.execution_id,
        updated_at_ms=snapshot.updated_at_ms,
    )
    tx.put(tables.progress, progress)
    if snapshot.custom_status_version:
        custom = CustomStatusRow(
            instance_id=instance_id,
            value=snapshot.custom_status,
            version=snapshot.custom_status_version,
        )
        tx.put(tables.custom_statuses, custom)
    for execution in snapshot.executions:
        execution_row = ExecutionRow(
            instance_id=instance_id,
            execution_id=execution.execution_id,
            status=execution.status,
            output=execution.output,
            started_at_ms=execution.started_at_ms,
            completed_at_ms=execution.completed_at_ms,
            framework_version=execution.framework_version,
        )
        tx.put(tables.executions, execution_row)
        tx.append(instance_id, execution.execution_id, execution.history)
    for key, entry in snapshot.kv_store.items():
        tx.put(tables.kv_store, KvStoreRow(instance_id=instance_id, key=key, entry=entry))
    for key, change in snapshot.kv_delta.items():
        tx.put(tables.kv_delta, KvDeltaRow(instance_id=instance_id, key=key, entry=change))


def _restore_message(state: State, tx: Transaction, message: QueuedMessage) -> None:
    message_id = tx.next_message_id()
    row = MessageRow(
        message_id=message_id,
        message=message.message,
        visible_at_ms=message.visible_at_ms,
        enqueued_at_ms=message.enqueued_at_ms,
    )
    tx.put(state.tables.messages, row)
    if message.attempt_count:
        tag = TagRow(message_id=message_id, attempt_count=message.attempt_count)
        tx.put(state.tables.tags, tag)


def _restore_work(state: State, tx: Transaction, work: QueuedWork) -> None:
    message_id = tx.next_message_id()
    row = WorkRow(
        message_id=message_id,
        message=msgspec.structs.replace(work.message, claim=None),
        enqueued_at_ms=work.enqueued_at_ms,
    )
    tx.put(state.tables.work, row)
    claim = ClaimRow(
        message_id=message_id,
        visible_at_ms=work.visible_at_ms,
        attempt_count=work.attempt_count,
        heartbeat=work.heartbeat,
    )
    tx.put(state.tables.claims, claim)
