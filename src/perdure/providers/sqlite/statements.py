"""Statements on readiness rows and on the orchestrator queue, and the rows that they read.

A statement is a constant that is named after what it does. The class of a row stands before the
first statement that reads such rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from perdure.providers.sqlite.transaction import ForKeys, ManyRows

# --- readiness (instance_locks)


class Readiness(NamedTuple):
    """The columns of a readiness row that decide what a new message changes in it."""

    state: int
    pending_since: int | None
    ready_at: int | None
    ready_id: int | None
    mail_held: int
    yielded_at: int | None

    @property
    def has_backlog(self) -> bool:
        """True if messages wait that were not handed out."""
        return self.ready_at is not None or bool(self.mail_held)


READINESS: Final = (
    f"SELECT {', '.join(Readiness._fields)} FROM instance_locks WHERE instance_id = ?"  # noqa: S608
)
"""A row of Readiness."""

CARRY_MORE: Final = """
UPDATE instance_locks
SET ready_at = ?1, ready_id = ?2, carried_until = max(coalesce(carried_until, ?3), ?3),
    mail_held = ?4, yielded_at = NULL
WHERE instance_id = ?5
"""

SET_READY_MESSAGE: Final = """
UPDATE instance_locks SET ready_at = ?, ready_id = ? WHERE instance_id = ?
"""

YIELD: Final = """
UPDATE instance_locks
SET ready_at = max(?1, coalesce(?3, 0)), ready_id = ?2, mail_held = 0, yielded_at = ?3
WHERE instance_id = ?4
"""

INSERT_READY: Final = ManyRows(
    """
INSERT OR FAIL INTO instance_locks
    (instance_id, instance_key, name, version, pending_since, state, ready_at, ready_id)
""",
    8,
)


class LockFacts(NamedTuple):
    """The columns of a readiness row that are given; the others follow from them and the queue."""

    lock_token: str | None = None
    locked_at: int | None = None
    locked_until: int | None = None
    owner: str | None = None
    kept: int = 0
    carried_until: int | None = None
    suspended: int = 0
    not_before: int | None = None
    block: str | None = None
    touched_at: int | None = None
    mail_held: int = 0
    yielded_at: int | None = None


_LOCK_FACTS: Final = ", ".join(LockFacts._fields)

LOCK_FACTS: Final = f"SELECT {_LOCK_FACTS} FROM instance_locks WHERE instance_id = ?"  # noqa: S608
"""A row of LockFacts."""

PUT_LOCK: Final = ManyRows(
    f"""
INSERT OR REPLACE INTO instance_locks
    (instance_id, instance_key, name, version, pending_since, state, wake_at, ready_at, ready_id,
     {_LOCK_FACTS})
""",
    9 + len(LockFacts._fields),
)

DELETE_LOCKS: Final = ForKeys("DELETE FROM instance_locks WHERE instance_id {given}")

DELETE_LAST_LOCKS: Final = ForKeys("""
DELETE FROM instance_locks
WHERE instance_id {given}
  AND NOT EXISTS (SELECT 1 FROM orchestrator_queue AS q
                  WHERE q.instance_id = instance_locks.instance_id)
""")
"""Selects instances without messages."""

AWAKE: Final = "SELECT instance_id, state FROM instance_locks WHERE wake_at <= ?"


class Candidate(NamedTuple):
    """An instance that can be handed out now."""

    instance_id: str
    instance_key: int | None
    name: str | None
    """None: it depends on which of several starts is visible, or there is none."""
    version: str | None
    ready_at: int
    ready_id: int
    framework_version: str | None
    lock_token: str | None
    """Token of the lock that its owner keeps; None if the instance is free."""

    @property
    def order(self) -> tuple[int, int]:
        """Instances are handed out in ascending order of this."""
        return self.ready_at, self.ready_id


_CANDIDATE: Final = """
SELECT l.instance_id, l.instance_key, l.name, l.version, l.ready_at, l.ready_id,
       i.framework_version, l.lock_token
