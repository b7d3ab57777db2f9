"""The worker queue and its sessions, inside a transaction of the writer."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import apsw

from perdure.errors import InvalidValue, UsageError
from perdure.providers import rules, validation
from perdure.providers.records import ActivityIdentity, FetchedWork, TagMode
from perdure.providers.sqlite import messages
from perdure.providers.sqlite.connection import is_refused_change, restricted
from perdure.providers.sqlite.readiness import READY, WAITING, NoWork
from perdure.providers.sqlite.reading import readable
from perdure.providers.sqlite.transaction import (
    ForKeys,
    ManyRows,
    Verb,
    as_list,
    is_text,
    rows_at_once,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perdure.providers.records import (
        OrchestratorMessage,
        SessionFetch,
        TagFilter,
        WorkerMessage,
    )
    from perdure.providers.sqlite.transaction import Transaction

_MISFITS_BEFORE_SEEKING: Final = 50
"""After so many items that the worker cannot run, each of its activities is looked up by name."""

_TAKE_MAX: Final = 1_000
"""So many items are fetched at once; a larger fetch takes the rest one by one."""

# --- worker queue

INSERT_WORK: Final = ManyRows(
    """
INSERT OR FAIL INTO worker_queue
    (instance_id, execution_id, activity_id, name, body, session_id, tag, visible_at, enqueued_at,
     attempt_count, state, wake_at, lock_token, locked_at, locked_until, heartbeat,
     asked_visible_at)
""",
    17,
)

_INSERT_PLAIN_WORK: Final = ManyRows(
    """
WITH added (instance_id, execution_id, activity_id, name, body, lock_token, locked_until) AS (
""",
    7,
    """)
INSERT OR FAIL INTO worker_queue
    (instance_id, execution_id, activity_id, name, body, lock_token, locked_until, wake_at,
     attempt_count, state, locked_at, visible_at, enqueued_at)
SELECT *, locked_until, locked_until IS NOT NULL, locked_until IS NOT NULL,
       CASE WHEN locked_until IS NOT NULL THEN ? END, ?, ?
FROM added
""",
)
"""Inserts items that are visible at once and have no session and no tag: most of them.

With 17 values for each item instead of 7, preparing and binding cost 5 % of a burst of workflows.
"""

_WAKE_WORK: Final = "UPDATE worker_queue SET state = 0, wake_at = NULL WHERE wake_at <= ?"

_READY: Final = """
state = 0 AND visible_at <= ?1 AND (locked_until IS NULL OR locked_until <= ?1)
"""

_FIND_WORK: Final = f"""
SELECT message_id, name FROM worker_queue
WHERE {_READY} AND session_id IS NULL AND tag IS ?2 ORDER BY message_id
"""  # noqa: S608 - of constants, as in those that follow


class WorkRow(NamedTuple):
    """A work item as a fetch reads it. Rows sort in the order of the queue."""

    message_id: int
    instance_id: str
    execution_id: int
    activity_id: int
    name: str
    body: str | None
    """None: the text is too big for a list of rows."""
    attempt_count: int
    """Includes the attempt that hands it out."""
    session_id: str | None
    tag: str | None
    heartbeat: str | None


_FIND_WORK_ITEMS: Final = f"""
SELECT json_group_array(json_array(
    message_id, instance_id, execution_id, activity_id, name,
    CASE WHEN octet_length(body) + coalesce(octet_length(heartbeat), 0) <= 65536 THEN body END,
    attempt_count + 1, session_id, tag,
    CASE WHEN octet_length(heartbeat) <= 65536 THEN heartbeat END
))
FROM (SELECT * FROM worker_queue
      WHERE {_READY} AND session_id IS NULL AND tag IS ?2 ORDER BY message_id LIMIT ?3)
