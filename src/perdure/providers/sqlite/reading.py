"""Reads for clients and for administration: histories, state, executions, queues and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.errors import CorruptData
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import (
    ActivityDepth,
    ActivityIdentity,
    DeadLetter,
    ExecutionInfo,
    HistoryRecord,
    KvEntry,
    OrchestratorMessage,
    QueueDepth,
    QueueDepths,
    QueuedMessage,
    QueuedWork,
    StartRouting,
    TimerIdentity,
    WorkerInfo,
    WorkerMessage,
)
from perdure.providers.sqlite import instances
from perdure.providers.sqlite.instances import parse_version
from perdure.providers.sqlite.statements import SENT

if TYPE_CHECKING:
    from perdure.providers.sqlite.database import Database
    from perdure.providers.sqlite.transaction import Snapshot

_KEY: Final = "SELECT instance_key, execution_id FROM instances WHERE instance_id = ?"

_CUSTOM_STATUS: Final = """
SELECT custom_status, custom_status_version FROM instances
WHERE instance_id = ? AND custom_status_version > ?
"""

_KV_VALUE: Final = """
SELECT iif(d.instance_key IS NULL, s.value, d.value)
FROM instances AS i
LEFT JOIN kv_delta AS d ON d.instance_key = i.instance_key AND d.key = ?2
LEFT JOIN kv_store AS s ON s.instance_key = i.instance_key AND s.key = ?2
WHERE i.instance_id = ?1
"""

_EXECUTION: Final = """
SELECT e.status, e.output, e.started_at, e.completed_at, e.framework_version,
       (SELECT count(*) FROM history AS h
        WHERE h.instance_key = e.instance_key AND h.execution_id = e.execution_id)
FROM instances AS i JOIN executions AS e USING (instance_key)
WHERE i.instance_id = ? AND e.execution_id = ?
"""

_EXECUTION_IDS: Final = """
SELECT e.execution_id FROM instances AS i JOIN executions AS e USING (instance_key)
WHERE i.instance_id = ? ORDER BY e.execution_id
"""

_LATEST: Final = """
SELECT max(
    coalesce((SELECT max(e.execution_id) FROM executions AS e
              WHERE e.instance_key = i.instance_key), 0),
    coalesce((SELECT max(h.execution_id) FROM history AS h
              WHERE h.instance_key = i.instance_key), 0))
FROM instances AS i WHERE i.instance_id = ?
"""

_MESSAGE_DEPTH: Final = """
SELECT count(*) FILTER (WHERE l.lock_token IS NULL AND q.visible_at <= ?1),
       count(*) FILTER (WHERE l.lock_token IS NULL AND q.visible_at > ?1),
       count(*) FILTER (WHERE l.lock_token IS NOT NULL),
       min(q.visible_at) FILTER (WHERE l.lock_token IS NULL AND q.visible_at <= ?1)
FROM orchestrator_queue AS q
LEFT JOIN instance_locks AS l
    ON l.instance_id = q.instance_id AND l.lock_token = q.lock_token AND l.locked_until > ?1
"""

_WORK_DEPTH: Final = """
SELECT count(*) FILTER (WHERE is_free AND visible_at <= ?1),
       count(*) FILTER (WHERE is_free AND visible_at > ?1),
       count(*) FILTER (WHERE NOT is_free),
       min(visible_at) FILTER (WHERE is_free AND visible_at <= ?1), name, tag
FROM (SELECT visible_at, locked_until IS NULL OR locked_until <= ?1 AS is_free, name, tag
      FROM worker_queue)
GROUP BY name, tag
"""

_MESSAGES: Final = f"""
SELECT message_id, visible_at, enqueued_at, attempt_count, EXISTS (
    SELECT 1 FROM instance_locks AS l
    WHERE l.instance_id = q.instance_id AND l.lock_token = q.lock_token AND l.locked_until > ?2),
    {SENT}
FROM orchestrator_queue AS q WHERE instance_id = ?1 ORDER BY message_id LIMIT ?3
"""  # noqa: S608 - of constants

_WORK: Final = """
SELECT message_id, instance_id, execution_id, activity_id, name, body, session_id, tag,
       asked_visible_at, visible_at, enqueued_at, attempt_count,
       iif(locked_until > ?2, locked_until, NULL), heartbeat
