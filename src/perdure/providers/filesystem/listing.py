"""All instances in the order of their creation, and by status, so that a page costs a page."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import InstancePage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from perdure.providers.filesystem.lookups import Lookups
    from perdure.providers.filesystem.standing import Standing
    from perdure.providers.records import InstanceInfo, InstanceQuery

_Place = tuple[int, str]


class Listing:
    """Every instance that administration shows."""

    def __init__(self, lookups: Lookups, standing: Standing) -> None:
        self._lookups = lookups
        self._standing = standing
        self._entries: dict[str, tuple[_Place, Status]] = {}
        self._by_status: dict[Status, list[_Place]] = {status: [] for status in Status}
        """Places in ascending order."""

    def __len__(self) -> int:
        return len(self._entries)

    def counts(self) -> dict[Status, int]:
        return {status: len(places) for status, places in self._by_status.items() if places}

    def refresh(self, instance_id: str) -> None:
        """Follow a change of the instance."""
        old = self._entries.get(instance_id)
        new: tuple[_Place, Status] | None = None
        if self._standing.exists(instance_id):
            place = (self._standing.created_at_ms(instance_id), instance_id)
            new = (place, self._standing.status(instance_id))
        if old == new:
            return
        if old is not None:
            places = self._by_status[old[1]]
            del places[bisect_left(places, old[0])]
            del self._entries[instance_id]
        if new is not None:
            insort(self._by_status[new[1]], new[0])
            self._entries[instance_id] = new

    def load(self, instance_ids: Iterable[str]) -> None:
        """Take in many at once; cheaper than one by one."""
        for instance_id in instance_ids:
            if self._standing.exists(instance_id):
                place = (self._standing.created_at_ms(instance_id), instance_id)
                status = self._standing.status(instance_id)
                self._entries[instance_id] = (place, status)
                self._by_status[status].append(place)
        for places in self._by_status.values():
            places.sort()

    # --- asking

    def page(self, query: InstanceQuery | None, before: _Place | None, limit: int) -> InstancePage:
        found: list[InstanceInfo] = []
        for info in self.matching(query, before):
            if len(found) == limit:
                last = found[-1]
                return InstancePage(
                    instances=tuple(found),
                    next_cursor=rules.encode_cursor(last.created_at_ms, last.instance_id),
                )
            found.append(info)
        return InstancePage(instances=tuple(found), next_cursor=None)

    def matching(
        self, query: InstanceQuery | None, before: _Place | None = None
    ) -> Iterator[InstanceInfo]:
        """Newest first."""
        for _, instance_id in self._places(query, before):
            info = self._standing.info(instance_id)
            if rules.fits_query(info, query):
                yield info

    def _places(self, query: InstanceQuery | None, before: _Place | None) -> Iterator[_Place]:
        if query is not None and before is None and query.created_before_ms is not None:
            before = (query.created_before_ms, "")
        named = _named(query, self._lookups.children)
        if named is not None:
            places = sorted(
                (self._entries[instance_id][0] for instance_id in named & self._entries.keys()),
                reverse=True,
            )
            return (place for place in places if before is None or place < before)
        statuses = query.statuses if query is not None and query.statuses is not None else Status
        lists = (_descending(self._by_status[status], before) for status in statuses)
        return heapq.merge(*lists, reverse=True)


def _named(query: InstanceQuery | None, children: dict[str, set[str]]) -> set[str] | None:
    """The few instances that a query names, if it does."""
    if query is None:
        return None
    if query.instance_ids is not None:
        return set(query.instance_ids)
    if query.parent_instance_id is not None:
        return children.get(query.parent_instance_id, set())
    return None


def _descending(places: list[_Place], before: _Place | None) -> Iterator[_Place]:
    end = len(places) if before is None else bisect_left(places, before)
    return (places[position] for position in range(end - 1, -1, -1))
