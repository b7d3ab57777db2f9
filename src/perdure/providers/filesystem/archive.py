"""Histories of executions that ended long ago: compressed and moved aside, still read like others.

A history is first copied, then the file of its execution says so, then the original is removed;
each step is durable before the next, so that the file which counts is always there.
"""

from __future__ import annotations

import heapq
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from perdure.providers.filesystem.file_batch import FileBatch
from perdure.providers.filesystem.file_steps import CompressHistory, MarkArchived, RemovePaths
from perdure.providers.filesystem.layout import history_file

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from perdure.providers.filesystem.file_steps import Step
    from perdure.providers.filesystem.history import History
    from perdure.providers.filesystem.iothread import IoThread
    from perdure.providers.filesystem.root import Root
    from perdure.providers.filesystem.state import State

_AT_ONCE: Final = 256

_Key: TypeAlias = tuple[str, int]


class Archivist:
    """Knows which executions have ended, oldest first."""

    def __init__(
        self, root: Root, state: State, thread: IoThread, after_ms: int, *, after_crash: bool
    ) -> None:
        self._root = root
        self._state = state
        self._thread = thread
        self._after_ms = after_ms
        self._ended: list[tuple[int, _Key]] = []
        self._originals: list[_Key] = []
        """Archived, but perhaps not removed."""
        if after_crash:
            histories = state.tables.histories.items()
            self._originals = [key for key, history in histories if history.log.is_archived]
        self.note(state.tables.executions.rows)

    def note(self, keys: Iterable[_Key]) -> None:
        """Look at executions that have changed."""
        for key in keys:
            row = self._state.tables.executions.get(key)
            if row is not None and row.completed_at_ms is not None:
                heapq.heappush(self._ended, (row.completed_at_ms, key))

    async def run(self, now_ms: int, settled: Callable[[], Awaitable[bool]]) -> int:
        """Archive what is old enough; returns how many. Nobody else may write files meanwhile."""
        archived = 0
        await self._remove_originals()
        while histories := self._take_due(now_ms):
            await self._write([CompressHistory(*entry) for entry in histories.items()])
            while True:
                marks = self._marks(histories)
                if await settled():
                    break
            await self._write(marks)
            moved = [key for key, history in histories.items() if history.log.is_archived]
            self._originals += moved
            await self._remove_originals()
            archived += len(moved)
        return archived

    async def _remove_originals(self) -> None:
        while self._originals:
            keys = self._originals[:_AT_ONCE]
            await self._write([RemovePaths((history_file(*key),)) for key in keys])
            del self._originals[: len(keys)]

    def _take_due(self, now_ms: int) -> dict[_Key, History]:
        due: dict[_Key, History] = {}
        while self._ended and len(due) < _AT_ONCE:
            if self._ended[0][0] > now_ms - self._after_ms:
                break
            completed_at_ms, key = heapq.heappop(self._ended)
            row = self._state.tables.executions.get(key)
            history = self._state.tables.histories.get(key)
            is_as_noted = row is not None and row.completed_at_ms == completed_at_ms
            if is_as_noted and history is not None and _is_in_its_file(history):
                due[key] = history
        return due

    def _marks(self, histories: dict[_Key, History]) -> list[Step]:
        """For those that are still what was compressed."""
        marks: list[Step] = []
        for key, compressed in histories.items():
            row = self._state.tables.executions.get(key)
            history = self._state.tables.histories.get(key)
            if history is not None and history.continues(compressed) and _is_in_its_file(history):
                marks.append(MarkArchived(key, row, history))
        return marks

    async def _write(self, steps: Sequence[Step]) -> None:
        batch = FileBatch(self._root, files=len(steps))
        try:
            await self._thread.run(partial(batch.take, steps))
            await self._thread.run(batch.finish)
        except BaseException:
            await self._thread.run(batch.give_up)
            raise
        finally:
            for step in batch.placed:
                step.done()


def _is_in_its_file(history: History) -> bool:
    return not history.log.is_archived and not history.pending() and history.log.written > 0
