"""The steps of an execution: which are open, and which completions are still acceptable."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from operator import itemgetter
from typing import Any, Final

import msgspec

from perdure.errors import Nondeterminism
from perdure.model import work


class Family(IntEnum):
    """What a step is; a completion must be of the family of its step."""

    ACTIVITY = 1
    TIMER = 2
    EVENT = 3
    MESSAGE = 4
    CHILD = 5


# Looked up often: an attribute of an enumeration costs more than a name of the module.
ACTIVITY: Final = Family.ACTIVITY
TIMER: Final = Family.TIMER
EVENT: Final = Family.EVENT
MESSAGE: Final = Family.MESSAGE
CHILD: Final = Family.CHILD

_COMPLETED = 0x80
_ROOM = 64


class Operation(msgspec.Struct, gc=False):
    """One open step: the event that opened it and what is waiting for it.

    The collector does not see these: closing an execution lets go of them.
    """

    family: Family
    event: Any
    target: Any
    """The step or the timer."""
    definition: Any
    """The activity, the child, or the type that arriving data must fit."""


class Operations:
    """Every step by the id of the event that opened it."""

    def __init__(self) -> None:
        self.open: dict[int, Operation] = {}
        """What is neither completed nor given up; whoever closes a step takes it out."""
        # One byte a history event: what its completion must be, and whether it came.
        self._families = bytearray()

    def add(self, operation: Operation) -> None:
        event_id: int = operation.event.event_id
        self.open[event_id] = operation
        if event_id > 0:  # a step that history does not have is numbered below zero
            families = self._families
            if event_id >= len(families):
                families.extend(bytes(event_id - len(families) + _ROOM))
            families[event_id] = operation.family

    def accept(self, source_event_id: int, family: Family, completion: object) -> bool:
        """Note that the completion came; False if one came before. Wrong ones are an error."""
        families = self._families
        known = families[source_event_id] if 0 < source_event_id < len(families) else 0
        if known == family:
            families[source_event_id] = known | _COMPLETED
            return True
        if known == family | _COMPLETED:
            return False
        found = Family(known & ~_COMPLETED).name.lower() if known else "no step"
        raise Nondeterminism(
            f"{type(completion).__name__} completes event {source_event_id} as "
            f"{family.name.lower()}, but history has {found} there"
        )


class Lane:
    """Arrivals and waits of one name, each in order; at most one of the two is not empty."""

    __slots__ = ("_arrived", "_waiting")

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, msgspec.Raw]] = deque()
        self._waiting: deque[Operation] = deque()

    def arrive(self, place: int, data: msgspec.Raw) -> Operation | None:
        """The wait that gets it, or None: then it is kept for the next wait."""
        while self._waiting:
            operation = self._waiting.popleft()
            if not operation.target.done():
                return operation
        self._arrived.append((place, data))
        return None

    def wait(self, operation: Operation) -> tuple[int, msgspec.Raw] | None:
        """What is there already, or None: then the wait has its place in the line."""
        if self._arrived:
            return self._arrived.popleft()
        waiting = self._waiting
        waiting.append(operation)
        # In the order of history, even where branches interleave differently on replay.
        index = len(waiting) - 1
        while index > 0 and waiting[index - 1].event.event_id > operation.event.event_id > 0:
            index -= 1
        if index < len(waiting) - 1:
            waiting.pop()
            waiting.insert(index, operation)
        return None

    def put_back(self, place: int, data: msgspec.Raw) -> Operation | None:
        """As ``arrive``, for what came before what is kept."""
        operation = self.arrive(place, data)
        if operation is None:
            self._arrived = deque(sorted(self._arrived, key=itemgetter(0)))
        return operation

    def unread(self) -> list[tuple[int, msgspec.Raw]]:
        return list(self._arrived)


class Lanes:
    """All names: external events and mailboxes are apart."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[bool, str], Lane] = {}
        self.arrivals = 0
        """How many came so far: the place of the last one."""
        # Place, data and wait of what a wait got.
        self._untaken: list[tuple[int, msgspec.Raw, Operation]] = []
        self._untaken_pruned = 0

    def arrive(self, name: str, data: msgspec.Raw, *, mailbox: bool) -> Operation | None:
        self.arrivals += 1
        return self._lane(name, mailbox).arrive(self.arrivals, data)

    def wait(self, operation: Operation) -> tuple[int, msgspec.Raw] | None:
        return self._lane(operation.event.name, operation.family is MESSAGE).wait(operation)

    def note_untaken(self, place: int, data: msgspec.Raw, operation: Operation) -> None:
        """Remember what came until the code takes it from its wait."""
        operation.target.is_unread = True
        self._untaken.append((place, data, operation))
        if len(self._untaken) > 2 * self._untaken_pruned + 16:
            self._untaken = [entry for entry in self._untaken if entry[2].target.is_unread]
            self._untaken_pruned = len(self._untaken)

    def put_back(self, target: object) -> tuple[int, msgspec.Raw, Operation | None]:
        """What that wait got, and the wait that gets it now, if there is one."""
        index = next(n for n, (*_, wait) in enumerate(self._untaken) if wait.target is target)
        place, data, operation = self._untaken.pop(index)
        lane = self._lane(operation.event.name, operation.family is MESSAGE)
        return place, data, lane.put_back(place, data)

    def unread(self) -> tuple[work.CarriedMessage, ...]:
        """Everything that nobody took, in the order of arrival."""
        found = [
            (place, work.CarriedMessage(name=name, data=data, mailbox=mailbox))
            for (mailbox, name), lane in self._lanes.items()
            for place, data in lane.unread()
        ]
        for place, data, operation in self._untaken:
            if operation.target.is_unread:
                name, mailbox = operation.event.name, operation.family is MESSAGE
                found.append((place, work.CarriedMessage(name=name, data=data, mailbox=mailbox)))
        return tuple(message for _, message in sorted(found, key=lambda entry: entry[0]))

    def _lane(self, name: str, mailbox: bool) -> Lane:
        lane = self._lanes.get((mailbox, name))
        if lane is None:
            lane = self._lanes[mailbox, name] = Lane()
        return lane
