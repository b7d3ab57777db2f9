"""Changes by operators: pause, resume, lock, delete, prune; also dead letters and workers.

At the end, the changes of locks that the store makes by itself: of a process that has died, after a
stall, and after a clock that went back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import DeleteResult, PruneResult
from perdure.providers.sqlite import (
    instances,
    listing,
    messages,
    readiness,
    reading,
    statements,
    turns,
)
from perdure.providers.sqlite.connection import enforce_moved_mark, moved_to
from perdure.providers.sqlite.transaction import Snapshot, Transaction, Verb, as_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.records import FetchedOrchestration, PruneOptions, WorkerInfo
    from perdure.providers.sqlite.database import Database

_EXECUTIONS: Final = """
SELECT execution_id, status, completed_at FROM executions WHERE instance_key = ?
"""

_DELETE_EXECUTIONS, _DELETE_EVENTS = (
    f"""
DELETE FROM {table}
WHERE instance_key = ? AND execution_id IN (SELECT value FROM json_each(?))
"""  # noqa: S608 - of constants
    for table in ("executions", "history")
)

_OLDEST: Final = """
SELECT created_at, instance_id FROM instances
WHERE execution_id > 0 {roots} AND (?1 IS NULL OR completed_at < ?1)
  AND (created_at, instance_id) > (?2, ?3)
