"""Fetching turns, giving them back and renewing their locks, inside a transaction.

``commit`` commits them.
"""

from __future__ import annotations

from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from perdure import limits
from perdure.arguments import INTEGER_MAX
from perdure.errors import CorruptData
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import (
    Delivery,
    FetchedOrchestration,
    HistoryRecord,
    KvEntry,
    OrchestrationItem,
)
from perdure.providers.sqlite import instances, readiness, reading, statements
from perdure.providers.sqlite.instances import parse_version
from perdure.providers.sqlite.readiness import NoWork
from perdure.providers.sqlite.statements import Candidate, HeldLock, MessageRow, OnlyStart
from perdure.providers.sqlite.transaction import (
    PreconditionChanged,
    Verb,
    as_list,
    is_text,
    rows_at_once,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from perdure.model.failures import Block
    from perdure.providers.records import OrchestrationFilter
    from perdure.providers.sqlite.transaction import Transaction

_Identity: TypeAlias = tuple[str, str | None, str | None]
"""Name, version and parent."""

_ABANDON: Final = "abandon_orchestration_item"

_MISFITS_BEFORE_SEEKING: Final = 50
"""After so many instances that do not fit the filter, each handler is looked up by its name."""
_ROWS_ONE_BY_ONE: Final = 8
"""So many messages are read one by one, which is faster for few."""
_READY_MAX: Final = 1_000
"""So many instances are fetched at once; further fetches are run in another round."""


def fetch(
    tx: Transaction, lock_timeout_ms: int, wanted: OrchestrationFilter | None, owner: str | None
) -> FetchedOrchestration | NoWork:
    """Lock the next instance that fits, or hand new messages to the owner of a kept lock."""
    readiness.wake(tx)
    ready = _find_ready(tx, wanted)
    while owner is not None:
        kept = _first_fit(tx, wanted, statements.FIND_KEPT, owner)
        if kept is None or (ready is not None and ready.order < kept.order):
            break
        if (continued := _continue(tx, kept)) is not None:
            return continued
    while ready is not None:
        if (fetched := _lock(tx, ready, lock_timeout_ms, owner)) is not None:
            return fetched
        ready = _find_ready(tx, wanted)
    return NoWork(readiness.next_due(tx, owner))


def fetch_many(
    tx: Transaction, fetches: Sequence[tuple[int, OrchestrationFilter | None, str | None]]
) -> Sequence[FetchedOrchestration | NoWork]:
    """Run fetches with equal arguments.

    Return no answer while messages wait for a kept lock of the owner: they may come first.
    """
    lock_timeout_ms, wanted, owner = fetches[0]
    alike = sum(1 for _ in takewhile(fetches[0].__eq__, fetches))
    readiness.wake(tx)
    if owner is not None and tx.row(statements.FIND_KEPT, (tx.now, owner)) is not None:
        return ()
    limit = min(alike, _READY_MAX)
    rows = rows_at_once(tx, statements.FIND_MANY_READY, (tx.now, limit))
    split = len(Candidate._fields)
    found = [(Candidate._make(row[:split]), OnlyStart._make(row[split:])) for row in rows]
    found.sort(key=lambda each: each[0].order)
    fitting = [each for each in found if wanted is None or _fits(tx, each[0], wanted)]
    starts = [each for each in fitting if each[1].body is not None]
    locked_starts = iter(_lock_starts(tx, starts, lock_timeout_ms, owner))
    answers: list[FetchedOrchestration | NoWork] = []
    for candidate, start in fitting:
        if start.body is not None:
            answers.append(next(locked_starts))
        elif (fetched := _lock(tx, candidate, lock_timeout_ms, owner)) is not None:
            answers.append(fetched)
        else:
            raise PreconditionChanged
    if len(found) == limit:
        return answers
    return answers + [NoWork(readiness.next_due(tx, owner))] * (alike - len(answers))


def abandon(
    tx: Transaction,
    lock_token: str,
    delay_ms: int | None,
    block: Block | None,
    ignore_attempt: bool,
) -> None:
    """Release a lock, live or expired, without a turn. Errors: LockLost."""
    row = tx.held(statements.LOCK_HELD, lock_token)
    if row is None:
        raise rules.lock_lost(_ABANDON, lock_token)
    lock = HeldLock._make(row)
    if ignore_attempt:
        carried = (lock.instance_id, lock.carried_until, lock_token)
        tx.write(statements.FORGIVE_CARRIED, carried)
    tx.write(statements.DROP_LOCK, (lock.instance_id,))
    not_before = lock.not_before if delay_ms is None else tx.now + delay_ms
    block_text = lock.block
    if block is not None:
        block_text = msgspec.json.encode(block).decode()
        tx.changed_instances.append(lock.instance_id)
        if lock.instance_key is not None:
            show_status(tx, lock.instance_key, suspended=bool(lock.suspended), blocked=True)
    tx.write(statements.SET_HOLDS, (lock.suspended, not_before, block_text, lock.instance_id))
    readiness.refresh(tx, lock.instance_id)


def give_back(tx: Transaction, fetched: FetchedOrchestration) -> None:
    """Undo a fetch whose caller has gone away; a kept lock stays, without the new messages."""
    if not fetched.continues:
        abandon(tx, fetched.lock_token, None, None, ignore_attempt=True)
        return
    tx.execute_many(
        statements.UNTAG_MESSAGE,
        [(each.message_id, fetched.lock_token) for each in fetched.item.messages],
    )
    readiness.refresh(tx, fetched.item.instance_id)


def renew_many(tx: Transaction, lock_tokens: Sequence[str], extend_for_ms: int) -> frozenset[str]:
    """Extend the live locks and return the tokens of the others."""
    given = as_list([token for token in lock_tokens if is_text(token)])
    live = dict(rows_at_once(tx, statements.LIVE_LOCKS, (given, tx.now)))
    locked_until = tx.now + extend_for_ms
    tx.write(statements.RENEW_LOCKS, (as_list(live), locked_until))
    lost = frozenset(lock_tokens).difference(live)
    tx.turns_changed |= bool(lost) or locked_until < max(live.values(), default=0)
    return lost


def take_over(
    tx: Transaction, instance_id: str, instance_key: int | None, lock_timeout_ms: int
) -> FetchedOrchestration:
    """Lock an existing instance without any message, also if it is locked."""
    if tx.row(statements.READINESS, (instance_id,)) is None:
        tx.write(statements.INSERT_BARE_LOCK, (instance_id, instance_key))
    token = tx.new_lock_token()
    locked_until = tx.now + lock_timeout_ms
    tx.write(
        statements.TAKE_LOCK,
        (locked_until, token, None, None, None, None, 0, tx.now, instance_id),
    )
    readiness.refresh(tx, instance_id)
    start = tx.row(statements.VISIBLE_START, (instance_id, INTEGER_MAX))  # visible or not
    item = _item(tx, instance_id, instance_key, (), start)
    return FetchedOrchestration(item=item, lock_token=token, attempt_count=0)


def show_status(tx: Transaction, instance_key: int, *, suspended: bool, blocked: bool) -> None:
    """Write the status that people see after a hold has changed."""
    row = tx.row(instances.CURRENT_STATUS, (instance_key,))
    if row is not None:
        shown = rules.shown_status(Status(row[0]), suspended=suspended, blocked=blocked)
        tx.write(instances.SET_STATUS, (shown, instance_key))


FETCH_TURN: Final = Verb("fetch_orchestration_item", fetch, run_many=fetch_many, lasts=False)
ABANDON_TURN: Final = Verb(_ABANDON, abandon)
GIVE_BACK_TURN: Final = Verb(_ABANDON, give_back)
RENEW_TURNS: Final = Verb("renew_orchestration_item_locks", renew_many, lasts=False)


# --- fetching


def _find_ready(tx: Transaction, wanted: OrchestrationFilter | None) -> Candidate | None:
    """Return the ready instance with the oldest message that fits the filter."""
    for misfits, row in enumerate(tx.execute(statements.FIND_READY, (tx.now,))):
        candidate = Candidate._make(row)
        if wanted is None or _fits(tx, candidate, wanted):
            return candidate
        if misfits == _MISFITS_BEFORE_SEEKING and wanted.handlers is not None:
            return _seek_ready(tx, wanted)
    return None


def _seek_ready(tx: Transaction, wanted: OrchestrationFilter) -> Candidate | None:
    """Find the same as ``_find_ready``, by the names that fit."""
    names: set[str | None] = {name for name, _ in wanted.handlers or ()}
    found = [
        candidate
        for name in names | {None}
        if (candidate := _first_fit(tx, wanted, statements.FIND_READY_BY_NAME, name)) is not None
    ]
    return min(found, key=lambda candidate: candidate.order, default=None)


def _first_fit(
    tx: Transaction, wanted: OrchestrationFilter | None, statement: str, value: str | None
) -> Candidate | None:
    for row in tx.execute(statement, (tx.now, value)):
        candidate = Candidate._make(row)
        if wanted is None or _fits(tx, candidate, wanted):
            return candidate
    return None


def _fits(tx: Transaction, candidate: Candidate, wanted: OrchestrationFilter) -> bool:
    if not rules.fits_framework(wanted, parse_version(candidate.framework_version)):
        return False
    name, version = candidate.name, candidate.version
    if name is None:
        start = tx.row(statements.VISIBLE_START, (candidate.instance_id, tx.now))
        name, version = (rules.UNKNOWN_NAME, None) if start is None else start[:2]
    return rules.fits_handlers(wanted, name, version)


def _lock(
    tx: Transaction, candidate: Candidate, lock_timeout_ms: int, owner: str | None
) -> FetchedOrchestration | None:
    """Lock a ready instance with a batch of messages; None if it is not ready after all."""
    instance_id, instance_key = candidate.instance_id, candidate.instance_key
    batch = _batch(tx, instance_id, "")
    found = batch.messages
    start = _first_start(found)
    if instance_key is None and start is None:
        # The clock went back to before the time of its start.
        readiness.refresh(tx, instance_id)
        return None
    token = tx.new_lock_token()
    _tag(tx, found, token)
    locked_until = tx.now + lock_timeout_ms
    later = batch.next_message(tx, instance_id, token)
    values = (locked_until, token, owner, tx.now, *later, batch.is_cut, tx.now, instance_id)
    tx.write(statements.TAKE_LOCK, values)
    return FetchedOrchestration(
        item=_item(tx, instance_id, instance_key, _deliveries(found), start),
        lock_token=token,
        attempt_count=max(message.attempt_count for message in found),
    )


def _lock_starts(
    tx: Transaction,
    starts: Sequence[tuple[Candidate, OnlyStart]],
    lock_timeout_ms: int,
    owner: str | None,
) -> list[FetchedOrchestration]:
    """Lock instances of which there is nothing but a start."""
    tokens = tx.new_lock_tokens(len(starts))
    taken = [(candidate, token) for (candidate, _), token in zip(starts, tokens, strict=True)]
    until = tx.now + lock_timeout_ms
    tagged = statements.TAG_MESSAGES.count(
        tx, [(candidate.ready_id, token) for candidate, token in taken]
    )
    locked = statements.TAKE_LOCKS.count(
        tx,
        [(candidate.instance_id, token) for candidate, token in taken],
        (until, until, owner, tx.now, tx.now),
    )
    if not tagged == locked == len(starts):
        raise PreconditionChanged
    return [_fetched_start(*each, token) for each, token in zip(starts, tokens, strict=True)]


def _fetched_start(candidate: Candidate, start: OnlyStart, token: str) -> FetchedOrchestration:
    assert candidate.name is not None
    assert start.body is not None
    assert start.attempt_count is not None
    delivery = Delivery(
        message_id=candidate.ready_id, body=start.body, attempt_count=start.attempt_count
    )
    item = OrchestrationItem(
        instance_id=candidate.instance_id,
        name=candidate.name,
        version=candidate.version,
        execution_id=1,
        history=(),
        messages=(delivery,),
        kv_snapshot={},
        parent_instance_id=start.parent_instance_id,
    )
    return FetchedOrchestration(item=item, lock_token=token, attempt_count=start.attempt_count)


class _Batch(NamedTuple):
    """The messages of a fetch, in the order of the queue."""

    messages: list[MessageRow]
    is_cut: bool
    """More messages are visible."""
    later: tuple[int, int] | tuple[None, None]
    """Time and id of the first message that is not visible, unless the batch is cut."""

    def next_message(self, tx: Transaction, instance_id: str, lock_token: str) -> tuple[Any, Any]:
        """Return time and id of the message that makes the instance ready under the new lock.

        If the batch is cut, mail has to wait for the commit of the turn.
        """
        if not self.is_cut:
            return self.later
        return tx.row(statements.FIRST_WITHOUT_MAIL, (instance_id, lock_token)) or (None, None)


def _batch(tx: Transaction, instance_id: str, lock_token: str) -> _Batch:
    """Choose the oldest messages, as many as fit beside those that have the token already.

    If that leaves some behind, completions, timers, cancellations and starts overtake mail, and
    the first start is part of the batch always: without it the instance could not begin.
    """
    bindings = (instance_id, lock_token)
    batch = _first_messages(tx, statements.MESSAGES_BY_TIME, bindings)
    if not batch.is_cut:
        batch.messages.sort()
        return batch
    found = {message.message_id: message for message in batch.messages}
    since = batch.messages[-1].visible_at if batch.messages else 0
    behind = _first_messages(tx, statements.WITHOUT_MAIL, (*bindings, since), found)
    found.update((message.message_id, message) for message in behind.messages)
    if not any(message.start_name is not None for message in found.values()):
        for start in map(MessageRow._make, tx.rows(statements.STARTS, bindings)):
            if start.visible_at <= tx.now and not start.is_carried:
                found[start.message_id] = start
                break
    return _Batch(sorted(found.values()), True, (None, None))


def _first_messages(
    tx: Transaction, statement: str, bindings: tuple[Any, ...], known: Container[int] = ()
) -> _Batch:
    """Return the first visible messages that fit; at least one if there is room for any."""
    found: list[MessageRow] = []
    messages, size = limits.BATCH_MESSAGES_MAX, limits.BATCH_BYTES_MAX
    for row in _rows(tx, statement, bindings):
        message = MessageRow._make(row)
        if message.message_id in known:
            continue
        if message.visible_at > tx.now:
            return _Batch(found, False, (message.visible_at, message.message_id))
        if message.is_carried:
            messages, size = messages - 1, size - message.size
            continue
        if messages <= 0 or (message.size > size and size < limits.BATCH_BYTES_MAX):
            return _Batch(found, True, (None, None))
        messages, size = messages - 1, size - message.size
        found.append(message)
    return _Batch(found, False, (None, None))


def _rows(tx: Transaction, statement: str, bindings: tuple[Any, ...]) -> Iterator[Any]:
    """Yield messages, a damaged one with an escape for each byte that is not text.

    The first come one by one, as most instances have few; the others together.
    """
    count = 0
    try:
        for row in tx.execute(statement, bindings):
            yield row
            count += 1
            if count == _ROWS_ONE_BY_ONE:
                break
        is_last = count < _ROWS_ONE_BY_ONE
        while not is_last:
            rows = rows_at_once(tx, statements.gathered(statement, count), bindings)
            is_last = len(rows) < statements.GATHERED_AT_MOST
            rows.sort(key=itemgetter(3, 0))
            for message_id, body, *more in rows:
                text = tx.row(statements.BODY, (message_id,))[0] if body is None else body
                yield message_id, text, *more
                count += 1
    except UnicodeDecodeError:
        yield from reading.readable(tx, statement, bindings)[count:]


def _first_start(found: Sequence[MessageRow]) -> _Identity | None:
    """Return name, version and parent of the first start among the messages."""
    for message in found:
        if message.start_name is not None:
            return message.start_name, message.start_version, message.start_parent_id
    return None


def _continue(tx: Transaction, kept: Candidate) -> FetchedOrchestration | None:
    """Hand the new messages of an instance to the owner that keeps its lock."""
    instance_id, token = kept.instance_id, kept.lock_token
    assert token is not None
    batch = _batch(tx, instance_id, token)
    found = batch.messages
    _tag(tx, found, token)
    later = batch.next_message(tx, instance_id, token)
    tx.write(statements.CARRY_MORE, (*later, tx.now, batch.is_cut, instance_id))
    if not found:
        # The clock went back to before the end of a lock that had seemed to be over.
        return None
    return FetchedOrchestration(
        item=rules.continuing_item(instance_id, _deliveries(found)),
        lock_token=token,
        attempt_count=max(message.attempt_count for message in found),
        continues=True,
    )


def _tag(tx: Transaction, found: Sequence[MessageRow], lock_token: str) -> None:
    """Put messages under a lock and count the attempt."""
    rows = [(message.message_id, lock_token) for message in found]
    statements.TAG_MESSAGES.execute(tx, rows)


def _item(
    tx: Transaction,
    instance_id: str,
    instance_key: int | None,
    messages: tuple[Delivery, ...],
    start: _Identity | None,
) -> OrchestrationItem:
    """Read what a turn starts from."""
    who: tuple[str | None, str | None, str | None] = (None, None, None)
    execution_id = 1
    history: list[HistoryRecord] = []
    kv_snapshot: dict[str, KvEntry] = {}
    history_error: str | None = None
    if instance_key is not None:
        name, version, execution_id, parent = tx.row(instances.INSTANCE_BY_KEY, (instance_key,))
        who = (name, version, parent)
        if execution_id == 0:
            execution_id = tx.row(instances.LAST_HISTORY_EXECUTION, (instance_key,))[0]
        try:
            history = reading.events(tx, instance_key, execution_id)
            kv_snapshot = reading.kv_store(tx, instance_key)
        except (UnicodeDecodeError, CorruptData) as error:
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
        history=tuple(history),
        messages=messages,
        kv_snapshot=kv_snapshot,
        parent_instance_id=parent,
        history_error=history_error,
    )


def _deliveries(found: Sequence[MessageRow]) -> tuple[Delivery, ...]:
    """Return messages, given in the order of the queue, as they came due."""
    return tuple(
        [
            Delivery(
                message_id=message.message_id,
                body=message.body,
                attempt_count=message.attempt_count,
            )
            for message in rules.in_due_order(
                found, lambda message: (message.visible_at, message.enqueued_at)
            )
        ]
    )
