"""Instances, executions, histories and state: rows, statements, and the rows after a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.sqlite.many_rows import ForKeys, ManyRows

if TYPE_CHECKING:
    from perdure.providers.records import TurnCommit, Version

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


INSTANCE_ROW: Final = f"""
SELECT {InstanceRow.columns()},
       coalesce(e.status, 'Running'), e.output, e.framework_version, e.completed_at
FROM instances AS i
LEFT JOIN executions AS e ON e.instance_key = i.instance_key AND e.execution_id = ?2
WHERE i.instance_key = ?1
"""  # noqa: S608 - of constants
"""InstanceRow, and ExecutionRow of one of its executions, as new if it is yet to come."""

TOUCH_INSTANCES: Final = ForKeys("UPDATE instances SET updated_at = ?2 WHERE instance_key {given}")

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

NEXT_INSTANCE_KEY: Final = "SELECT coalesce(max(instance_key), 0) + 1 FROM instances"

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

EXECUTION: Final = """
SELECT status, output, framework_version, completed_at
FROM executions WHERE instance_key = ? AND execution_id = ?
"""
"""A row of ExecutionRow."""

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
HAVE_KV_DELTA: Final = """
SELECT json_group_array(given.value) FROM json_each(?) AS given
WHERE EXISTS (SELECT 1 FROM kv_delta AS k WHERE k.instance_key = given.value)
"""
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


def format_version(version: Version) -> str:
    return f"{version[0]}.{version[1]}.{version[2]}"


def parse_version(text: str) -> tuple[int, int, int]:
    major, minor, patch = text.split(".")
    return int(major), int(minor), int(patch)
