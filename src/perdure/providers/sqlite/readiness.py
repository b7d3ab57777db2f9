"""Readiness: the row of ``instance_locks`` that says whether an instance can be handed out.

docs/internals/readiness.md explains its columns. The hot verbs change single columns; ``refresh``
computes the whole row from the lock, the holds and the queue, and every rarer change calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.providers import rules
from perdure.providers.sqlite import instances, statements
from perdure.providers.sqlite.statements import LockFacts, Readiness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.records import OrchestratorMessage, StartRouting
    from perdure.providers.sqlite.transaction import Transaction

READY: Final = 0
WAITING: Final = 1
UNKNOWN: Final = 2
SUSPENDED: Final = 3

NO_FACTS: Final = LockFacts()
"""The facts of an instance without a readiness row."""

_WITH_READINESS: Final = """
SELECT instance_id FROM instance_locks UNION SELECT instance_id FROM orchestrator_queue
"""
"""Instances that must have a readiness row."""


class Released(NamedTuple):
    """An instance as its readiness row shows it after a turn."""

    instance_id: str
    instance_key: int
    name: str | None
    version: str | None
    mail_held: bool
    yielded_at: int | None


class NoWork:
    """The answer of a fetch that found nothing: try again at ``retry_at_ms``, or after a change."""

    __slots__ = ("retry_at_ms",)

    def __init__(self, retry_at_ms: int | None) -> None:
        self.retry_at_ms = retry_at_ms
        """None: only a change can bring something."""

    def __repr__(self) -> str:
        return f"NoWork({self.retry_at_ms})"


def refresh(tx: Transaction, instance_id: str) -> None:
    """Compute the readiness row of an instance again; delete it if there is nothing to say."""
    tx.turns_changed = True
    facts = find_facts(tx, instance_id) or NO_FACTS
    is_locked = facts.locked_until is not None and rules.is_live(facts.locked_until, tx.now)
    if facts.mail_held or facts.yielded_at is not None:
        is_empty = tx.row(statements.FIRST_MESSAGE, (instance_id,)) is None
        if not is_locked and (is_empty or facts.lock_token is not None):
            facts = facts._replace(mail_held=0, yielded_at=None)
    first = first_message(tx, instance_id, facts, is_locked=is_locked)
    is_held = facts.suspended or facts.not_before is not None or facts.block is not None
    if first is None and facts.lock_token is None and not (is_held or facts.mail_held):
        if facts.touched_at is not None:
            key, *_ = _identify(tx, instance_id)
            tx.write(instances.TOUCH_INSTANCE, (facts.touched_at, key))
        statements.DELETE_LOCKS.execute(tx, [instance_id])
        return
    key, name, version, pending_since, opens_at = _identify(tx, instance_id)
    wake_at: int | None = None
    if facts.suspended:
        state = SUSPENDED
    elif is_locked:
        state, wake_at = WAITING, facts.locked_until
    elif opens_at is None:
        state = UNKNOWN
        wake_at = tx.row(statements.DEAD_AT, (tx.orphan_grace_ms, instance_id))[0]
    elif (free_at := max(opens_at, facts.not_before or 0)) > tx.now:
        state, wake_at = WAITING, free_at
    else:
        state = READY
    row = (
        instance_id, key, name, version, pending_since, state, wake_at, *(first or (None, None)),
        *facts,
    )  # fmt: skip
    statements.PUT_LOCK.execute(tx, [row])


def first_message(
    tx: Transaction, instance_id: str, facts: LockFacts, *, is_locked: bool
) -> tuple[int, int] | None:
    """Return from when on a message makes the instance ready, and its id; None without one."""
    if facts.mail_held:
        first = tx.row(statements.FIRST_WITHOUT_MAIL, (instance_id, facts.lock_token or ""))
    elif is_locked:
        first = tx.row(statements.FIRST_FREE_MESSAGE, (instance_id, facts.lock_token))
    else:
        first = tx.row(statements.FIRST_MESSAGE, (instance_id,))
    return first and (max(first[0], facts.yielded_at or 0), first[1])


def release(tx: Transaction, released: Sequence[Released], state: int) -> None:
    """Release locks of instances that have messages left, or that are suspended."""
    for instance_id, key, name, version, mail_held, yielded_at in released:
        facts = NO_FACTS
        if tx.row(statements.FIRST_MESSAGE, (instance_id,)) is not None:
            facts = facts._replace(mail_held=mail_held, yielded_at=yielded_at)
        first = first_message(tx, instance_id, facts, is_locked=False) or (None, None)
        values = (
            state, *first, key, name, version, facts.mail_held, facts.yielded_at, instance_id
        )  # fmt: skip
        tx.write(statements.RELEASE_LOCK, values)
    tx.turns_changed = True


def reschedule(tx: Transaction, instance_id: str, lock_token: str, yielded_at: int | None) -> None:
    """Compute when the next message makes an instance with a kept lock ready; mail counts again."""
    first = tx.row(statements.FIRST_FREE_MESSAGE, (instance_id, lock_token)) or (None, None)
    tx.write(statements.YIELD, (*first, yielded_at, instance_id))
    tx.turns_changed = True


def refresh_all(tx: Transaction) -> None:
    """Compute every readiness row again, also those that are missing."""
    for (instance_id,) in tx.rows(_WITH_READINESS):
        refresh(tx, instance_id)


def find_facts(tx: Transaction, instance_id: str) -> LockFacts | None:
    """Return the lock and the holds of an instance; None if it has no readiness row."""
    row = tx.row(statements.LOCK_FACTS, (instance_id,))
    return None if row is None else LockFacts._make(row)


def wake(tx: Transaction) -> None:
    """Refresh the rows whose ``wake_at`` has come: expired locks, ended holds, visible starts.

    Messages that waited too long for a start become dead letters.
    """
    if tx.turns_awake:
        return
    tx.turns_awake = True
    awake = tx.rows(statements.AWAKE, (tx.now,))
    if not awake:
        return
    _dead_letter_orphans(tx, [instance_id for instance_id, state in awake if state == UNKNOWN])
    for instance_id, _ in awake:
        refresh(tx, instance_id)


def next_due(tx: Transaction, owner: str | None) -> int | None:
    """Return when a fetch that finds nothing now may find something."""
    dues = [
        tx.row(statements.NEXT_WAKE, ())[0],
        tx.row(statements.NEXT_READY, (tx.now,))[0],
    ]
    if owner is not None:
        dues.append(tx.row(statements.NEXT_KEPT, (owner, tx.now))[0])
    return min((due for due in dues if due is not None), default=None)


def find_readiness(tx: Transaction, instance_id: str) -> Readiness | None:
    row = tx.row(statements.READINESS, (instance_id,))
    return None if row is None else Readiness._make(row)


def note_message(
    tx: Transaction,
    message: OrchestratorMessage,
    visible_at: int,
    message_id: int,
    before: Readiness | None,
) -> None:
    """Write the readiness row after a message was added. ``before`` is the row before that."""
    tx.turns_changed = True
    instance_id, start = message.instance_id, message.start
    if before is None:
        instance = tx.row(instances.INSTANCE_BY_ID, (instance_id,))
        if instance is not None and instance[1] > 0:
            key, _, _, name, version = instance
            row = (instance_id, key, name, version, None, READY, visible_at, message_id)
            statements.INSERT_READY.execute(tx, [row])
        elif instance is None and start is not None:
            row = ready_row(tx, instance_id, visible_at, message_id, start)
            statements.INSERT_READY.execute(tx, [row])
        else:
            refresh(tx, instance_id)
        return
    state, pending_since, ready_at, ready_id, mail_held, yielded_at = before
    if start is not None or pending_since is not None or state == UNKNOWN:
        # The instance waits for a start, or this message is one.
        refresh(tx, instance_id)
    elif mail_held and rules.is_mail(message.kind):
        return
    elif ready_at is None or (visible_at, message_id) < (ready_at, ready_id):
        if yielded_at is not None:
            refresh(tx, instance_id)
            return
        tx.write(statements.SET_READY_MESSAGE, (visible_at, message_id, instance_id))


def ready_row(
    tx: Transaction, instance_id: str, visible_at: int, message_id: int, start: StartRouting
) -> tuple[Any, ...]:
    """Return the row of an instance of which there is nothing but this start."""
    return (instance_id, None, start.name, start.version, tx.now, READY, visible_at, message_id)


def _identify(
    tx: Transaction, instance_id: str
) -> tuple[int | None, str | None, str | None, int | None, int | None]:
    """Return key, name, version, pending since, and when a batch can begin (None: never)."""
    instance = tx.row(instances.INSTANCE_BY_ID, (instance_id,))
    if instance is not None and instance[1] > 0:
        key, _, _, name, version = instance
        return key, name, version, None, 0
    start = tx.row(statements.QUEUED_START, (instance_id,))
    key = None if instance is None else instance[0]
    if start is None:
        return key, None, None, None, None if instance is None else 0
    count, opens_at = tx.row(statements.QUEUED_STARTS, (instance_id,))
    # With several starts, or with history, the name depends on which start is visible: then it is
    # left open.
    name, version = start[:2] if count == 1 and instance is None else (None, None)
    return key, name, version, start[3], opens_at if instance is None else 0


def _dead_letter_orphans(tx: Transaction, orphans: Sequence[str]) -> None:
    """Turn messages that waited too long for a start into dead letters, the oldest first."""
    dead: list[tuple[int, int]] = []
    for instance_id in orphans:
        dead += tx.rows(statements.DEAD_MESSAGES, (instance_id, tx.orphan_grace_ms, tx.now))
        tx.changed_instances.append(instance_id)
    for _, message_id in sorted(dead):
        tx.write(statements.COPY_DEAD, (rules.ORPHAN_REASON, tx.now, message_id))
        tx.write(statements.DELETE_MESSAGE, (message_id,))
