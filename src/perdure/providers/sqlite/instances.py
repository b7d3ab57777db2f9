"""Instances with their executions, histories and state.

Their rows and statements, their rows after a turn, whether one exists or has ended, and deletion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from zlib import crc32

from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import DeleteResult, KvClear, KvSet
from perdure.providers.sqlite import statements
from perdure.providers.sqlite.statements import Existence
from perdure.providers.sqlite.transaction import ForKeys, ManyRows, as_list, rows_at_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.providers.records import HistoryRecord, KvChange, TurnCommit, Version
    from perdure.providers.sqlite.transaction import Snapshot, Transaction

EventRow: TypeAlias = tuple[int, int, int, str, int | None]

# --- instances and executions

INSTANCE_BY_ID: Final = """
SELECT instance_key, execution_id, status, name, version FROM instances WHERE instance_id = ?
"""

INSTANCE_BY_KEY: Final = """
SELECT name, version, execution_id, parent_instance_id FROM instances WHERE instance_key = ?
"""


class InstanceRow(NamedTuple):
    """The columns of ``instances`` but for key and id."""

    is_named: int
    name: str | None
    version: str | None
    parent_instance_id: str | None
    execution_id: int
    status: str
    framework_version: str | None
    custom_status: str | None
    custom_status_version: int
    created_at: int
    updated_at: int
    completed_at: int | None

    @classmethod
    def columns(cls) -> str:
        """Return the columns, of ``instances AS i``, as a SELECT names them."""
        return ", ".join(f"i.{column}" for column in cls._fields)


class ExecutionRow(NamedTuple):
    """The columns of ``executions`` that a turn can change."""

    status: str
    output: str | None
    framework_version: str | None
    completed_at: int | None


_EXECUTION: Final = ", ".join(ExecutionRow._fields)

INSTANCE_ROW: Final = f"""
SELECT {InstanceRow.columns()},
       coalesce(e.status, 'Running'), e.output, e.framework_version, e.completed_at
FROM instances AS i
LEFT JOIN executions AS e ON e.instance_key = i.instance_key AND e.execution_id = ?2
WHERE i.instance_key = ?1
"""  # noqa: S608 - of constants
"""InstanceRow, and ExecutionRow of one of its executions, as new if it is yet to come."""

TOUCH_INSTANCE: Final = "UPDATE instances SET updated_at = ? WHERE instance_key = ?"

END_INSTANCES: Final = ForKeys("""
UPDATE instances SET status = ?2, updated_at = ?3, completed_at = ?3 WHERE instance_key {given}
""")
"""Not UPDATE_INSTANCE: SQLite writes the index of every column that is set."""

END_EXECUTIONS: Final = ManyRows(
    """
WITH ended (instance_key, execution_id, status, output) AS (
""",
    4,
    """)
INSERT OR FAIL INTO executions
    (instance_key, execution_id, status, output, completed_at, started_at)
SELECT instance_key, execution_id, status, output, ?, ? FROM ended WHERE true
ON CONFLICT DO UPDATE
SET status = excluded.status, output = coalesce(excluded.output, output),
    completed_at = excluded.completed_at
""",
)

_NEXT_KEY: Final = "SELECT max(coalesce(max(instance_key), 0) + 1, ?) FROM instances"

INSERT_INSTANCE: Final = ManyRows(
    f"""
INSERT OR FAIL INTO instances (instance_key, instance_id, {", ".join(InstanceRow._fields)})
""",
    2 + len(InstanceRow._fields),
)

UPDATE_INSTANCE: Final = f"""
UPDATE instances SET {", ".join(f"{column} = ?" for column in InstanceRow._fields)}
WHERE instance_key = ?
"""  # noqa: S608 - of constants

SET_STATUS: Final = "UPDATE instances SET status = ?1 WHERE instance_key = ?2"

CURRENT_STATUS: Final = """
SELECT e.status FROM instances AS i JOIN executions AS e USING (instance_key, execution_id)
WHERE i.instance_key = ?
"""

_CURRENT_STATUSES: Final = ForKeys("""
SELECT i.instance_id, e.status
FROM instances AS i JOIN executions AS e USING (instance_key, execution_id)
WHERE i.instance_id {given}
""")

EXECUTION: Final = f"""
SELECT {_EXECUTION} FROM executions WHERE instance_key = ? AND execution_id = ?
"""  # noqa: S608 - of constants
"""A row of ExecutionRow."""

PUT_EXECUTION: Final = ManyRows(
    f"INSERT OR FAIL INTO executions (instance_key, execution_id, {_EXECUTION}, started_at)",
    3 + len(ExecutionRow._fields),
    """
