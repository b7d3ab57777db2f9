"""Bringing the readable files up to date with the journal, and then shortening the journal.

A checkpoint may be interrupted anywhere: the journal is kept until every file of it is durable, and
replaying it over files that are already newer changes nothing.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from perdure.model.wire import FORMAT_VERSION
from perdure.providers.filesystem import layout
from perdure.providers.filesystem.capture import (
    instance_document,
    letter_document,
    message_document,
    work_document,
)
from perdure.providers.filesystem.dirty import Dirty, take_dirty
from perdure.providers.filesystem.documents import (
    SessionsDocument,
    StoreDocument,
    WorkersDocument,
    seal,
)
from perdure.providers.filesystem.file_batch import FileBatch
from perdure.providers.filesystem.file_steps import (
    RemovePaths,
    RemoveQueueEntry,
    WriteDocument,
    WriteExecution,
    WriteQueueEntry,
)
from perdure.providers.filesystem.readable import time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.filesystem.archive import Archivist
    from perdure.providers.filesystem.commits import Committer
    from perdure.providers.filesystem.file_steps import Step
    from perdure.providers.filesystem.iothread import IoThread
    from perdure.providers.filesystem.journal import Journal
    from perdure.providers.filesystem.root import Root
    from perdure.providers.filesystem.state import State

    _Pick = Callable[[], Step | None]

LAYOUT_VERSION: Final = 1
_CHUNK: Final = 256
"""Files that are captured at once: bounds how long the event loop is held up."""


class Checkpointer:
    """Writes files on a thread of its own; the event loop only picks out what to write."""

    def __init__(
        self,
        root: Root,
        state: State,
        journal: Journal,
        committer: Committer,
        thread: IoThread,
        *,
        created_at_ms: int,
        files: dict[tuple[str, int], str],
        archivist: Archivist | None,
    ) -> None:
        self._root = root
        self._state = state
        self._journal = journal
        self._committer = committer
        self._thread = thread
        self._created_at_ms = created_at_ms
        self._files = files
        """Paths of the queue entries that are on the disk, by queue and id."""
        self._archivist = archivist
        self._left_over = Dirty()
        """From a checkpoint that failed."""
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Write every file that is out of date, then drop the journal that they came from."""
        async with self._lock:
            dirty = take_dirty(self._state.tables)
            dirty.add(self._left_over)
            self._left_over = Dirty()
            try:
                if dirty:
                    await self._write(dirty)
            except BaseException:
                self._left_over.add(dirty)
                raise
            if self._archivist is not None:
                self._archivist.note(dirty.executions)

    async def archive(self, now_ms: int) -> int:
        """Move aside what the policy names; returns how many histories."""
        if self._archivist is None:
            return 0
        async with self._lock:
            return await self._archivist.run(now_ms, self._committer.settled)

    async def _write(self, dirty: Dirty) -> None:
        first_sequence = await self._committer.rotate()
        written_bytes = self._committer.journal_bytes
        picks = self._picks(dirty)
        batch = FileBatch(self._root, files=len(picks))
        try:
            for start in range(0, len(picks), _CHUNK):
                steps = await self._pick(picks[start : start + _CHUNK])
                await self._thread.run(partial(batch.take, steps))
            await self._thread.run(batch.finish)
        except BaseException:
            await self._thread.run(batch.give_up)
            raise
        finally:
            for step in batch.placed:
                step.done()
        document = self._store_document(first_sequence - 1)
        await self._thread.run(partial(self._shorten_journal, document, first_sequence))
        self._committer.journal_bytes -= written_bytes

    def _shorten_journal(self, document: StoreDocument, first_sequence: int) -> None:
        self._root.replace(layout.STORE_FILE, seal(document))
        self._journal.drop_segments(first_sequence)

    def _store_document(self, checkpoint: int) -> StoreDocument:
        tables = self._state.tables
        moved = tables.moved.get("")
        return StoreDocument(
            format_version=FORMAT_VERSION,
            layout_version=LAYOUT_VERSION,
            created_at=time_text(self._created_at_ms),
            moved_to=moved.location if moved is not None else None,
            checkpoint=checkpoint,
            last_message_id=tables.last_message_id,
            last_letter_id=tables.last_letter_id,
        )

    # --- choosing what to write

    def _picks(self, dirty: Dirty) -> list[_Pick]:
        """Executions before instances, which name them."""
        picks: list[_Pick] = [
            *(partial(self._pick_execution, key) for key in sorted(dirty.executions)),
            *(partial(self._pick_instance, key) for key in sorted(dirty.instances)),
            *(partial(self._pick_message, key) for key in sorted(dirty.messages)),
            *(partial(self._pick_work, key) for key in sorted(dirty.work)),
            *(partial(self._pick_letter, key) for key in sorted(dirty.letters)),
        ]
        if dirty.sessions:
            picks.append(self._pick_sessions)
        if dirty.workers:
            picks.append(self._pick_workers)
        return picks

    async def _pick(self, picks: list[_Pick]) -> list[Step]:
        while True:
            steps = [step for pick in picks if (step := pick()) is not None]
            # What was picked may not be durable yet: files must never be ahead of the journal.
            if await self._committer.settled():
                return steps

    def _pick_instance(self, instance_id: str) -> Step | None:
        if self._state.quarantine.bars(instance_id):
            return None
        document = instance_document(self._state, instance_id)
        directory = layout.instance_directory(instance_id)
        if document is None:
            return RemovePaths((directory, layout.archive_directory(instance_id)))
        return WriteDocument(f"{directory}/{layout.INSTANCE_FILE}", lambda: document, directory)

    def _pick_execution(self, key: tuple[str, int]) -> Step | None:
        if self._state.quarantine.bars(key[0]):
            return None
        row = self._state.tables.executions.get(key)
        history = self._state.tables.histories.get(key)
        if row is None and history is None:
            return RemovePaths((layout.execution_directory(*key), layout.archived_history(*key)))
        return WriteExecution(key, row, history)

    def _pick_message(self, message_id: int) -> Step | None:
        row = self._state.tables.messages.get(message_id)
        if row is None:
            return self._removal(layout.ORCHESTRATOR_QUEUE, message_id)
        tag = self._state.tables.tags.get(message_id)
        path = layout.message_file(message_id, row.message.instance_id, row.message.kind)
        build = partial(message_document, row, tag)
        return WriteQueueEntry(self._files, (layout.ORCHESTRATOR_QUEUE, message_id), path, build)

    def _pick_work(self, message_id: int) -> Step | None:
        row = self._state.tables.work.get(message_id)
        if row is None:
            return self._removal(layout.WORKER_QUEUE, message_id)
        claim = self._state.tables.claims.rows[message_id]
        path = layout.work_file(message_id, row.message.identity.instance_id, row.message.name)
        build = partial(work_document, row, claim)
        return WriteQueueEntry(self._files, (layout.WORKER_QUEUE, message_id), path, build)

    def _pick_letter(self, letter_id: int) -> Step | None:
        row = self._state.tables.letters.get(letter_id)
        if row is None:
            return self._removal(layout.DEAD_LETTERS, letter_id)
        path = layout.letter_file(letter_id, row.message.instance_id, row.message.kind)
        build = partial(letter_document, row)
        return WriteQueueEntry(self._files, (layout.DEAD_LETTERS, letter_id), path, build)

    def _pick_sessions(self) -> Step:
        rows = sorted(self._state.tables.sessions.rows.items())
        document = SessionsDocument(sessions=tuple(row for _, row in rows))
        return WriteDocument(layout.SESSIONS_FILE, lambda: document)

    def _pick_workers(self) -> Step:
        rows = sorted(self._state.tables.workers.rows.items())
        document = WorkersDocument(workers=tuple(row for _, row in rows))
        return WriteDocument(layout.WORKERS_FILE, lambda: document)

    def _removal(self, queue: str, entry_id: int) -> Step | None:
        """None for an entry that came and went between two checkpoints: it has no file."""
        key = (queue, entry_id)
        path = self._files.get(key)
        return RemoveQueueEntry(self._files, key, path) if path is not None else None
