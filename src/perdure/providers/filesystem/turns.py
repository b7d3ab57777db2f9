"""Taking an instance's lock, keeping it and giving it back, inside a transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from perdure.providers import rules
from perdure.providers.filesystem import queues
from perdure.providers.filesystem.history_files import HistoryExcerpt
from perdure.providers.filesystem.lookups import NOTHING
from perdure.providers.filesystem.rows import HoldRow, LockRow, TagRow
from perdure.providers.records import Delivery, OrchestrationItem

if TYPE_CHECKING:
    from perdure.model.failures import Block
    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.tables import Transaction
    from perdure.providers.records import OrchestrationFilter


@dataclass(frozen=True, slots=True)
class LockedInstance:
    """A lock that was taken, and the history that is still to be read for it."""

    item: OrchestrationItem
    lock_token: str
    attempt_count: int
    continues: bool
    history: HistoryExcerpt | None


# --- fetching


def fetch(
    state: State,
    tx: Transaction,
    lock_timeout_ms: int,
    filter: OrchestrationFilter | None,  # noqa: A002
    owner: str | None,
) -> LockedInstance | None:
    queues.bury_orphans(state, tx)
    instance_id = state.ready_instances.first(filter, owner, tx.now_ms)
    if instance_id is None:
        return None
    if state.standing.is_locked(instance_id, tx.now_ms):
        return _continue(state, tx, instance_id)
    lock = _lock(state, tx, instance_id, lock_timeout_ms, owner)
    visible = state.ready_instances.visible_messages(instance_id, tx.now_ms)
    deliveries = _hand_out(state, tx, lock.lock_token, visible)
    return _locked(state, lock, deliveries, visible_ms=tx.now_ms)


def take_over(
    state: State, tx: Transaction, instance_id: str, lock_timeout_ms: int
) -> LockedInstance:
    """Lock an existing instance whoever holds it, without any message."""
    lock = _lock(state, tx, instance_id, lock_timeout_ms, None)
    return _locked(state, lock, (), visible_ms=None)


def give_back(state: State, locked: LockedInstance | None, tx: Transaction) -> None:
    """Undo a fetch whose caller went away: nobody would take a turn before the lock expires."""
    if locked is None or locked.lock_token not in state.lookups.locks:
        return
    if locked.continues:
        _untag(state, tx, [delivery.message_id for delivery in locked.item.messages])
    else:
        abandon(state, tx, locked.lock_token, None, None, ignore_attempt=True)


def _untag(state: State, tx: Transaction, message_ids: list[int]) -> None:
    for message_id in message_ids:
        tag = state.tables.tags.get(message_id)
        if tag is not None:
            attempt_count = max(tag.attempt_count - 1, 0)
            tx.put(state.tables.tags, TagRow(message_id=message_id, attempt_count=attempt_count))


def _continue(state: State, tx: Transaction, instance_id: str) -> LockedInstance:
    lock = state.tables.locks.rows[instance_id]
    carried = state.lookups.tagged.get(lock.lock_token, NOTHING)
    visible = state.ready_instances.visible_messages(instance_id, tx.now_ms)
    arrivals = [message_id for message_id in visible if message_id not in carried]
    deliveries = _hand_out(state, tx, lock.lock_token, arrivals)
    return LockedInstance(
        item=rules.continuing_item(instance_id, deliveries),
        lock_token=lock.lock_token,
        attempt_count=max(delivery.attempt_count for delivery in deliveries),
        continues=True,
        history=None,
    )


def _lock(
    state: State, tx: Transaction, instance_id: str, lock_timeout_ms: int, owner: str | None
) -> LockRow:
    release(state, tx, instance_id)
    lock = LockRow(
        instance_id=instance_id,
        lock_token=rules.new_lock_token(),
        locked_until_ms=tx.now_ms + lock_timeout_ms,
        owner=owner,
    )
    tx.put(state.tables.locks, lock)
    return lock


def _hand_out(
    state: State, tx: Transaction, lock_token: str, message_ids: list[int]
) -> tuple[Delivery, ...]:
    rows = state.tables.messages.rows
    deliveries: list[Delivery] = []
    for message_id in rules.in_due_order(
        message_ids, lambda each: (rows[each].visible_at_ms, rows[each].enqueued_at_ms)
    ):
        tag = state.tables.tags.get(message_id)
        attempt_count = (tag.attempt_count if tag is not None else 0) + 1
        tx.put(
            state.tables.tags,
            TagRow(message_id=message_id, lock_token=lock_token, attempt_count=attempt_count),
        )
        body = rows[message_id].message.body
        deliveries.append(Delivery(message_id=message_id, body=body, attempt_count=attempt_count))
    return tuple(deliveries)


def _locked(
    state: State, lock: LockRow, deliveries: tuple[Delivery, ...], *, visible_ms: int | None
) -> LockedInstance:
    """Named by a start that is visible by then, if no turn has named it; None: by any."""
    instance_id, standing = lock.instance_id, state.standing
    who = standing.who(instance_id, visible_ms)
    execution_id = standing.execution_id(instance_id)
    history = state.tables.histories.get((instance_id, execution_id))
    kv_store = state.lookups.kv_store.get(instance_id, {})
    item = OrchestrationItem(
        instance_id=instance_id,
        name=who.name,
        version=who.version,
        execution_id=execution_id,
        history=(),
        messages=deliveries,
        kv_snapshot={key: kv_store[key] for key in sorted(kv_store)},
        parent_instance_id=who.parent_instance_id,
    )
    return LockedInstance(
        item=item,
        lock_token=lock.lock_token,
        attempt_count=max((delivery.attempt_count for delivery in deliveries), default=0),
        continues=False,
        history=HistoryExcerpt.of(instance_id, execution_id, history) if history else None,
    )


# --- keeping and giving back


def live_lock(state: State, tx: Transaction, lock_token: str) -> LockRow:
    """The lock with that token; raises LockLost if it is not live."""
    instance_id = state.lookups.locks.get(lock_token)
    if instance_id is None or not state.standing.is_locked(instance_id, tx.now_ms):
        raise rules.lock_lost(tx.verb, lock_token)
    return state.tables.locks.rows[instance_id]


def renew(state: State, tx: Transaction, lock_token: str, extend_for_ms: int) -> None:
    lock = live_lock(state, tx, lock_token)
    until_ms = tx.now_ms + extend_for_ms
    tx.put(state.tables.locks, msgspec.structs.replace(lock, locked_until_ms=until_ms))


def abandon(
    state: State,
    tx: Transaction,
    lock_token: str,
    delay_ms: int | None,
    block: Block | None,
    *,
    ignore_attempt: bool,
) -> None:
    instance_id = state.lookups.locks.get(lock_token)
    if instance_id is None:
        raise rules.lock_lost(tx.verb, lock_token)
    if ignore_attempt:
        for message_id in state.lookups.tagged_with(lock_token):
            tag = state.tables.tags.rows[message_id]
            attempt_count = max(tag.attempt_count - 1, 0)
            tx.put(state.tables.tags, msgspec.structs.replace(tag, attempt_count=attempt_count))
    hold = hold_of(state, instance_id)
    if delay_ms is not None:
        hold = msgspec.structs.replace(hold, not_before_ms=tx.now_ms + delay_ms)
    if block is not None:
        hold = msgspec.structs.replace(hold, block=block)
    put_hold(state, tx, hold)
    release(state, tx, instance_id)


def release(state: State, tx: Transaction, instance_id: str) -> None:
    """Drop the lock, whoever has it; what it carried is free again."""
    lock = state.tables.locks.get(instance_id)
    if lock is None:
        return
    for message_id in state.lookups.tagged_with(lock.lock_token):
        tag = state.tables.tags.rows[message_id]
        tx.put(state.tables.tags, msgspec.structs.replace(tag, lock_token=None))
    tx.drop(state.tables.locks, instance_id)


def reset_attempts(state: State, tx: Transaction, instance_id: str) -> None:
    """Of all messages of the instance."""
    for message_id in state.lookups.messages_of(instance_id):
        tag = state.tables.tags.get(message_id)
        if tag is not None and tag.attempt_count:
            tx.put(state.tables.tags, msgspec.structs.replace(tag, attempt_count=0))


def hold_of(state: State, instance_id: str) -> HoldRow:
    return state.tables.holds.get(instance_id) or HoldRow(instance_id=instance_id)


def put_hold(state: State, tx: Transaction, hold: HoldRow) -> None:
    """Store the hold, or nothing if it holds nothing."""
    if hold == state.tables.holds.get(hold.instance_id):
        return
    if hold == HoldRow(instance_id=hold.instance_id):
        tx.drop(state.tables.holds, hold.instance_id)
    else:
        tx.put(state.tables.holds, hold)