ON CONFLICT DO UPDATE
SET status = excluded.status, output = excluded.output, completed_at = excluded.completed_at,
    framework_version = excluded.framework_version
""",
)

INSERT_EVENT: Final = ManyRows("INSERT OR FAIL INTO history", 5)
"""Rows of EventRow, which has all columns."""

LAST_EVENT: Final = """
SELECT max(event_id) FROM history WHERE instance_key = ? AND execution_id = ?
"""

LAST_HISTORY_EXECUTION: Final = "SELECT max(execution_id) FROM history WHERE instance_key = ?"

# --- state

KV_STORE: Final = "SELECT key, value, updated_at FROM kv_store WHERE instance_key = ? ORDER BY key"
KV_DELTA: Final = "SELECT key, value, updated_at FROM kv_delta WHERE instance_key = ? ORDER BY key"
PUT_KV_DELTA: Final = "INSERT OR REPLACE INTO kv_delta VALUES (?, ?, ?, ?)"
PUT_KV_STORE: Final = "INSERT OR REPLACE INTO kv_store VALUES (?, ?, ?, ?)"
_CLEAR_ALL_IN_DELTA: Final = """
INSERT OR REPLACE INTO kv_delta
SELECT instance_key, key, NULL, NULL FROM kv_store WHERE instance_key = ?1
UNION SELECT instance_key, key, NULL, NULL FROM kv_delta WHERE instance_key = ?1
"""
_HAS_KV_DELTA: Final = ForKeys(
    "SELECT DISTINCT instance_key FROM kv_delta WHERE instance_key {given}"
)
_MERGE_KV: Final = """
INSERT OR REPLACE INTO kv_store
SELECT instance_key, key, value, updated_at FROM kv_delta
WHERE instance_key = ? AND value IS NOT NULL
"""
_DROP_CLEARED_KV: Final = """
DELETE FROM kv_store
WHERE instance_key = ?1
  AND key IN (SELECT key FROM kv_delta WHERE instance_key = ?1 AND value IS NULL)
"""
_EMPTY_KV_DELTA: Final = "DELETE FROM kv_delta WHERE instance_key = ?"

# --- trees

_CHILDREN: Final = ForKeys("""
SELECT instance_id, parent_instance_id, created_at FROM instances
WHERE parent_instance_id {given} AND execution_id > 0
UNION
SELECT q.instance_id, q.start_parent_id, iif(i.execution_id > 0, i.created_at, l.pending_since)
FROM orchestrator_queue AS q
LEFT JOIN instances AS i ON i.instance_id = q.instance_id
LEFT JOIN instance_locks AS l ON l.instance_id = q.instance_id
WHERE q.start_parent_id {given} AND i.name IS NULL
  AND q.message_id = (
      SELECT min(s.message_id) FROM orchestrator_queue AS s
      WHERE s.instance_id = q.instance_id AND s.start_name IS NOT NULL
  )
ORDER BY 3, 1
""")
"""With their parents, oldest first. An instance that no turn has named goes by its first start."""

_HAVE_ANYTHING: Final = """
SELECT value FROM json_each(?)
WHERE EXISTS (SELECT 1 FROM instances WHERE instance_id = value)
   OR EXISTS (SELECT 1 FROM orchestrator_queue WHERE instance_id = value)
   OR EXISTS (SELECT 1 FROM worker_queue WHERE instance_id = value)
"""

_DELETE_BY_KEY: Final = [
    ForKeys(f"DELETE FROM {table} WHERE instance_key {{given}}")  # noqa: S608 - of constants
    for table in ("history", "executions", "kv_store", "kv_delta", "instances")
]
_DELETE_BY_ID: Final = [
    ForKeys(f"DELETE FROM {table} WHERE instance_id {{given}}")  # noqa: S608 - of constants
    for table in ("orchestrator_queue", "worker_queue")
]

_SESSIONS_OF: Final = ForKeys("""
SELECT DISTINCT session_id FROM worker_queue
WHERE instance_id {given} AND session_id IS NOT NULL
""")
_DELETE_EMPTY_SESSIONS: Final = ForKeys("""
DELETE FROM sessions WHERE session_id {given}
  AND NOT EXISTS (SELECT 1 FROM worker_queue AS q WHERE q.session_id = sessions.session_id)
