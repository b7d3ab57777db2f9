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
    """The kind of a step; a completion must be of the family of its step."""

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
_GROWTH_BYTES = 64


class Operation(msgspec.Struct, gc=False):
    """One open step: the event that opened it and the future or timer that waits for it.

    The garbage collector does not track these: closing an execution releases them.
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
        """Steps that are neither completed nor given up. The code that closes a step removes it."""
        # One byte for each history event: the family of the step, and a bit for its completion.
        self._families = bytearray()

    def add(self, operation: Operation) -> None:
        event_id: int = operation.event.event_id
        self.open[event_id] = operation
        if event_id > 0:  # a step that history does not have is numbered below zero
            families = self._families
            if event_id >= len(families):
                families.extend(bytes(event_id - len(families) + _GROWTH_BYTES))
            families[event_id] = operation.family

    def accept(self, source_event_id: int, family: Family, completion: object) -> bool:
        """Note the completion of a step; return False if the step was completed before.

        Raise Nondeterminism if no step of that family has this event id.
        """
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
            f"{family.name.lower()}, but history has {found} there",
            event_id=source_event_id,
        )


class Mailbox:
    """Arrivals and waits of one name, each in order; at most one of the two is not empty."""

    __slots__ = ("_arrived", "_waiting")

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, msgspec.Raw]] = deque()
        self._waiting: deque[Operation] = deque()

    def arrive(self, number: int, data: msgspec.Raw) -> Operation | None:
        """Return the wait that receives the data; None if it is kept for the next wait."""
        while self._waiting:
            operation = self._waiting.popleft()
            if not operation.target.done():
                return operation
        self._arrived.append((number, data))
        return None

    def wait(self, operation: Operation) -> tuple[int, msgspec.Raw] | None:
        """Return the oldest kept arrival; without one, queue the wait and return None."""
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

    def put_back(self, number: int, data: msgspec.Raw) -> Operation | None:
        """Like ``arrive``, for data that arrived before the data that is kept."""
        operation = self.arrive(number, data)
        if operation is None:
            self._arrived = deque(sorted(self._arrived, key=itemgetter(0)))
        return operation

    def unread(self) -> list[tuple[int, msgspec.Raw]]:
        return list(self._arrived)


class Mailboxes:
    """The mailboxes of all names. External events and messages have separate ones."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[bool, str], Mailbox] = {}
        self.arrivals = 0
        """Number of arrivals so far, which is the number of the last one."""
        # Number, data and wait of each arrival that was delivered to a wait.
        self._delivered: list[tuple[int, msgspec.Raw, Operation]] = []
        self._delivered_pruned = 0

    def arrive(self, name: str, data: msgspec.Raw, *, is_message: bool) -> Operation | None:
        self.arrivals += 1
        return self._find(name, is_message).arrive(self.arrivals, data)

    def wait(self, operation: Operation) -> tuple[int, msgspec.Raw] | None:
        return self._find(operation.event.name, operation.family is MESSAGE).wait(operation)

    def note_unread(self, number: int, data: msgspec.Raw, operation: Operation) -> None:
        """Remember a delivered arrival until the code reads it from its wait."""
        operation.target.is_unread = True
        self._delivered.append((number, data, operation))
        if len(self._delivered) > 2 * self._delivered_pruned + 16:
            self._delivered = [entry for entry in self._delivered if entry[2].target.is_unread]
            self._delivered_pruned = len(self._delivered)

    def put_back(self, target: object) -> tuple[int, msgspec.Raw, Operation | None]:
        """Return number and data of what that wait received, and the wait that gets it now."""
        index = next(n for n, (*_, wait) in enumerate(self._delivered) if wait.target is target)
        number, data, operation = self._delivered.pop(index)
        mailbox = self._find(operation.event.name, operation.family is MESSAGE)
        return number, data, mailbox.put_back(number, data)

    def unread(self) -> tuple[work.CarriedMessage, ...]:
        """Return everything that the code did not read, in the order of arrival."""
        found = [
            (number, work.CarriedMessage(name=name, data=data, mailbox=is_message))
            for (is_message, name), mailbox in self._by_name.items()
            for number, data in mailbox.unread()
        ]
        for number, data, operation in self._delivered:
            if operation.target.is_unread:
                name, is_message = operation.event.name, operation.family is MESSAGE
                found.append(
                    (number, work.CarriedMessage(name=name, data=data, mailbox=is_message))
                )
        return tuple(message for _, message in sorted(found, key=itemgetter(0)))

    def _find(self, name: str, is_message: bool) -> Mailbox:
        mailbox = self._by_name.get((is_message, name))
        if mailbox is None:
            mailbox = self._by_name[is_message, name] = Mailbox()
        return mailbox
