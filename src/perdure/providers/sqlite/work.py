"""The worker queue and its sessions, inside a transaction of the writer."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import apsw

from perdure.errors import InvalidValue, UsageError
from perdure.providers import rules, validation
from perdure.providers.records import ActivityIdentity, FetchedWork, TagMode
from perdure.providers.sqlite import messages, work_statements
from perdure.providers.sqlite.connection import restricted
from perdure.providers.sqlite.many_rows import as_list, rows_at_once
from perdure.providers.sqlite.readiness import NoWork
from perdure.providers.sqlite.reading import readable
from perdure.providers.sqlite.transaction import is_text
from perdure.providers.sqlite.verb import Verb
from perdure.providers.sqlite.work_statements import HeldWork, WorkRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perdure.providers.records import (
        OrchestratorMessage,
        SessionFetch,
        TagFilter,
        WorkerMessage,
    )
    from perdure.providers.sqlite.transaction import Transaction

READY: Final = 0
WAITING: Final = 1

_MISFITS_BEFORE_SEEKING: Final = 50
"""After so many items that the worker cannot run, each of its activities is looked up by name."""

_TAKE_MAX: Final = 1_000
"""So many items are fetched at once; a larger fetch takes the rest one by one."""


def insert(tx: Transaction, message: WorkerMessage) -> None:
    insert_many(tx, (message,))


def insert_many(tx: Transaction, messages: Sequence[WorkerMessage]) -> None:
    """Add new items; a claimed item is locked from the start."""
    try:
        if all(map(_is_plain, messages)):
            rows = [_plain_row(tx, message) for message in messages]
            work_statements.INSERT_PLAIN_WORK.execute(tx, rows, (tx.now,) * 3)
        else:
            work_statements.INSERT_WORK.execute(tx, [_row(tx, message) for message in messages])
    except apsw.ConstraintError as error:
        claims = [message.claim for message in messages if message.claim is not None]
        raise InvalidValue(f"a lock token of the claims {claims[:20]} is in use") from error


def _is_plain(message: WorkerMessage) -> bool:
    return message.visible_at_ms is None and message.session_id is None and message.tag is None


def _plain_row(tx: Transaction, message: WorkerMessage) -> tuple[Any, ...]:
    claim, identity = message.claim, message.identity
    if claim is None:
        tx.work_changed = True
        token = locked_until = None
    else:
        token, locked_until = claim.lock_token, tx.now + claim.lock_timeout_ms
    return (
        identity.instance_id,
        identity.execution_id,
        identity.activity_id,
        message.name,
        message.body,
        token,
        locked_until,
    )


def _row(tx: Transaction, message: WorkerMessage) -> tuple[Any, ...]:
    visible_at = tx.now if message.visible_at_ms is None else message.visible_at_ms
    claim, identity = message.claim, message.identity
    state, attempts, token = READY, 0, None
    wake_at = locked_at = locked_until = None
    if claim is None:
        tx.work_changed = True  # a claimed item cannot be fetched by another worker
    if claim is not None:
        state, attempts, token = WAITING, 1, claim.lock_token
        locked_at, locked_until = tx.now, tx.now + claim.lock_timeout_ms
        wake_at = max(locked_until, visible_at)
    elif visible_at > tx.now:
        state, wake_at = WAITING, visible_at
    return (
        None,
        identity.instance_id,
        identity.execution_id,
        identity.activity_id,
        message.name,
        message.body,
        message.session_id,
        message.tag,
        visible_at,
        tx.now,
        attempts,
        state,
        wake_at,
        token,
        locked_at,
        locked_until,
        None,
        message.visible_at_ms,
    )


def fetch(
    tx: Transaction,
    lock_timeout_ms: int,
    session: SessionFetch | None,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> FetchedWork | NoWork:
    _wake(tx)
    found = [
        message_id
        for tag in _tags_to_try(tx, tags)
        if (message_id := _find_plain(tx, tag, activities)) is not None
    ]
    if session is not None:
        found += _find_in_sessions(tx, session, tags, activities)
    if not found:
        return NoWork(_next_due(tx, session))
    return _take(tx, min(found), lock_timeout_ms, session)


def fetch_several(
    tx: Transaction,
    limit: int,
    lock_timeout_ms: int,
    session: SessionFetch | None,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> list[FetchedWork] | NoWork:
    _wake(tx)
    found: list[FetchedWork] = []
    if session is None or tx.row(work_statements.HAS_SESSION_WORK) is None:
        with suppress(UnicodeDecodeError):  # then one by one
            found = _take_several(tx, limit, lock_timeout_ms, tags, activities)
    while len(found) < limit:
        fetched = fetch(tx, lock_timeout_ms, session, tags, activities)
        if isinstance(fetched, NoWork):
            return found or fetched
        found.append(fetched)
    return found


def _wake(tx: Transaction) -> None:
    """Make items ready whose lock or delay has ended."""
    if not tx.work_awake:
        tx.execute(work_statements.WAKE_WORK, (tx.now,))
        tx.work_awake = True


def ack(
    tx: Transaction,
    lock_token: str,
    completion: OrchestratorMessage | None,
    retry: WorkerMessage | None,
) -> None:
    """Remove an item under a live lock, and add its completion or its retry. Errors: LockLost."""
    item = _held(tx, lock_token, "ack_work_item")
    if completion is not None or retry is not None:
        identity = ActivityIdentity(
            instance_id=item.instance_id,
            execution_id=item.execution_id,
            activity_id=item.activity_id,
        )
        validation.check_settlement(identity, completion, retry)
    tx.execute(work_statements.DELETE_WORK, (item.message_id,))
    if item.session_id is not None:
        tx.execute(work_statements.TOUCH_SESSION, (tx.now, item.session_id))
    if completion is not None:
        messages.insert(tx, completion, tx.now)
    if retry is not None:
        insert(tx, retry)


def settle_in_transaction(
    tx: Transaction, lock_token: str, settle: Callable[[apsw.Connection], OrchestratorMessage]
) -> None:
    _held(tx, lock_token, "settle_in_transaction")
    began = tx.connection.total_changes()
    with restricted(tx.connection):
        completion = settle(tx.connection)
    if not tx.connection.in_transaction or tx.connection.total_changes() < began:
        raise UsageError(
            "a transactional activity must neither commit nor roll back: its rows are committed "
            "together with its completion"
        )
    validation.check_message(completion)
    ack(tx, lock_token, completion, None)


def abandon(tx: Transaction, lock_token: str, delay_ms: int | None, ignore_attempt: bool) -> None:
    """Release a lock, live or expired, and make the item ready again. Errors: LockLost."""
    row = tx.held(work_statements.WORK_HELD, lock_token)
    if row is None:
        raise rules.lock_lost("abandon_work_item", lock_token)
    item = HeldWork._make(row)
    attempts = max(item.attempt_count - 1, 0) if ignore_attempt else item.attempt_count
    visible_at = tx.now + (delay_ms or 0)
    state, wake_at = (WAITING, visible_at) if delay_ms else (READY, None)
    values = (state, wake_at, visible_at, attempts, item.message_id)
    tx.execute(work_statements.ABANDON_WORK, values)
    tx.work_changed = True


def renew_many(
    tx: Transaction, lock_tokens: Sequence[str], extend_for_ms: int, heartbeat: str | None
) -> frozenset[str]:
    """Extend the live locks, store what the worker reports, and return the other tokens."""
    given = as_list([token for token in lock_tokens if is_text(token)])
    live = dict(rows_at_once(tx, work_statements.LIVE_WORK_LOCKS, (given, tx.now)))
    values = (as_list(live), tx.now + extend_for_ms, heartbeat)
    tx.execute(work_statements.RENEW_WORK_LOCKS, values)
    if sessions := {session_id for session_id in live.values() if session_id is not None}:
        tx.execute(work_statements.TOUCH_SESSIONS, (as_list(sessions), tx.now))
    lost = frozenset(lock_tokens).difference(live)
    if lost:
        # Waiting fetches know the end of a lost lock only if they look again.
        tx.work_changed = True
    return lost


def renew_sessions(
    tx: Transaction, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
) -> int:
    return sum(
        tx.change(
            work_statements.RENEW_SESSIONS,
            (tx.now + extend_for_ms, owner_id, tx.now, tx.now - idle_timeout_ms),
        )
        for owner_id in set(owner_ids)
    )


def clean_sessions(tx: Transaction) -> int:
    return tx.change(work_statements.CLEAN_SESSIONS, (tx.now,))


ENQUEUE_WORK: Final = Verb("enqueue_for_worker", insert)
FETCH_WORK_ITEMS: Final = Verb("fetch_work_items", fetch_several)
ACK_WORK: Final = Verb("ack_work_item", ack)
SETTLE_IN_TRANSACTION: Final = Verb("settle_in_transaction", settle_in_transaction, alone=True)
ABANDON_WORK: Final = Verb("abandon_work_item", abandon)
RENEW_WORK_ITEMS: Final = Verb("renew_work_item_locks", renew_many)
RENEW_SESSIONS: Final = Verb("renew_session_lock", renew_sessions)
CLEAN_SESSIONS: Final = Verb("cleanup_orphaned_sessions", clean_sessions)


# --- finding items


def _tags_to_try(tx: Transaction, tags: TagFilter) -> Iterable[str | None]:
    match tags.mode:
        case TagMode.DEFAULT_ONLY:
            return (None,)
        case TagMode.TAGS:
            return tags.tags
        case TagMode.DEFAULT_AND:
            return (None, *tags.tags)
        case TagMode.ANY:
            return [None, *(row[0] for row in tx.rows(work_statements.READY_TAGS, ()))]
        case TagMode.NONE:
            return ()


def _find_plain(tx: Transaction, tag: str | None, activities: frozenset[str] | None) -> int | None:
    """Return the oldest ready item with that tag and without a session."""
    for misfits, (message_id, name) in enumerate(
        tx.execute(work_statements.FIND_WORK, (tag, tx.now))
    ):
        if activities is None or name in activities:
            return int(message_id)
        if misfits == _MISFITS_BEFORE_SEEKING:
            found = [
                tx.row(work_statements.FIND_WORK_BY_NAME, (tag, each, tx.now))
                for each in activities
            ]
            return min((row[0] for row in found if row is not None), default=None)
    return None


def _find_in_sessions(
    tx: Transaction,
    session: SessionFetch,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> list[int]:
    """Return the oldest item that fits of each session that this owner has or may claim."""
    found: list[int] = []
    for session_id, owner_id in tx.rows(work_statements.QUEUED_SESSIONS, (tx.now,)):
        is_open = owner_id == session.owner_id or (owner_id is None and not session.only_owned)
        if is_open:
            for message_id, name, tag in tx.execute(
                work_statements.FIND_SESSION_WORK, (session_id, tx.now)
            ):
                if tags.matches(tag) and (activities is None or name in activities):
                    found.append(message_id)
                    break
    return found


def _take(
    tx: Transaction, message_id: int, lock_timeout_ms: int, session: SessionFetch | None
) -> FetchedWork:
    """Lock an item; if it has a session, lock that for its owner too."""
    token = tx.new_lock_token()
    try:
        row = tx.row(work_statements.WORK_ITEM, (message_id,))
    except UnicodeDecodeError:
        (row,) = readable(tx, work_statements.WORK_ITEM, (message_id,))
    item = WorkRow._make(row)
    values = (tx.now + lock_timeout_ms, token, item.attempt_count, tx.now, message_id)
    tx.execute(work_statements.TAKE_WORK, values)
    if item.session_id is not None and session is not None:
        session_lock = (item.session_id, session.owner_id, tx.now + session.lock_timeout_ms, tx.now)
        tx.execute(work_statements.CLAIM_SESSION, session_lock)
    return _fetched(item, token)


def _take_several(
    tx: Transaction,
    limit: int,
    lock_timeout_ms: int,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> list[FetchedWork]:
    """Lock the oldest ready items without a session, up to the first that is not plain.

    That is one that the worker cannot run, or one with a big text.
    """
    limit = min(limit, _TAKE_MAX)
    rows: list[Any] = []
    for tag in _tags_to_try(tx, tags):
        rows += rows_at_once(tx, work_statements.FIND_WORK_ITEMS, (tag, tx.now, limit))
    rows.sort()
    items: list[WorkRow] = []
    for item in map(WorkRow._make, rows[:limit]):
        if item.body is None or (activities is not None and item.name not in activities):
            break
        items.append(item)
    tokens = tx.new_lock_tokens(len(items))
    locked_until = tx.now + lock_timeout_ms
    work_statements.TAKE_WORK_ITEMS.execute(
        tx,
        [(item.message_id, token) for item, token in zip(items, tokens, strict=True)],
        (locked_until, locked_until, tx.now),
    )
    return [_fetched(item, token) for item, token in zip(items, tokens, strict=True)]


def _fetched(item: WorkRow, token: str) -> FetchedWork:
    assert item.body is not None
    return FetchedWork(
        identity=ActivityIdentity(
            instance_id=item.instance_id,
            execution_id=item.execution_id,
            activity_id=item.activity_id,
        ),
        name=item.name,
        body=item.body,
        lock_token=token,
        attempt_count=item.attempt_count,
        session_id=item.session_id,
        tag=item.tag,
        heartbeat=item.heartbeat,
    )


def _next_due(tx: Transaction, session: SessionFetch | None) -> int | None:
    dues = [tx.row(work_statements.NEXT_WORK_WAKE, ())[0]]
    if session is not None:
        dues.append(tx.row(work_statements.NEXT_SESSION_END, (tx.now,))[0])
    return min((due for due in dues if due is not None), default=None)


def find_held(tx: Transaction, tokens: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return, by token, message id and instance id of each item that one of the tokens holds."""
    given = as_list([token for token in tokens if is_text(token)])
    rows = rows_at_once(tx, work_statements.HELD_WORK_ITEMS, (given, tx.now))
    return {token: (message_id, instance_id) for token, message_id, instance_id in rows}


def _held(tx: Transaction, lock_token: str, operation: str) -> HeldWork:
    """Return the item under a live lock. Errors: LockLost."""
    row = tx.held(work_statements.WORK_HELD, lock_token)
    if row is None or (item := HeldWork._make(row)).locked_until <= tx.now:
        raise rules.lock_lost(operation, lock_token)
    return item
