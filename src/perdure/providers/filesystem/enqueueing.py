"""Taking a message for an instance under a condition, inside a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.errors import InstanceFinished, NotFound, PerdureError
from perdure.providers import rules, validation
from perdure.providers.filesystem import deletion, queues
from perdure.providers.records import EnqueueCondition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.tables import Transaction
    from perdure.providers.records import OrchestratorMessage


def enqueue(
    state: State,
    tx: Transaction,
    message: OrchestratorMessage,
    delay_ms: int | None,
    condition: EnqueueCondition | None,
) -> bool:
    state.quarantine.check(tx.verb, message.instance_id)
    if not _meets(state, tx, message.instance_id, condition or EnqueueCondition.ALWAYS):
        return False
    queues.add_message(state, tx, message, delay_ms)
    return True


def enqueue_each(
    state: State,
    tx: Transaction,
    messages: Sequence[OrchestratorMessage],
    delay_ms: int | None,
    condition: EnqueueCondition | None,
) -> tuple[list[bool], PerdureError | None]:
    """Take them in order until one is refused; returns what became of them, and the refusal."""
    taken: list[bool] = []
    for message in messages:
        try:
            validation.check_enqueue(message, delay_ms, condition)
            taken.append(enqueue(state, tx, message, delay_ms, condition))
        except PerdureError as refusal:
            return taken, refusal
    return taken, None


def _meets(state: State, tx: Transaction, instance_id: str, condition: EnqueueCondition) -> bool:
    exists = state.standing.exists(instance_id)
    match condition:
        case EnqueueCondition.ALWAYS:
            return True
        case EnqueueCondition.ABSENT:
            return not exists
        case EnqueueCondition.ALIVE:
            if not exists:
                raise NotFound(f"there is no instance {instance_id!r}")
            if state.standing.has_ended(instance_id):
                status = state.standing.status(instance_id)
                raise InstanceFinished(f"{instance_id!r} has ended: {status}")
            return True
        case EnqueueCondition.REPLACE:
            if state.standing.is_there(instance_id):
                _refuse_to_take_from_parent(state, instance_id)
                deletion.delete_all(state, tx, deletion.tree_of(state, instance_id))
            return True


def _refuse_to_take_from_parent(state: State, child_id: str) -> None:
    standing = state.standing
    parent_id = standing.parent_id(child_id) if standing.exists(child_id) else None
    if parent_id is not None and standing.exists(parent_id) and not standing.has_ended(parent_id):
        raise rules.not_a_root(child_id, parent_id)
