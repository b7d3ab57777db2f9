"""The SQL of the hot verbs: instances, their turns, messages and locks.

Constants are named after what they do; numbered parameters are named in the order of binding.
"""

from __future__ import annotations

from typing import Final

from perdure.providers.sqlite.many_rows import ManyRows

# --- readiness (instance_locks)

PLACE: Final = """
SELECT state, pending_since, due_at, first_message_id FROM instance_locks WHERE instance_id = ?
"""

CARRY_MORE: Final = """
UPDATE instance_locks
SET due_at = ?1, first_message_id = ?2, carried_until = max(coalesce(carried_until, ?3), ?3)
WHERE instance_id = ?4
"""

SET_DUE: Final = """
UPDATE instance_locks SET due_at = ?, first_message_id = ? WHERE instance_id = ?
"""

INSERT_READY: Final = ManyRows(
    """
INSERT OR FAIL INTO instance_locks
    (instance_id, instance_key, name, version, pending_since, state, due_at, first_message_id)
""",
    8,
)

LOCK_FACTS: Final = """
SELECT lock_token, locked_until, owner, kept, carried_until, suspended, not_before, block,
       touched_at
FROM instance_locks WHERE instance_id = ?
"""

PUT_LOCK: Final = """
INSERT OR REPLACE INTO instance_locks
    (instance_id, instance_key, name, version, pending_since, state, wake_at, due_at,
     first_message_id, lock_token, locked_until, owner, kept, carried_until, suspended,
     not_before, block, touched_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

DELETE_LOCK: Final = "DELETE FROM instance_locks WHERE instance_id = ?"

DELETE_LAST_LOCK: Final = """
DELETE FROM instance_locks
WHERE instance_id = ?1
  AND NOT EXISTS (SELECT 1 FROM orchestrator_queue WHERE instance_id = ?1)
"""
"""Of an instance without messages."""

AWAKE: Final = "SELECT instance_id, state FROM instance_locks WHERE wake_at <= ?"

FIND_READY: Final = """
SELECT l.instance_id, l.instance_key, l.name, l.version, l.due_at, l.first_message_id,
       i.framework_version
FROM instance_locks AS l LEFT JOIN instances AS i ON i.instance_key = l.instance_key
WHERE l.state = 0 AND l.due_at IS NOT NULL AND l.due_at <= ?1
  AND (l.locked_until IS NULL OR l.locked_until <= ?1)
  AND (l.not_before IS NULL OR l.not_before <= ?1)
ORDER BY l.due_at, l.first_message_id
"""

FIND_READY_BY_NAME: Final = """
SELECT l.instance_id, l.instance_key, l.name, l.version, l.due_at, l.first_message_id,
       i.framework_version
FROM instance_locks AS l LEFT JOIN instances AS i ON i.instance_key = l.instance_key
WHERE l.state = 0 AND l.due_at IS NOT NULL AND l.due_at <= ?1 AND l.name IS ?2
  AND (l.locked_until IS NULL OR l.locked_until <= ?1)
  AND (l.not_before IS NULL OR l.not_before <= ?1)
ORDER BY l.due_at, l.first_message_id
"""

FIND_KEPT: Final = """
SELECT l.instance_id, l.instance_key, l.name, l.version, l.due_at, l.first_message_id,
       i.framework_version, l.lock_token
FROM instance_locks AS l LEFT JOIN instances AS i ON i.instance_key = l.instance_key
WHERE l.kept = 1 AND l.due_at IS NOT NULL AND l.due_at <= ?1 AND l.owner = ?2
  AND l.locked_until > ?1
ORDER BY l.due_at, l.first_message_id
"""

READY: Final = """
SELECT json_group_array(json_array(
    ready.instance_id, ready.instance_key, ready.name, ready.version, ready.due_at,
    ready.first_message_id, i.framework_version, q.start_parent_id, q.attempt_count + 1,
    CASE WHEN octet_length(q.body) <= 65536 THEN q.body END
))
FROM (SELECT instance_id, instance_key, name, version, due_at, first_message_id
      FROM instance_locks
      WHERE state = 0 AND due_at IS NOT NULL AND due_at <= ?1
        AND (locked_until IS NULL OR locked_until <= ?1)
        AND (not_before IS NULL OR not_before <= ?1)
      ORDER BY due_at, first_message_id LIMIT ?2) AS ready
