"""Removing instances with everything that belongs to them, inside a transaction of the writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from perdure.providers.records import DeleteResult
from perdure.providers.sqlite import statements

if TYPE_CHECKING:
    from perdure.providers.sqlite.transaction import Snapshot, Transaction

CHILDREN: Final = """
SELECT instance_id, created_at FROM instances
WHERE parent_instance_id = ?1 AND execution_id > 0
UNION
SELECT q.instance_id, iif(i.execution_id > 0, i.created_at, l.pending_since)
FROM orchestrator_queue AS q
LEFT JOIN instances AS i ON i.instance_id = q.instance_id
LEFT JOIN instance_locks AS l ON l.instance_id = q.instance_id
WHERE q.start_parent_id = ?1 AND i.name IS NULL
  AND q.message_id = (
      SELECT min(s.message_id) FROM orchestrator_queue AS s
      WHERE s.instance_id = q.instance_id AND s.start_name IS NOT NULL
  )
ORDER BY 2, 1
"""
"""Oldest first. An instance that no turn has named goes by its first queued start."""

_HAS_ANYTHING: Final = """
SELECT EXISTS (SELECT 1 FROM instances WHERE instance_id = ?1)
    OR EXISTS (SELECT 1 FROM orchestrator_queue WHERE instance_id = ?1)
    OR EXISTS (SELECT 1 FROM worker_queue WHERE instance_id = ?1)
"""

_SESSIONS_OF: Final = """
SELECT DISTINCT session_id FROM worker_queue WHERE instance_id = ? AND session_id IS NOT NULL
"""
_DELETE_EMPTY_SESSION: Final = """
DELETE FROM sessions WHERE session_id = ?1
  AND NOT EXISTS (SELECT 1 FROM worker_queue WHERE session_id = ?1)
"""


def tree_of(snapshot: Snapshot, root_id: str) -> list[str]:
    """Return the instance and its descendants, parents first."""
    tree, seen = [root_id], {root_id}
    for member in tree:
        for child_id, _ in snapshot.rows(CHILDREN, (member,)):
            if child_id not in seen:
                seen.add(child_id)
                tree.append(child_id)
    return tree


def has_anything(tx: Transaction, instance_id: str) -> bool:
    """Return whether the store has any row of that id, also a message or a work item alone."""
    return bool(tx.row(_HAS_ANYTHING, (instance_id,))[0])


def delete_tree(tx: Transaction, root_id: str) -> None:
    """Delete all rows of that id and of its descendants, running or not.

    Without a row of that id, instances that name it as their parent stay.
    """
    if has_anything(tx, root_id):
        for member in tree_of(tx, root_id):
            delete_instance(tx, member)


def delete_instance(tx: Transaction, instance_id: str) -> DeleteResult:
    """Remove one instance, its messages, locks and state; nothing is checked."""
    key, execution_id, pending_since, _ = tx.row(statements.EXISTENCE_OF, (instance_id,))
    executions = events = 0
    if key is not None:
        events = tx.change("DELETE FROM history WHERE instance_key = ?", (key,))
        executions = tx.change("DELETE FROM executions WHERE instance_key = ?", (key,))
        tx.execute("DELETE FROM kv_store WHERE instance_key = ?", (key,))
        tx.execute("DELETE FROM kv_delta WHERE instance_key = ?", (key,))
        tx.execute("DELETE FROM instances WHERE instance_key = ?", (key,))
    sessions = tx.rows(_SESSIONS_OF, (instance_id,))
    messages = tx.change("DELETE FROM orchestrator_queue WHERE instance_id = ?", (instance_id,))
    messages += tx.change("DELETE FROM worker_queue WHERE instance_id = ?", (instance_id,))
    for (session_id,) in sessions:
        tx.execute(_DELETE_EMPTY_SESSION, (session_id,))
    statements.DELETE_LOCKS.execute(tx, [instance_id])
    tx.changed_instances.append(instance_id)
    return DeleteResult(
        instances=int(bool(execution_id) or pending_since is not None),
        executions=executions,
        events=events,
        messages=messages,
    )


def add_up(results: list[DeleteResult]) -> DeleteResult:
    return DeleteResult(
        instances=sum(result.instances for result in results),
        executions=sum(result.executions for result in results),
        events=sum(result.events for result in results),
        messages=sum(result.messages for result in results),
    )
