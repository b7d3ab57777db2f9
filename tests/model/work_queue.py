"""The worker queue and its sessions: items in lanes, so that a fetch looks only at lane heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from model.rules import is_live, is_visible, visible_at
from model.state import Session, SortedKeys, WorkItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from perdure.providers.records import ActivityIdentity, SessionFetch, TagFilter, WorkerMessage
    from perdure.providers.waiting import Signal

_Key = TypeVar("_Key")
_Lane: TypeAlias = tuple[str | None, str, str | None]
"""Tag, activity name, session."""


class WorkQueue:
    """All work items of a store."""

    def __init__(self, signal: Signal, next_id: Callable[[], int]) -> None:
        self._signal = signal
        self._next_id = next_id
        self.items: dict[int, WorkItem] = {}
        self.sessions: dict[str, Session] = {}
        self._locks: dict[str, WorkItem] = {}
        self._identities: dict[ActivityIdentity, set[int]] = {}
        self._session_items: dict[str, set[int]] = {}
        self._ready: dict[_Lane, SortedKeys[tuple[int]]] = {}
        self._later: SortedKeys[tuple[int, int]] = SortedKeys()
        """(time at which it is free, message id)."""
        self._later_ms: dict[int, int] = {}
        self._slept_until_ms: float = 0
        """The latest time at which a waiting fetch looks again by itself."""

    # --- items

    def add(self, message: WorkerMessage, now_ms: int) -> WorkItem:
        item = WorkItem(self._next_id(), message, visible_at(message.visible_at_ms, now_ms), now_ms)
        if message.claim is not None:
            item.lock_token = message.claim.lock_token
            item.locked_until_ms = now_ms + message.claim.lock_timeout_ms
            item.attempt_count = 1
        self.insert(item, now_ms)
        return item

    def insert(self, item: WorkItem, now_ms: int) -> None:
        self.items[item.message_id] = item
        self._identities.setdefault(item.identity, set()).add(item.message_id)
        if item.message.session_id is not None:
            self._session_items.setdefault(item.message.session_id, set()).add(item.message_id)
        if item.lock_token is not None:
            self._locks[item.lock_token] = item
        self._place(item, now_ms)
        # A claimed item is news only for who would sleep beyond the end of its lock.
        if item.lock_token is None or item.free_at_ms < self._slept_until_ms:
            self._notify()

    def follow_clock(self, now_ms: int, back: Callable[[int], int]) -> None:
        """Move times to a clock that was set back."""
        for item in self.items.values():
            self._unplace(item)
            if now_ms < item.visible_at_ms <= item.enqueued_at_ms:
                item.visible_at_ms = now_ms
            item.enqueued_at_ms = min(item.enqueued_at_ms, now_ms)
            item.locked_until_ms = back(item.locked_until_ms)
            self._place(item, now_ms)
        for session in self.sessions.values():
            session.locked_until_ms = back(session.locked_until_ms)
            session.last_activity_ms = min(session.last_activity_ms, now_ms)

    def remove(self, item: WorkItem) -> None:
        self._unplace(item)
        del self.items[item.message_id]
        _discard(self._identities, item.identity, item.message_id)
        if item.message.session_id is not None:
            _discard(self._session_items, item.message.session_id, item.message_id)
        if item.lock_token is not None:
            del self._locks[item.lock_token]

    def with_identity(self, identity: ActivityIdentity) -> list[WorkItem]:
        return [self.items[message_id] for message_id in self._identities.get(identity, ())]

    def holder_of(self, lock_token: str) -> WorkItem | None:
        """The item whose current token this is, live or not."""
        return self._locks.get(lock_token)

    def lock(self, item: WorkItem, token: str, locked_until_ms: int, now_ms: int) -> None:
        if item.lock_token is not None:
            del self._locks[item.lock_token]
        item.lock_token, item.locked_until_ms = token, locked_until_ms
        self._locks[token] = item
        self._place(item, now_ms)

    def unlock(self, item: WorkItem, visible_at_ms: int, now_ms: int) -> None:
        if item.lock_token is not None:
            del self._locks[item.lock_token]
        item.lock_token, item.locked_until_ms = None, 0
        item.visible_at_ms = visible_at_ms
        self._place(item, now_ms)
        self._notify()

    def _notify(self) -> None:
        self._slept_until_ms = 0
        self._signal.notify()

    # --- looking

    def first_fit(
        self,
        session: SessionFetch | None,
        tags: TagFilter,
        activities: frozenset[str] | None,
        now_ms: int,
    ) -> WorkItem | None:
        """The oldest item that this worker may take now."""
        while (first := self._later.first()) is not None and is_visible(first[0], now_ms):
            self._place(self.items[first[1]], now_ms)
        heads: list[int] = []
        for (tag, name, session_id), lane in self._ready.items():
            fits = tags.matches(tag) and (activities is None or name in activities)
            if fits and self._session_is_open(session_id, session, now_ms):
                heads.extend(self._first_free(lane, now_ms))
        return self.items[min(heads)] if heads else None

    def sleep_until_ms(self, now_ms: int) -> int | None:
        """For who found nothing: when an item or a session may become free without notice."""
        dues = [
            session.locked_until_ms
            for session in self.sessions.values()
            if is_live(session.locked_until_ms, now_ms)
        ]
        if (later := self._later.first_from((now_ms + 1,))) is not None:
            dues.append(later[0])
        until_ms = min(dues, default=None)
        self._slept_until_ms = max(
            self._slept_until_ms, float("inf") if until_ms is None else until_ms
        )
        return until_ms

    def _first_free(self, lane: SortedKeys[tuple[int]], now_ms: int) -> Iterable[int]:
        for (message_id,) in lane:
            if is_visible(self.items[message_id].free_at_ms, now_ms):
                return (message_id,)
        return ()

    def _session_is_open(
        self, session_id: str | None, fetch: SessionFetch | None, now_ms: int
    ) -> bool:
        if session_id is None:
            return True
        if fetch is None:
            return False
        session = self.live_session(session_id, now_ms)
        if session is None:
            return not fetch.only_owned
        return session.owner_id == fetch.owner_id

    # --- sessions

    def live_session(self, session_id: str, now_ms: int) -> Session | None:
        session = self.sessions.get(session_id)
        if session is None or not is_live(session.locked_until_ms, now_ms):
            return None
        return session

    def touch_session(self, item: WorkItem, now_ms: int) -> None:
        if item.message.session_id is not None:
            session = self.live_session(item.message.session_id, now_ms)
            if session is not None:
                session.last_activity_ms = now_ms

    def claim_session(self, session_id: str, fetch: SessionFetch, now_ms: int) -> None:
        self.sessions[session_id] = Session(
            fetch.owner_id, now_ms + fetch.lock_timeout_ms, last_activity_ms=now_ms
        )

    def has_items(self, session_id: str) -> bool:
        return session_id in self._session_items

    # --- places

    def _place(self, item: WorkItem, now_ms: int) -> None:
        self._unplace(item)
        if is_visible(item.free_at_ms, now_ms):
            self._ready.setdefault(_lane_of(item), SortedKeys()).add((item.message_id,))
        else:
            self._later.add((item.free_at_ms, item.message_id))
            self._later_ms[item.message_id] = item.free_at_ms

    def _unplace(self, item: WorkItem) -> None:
        if (later_ms := self._later_ms.pop(item.message_id, None)) is not None:
            self._later.remove((later_ms, item.message_id))
        else:
            lane = self._ready.get(_lane_of(item))
            if lane is not None and (item.message_id,) in lane:
                lane.remove((item.message_id,))
                if not lane:
                    del self._ready[_lane_of(item)]


def _lane_of(item: WorkItem) -> _Lane:
    return (item.message.tag, item.message.name, item.message.session_id)


def _discard(index: dict[_Key, set[int]], key: _Key, message_id: int) -> None:
    index[key].discard(message_id)
    if not index[key]:
        del index[key]
