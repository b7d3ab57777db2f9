"""Changes by operators: pause, resume, lock, delete, prune; also dead letters and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from perdure.errors import InstanceStillRunning, NotFound, TreeChanged
from perdure.limits import BULK_INSTANCES_MAX
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.records import (
        DeleteFilter,
        FetchedOrchestration,
        PruneOptions,
        WorkerInfo,
    )
    from perdure.providers.sqlite.transaction import Transaction

_EXECUTIONS: Final = """
SELECT execution_id, status, completed_at FROM executions WHERE instance_key = ?
"""

_OLDEST_FINISHED_ROOTS: Final = """
SELECT created_at, instance_id FROM instances
WHERE execution_id > 0 AND parent_instance_id IS NULL
  AND status NOT IN ('Pending', 'Running')
  AND (?1 IS NULL OR completed_at < ?1)
  AND (created_at, instance_id) > (?2, ?3)
ORDER BY created_at, instance_id LIMIT ?4
"""

_OLDEST: Final = """
SELECT instance_id FROM instances
WHERE execution_id > 0 AND (?1 IS NULL OR completed_at < ?1)
ORDER BY created_at, instance_id LIMIT ?2
"""

_BY_ID: Final = """
SELECT created_at, instance_id, completed_at, parent_instance_id FROM instances
WHERE instance_id = ? AND execution_id > 0
"""


def suspend(tx: Transaction, instance_id: str) -> None:
    instances.require_alive(tx, instance_id)
    key = instances.find_existence(tx, instance_id).instance_key
    facts = readiness.find_facts(tx, instance_id)
    if facts is None:
        tx.execute(statements.INSERT_BARE_LOCK, (instance_id, key))
        facts = readiness.NO_FACTS
    if facts.suspended:
        return
    tx.execute(statements.DROP_LOCK, (instance_id,))
    tx.execute(statements.SET_HOLDS, (1, facts.not_before, facts.block, instance_id))
    if key is not None:
        turns.show_status(tx, key, suspended=True, blocked=facts.block is not None)
    readiness.refresh(tx, instance_id)
    tx.changed_instances.append(instance_id)


def resume(tx: Transaction, instance_id: str) -> None:
    instances.require_alive(tx, instance_id)
    key = instances.find_existence(tx, instance_id).instance_key
    tx.execute(statements.RESET_ATTEMPTS, (instance_id,))
    tx.execute(statements.SET_HOLDS, (0, None, None, instance_id))
    if key is not None:
        turns.show_status(tx, key, suspended=False, blocked=False)
    readiness.refresh(tx, instance_id)
    tx.changed_instances.append(instance_id)


def lock(tx: Transaction, instance_id: str, lock_timeout_ms: int) -> FetchedOrchestration:
    existence = instances.find_existence(tx, instance_id)
    if not existence.is_taken:
        raise NotFound(f"there is no instance {instance_id!r}")
    return turns.take_over(tx, instance_id, existence.instance_key, lock_timeout_ms)


def delete_atomic(tx: Transaction, instance_ids: Sequence[str], force: bool) -> DeleteResult:
    named = dict.fromkeys(instance_ids)
    existing = [each for each in named if instances.exists(tx, each)]
    if not existing:
        raise NotFound(f"none of these instances exists: {sorted(named)[:10]}")
    for instance_id in existing:
        if not force and not instances.has_ended(tx, instance_id):
            raise InstanceStillRunning(
                f"{instance_id!r} is still running; wait for its end or force the deletion"
            )
    found = [each for each in named if instances.has_anything(tx, each)]
    for instance_id in found:
        for child_id in instances.list_children(tx, instance_id):
            if child_id not in named:
                raise TreeChanged(
                    f"the child {child_id!r} of {instance_id!r} would be orphaned; read the tree "
                    "again and delete it as a whole"
                )
    return instances.add_up([instances.delete_instance(tx, each) for each in found], DeleteResult)


def next_deletable_roots(
    tx: Transaction,
    filter: DeleteFilter,  # noqa: A002
    after: tuple[int, str],
    limit: int,
) -> list[tuple[int, str]]:
    """Return finished roots that fit, oldest first, after a position in that order."""
    if filter.instance_ids is None:
        return tx.rows(_OLDEST_FINISHED_ROOTS, (filter.completed_before_ms, *after, limit))
    found = [
        (created_at, instance_id)
        for created_at, instance_id, parent_id in _named(tx, filter)
        if parent_id is None and (created_at, instance_id) > after
    ]
    return found[:limit]


def delete_finished_tree(tx: Transaction, root_id: str) -> DeleteResult:
    """Delete a root with its tree, or nothing if it is none or any of them has not ended."""
    root = listing.find_info(tx, root_id)
    if root is None or root.parent_instance_id is not None:
        return DeleteResult()
    tree = instances.tree_of(tx, root_id)
    if not all(instances.has_ended(tx, member) for member in tree):
        return DeleteResult()
    return instances.add_up([instances.delete_instance(tx, each) for each in tree], DeleteResult)


def prune(tx: Transaction, instance_id: str, options: PruneOptions) -> PruneResult:
    key, execution_id, _, is_taken = instances.find_existence(tx, instance_id)
    if not execution_id:
        if not is_taken:
            raise NotFound(f"there is no instance {instance_id!r}")
        return PruneResult(instances_processed=1)
    executions = {
        number: (Status(status), completed_at)
        for number, status, completed_at in tx.rows(_EXECUTIONS, (key,))
    }
    pruned = rules.executions_to_prune(executions, execution_id, options)
    events = 0
    for number in pruned:
        tx.execute(
            "DELETE FROM executions WHERE instance_key = ? AND execution_id = ?", (key, number)
        )
        events += tx.change(
            "DELETE FROM history WHERE instance_key = ? AND execution_id = ?", (key, number)
        )
    tx.changed_instances.append(instance_id)
    return PruneResult(instances_processed=1, executions=len(pruned), events=events)


def prune_bulk(
    tx: Transaction,
    filter: DeleteFilter,  # noqa: A002
    options: PruneOptions,
) -> PruneResult:
    limit = filter.limit or BULK_INSTANCES_MAX
    if filter.instance_ids is None:
        ids = [row[0] for row in tx.rows(_OLDEST, (filter.completed_before_ms, limit))]
    else:
        ids = [instance_id for _, instance_id, _ in _named(tx, filter)[:limit]]
    return instances.add_up([prune(tx, each, options) for each in ids], PruneResult)


def _named(tx: Transaction, filter: DeleteFilter) -> list[tuple[int, str, str | None]]:  # noqa: A002
    """Return creation time, id and parent of instances that the filter names, oldest first."""
    found: list[tuple[int, str, str | None]] = []
    for instance_id in set(filter.instance_ids or ()):
        row = tx.row(_BY_ID, (instance_id,))
        if row is not None and rules.is_before(row[2], filter.completed_before_ms):
            found.append((row[0], row[1], row[3]))
    return sorted(found, key=lambda each: each[:2])


# --- dead letters and workers


def requeue_dead_letter(tx: Transaction, letter_id: int) -> None:
    row = tx.row(reading.LETTERS + "WHERE letter_id = ?", (letter_id,))
    delete_dead_letter(tx, letter_id)
    message = reading.message_of(row[1:10])
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
        "INSERT OR REPLACE INTO workers VALUES (?, ?, ?)",
        (worker.worker_id, record, tx.now + ttl_ms),
    )


def mark_moved(tx: Transaction, location: str | None) -> None:
    tx.execute("UPDATE store_info SET moved_to = ?", (location,))
