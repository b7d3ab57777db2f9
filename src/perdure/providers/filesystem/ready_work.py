"""Which work item may be taken next, found without looking at the others.

Free items wait in one heap per lane (who may take it, tag, activity); the others wait for a time.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final, NamedTuple

from perdure.providers.rules import is_live

if TYPE_CHECKING:
    from perdure.providers.filesystem.lookups import Lookups
    from perdure.providers.filesystem.rows import ClaimRow
    from perdure.providers.filesystem.tables import Tables
    from perdure.providers.records import SessionFetch, TagFilter

_PLAIN: Final = "plain"
_OPEN: Final = "open"
_HELD: Final = "held"
_LEFTOVERS_MAX: Final = 1000
"""Outdated entries that a heap may hold on top of twice its size before it is rebuilt."""


class _Lane(NamedTuple):
    kind: str
    """Plain: without a session. Open: of a session that nobody holds. Held: by ``owner``."""
    owner: str
    tag: str | None
    name: str


class ReadyWork:
    """Follows items, claims and sessions; stays right when the clock is set back."""

    def __init__(self, tables: Tables, lookups: Lookups) -> None:
        self._tables = tables
        self._lookups = lookups
        self._lanes: dict[_Lane, list[int]] = {}
        self._lane_of: dict[int, _Lane] = {}
        """Where each free item lies; entries elsewhere are left over."""
        self._later: list[tuple[int, int]] = []
        self._holders: dict[str, str | None] = {}
        """Who held each session when its items were last placed."""
        self._leases: list[tuple[int, str]] = []
        self._now_ms = 0
        """The latest time at which anything was placed."""
        self.has_news = False
        """Something can be fetched now or earlier than before; for waking whoever waits."""

    # --- following changes

    def refresh(self, message_id: int, now_ms: int) -> None:
        """Place the item anew after a change of its rows."""
        self._now_ms = max(self._now_ms, now_ms)
        row, claim = self._tables.work.get(message_id), self._tables.claims.get(message_id)
        if row is None or claim is None:
            self._lane_of.pop(message_id, None)
            return
        free_at_ms = _free_at_ms(claim)
        if free_at_ms > now_ms:
            self._lane_of.pop(message_id, None)
            self._wait(free_at_ms, message_id)
            return
        message = row.message
        kind, owner = self._who(message.session_id, now_ms)
        lane = _Lane(kind, owner, message.tag, message.name)
        if self._lane_of.get(message_id) != lane:
            self._lane_of[message_id] = lane
            heapq.heappush(self._lanes.setdefault(lane, []), message_id)
            self.has_news = True

    def refresh_session(self, session_id: str, now_ms: int) -> None:
        """Place the items of the session anew if it has another holder."""
        self._now_ms = max(self._now_ms, now_ms)
        row = self._tables.sessions.get(session_id)
        holder = self._holder(session_id, now_ms)
        if row is not None and holder is not None:
            self._await_end(row.locked_until_ms, session_id)
        if self._holders.get(session_id) == holder:
            return
        if holder is None:
            del self._holders[session_id]
        else:
            self._holders[session_id] = holder
        for message_id in self._lookups.session_work.get(session_id, ()):
            self.refresh(message_id, now_ms)

    def _wait(self, until_ms: int, message_id: int) -> None:
        claims = self._tables.claims.rows
        if len(self._later) > 2 * len(claims) + _LEFTOVERS_MAX:
            self._later = [
                entry
                for entry in set(self._later)
                if entry[1] in claims and _free_at_ms(claims[entry[1]]) == entry[0]
            ]
            heapq.heapify(self._later)
        # Whoever waits has to know of an earlier time to wait for.
        self.has_news |= not self._later or until_ms < self._later[0][0]
        heapq.heappush(self._later, (until_ms, message_id))

    def _await_end(self, until_ms: int, session_id: str) -> None:
        sessions = self._tables.sessions.rows
        if len(self._leases) > 2 * len(sessions) + _LEFTOVERS_MAX:
            self._leases = [
                entry
                for entry in self._leases
                if entry[1] in sessions and sessions[entry[1]].locked_until_ms == entry[0]
            ]
            heapq.heapify(self._leases)
        self.has_news |= not self._leases or until_ms < self._leases[0][0]
        heapq.heappush(self._leases, (until_ms, session_id))

    def _who(self, session_id: str | None, now_ms: int) -> tuple[str, str]:
        if session_id is None:
            return _PLAIN, ""
        holder = self._holder(session_id, now_ms)
        return (_OPEN, "") if holder is None else (_HELD, holder)

    def _holder(self, session_id: str, now_ms: int) -> str | None:
        row = self._tables.sessions.get(session_id)
        if row is None or not is_live(row.locked_until_ms, now_ms):
            return None
        return row.owner_id

    # --- choosing

    def first(
        self,
        session: SessionFetch | None,
        tags: TagFilter,
        activities: frozenset[str] | None,
        now_ms: int,
    ) -> int | None:
        """The item to hand out next."""
        self._advance(now_ms)
        best: int | None = None
        for lane in list(self._lanes):
            if (
                tags.matches(lane.tag)
                and (activities is None or lane.name in activities)
                and _may_take(lane, session)
            ):
                head = self._head(lane)
                if head is not None and (best is None or head < best):
                    best = head
        return best

    def next_change_ms(self) -> int | None:
        """When an item or a session may become free."""
        times = [heap[0][0] for heap in (self._later, self._leases) if heap]
        return min(times, default=None)

    def _head(self, lane: _Lane) -> int | None:
        heap = self._lanes[lane]
        while heap and self._lane_of.get(heap[0]) != lane:
            heapq.heappop(heap)
        if not heap:
            del self._lanes[lane]
            return None
        return heap[0]

    def _advance(self, now_ms: int) -> None:
        if now_ms < self._now_ms:  # the clock was set back: what was free may not be any more
            self._now_ms = now_ms
            for session_id in list(self._tables.sessions.rows):
                self.refresh_session(session_id, now_ms)
            for message_id in list(self._lane_of):
                self.refresh(message_id, now_ms)
        while self._leases and self._leases[0][0] <= now_ms:
            self.refresh_session(heapq.heappop(self._leases)[1], now_ms)
        while self._later and self._later[0][0] <= now_ms:
            self.refresh(heapq.heappop(self._later)[1], now_ms)


def _free_at_ms(claim: ClaimRow) -> int:
    return max(claim.visible_at_ms, claim.locked_until_ms)


def _may_take(lane: _Lane, session: SessionFetch | None) -> bool:
    if lane.kind == _PLAIN:
        return True
    if session is None:
        return False
    if lane.kind == _OPEN:
        return not session.only_owned
    return lane.owner == session.owner_id
