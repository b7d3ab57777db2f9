"""Changes by operators: pause, resume, lock, delete and prune."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import DeleteResult, PruneResult
from perdure.providers.sqlite import deletion, listing, messages, readiness, statements, turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.records import FetchedOrchestration, PruneOptions
    from perdure.providers.sqlite.transaction import Snapshot, Transaction

_EXECUTIONS: Final = """
SELECT execution_id, status, completed_at FROM executions WHERE instance_key = ?
"""

_OLDEST: Final = """
SELECT created_at, instance_id FROM instances
WHERE execution_id > 0 AND (?1 IS NULL OR completed_at < ?1)
  AND (created_at, instance_id) > (?2, ?3)
ORDER BY created_at, instance_id LIMIT ?4
"""

_OLDEST_FINISHED_ROOTS: Final = """
SELECT created_at, instance_id FROM instances
WHERE execution_id > 0 AND parent_instance_id IS NULL
  AND status NOT IN ('Pending', 'Running')
  AND (?1 IS NULL OR completed_at < ?1)
  AND (created_at, instance_id) > (?2, ?3)
ORDER BY created_at, instance_id LIMIT ?4
"""

_COMPLETED_AT: Final = """
SELECT created_at, completed_at, parent_instance_id FROM instances
WHERE instance_id = ? AND execution_id > 0
"""


def suspend(tx: Transaction, instance_id: str) -> None:
    messages.require_alive(tx, instance_id)
    key, *_ = tx.row(statements.EXISTENCE_OF, (instance_id,))
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
    messages.require_alive(tx, instance_id)
    key, *_ = tx.row(statements.EXISTENCE_OF, (instance_id,))
    tx.execute(statements.RESET_ATTEMPTS, (instance_id,))
    tx.execute(statements.SET_HOLDS, (0, None, None, instance_id))
    if key is not None:
        turns.show_status(tx, key, suspended=False, blocked=False)
    readiness.refresh(tx, instance_id)
    tx.changed_instances.append(instance_id)


def lock(tx: Transaction, instance_id: str, lock_timeout_ms: int) -> FetchedOrchestration:
    key, execution_id, pending_since, _ = tx.row(statements.EXISTENCE_OF, (instance_id,))
    if not execution_id and pending_since is None:
        raise rules.no_instance(instance_id)
    return turns.take_over(tx, instance_id, key, lock_timeout_ms)


def delete_atomic(tx: Transaction, instance_ids: Sequence[str], force: bool) -> DeleteResult:
    named = dict.fromkeys(instance_ids)
    existing = [each for each in named if messages.exists(tx, each)]
    if not existing:
        raise rules.none_exists(named)
    for instance_id in existing:
        if not force and not messages.has_ended(tx, instance_id):
            raise rules.still_running(instance_id)
    found = [each for each in named if deletion.has_anything(tx, each)]
    for instance_id in found:
        for child_id, _ in tx.rows(deletion.CHILDREN, (instance_id,)):
            if child_id not in named:
                raise rules.would_orphan(child_id, instance_id)
    return deletion.add_up([deletion.delete_instance(tx, each) for each in found])


def list_oldest(
    snapshot: Snapshot,
    instance_ids: tuple[str, ...] | None,
    completed_before_ms: int | None,
    after: tuple[int, str],
    limit: int,
    finished_roots: bool,
) -> list[tuple[int, str]]:
    """Return instances that have begun, or finished roots, after a place in their order."""
    if instance_ids is None:
        statement = _OLDEST_FINISHED_ROOTS if finished_roots else _OLDEST
        return list(snapshot.rows(statement, (completed_before_ms, *after, limit)))
    found: list[tuple[int, str]] = []
    for instance_id in set(instance_ids):
        row = snapshot.row(_COMPLETED_AT, (instance_id,))
        if row is not None and rules.is_before(row[1], completed_before_ms):
            place = (row[0], instance_id)
            if place > after and not (finished_roots and row[2] is not None):
                found.append(place)
    return sorted(found)[:limit]


def delete_finished_tree(tx: Transaction, root_id: str) -> DeleteResult:
    """Delete a root with its tree, or nothing if it is none or any of them has not ended."""
    root = listing.find_info(tx, root_id)
    if root is None or root.parent_instance_id is not None:
        return DeleteResult()
    tree = deletion.tree_of(tx, root_id)
    if not all(messages.has_ended(tx, member) for member in tree):
        return DeleteResult()
    return deletion.add_up([deletion.delete_instance(tx, member) for member in tree])


def prune(tx: Transaction, instance_id: str, options: PruneOptions) -> PruneResult:
    key, execution_id, pending_since, _ = tx.row(statements.EXISTENCE_OF, (instance_id,))
    if not execution_id:
        if pending_since is None:
            raise rules.no_instance(instance_id)
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
