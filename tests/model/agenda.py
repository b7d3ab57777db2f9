"""The instances that may be taken next, and the times from which the others may."""

from __future__ import annotations

import heapq
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

from model.rules import is_visible
from model.state import SortedKeys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.state import Instance

_Keys: TypeAlias = SortedKeys[tuple[int, int, str]]


class Agenda:
    """Places each instance by its oldest message, or by the time at which it may become free.

    Placement is a hint and may be out of date when the clock moves; ``candidates`` looks again.
    """

    def __init__(self) -> None:
        self._ready: _Keys = SortedKeys()
        """(visible_at, message id, instance id) of those that nothing but visibility holds."""
        self._later: SortedKeys[tuple[int, str]] = SortedKeys()
        """(time, instance id) of those that a lock, a not_before or a delayed start holds."""
        self._kept: dict[str, _Keys] = {}
        """By owner: late arrivals at locks that it keeps."""
        self._instances: dict[str, Instance] = {}
        self._places: dict[str, tuple[_Keys | None, tuple[int, int, str] | None, int | None]] = {}

    def place(self, instance: Instance, now_ms: int) -> bool:
        """To be called after every change of the instance's messages, lock or holds.

        Tells whether there is, or will be, something to hand out.
        """
        self.remove(instance)
        opens_at_ms = instance.opens_at_ms
        if not instance.messages or instance.suspended or opens_at_ms is None:
            return False
        keys: _Keys | None = None
        key: tuple[int, int, str] | None = None
        later_ms: int | None = None
        lock = instance.lock
        free_at_ms = max(
            opens_at_ms, instance.not_before_ms or 0, lock.locked_until_ms if lock else 0
        )
        if is_visible(free_at_ms, now_ms):
            oldest = instance.oldest_key
            if oldest is None:
                return False  # only mail that it does not want
            keys, key = self._ready, (*oldest, instance.instance_id)
        else:
            later_ms = free_at_ms
            arrival = instance.free_key
            if lock is not None and lock.kept and lock.owner is not None and arrival is not None:
                keys = self._kept.setdefault(lock.owner, SortedKeys())
                key = (*arrival, instance.instance_id)
        if keys is not None and key is not None:
            keys.add(key)
        if later_ms is not None:
            self._later.add((later_ms, instance.instance_id))
        self._instances[instance.instance_id] = instance
        self._places[instance.instance_id] = (keys, key, later_ms)
        return True

    def remove(self, instance: Instance) -> None:
        if self._instances.pop(instance.instance_id, None) is None:
            return
        keys, key, later_ms = self._places.pop(instance.instance_id)
        if keys is not None and key is not None:
            keys.remove(key)
        if later_ms is not None:
            self._later.remove((later_ms, instance.instance_id))

    def candidates(self, owner: str | None, now_ms: int) -> Iterator[Instance]:
        """Instances with a message to hand out, oldest message first."""
        self._promote(now_ms)
        kept = self._kept.get(owner) if owner is not None else None
        visible = [
            takewhile(lambda key: is_visible(key[0], now_ms), keys)
            for keys in (self._ready, kept)
            if keys is not None
        ]
        for _, _, instance_id in heapq.merge(*visible):
            instance = self._instances[instance_id]
            if self._is_open(instance, owner, now_ms):
                yield instance

    def next_due_ms(self, owner: str | None, now_ms: int) -> int | None:
        """Return the time at which another instance may become a candidate."""
        later = (now_ms + 1,)
        dues = [self._ready.first_from(later), self._later.first_from(later)]
        if owner is not None and owner in self._kept:
            dues.append(self._kept[owner].first_from(later))
        return min((due[0] for due in dues if due is not None), default=None)

    def _promote(self, now_ms: int) -> None:
        while (first := self._later.first()) is not None and is_visible(first[0], now_ms):
            self.place(self._instances[first[1]], now_ms)

    @staticmethod
    def _is_open(instance: Instance, owner: str | None, now_ms: int) -> bool:
        lock = instance.lock
        if instance.locked(now_ms):
            return lock is not None and lock.kept and owner is not None and lock.owner == owner
        opens_at_ms = instance.opens_at_ms
        return (
            opens_at_ms is not None
            and is_visible(opens_at_ms, now_ms)
            and is_visible(instance.not_before_ms or 0, now_ms)
        )
