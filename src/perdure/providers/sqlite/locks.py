"""The row that says whether an instance can be handed out, and when to look again.

The hot verbs change single columns of it; ``refresh`` works the whole row out from what it stands
for, so that every rarer change can simply ask for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.providers._shared import rules
from perdure.providers.sqlite import queries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.items import StartRouting
    from perdure.providers.sqlite.transaction import Transaction

READY: Final = 0
WAITING: Final = 1
UNKNOWN: Final = 2
SUSPENDED: Final = 3

NO_FACTS: Final = (None, None, None, 0, None, 0, None, None, None)
"""As ``queries.LOCK_FACTS``, of an instance without a row."""


def refresh(tx: Transaction, instance_id: str) -> None:
    """Work out the row of an instance again; drops it when nothing is left to say."""
    tx.turns_changed = True
    facts: Any = tx.row(queries.LOCK_FACTS, (instance_id,)) or NO_FACTS
    token, locked_until, _, _, _, suspended, not_before, block, touched_at = facts
    is_locked = token is not None and rules.is_live(locked_until, tx.now)
    if is_locked:
        first = tx.row(queries.FIRST_FREE_MESSAGE, (instance_id, token))
    else:
        first = tx.row(queries.FIRST_MESSAGE, (instance_id,))
    if first is None and token is None and not suspended and not_before is None and block is None:
        if touched_at is not None:
            key, *_ = _identify(tx, instance_id)
            tx.execute(queries.TOUCH_INSTANCE, (touched_at, key))
        tx.execute(queries.DELETE_LOCK, (instance_id,))
        return
    key, name, version, pending_since, opens_at = _identify(tx, instance_id)
    wake_at: int | None = None
    if suspended:
        state = SUSPENDED
    elif is_locked:
        state, wake_at = WAITING, locked_until
    elif opens_at is None:
        state = UNKNOWN
        wake_at = tx.row(queries.DEAD_AT, (tx.orphan_grace_ms, instance_id))[0]
    elif (free_at := max(opens_at, not_before or 0)) > tx.now:
        state, wake_at = WAITING, free_at
    else:
        state = READY
    tx.execute(
        queries.PUT_LOCK,
        (instance_id, key, name, version, pending_since, state, wake_at,
         *(first or (None, None)), *facts),
    )  # fmt: skip


def wake(tx: Transaction) -> None:
    """Look again at the rows whose time has come; orphans that waited too long become letters."""
    if tx.turns_awake:
        return
    tx.turns_awake = True
    awake = tx.rows(queries.AWAKE, (tx.now,))
    if not awake:
        return
    _bury(tx, [instance_id for instance_id, state in awake if state == UNKNOWN])
    for instance_id, _ in awake:
        refresh(tx, instance_id)


def next_due(tx: Transaction, owner: str | None) -> int | None:
    """When there may be something to fetch that cannot be fetched now."""
    dues = [
        tx.row(queries.NEXT_WAKE, ())[0],
        tx.row(queries.NEXT_READY, (tx.now,))[0],
    ]
    if owner is not None:
        dues.append(tx.row(queries.NEXT_KEPT, (owner, tx.now))[0])
    return min((due for due in dues if due is not None), default=None)


def note_message(
    tx: Transaction, instance_id: str, visible_at: int, message_id: int, start: StartRouting | None
) -> None:
    """Place an instance after a message was added for it."""
    tx.turns_changed = True
    place = tx.row(queries.PLACE, (instance_id,))
    if place is None:
        instance = tx.row(queries.INSTANCE_BY_ID, (instance_id,))
        if instance is not None and instance[1] > 0:
            key, _, _, name, version = instance
            row = (instance_id, key, name, version, None, READY, visible_at, message_id)
            queries.INSERT_READY.execute(tx, [row])
        elif instance is None and start is not None:
            row = ready_row(tx, instance_id, visible_at, message_id, start)
            queries.INSERT_READY.execute(tx, [row])
        else:
            refresh(tx, instance_id)
        return
    state, pending_since, due_at, first_message_id = place
    if start is not None or pending_since is not None or state == UNKNOWN:
        # It may have to wait for a start, or this one may open it: worth a closer look.
        refresh(tx, instance_id)
    elif due_at is None or (visible_at, message_id) < (due_at, first_message_id):
        tx.execute(queries.SET_DUE, (visible_at, message_id, instance_id))


def ready_row(
    tx: Transaction, instance_id: str, visible_at: int, message_id: int, start: StartRouting
) -> tuple[Any, ...]:
    """The row of an instance of which there is nothing but this start."""
    return (instance_id, None, start.name, start.version, tx.now, READY, visible_at, message_id)


def _identify(
    tx: Transaction, instance_id: str
) -> tuple[int | None, str | None, str | None, int | None, int | None]:
    """Key, name, version, pending since, and when a batch can begin (None: never)."""
    instance = tx.row(queries.INSTANCE_BY_ID, (instance_id,))
    if instance is not None and instance[1] > 0:
        key, _, _, name, version = instance
        return key, name, version, None, 0
    start = tx.row(queries.QUEUED_START, (instance_id,))
    key = None if instance is None else instance[0]
    if start is None:
        return key, None, None, None, None if instance is None else 0
    count, opens_at = tx.row(queries.QUEUED_STARTS, (instance_id,))
    # With several starts, the name depends on which of them is visible: then it is left open.
    name, version = start[:2] if count == 1 else (None, None)
    return key, name, version, start[3], opens_at if instance is None else 0


def _bury(tx: Transaction, orphans: Sequence[str]) -> None:
    """Turn what waited too long for a start into dead letters, in the order of its death."""
    dead: list[tuple[int, int]] = []
    for instance_id in orphans:
        dead += tx.rows(queries.DEAD_MESSAGES, (instance_id, tx.orphan_grace_ms, tx.now))
        tx.changed_instances.append(instance_id)
    for _, message_id in sorted(dead):
        tx.execute(queries.COPY_DEAD, (rules.ORPHAN_REASON, tx.now, message_id))
        tx.execute(queries.DELETE_MESSAGE, (message_id,))