"""  # noqa: S608
"""Rows of WorkRow. Big texts are left out: all of them in one list might be longer than SQLite
allows."""

_HAS_SESSION_WORK: Final = "SELECT 1 FROM worker_queue WHERE session_id IS NOT NULL LIMIT 1"

_FIND_WORK_BY_NAME: Final = f"""
SELECT message_id FROM worker_queue
WHERE {_READY} AND session_id IS NULL AND tag IS ?2 AND name = ?3 ORDER BY message_id LIMIT 1
"""  # noqa: S608

_READY_TAGS: Final = """
WITH RECURSIVE tags (tag, is_null) AS (
    SELECT NULL, 1
    UNION ALL
    SELECT (SELECT min(q.tag) FROM worker_queue AS q
            WHERE q.state = 0 AND q.session_id IS NULL
              AND q.tag > coalesce(tags.tag, '')), 0
    FROM tags WHERE tags.is_null = 1 OR tags.tag IS NOT NULL
)
SELECT tag FROM tags WHERE tag IS NOT NULL
"""

_QUEUED_SESSIONS: Final = """
WITH RECURSIVE queued (session_id) AS (
    SELECT min(session_id) FROM worker_queue WHERE session_id IS NOT NULL
    UNION ALL
    SELECT (SELECT min(q.session_id) FROM worker_queue AS q WHERE q.session_id > queued.session_id)
    FROM queued WHERE queued.session_id IS NOT NULL
)
SELECT queued.session_id, s.owner_id
FROM queued LEFT JOIN sessions AS s ON s.session_id = queued.session_id AND s.locked_until > ?1
WHERE queued.session_id IS NOT NULL
"""

_FIND_SESSION_WORK: Final = f"""
SELECT message_id, name, tag FROM worker_queue
WHERE {_READY} AND session_id = ?2 ORDER BY message_id
"""  # noqa: S608

_WORK_ITEM: Final = """
SELECT message_id, instance_id, execution_id, activity_id, name, body, attempt_count + 1,
       session_id, tag, heartbeat
FROM worker_queue WHERE message_id = ?
"""
"""A row of WorkRow."""

_TAKE_WORK_ITEMS: Final = ManyRows(
    "WITH taken (message_id, lock_token) AS (",
    2,
    """)
UPDATE worker_queue
SET state = 1, wake_at = ?, locked_until = ?, locked_at = ?, attempt_count = attempt_count + 1,
    lock_token = taken.lock_token
FROM taken WHERE worker_queue.message_id = taken.message_id
""",
)

SETTLE_WORK: Final = """
DELETE FROM worker_queue WHERE lock_token = ? AND locked_until > ? AND instance_id = ?
"""

SETTLE_WORK_ITEMS: Final = """
DELETE FROM worker_queue WHERE message_id IN
    (SELECT w.message_id
     FROM json_each(?1) AS given CROSS JOIN worker_queue AS w ON w.lock_token = given.key
     WHERE w.locked_until > ?2 AND w.instance_id = given.value)
"""
"""Takes a JSON object: the token of each item, and the instance that the item must belong to."""

_HELD_WORK_ITEMS: Final = """
SELECT json_group_array(json_array(w.lock_token, w.message_id, w.instance_id))
FROM json_each(?) AS given CROSS JOIN worker_queue AS w ON w.lock_token = given.value
WHERE w.locked_until > ?
"""


class HeldWork(NamedTuple):
    """A work item that was found by the token of its lock, live or expired."""

    message_id: int
    instance_id: str
    execution_id: int
    activity_id: int
    session_id: str | None
    locked_until: int
    attempt_count: int


_WORK_HELD: Final = f"""
SELECT {", ".join(HeldWork._fields)} FROM worker_queue WHERE lock_token = ?
"""  # noqa: S608 - of constants
"""A row of HeldWork."""

DELETE_WORK: Final = ForKeys("DELETE FROM worker_queue WHERE message_id {given}")

DELETE_CANCELLED_WORK: Final = """
DELETE FROM worker_queue WHERE instance_id = ? AND execution_id = ? AND activity_id = ?
"""

_ABANDON_WORK: Final = """
UPDATE worker_queue
SET state = ?, wake_at = ?, visible_at = ?, lock_token = NULL, locked_at = NULL,
    locked_until = NULL, attempt_count = ?
