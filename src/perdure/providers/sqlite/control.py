"""Changes by operators: pause, resume, lock, delete and prune."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.errors import InstanceStillRunning, NotFound, TreeChanged
from perdure.limits import BULK_INSTANCES_MAX
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import DeleteResult, PruneResult
from perdure.providers.sqlite import deletion, listing, messages, readiness, statements, turns
from perdure.providers.sqlite.verb import Verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perdure.providers.records import DeleteFilter, FetchedOrchestration, PruneOptions
    from perdure.providers.sqlite.transaction import Transaction

_EXECUTIONS: Final = """
SELECT execution_id, status, completed_at FROM executions WHERE instance_key = ?
"""

_OLDEST_FINISHED_ROOTS: Final = """
SELECT instance_id FROM instances
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

_CREATED_AT: Final = "SELECT created_at FROM instances WHERE instance_id = ?"
_COMPLETED_AT: Final = """
SELECT created_at, completed_at, parent_instance_id FROM instances
WHERE instance_id = ? AND execution_id > 0
"""


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
        tx.execute(_END_LOCK, (tx.now, instance_id))
        readiness.refresh(tx, instance_id)
    if tx.change(_END_WORK_LOCKS, held):
        tx.work_changed = True
    if tx.change(_END_SESSIONS, (holder, tx.now)):
        tx.work_changed = True
    tx.change("DELETE FROM workers WHERE holder = ?", (holder,))


RELEASE_HOLDER: Final = Verb("release_holder", release_holder)


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
        raise NotFound(f"there is no instance {instance_id!r}")
    return turns.take_over(tx, instance_id, key, lock_timeout_ms)


def delete_atomic(tx: Transaction, instance_ids: Sequence[str], force: bool) -> DeleteResult:
    named = dict.fromkeys(instance_ids)
    existing = [each for each in named if messages.exists(tx, each)]
    if not existing:
        raise NotFound(f"none of these instances exists: {sorted(named)[:10]}")
    for instance_id in existing:
        if not force and not messages.has_ended(tx, instance_id):
            raise InstanceStillRunning(
                f"{instance_id!r} is still running; wait for its end or force the deletion"
            )
    found = [each for each in named if deletion.has_anything(tx, each)]
    for instance_id in found:
        for child_id, _ in tx.rows(deletion.CHILDREN, (instance_id,)):
            if child_id not in named:
                raise TreeChanged(
                    f"the child {child_id!r} of {instance_id!r} would be orphaned; read the tree "
                    "again and delete it as a whole"
                )
    return deletion.add_up([deletion.delete_instance(tx, each) for each in found])


def next_deletable_roots(
    tx: Transaction,
    filter: DeleteFilter,  # noqa: A002
    after: tuple[int, str],
    limit: int,
) -> list[tuple[int, str]]:
    """Return finished roots that fit, oldest first, after a position in that order."""
    if filter.instance_ids is None:
        before, (created_at, instance_id) = filter.completed_before_ms, after
        rows = tx.rows(_OLDEST_FINISHED_ROOTS, (before, created_at, instance_id, limit))
        return [(tx.row(_CREATED_AT, row)[0], row[0]) for row in rows]
    found: list[tuple[int, str]] = []
    for instance_id in set(filter.instance_ids):
        row = tx.row(_COMPLETED_AT, (instance_id,))
        if row is not None and rules.is_before(row[1], filter.completed_before_ms):
            place = (row[0], instance_id)
            if row[2] is None and place > after:
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
    results = [prune(tx, instance_id, options) for instance_id in _prunable(tx, filter)]
    return PruneResult(
        instances_processed=len(results),
        executions=sum(result.executions for result in results),
        events=sum(result.events for result in results),
    )


def _prunable(tx: Transaction, filter: DeleteFilter) -> Iterator[str]:  # noqa: A002
    limit = filter.limit or BULK_INSTANCES_MAX
    if filter.instance_ids is None:
        rows: list[Any] = tx.rows(_OLDEST, (filter.completed_before_ms, limit))
        return (row[0] for row in rows)
    found: list[tuple[int, str]] = []
    for instance_id in set(filter.instance_ids):
        row = tx.row(_COMPLETED_AT, (instance_id,))
        if row is not None and rules.is_before(row[1], filter.completed_before_ms):
            found.append((row[0], instance_id))
    return (instance_id for _, instance_id in sorted(found)[:limit])
