"""The orchestrator queue: adding messages under a condition."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from perdure.providers import rules
from perdure.providers.records import EnqueueCondition
from perdure.providers.sqlite import instances, listing, readiness, statements
from perdure.providers.sqlite.statements import Readiness, WaitingMail
from perdure.providers.sqlite.transaction import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.records import OrchestratorMessage
    from perdure.providers.sqlite.transaction import Transaction

_NO_MAIL: Final = WaitingMail(first=1, before=0, last=0, size=0)


def enqueue(
    tx: Transaction,
    message: OrchestratorMessage,
    delay_ms: int | None,
    condition: EnqueueCondition,
    mail_max: int,
    mail_bytes_max: int,
) -> bool:
    """Add a message if the condition is met; return whether it was added.

    Errors: NotFound, InstanceFinished, NotARoot, by condition; QueueFull.
    """
    if not _is_met(tx, message.instance_id, condition):
        return False
    if rules.is_mail(message.kind):
        _enqueue_mail(tx, (message,), delay_ms, mail_max, mail_bytes_max)
    else:
        insert(tx, message, rules.visible_at(message.visible_at_ms, tx.now, delay_ms))
    return True


def enqueue_many(
    tx: Transaction,
    messages: Sequence[OrchestratorMessage],
    delay_ms: int | None,
    condition: EnqueueCondition,
    mail_max: int,
    mail_bytes_max: int,
) -> list[bool]:
    """Add messages under the same condition; return for each whether it was added."""
    if condition is EnqueueCondition.ABSENT:
        taken = _enqueue_new(tx, messages, delay_ms)
        if taken is not None:
            return taken
    elif all(rules.is_mail(message.kind) for message in messages):
        _enqueue_mail(tx, messages, delay_ms, mail_max, mail_bytes_max)
        return [True] * len(messages)
    return [
        enqueue(tx, message, delay_ms, condition, mail_max, mail_bytes_max) for message in messages
    ]


def _enqueue_mail(
    tx: Transaction,
    mail: Sequence[OrchestratorMessage],
    delay_ms: int | None,
    mail_max: int,
    mail_bytes_max: int,
) -> None:
    """Add events and messages from outside. Errors: QueueFull; then nothing is added."""
    by_instance: defaultdict[str, list[tuple[int, OrchestratorMessage]]] = defaultdict(list)
    for message_id, message in enumerate(mail, tx.new_message_ids(len(mail))):
        by_instance[message.instance_id].append((message_id, message))
    rows: list[tuple[Any, ...]] = []
    first: list[tuple[OrchestratorMessage, int, int, Readiness | None]] = []
    for instance_id, added in by_instance.items():
        before = readiness.find_readiness(tx, instance_id)
        has_backlog = before is not None and before.has_backlog
        row = tx.row(statements.WAITING_MAIL, (instance_id,)) if has_backlog else None
        waiting = _NO_MAIL if row is None else WaitingMail._make(row)
        is_numbered = has_backlog or len(added) > 1
        number, size = waiting.last, waiting.size
        new: list[tuple[int, int]] = []
        for message_id, message in added:
            visible_at = rules.visible_at(message.visible_at_ms, tx.now, delay_ms)
            numbers: tuple[int | None, int | None] = (None, None)
            if is_numbered and visible_at <= tx.now:
                number, size = number + 1, size + len(message.body.encode())
                numbers = number, size
            rows.append(queue_row(message_id, message, visible_at, tx.now, numbers=numbers))
            new.append((visible_at, message_id))
        count, total = number - waiting.first + 1, size - waiting.before
        if rules.is_full(count, total, mail_max, mail_bytes_max):
            raise rules.queue_full(instance_id, count, total, mail_max, mail_bytes_max)
        first.append((added[0][1], *min(new), before))
    statements.INSERT_MESSAGE.execute(tx, rows)
    for message, visible_at, message_id, before in first:
        readiness.note_message(tx, message, visible_at, message_id, before)
    tx.changed_instances += by_instance


def _enqueue_new(
    tx: Transaction, messages: Sequence[OrchestratorMessage], delay_ms: int | None
) -> list[bool] | None:
    """Add the starts of new instances; None, and nothing is added, if a message is another case."""
    ids = [message.instance_id for message in messages]
    if len(set(ids)) != len(ids):
        return None
    existing = instances.find_existences(tx, ids)
    if not all(each.is_taken for each in existing.values()):
        return None
    absent = [message for message in messages if message.instance_id not in existing]
    if not absent:
        return [False] * len(messages)
    queued: list[tuple[Any, ...]] = []
    ready: list[tuple[Any, ...]] = []
    for message_id, message in enumerate(absent, tx.new_message_ids(len(absent))):
        instance_id, start = message.instance_id, message.start
        if start is None:
            return None
        visible_at = rules.visible_at(message.visible_at_ms, tx.now, delay_ms)
        queued.append(queue_row(message_id, message, visible_at, tx.now))
        ready.append(readiness.ready_row(tx, instance_id, visible_at, message_id, start))
    statements.INSERT_MESSAGE.execute(tx, queued)
    statements.INSERT_READY.execute(tx, ready)
    tx.changed_instances += [row[1] for row in queued]
    tx.turns_changed = True
    return [instance_id not in existing for instance_id in ids]


def enqueue_each(
    tx: Transaction,
    calls: Sequence[tuple[OrchestratorMessage, int | None, EnqueueCondition, int, int]],
) -> list[bool]:
    """Run calls of ``enqueue`` for starts of instances that must be new, up to the first other."""
    starts = [
        message
        for message, *_ in takewhile(
            lambda call: (
                call[2] is EnqueueCondition.ABSENT and call[1] is None and call[0].start is not None
            ),
            calls,
        )
    ]
    return enqueue_many(tx, starts, None, EnqueueCondition.ABSENT, *calls[0][3:])


ENQUEUE_MESSAGE: Final = Verb("enqueue_for_orchestrator", enqueue, run_many=enqueue_each)
ENQUEUE_MESSAGES: Final = Verb("enqueue_many_for_orchestrator", enqueue_many)


def insert_all(tx: Transaction, messages: Sequence[OrchestratorMessage]) -> None:
    """Add new messages; each is visible at its own time, or at once."""
    for message in messages:
        insert(tx, message, rules.visible_at(message.visible_at_ms, tx.now))


def insert(tx: Transaction, message: OrchestratorMessage, visible_at: int) -> None:
    """Add a new message and bring the readiness row of its instance up to date."""
    message_id = tx.new_message_id()
    before = readiness.find_readiness(tx, message.instance_id)
    statements.INSERT_MESSAGE.execute(tx, [queue_row(message_id, message, visible_at, tx.now)])
    readiness.note_message(tx, message, visible_at, message_id, before)
    tx.changed_instances.append(message.instance_id)


def _is_met(tx: Transaction, instance_id: str, condition: EnqueueCondition) -> bool:
    match condition:
        case EnqueueCondition.ALWAYS:
            return True
        case EnqueueCondition.ABSENT:
            return not instances.exists(tx, instance_id)
        case EnqueueCondition.ALIVE:
            instances.require_alive(tx, instance_id)
            return True
        case EnqueueCondition.REPLACE:
            _refuse_to_take_from_parent(tx, instance_id)
            instances.delete_tree(tx, instance_id)
            return True


def _refuse_to_take_from_parent(tx: Transaction, child_id: str) -> None:
    """Raise NotARoot for a child whose parent has not ended."""
    child = listing.find_info(tx, child_id)
    parent_id = None if child is None else child.parent_instance_id
    if (
        parent_id is not None
        and instances.exists(tx, parent_id)
        and not instances.has_ended(tx, parent_id)
    ):
        raise rules.not_a_root(child_id, parent_id)


def queue_row(
    message_id: int,
    message: OrchestratorMessage,
    visible_at: int,
    enqueued_at: int,
    attempt_count: int = 0,
    numbers: tuple[int | None, int | None] = (None, None),
) -> tuple[Any, ...]:
    """Return the row of a message that no lock carries."""
    start, timer = message.start, message.timer
    routing: Any = (None, None, None)
    if start is not None:
        routing = (start.name, start.version, start.parent_instance_id)
    return (
        message_id, message.instance_id, message.kind, message.body, visible_at, enqueued_at,
        attempt_count, message.visible_at_ms, *routing,
        *((None, None) if timer is None else (timer.execution_id, timer.timer_id)), *numbers,
    )  # fmt: skip