WHERE message_id = ?
"""

_LIVE_WORK_LOCKS: Final = """
SELECT json_group_array(json_array(w.lock_token, w.session_id))
FROM json_each(?) AS given CROSS JOIN worker_queue AS w ON w.lock_token = given.value
WHERE w.locked_until > ?
"""

_RENEW_WORK_LOCKS: Final = """
UPDATE worker_queue SET locked_until = ?2, wake_at = ?2, heartbeat = coalesce(?3, heartbeat)
WHERE lock_token IN (SELECT value FROM json_each(?1))
"""

_NEXT_WORK_WAKE: Final = "SELECT min(wake_at) FROM worker_queue WHERE wake_at IS NOT NULL"

# --- sessions

_CLAIM_SESSION: Final = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)"
_TOUCH_SESSIONS: Final = ForKeys("""
UPDATE sessions SET last_activity_at = ?2 WHERE session_id {given} AND locked_until > ?2
""")
_RENEW_SESSIONS: Final = """
UPDATE sessions SET locked_until = ?1
WHERE owner_id = ?2 AND locked_until > ?3 AND last_activity_at > ?4
"""
_CLEAN_SESSIONS: Final = """
DELETE FROM sessions
WHERE locked_until <= ?
  AND NOT EXISTS (SELECT 1 FROM worker_queue AS q WHERE q.session_id = sessions.session_id)
