"""The two queues, the dead letters and the list of workers, for administration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.errors import NotFound
from perdure.providers import rules
from perdure.providers.records import (
    ActivityIdentity,
    DeadLetter,
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
from perdure.providers.sqlite import messages

if TYPE_CHECKING:
    from perdure.providers.sqlite.transaction import Snapshot, Transaction

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
       min(visible_at) FILTER (WHERE is_free AND visible_at <= ?1)
FROM (SELECT visible_at, locked_until IS NULL OR locked_until <= ?1 AS is_free FROM worker_queue)
"""

_MESSAGES: Final = """
SELECT q.message_id, q.instance_id, q.kind, q.body, q.asked_visible_at, q.start_name,
       q.start_version, q.start_parent_id, q.timer_execution_id, q.timer_id, q.visible_at,
       q.enqueued_at, q.attempt_count, l.lock_token IS NOT NULL
FROM orchestrator_queue AS q
LEFT JOIN instance_locks AS l
    ON l.instance_id = q.instance_id AND l.lock_token = q.lock_token AND l.locked_until > ?2
WHERE q.instance_id = ?1 ORDER BY q.message_id LIMIT ?3
"""

_WORK: Final = """
SELECT message_id, instance_id, execution_id, activity_id, name, body, session_id, tag,
       asked_visible_at, visible_at, enqueued_at, attempt_count,
       iif(locked_until > ?2, locked_until, NULL), heartbeat
FROM worker_queue WHERE instance_id = ?1 ORDER BY message_id LIMIT ?3
"""

_LETTER_COLUMNS: Final = """
SELECT letter_id, instance_id, kind, body, asked_visible_at, start_name, start_version,
       start_parent_id, timer_execution_id, timer_id, reason, dead_since
FROM dead_letters
"""

_worker_decoder: Final = msgspec.json.Decoder(WorkerInfo)


def depths(snapshot: Snapshot) -> QueueDepths:
    now = snapshot.now
    return QueueDepths(
        orchestrator=_depth(snapshot.row(_MESSAGE_DEPTH, (now,)), now),
        worker=_depth(snapshot.row(_WORK_DEPTH, (now,)), now),
        dead_letters=snapshot.row("SELECT count(*) FROM dead_letters")[0],
    )


def list_messages(snapshot: Snapshot, instance_id: str, limit: int) -> list[QueuedMessage]:
    """Return the messages of an instance in queue order; a limit of -1 means all."""
    return [
        QueuedMessage(
            message_id=row[0],
            message=_message(row[1:10]),
            visible_at_ms=row[10],
            enqueued_at_ms=row[11],
            attempt_count=row[12],
            locked=bool(row[13]),
        )
        for row in snapshot.execute(_MESSAGES, (instance_id, snapshot.now, limit))
    ]


def list_work(snapshot: Snapshot, instance_id: str, limit: int) -> list[QueuedWork]:
    """Return the work items of an instance in queue order; a limit of -1 means all."""
    return [
        QueuedWork(
            message_id=row[0],
            message=WorkerMessage(
                identity=ActivityIdentity(
                    instance_id=row[1], execution_id=row[2], activity_id=row[3]
                ),
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
        for row in snapshot.execute(_WORK, (instance_id, snapshot.now, limit))
    ]


def list_dead_letters(snapshot: Snapshot, limit: int) -> list[DeadLetter]:
    return [
        DeadLetter(
            letter_id=row[0], message=_message(row[1:10]), reason=row[10], dead_since_ms=row[11]
        )
        for row in snapshot.execute(_LETTER_COLUMNS + "ORDER BY letter_id LIMIT ?", (limit,))
    ]


def requeue_dead_letter(tx: Transaction, letter_id: int) -> None:
    row = tx.row(_LETTER_COLUMNS + "WHERE letter_id = ?", (letter_id,))
    delete_dead_letter(tx, letter_id)
    message = _message(row[1:10])
    messages.insert(tx, message, rules.visible_at(message.visible_at_ms, tx.now))


def delete_dead_letter(tx: Transaction, letter_id: int) -> None:
    if tx.change("DELETE FROM dead_letters WHERE letter_id = ?", (letter_id,)) != 1:
        raise NotFound(f"there is no dead letter {letter_id}")


def register_worker(tx: Transaction, worker: WorkerInfo, ttl_ms: int) -> None:
    # Each registration deletes the workers whose time is over.
    tx.execute("DELETE FROM workers WHERE expires_at <= ?", (tx.now,))
    if ttl_ms == 0:
        tx.execute("DELETE FROM workers WHERE worker_id = ?", (worker.worker_id,))
        return
    record = msgspec.json.encode(msgspec.structs.replace(worker, seen_at_ms=tx.now)).decode()
    tx.execute(
        "INSERT OR REPLACE INTO workers VALUES (?, ?, ?, ?)",
        (worker.worker_id, record, tx.now + ttl_ms, tx.holder),
    )


def list_workers(snapshot: Snapshot) -> list[WorkerInfo]:
    rows = snapshot.rows(
        "SELECT record FROM workers WHERE expires_at > ? ORDER BY worker_id", (snapshot.now,)
    )
    return [_worker_decoder.decode(row[0]) for row in rows]


def _depth(row: Any, now: int) -> QueueDepth:
    visible, delayed, locked, oldest = row
    return QueueDepth(
        visible=visible,
        delayed=delayed,
        locked=locked,
        oldest_visible_age_ms=None if oldest is None else now - oldest,
    )


def _message(row: Any) -> OrchestratorMessage:
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