FROM instance_locks AS l LEFT JOIN instances AS i ON i.instance_key = l.instance_key
"""

_READY: Final = """
state = 0 AND ready_at IS NOT NULL AND ready_at <= ?1
AND (locked_until IS NULL OR locked_until <= ?1) AND (not_before IS NULL OR not_before <= ?1)
"""

FIND_READY: Final = f"{_CANDIDATE} WHERE {_READY} ORDER BY ready_at, ready_id"
"""Rows of Candidate, as in the next two."""

FIND_READY_BY_NAME: Final = f"""
{_CANDIDATE} WHERE {_READY} AND l.name IS ?2 ORDER BY ready_at, ready_id
"""

FIND_KEPT: Final = f"""
{_CANDIDATE}
WHERE l.kept = 1 AND l.ready_at IS NOT NULL AND l.ready_at <= ?1 AND l.owner = ?2
  AND l.locked_until > ?1
ORDER BY l.ready_at, l.ready_id
"""


class OnlyStart(NamedTuple):
    """The message of a candidate of which there is nothing but one start."""

    parent_instance_id: str | None
    attempt_count: int | None
    """Includes the attempt that hands it out."""
    body: str | None
    """None: the candidate is more than that, or the text is too big for a list of rows."""


FIND_MANY_READY: Final = f"""
SELECT json_group_array(json_array(
    ready.instance_id, ready.instance_key, ready.name, ready.version, ready.ready_at,
    ready.ready_id, i.framework_version, NULL, q.start_parent_id, q.attempt_count + 1,
    CASE WHEN octet_length(q.body) <= 65536 THEN q.body END
))
FROM (SELECT instance_id, instance_key, name, version, ready_at, ready_id
      FROM instance_locks WHERE {_READY} ORDER BY ready_at, ready_id LIMIT ?2) AS ready
LEFT JOIN instances AS i ON i.instance_key = ready.instance_key
LEFT JOIN orchestrator_queue AS q
    ON q.message_id = ready.ready_id AND ready.instance_key IS NULL
    AND q.start_name = ready.name AND q.start_version IS ready.version
    AND NOT EXISTS (SELECT 1 FROM orchestrator_queue AS o
                    WHERE o.instance_id = ready.instance_id AND o.message_id <> q.message_id)
"""  # noqa: S608 - of constants
"""Candidates as of FIND_READY: the columns of Candidate, then those of OnlyStart.

Big texts are left out: all of them in one list might be longer than SQLite allows.
"""

NEXT_WAKE: Final = "SELECT min(wake_at) FROM instance_locks WHERE wake_at IS NOT NULL"
NEXT_READY: Final = """
SELECT min(ready_at) FROM instance_locks WHERE state = 0 AND ready_at IS NOT NULL AND ready_at > ?
"""
NEXT_KEPT: Final = """
SELECT min(ready_at) FROM instance_locks
WHERE kept = 1 AND ready_at IS NOT NULL AND owner = ? AND ready_at > ?
"""

TAKE_LOCK: Final = """
UPDATE instance_locks
SET state = 1, wake_at = ?1, locked_until = ?1, lock_token = ?2, owner = ?3, kept = 0,
    carried_until = ?4, ready_at = ?5, ready_id = ?6, mail_held = ?7, yielded_at = NULL,
    locked_at = ?8
WHERE instance_id = ?9
"""

TAKE_LOCKS: Final = ManyRows(
    "WITH taken (instance_id, lock_token) AS (",
    2,
    """)
UPDATE instance_locks
SET state = 1, wake_at = ?, locked_until = ?, lock_token = taken.lock_token, owner = ?, kept = 0,
    carried_until = ?, locked_at = ?, ready_at = NULL, ready_id = NULL
FROM taken WHERE instance_locks.instance_id = taken.instance_id
""",
)

INSERT_KEPT_LOCK: Final = ManyRows(
    """
INSERT OR FAIL INTO instance_locks
    (instance_id, instance_key, name, version, state, wake_at, lock_token, locked_at, locked_until,
     owner, kept)
