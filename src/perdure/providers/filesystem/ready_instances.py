"""Which instance may be taken next, found without looking at the others.

Instances whose messages can be handed out wait in one heap per route (owner of a kept lock, name,
version, pinned framework version), so that a filter looks at routes; the others wait for a time.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final, NamedTuple

from perdure.providers import rules

if TYPE_CHECKING:
    from perdure.providers.filesystem.lookups import Lookups
    from perdure.providers.filesystem.quarantine import Quarantine
    from perdure.providers.filesystem.rows import LockRow, MessageRow
    from perdure.providers.filesystem.standing import Standing
    from perdure.providers.filesystem.tables import Tables
    from perdure.providers.records import OrchestrationFilter, Version


_LEFTOVERS_MAX: Final = 1000
"""Outdated entries that a heap may hold on top of twice its size before it is rebuilt."""


class _Route(NamedTuple):
    owner: str | None
    name: str
    version: str | None
    pinned: Version | None


class _Place(NamedTuple):
    """Oldest message first. An entry counts only while its stamp is the instance's newest."""

    visible_at_ms: int
    message_id: int
    instance_id: str
    stamp: int


class ReadyInstances:
    """Follows locks, holds and messages; stays right when the clock is set back."""

    def __init__(
        self,
        tables: Tables,
        lookups: Lookups,
        standing: Standing,
        quarantine: Quarantine,
        orphan_grace_ms: int,
    ) -> None:
        self._tables = tables
        self._lookups = lookups
        self._standing = standing
        self._quarantine = quarantine
        self._orphan_grace_ms = orphan_grace_ms
        self._messages: dict[str, list[tuple[int, int]]] = {}
        """By instance, a heap of (visible_at, message id); deleted messages linger in it."""
        self._routes: dict[_Route, list[_Place]] = {}
        self._later: list[tuple[int, str, int]] = []
        self._stamps: dict[str, int] = {}
        self._last_stamp = 0
        self._orphans: list[tuple[int, int]] = []
        """(end of the grace, message id) of messages that had no instance when they came."""
        self._now_ms = 0
        """The latest time at which anything was placed."""
        self.has_news = False
        """Something can be fetched now or earlier than before; for waking whoever waits."""
        lookups.on_new_message = self._add

    # --- following changes

    def _add(self, row: MessageRow) -> None:
        instance_id = row.message.instance_id
        heap = self._messages.setdefault(instance_id, [])
        heapq.heappush(heap, (row.visible_at_ms, row.message_id))
        if row.message.start is None and not self._standing.is_known(instance_id):
            grace_ends_ms = max(row.visible_at_ms, row.enqueued_at_ms + self._orphan_grace_ms)
            heapq.heappush(self._orphans, (grace_ends_ms, row.message_id))

    def refresh(self, instance_id: str, now_ms: int) -> None:
        """Place the instance anew after a change of its messages, lock, holds or rows."""
        self._last_stamp += 1
        self._now_ms = max(self._now_ms, now_ms)
        oldest = self._oldest(instance_id)
        if oldest is None:
            self._stamps.pop(instance_id, None)
            return
        self._stamps[instance_id] = self._last_stamp
        hold = self._tables.holds.get(instance_id)
        opens_at_ms = self._opens_at_ms(instance_id)
        is_suspended = hold is not None and hold.suspended
        if opens_at_ms is None or is_suspended or self._quarantine.bars(instance_id):
            return
        lock = self._tables.locks.get(instance_id)
        not_before_ms = hold.not_before_ms if hold is not None else None
        free_at_ms = max(
            oldest[0], opens_at_ms, not_before_ms or 0, lock.locked_until_ms if lock else 0
        )
        if free_at_ms <= now_ms:
            self._push(None, oldest, instance_id, now_ms)
            self._await_name(instance_id, now_ms)
            return
        self._wait(free_at_ms, instance_id)
        if lock is not None and lock.is_kept and lock.owner is not None:
            self._place_arrivals(lock, now_ms)

    def _place_arrivals(self, lock: LockRow, now_ms: int) -> None:
        """What came in since the last turn goes to the one who keeps the lock."""
        arrival = self._oldest(lock.instance_id, without_token=lock.lock_token)
        if arrival is None:
            return
        if arrival[0] <= now_ms:
            self._push(lock.owner, arrival, lock.instance_id, now_ms)
        else:
            self._wait(arrival[0], lock.instance_id)

    def _wait(self, until_ms: int, instance_id: str) -> None:
        if len(self._later) > 2 * len(self._stamps) + _LEFTOVERS_MAX:
            self._later = [entry for entry in self._later if self._stamps.get(entry[1]) == entry[2]]
            heapq.heapify(self._later)
        # Whoever waits has to know of an earlier time to wait for.
        self.has_news |= not self._later or until_ms < self._later[0][0]
        heapq.heappush(self._later, (until_ms, instance_id, self._last_stamp))

    def _await_name(self, instance_id: str, now_ms: int) -> None:
        """History without an instance gets its name, and so its route, from a start that is due."""
        if not self._standing.has_turns(instance_id):
            for message_id in self._lookups.starts.get(instance_id, ()):
                visible_at_ms = self._tables.messages.rows[message_id].visible_at_ms
                if visible_at_ms > now_ms:
                    self._wait(visible_at_ms, instance_id)

    def _push(
        self, owner: str | None, oldest: tuple[int, int], instance_id: str, now_ms: int
    ) -> None:
        who = self._standing.who(instance_id, now_ms)
        execution = self._standing.current_execution(instance_id)
        pinned = execution.framework_version if execution is not None else None
        heap = self._routes.setdefault(_Route(owner, who.name, who.version, pinned), [])
        heapq.heappush(heap, _Place(*oldest, instance_id, self._last_stamp))
        self.has_news = True

    def _opens_at_ms(self, instance_id: str) -> int | None:
        """When a batch can begin: at once if it is known, else with its first visible start."""
        if self._standing.is_known(instance_id):
            return 0
        starts = self._lookups.starts.get(instance_id, ())
        rows = self._tables.messages.rows
        return min((rows[start].visible_at_ms for start in starts), default=None)

    def _oldest(self, instance_id: str, without_token: str | None = None) -> tuple[int, int] | None:
        """Key of the first message that is there, and that does not carry the token."""
        heap = self._messages.get(instance_id)
        if heap is None:
            return None
        rows = self._tables.messages.rows
        while heap and heap[0][1] not in rows:
            heapq.heappop(heap)
        if not heap:
            del self._messages[instance_id]
            return None
        carried = self._lookups.tagged.get(without_token) if without_token is not None else None
        if not carried:
            return heap[0]
        return min((key for key in heap if key[1] not in carried and key[1] in rows), default=None)

    # --- choosing

    def first(
        self,
        filter: OrchestrationFilter | None,  # noqa: A002
        owner: str | None,
        now_ms: int,
    ) -> str | None:
        """The instance to hand out next."""
        self._advance(now_ms)
        best: _Place | None = None
        for route in list(self._routes):
            if (
                (route.owner is None or route.owner == owner)
                and rules.fits_handlers(filter, route.name, route.version)
                and rules.fits_framework(filter, route.pinned)
            ):
                place = self._head(route)
                if place is not None and (best is None or place < best):
                    best = place
        return best.instance_id if best is not None else None

    def visible_messages(self, instance_id: str, now_ms: int) -> list[int]:
        """All that can be handed out now, in queue order."""
        heap = self._messages.get(instance_id, [])
        rows = self._tables.messages.rows
        visible: dict[int, int] = {}
        while heap and heap[0][0] <= now_ms:
            visible_at_ms, message_id = heapq.heappop(heap)
            if message_id in rows:
                visible[message_id] = visible_at_ms
        for message_id, visible_at_ms in visible.items():
            heapq.heappush(heap, (visible_at_ms, message_id))
        return sorted(visible)

    def expired_orphans(self, now_ms: int) -> list[int]:
        """Messages whose instance did not turn up within the grace."""
        expired: list[int] = []
        while self._orphans and self._orphans[0][0] <= now_ms:
            _, message_id = heapq.heappop(self._orphans)
            row = self._tables.messages.get(message_id)
            if row is not None and self._is_orphan(row.message.instance_id):
                expired.append(message_id)
        return expired

    def next_change_ms(self) -> int | None:
        """When something may become ready, or an orphan's grace ends."""
        times = [heap[0][0] for heap in (self._later, self._orphans) if heap]
        return min(times, default=None)

    def _is_orphan(self, instance_id: str) -> bool:
        return not (
            self._standing.is_known(instance_id)
            or instance_id in self._lookups.starts
            or self._quarantine.bars(instance_id)
        )

    def _head(self, route: _Route) -> _Place | None:
        heap = self._routes[route]
        while heap and self._stamps.get(heap[0].instance_id) != heap[0].stamp:
            heapq.heappop(heap)
        if not heap:
            del self._routes[route]
            return None
        return heap[0]

    def _advance(self, now_ms: int) -> None:
        if now_ms < self._now_ms:  # the clock was set back: what was ready may not be any more
            self._now_ms = now_ms
            for instance_id in list(self._messages):
                self.refresh(instance_id, now_ms)
        while self._later and self._later[0][0] <= now_ms:
            _, instance_id, stamp = heapq.heappop(self._later)
            if self._stamps.get(instance_id) == stamp:
                self.refresh(instance_id, now_ms)