LEFT JOIN instances AS i ON i.instance_key = ready.instance_key
LEFT JOIN orchestrator_queue AS q
    ON q.message_id = ready.first_message_id AND ready.instance_key IS NULL
    AND q.start_name = ready.name AND q.start_version IS ready.version
    AND NOT EXISTS (SELECT 1 FROM orchestrator_queue AS o
                    WHERE o.instance_id = ready.instance_id AND o.message_id <> q.message_id)
"""
"""As FIND_READY, with the message if it is a start and there is nothing else of its instance.

Big texts are left out: all of them in one list might be longer than SQLite allows.
"""

NEXT_WAKE: Final = "SELECT min(wake_at) FROM instance_locks WHERE wake_at IS NOT NULL"
NEXT_READY: Final = """
SELECT min(due_at) FROM instance_locks WHERE state = 0 AND due_at IS NOT NULL AND due_at > ?
"""
NEXT_KEPT: Final = """
SELECT min(due_at) FROM instance_locks
WHERE kept = 1 AND due_at IS NOT NULL AND owner = ? AND due_at > ?
"""

TAKE_LOCK: Final = """
UPDATE instance_locks
SET state = 1, wake_at = ?1, locked_until = ?1, lock_token = ?2, owner = ?3, kept = 0,
    carried_until = ?4, due_at = ?5, first_message_id = ?6
WHERE instance_id = ?7
"""

TAKE_LOCKS: Final = ManyRows(
    "WITH taken (instance_id, lock_token) AS (",
    2,
    """)
UPDATE instance_locks
SET state = 1, wake_at = ?, locked_until = ?, lock_token = taken.lock_token, owner = ?, kept = 0,
    carried_until = ?, due_at = NULL, first_message_id = NULL
FROM taken WHERE instance_locks.instance_id = taken.instance_id
""",
)

INSERT_KEPT_LOCK: Final = ManyRows(
    """
INSERT OR FAIL INTO instance_locks
    (instance_id, instance_key, name, version, state, wake_at, lock_token, locked_until, owner,
     kept)
""",
    10,
)

LOCK_HELD: Final = """
SELECT l.instance_id, l.instance_key, l.locked_until, l.kept, l.carried_until, l.suspended,
       l.not_before, l.block, l.name, l.version, l.pending_since, l.due_at,
       CASE i.status WHEN 'Running' THEN i.execution_id END
FROM instance_locks AS l LEFT JOIN instances AS i ON i.instance_key = l.instance_key
WHERE l.lock_token = ?
"""

INSERT_BARE_LOCK: Final = """
INSERT INTO instance_locks (instance_id, instance_key, state) VALUES (?, ?, 1)
"""

DROP_LOCK: Final = """
UPDATE instance_locks
SET lock_token = NULL, locked_until = NULL, owner = NULL, kept = 0, carried_until = NULL
WHERE instance_id = ?
"""

SET_HOLDS: Final = """
UPDATE instance_locks SET suspended = ?, not_before = ?, block = ? WHERE instance_id = ?
"""

STANDING: Final = """
SELECT i.instance_key, i.execution_id, l.pending_since, l.instance_id IS NOT NULL
FROM (SELECT ?1 AS id)
LEFT JOIN instances AS i ON i.instance_id = id
LEFT JOIN instance_locks AS l ON l.instance_id = id
"""

KNOWN_OF: Final = """
SELECT json_group_array(json_array(given.value, i.execution_id, l.pending_since))
FROM json_each(?) AS given
LEFT JOIN instances AS i ON i.instance_id = given.value
LEFT JOIN instance_locks AS l ON l.instance_id = given.value
WHERE i.instance_id IS NOT NULL OR l.instance_id IS NOT NULL
"""

PLAIN_LOCKS: Final = """
SELECT json_group_array(json_array(
    l.lock_token, l.instance_id, l.instance_key, l.locked_until, i.execution_id,
    (SELECT count(*) FROM (SELECT 1 FROM orchestrator_queue AS q
                           WHERE q.instance_id = l.instance_id LIMIT ?3)),
    EXISTS (SELECT 1 FROM kv_delta AS k WHERE k.instance_key = l.instance_key), l.pending_since
))
FROM json_each(?1) AS given
CROSS JOIN instance_locks AS l ON l.lock_token = given.value
LEFT JOIN instances AS i ON i.instance_key = l.instance_key
LEFT JOIN executions AS e ON e.instance_key = i.instance_key AND e.execution_id = i.execution_id
WHERE l.locked_until > ?2 AND l.suspended = 0 AND l.not_before IS NULL AND l.block IS NULL
  AND CASE WHEN l.kept
      THEN l.pending_since IS NULL AND i.status = 'Running' AND e.status = 'Running'
      ELSE l.instance_key IS NULL AND l.name IS NOT NULL AND l.pending_since IS NOT NULL
           AND l.due_at IS NULL
      END
