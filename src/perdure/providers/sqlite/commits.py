"""Applying what one turn changes, inside a transaction of the writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import apsw

from perdure.errors import DuplicateEvent, InvalidValue
from perdure.model.status import Status
from perdure.providers._shared import rules
from perdure.providers.items import KvClear, KvSet
from perdure.providers.sqlite import locks, orchestrator_queue, queries, work_queries, worker_queue
from perdure.providers.sqlite.many_rows import as_list
from perdure.providers.sqlite.tokens import is_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.items import (
        HistoryRecord,
        OrchestratorMessage,
        TurnCommit,
        Version,
    )
    from perdure.providers.sqlite.transaction import Transaction


NEW_EXECUTION: Final = (Status.RUNNING, None, None, None)
"""Status, output, pinned version and end, before its first turn."""


def apply_commit(tx: Transaction, lock_token: str, lock: Any, commit: TurnCommit) -> None:
    """Commit a turn under a live lock, given as its row."""
    operation = "ack_orchestration_item"
    instance_id, key, old_until, kept, carried_until, *holds = lock
    suspended, not_before, block, name, version, pending_since, due_at, running = holds
    tx.changed_instances.append(instance_id)
    _settle_work(tx, operation, instance_id, commit.settled_work)
    start = None
    if key is None or pending_since is not None:
        carries_all = commit.consumed is None and carried_until is not None
        if name is not None and carries_all and commit.metadata.name is not None:
            # The only start there is, and the turn itself says the rest.
            start = (name, version, None, pending_since)
        else:
            carried = (instance_id, carried_until, lock_token)
            start = _carried_start(tx, carried, commit.consumed)
    if commit.consumed:
        tx.execute_many(queries.DELETE_CONSUMED, [(each, lock_token) for each in commit.consumed])
    elif commit.consumed is None and carried_until is not None:
        tx.execute(queries.DELETE_CARRIED, (instance_id, carried_until, lock_token))
    is_plain_turn = running == commit.execution_id and is_plain(commit)
    if not is_plain_turn:
        key, name, version = _write_instance(
            tx, instance_id, key, start, commit, suspended=bool(suspended)
        )
    assert key is not None
    if suspended and Status(tx.row(queries.CURRENT_STATUS, (key,))[0]).is_final:
        suspended = 0
        tx.execute(queries.SET_HOLDS, (suspended, not_before, block, instance_id))
    _append(tx, operation, instance_id, key, commit.execution_id, commit.history_delta)
    _write_kv(tx, key, commit)
    _send(tx, commit)
    if commit.cancelled_timers:
        _cancel_timers(tx, instance_id, commit)
    locked_until = tx.now + (commit.keep_lock_ms or 0)
    is_held_back = not_before is not None or block is not None
    is_extended = commit.keep_lock_ms is not None and locked_until >= old_until
    if is_plain_turn and kept and is_extended and not is_held_back:
        # wake_at stays: early is allowed, and the index is left alone.
        tx.execute(queries.EXTEND_KEPT_LOCK, (locked_until, tx.now, instance_id))
    else:
        if is_plain_turn:
            tx.execute(queries.TOUCH_INSTANCE, (tx.now, key))
        if commit.keep_lock_ms is None:
            _release(tx, instance_id, key, name, version, suspended=bool(suspended))
            return
        tx.execute(queries.KEEP_LOCK, (locked_until, key, name, version, instance_id))
        # Late arrivals can be handed to the keeper from now on; a shorter lease ends sooner than
        # whoever waits for it had thought.
        tx.turns_changed |= due_at is not None or locked_until < old_until
    if commit.cancelled_timers:
        first = tx.row(queries.FIRST_FREE_MESSAGE, (instance_id, lock_token)) or (None, None)
        tx.execute(queries.SET_DUE, (*first, instance_id))


def start_instance(
    tx: Transaction, start: OrchestratorMessage, commit: TurnCommit, token: str, owner: str
) -> bool:
    """Create an instance by its first turn; messages that came early stay free."""
    operation = "start_orchestration_item"
    instance_id = start.instance_id
    key, execution_id, pending_since, is_placed = tx.row(queries.STANDING, (instance_id,))
    if execution_id or pending_since is not None:
        return False
    tx.changed_instances.append(instance_id)
    _settle_work(tx, operation, instance_id, commit.settled_work)
    routing = start.start
    assert routing is not None
    row = (routing.name, routing.version, routing.parent_instance_id, tx.now)
    key, name, version = _write_instance(tx, instance_id, key, row, commit, suspended=False)
    _append(tx, operation, instance_id, key, commit.execution_id, commit.history_delta)
    _write_kv(tx, key, commit)
    if is_placed:
        # Of an early message: what held it back ends with the first turn. Made anew below.
        tx.execute(queries.DELETE_LOCK, (instance_id,))
    if commit.keep_lock_ms is not None:
        locked_until = tx.now + commit.keep_lock_ms
        try:
            queries.INSERT_KEPT_LOCK.execute(
                tx, [kept_lock_row(instance_id, key, name, version, locked_until, token, owner)]
            )
        except apsw.ConstraintError as error:
            raise InvalidValue(f"the lock token {token!r} is in use") from error
    _send(tx, commit)
    if commit.cancelled_timers:
        _cancel_timers(tx, instance_id, commit)
    if is_placed or commit.cancelled_timers:
        locks.refresh(tx, instance_id)
    return True


def append(
    tx: Transaction, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
) -> None:
    """For tools: events as given, without a turn."""
    found = tx.row(queries.INSTANCE_BY_ID, (instance_id,))
    if found is not None:
        key = found[0]
    elif records:
        values = (None, instance_id, 0, *(None,) * 3, 0, Status.PENDING, None, None, 0, 0, 0, None)
        queries.INSERT_INSTANCE.execute(tx, [values])
        key = tx.connection.last_insert_rowid()
    else:
        return
    _append(tx, "append_with_execution", instance_id, key, execution_id, records)
    if found is None and tx.row(queries.PLACE, (instance_id,)) is not None:
        locks.refresh(tx, instance_id)
    tx.changed_instances.append(instance_id)


# --- the instance and its executions


def kept_lock_row(
    instance_id: str,
    key: int,
    name: str | None,
    version: str | None,
    locked_until: int,
    token: str,
    owner: str,
) -> tuple[Any, ...]:
    return (
        instance_id, key, name, version, locks.WAITING, locked_until, token, locked_until,
        owner, 1,
    )  # fmt: skip


def is_plain(commit: TurnCommit) -> bool:
    """Whether the turn leaves everything but the time of the instance's row as it was."""
    metadata = commit.metadata
    return (
        commit.custom_status is None
        and metadata.name is None
        and metadata.output is None
        and metadata.framework_version is None
        and (metadata.status is None or metadata.status is Status.RUNNING)
    )


