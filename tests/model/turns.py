"""Fetching, committing and giving back turns. Each function checks first and then changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model import rules
from model.state import Execution, Instance, Lock
from perdure import limits
from perdure.errors import DuplicateEvent, InvalidValue, LockLost
from perdure.model.status import Status
from perdure.providers.records import (
    Delivery,
    FetchedOrchestration,
    HistoryRecord,
    OrchestrationItem,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.state import Message, WorkItem
    from model.store import ModelStore
    from perdure.model.failures import Block
    from perdure.providers.records import (
        ExecutionMetadata,
        OrchestrationFilter,
        OrchestratorMessage,
        TurnCommit,
    )


def fetch(
    store: ModelStore,
    lock_timeout_ms: int,
    filter: OrchestrationFilter | None,  # noqa: A002
    owner: str | None,
) -> FetchedOrchestration | None:
    now_ms = store.clock.now_ms()
    store.bury_orphans(now_ms)
    for instance in store.agenda.candidates(owner, now_ms):
        if not _fits(instance, filter, now_ms):
            continue
        if instance.locked(now_ms):
            fetched = _continue(instance, now_ms)
        else:
            fetched = _lock_batch(store, instance, lock_timeout_ms, owner, now_ms)
        if fetched is not None:
            store.agenda.place(instance, now_ms)
            return fetched
    return None


def ack(store: ModelStore, lock_token: str, commit: TurnCommit) -> None:
    operation = "ack_orchestration_item"
    now_ms = store.clock.now_ms()
    instance = store.locks.get(lock_token)
    if instance is None or instance.lock is None or not instance.locked(now_ms):
        raise rules.lock_lost(operation, lock_token)
    _check_predecessor(instance, commit, operation)
    carried = instance.lock.carried
    consumed = carried.keys() if commit.consumed is None else set(commit.consumed)
    settled = _check_settled(store, instance, commit, operation, now_ms)
    if not consumed <= carried.keys():
        raise rules.lock_lost(operation, lock_token)
    _check_added(store, instance, commit, operation)
    _consume(store, instance, [carried[each] for each in sorted(consumed)])
    for message_id in set(commit.returned) & carried.keys():
        entry = carried.pop(message_id)
        entry.attempt_count = max(entry.attempt_count - 1, 0)
        instance.free.add(entry.key)
    _apply(store, instance, commit, settled, now_ms)


def start(
    store: ModelStore,
    message: OrchestratorMessage,
    commit: TurnCommit,
    lock_token: str,
    owner: str,
) -> bool:
    """Create the instance by its first turn; messages that came early stay free."""
    operation = "start_orchestration_item"
    now_ms = store.clock.now_ms()
    found = store.instances.get(message.instance_id)
    if found is not None and found.exists:
        return False
    if lock_token in store.locks:
        raise InvalidValue(f"the lock token {lock_token!r} is in use")
    instance = found or Instance(message.instance_id)
    _check_predecessor(instance, commit, operation)
    settled = _check_settled(store, instance, commit, operation, now_ms)
    _check_added(store, instance, commit, operation)
    store.instances[instance.instance_id] = instance
    instance.start = message.start
    instance.created_at_ms = now_ms
    store.release(instance)  # a lock on history that a tool wrote, without any turn
    instance.lock = Lock(lock_token, now_ms, owner)
    store.locks[lock_token] = instance
    _apply(store, instance, commit, settled, now_ms)
    return True


def abandon(
    store: ModelStore,
    lock_token: str,
    delay_ms: int | None,
    block: Block | None,
    *,
    ignore_attempt: bool,
) -> None:
    now_ms = store.clock.now_ms()
    instance = store.locks.get(lock_token)
    if instance is None or instance.lock is None:
        raise rules.lock_lost("abandon_orchestration_item", lock_token)
    if ignore_attempt:
        for entry in instance.lock.carried.values():
            entry.attempt_count = max(entry.attempt_count - 1, 0)
    if delay_ms is not None:
        instance.not_before_ms = now_ms + delay_ms
    if block is not None:
        instance.block = block
    store.release(instance)
    store.settle(instance, now_ms)


def renew(store: ModelStore, lock_token: str, extend_for_ms: int) -> None:
    now_ms = store.clock.now_ms()
    instance = store.locks.get(lock_token)
    if instance is None or instance.lock is None or not instance.locked(now_ms):
        raise rules.lock_lost("renew_orchestration_item_lock", lock_token)
    instance.lock.locked_until_ms = now_ms + extend_for_ms
    store.agenda.place(instance, now_ms)


def take_over(store: ModelStore, instance: Instance, lock_timeout_ms: int) -> FetchedOrchestration:
    """Lock an existing instance, also one that another owner holds, without any message."""
    now_ms = store.clock.now_ms()
    lock = _new_lock(store, instance, lock_timeout_ms, None, now_ms)
    store.settle(instance, now_ms)
    return FetchedOrchestration(
        item=_item(instance, [], None), lock_token=lock.token, attempt_count=0
    )


def append(
    store: ModelStore, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
) -> None:
    instance = store.instances.get(instance_id) or Instance(instance_id)
    _check_no_duplicates(instance, execution_id, records, "append_with_execution")
    store.instances[instance_id] = instance
    _append(instance, execution_id, records)
    store.settle(instance, store.clock.now_ms())


def records_of(instance: Instance | None, execution_id: int | None) -> list[HistoryRecord]:
    """One execution's history in order; the latest one's for None."""
    if instance is None:
        return []
    if execution_id is None:
        execution_id = max([instance.execution_id, *instance.histories])
    history = instance.histories.get(execution_id, {})
    return [HistoryRecord(event_id=each, data=history[each]) for each in sorted(history)]


# --- fetching


def _fits(
    instance: Instance,
    filter: OrchestrationFilter | None,  # noqa: A002
    now_ms: int,
) -> bool:
    current = instance.current
    pinned = None if current is None else current.framework_version
    who = instance.who(now_ms)
    return rules.fits_framework(filter, pinned) and rules.fits_handlers(
        filter, who.name, who.version
    )


def _lock_batch(
    store: ModelStore,
    instance: Instance,
    lock_timeout_ms: int,
    owner: str | None,
    now_ms: int,
) -> FetchedOrchestration | None:
    lock = _new_lock(store, instance, lock_timeout_ms, owner, now_ms)
    batch = _carry_visible(instance, lock, now_ms)
    return FetchedOrchestration(
        item=_item(instance, batch, now_ms),
        lock_token=lock.token,
        attempt_count=max(entry.attempt_count for entry in batch),
    )


def _continue(instance: Instance, now_ms: int) -> FetchedOrchestration | None:
    assert instance.lock is not None
    batch = _carry_visible(instance, instance.lock, now_ms)
    if not batch:
        return None
    return FetchedOrchestration(
        item=rules.continuing_item(instance.instance_id, _deliveries(batch)),
        lock_token=instance.lock.token,
        attempt_count=max(entry.attempt_count for entry in batch),
        continues=True,
    )


def _new_lock(
    store: ModelStore, instance: Instance, lock_timeout_ms: int, owner: str | None, now_ms: int
) -> Lock:
    store.release(instance)
    lock = instance.lock = Lock(rules.new_lock_token(), now_ms + lock_timeout_ms, owner)
    store.locks[lock.token] = instance
    return lock


def _carry_visible(instance: Instance, lock: Lock, now_ms: int) -> list[Message]:
    """Tag the first visible messages that the lock does not carry yet, as many as fit.

    If some are left, those that are no mail overtake, and the first start does in any case.
    """
    visible = sorted(
        (each for each in instance.messages.values() if each.visible_at_ms <= now_ms),
        key=lambda each: each.key,
    )
    batch = _that_fit(visible, lock)
    free = [each for each in visible if each.message_id not in lock.carried]
    instance.mail_held = len(batch) < len(free)
    instance.yielded_at_ms = 0
    if instance.mail_held:
        since_ms = batch[-1].visible_at_ms if batch else 0
        known = {each.message_id for each in batch}
        others = [
            each
            for each in free
            if not each.is_mail and each.message_id not in known and each.visible_at_ms >= since_ms
        ]
        batch += _that_fit(others, lock)
        if not any(each.message.start for each in batch):
            starts = [each for each in free if each.message.start is not None]
            batch += sorted(starts, key=lambda each: each.message_id)[:1]
    for entry in batch:
        instance.free.remove(entry.key)
        entry.attempt_count += 1
        lock.carried[entry.message_id] = entry
    batch.sort(key=lambda entry: entry.message_id)
    return rules.in_due_order(batch, lambda entry: (entry.visible_at_ms, entry.enqueued_at_ms))


def _that_fit(visible: list[Message], lock: Lock) -> list[Message]:
    """Those in front that fit into a batch, beside what the lock carries of them; at least one."""
    batch: list[Message] = []
    messages, size = limits.BATCH_MESSAGES_MAX, limits.BATCH_BYTES_MAX
    for entry in visible:
        is_carried = entry.message_id in lock.carried
        is_first = size == limits.BATCH_BYTES_MAX
        if not is_carried and (messages <= 0 or (entry.size > size and not is_first)):
            break
        messages, size = messages - 1, size - entry.size
        if not is_carried:
            batch.append(entry)
    return batch


def _item(instance: Instance, batch: list[Message], visible_ms: int | None) -> OrchestrationItem:
    """Named by a start that is visible by then, if no turn has named it; None: by any."""
    execution_id = instance.shown_execution_id
    who = instance.who(visible_ms)
    return OrchestrationItem(
        instance_id=instance.instance_id,
        name=who.name,
        version=who.version,
        execution_id=execution_id,
        history=tuple(records_of(instance, execution_id)),
        messages=_deliveries(batch),
        kv_snapshot={key: instance.kv_store[key] for key in sorted(instance.kv_store)},
        parent_instance_id=who.parent_instance_id,
    )


def _deliveries(batch: list[Message]) -> tuple[Delivery, ...]:
    return tuple(
        Delivery(
            message_id=entry.message_id,
            body=entry.message.body,
            attempt_count=entry.attempt_count,
        )
        for entry in batch
    )


# --- committing


def _check_predecessor(instance: Instance, commit: TurnCommit, operation: str) -> None:
    """Raise if the turn goes on from an event that is not stored."""
    delta = commit.history_delta
    needed = delta[0].event_id - 1 if delta else commit.after_event_id
    if needed > max(instance.histories.get(commit.execution_id, {}), default=0):
        raise LockLost(operation, f"{instance.instance_id!r} has no event {needed}")


def _check_settled(
    store: ModelStore, instance: Instance, commit: TurnCommit, operation: str, now_ms: int
) -> list[WorkItem]:
    """Return the settled work items. Raise if one is not held, or belongs to another instance."""
    settled: list[WorkItem] = []
    for token in commit.settled_work:
        item = store.work.holder_of(token)
        if item is None or not rules.is_live(item.locked_until_ms, now_ms):
            raise rules.lock_lost(operation, token)
        if item.identity.instance_id != instance.instance_id:
            raise InvalidValue(f"the settled work item {item.identity} is another instance's")
        settled.append(item)
    return settled


def _check_added(store: ModelStore, instance: Instance, commit: TurnCommit, operation: str) -> None:
    """Raise if an event or a lock token that the commit adds is there already."""
    named = [*(work.identity for work in commit.worker_items), *commit.cancelled_activities]
    if any(identity.instance_id != instance.instance_id for identity in named):
        raise InvalidValue(f"a turn of {instance.instance_id!r} names work of another instance")
    _check_no_duplicates(instance, commit.execution_id, commit.history_delta, operation)
    for work in commit.worker_items:
        if work.claim is not None and store.work.holder_of(work.claim.lock_token) is not None:
            raise InvalidValue(f"the lock token {work.claim.lock_token!r} is in use")


def _check_no_duplicates(
    instance: Instance, execution_id: int, records: Sequence[HistoryRecord], operation: str
) -> None:
    stored = instance.histories.get(execution_id, {})
    seen: set[int] = set()
    for record in records:
        if record.event_id in stored or record.event_id in seen:
            raise DuplicateEvent(
                operation,
                f"execution {execution_id} of {instance.instance_id!r} already has an event "
                f"{record.event_id}",
            )
        seen.add(record.event_id)


def _consume(store: ModelStore, instance: Instance, consumed: list[Message]) -> None:
    for entry in consumed:
        is_first = instance.start is None and not instance.has_turns
        if is_first and entry.message.start is not None:
            instance.start = entry.message.start
            instance.created_at_ms = entry.enqueued_at_ms
        store.remove_message(instance, entry.message_id)


def _apply(
    store: ModelStore,
    instance: Instance,
    commit: TurnCommit,
    settled: list[WorkItem],
    now_ms: int,
) -> None:
    _apply_execution(instance, commit, now_ms)
    _apply_state(instance, commit)
    for item in settled:
        store.remove_work(item)
    for work in commit.worker_items:
        store.add_work(work, now_ms)
    for identity in commit.cancelled_activities:
        for item in store.work.with_identity(identity):
            store.remove_work(item)
    for message in commit.orchestrator_items:
        store.add_message(message, now_ms)
    for timer in commit.cancelled_timers:
        for message_id in list(instance.timers.get(timer, ())):
            store.remove_message(instance, message_id)
    instance.not_before_ms = None
    instance.block = None
    current = instance.current
    if current is not None and current.status.is_final:
        instance.suspended = False
    assert instance.lock is not None
    yielded_at_ms = instance.yielded_at_ms
    if instance.mail_held or commit.returned:
        yielded_at_ms = now_ms
    if commit.keep_lock_ms is None:
        store.release(instance)
        status = commit.metadata.status
        goes_on = status is None or not status.ends_execution
        instance.mail_held = bool(commit.returned) and goes_on
    else:
        instance.mail_held = False
        instance.lock.locked_until_ms = now_ms + commit.keep_lock_ms
        instance.lock.kept = True
    instance.yielded_at_ms = yielded_at_ms
    store.settle(instance, now_ms)


def _apply_execution(instance: Instance, commit: TurnCommit, now_ms: int) -> None:
    metadata = commit.metadata
    if not instance.has_turns and instance.start is None:
        instance.created_at_ms = now_ms
    if metadata.name is not None:
        if instance.name is None:
            instance.parent_instance_id = metadata.parent_instance_id
        instance.name, instance.version = metadata.name, metadata.version
    instance.execution_id = max(instance.execution_id, commit.execution_id)
    instance.updated_at_ms = now_ms
    execution = instance.executions.get(commit.execution_id)
    if execution is None:
        execution = instance.executions[commit.execution_id] = Execution(Status.RUNNING, now_ms)
    _apply_metadata(execution, metadata, now_ms)
    _append(instance, commit.execution_id, commit.history_delta)


def _apply_metadata(execution: Execution, metadata: ExecutionMetadata, now_ms: int) -> None:
    if metadata.framework_version is not None:
        execution.framework_version = metadata.framework_version
    if metadata.output is not None:
        execution.output = metadata.output
    if metadata.status is not None:
        execution.status = metadata.status
        execution.completed_at_ms = now_ms if metadata.status.ends_execution else None


def _append(instance: Instance, execution_id: int, records: Sequence[HistoryRecord]) -> None:
    if records:
        history = instance.histories.setdefault(execution_id, {})
        history.update({record.event_id: record.data for record in records})


def _apply_state(instance: Instance, commit: TurnCommit) -> None:
    if commit.custom_status is not None:
        instance.custom_status = commit.custom_status.value
        instance.custom_status_version += 1
    rules.apply_kv_changes(instance.kv_store, instance.kv_delta, commit.kv_changes)
    status = commit.metadata.status
    if status is not None and status.ends_execution:
        instance.kv_store = rules.merge_kv(instance.kv_store, instance.kv_delta)
        instance.kv_delta = {}
