"""The worker queue and its sessions, inside a transaction of the writer."""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import apsw

from perdure.errors import InvalidValue, UsageError
from perdure.providers._shared import refusals, rules
from perdure.providers.items import ActivityIdentity, FetchedWork, TagMode
from perdure.providers.sqlite import orchestrator_queue, work_queries
from perdure.providers.sqlite.lending import lent
from perdure.providers.sqlite.many_rows import as_list, rows_at_once
from perdure.providers.sqlite.nothing import Nothing
from perdure.providers.sqlite.reading import readable
from perdure.providers.sqlite.tokens import is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perdure.providers.items import (
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
"""So many items are looked for at once; whoever wants more gets the rest one by one."""


def insert(tx: Transaction, message: WorkerMessage) -> None:
    insert_many(tx, (message,))


def insert_many(tx: Transaction, messages: Sequence[WorkerMessage]) -> None:
    """Add fresh items, locked already if they are claimed."""
    try:
        if all(map(_is_plain, messages)):
            rows = [_plain_row(tx, message) for message in messages]
            work_queries.INSERT_PLAIN_WORK.execute(tx, rows, (tx.now, tx.now))
        else:
            work_queries.INSERT_WORK.execute(tx, [_row(tx, message) for message in messages])
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
    wake_at = locked_until = None
    if claim is None:
        tx.work_changed = True  # a claimed item is nobody else's business
    if claim is not None:
        state, attempts, token = WAITING, 1, claim.lock_token
        locked_until = tx.now + claim.lock_timeout_ms
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
) -> FetchedWork | Nothing:
    _wake(tx)
    found = [
        message_id
        for tag in _tags_to_try(tx, tags)
        if (message_id := _find_plain(tx, tag, activities)) is not None
    ]
    if session is not None:
        found += _find_in_sessions(tx, session, tags, activities)
    if not found:
        return Nothing(_next_due(tx, session))
    return _take(tx, min(found), lock_timeout_ms, session)