ORDER BY created_at, instance_id LIMIT ?4
"""
_OLDEST_BEGUN: Final = _OLDEST.format(roots="")
_OLDEST_FINISHED_ROOTS: Final = _OLDEST.format(
    roots="AND parent_instance_id IS NULL AND status NOT IN ('Pending', 'Running')"
)

_COMPLETED_AT: Final = """
SELECT created_at, completed_at, parent_instance_id FROM instances
WHERE instance_id = ? AND execution_id > 0
"""


def suspend(tx: Transaction, instance_id: str) -> None:
    instances.require_alive(tx, instance_id)
    key = instances.find_existence(tx, instance_id).instance_key
    facts = readiness.find_facts(tx, instance_id)
    if facts is None:
        tx.write(statements.INSERT_BARE_LOCK, (instance_id, key))
        facts = readiness.NO_FACTS
    if facts.suspended:
        return
    tx.write(statements.DROP_LOCK, (instance_id,))
    _set_holds(tx, instance_id, key, (1, facts.not_before, facts.block))


def resume(tx: Transaction, instance_id: str) -> None:
    instances.require_alive(tx, instance_id)
    key = instances.find_existence(tx, instance_id).instance_key
    tx.write(statements.RESET_ATTEMPTS, (instance_id,))
    _set_holds(tx, instance_id, key, (0, None, None))


def _set_holds(
    tx: Transaction, instance_id: str, key: int | None, holds: tuple[int, int | None, str | None]
) -> None:
    """Write suspension, end of a delay and block of an instance, and all that follows from them."""
    tx.write(statements.SET_HOLDS, (*holds, instance_id))
    if key is not None:
        suspended, _, block = holds
        turns.show_status(tx, key, suspended=bool(suspended), blocked=block is not None)
    readiness.refresh(tx, instance_id)
    tx.changed_instances.append(instance_id)


def lock(tx: Transaction, instance_id: str, lock_timeout_ms: int) -> FetchedOrchestration:
    existence = instances.find_existence(tx, instance_id)
    if not existence.is_taken:
        raise rules.no_instance(instance_id)
    return turns.take_over(tx, instance_id, existence.instance_key, lock_timeout_ms)


def delete_atomic(tx: Transaction, instance_ids: Sequence[str], force: bool) -> DeleteResult:
    named = dict.fromkeys(instance_ids)
    found = instances.find_existences(tx, named)
    existing = {instance_id for instance_id, each in found.items() if each.is_taken}
    if not existing:
        raise rules.none_exists(named)
    ended = existing if force else instances.find_ended(tx, list(named))
    for instance_id in named:
        if instance_id in existing and instance_id not in ended:
            raise rules.still_running(instance_id)
    stored = instances.have_anything(tx, named)
    for child_id, parent_id in instances.find_children(tx, stored):
        if child_id not in named:
            raise rules.would_orphan(child_id, parent_id)
    return _delete(tx, stored)


def list_oldest(
    snapshot: Snapshot,
    instance_ids: tuple[str, ...] | None,
    completed_before_ms: int | None,
    after: tuple[int, str],
    limit: int,
    finished_roots: bool,
) -> list[tuple[int, str]]:
    """Return instances that have begun, or finished roots, after one in their order."""
    if instance_ids is None:
        statement = _OLDEST_FINISHED_ROOTS if finished_roots else _OLDEST_BEGUN
        return list(snapshot.rows(statement, (completed_before_ms, *after, limit)))
    found: list[tuple[int, str]] = []
    for instance_id in set(instance_ids):
        row = snapshot.row(_COMPLETED_AT, (instance_id,))
        if row is not None and rules.is_before(row[1], completed_before_ms):
            position = (row[0], instance_id)
            if position > after and not (finished_roots and row[2] is not None):
                found.append(position)
    return sorted(found)[:limit]


def delete_finished_tree(
    tx: Transaction, root_id: str, completed_before_ms: int | None
) -> DeleteResult:
    """Delete a root with its tree, or nothing if it is none or any of them has not ended."""
    root = listing.find_info(tx, root_id)
    if root is None or root.parent_instance_id is not None:
        return DeleteResult()
    if not rules.is_before(root.completed_at_ms, completed_before_ms):
        return DeleteResult()
    tree = instances.tree_of(tx, root_id)
    if instances.find_ended(tx, tree) != set(tree):
        return DeleteResult()
    return _delete(tx, tree)


def _delete(tx: Transaction, instance_ids: Sequence[str]) -> DeleteResult:
    deleted = instances.delete_instances(tx, instance_ids)
    tx.give_back_pages()
    return deleted


def prune(tx: Transaction, instance_id: str, options: PruneOptions) -> PruneResult:
    key, execution_id, _, is_taken = instances.find_existence(tx, instance_id)
    if not execution_id:
        if not is_taken:
            raise rules.no_instance(instance_id)
        return PruneResult(instances_processed=1)
    executions = {
        number: (Status(status), completed_at)
        for number, status, completed_at in tx.rows(_EXECUTIONS, (key,))
    }
    pruned = rules.executions_to_prune(executions, execution_id, options)
    tx.write(_DELETE_EXECUTIONS, (key, as_list(pruned)))
    events = tx.change(_DELETE_EVENTS, (key, as_list(pruned)))
    tx.changed_instances.append(instance_id)
    return PruneResult(instances_processed=1, executions=len(pruned), events=events)


# --- dead letters and workers


def requeue_dead_letter(tx: Transaction, letter_id: int) -> None:
    row = tx.row(reading.LETTERS + "WHERE letter_id = ?", (letter_id,))
    delete_dead_letter(tx, letter_id)
    message = reading.message_of(row[3:])
    messages.insert(tx, message, rules.visible_at(message.visible_at_ms, tx.now))


def delete_dead_letter(tx: Transaction, letter_id: int) -> None:
    if tx.change("DELETE FROM dead_letters WHERE letter_id = ?", (letter_id,)) != 1:
        raise rules.no_dead_letter(letter_id)


_WORKER: Final = "SELECT record, holder, expires_at FROM workers WHERE worker_id = ?"

_LAPSED_MS_KEPT: Final = 3_600_000
"""Each registration deletes other workers that have lapsed longer ago: a clock may go back a bit.
"""

_DELETE_LAPSED: Final = """
DELETE FROM workers
WHERE expires_at <= ?1 AND worker_id <> ?2
  AND ifnull(holder, '') NOT IN (SELECT value FROM json_each(?3))
