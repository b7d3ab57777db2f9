"""The history of one execution: which event ids it has, and the events that no file holds yet.

Events that were written to their file are forgotten here and read from there. Versions of one
history share their log, so that appending costs what is new and undoing costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.providers.records import HistoryRecord

IdRanges: TypeAlias = tuple[tuple[int, int], ...]
"""Ascending, disjoint, both ends included: one range for an ordinary history."""


class HistoryLog:
    """Where the events of a history are: the first ones in the file, the rest here."""

    __slots__ = ("file_bytes", "is_archived", "pending", "written")

    def __init__(self, *, file_bytes: int = 0, written: int = 0, is_archived: bool = False) -> None:
        self.file_bytes = file_bytes
        """Length of the valid part of the file; anything beyond it is left from a crash."""
        self.written = written
        self.is_archived = is_archived
        self.pending: list[HistoryRecord] = []

    def note_written(self, events: int, file_bytes: int) -> None:
        """The first pending events are now in the file."""
        del self.pending[:events]
        self.written += events
        self.file_bytes = file_bytes


class History:
    """One version of a history. Never changes, except that events move from memory to the file."""

    __slots__ = ("count", "ids", "log")

    def __init__(self, log: HistoryLog | None = None, count: int = 0, ids: IdRanges = ()) -> None:
        self.log = log if log is not None else HistoryLog()
        self.count = count
        self.ids = ids

    def __contains__(self, event_id: int) -> bool:
        return any(first <= event_id <= last for first, last in reversed(self.ids))

    def pending(self) -> list[HistoryRecord]:
        """Events of this version that the file does not hold, in the order of their commits."""
        return self.log.pending[: self.count - self.log.written]

    def first_duplicate(self, records: Iterable[HistoryRecord]) -> int | None:
        last = self.ids[-1][1] if self.ids else 0
        seen: set[int] = set()
        for record in records:
            event_id = record.event_id
            if event_id in seen or (event_id <= last and event_id in self):
                return event_id
            seen.add(event_id)
        return None

    def extended(self, records: Sequence[HistoryRecord]) -> History:
        """The next version. Versions that were made from this one before are void."""
        pending = self.log.pending
        del pending[self.count - self.log.written :]
        pending.extend(records)
        ids = self.ids
        for record in records:
            ids = _with_id(ids, record.event_id)
        return History(self.log, self.count + len(records), ids)

    def continues(self, other: History) -> bool:
        return self.log is other.log


def _with_id(ids: IdRanges, event_id: int) -> IdRanges:
    if not ids or event_id > ids[-1][1] + 1:
        return (*ids, (event_id, event_id))
    if event_id == ids[-1][1] + 1:
        return (*ids[:-1], (ids[-1][0], event_id))
    merged: list[tuple[int, int]] = []
    for first, last in sorted([*ids, (event_id, event_id)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)
