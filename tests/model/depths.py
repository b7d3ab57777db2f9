"""The lengths of the two queues of an in-memory store."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from model.rules import is_live, is_visible
from perdure.providers.records import ActivityDepth, QueueDepth

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model.state import Instance, WorkItem


def depth_of_messages(instances: Iterable[Instance], now_ms: int) -> QueueDepth:
    """A message is locked while a live lock carries it."""
    return _depth(
        (
            (message.visible_at_ms, instance.carries(message.message_id, now_ms))
            for instance in instances
            for message in instance.messages.values()
        ),
        now_ms,
    )


def depths_of_work(items: Iterable[WorkItem], now_ms: int) -> Iterable[ActivityDepth]:
    """Return the depth of each activity and tag."""
    entries: dict[tuple[str, str | None], list[tuple[int, bool]]] = defaultdict(list)
    for item in items:
        entry = (item.visible_at_ms, is_live(item.locked_until_ms, now_ms))
        entries[item.message.name, item.message.tag].append(entry)
    for (name, tag), found in entries.items():
        yield ActivityDepth(*astuple(_depth(found, now_ms)), name=name, tag=tag)


def _depth(entries: Iterable[tuple[int, bool]], now_ms: int) -> QueueDepth:
    """Counts entries of (visible at, locked)."""
    visible_since: list[int] = []
    delayed = locked = 0
    for visible_at_ms, is_locked in entries:
        if is_locked:
            locked += 1
        elif is_visible(visible_at_ms, now_ms):
            visible_since.append(visible_at_ms)
        else:
            delayed += 1
    oldest = min(visible_since, default=None)
    return QueueDepth(
        visible=len(visible_since),
        delayed=delayed,
        locked=locked,
        oldest_visible_age_ms=None if oldest is None else now_ms - oldest,
    )