""",
    11,
)


class HeldLock(NamedTuple):
    """An instance lock that was found by its token, expired or not."""

    instance_id: str
    instance_key: int | None
    """None: there is neither a turn nor history yet."""
    locked_until: int
    kept: int
    carried_until: int | None
    suspended: int
    not_before: int | None
    block: str | None
    name: str | None
    version: str | None
    pending_since: int | None
    ready_at: int | None
    mail_held: int
    yielded_at: int | None
    running: int | None
    """The current execution, if the instance is shown as Running."""
    start_id: int | None
    """Message id of the first start that the lock carries, if there was no turn yet."""
    last_event: int | None
    """The last stored event of the current execution."""


_HELD_LOCK: Final = """
l.instance_id, l.instance_key, l.locked_until, l.kept, l.carried_until, l.suspended,
l.not_before, l.block, l.name, l.version, l.pending_since, l.ready_at, l.mail_held, l.yielded_at,
CASE i.status WHEN 'Running' THEN i.execution_id END,
CASE WHEN l.pending_since IS NOT NULL THEN
    (SELECT min(q.message_id) FROM orchestrator_queue AS q
     WHERE q.instance_id = l.instance_id AND q.start_name IS NOT NULL
       AND q.lock_token = l.lock_token) END,
(SELECT max(h.event_id) FROM history AS h
 WHERE h.instance_key = l.instance_key AND h.execution_id = i.execution_id)
"""

LOCK_HELD: Final = f"""
SELECT {_HELD_LOCK}
FROM instance_locks AS l LEFT JOIN instances AS i ON i.instance_key = l.instance_key
WHERE l.lock_token = ?
"""  # noqa: S608 - of constants
"""A row of HeldLock."""

LOCKS_HELD: Final = f"""
SELECT json_group_array(json_array(l.lock_token, {_HELD_LOCK}))
FROM json_each(?) AS given CROSS JOIN instance_locks AS l ON l.lock_token = given.value
LEFT JOIN instances AS i ON i.instance_key = l.instance_key
"""  # noqa: S608 - of constants
"""Returns, for each token that is found, the token and the columns of HeldLock."""

INSERT_BARE_LOCK: Final = """
INSERT INTO instance_locks (instance_id, instance_key, state) VALUES (?, ?, 1)
"""

DROP_LOCK: Final = """
UPDATE instance_locks
SET lock_token = NULL, locked_at = NULL, locked_until = NULL, owner = NULL, kept = 0,
    carried_until = NULL, mail_held = 0, yielded_at = NULL
WHERE instance_id = ?
"""

SET_HOLDS: Final = """
UPDATE instance_locks SET suspended = ?, not_before = ?, block = ? WHERE instance_id = ?
"""


class Existence(NamedTuple):
    """An id of an instance and the rows that exist for it."""

    instance_key: int | None
    execution_id: int | None
    has_row: int
    """1 if there is a readiness row: a message, a lock or a hold."""
    is_taken: int
    """1 if there is an instance, or its start is queued."""


ABSENT: Final = Existence(instance_key=None, execution_id=None, has_row=0, is_taken=0)
TAKEN: Final = Existence(instance_key=None, execution_id=1, has_row=0, is_taken=1)

_EXISTENCE: Final = """
i.instance_key, i.execution_id, l.instance_id IS NOT NULL,
ifnull(i.execution_id, 0) > 0 OR l.pending_since IS NOT NULL
"""

EXISTENCE_OF: Final = f"""
SELECT {_EXISTENCE}
FROM (SELECT ?1 AS id)
LEFT JOIN instances AS i ON i.instance_id = id
LEFT JOIN instance_locks AS l ON l.instance_id = id
"""  # noqa: S608 - of constants
"""A row of Existence, always."""

EXISTENCE_OF_MANY: Final = f"""
SELECT json_group_array(json_array(given.value, {_EXISTENCE}))
FROM json_each(?) AS given
LEFT JOIN instances AS i ON i.instance_id = given.value
LEFT JOIN instance_locks AS l ON l.instance_id = given.value
WHERE i.instance_id IS NOT NULL OR l.instance_id IS NOT NULL
"""  # noqa: S608 - of constants
"""Returns, for each id that has an instance or a readiness row, the id and the columns of
Existence."""

EXTEND_KEPT_LOCKS: Final = ForKeys("""
UPDATE instance_locks SET locked_until = ?2, touched_at = ?3 WHERE instance_id {given}
""")

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
SET state = ?, wake_at = NULL, ready_at = ?, ready_id = ?, lock_token = NULL,
    locked_at = NULL, locked_until = NULL, owner = NULL, kept = 0, carried_until = NULL,
    instance_key = ?, name = ?, version = ?, pending_since = NULL, not_before = NULL, block = NULL,
    touched_at = NULL, mail_held = ?, yielded_at = ?
WHERE instance_id = ?
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
     asked_visible_at, start_name, start_version, start_parent_id, timer_execution_id, timer_id,
     mail_number, mail_bytes)
""",
    15,
)


