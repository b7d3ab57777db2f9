"""An opened store: its state, and how changes reach the disk before anybody hears of them."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from perdure.clock import SystemClock
from perdure.errors import CorruptData, PerdureError, StoreClosed, StoreRefused
from perdure.providers import rules
from perdure.providers.filesystem.archive import Archivist
from perdure.providers.filesystem.checkpoints import Checkpointer
from perdure.providers.filesystem.commits import Committer, refusal
from perdure.providers.filesystem.history_files import HistoryExcerpt
from perdure.providers.filesystem.iothread import IoThread
from perdure.providers.filesystem.journal import Journal
from perdure.providers.filesystem.loading import load
from perdure.providers.filesystem.root import Root, SyncFailed
from perdure.providers.filesystem.state import State
from perdure.providers.filesystem.tables import Transaction
from perdure.providers.filesystem.upkeep import Upkeep
from perdure.providers.records import DAMAGED
from perdure.providers.waiting import ChangeHub, Signal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from perdure.clock import Clock
    from perdure.providers.filesystem.fileops import FileOps
    from perdure.providers.records import HistoryRecord

_Answer = TypeVar("_Answer")

_LOCK_ATTEMPTS = 10
_LOCK_WAIT_SECONDS = 0.03
"""A program that is just being started may hold a copy of the lock until it runs; not for long."""


async def open_store(
    path: str,
    ops: FileOps,
    clock: Clock,
    *,
    orphan_grace_ms: int,
    archive_after_ms: int | None,
    allow_moved: bool,
) -> OpenStore:
    """Lock the directory, recover what it holds, and start the threads."""
    root = Root(path, ops)
    files = IoThread("perdure files")
    try:
        root.open()
        await _lock_root(root, clock)
        state = State(orphan_grace_ms)
        loaded = await files.run(partial(load, root, state, clock.now_ms()))
        mark = state.tables.moved.get("")
        if mark is not None and not allow_moved:
            raise rules.store_moved(path, mark.location)
        journal = Journal(root)
        await files.run(partial(journal.start_segment, loaded.last_sequence + 1))
    except OSError as error:
        _abandon(files, root)
        raise refusal("open", error) from error
    except SyncFailed as error:
        _abandon(files, root)
        raise StoreRefused("open", f"{path}: {error}; check the disk") from error
    except BaseException:
        _abandon(files, root)
        raise
    return OpenStore(
        root,
        state,
        clock,
        journal,
        files,
        last_sequence=loaded.last_sequence,
        created_at_ms=loaded.created_at_ms,
        queue_files=loaded.files,
        archive_after_ms=archive_after_ms,
        after_crash=loaded.after_crash,
    )


def _abandon(files: IoThread, root: Root) -> None:
    files.close()
    root.close()


async def _lock_root(root: Root, clock: Clock) -> None:
    for _ in range(_LOCK_ATTEMPTS):
        if root.try_lock(clock.now_ms()):
            return
        await SystemClock().sleep(_LOCK_WAIT_SECONDS)
    holder = root.holder()
    who = (
        f"process {holder.pid} on host {holder.host!r} since {holder.since}"
        if holder is not None
        else "another process"
    )
    raise StoreRefused(
        "open",
        f"{root.path} is in use by {who}; a directory serves one process at a time: stop that "
        "one, or use SQLite for several",
    )


class OpenStore:
    """Lives from opening to closing, on one event loop."""

    def __init__(
        self,
        root: Root,
        state: State,
        clock: Clock,
        journal: Journal,
        files: IoThread,
        *,
        last_sequence: int,
        created_at_ms: int,
        queue_files: dict[tuple[str, int], str],
        archive_after_ms: int | None,
        after_crash: bool,
    ) -> None:
        self.root = root
        self.state = state
        self.clock = clock
        self.turn_signal = Signal(clock)
        self.work_signal = Signal(clock)
        self.changes = ChangeHub(clock)
        self.is_open = True
        self._process_id = os.getpid()
        self._journal = journal
        self._files = files
        self._reads = IoThread("perdure reads")
        self._commit_thread = IoThread("perdure journal")
        self._committer = Committer(
            journal,
            self._commit_thread,
            last_sequence,
            on_durable=self._on_durable,
            on_undone=self._on_undone,
        )
        self._checkpointer = Checkpointer(
            root,
            state,
            journal,
            self._committer,
            files,
            created_at_ms=created_at_ms,
            files=queue_files,
            archivist=(
                Archivist(root, state, files, archive_after_ms, after_crash=after_crash)
                if archive_after_ms is not None
                else None
            ),
        )
        self.upkeep = Upkeep(root.path, self._committer, self._maintain)
        self.upkeep.note_commit()  # what was recovered is not in the files yet

    # --- verbs

    async def change(
        self,
        verb: str,
        body: Callable[[Transaction], _Answer],
        *,
        may_find_nothing: bool = False,
        give_back: Callable[[_Answer, Transaction], None] | None = None,
    ) -> _Answer:
        """Run the body as one transaction; its answer is given when it is durable.

        An answer or a refusal that rests on changes which turn out to fail is worked out again.
        With ``may_find_nothing`` an empty transaction promises nothing and need not wait.
        ``give_back`` undoes what was done for a caller that is cancelled while it waits.
        """
        await self.upkeep.room(verb)
        while True:
            self.require_open(verb)
            tx = Transaction(self.state.tables, verb, self.clock.now_ms())
            try:
                answer = body(tx)
            except PerdureError:
                self._undo(tx)
                if await self._committer.settled():
                    raise
                continue
            except BaseException:
                self._undo(tx)
                raise
            touched = self._settle(tx.now_ms)
            if not tx.is_empty:
                try:
                    await self._committer.submit(tx, touched)
                except asyncio.CancelledError:
                    if give_back is not None and self.is_open:
                        self._do_unheard(verb, partial(give_back, answer))
                    raise
                return answer
            if may_find_nothing or await self._committer.settled():
                return answer

    def _do_unheard(self, verb: str, body: Callable[[Transaction], None]) -> None:
        """A change that nobody waits for."""
        tx = Transaction(self.state.tables, verb, self.clock.now_ms())
        body(tx)
        touched = self._settle(tx.now_ms)
        if not tx.is_empty and self._committer.cause_of_death is None:
            self._committer.submit(tx, touched)

    async def look(self, verb: str, body: Callable[[], _Answer]) -> _Answer:
        """Read; the answer is given when everything that it shows is durable."""
        while True:
            self.require_open(verb)
            answer = body()
            if await self._committer.settled():
                return answer

    def excerpt(self, instance_id: str, execution_id: int) -> HistoryExcerpt | None:
        history = self.state.tables.histories.get((instance_id, execution_id))
        if history is None:
            return None
        return HistoryExcerpt.of(instance_id, execution_id, history)

    async def read_history(self, excerpt: HistoryExcerpt | None) -> list[HistoryRecord]:
        """All events of the excerpt in the order of their ids. Raises CorruptData."""
        while excerpt is not None:
            if not excerpt.written:
                return excerpt.read(self.root)
            try:
                return await self._reads.run(partial(excerpt.read, self.root))
            except CorruptData:
                self.require_open("read")
                current = self.excerpt(excerpt.instance_id, excerpt.execution_id)
                if current is not None and current.is_at_the_place_of(excerpt):
                    raise
                excerpt = current  # it was archived, or deleted, in the meantime
        return []

    # --- life

    def require_open(self, operation: str) -> None:
        if os.getpid() != self._process_id:
            raise StoreClosed(
                operation,
                f"{self.root.path} was opened by process {self._process_id}, before the fork; open "
                "the store after forking",
            )
        if not self.is_open:
            raise StoreClosed(operation, f"{self.root.path} was closed")
        reason = self._committer.cause_of_death
        if reason is not None:
            raise StoreClosed(operation, reason)

    async def _maintain(self) -> None:
        await self._checkpointer.run()
        await self._checkpointer.archive(self.clock.now_ms())

    async def checkpoint(self) -> None:
        """Bring the readable files up to date now, and move old histories to the archive."""
        self.require_open("checkpoint")
        try:
            await self._maintain()
        except OSError as error:
            raise refusal("checkpoint", error) from error
        except SyncFailed as error:
            self._committer.die(str(error))
            raise StoreClosed("checkpoint", str(error)) from error

    async def size_bytes(self) -> int:
        """Of all files."""
        return await self._reads.run(partial(self.root.size_bytes, "."))

    def details(self) -> dict[str, str]:
        """For people."""
        details = {
            "durability": "full: every commit is synced before it is answered",
            "journal_sequence": str(self._committer.sequence),
            "journal_bytes": str(self._committer.journal_bytes),
        }
        if self.upkeep.last_error is not None:
            details["checkpoint_error"] = str(self.upkeep.last_error)
        for path, reason in sorted(self.state.quarantine.reasons.items()):
            details[f"{DAMAGED}{path}"] = reason
        return details

    async def close(self) -> None:
        """Finish what was accepted, write the files, give the directory back."""
        if not self.is_open:
            return
        self.is_open = False
        if os.getpid() != self._process_id:
            return
        self.turn_signal.notify()
        self.work_signal.notify()
        self.changes.notify_all()
        await self.upkeep.stop()
        while not await self._committer.settled():
            pass
        is_alive = self._committer.cause_of_death is None
        try:
            if is_alive:
                await self._maintain()
        except (OSError, SyncFailed) as error:
            # Nothing is lost: the journal has it, and the next start writes the files.
            self.upkeep.report(error)
            is_alive = False
        finally:
            for thread in (self._commit_thread, self._files, self._reads):
                thread.close()
            if is_alive:
                self._journal.finish()
            self._journal.close()
            self.root.close()

    # --- after changes

    def _settle(self, now_ms: int) -> Collection[str]:
        """Wake whoever waits for work: what they commit comes after what woke them."""
        touched = self.state.settle(now_ms)
        if self.state.ready_instances.has_news:
            self.state.ready_instances.has_news = False
            self.turn_signal.notify()
        if self.state.ready_work.has_news:
            self.state.ready_work.has_news = False
            self.work_signal.notify()
        return touched

    def _undo(self, tx: Transaction) -> None:
        tx.undo()
        self._settle(tx.now_ms)

    def _on_durable(self, touched: Collection[str]) -> None:
        self.changes.notify(touched)
        self.upkeep.note_commit()

    def _on_undone(self) -> None:
        self._settle(self.clock.now_ms())
        self.turn_signal.notify()
        self.work_signal.notify()
        self.changes.notify_all()
