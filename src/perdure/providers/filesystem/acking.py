"""Committing a turn: everything that it changes, inside one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.errors import InvalidValue
from perdure.providers import rules
from perdure.providers.filesystem import queues, turns
from perdure.providers.filesystem.rows import (
    CustomStatusRow,
    ExecutionRow,
    HoldRow,
    InstanceRow,
    KvDeltaRow,
    KvStoreRow,
    LockRow,
    ProgressRow,
)
from perdure.providers.validation import check_items

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.tables import Transaction
    from perdure.providers.records import (
        ExecutionMetadata,
        KvEntry,
        OrchestratorMessage,
        StartRouting,
        TurnCommit,
    )


def ack(state: State, tx: Transaction, lock_token: str, commit: TurnCommit) -> None:
    lock = turns.live_lock(state, tx, lock_token)
    instance_id = lock.instance_id
    _settle_work(state, tx, instance_id, commit)
    carried = state.lookups.tagged_with(lock_token)
    consumed = set(carried if commit.consumed is None else commit.consumed)
    first_start: StartRouting | None = None
    created_at_ms = tx.now_ms
    for message_id in carried:
        if message_id in consumed:
            row = state.tables.messages.rows[message_id]
            if first_start is None and row.message.start is not None:
                first_start, created_at_ms = row.message.start, row.enqueued_at_ms
            queues.remove_message(state, tx, message_id)
    _apply(state, tx, lock, commit, first_start, created_at_ms)


def start(
    state: State,
    tx: Transaction,
    message: OrchestratorMessage,
    commit: TurnCommit,
    lock_token: str,
    owner: str,
) -> bool:
    """Create the instance by its first turn; messages that came early stay free."""
    instance_id = message.instance_id
    if state.standing.exists(instance_id):
        return False
    if lock_token in state.lookups.locks:
        raise InvalidValue(f"the lock token {lock_token!r} is in use")
    turns.release(state, tx, instance_id)
    lock = LockRow(
        instance_id=instance_id, lock_token=lock_token, locked_until_ms=tx.now_ms, owner=owner
    )
    tx.put(state.tables.locks, lock)
    _settle_work(state, tx, instance_id, commit)
    _apply(state, tx, lock, commit, message.start, tx.now_ms)
    return True


def _settle_work(state: State, tx: Transaction, instance_id: str, commit: TurnCommit) -> None:
    for lock_token in commit.settled_work:
        message_id = queues.held_work(state, tx, lock_token)
        identity = state.tables.work.rows[message_id].message.identity
        if identity.instance_id != instance_id:
            raise InvalidValue(f"the settled work item {identity} is another instance's")
        queues.remove_work(state, tx, message_id)


def _apply(
    state: State,
    tx: Transaction,
    lock: LockRow,
    commit: TurnCommit,
    first_start: StartRouting | None,
    created_at_ms: int,
) -> None:
    instance_id, tables = lock.instance_id, state.tables
    check_items(commit, instance_id)
    _apply_instance(state, tx, instance_id, commit, first_start, created_at_ms)
    _apply_execution(state, tx, instance_id, commit)
    tx.append(instance_id, commit.execution_id, commit.history_delta)
    _apply_state(state, tx, instance_id, commit)
    for work in commit.worker_items:
        queues.add_work(state, tx, work)
    for identity in commit.cancelled_activities:
        for message_id in list(state.lookups.identities.get(identity, ())):
            queues.remove_work(state, tx, message_id)
    for message in commit.orchestrator_items:
        queues.add_message(state, tx, message)
    for timer in commit.cancelled_timers:
        key = (instance_id, timer.execution_id, timer.timer_id)
        for message_id in list(state.lookups.timers.get(key, ())):
            queues.remove_message(state, tx, message_id)
    hold = tables.holds.get(instance_id)
    if hold is not None:
        is_suspended = hold.suspended and not state.standing.status(instance_id).is_final
        turns.put_hold(state, tx, HoldRow(instance_id=instance_id, suspended=is_suspended))
    if commit.keep_lock_ms is None:
        turns.release(state, tx, instance_id)
    else:
        until_ms = tx.now_ms + commit.keep_lock_ms
        kept = msgspec.structs.replace(lock, locked_until_ms=until_ms, is_kept=True)
        tx.put(tables.locks, kept)


def _apply_instance(
    state: State,
    tx: Transaction,
    instance_id: str,
    commit: TurnCommit,
    first_start: StartRouting | None,
    created_at_ms: int,
) -> None:
    tables, metadata = state.tables, commit.metadata
    old = tables.instances.get(instance_id)
    row = old
    if row is None:
        row = InstanceRow(instance_id=instance_id, start=first_start, created_at_ms=created_at_ms)
    if metadata.name is not None:
        parent_id = metadata.parent_instance_id if row.name is None else row.parent_instance_id
        row = msgspec.structs.replace(
            row, name=metadata.name, version=metadata.version, parent_instance_id=parent_id
        )
    if row != old:
        tx.put(tables.instances, row)
    progress = tables.progress.get(instance_id)
    current = progress.execution_id if progress is not None else 0
    tx.put(
        tables.progress,
        ProgressRow(
            instance_id=instance_id,
            execution_id=max(current, commit.execution_id),
            updated_at_ms=tx.now_ms,
        ),
    )


def _apply_execution(state: State, tx: Transaction, instance_id: str, commit: TurnCommit) -> None:
    table = state.tables.executions
    old = table.get((instance_id, commit.execution_id))
    row = old
    if row is None:
        row = ExecutionRow(
            instance_id=instance_id, execution_id=commit.execution_id, started_at_ms=tx.now_ms
        )
    row = _with_metadata(row, commit.metadata, tx.now_ms)
    if row != old:
        tx.put(table, row)


def _with_metadata(row: ExecutionRow, metadata: ExecutionMetadata, now_ms: int) -> ExecutionRow:
    if metadata.framework_version is not None:
        row = msgspec.structs.replace(row, framework_version=metadata.framework_version)
    if metadata.output is not None:
        row = msgspec.structs.replace(row, output=metadata.output)
    if metadata.status is not None:
        completed_at_ms = now_ms if metadata.status.ends_execution else None
        row = msgspec.structs.replace(row, status=metadata.status, completed_at_ms=completed_at_ms)
    return row


def _apply_state(state: State, tx: Transaction, instance_id: str, commit: TurnCommit) -> None:
    tables = state.tables
    if commit.custom_status is not None:
        old = tables.custom_statuses.get(instance_id)
        version = (old.version if old is not None else 0) + 1
        tx.put(
            tables.custom_statuses,
            CustomStatusRow(
                instance_id=instance_id, value=commit.custom_status.value, version=version
            ),
        )
    kv_store = state.lookups.kv_store.get(instance_id, {})
    old_delta = state.lookups.kv_delta.get(instance_id, {})
    delta = dict(old_delta)
    rules.apply_kv_changes(kv_store, delta, commit.kv_changes)
    status = commit.metadata.status
    if status is not None and status.ends_execution:
        _merge_delta(state, tx, instance_id, delta)
        return
    for key, entry in delta.items():
        if key not in old_delta or old_delta[key] is not entry:
            tx.put(tables.kv_delta, KvDeltaRow(instance_id=instance_id, key=key, entry=entry))


def _merge_delta(
    state: State, tx: Transaction, instance_id: str, delta: Mapping[str, KvEntry | None]
) -> None:
    """The execution ends: its changes become the state that the next one starts from."""
    tables = state.tables
    for key in list(state.lookups.kv_delta.get(instance_id, ())):
        tx.drop(tables.kv_delta, (instance_id, key))
    for key, entry in delta.items():
        if entry is None:
            tx.drop(tables.kv_store, (instance_id, key))
        else:
            tx.put(tables.kv_store, KvStoreRow(instance_id=instance_id, key=key, entry=entry))