"""
"""Locks of turns that go on where the last one stopped, and of starts of which nothing is written
yet, with all that a plain turn has to know."""

EXTEND_KEPT_LOCKS: Final = """
UPDATE instance_locks SET locked_until = ?2, touched_at = ?3
WHERE instance_id IN (SELECT value FROM json_each(?1))
"""

DELETE_LOCKS: Final = """
DELETE FROM instance_locks WHERE instance_id IN (SELECT value FROM json_each(?))
"""

EXTEND_KEPT_LOCK: Final = """
UPDATE instance_locks SET locked_until = ?, touched_at = ? WHERE instance_id = ?
"""

KEEP_LOCK: Final = """
UPDATE instance_locks
SET locked_until = ?1, wake_at = ?1, kept = 1, instance_key = ?2, name = ?3, version = ?4,
    pending_since = NULL, not_before = NULL, block = NULL, touched_at = NULL
WHERE instance_id = ?5
"""

KEEP_LOCKS: Final = ManyRows(
    "WITH begun (instance_id, instance_key, name, version, locked_until) AS (",
    5,
    """)
UPDATE instance_locks
SET locked_until = begun.locked_until, wake_at = begun.locked_until, kept = 1,
    instance_key = begun.instance_key, name = begun.name, version = begun.version,
    pending_since = NULL, not_before = NULL, block = NULL, touched_at = NULL
FROM begun WHERE instance_locks.instance_id = begun.instance_id
""",
)

RELEASE_LOCK: Final = """
UPDATE instance_locks
SET state = ?, wake_at = NULL, due_at = ?, first_message_id = ?, lock_token = NULL,
    locked_until = NULL, owner = NULL, kept = 0, carried_until = NULL, instance_key = ?,
    name = ?, version = ?,
    pending_since = NULL, not_before = NULL, block = NULL, touched_at = NULL
WHERE instance_id = ?
"""

RENEW_LOCK: Final = """
UPDATE instance_locks SET locked_until = ?1, wake_at = ?1 WHERE instance_id = ?2
"""

LIVE_LOCKS: Final = """
SELECT json_group_array(json_array(l.lock_token, l.locked_until))
FROM json_each(?) AS given CROSS JOIN instance_locks AS l ON l.lock_token = given.value
WHERE l.locked_until > ?
"""

RENEW_LOCKS: Final = """
UPDATE instance_locks SET locked_until = ?2, wake_at = ?2
WHERE lock_token IN (SELECT value FROM json_each(?1))
"""

# --- orchestrator queue

INSERT_MESSAGE: Final = ManyRows(
    """
INSERT OR FAIL INTO orchestrator_queue
    (message_id, instance_id, kind, body, visible_at, enqueued_at, attempt_count,
     asked_visible_at, start_name, start_version, start_parent_id, timer_execution_id, timer_id)
""",
    13,
)

UNTAG_MESSAGE: Final = """
UPDATE orchestrator_queue SET lock_token = NULL, attempt_count = max(attempt_count - 1, 0)
WHERE message_id = ? AND lock_token = ?
"""

FIRST_MESSAGE: Final = """
SELECT visible_at, message_id FROM orchestrator_queue
WHERE instance_id = ? ORDER BY visible_at, message_id LIMIT 1
"""

FIRST_FREE_MESSAGE: Final = """
SELECT visible_at, message_id FROM orchestrator_queue
WHERE instance_id = ? AND lock_token IS NOT ? ORDER BY visible_at, message_id LIMIT 1
"""

MESSAGES_BY_TIME: Final = """
SELECT message_id, body, attempt_count + 1, visible_at, enqueued_at, start_name, start_version,
       start_parent_id
FROM orchestrator_queue WHERE instance_id = ? ORDER BY visible_at, message_id
"""

VISIBLE_FREE_MESSAGES: Final = """
SELECT message_id, body, attempt_count + 1, visible_at, enqueued_at
FROM orchestrator_queue WHERE instance_id = ? AND visible_at <= ? AND lock_token IS NOT ?
"""

TAG_MESSAGE: Final = """
UPDATE orchestrator_queue SET lock_token = ?, attempt_count = ? WHERE message_id = ?
"""

TAG_MESSAGES: Final = ManyRows(
    "WITH taken (message_id, lock_token) AS (",
    2,
    """)