def fetch_several(
    tx: Transaction,
    limit: int,
    lock_timeout_ms: int,
    session: SessionFetch | None,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> list[FetchedWork] | Nothing:
    _wake(tx)
    found: list[FetchedWork] = []
    if session is None or tx.row(work_queries.HAS_SESSION_WORK) is None:
        with suppress(UnicodeDecodeError):  # then one by one
            found = _take_several(tx, limit, lock_timeout_ms, tags, activities)
    while len(found) < limit:
        fetched = fetch(tx, lock_timeout_ms, session, tags, activities)
        if isinstance(fetched, Nothing):
            return found or fetched
        found.append(fetched)
    return found


def _wake(tx: Transaction) -> None:
    """Items whose time has come are ready from now on."""
    if not tx.work_awake:
        tx.execute(work_queries.WAKE_WORK, (tx.now,))
        tx.work_awake = True


def ack(
    tx: Transaction,
    lock_token: str,
    completion: OrchestratorMessage | None,
    retry: WorkerMessage | None,
) -> None:
    item = _held(tx, lock_token, "ack_work_item")
    message_id, instance_id, execution_id, activity_id, session_id, *_ = item
    if completion is not None or retry is not None:
        identity = ActivityIdentity(
            instance_id=instance_id, execution_id=execution_id, activity_id=activity_id
        )
        refusals.check_settlement(identity, completion, retry)
    tx.execute(work_queries.DELETE_WORK, (message_id,))
    if session_id is not None:
        tx.execute(work_queries.TOUCH_SESSION, (tx.now, session_id))
    if completion is not None:
        orchestrator_queue.insert(tx, completion, tx.now)
    if retry is not None:
        insert(tx, retry)


def settle_in_transaction(
    tx: Transaction, lock_token: str, settle: Callable[[apsw.Connection], OrchestratorMessage]
) -> None:
    _held(tx, lock_token, "settle_in_transaction")
    began = tx.connection.total_changes()
    with lent(tx.connection):
        completion = settle(tx.connection)
    if not tx.connection.in_transaction or tx.connection.total_changes() < began:
        raise UsageError(
            "a transactional activity must neither commit nor roll back: its rows are committed "
            "together with its completion"
        )
    refusals.check_message(completion)
    ack(tx, lock_token, completion, None)


def abandon(tx: Transaction, lock_token: str, delay_ms: int | None, ignore_attempt: bool) -> None:
    item = tx.held(work_queries.WORK_HELD, lock_token)
    if item is None:
        raise rules.lock_lost("abandon_work_item", lock_token)
    message_id, *_, attempts = item
    if ignore_attempt:
        attempts = max(attempts - 1, 0)
    visible_at = tx.now + (delay_ms or 0)
    state, wake_at = (WAITING, visible_at) if delay_ms else (READY, None)
    tx.execute(work_queries.ABANDON_WORK, (state, wake_at, visible_at, attempts, message_id))
    tx.work_changed = True


def renew(tx: Transaction, lock_token: str, extend_for_ms: int, heartbeat: str | None) -> None:
    message_id, _, _, _, session_id, *_ = _held(tx, lock_token, "renew_work_item_lock")
    tx.execute(work_queries.RENEW_WORK, (tx.now + extend_for_ms, heartbeat, message_id))
    if session_id is not None:
        tx.execute(work_queries.TOUCH_SESSION, (tx.now, session_id))


def renew_many(tx: Transaction, lock_tokens: Sequence[str], extend_for_ms: int) -> frozenset[str]:
    given = as_list([token for token in lock_tokens if is_text(token)])
    live = dict(rows_at_once(tx, work_queries.LIVE_WORK_LOCKS, (given, tx.now)))
    tx.execute(work_queries.RENEW_WORK_LOCKS, (as_list(live), tx.now + extend_for_ms))
    if sessions := {session_id for session_id in live.values() if session_id is not None}:
        tx.execute(work_queries.TOUCH_SESSIONS, (as_list(sessions), tx.now))
    lost = frozenset(lock_tokens).difference(live)
    if lost:
        # Nobody here waits for the end of a lock that is renewed: whoever fetches looks again.
        tx.work_changed = True
    return lost


def renew_sessions(
    tx: Transaction, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
) -> int:
    return sum(
        tx.change(
            work_queries.RENEW_SESSIONS,
            (tx.now + extend_for_ms, owner_id, tx.now, tx.now - idle_timeout_ms),
        )
        for owner_id in set(owner_ids)
    )


def clean_sessions(tx: Transaction) -> int:
    return tx.change(work_queries.CLEAN_SESSIONS, (tx.now,))


# --- looking


def _tags_to_try(tx: Transaction, tags: TagFilter) -> Iterable[str | None]:
    match tags.mode:
        case TagMode.DEFAULT_ONLY:
            return (None,)
        case TagMode.TAGS:
            return tags.tags
        case TagMode.DEFAULT_AND:
            return (None, *tags.tags)
        case TagMode.ANY:
            return [None, *(row[0] for row in tx.rows(work_queries.READY_TAGS, ()))]
        case TagMode.NONE:
            return ()


def _find_plain(tx: Transaction, tag: str | None, activities: frozenset[str] | None) -> int | None:
    """The oldest ready item with that tag, outside of sessions."""
    for misfits, (message_id, name) in enumerate(tx.execute(work_queries.FIND_WORK, (tag, tx.now))):
        if activities is None or name in activities:
            return int(message_id)
        if misfits == _MISFITS_BEFORE_SEEKING:
            found = [
                tx.row(work_queries.FIND_WORK_BY_NAME, (tag, each, tx.now)) for each in activities
            ]
            return min((row[0] for row in found if row is not None), default=None)
    return None


def _find_in_sessions(
    tx: Transaction,
    session: SessionFetch,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> list[int]:
    """The oldest fitting item of each session that this owner has or may claim."""
    found: list[int] = []
    for session_id, owner_id in tx.rows(work_queries.QUEUED_SESSIONS, (tx.now,)):
        is_open = owner_id == session.owner_id or (owner_id is None and not session.only_owned)
        if is_open:
            for message_id, name, tag in tx.execute(
                work_queries.FIND_SESSION_WORK, (session_id, tx.now)
            ):
                if tags.matches(tag) and (activities is None or name in activities):
                    found.append(message_id)
                    break
    return found


def _take(
    tx: Transaction, message_id: int, lock_timeout_ms: int, session: SessionFetch | None
) -> FetchedWork:
    token = tx.new_lock_token()
    try:
        row = tx.row(work_queries.WORK_ITEM, (message_id,))
    except UnicodeDecodeError:
        (row,) = readable(tx, work_queries.WORK_ITEM, (message_id,))
    attempts, session_id = row[5:7]
    locked_until = tx.now + lock_timeout_ms
    tx.execute(work_queries.TAKE_WORK, (locked_until, token, attempts, message_id))
    if session_id is not None and session is not None:
        lease = tx.now + session.lock_timeout_ms
        tx.execute(work_queries.CLAIM_SESSION, (session_id, session.owner_id, lease, tx.now))
    return _fetched(row, token)


def _take_several(
    tx: Transaction,
    limit: int,
    lock_timeout_ms: int,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> list[FetchedWork]:
    """The oldest ready items outside of sessions, up to the first that is not plain.

    That is one that the worker cannot run, or with a big text.
    """
    limit = min(limit, _TAKE_MAX)
    rows: list[Any] = []
    for tag in _tags_to_try(tx, tags):
        rows += rows_at_once(tx, work_queries.FIND_WORK_ITEMS, (tag, tx.now, limit))
    rows.sort()
    del rows[limit:]
    rows = list(
        takewhile(
            lambda row: row[5] is not None and (activities is None or row[4] in activities), rows
        )
    )
    tokens = tx.new_lock_tokens(len(rows))
    locked_until = tx.now + lock_timeout_ms
    work_queries.TAKE_WORK_ITEMS.execute(
        tx,
        [(row[0], token) for row, token in zip(rows, tokens, strict=True)],
        (locked_until, locked_until),
    )
    return [_fetched(row[1:], token) for row, token in zip(rows, tokens, strict=True)]


def _fetched(row: Any, token: str) -> FetchedWork:
    instance_id, execution_id, activity_id, name, body, attempts, session_id, tag, heartbeat = row
    return FetchedWork(
        identity=ActivityIdentity(
            instance_id=instance_id, execution_id=execution_id, activity_id=activity_id
        ),
        name=name,
        body=body,
        lock_token=token,
        attempt_count=attempts,
        session_id=session_id,
        tag=tag,
        heartbeat=heartbeat,
    )


def _next_due(tx: Transaction, session: SessionFetch | None) -> int | None:
    dues = [tx.row(work_queries.NEXT_WORK_WAKE, ())[0]]
    if session is not None:
        dues.append(tx.row(work_queries.NEXT_SESSION_END, (tx.now,))[0])
    return min((due for due in dues if due is not None), default=None)


def find_held(tx: Transaction, tokens: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Message id and instance id of each item that one of the tokens holds, by that token."""
    given = as_list([token for token in tokens if is_text(token)])
    rows = rows_at_once(tx, work_queries.HELD_WORK_ITEMS, (given, tx.now))
    return {token: (message_id, instance_id) for token, message_id, instance_id in rows}


def _held(tx: Transaction, lock_token: str, operation: str) -> Any:
    item = tx.held(work_queries.WORK_HELD, lock_token)
    if item is None or item[5] <= tx.now:
        raise rules.lock_lost(operation, lock_token)
    return item
