"""Trees of instances, deleting them and pruning their executions, inside a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.errors import InstanceStillRunning, NotFound, TreeChanged
from perdure.providers import rules
from perdure.providers.filesystem import queues, turns
from perdure.providers.records import DeleteResult, PruneResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.tables import Transaction
    from perdure.providers.records import InstanceQuery, PruneOptions


def children_of(state: State, instance_id: str) -> list[str]:
    """Oldest first."""
    children = state.lookups.children.get(instance_id, ())
    return sorted(children, key=lambda child: (state.standing.created_at_ms(child), child))


def tree_of(state: State, instance_id: str) -> list[str]:
    """The instance and its descendants, parents first."""
    tree, seen = [instance_id], {instance_id}
    for member in tree:
        for child in children_of(state, member):
            if child not in seen:
                seen.add(child)
                tree.append(child)
    return tree


# --- deleting


def delete_atomic(
    state: State, tx: Transaction, instance_ids: Sequence[str], *, force: bool
) -> DeleteResult:
    standing = state.standing
    named = set(instance_ids)
    found = sorted(each for each in named if standing.is_there(each))
    if not any(standing.exists(each) for each in named):
        raise NotFound(f"none of these instances exists: {sorted(named)[:10]}")
    for instance_id in found:
        if standing.exists(instance_id) and not standing.has_ended(instance_id) and not force:
            raise InstanceStillRunning(
                f"{instance_id!r} is still running ({standing.status(instance_id)}); wait for its "
                "end or force the deletion"
            )
    for instance_id in found:
        for child in children_of(state, instance_id):
            if child not in named:
                raise TreeChanged(
                    f"the child {child!r} of {instance_id!r} would be orphaned; read the tree "
                    "again and delete it as a whole"
                )
    return delete_all(state, tx, found)


def delete_all(state: State, tx: Transaction, instance_ids: Iterable[str]) -> DeleteResult:
    return total([delete(state, tx, instance_id) for instance_id in instance_ids])


def delete(state: State, tx: Transaction, instance_id: str) -> DeleteResult:
    """Remove all that belongs to the instance, whatever its state."""
    tables, lookups = state.tables, state.lookups
    messages, work = lookups.messages_of(instance_id), lookups.work_of(instance_id)
    executions = sorted(lookups.executions.get(instance_id, ()))
    exists = state.standing.exists(instance_id)
    turns.release(state, tx, instance_id)
    for message_id in messages:
        queues.remove_message(state, tx, message_id)
    sessions = {tables.work.rows[message_id].message.session_id for message_id in work}
    for message_id in work:
        queues.remove_work(state, tx, message_id)
    for session_id in sessions:
        if session_id is not None and session_id not in lookups.session_work:
            tx.drop(tables.sessions, session_id)
    events = sum(
        _drop_history(state, tx, instance_id, execution_id)
        for execution_id in sorted(lookups.histories.get(instance_id, ()))
    )
    for execution_id in executions:
        tx.drop(tables.executions, (instance_id, execution_id))
    for key in list(lookups.kv_store.get(instance_id, ())):
        tx.drop(tables.kv_store, (instance_id, key))
    for key in list(lookups.kv_delta.get(instance_id, ())):
        tx.drop(tables.kv_delta, (instance_id, key))
    tx.drop(tables.custom_statuses, instance_id)
    tx.drop(tables.holds, instance_id)
    tx.drop(tables.progress, instance_id)
    tx.drop(tables.instances, instance_id)
    return DeleteResult(
        instances=int(exists),
        executions=len(executions),
        events=events,
        messages=len(messages) + len(work),
    )


def matching(state: State, query: InstanceQuery) -> list[str]:
    """Instances that a bulk query names, oldest first."""
    return [info.instance_id for info in state.listing.matching(query)][::-1]


def finished_trees(state: State, roots: Iterable[str]) -> list[list[str]]:
    """Trees of the roots among these instances in which everything has ended."""
    trees = [
        tree_of(state, instance_id)
        for instance_id in roots
        if state.standing.parent_id(instance_id) is None
    ]
    return [tree for tree in trees if all(state.standing.has_ended(member) for member in tree)]


def delete_finished_tree(state: State, root_id: str, tx: Transaction) -> DeleteResult:
    """Nothing, if the tree is not what it was, or something in it runs again."""
    trees = finished_trees(state, [root_id] if state.standing.exists(root_id) else [])
    return total([delete_all(state, tx, tree) for tree in trees])


def total(results: Sequence[DeleteResult]) -> DeleteResult:
    return DeleteResult(
        instances=sum(result.instances for result in results),
        executions=sum(result.executions for result in results),
        events=sum(result.events for result in results),
        messages=sum(result.messages for result in results),
    )


# --- pruning


def prune(state: State, instance_id: str, options: PruneOptions, tx: Transaction) -> PruneResult:
    rows = state.tables.executions.rows
    executions = {
        execution_id: (row.status, row.completed_at_ms)
        for execution_id in state.lookups.executions.get(instance_id, ())
        if (row := rows[instance_id, execution_id])
    }
    current = state.standing.execution_id(instance_id)
    doomed = rules.executions_to_prune(executions, current, options)
    events = 0
    for execution_id in doomed:
        events += _drop_history(state, tx, instance_id, execution_id)
        tx.drop(state.tables.executions, (instance_id, execution_id))
    return PruneResult(instances_processed=1, executions=len(doomed), events=events)


def _drop_history(state: State, tx: Transaction, instance_id: str, execution_id: int) -> int:
    history = state.tables.histories.get((instance_id, execution_id))
    if history is None:
        return 0
    tx.drop_history((instance_id, execution_id))
    return history.count
