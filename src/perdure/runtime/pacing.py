"""When turns run: in slices of the event loop's time, and what has begun before what is new.

A program may start 20,000 instances at once. If all their first turns ran before any second one,
everybody else on the event loop would wait for seconds, and memory would hold all of them half
done. So a slice ends after a few milliseconds, and new instances begin as fast as the store takes
them; until then a start that waits is a start that has not been answered.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

SLICE_SECONDS: Final = 0.005
BEGINNING_MAX: Final = 128
"""First turns whose commits are under way: enough for one group commit to be worth it."""


class Pacer(Generic[T]):
    """The turns of one runtime that are due; ``begin`` runs the first turn of a new instance."""

    def __init__(self, begin: Callable[[T], None]) -> None:
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._due: deque[Callable[[], None]] = deque()
        self._new: deque[T] = deque()
        self._beginning = 0
        self._is_scheduled = False

    def __bool__(self) -> bool:
        """Whether anything waits here."""
        return bool(self._due or self._new)

    def run(self, turn: Callable[[], None]) -> None:
        """Run it soon."""
        self._due.append(turn)
        if not self._is_scheduled:
            self._schedule()

    def begin(self, new: T) -> None:
        """Begin a new instance when its time has come; then expect ``begun``."""
        self._new.append(new)
        if not self._is_scheduled and self._may_begin():
            self._schedule()

    def begun(self) -> None:
        """The commit of a first turn is durable, or will never be."""
        self._beginning -= 1
        if not self._is_scheduled and self._may_begin():
            self._schedule()

    def clear(self) -> list[T]:
        """Run nothing of what is due; gives what had not begun."""
        new = list(self._new)
        self._due.clear()
        self._new.clear()
        return new

    def _may_begin(self) -> bool:
        return bool(self._new) and self._beginning < BEGINNING_MAX

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        until = perf_counter() + SLICE_SECONDS
        due = self._due
        # One look by the garbage collector after the slice instead of one for every few turns: what
        # dies in between is never walked over, and whole heaps are looked through half as often.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            if self._may_begin():
                self._begin_one()  # however busy the others keep this loop
            while perf_counter() < until:
                if due:
                    due.popleft()()
                elif self._may_begin():
                    self._begin_one()
                else:
                    break
        finally:
            if was_collecting:
                gc.enable()
            self._is_scheduled = False
            if due or self._may_begin():
                self._schedule()

    def _begin_one(self) -> None:
        self._beginning += 1
        self._begin(self._new.popleft())