UPDATE orchestrator_queue SET lock_token = taken.lock_token, attempt_count = attempt_count + 1
FROM taken WHERE orchestrator_queue.message_id = taken.message_id
""",
)

CARRIED_STARTS: Final = """
SELECT message_id, start_name, start_version, start_parent_id, enqueued_at
FROM orchestrator_queue
WHERE instance_id = ? AND visible_at <= ? AND lock_token = ? AND start_name IS NOT NULL
ORDER BY message_id
"""

QUEUED_START: Final = """
SELECT start_name, start_version, start_parent_id, enqueued_at
FROM orchestrator_queue
WHERE instance_id = ? AND start_name IS NOT NULL ORDER BY message_id LIMIT 1
"""

QUEUED_STARTS: Final = """
SELECT count(*), min(visible_at) FROM orchestrator_queue
WHERE instance_id = ? AND start_name IS NOT NULL
"""

VISIBLE_START: Final = """
SELECT start_name, start_version, start_parent_id FROM orchestrator_queue
WHERE instance_id = ? AND start_name IS NOT NULL AND visible_at <= ? ORDER BY message_id LIMIT 1
"""

DELETE_CARRIED: Final = """
DELETE FROM orchestrator_queue WHERE instance_id = ? AND visible_at <= ? AND lock_token = ?
"""
CARRIED_OF: Final = """
SELECT json_group_array(json_array(message_id, lock_token))
FROM orchestrator_queue WHERE message_id IN (SELECT value FROM json_each(?))
"""
DELETE_MESSAGES: Final = """
DELETE FROM orchestrator_queue WHERE message_id IN (SELECT value FROM json_each(?))
"""
DELETE_CONSUMED: Final = "DELETE FROM orchestrator_queue WHERE message_id = ? AND lock_token = ?"
FORGIVE_CARRIED: Final = """
UPDATE orchestrator_queue SET attempt_count = max(attempt_count - 1, 0)
WHERE instance_id = ? AND visible_at <= ? AND lock_token = ?
"""
RESET_ATTEMPTS: Final = """
UPDATE orchestrator_queue SET attempt_count = 0 WHERE instance_id = ? AND attempt_count > 0
"""

DELETE_TIMER: Final = """
DELETE FROM orchestrator_queue
WHERE instance_id = ? AND timer_execution_id = ? AND timer_id = ? AND timer_id IS NOT NULL
"""

DEAD_MESSAGES: Final = """
SELECT max(visible_at, enqueued_at + ?2), message_id FROM orchestrator_queue
WHERE instance_id = ?1 AND visible_at <= ?3 AND enqueued_at + ?2 <= ?3
"""

DEAD_AT: Final = """
SELECT min(max(visible_at, enqueued_at + ?)) FROM orchestrator_queue WHERE instance_id = ?
"""

COPY_DEAD: Final = """
INSERT INTO dead_letters
    (reason, dead_since, instance_id, kind, body, asked_visible_at, start_name, start_version,
     start_parent_id, timer_execution_id, timer_id)
SELECT ?1, ?2, instance_id, kind, body, asked_visible_at, start_name, start_version,
       start_parent_id, timer_execution_id, timer_id
FROM orchestrator_queue WHERE message_id = ?3
"""

DELETE_MESSAGE: Final = "DELETE FROM orchestrator_queue WHERE message_id = ?"

# --- instances, executions, history

INSTANCE_BY_ID: Final = """
SELECT instance_key, execution_id, status, name, version FROM instances WHERE instance_id = ?
"""

INSTANCE_BY_KEY: Final = """
SELECT name, version, execution_id, parent_instance_id FROM instances WHERE instance_key = ?
"""

INSTANCE_ROW: Final = """
SELECT i.is_named, i.name, i.version, i.parent_instance_id, i.execution_id, i.status,
       i.framework_version, i.custom_status, i.custom_status_version, i.created_at,
       i.completed_at,
       coalesce(e.status, 'Running'), e.output, e.framework_version, e.completed_at
FROM instances AS i
LEFT JOIN executions AS e ON e.instance_key = i.instance_key AND e.execution_id = ?2
WHERE i.instance_key = ?1
"""
"""With one of its executions, as ``commits.NEW_EXECUTION`` if it is yet to come."""

TOUCH_INSTANCE: Final = "UPDATE instances SET updated_at = ?1 WHERE instance_key = ?2"

END_INSTANCES: Final = """
UPDATE instances SET status = ?2, updated_at = ?3, completed_at = ?3
WHERE instance_key IN (SELECT value FROM json_each(?1))
"""

END_EXECUTIONS: Final = ManyRows(
    "WITH ended (instance_key, execution_id, status, output) AS (",
    4,
    """)
