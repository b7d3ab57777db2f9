"""Putting messages into the orchestrator queue, under a condition if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.errors import InstanceFinished, NotFound
from perdure.model.status import Status
from perdure.providers._shared import rules
from perdure.providers.items import EnqueueCondition
from perdure.providers.sqlite import deletion, listing, locks, queries
from perdure.providers.sqlite.many_rows import as_list, rows_at_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.items import OrchestratorMessage, StartRouting
    from perdure.providers.sqlite.transaction import Transaction


def enqueue(
    tx: Transaction,
    message: OrchestratorMessage,
    delay_ms: int | None,
    condition: EnqueueCondition | None,
) -> bool:
    if condition is not None and not _is_met(tx, message.instance_id, condition):
        return False
    insert(tx, message, rules.visible_at(message.visible_at_ms, tx.now, delay_ms))
    return True


def enqueue_many(
    tx: Transaction,
    messages: Sequence[OrchestratorMessage],
    delay_ms: int | None,
    condition: EnqueueCondition | None,
) -> list[bool]:
    if condition is EnqueueCondition.ABSENT:
        taken = _enqueue_new(tx, messages, delay_ms)
        if taken is not None:
            return taken
    return [enqueue(tx, message, delay_ms, condition) for message in messages]


def _enqueue_new(
    tx: Transaction, messages: Sequence[OrchestratorMessage], delay_ms: int | None
) -> list[bool] | None:
    """Starts of instances of which there is nothing yet; None if one of them is another case."""
    ids = [message.instance_id for message in messages]
    if len(set(ids)) != len(ids):
        return None
    existing: set[str] = set()
    for instance_id, execution_id, pending_since in rows_at_once(
        tx, queries.KNOWN_OF, (as_list(ids),)
    ):
        if not execution_id and pending_since is None:
            return None
        existing.add(instance_id)
    absent = [message for message in messages if message.instance_id not in existing]
    if not absent:
        return [False] * len(messages)
    queued: list[tuple[Any, ...]] = []
    ready: list[tuple[Any, ...]] = []
    for message_id, message in enumerate(absent, tx.new_message_ids(len(absent))):
        instance_id, start = message.instance_id, message.start
        if start is None:
            return None
        visible_at = rules.visible_at(message.visible_at_ms, tx.now, delay_ms)
        queued.append(_row(tx, message, visible_at, message_id))
        ready.append(locks.ready_row(tx, instance_id, visible_at, message_id, start))
    queries.INSERT_MESSAGE.execute(tx, queued)
    queries.INSERT_READY.execute(tx, ready)
    tx.changed_instances += [row[1] for row in queued]
    tx.turns_changed = True
    return [instance_id not in existing for instance_id in ids]


def insert_all(tx: Transaction, messages: Sequence[OrchestratorMessage]) -> None:
    for message in messages:
        insert(tx, message, rules.visible_at(message.visible_at_ms, tx.now))


def insert(tx: Transaction, message: OrchestratorMessage, visible_at: int) -> None:
    """Add a fresh message."""
    message_id = tx.new_message_id()
    queries.INSERT_MESSAGE.execute(tx, [_row(tx, message, visible_at, message_id)])
    locks.note_message(tx, message.instance_id, visible_at, message_id, message.start)
    tx.changed_instances.append(message.instance_id)


def exists(tx: Transaction, instance_id: str) -> bool:
    """There is an instance, or its start is queued."""
    _, execution_id, pending_since, _ = tx.row(queries.STANDING, (instance_id,))
    return bool(execution_id) or pending_since is not None


def has_ended(tx: Transaction, instance_id: str) -> bool:
    """Whether an instance has ended for good; one that has not begun has not."""
    instance = tx.row(queries.INSTANCE_BY_ID, (instance_id,))
    if instance is None or instance[1] == 0:
        return False
    status = Status(tx.row(queries.CURRENT_STATUS, (instance[0],))[0])
    if status is not Status.CONTINUED_AS_NEW:
        return status.is_final
    start_queued = tx.row(queries.QUEUED_START, (instance_id,)) is not None
    return rules.has_ended(status, start_queued=start_queued)


def _is_met(tx: Transaction, instance_id: str, condition: EnqueueCondition) -> bool:
    match condition:
        case EnqueueCondition.ALWAYS:
            return True
        case EnqueueCondition.ABSENT:
            return not exists(tx, instance_id)
        case EnqueueCondition.ALIVE:
            require_alive(tx, instance_id)
            return True
        case EnqueueCondition.REPLACE:
            _refuse_to_take_from_parent(tx, instance_id)
            deletion.delete_tree(tx, instance_id)
            return True


def require_alive(tx: Transaction, instance_id: str) -> None:
    if not exists(tx, instance_id):
        raise NotFound(f"there is no instance {instance_id!r}")
    if has_ended(tx, instance_id):
        raise InstanceFinished(f"{instance_id!r} has ended")


def _refuse_to_take_from_parent(tx: Transaction, child_id: str) -> None:
    child = listing.find_info(tx, child_id)
    parent_id = None if child is None else child.parent_instance_id
    if parent_id is not None and exists(tx, parent_id) and not has_ended(tx, parent_id):
        raise rules.not_a_root(child_id, parent_id)


def _row(
    tx: Transaction, message: OrchestratorMessage, visible_at: int, message_id: int
) -> tuple[Any, ...]:
    start, timer = message.start, message.timer
    return (
        message_id,
        message.instance_id,
        message.kind,
        message.body,
        visible_at,
        tx.now,
        0,
        message.visible_at_ms,
        *((None, None, None) if start is None else _routing(start)),
        *((None, None) if timer is None else (timer.execution_id, timer.timer_id)),
    )


def _routing(start: StartRouting) -> tuple[str, str | None, str | None]:
    return start.name, start.version, start.parent_instance_id
