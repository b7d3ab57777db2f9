"""Fetching, committing and giving back turns, inside a transaction of the writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.arguments import INTEGER_MAX
from perdure.model.status import Status
from perdure.providers._shared import rules
from perdure.providers.items import (
    Delivery,
    FetchedOrchestration,
    HistoryRecord,
    KvEntry,
    OrchestrationItem,
)
from perdure.providers.sqlite import locks, queries
from perdure.providers.sqlite.commits import apply_commit
from perdure.providers.sqlite.many_rows import as_list, rows_at_once
from perdure.providers.sqlite.nothing import Nothing
from perdure.providers.sqlite.reading import readable
from perdure.providers.sqlite.tokens import is_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from perdure.model.failures import Block
    from perdure.providers.items import OrchestrationFilter, TurnCommit
    from perdure.providers.sqlite.transaction import Transaction

_MISFITS_BEFORE_SEEKING: Final = 50
"""After so many instances that do not fit the filter, each handler is looked up by its name."""


def fetch(
    tx: Transaction,
    lock_timeout_ms: int,
    filter: OrchestrationFilter | None,  # noqa: A002
    owner: str | None,
) -> FetchedOrchestration | Nothing:
    locks.wake(tx)
    ready = _find_ready(tx, filter)
    while owner is not None and (kept := _find_kept(tx, filter, owner)) is not None:
        if ready is not None and ready[4:6] < kept[4:6]:
            break
        if (continued := _continue(tx, kept[0], kept[7])) is not None:
            return continued
    while ready is not None:
        if (fetched := lock_batch(tx, ready[0], ready[1], lock_timeout_ms, owner)) is not None:
            return fetched
        ready = _find_ready(tx, filter)
    return Nothing(locks.next_due(tx, owner))


def ack(tx: Transaction, lock_token: str, commit: TurnCommit) -> None:
    lock = tx.held(queries.LOCK_HELD, lock_token)
    if lock is None or lock[2] <= tx.now:
        raise rules.lock_lost("ack_orchestration_item", lock_token)
    apply_commit(tx, lock_token, lock, commit)


def abandon(
    tx: Transaction,
    lock_token: str,
    delay_ms: int | None,
    block: Block | None,
    ignore_attempt: bool,
) -> None:
    lock = tx.held(queries.LOCK_HELD, lock_token)
    if lock is None:
        raise rules.lock_lost("abandon_orchestration_item", lock_token)
    instance_id, instance_key, _, _, carried_until, suspended, not_before, old_block, *_ = lock
    if ignore_attempt:
        tx.execute(queries.FORGIVE_CARRIED, (instance_id, carried_until, lock_token))
    tx.execute(queries.DROP_LOCK, (instance_id,))
    if delay_ms is not None:
        not_before = tx.now + delay_ms
    if block is not None:
        old_block = msgspec.json.encode(block).decode()
        tx.changed_instances.append(instance_id)
        if instance_key is not None:
            show_status(tx, instance_key, suspended=bool(suspended), blocked=True)
    tx.execute(queries.SET_HOLDS, (suspended, not_before, old_block, instance_id))
    locks.refresh(tx, instance_id)


def give_back(tx: Transaction, fetched: FetchedOrchestration) -> None:
    """Undo a fetch whose caller has gone away; a kept lock stays, without the new messages."""
    if not fetched.continues:
        abandon(tx, fetched.lock_token, None, None, ignore_attempt=True)
        return
    tx.execute_many(
        queries.UNTAG_MESSAGE,
        [(each.message_id, fetched.lock_token) for each in fetched.item.messages],
    )
    locks.refresh(tx, fetched.item.instance_id)


def renew(tx: Transaction, lock_token: str, extend_for_ms: int) -> None:
    lock = tx.held(queries.LOCK_HELD, lock_token)
    if lock is None or lock[2] <= tx.now:
        raise rules.lock_lost("renew_orchestration_item_lock", lock_token)
    tx.execute(queries.RENEW_LOCK, (tx.now + extend_for_ms, lock[0]))
    # Whoever waits for a lock to end looks again then; only an earlier end is news.
    tx.turns_changed |= tx.now + extend_for_ms < lock[2]


def renew_many(tx: Transaction, lock_tokens: Sequence[str], extend_for_ms: int) -> frozenset[str]:
    given = as_list([token for token in lock_tokens if is_text(token)])
    live = dict(rows_at_once(tx, queries.LIVE_LOCKS, (given, tx.now)))
    locked_until = tx.now + extend_for_ms
    tx.execute(queries.RENEW_LOCKS, (as_list(live), locked_until))
    lost = frozenset(lock_tokens).difference(live)
    tx.turns_changed |= bool(lost) or locked_until < max(live.values(), default=0)
    return lost


def take_over(
    tx: Transaction, instance_id: str, instance_key: int | None, lock_timeout_ms: int
) -> FetchedOrchestration:
    """Lock an existing instance whoever holds it, without any message."""
    if tx.row(queries.PLACE, (instance_id,)) is None:
        tx.execute(queries.INSERT_BARE_LOCK, (instance_id, instance_key))
    token = tx.new_lock_token()
    locked_until = tx.now + lock_timeout_ms
    tx.execute(
        queries.TAKE_LOCK,
        (locked_until, token, None, None, None, None, instance_id),
    )
    locks.refresh(tx, instance_id)
    start = tx.row(queries.VISIBLE_START, (instance_id, INTEGER_MAX))  # visible or not
    item = _item(tx, instance_id, instance_key, (), start)
    return FetchedOrchestration(item=item, lock_token=token, attempt_count=0)


def show_status(tx: Transaction, instance_key: int, *, suspended: bool, blocked: bool) -> None:
    """Bring the status that people see up to date after a hold has changed."""
    row = tx.row(queries.CURRENT_STATUS, (instance_key,))
    if row is not None:
        shown = rules.shown_status(Status(row[0]), suspended=suspended, blocked=blocked)
        tx.execute(queries.SET_STATUS, (shown, instance_key))


def read_history(tx: Transaction, instance_key: int, execution_id: int) -> list[HistoryRecord]:
    return [
        HistoryRecord(event_id=event_id, data=data)
        for event_id, data in tx.execute(queries.HISTORY, (instance_key, execution_id))
    ]


# --- fetching


def _find_ready(tx: Transaction, filter: OrchestrationFilter | None) -> Any:  # noqa: A002
    """The ready instance with the oldest message that fits the filter, as a row."""
    if filter is None or (filter.handlers is None and filter.framework_versions is None):
        return tx.row(queries.FIND_READY, (tx.now,))
    for misfits, row in enumerate(tx.execute(queries.FIND_READY, (tx.now,))):
        if fits(tx, row, filter):
            return row
        if misfits == _MISFITS_BEFORE_SEEKING and filter.handlers is not None:
            return _seek_ready(tx, filter)
    return None


def _find_kept(tx: Transaction, filter: OrchestrationFilter | None, owner: str) -> Any:  # noqa: A002
    """Of the instances whose locks this owner keeps, as ``_find_ready``."""
    for row in tx.execute(queries.FIND_KEPT, (tx.now, owner)):
        if filter is None or fits(tx, row[:7], filter):
            return row
    return None


def _seek_ready(tx: Transaction, filter: OrchestrationFilter) -> Any:  # noqa: A002
    """As ``_find_ready``, by way of the names that fit."""
    names: set[str | None] = {name for name, _ in filter.handlers or ()}
    found = [row for name in names | {None} for row in _first_fit_by_name(tx, filter, name)]
    return min(found, key=lambda row: (row[4], row[5]), default=None)


def _first_fit_by_name(
    tx: Transaction,
    filter: OrchestrationFilter,  # noqa: A002
    name: str | None,
) -> Iterator[Any]:
    for row in tx.execute(queries.FIND_READY_BY_NAME, (tx.now, name)):
        if fits(tx, row, filter):
            yield row
            return


def fits(tx: Transaction, row: Any, filter: OrchestrationFilter) -> bool:  # noqa: A002
    """Whether a row of ``_find_ready`` fits."""
    instance_id, _, name, version, _, _, framework_version = row
    pinned = None if framework_version is None else parse_version(framework_version)
    if not rules.fits_framework(filter, pinned):
        return False
    if name is None:
        start = tx.row(queries.VISIBLE_START, (instance_id, tx.now))
        name, version = (rules.UNKNOWN_NAME, None) if start is None else start[:2]
    return rules.fits_handlers(filter, name, version)


def lock_batch(
    tx: Transaction,
    instance_id: str,
    instance_key: int | None,
    lock_timeout_ms: int,
    owner: str | None,
) -> FetchedOrchestration | None:
    """Lock a ready instance with all that is visible; None if it is not ready after all."""
    try:
        batch, later = _due(tx, tx.execute(queries.MESSAGES_BY_TIME, (instance_id,)))
    except UnicodeDecodeError:
        batch, later = _due(tx, readable(tx, queries.MESSAGES_BY_TIME, (instance_id,)))
    batch.sort()
    start = next((row[5:8] for row in batch if row[5] is not None), None)
    if instance_key is None and start is None:
        # The clock went back to before the time of its start.
        locks.refresh(tx, instance_id)
        return None
    token = tx.new_lock_token()
    _tag(tx, batch, token)
    locked_until = tx.now + lock_timeout_ms
    tx.execute(queries.TAKE_LOCK, (locked_until, token, owner, tx.now, *later, instance_id))
    return FetchedOrchestration(
        item=_item(tx, instance_id, instance_key, _deliveries(batch), start),
        lock_token=token,
        attempt_count=max(row[2] for row in batch),
    )


def _due(tx: Transaction, rows: Iterable[Any]) -> tuple[list[Any], tuple[int | None, int | None]]:
    """The messages that are visible, and time and id of the first that is not."""
    batch: list[Any] = []
    for row in rows:
        if row[3] > tx.now:
            return batch, (row[3], row[0])
        batch.append(row)
    return batch, (None, None)


def _continue(tx: Transaction, instance_id: str, lock_token: str) -> FetchedOrchestration | None:
    whose = (instance_id, tx.now, lock_token)
    try:
        batch = tx.rows(queries.VISIBLE_FREE_MESSAGES, whose)
    except UnicodeDecodeError:
        batch = readable(tx, queries.VISIBLE_FREE_MESSAGES, whose)
    batch.sort()
    _tag(tx, batch, lock_token)
    later = tx.row(queries.FIRST_FREE_MESSAGE, (instance_id, lock_token)) or (None, None)
    tx.execute(queries.CARRY_MORE, (*later, tx.now, instance_id))
    if not batch:
        # The clock went back to before the end of a lock that had seemed to be over.
        return None
    return FetchedOrchestration(
        item=rules.continuing_item(instance_id, _deliveries(batch)),
        lock_token=lock_token,
        attempt_count=max(row[2] for row in batch),
        continues=True,
    )


def _tag(tx: Transaction, batch: list[Any], lock_token: str) -> None:
    """Put a batch under a lock; its rows count the attempt already."""
    tx.execute_many(queries.TAG_MESSAGE, [(lock_token, row[2], row[0]) for row in batch])


def _item(
    tx: Transaction,
    instance_id: str,
    instance_key: int | None,
    messages: tuple[Delivery, ...],
    start: tuple[str, str | None, str | None] | None,
) -> OrchestrationItem:
    who: tuple[str | None, str | None, str | None] = (None, None, None)
    execution_id = 1
    history: tuple[HistoryRecord, ...] = ()
    kv_snapshot: dict[str, KvEntry] = {}
    history_error: str | None = None
    if instance_key is not None:
        name, version, execution_id, parent = tx.row(queries.INSTANCE_BY_KEY, (instance_key,))
        who = (name, version, parent)
        if execution_id == 0:
            execution_id = tx.row(queries.LAST_HISTORY_EXECUTION, (instance_key,))[0]
        try:
            history = tuple(read_history(tx, instance_key, execution_id))
            kv_snapshot = {
                key: KvEntry(value=value, updated_at_ms=updated_at)
                for key, value, updated_at in tx.execute(queries.KV_STORE, (instance_key,))
            }
        except UnicodeDecodeError as error:
            history_error = f"history of {instance_id!r} is unreadable: {error}"
    if who[0] is None:
        who = start or (rules.UNKNOWN_NAME, None, None)
    name, version, parent = who
    assert name is not None
    return OrchestrationItem(
        instance_id=instance_id,
        name=name,
        version=version,
        execution_id=execution_id,
        history=history,
        messages=messages,
        kv_snapshot=kv_snapshot,
        parent_instance_id=parent,
        history_error=history_error,
    )


def _deliveries(batch: Sequence[Any]) -> tuple[Delivery, ...]:
    """Of rows in the order of the queue."""
    return tuple(
        [
            Delivery(message_id=row[0], body=row[1], attempt_count=row[2])
            for row in rules.in_due_order(batch, lambda row: row[3:5])
        ]
    )


def parse_version(text: str) -> tuple[int, int, int]:
    major, minor, patch = text.split(".")
    return int(major), int(minor), int(patch)