UPDATE executions
SET status = ended.status, output = coalesce(ended.output, executions.output), completed_at = ?
FROM ended
WHERE executions.instance_key = ended.instance_key
  AND executions.execution_id = ended.execution_id
""",
)

NEXT_INSTANCE_KEY: Final = "SELECT coalesce(max(instance_key), 0) + 1 FROM instances"

INSERT_INSTANCE: Final = ManyRows(
    """
INSERT OR FAIL INTO instances
    (instance_key, instance_id, is_named, name, version, parent_instance_id, execution_id, status,
     framework_version, custom_status, custom_status_version, created_at, updated_at, completed_at)
""",
    14,
)

UPDATE_INSTANCE: Final = """
UPDATE instances
SET is_named = ?, name = ?, version = ?, parent_instance_id = ?, execution_id = ?, status = ?,
    framework_version = ?, custom_status = ?, custom_status_version = ?, created_at = ?,
    updated_at = ?, completed_at = ?
WHERE instance_key = ?
"""

CONCLUDE_INSTANCE: Final = """
UPDATE instances SET status = ?, updated_at = ?, completed_at = ? WHERE instance_key = ?
"""
"""As UPDATE_INSTANCE where the rest stays: SQLite writes the index of every column that is set."""

SET_STATUS: Final = "UPDATE instances SET status = ?1 WHERE instance_key = ?2"

CURRENT_STATUS: Final = """
SELECT e.status FROM instances AS i JOIN executions AS e USING (instance_key, execution_id)
WHERE i.instance_key = ?
"""

EXECUTION: Final = """
SELECT status, output, framework_version, completed_at
FROM executions WHERE instance_key = ? AND execution_id = ?
"""

INSERT_EXECUTION: Final = """
INSERT OR FAIL INTO executions
    (instance_key, execution_id, status, output, framework_version, started_at, completed_at)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""

PUT_EXECUTION: Final = ManyRows(
    """
INSERT OR FAIL INTO executions
    (instance_key, execution_id, status, output, framework_version, completed_at, started_at)
""",
    7,
    """
ON CONFLICT DO UPDATE
SET status = excluded.status, output = excluded.output, completed_at = excluded.completed_at,
    framework_version = excluded.framework_version
""",
)

INSERT_EVENT: Final = ManyRows("INSERT OR FAIL INTO history", 4)

HISTORY: Final = """
SELECT event_id, data FROM history WHERE instance_key = ? AND execution_id = ? ORDER BY event_id
"""

LAST_HISTORY_EXECUTION: Final = "SELECT max(execution_id) FROM history WHERE instance_key = ?"

# --- state

KV_STORE: Final = "SELECT key, value, updated_at FROM kv_store WHERE instance_key = ? ORDER BY key"
KV_DELTA: Final = "SELECT key, value, updated_at FROM kv_delta WHERE instance_key = ? ORDER BY key"
PUT_KV_DELTA: Final = "INSERT OR REPLACE INTO kv_delta VALUES (?, ?, ?, ?)"
PUT_KV_STORE: Final = "INSERT OR REPLACE INTO kv_store VALUES (?, ?, ?, ?)"
CLEAR_ALL_IN_DELTA: Final = """
INSERT OR REPLACE INTO kv_delta
SELECT instance_key, key, NULL, NULL FROM kv_store WHERE instance_key = ?1
UNION SELECT instance_key, key, NULL, NULL FROM kv_delta WHERE instance_key = ?1
"""
HAS_KV_DELTA: Final = "SELECT 1 FROM kv_delta WHERE instance_key = ? LIMIT 1"
MERGE_KV: Final = """
INSERT OR REPLACE INTO kv_store
SELECT instance_key, key, value, updated_at FROM kv_delta
WHERE instance_key = ? AND value IS NOT NULL
"""
DROP_CLEARED_KV: Final = """
DELETE FROM kv_store
WHERE instance_key = ?1
  AND key IN (SELECT key FROM kv_delta WHERE instance_key = ?1 AND value IS NULL)
"""
EMPTY_KV_DELTA: Final = "DELETE FROM kv_delta WHERE instance_key = ?"
