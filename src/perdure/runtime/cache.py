"""The live instances of a runtime, least recently used first, bounded by count and by memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.runtime.live import LiveInstance

# When it is full, only so many of the least recently used are asked whether they are idle.
_CANDIDATES = 16


class LiveCache:
    """Knows who is live and who should go; giving locks back is the dispatcher's part."""

    def __init__(self, instances_max: int, events_max: int) -> None:
        self._instances_max = instances_max
        self._events_max = events_max
        self._live: OrderedDict[str, LiveInstance] = OrderedDict()
        self._events = 0
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._live

    def __iter__(self) -> Iterator[LiveInstance]:
        """A copy, so that instances may leave meanwhile; may be asked from another thread."""
        return iter(list(self._live.values()))

    def get(self, instance_id: str) -> LiveInstance | None:
        return self._live.get(instance_id)

    @property
    def is_full(self) -> bool:
        return self.room == 0

    @property
    def room(self) -> int:
        """How many more fit without anybody leaving."""
        if self._events >= self._events_max:
            return 0
        return max(0, self._instances_max - len(self._live))

    async def wait_for_room(self) -> None:
        """Until somebody leaves, or ``wake`` is called."""
        self._room.clear()
        await self._room.wait()

    def wake(self) -> None:
        self._room.set()

    def add(self, live: LiveInstance) -> None:
        """In the place of one that has lost its lock and does not know it yet, if there is one."""
        stale = self._live.get(live.instance_id)
        if stale is not None:
            self.remove(stale)
        self._live[live.instance_id] = live
        live.counted_events = live.execution.event_count
        self._events += live.counted_events

    def used(self, live: LiveInstance, now_ms: int, events: int) -> None:
        """It had a turn, which added that many events to its history."""
        live.used_at_ms = now_ms
        if self._live.get(live.instance_id) is live:
            self._live.move_to_end(live.instance_id)
            live.counted_events += events
            self._events += events

    def remove(self, live: LiveInstance) -> None:
        if self._live.get(live.instance_id) is live:
            del self._live[live.instance_id]
            self._events -= live.counted_events
            self._room.set()

    def oldest_idle(self) -> LiveInstance | None:
        oldest = islice(self._live.values(), _CANDIDATES)
        return next((live for live in oldest if live.is_idle), None)

    def idle_since(self, before_ms: int) -> list[LiveInstance]:
        """Those that nobody has needed since then."""
        found: list[LiveInstance] = []
        for live in self._live.values():
            if live.used_at_ms > before_ms:
                break  # from here on they are younger
            if live.is_idle:
                found.append(live)
        return found