def _write_instance(
    tx: Transaction,
    instance_id: str,
    key: int | None,
    start: Any,
    commit: TurnCommit,
    *,
    suspended: bool,
) -> tuple[int, str | None, str | None]:
    """Create or update the rows of the instance and of the execution; key, name and version."""
    if key is None:
        execution = next_execution(tx.now, NEW_EXECUTION, commit)
        instance = next_instance(tx.now, None, start, commit, execution, suspended=suspended)
        queries.INSERT_INSTANCE.execute(tx, [(None, instance_id, *instance)])
        key = tx.connection.last_insert_rowid()
    else:
        found = tx.row(queries.INSTANCE_ROW, (key, commit.execution_id))
        row, before = found[:11], found[11:]
        execution = shown = next_execution(tx.now, before, commit)
        if row[4] > commit.execution_id:
            shown = tx.row(queries.EXECUTION, (key, row[4]))
        instance = next_instance(tx.now, row, start, commit, shown, suspended=suspended)
        if instance[:5] == row[:5] and instance[6:10] == row[6:10]:
            tx.change(queries.CONCLUDE_INSTANCE, (instance[5], *instance[10:], key))
        else:
            tx.change(queries.UPDATE_INSTANCE, (*instance, key))
    queries.PUT_EXECUTION.execute(tx, [(key, commit.execution_id, *execution, tx.now)])
    return key, instance[1], instance[2]


def next_instance(
    now: int, row: Any, start: Any, commit: TurnCommit, execution: Any, *, suspended: bool
) -> tuple[Any, ...]:
    """The columns of an instance after this turn, without key and id.

    ``row`` is what it was, None if it is new; ``execution`` is its latest one after the turn.
    """
    metadata = commit.metadata
    if row is None or row[4] == 0:
        name, version, parent, created_at = start or (None, None, None, now)
        row = (0, name, version, parent, 0, Status.PENDING, None, None, 0, created_at, None)
    is_named, name, version, parent, current, *_, custom_status, custom_version, created_at, _ = row
    if metadata.name is not None:
        if not is_named:
            parent = metadata.parent_instance_id
        is_named, name, version = 1, metadata.name, metadata.version
    if commit.custom_status is not None:
        custom_status, custom_version = commit.custom_status.value, custom_version + 1
    status, _, pinned, completed_at = execution
    shown = rules.shown_status(Status(status), suspended=suspended, blocked=False)
    return (
        is_named, name, version, parent, max(current, commit.execution_id), shown, pinned,
        custom_status, custom_version, created_at, now, completed_at,
    )  # fmt: skip