"""
_NEXT_SESSION_END: Final = "SELECT min(locked_until) FROM sessions WHERE locked_until > ?"


# --- verbs


def insert(tx: Transaction, message: WorkerMessage) -> None:
    insert_many(tx, (message,))


def insert_many(tx: Transaction, messages: Sequence[WorkerMessage]) -> None:
    """Add new items; a claimed item is locked from the start."""
    try:
        plain = [_plain_row(tx, message) for message in messages]
        if None not in plain:
            _INSERT_PLAIN_WORK.execute(tx, plain, (tx.now,) * 3)
        else:
            INSERT_WORK.execute(tx, [_row(tx, message) for message in messages])
    except apsw.ConstraintError as error:
        if is_refused_change(error):
            raise
        claims = [message.claim for message in messages if message.claim is not None]
        raise InvalidValue(f"a lock token of the claims {claims[:20]} is in use") from error


_PLAIN: Final = (None, None, None)


def _plain_row(tx: Transaction, message: WorkerMessage) -> Any:
    """Return the row of an item that is visible at once and has no session and no tag, or None."""
    if (message.visible_at_ms, message.session_id, message.tag) != _PLAIN:
        return None
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
    now, asked_visible_at = tx.now, message.visible_at_ms
    visible_at = now if asked_visible_at is None else asked_visible_at
    claim, identity = message.claim, message.identity
    state, attempts, token = READY, 0, None
    wake_at = locked_at = locked_until = None
    if claim is not None:
        # Not a change for others: only the worker that claims it can run it.
        state, attempts, token = WAITING, 1, claim.lock_token
        locked_at, locked_until = now, now + claim.lock_timeout_ms
        wake_at = max(visible_at, locked_until)
    else:
        tx.work_changed = True
        if visible_at > now:
            state, wake_at = WAITING, visible_at
    return (
        identity.instance_id, identity.execution_id, identity.activity_id, message.name,
        message.body, message.session_id, message.tag, visible_at, now, attempts, state, wake_at,
        token, locked_at, locked_until, None, asked_visible_at,
    )  # fmt: skip


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
    if session is None or tx.row(_HAS_SESSION_WORK) is None:
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
        tx.write(_WAKE_WORK, (tx.now,))
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
    DELETE_WORK.execute(tx, [item.message_id])
    if item.session_id is not None:
        _TOUCH_SESSIONS.execute(tx, [item.session_id], tx.now)
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
    row = tx.held(_WORK_HELD, lock_token)
    if row is None:
        raise rules.lock_lost("abandon_work_item", lock_token)
    item = HeldWork._make(row)
    attempts = max(item.attempt_count - 1, 0) if ignore_attempt else item.attempt_count
    visible_at = tx.now + (delay_ms or 0)
    state, wake_at = (WAITING, visible_at) if delay_ms else (READY, None)
    values = (state, wake_at, visible_at, attempts, item.message_id)
    tx.write(_ABANDON_WORK, values)
    tx.work_changed = True


def renew_many(
    tx: Transaction, lock_tokens: Sequence[str], extend_for_ms: int, heartbeat: str | None
) -> frozenset[str]:
    """Extend the live locks, store what the worker reports, and return the other tokens."""
    given = as_list([token for token in lock_tokens if is_text(token)])
    live = dict(rows_at_once(tx, _LIVE_WORK_LOCKS, (given, tx.now)))
    tx.write(_RENEW_WORK_LOCKS, (as_list(live), tx.now + extend_for_ms, heartbeat))
    if sessions := {session_id for session_id in live.values() if session_id is not None}:
        _TOUCH_SESSIONS.execute(tx, list(sessions), tx.now)
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
            _RENEW_SESSIONS,
            (tx.now + extend_for_ms, owner_id, tx.now, tx.now - idle_timeout_ms),
        )
        for owner_id in set(owner_ids)
    )


def clean_sessions(tx: Transaction) -> int:
    return tx.change(_CLEAN_SESSIONS, (tx.now,))


ENQUEUE_WORK: Final = Verb("enqueue_for_worker", insert)
FETCH_WORK_ITEMS: Final = Verb("fetch_work_items", fetch_several, lasts=False)
ACK_WORK: Final = Verb("ack_work_item", ack)
SETTLE_IN_TRANSACTION: Final = Verb("settle_in_transaction", settle_in_transaction, alone=True)
ABANDON_WORK: Final = Verb("abandon_work_item", abandon)
RENEW_WORK_ITEMS: Final = Verb("renew_work_item_locks", renew_many)
RENEW_SESSIONS: Final = Verb("renew_session_lock", renew_sessions, lasts=False)
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
            return [None, *(row[0] for row in tx.rows(_READY_TAGS, ()))]
        case TagMode.NONE:
            return ()


def _find_plain(tx: Transaction, tag: str | None, activities: frozenset[str] | None) -> int | None:
    """Return the oldest ready item with that tag and without a session."""
    for misfits, (message_id, name) in enumerate(tx.execute(_FIND_WORK, (tx.now, tag))):
        if activities is None or name in activities:
            return int(message_id)
        if misfits == _MISFITS_BEFORE_SEEKING:
            found = [tx.row(_FIND_WORK_BY_NAME, (tx.now, tag, each)) for each in activities]
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
    for session_id, owner_id in tx.rows(_QUEUED_SESSIONS, (tx.now,)):
        is_open = owner_id == session.owner_id or (owner_id is None and not session.only_owned)
        if is_open:
            for message_id, name, tag in tx.execute(_FIND_SESSION_WORK, (tx.now, session_id)):
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
        row = tx.row(_WORK_ITEM, (message_id,))
    except UnicodeDecodeError:
        (row,) = readable(tx, _WORK_ITEM, (message_id,))
    item = WorkRow._make(row)
    locked_until = tx.now + lock_timeout_ms
    taken = (locked_until, locked_until, tx.now)
    _TAKE_WORK_ITEMS.execute(tx, [(message_id, token)], taken)
    if item.session_id is not None and session is not None:
        session_lock = (item.session_id, session.owner_id, tx.now + session.lock_timeout_ms, tx.now)
        tx.write(_CLAIM_SESSION, session_lock)
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
        rows += rows_at_once(tx, _FIND_WORK_ITEMS, (tx.now, tag, limit))
    rows.sort()
    items: list[WorkRow] = []
    for item in map(WorkRow._make, rows[:limit]):
        if item.body is None or (activities is not None and item.name not in activities):
            break
        items.append(item)
    tokens = tx.new_lock_tokens(len(items))
    locked_until = tx.now + lock_timeout_ms
    _TAKE_WORK_ITEMS.execute(
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
    dues = [tx.row(_NEXT_WORK_WAKE, ())[0]]
    if session is not None:
        dues.append(tx.row(_NEXT_SESSION_END, (tx.now,))[0])
    return min((due for due in dues if due is not None), default=None)


def find_held(tx: Transaction, tokens: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return, by token, message id and instance id of each item that one of the tokens holds."""
    given = as_list([token for token in tokens if is_text(token)])
    rows = rows_at_once(tx, _HELD_WORK_ITEMS, (given, tx.now))
    return {token: (message_id, instance_id) for token, message_id, instance_id in rows}


def _held(tx: Transaction, lock_token: str, operation: str) -> HeldWork:
    """Return the item under a live lock. Errors: LockLost."""
    row = tx.held(_WORK_HELD, lock_token)
    if row is None or (item := HeldWork._make(row)).locked_until <= tx.now:
        raise rules.lock_lost(operation, lock_token)
    return item