class WaitingMail(NamedTuple):
    """The numbered mail of an instance."""

    first: int
    before: int
    """Bytes of all mail before the first."""
    last: int
    size: int
    """Bytes of all mail up to the last."""


WAITING_MAIL: Final = """
SELECT first.mail_number, first.mail_bytes - octet_length(first.body), last.mail_number,
       last.mail_bytes
FROM (SELECT mail_number, mail_bytes, body FROM orchestrator_queue
      WHERE instance_id = ?1 AND mail_number IS NOT NULL ORDER BY mail_number LIMIT 1) AS first,
     (SELECT mail_number, mail_bytes FROM orchestrator_queue
      WHERE instance_id = ?1 AND mail_number IS NOT NULL ORDER BY mail_number DESC LIMIT 1) AS last
"""
"""A row of WaitingMail; none without numbered mail."""

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


_WITHOUT_MAIL: Final = "kind NOT IN ('ExternalRaised', 'QueueMessage')"
"""The condition of an index. Completions, timers, cancellations and starts."""

FIRST_WITHOUT_MAIL: Final = f"""
SELECT visible_at, message_id FROM orchestrator_queue
WHERE instance_id = ? AND {_WITHOUT_MAIL} AND lock_token IS NOT ?
ORDER BY visible_at, message_id LIMIT 1
"""  # noqa: S608 - of constants


class MessageRow(NamedTuple):
    """A message as a fetch reads it. Rows sort in the order of the queue."""

    message_id: int
    body: str
    attempt_count: int
    """Includes the attempt that hands it out."""
    visible_at: int
    enqueued_at: int
    start_name: str | None
    start_version: str | None
    start_parent_id: str | None
    size: int
    """Bytes of the body."""
    is_carried: int
    """1 if the message has the token that the statement was given."""


_MESSAGE: Final = """
SELECT message_id, body, attempt_count + 1 AS attempt_count, visible_at, enqueued_at, start_name,
       start_version, start_parent_id, octet_length(body) AS size, lock_token IS ?2 AS is_carried
FROM orchestrator_queue WHERE instance_id = ?1
"""

MESSAGES_BY_TIME: Final = f"{_MESSAGE} ORDER BY visible_at, message_id"
"""Rows of MessageRow, as in the next two."""

WITHOUT_MAIL: Final = f"""
{_MESSAGE} AND {_WITHOUT_MAIL} AND visible_at >= ?3 AND lock_token IS NOT ?2
ORDER BY visible_at, message_id
"""

GATHERED_AT_MOST: Final = 128


def gathered(messages: str, offset: int) -> str:
    """Return a statement for the next rows of MESSAGES_BY_TIME or WITHOUT_MAIL, as one list.

    Long texts are left out: all of them together may be longer than a batch by far.
    """
    return f"""
SELECT json_group_array(json_array(
    message_id, CASE WHEN size <= 8192 THEN body END, attempt_count, visible_at, enqueued_at,
    start_name, start_version, start_parent_id, size, is_carried
))
FROM ({messages} LIMIT {GATHERED_AT_MOST} OFFSET {offset})
"""  # noqa: S608 - of constants


BODY: Final = "SELECT body FROM orchestrator_queue WHERE message_id = ?"

STARTS: Final = f"{_MESSAGE} AND start_name IS NOT NULL ORDER BY message_id"

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
DELETE_CONSUMED: Final = ManyRows(
    "DELETE FROM orchestrator_queue WHERE (message_id, lock_token) IN (", 2, ")"
)
"""Deletes messages that the token carries; others stay."""
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

SENT: Final = """
instance_id, kind, body, asked_visible_at, start_name, start_version, start_parent_id,
timer_execution_id, timer_id
"""
"""The columns of a message as it was sent, in the queue and among the dead letters."""

COPY_DEAD: Final = f"""
INSERT INTO dead_letters (reason, dead_since, {SENT})
SELECT ?1, ?2, {SENT} FROM orchestrator_queue WHERE message_id = ?3
"""  # noqa: S608 - of constants

DELETE_MESSAGE: Final = "DELETE FROM orchestrator_queue WHERE message_id = ?"