""")


# --- history


def event_rows(
    tx: Transaction, key: int, execution_id: int, records: Sequence[HistoryRecord]
) -> list[EventRow]:
    """Return the rows of events, for ``INSERT_EVENT``."""
    if not tx.keeps_checksums:
        return [(key, execution_id, each.event_id, each.data, None) for each in records]
    return [
        (key, execution_id, each.event_id, each.data, crc32(each.data.encode())) for each in records
    ]


# --- state


def change_state(tx: Transaction, key: int, changes: Sequence[KvChange]) -> None:
    """Write the changes of the current execution."""
    for change in changes:
        match change:
            case KvSet():
                values = (key, change.key, change.value, change.updated_at_ms)
                tx.write(PUT_KV_DELTA, values)
            case KvClear():
                tx.write(PUT_KV_DELTA, (key, change.key, None, None))
            case _:
                tx.write(_CLEAR_ALL_IN_DELTA, (key,))


def merge_state(tx: Transaction, keys: Sequence[int]) -> None:
    """Merge the changes of executions that end into the state of their instances."""
    for changed in _HAS_KV_DELTA.rows(tx, keys):
        tx.write(_MERGE_KV, changed)
        tx.write(_DROP_CLEARED_KV, changed)
        tx.write(_EMPTY_KV_DELTA, changed)


# --- existence


def next_key(tx: Transaction) -> int:
    """Return a key that no instance has. Those above it are free too."""
    key: int = tx.row(_NEXT_KEY, (tx.first_key,))[0]
    return key


def exists(tx: Transaction, instance_id: str) -> bool:
    """Return True if there is an instance, or its start is queued."""
    return bool(find_existence(tx, instance_id).is_taken)


def find_existence(tx: Transaction, instance_id: str) -> Existence:
    """Return what there is under that id."""
    return Existence._make(tx.row(statements.EXISTENCE_OF, (instance_id,)))


def find_existences(tx: Transaction, instance_ids: Iterable[str]) -> dict[str, Existence]:
    """Return what there is under each of these ids, without those under which there is nothing."""
    found = rows_at_once(tx, statements.EXISTENCE_OF_MANY, (as_list(instance_ids),))
    return {instance_id: Existence._make(row) for instance_id, *row in found}


def find_ended(tx: Transaction, instance_ids: Sequence[str]) -> set[str]:
    """Return those instances that have begun and ended for good."""
    return {
        instance_id
        for instance_id, status in _CURRENT_STATUSES.rows(tx, instance_ids)
        if rules.has_ended(
            Status(status),
            start_queued=status == Status.CONTINUED_AS_NEW
            and tx.row(statements.QUEUED_START, (instance_id,)) is not None,
        )
    }


def has_ended(tx: Transaction, instance_id: str) -> bool:
    """Return True if an instance has begun and ended for good."""
    return bool(find_ended(tx, (instance_id,)))


def require_alive(tx: Transaction, instance_id: str) -> None:
    """Raise NotFound for an unknown instance, InstanceFinished for one that has ended."""
    if not exists(tx, instance_id):
        raise rules.no_instance(instance_id)
    if has_ended(tx, instance_id):
        raise rules.instance_finished(instance_id)


# --- trees and deletion


def find_children(snapshot: Snapshot, instance_ids: Sequence[str]) -> list[tuple[str, str]]:
    """Return the children of these instances, oldest first, each with its parent."""
    return [row[:2] for row in _CHILDREN.rows(snapshot, instance_ids)]


def list_children(snapshot: Snapshot, instance_id: str) -> list[str]:
    """Return the children of an instance, oldest first."""
    return [child_id for child_id, _ in find_children(snapshot, (instance_id,))]


def tree_of(snapshot: Snapshot, root_id: str) -> list[str]:
    """Return the instance and its descendants, parents first."""
    tree = level = {root_id: None}
    while level:
        found = find_children(snapshot, list(level))
        level = {child_id: None for child_id, _ in found if child_id not in tree}
        tree = tree | level
    return list(tree)


def have_anything(tx: Transaction, instance_ids: Iterable[str]) -> list[str]:
    """Return those ids that any row of the store has, also a message or a work item alone."""
    return [row[0] for row in tx.rows(_HAVE_ANYTHING, (as_list(instance_ids),))]


def delete_tree(tx: Transaction, root_id: str) -> None:
    """Delete all rows of that id and of its descendants, running or not.

    Without a row of that id, instances that name it as their parent stay.
    """
    if have_anything(tx, (root_id,)):
        delete_instances(tx, tree_of(tx, root_id))


def delete_instances(tx: Transaction, instance_ids: Sequence[str]) -> DeleteResult:
    """Remove instances with their messages, locks and state; nothing is checked."""
    found = find_existences(tx, instance_ids).values()
    keys = [each.instance_key for each in found if each.instance_key is not None]
    events, executions, *_ = [each.count(tx, keys) for each in _DELETE_BY_KEY]
    sessions = [row[0] for row in _SESSIONS_OF.rows(tx, instance_ids)]
    messages = sum(each.count(tx, instance_ids) for each in _DELETE_BY_ID)
    _DELETE_EMPTY_SESSIONS.execute(tx, sessions)
    statements.DELETE_LOCKS.execute(tx, instance_ids)
    tx.changed_instances += instance_ids
    return DeleteResult(
        instances=sum(each.is_taken for each in found),
        executions=executions,
        events=events,
        messages=messages,
    )


# --- rows after a turn

NO_INSTANCE: Final = InstanceRow(
    is_named=0, name=None, version=None, parent_instance_id=None, execution_id=0,
    status=Status.PENDING, framework_version=None, custom_status=None, custom_status_version=0,
    created_at=0, updated_at=0, completed_at=None,
)  # fmt: skip
"""Before the first turn: only history exists, or only messages."""

NEW_EXECUTION: Final = ExecutionRow(
    status=Status.RUNNING, output=None, framework_version=None, completed_at=None
)


class Start(NamedTuple):
    """The start message that a new instance gets its first values from."""

    name: str | None
    version: str | None
    parent_instance_id: str | None
    enqueued_at: int


def instance_after(
    now: int,
    before: InstanceRow | None,
    start: Start | None,
    commit: TurnCommit,
    latest: ExecutionRow,
    *,
    is_suspended: bool,
) -> InstanceRow:
    """Return the row of an instance after this turn.

    ``before`` is the row before, None if it is new; ``latest`` is its latest execution after the
    turn.
    """
    metadata = commit.metadata
    if before is not None and before.execution_id > 0:
        is_named, name, version, parent, execution_id, *_ = before
        created_at = before.created_at
        custom_status = before.custom_status
        custom_version = before.custom_status_version
    else:
        name, version, parent, created_at = start or (None, None, None, now)
        is_named = execution_id = custom_version = 0
        custom_status = None
    if metadata.name is not None:
        if not is_named:
            parent = metadata.parent_instance_id
        is_named, name, version = 1, metadata.name, metadata.version
    if commit.custom_status is not None:
        custom_status, custom_version = commit.custom_status.value, custom_version + 1
    return InstanceRow(
        is_named,
        name,
        version,
        parent,
        max(execution_id, commit.execution_id),
        rules.shown_status(Status(latest.status), suspended=is_suspended, blocked=False),
        latest.framework_version,
        custom_status,
        custom_version,
        created_at,
        now,
        latest.completed_at,
    )


def execution_after(now: int, before: ExecutionRow, commit: TurnCommit) -> ExecutionRow:
    """Return the row of an execution after this turn."""
    metadata = commit.metadata
    status, output, pinned, completed_at = before
    if metadata.framework_version is not None:
        pinned = format_version(metadata.framework_version)
    if metadata.output is not None:
        output = metadata.output
    if metadata.status is not None:
        status = metadata.status
        completed_at = now if metadata.status.ends_execution else None
    return ExecutionRow(status, output, pinned, completed_at)


def format_version(version: Version | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


def parse_version(text: str | None) -> Version | None:
    if text is None:
        return None
    major, minor, patch = map(int, text.split("."))
    return major, minor, patch
