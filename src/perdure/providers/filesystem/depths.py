"""How full the two queues are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.providers.records import QueueDepth
from perdure.providers.rules import is_live, is_visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perdure.providers.filesystem.state import State


def depth_of_messages(state: State, now_ms: int) -> QueueDepth:
    """A message is locked while a live lock carries it."""
    locked: set[int] = set()
    for lock in state.tables.locks.rows.values():
        if is_live(lock.locked_until_ms, now_ms):
            locked |= state.lookups.tagged.get(lock.lock_token, set())
    return _depth(
        (
            (row.visible_at_ms, message_id in locked)
            for message_id, row in state.tables.messages.rows.items()
        ),
        now_ms,
    )


def depth_of_work(state: State, now_ms: int) -> QueueDepth:
    return _depth(
        (
            (claim.visible_at_ms, is_live(claim.locked_until_ms, now_ms))
            for claim in state.tables.claims.rows.values()
        ),
        now_ms,
    )


def _depth(entries: Iterable[tuple[int, bool]], now_ms: int) -> QueueDepth:
    """Counts entries of (visible at, locked)."""
    visible = delayed = locked = 0
    oldest_ms = now_ms
    for visible_at_ms, is_locked in entries:
        if is_locked:
            locked += 1
        elif is_visible(visible_at_ms, now_ms):
            visible += 1
            oldest_ms = min(oldest_ms, visible_at_ms)
        else:
            delayed += 1
    return QueueDepth(
        visible=visible,
        delayed=delayed,
        locked=locked,
        oldest_visible_age_ms=now_ms - oldest_ms if visible else None,
    )