"""


def register_worker(tx: Transaction, worker: WorkerInfo, ttl_ms: int, database: Database) -> None:
    """Write the entry of a worker, unless it is there and the database can show it without."""
    long_ago = tx.now - _LAPSED_MS_KEPT
    presence = database.peers.presence()
    announced = [each for each, until in presence.items() if (until or 0) > long_ago]
    tx.write(_DELETE_LAPSED, (long_ago, worker.worker_id, as_list(announced)))
    if ttl_ms == 0:
        tx.write("DELETE FROM workers WHERE worker_id = ?", (worker.worker_id,))
        return
    known = tx.row(_WORKER, (worker.worker_id,))
    if known is not None and known[1] == tx.holder:
        before = reading.worker_of(known[0])
        is_same = before == msgspec.structs.replace(worker, seen_at_ms=before.seen_at_ms)
        # Its entry tells when it was seen by the time that it is valid for.
        is_same = is_same and known[2] - before.seen_at_ms == ttl_ms
        if is_same and database.show_worker_until(tx.now + ttl_ms):
            return
    record = msgspec.json.encode(msgspec.structs.replace(worker, seen_at_ms=tx.now)).decode()
    tx.write(
        "INSERT OR REPLACE INTO workers VALUES (?, ?, ?, ?)",
        (worker.worker_id, record, tx.now + ttl_ms, tx.holder),
    )


def mark_moved(tx: Transaction, location: str | None) -> None:
    tx.write("UPDATE store_info SET moved_to = ?", (location,))
    enforce_moved_mark(tx.connection)


# --- locks that end or last without their holder

_HELD_INSTANCES: Final = """
SELECT instance_id FROM instance_locks
WHERE lock_token >= ?1 AND lock_token < ?2 AND locked_until > ?3
"""
_END_LOCK: Final = "UPDATE instance_locks SET locked_until = ? WHERE instance_id = ?"
_END_WORK_LOCKS: Final = """
UPDATE worker_queue SET locked_until = ?3, wake_at = ?3
WHERE lock_token >= ?1 AND lock_token < ?2 AND locked_until > ?3
"""
_END_SESSIONS: Final = """
UPDATE sessions SET locked_until = ?2
WHERE owner_id IN (SELECT worker_id FROM workers WHERE holder = ?1) AND locked_until > ?2
"""


def release_holder(tx: Transaction, holder: str) -> None:
    """Let every lock of a dead process end now. Its tokens begin with the holder."""
    held = (holder, f"{holder}\x7f", tx.now)
    for (instance_id,) in tx.rows(_HELD_INSTANCES, held):
        tx.write(_END_LOCK, (tx.now, instance_id))
        readiness.refresh(tx, instance_id)
    if tx.change(_END_WORK_LOCKS, held):
        tx.work_changed = True
    if tx.change(_END_SESSIONS, (holder, tx.now)):
        tx.work_changed = True
    tx.write("DELETE FROM workers WHERE holder = ?", (holder,))


RELEASE_HOLDER: Final = Verb("release_holder", release_holder)


STALL_GRACE_MS: Final = 15_000
"""After a stall of the store, so long its clients have to renew their locks."""

_EXTEND_STALLED: Final = (
    """
UPDATE instance_locks SET locked_until = ?1, wake_at = ?1
WHERE wake_at <= ?2 AND state = 1 AND locked_until <= ?2 AND locked_until > ?3
""",
    """
UPDATE worker_queue SET locked_until = ?1, wake_at = max(?1, visible_at)
WHERE wake_at <= ?2 AND state = 1 AND locked_until <= ?2 AND locked_until > ?3
""",
    "UPDATE sessions SET locked_until = ?1 WHERE locked_until <= ?2 AND locked_until > ?3",
)


def extend_stalled_locks(tx: Transaction, since: int) -> None:
    """Extend the locks that ran out since then: nothing could renew them while the store stalled.

    They are still held by their tokens, so their work is not handed out and counted once more.
    """
    if moved_to(tx.connection) is not None:
        return  # nothing may be changed, and nothing can be fetched
    ended = (tx.now + STALL_GRACE_MS, tx.now, since)
    for statement in _EXTEND_STALLED:
        tx.write(statement, ended)


# The latest time at which something was queued or locked, for all that is known.
_LATEST_TIME: Final = """
SELECT coalesce(max(latest), 0)
FROM (SELECT enqueued_at AS latest FROM orchestrator_queue
      WHERE message_id = (SELECT max(message_id) FROM orchestrator_queue)
      UNION ALL
      SELECT enqueued_at FROM worker_queue
      WHERE message_id = (SELECT max(message_id) FROM worker_queue)
      UNION ALL
      SELECT max(max(coalesce(locked_at, 0), coalesce(touched_at, 0))) FROM instance_locks)