FROM worker_queue WHERE instance_id = ?1 ORDER BY message_id LIMIT ?3
"""

LETTERS: Final = f"SELECT letter_id, reason, dead_since, {SENT} FROM dead_letters "  # noqa: S608

worker_of: Final = msgspec.json.Decoder(WorkerInfo).decode
"""Decodes the record of a worker."""


# --- histories and state


def read(snapshot: Snapshot, instance_id: str) -> list[HistoryRecord]:
    """Return the history of the latest execution."""
    found = snapshot.row(_KEY, (instance_id,))
    if found is None:
        return []
    key, current = found
    last = snapshot.row(instances.LAST_HISTORY_EXECUTION, (key,))[0] or 0
    return read_page(snapshot, instance_id, max(current, last))


def read_page(
    snapshot: Snapshot,
    instance_id: str,
    execution_id: int,
    after_event_id: int = 0,
    limit: int | None = None,
) -> list[HistoryRecord]:
    """Return the history of one execution after an event."""
    found = snapshot.row(_KEY, (instance_id,))
    if found is None:
        return []
    try:
        return events(snapshot, found[0], execution_id, after_event_id, limit)
    except (UnicodeDecodeError, CorruptData) as error:
        raise CorruptData(
            "read",
            f"history of execution {execution_id} of {instance_id!r} is not readable: {error}",
        ) from error


def events(
    snapshot: Snapshot,
    instance_key: int,
    execution_id: int,
    after_event_id: int = 0,
    limit: int | None = None,
) -> list[HistoryRecord]:
    """Return events of one execution. Errors: CorruptData or UnicodeDecodeError if damaged."""
    rows = snapshot.events(
        instance_key, execution_id, after_event_id, -1 if limit is None else limit
    )
    return [HistoryRecord(event_id=event_id, data=data) for event_id, data in rows]


def custom_status(
    snapshot: Snapshot, instance_id: str, last_seen_version: int
) -> tuple[str | None, int] | None:
    row: tuple[str | None, int] | None = snapshot.row(
        _CUSTOM_STATUS, (instance_id, last_seen_version)
    )
    return row


def kv_value(snapshot: Snapshot, instance_id: str, key: str) -> str | None:
    row: tuple[str | None] | None = snapshot.row(_KV_VALUE, (instance_id, key))
    return None if row is None else row[0]


def kv_all_values(snapshot: Snapshot, instance_id: str) -> dict[str, KvEntry]:
    found = snapshot.row(_KEY, (instance_id,))
    if found is None:
        return {}
    return rules.merge_kv(kv_store(snapshot, found[0]), kv_delta(snapshot, found[0]))


def kv_store(snapshot: Snapshot, instance_key: int) -> dict[str, KvEntry]:
    return {
        key: KvEntry(value=value, updated_at_ms=updated_at)
        for key, value, updated_at in snapshot.execute(instances.KV_STORE, (instance_key,))
    }


def kv_delta(snapshot: Snapshot, instance_key: int) -> dict[str, KvEntry | None]:
    return {
        key: None if value is None else KvEntry(value=value, updated_at_ms=updated_at)
        for key, value, updated_at in snapshot.execute(instances.KV_DELTA, (instance_key,))
    }


def readable(snapshot: Snapshot, statement: str, parameters: tuple[Any, ...]) -> list[Any]:
    """Return rows whose bodies are damaged, with an escape for each byte that is not text.

    Such a body is not JSON: the runtime that gets it blocks its instance, and the others go on.
    """
    raw = statement.replace("body", "CAST(body AS BLOB)", 1)
    return [
        tuple(
            value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
            for value in row
        )
        for row in snapshot.rows(raw, parameters)
    ]


# --- executions


def list_executions(snapshot: Snapshot, instance_id: str) -> list[int]:
    return [row[0] for row in snapshot.rows(_EXECUTION_IDS, (instance_id,))]


def latest_execution_id(snapshot: Snapshot, instance_id: str) -> int:
    row = snapshot.row(_LATEST, (instance_id,))
    if row is None:
        raise rules.no_execution(instance_id)
    latest: int = row[0]
    return latest


def execution_info(snapshot: Snapshot, instance_id: str, execution_id: int) -> ExecutionInfo:
    row = snapshot.row(_EXECUTION, (instance_id, execution_id))
    if row is None:
        raise rules.no_execution(instance_id, execution_id)
    status, output, started_at, completed_at, pinned, events = row
    return ExecutionInfo(
        execution_id=execution_id,
        status=Status(status),
        output=output,
        started_at_ms=started_at,
        completed_at_ms=completed_at,
        event_count=events,
        framework_version=parse_version(pinned),
    )


# --- queues and workers


def depths(snapshot: Snapshot) -> QueueDepths:
    now = snapshot.now
    return QueueDepths.of(
        QueueDepth(**_depth(snapshot.row(_MESSAGE_DEPTH, (now,)), now)),
        [
            ActivityDepth(**_depth(counts, now), name=name, tag=tag)
            for *counts, name, tag in snapshot.rows(_WORK_DEPTH, (now,))
        ],
        dead_letters=snapshot.row("SELECT count(*) FROM dead_letters")[0],
    )


def list_messages(snapshot: Snapshot, instance_id: str, limit: int) -> list[QueuedMessage]:
    """Return the messages of an instance in queue order; a limit of -1 means all."""
    rows = _listed(snapshot, _MESSAGES, (instance_id, snapshot.now, limit))
    return [
        QueuedMessage(
            message_id=message_id,
            message=message_of(sent),
            visible_at_ms=visible_at,
            enqueued_at_ms=enqueued_at,
            attempt_count=attempts,
            locked=bool(locked),
        )
        for message_id, visible_at, enqueued_at, attempts, locked, *sent in rows
    ]


def list_work(snapshot: Snapshot, instance_id: str, limit: int) -> list[QueuedWork]:
    """Return the work items of an instance in queue order; a limit of -1 means all."""
    return [
        QueuedWork(
            message_id=row[0],
            message=WorkerMessage(
                identity=ActivityIdentity(*row[1:4]),
                name=row[4],
                body=row[5],
                session_id=row[6],
                tag=row[7],
                visible_at_ms=row[8],
            ),
            visible_at_ms=row[9],
            enqueued_at_ms=row[10],
            attempt_count=row[11],
            locked_until_ms=row[12],
            heartbeat=row[13],
        )
        for row in _listed(snapshot, _WORK, (instance_id, snapshot.now, limit))
    ]


def _listed(snapshot: Snapshot, statement: str, parameters: tuple[Any, ...]) -> list[Any]:
    """Return rows, also if a body is damaged: an operator ends its instance."""
    try:
        return snapshot.rows(statement, parameters)
    except UnicodeDecodeError:
        return readable(snapshot, statement, parameters)


def list_dead_letters(snapshot: Snapshot, limit: int) -> list[DeadLetter]:
    rows = snapshot.execute(LETTERS + "ORDER BY letter_id LIMIT ?", (limit,))
    return [
        DeadLetter(letter_id, reason, dead_since, message_of(sent))
        for letter_id, reason, dead_since, *sent in rows
    ]


def list_workers(snapshot: Snapshot, database: Database) -> list[WorkerInfo]:
    presence = database.peers.presence()
    found: list[WorkerInfo] = []
    rows = snapshot.rows("SELECT record, expires_at, holder FROM workers ORDER BY worker_id")
    for record, expires_at, holder in rows:
        shown_until = presence.get(holder, 0)
        if shown_until is None:  # its process has died
            continue
        later_ms = max(shown_until - expires_at, 0)
        if expires_at + later_ms > snapshot.now:
            worker = worker_of(record)
            found.append(msgspec.structs.replace(worker, seen_at_ms=worker.seen_at_ms + later_ms))
    return found


def _depth(row: Any, now: int) -> dict[str, Any]:
    visible, delayed, locked, oldest = row
    return {
        "visible": visible,
        "delayed": delayed,
        "locked": locked,
        "oldest_visible_age_ms": None if oldest is None else now - oldest,
    }


def message_of(row: Any) -> OrchestratorMessage:
    """Return the message in the columns of ``SENT``."""
    instance_id, kind, body, visible_at, name, version, parent, timer_execution, timer_id = row
    start = timer = None
    if name is not None:
        start = StartRouting(name=name, version=version, parent_instance_id=parent)
    if timer_id is not None:
        timer = TimerIdentity(execution_id=timer_execution, timer_id=timer_id)
    return OrchestratorMessage(
        instance_id=instance_id,
        kind=kind,
        body=body,
        visible_at_ms=visible_at,
        start=start,
        timer=timer,
    )