def next_execution(
    now: int, row: Any, commit: TurnCommit
) -> tuple[str, str | None, str | None, int | None]:
    """Status, output, pinned version and end of an execution after this turn."""
    metadata = commit.metadata
    status, output, pinned, completed_at = row
    if metadata.framework_version is not None:
        pinned = format_version(metadata.framework_version)
    if metadata.output is not None:
        output = metadata.output
    if metadata.status is not None:
        status = metadata.status
        completed_at = now if status.ends_execution else None
    return status, output, pinned, completed_at


def _append(
    tx: Transaction,
    operation: str,
    instance_id: str,
    key: int,
    execution_id: int,
    records: Sequence[HistoryRecord],
) -> None:
    try:
        queries.INSERT_EVENT.execute(
            tx, [(key, execution_id, record.event_id, record.data) for record in records]
        )
    except apsw.ConstraintError as error:
        raise DuplicateEvent(
            operation,
            f"execution {execution_id} of {instance_id!r} already has one of the events "
            f"{', '.join(str(record.event_id) for record in records[:20])}",
        ) from error


def format_version(version: Version) -> str:
    return f"{version[0]}.{version[1]}.{version[2]}"


# --- messages and work


def _carried_start(
    tx: Transaction, carried: tuple[str, int | None, str], consumed: tuple[int, ...] | None
) -> Any:
    """Name, version, parent and enqueue time of the first start that this turn consumes."""
    for message_id, *start in tx.rows(queries.CARRIED_STARTS, carried):
        if consumed is None or message_id in consumed:
            return tuple(start)
    return None


def _settle_work(
    tx: Transaction, operation: str, instance_id: str, tokens: tuple[str, ...]
) -> None:
    if not tokens or (len(tokens) == 1 and _settle_one(tx, instance_id, tokens[0])):
        return
    held = worker_queue.find_held(tx, tokens)
    settled: list[int] = []
    for token in tokens:
        if token not in held:
            raise rules.lock_lost(operation, token)
        message_id, owner_id = held[token]
        if owner_id != instance_id:
            raise InvalidValue(
                f"the settled work item {message_id} is one of {owner_id!r}, not of {instance_id!r}"
            )
        settled.append(message_id)
    tx.execute(work_queries.DELETE_WORK_ITEMS, (as_list(settled),))


def _settle_one(tx: Transaction, instance_id: str, token: str) -> bool:
    bindings = (token, tx.now, instance_id)
    return is_text(token) and tx.change(work_queries.SETTLE_WORK, bindings) == 1


def _send(tx: Transaction, commit: TurnCommit) -> None:
    worker_queue.insert_many(tx, commit.worker_items)
    for identity in commit.cancelled_activities:
        tx.execute(
            work_queries.DELETE_CANCELLED_WORK,
            (identity.instance_id, identity.execution_id, identity.activity_id),
        )
    orchestrator_queue.insert_all(tx, commit.orchestrator_items)


def _cancel_timers(tx: Transaction, instance_id: str, commit: TurnCommit) -> None:
    tx.execute_many(
        queries.DELETE_TIMER,
        [(instance_id, timer.execution_id, timer.timer_id) for timer in commit.cancelled_timers],
    )


def _release(
    tx: Transaction,
    instance_id: str,
    key: int,
    name: str | None,
    version: str | None,
    *,
    suspended: bool,
) -> None:
    if not suspended and tx.change(queries.DELETE_LAST_LOCK, (instance_id,)) == 1:
        return
    first = tx.row(queries.FIRST_MESSAGE, (instance_id,))
    state = locks.SUSPENDED if suspended else locks.READY
    tx.execute(
        queries.RELEASE_LOCK,
        (state, *(first or (None, None)), key, name, version, instance_id),
    )
    tx.turns_changed = True


# --- state


def _write_kv(tx: Transaction, key: int, commit: TurnCommit) -> None:
    for change in commit.kv_changes:
        match change:
            case KvSet():
                values = (key, change.key, change.value, change.updated_at_ms)
                tx.execute(queries.PUT_KV_DELTA, values)
            case KvClear():
                tx.execute(queries.PUT_KV_DELTA, (key, change.key, None, None))
            case _:
                tx.execute(queries.CLEAR_ALL_IN_DELTA, (key,))
    status = commit.metadata.status
    if status is None or not status.ends_execution:
        return
    if tx.row(queries.HAS_KV_DELTA, (key,)) is not None:
        tx.execute(queries.MERGE_KV, (key,))
        tx.execute(queries.DROP_CLEARED_KV, (key,))
        tx.execute(queries.EMPTY_KV_DELTA, (key,))