"""
_REFRESHED_INSTANCES: Final = """
SELECT instance_id FROM orchestrator_queue WHERE enqueued_at > ?1
UNION SELECT instance_id FROM instance_locks WHERE yielded_at > ?1
"""
_FOLLOW_CLOCK_BACK: Final = (
    *(
        f"""
UPDATE {table}
SET enqueued_at = ?1, visible_at = iif(visible_at <= enqueued_at, min(visible_at, ?1), visible_at)
WHERE enqueued_at > ?1
"""  # noqa: S608 - of constants
        for table in ("orchestrator_queue", "worker_queue")
    ),
    *(
        f"UPDATE instance_locks SET {time} = ?1 WHERE {time} > ?1"  # noqa: S608
        for time in ("yielded_at", "locked_at", "touched_at")
    ),
    """
UPDATE instance_locks SET locked_until = max(?1, locked_until - ?2), wake_at = min(wake_at, ?1)
WHERE locked_until > ?1
""",
    """
UPDATE instance_locks SET not_before = max(?1, not_before - ?2), wake_at = min(wake_at, ?1)
WHERE not_before > ?1
""",
    """
UPDATE worker_queue
SET locked_until = max(?1, locked_until - ?2), wake_at = max(?1, visible_at, locked_until - ?2)
WHERE locked_until > ?1
""",
    """
UPDATE sessions SET locked_until = max(?1, locked_until - ?2),
    last_activity_at = min(last_activity_at, ?1)
WHERE locked_until > ?1
""",
    "UPDATE workers SET expires_at = max(?1, expires_at - ?2) WHERE expires_at > ?1",
)


_LAST_JUMP: Final = "SELECT clock_was_at, clock_set_to FROM store_info"
_NOTE_JUMP: Final = "UPDATE store_info SET clock_was_at = ?, clock_set_to = ?"


class ClockFollower:
    """Lets a store follow a clock that went back, once for all handles of all processes.

    Following it moves all times of the store to the time that the clock was set to. So a later one
    in the store tells that the clock went back and was not followed yet.
    """

    def __init__(self) -> None:
        self.latest: int | None = None
        """Time of the last transaction of this process; None before the first."""
        self._last_jump: Sequence[int | None] = (None, None)
        """The last time that the clock went back, as the store had it when this process looked."""

    def follow(self, tx: Transaction) -> tuple[int, int] | None:
        """Compare the time of a transaction with the latest one. If rows were changed, return the
        times between which the clock went back.

        To be called by the first transaction, and by one whose time is before ``latest``. Call
        ``followed`` when the changes are committed.
        """
        jump, latest = tx.row(_LAST_JUMP), tx.row(_LATEST_TIME)[0]
        if self.latest is not None and jump == self._last_jump:
            latest = max(latest, self.latest)
        # Else another process has followed the clock since, or this one knows nothing yet.
        self._last_jump = jump
        if tx.now >= latest or moved_to(tx.connection) is not None:
            return None
        _follow_clock_back(tx, latest)
        tx.write(_NOTE_JUMP, (latest, tx.now))
        return latest, tx.now

    def followed(self, jump: tuple[int, int]) -> None:
        self.latest, self._last_jump = jump[1], jump


def _follow_clock_back(tx: Transaction, latest: int) -> None:
    """Follow a clock that was at ``latest`` before and is behind that now.

    Messages and work that were sent for then are visible, in their order. Locks and delays last as
    long as they would have: an ended lock stays ended, and a dead worker's lock ends in time.
    """
    refreshed = tx.rows(_REFRESHED_INSTANCES, (tx.now,))
    for statement in _FOLLOW_CLOCK_BACK:
        tx.write(statement, (tx.now, latest - tx.now)[: 1 + ("?2" in statement)])
    for (instance_id,) in refreshed:
        readiness.refresh(tx, instance_id)
