"""Waiting for work, and completing a lock that was taken with the history that it covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from perdure.errors import CorruptData
from perdure.providers.records import FetchedOrchestration
from perdure.providers.waiting import Poll

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.providers.filesystem.store import OpenStore
    from perdure.providers.filesystem.turns import LockedInstance
    from perdure.providers.waiting import Signal

_Found = TypeVar("_Found")


async def poll(
    store: OpenStore,
    signal: Signal,
    timeout_ms: int,
    look: Callable[[], Awaitable[_Found | None]],
    next_change_ms: Callable[[], int | None],
) -> _Found | None:
    """Look until there is something; in between wait for a signal or for the next due time."""
    patience = Poll(signal, store.clock, timeout_ms)
    while True:
        found = await look()
        if found is not None or not await patience.wait(next_change_ms()) or not store.is_open:
            return found


async def with_history(store: OpenStore, locked: LockedInstance) -> FetchedOrchestration:
    """What a fetch answers."""
    item = locked.item
    try:
        history = tuple(await store.read_history(locked.history))
    except CorruptData as damage:
        item = msgspec.structs.replace(item, history_error=str(damage), kv_snapshot={})
    else:
        item = msgspec.structs.replace(item, history=history) if history else item
    return FetchedOrchestration(
        item=item,
        lock_token=locked.lock_token,
        attempt_count=locked.attempt_count,
        continues=locked.continues,
    )
