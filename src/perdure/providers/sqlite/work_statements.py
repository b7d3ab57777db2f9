"""Rows and statements of the worker queue and of its sessions."""

from __future__ import annotations

from typing import Final, NamedTuple

from perdure.providers.sqlite.many_rows import ManyRows

# --- worker queue

INSERT_WORK: Final = ManyRows(
    """
INSERT OR FAIL INTO worker_queue
    (message_id, instance_id, execution_id, activity_id, name, body, session_id, tag, visible_at,
     enqueued_at, attempt_count, state, wake_at, lock_token, locked_at, locked_until, heartbeat,
     asked_visible_at)
""",
    18,
)

INSERT_PLAIN_WORK: Final = ManyRows(
    """
WITH added (instance_id, execution_id, activity_id, name, body, lock_token, locked_until) AS (
""",
    7,
    """)
INSERT OR FAIL INTO worker_queue
    (instance_id, execution_id, activity_id, name, body, lock_token, locked_until, wake_at,
     attempt_count, state, locked_at, visible_at, enqueued_at)
SELECT instance_id, execution_id, activity_id, name, body, lock_token, locked_until, locked_until,
       locked_until IS NOT NULL, locked_until IS NOT NULL,
       CASE WHEN locked_until IS NOT NULL THEN ? END, ?, ?
FROM added
""",
)
"""For items that are visible at once and have no session and no tag: most of them."""

WAKE_WORK: Final = "UPDATE worker_queue SET state = 0, wake_at = NULL WHERE wake_at <= ?"

FIND_WORK: Final = """
SELECT message_id, name FROM worker_queue
WHERE state = 0 AND session_id IS NULL AND tag IS ?1
  AND visible_at <= ?2 AND (locked_until IS NULL OR locked_until <= ?2)
ORDER BY message_id
"""


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
    """With the attempt that hands it out."""
    session_id: str | None
    tag: str | None
    heartbeat: str | None


FIND_WORK_ITEMS: Final = """
SELECT json_group_array(json_array(
    message_id, instance_id, execution_id, activity_id, name,
    CASE WHEN octet_length(body) + coalesce(octet_length(heartbeat), 0) <= 65536 THEN body END,
    attempt_count + 1, session_id, tag,
    CASE WHEN octet_length(heartbeat) <= 65536 THEN heartbeat END
))
FROM (SELECT * FROM worker_queue
      WHERE state = 0 AND session_id IS NULL AND tag IS ?1
        AND visible_at <= ?2 AND (locked_until IS NULL OR locked_until <= ?2)
      ORDER BY message_id LIMIT ?3)
"""
"""Rows of WorkRow. Big texts are left out: all of them in one list might be longer than SQLite
allows."""

HAS_SESSION_WORK: Final = "SELECT 1 FROM worker_queue WHERE session_id IS NOT NULL LIMIT 1"

FIND_WORK_BY_NAME: Final = """
SELECT message_id FROM worker_queue
WHERE state = 0 AND session_id IS NULL AND tag IS ?1 AND name = ?2
  AND visible_at <= ?3 AND (locked_until IS NULL OR locked_until <= ?3)
ORDER BY message_id LIMIT 1
"""

READY_TAGS: Final = """
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

QUEUED_SESSIONS: Final = """
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

FIND_SESSION_WORK: Final = """
SELECT message_id, name, tag FROM worker_queue
WHERE session_id = ?1 AND state = 0
  AND visible_at <= ?2 AND (locked_until IS NULL OR locked_until <= ?2)
ORDER BY message_id
"""

WORK_ITEM: Final = """
SELECT message_id, instance_id, execution_id, activity_id, name, body, attempt_count + 1,
       session_id, tag, heartbeat
FROM worker_queue WHERE message_id = ?
"""
"""A row of WorkRow."""

TAKE_WORK: Final = """
UPDATE worker_queue
SET state = 1, wake_at = ?1, locked_until = ?1, lock_token = ?2, attempt_count = ?3,
    locked_at = ?4
WHERE message_id = ?5
"""

TAKE_WORK_ITEMS: Final = ManyRows(
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
"""For a JSON object: the token of each item, and the instance that the item must belong to."""

HELD_WORK_ITEMS: Final = """
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


WORK_HELD: Final = """
SELECT message_id, instance_id, execution_id, activity_id, session_id, locked_until, attempt_count
FROM worker_queue WHERE lock_token = ?
"""
"""A row of HeldWork."""

DELETE_WORK: Final = "DELETE FROM worker_queue WHERE message_id = ?"

DELETE_WORK_ITEMS: Final = """
DELETE FROM worker_queue WHERE message_id IN (SELECT value FROM json_each(?))
"""

DELETE_CANCELLED_WORK: Final = """
DELETE FROM worker_queue WHERE instance_id = ? AND execution_id = ? AND activity_id = ?
"""

ABANDON_WORK: Final = """
UPDATE worker_queue
SET state = ?, wake_at = ?, visible_at = ?, lock_token = NULL, locked_at = NULL,
    locked_until = NULL, attempt_count = ?
WHERE message_id = ?
"""

LIVE_WORK_LOCKS: Final = """
SELECT json_group_array(json_array(w.lock_token, w.session_id))
FROM json_each(?) AS given CROSS JOIN worker_queue AS w ON w.lock_token = given.value
WHERE w.locked_until > ?
"""

RENEW_WORK_LOCKS: Final = """
UPDATE worker_queue SET locked_until = ?2, wake_at = ?2, heartbeat = coalesce(?3, heartbeat)
WHERE lock_token IN (SELECT value FROM json_each(?1))
"""

NEXT_WORK_WAKE: Final = "SELECT min(wake_at) FROM worker_queue WHERE wake_at IS NOT NULL"

# --- sessions

CLAIM_SESSION: Final = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)"
TOUCH_SESSION: Final = """
UPDATE sessions SET last_activity_at = ?1 WHERE session_id = ?2 AND locked_until > ?1
"""
TOUCH_SESSIONS: Final = """
UPDATE sessions SET last_activity_at = ?2
WHERE session_id IN (SELECT value FROM json_each(?1)) AND locked_until > ?2
"""
RENEW_SESSIONS: Final = """
UPDATE sessions SET locked_until = ?1
WHERE owner_id = ?2 AND locked_until > ?3 AND last_activity_at > ?4
"""
CLEAN_SESSIONS: Final = """
DELETE FROM sessions
WHERE locked_until <= ?
  AND NOT EXISTS (SELECT 1 FROM worker_queue AS q WHERE q.session_id = sessions.session_id)
"""
NEXT_SESSION_END: Final = "SELECT min(locked_until) FROM sessions WHERE locked_until > ?"
