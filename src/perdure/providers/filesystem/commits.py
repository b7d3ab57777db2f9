"""Group commit: whatever arrives while the journal is being written shares the next write.

Nothing is answered before its record is durable; what fails is undone.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perdure.errors import StoreClosed, StoreFull, StoreUnavailable
from perdure.providers.filesystem.journal import encode_record
from perdure.providers.filesystem.root import SyncFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from perdure.errors import ProviderError
    from perdure.providers.filesystem.iothread import IoThread
    from perdure.providers.filesystem.journal import Journal
    from perdure.providers.filesystem.tables import Transaction


@dataclass(slots=True)
class _Entry:
    sequence: int
    data: bytes
    tx: Transaction
    touched: Collection[str]
    answer: asyncio.Future[None]


@dataclass(slots=True)
class _Rotation:
    """Everything before it goes to the old segment, everything after it to a new one."""

    first_sequence: int
    answer: asyncio.Future[int]


class Committer:
    """Owns the order of commits. Lives on one event loop; only the writing is elsewhere."""

    def __init__(
        self,
        journal: Journal,
        thread: IoThread,
        last_sequence: int,
        *,
        on_durable: Callable[[Collection[str]], None],
        on_undone: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._thread = thread
        self._on_durable = on_durable
        self._on_undone = on_undone
        self._loop = asyncio.get_running_loop()
        self._sequence = last_sequence
        self._durable = last_sequence
        self._pending: list[_Entry | _Rotation] = []
        self._writing: list[_Entry | _Rotation] = []
        self._is_scheduled = False
        self._waiters: list[tuple[int, asyncio.Future[bool]]] = []
        self._dead: str | None = None
        self.journal_bytes = 0
        """Written since the last checkpoint was completed; whoever completes one resets it."""

    @property
    def sequence(self) -> int:
        """Of the newest record, durable or not."""
        return self._sequence

    @property
    def cause_of_death(self) -> str | None:
        """Why nothing can be committed any more, if so."""
        return self._dead

    # --- from the loop

    def submit(self, tx: Transaction, touched: Collection[str]) -> asyncio.Future[None]:
        """The answer comes when the transaction is durable, or undone."""
        self._require_alive(tx.verb)
        self._sequence += 1
        data = encode_record(tx.record(self._sequence, self._durable))
        answer: asyncio.Future[None] = self._loop.create_future()
        self._add(_Entry(self._sequence, data, tx, touched, answer))
        return answer

    def rotate(self) -> asyncio.Future[int]:
        """Go on in a new segment; the answer is its first sequence number."""
        self._require_alive("checkpoint")
        answer: asyncio.Future[int] = self._loop.create_future()
        self._add(_Rotation(self._sequence + 1, answer))
        return answer

    async def settled(self) -> bool:
        """Wait for all that was submitted so far; False if some of it was undone."""
        if self._durable == self._sequence:
            return True
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.append((self._sequence, waiter))
        return await waiter

    def die(self, reason: str) -> None:
        """Close for good: what is on the disk cannot be known any more."""
        if self._dead is None:
            self._dead = reason
            self._fail(StoreClosed("commit", reason))

    def _require_alive(self, operation: str) -> None:
        if self._dead is not None:
            raise StoreClosed(operation, self._dead)

    # --- writing

    def _add(self, entry: _Entry | _Rotation) -> None:
        self._pending.append(entry)
        if not self._writing and not self._is_scheduled:
            # After this round of the loop, so that all who are awake now share one write.
            self._is_scheduled = True
            self._loop.call_soon(self._write_next)

    def _write_next(self) -> None:
        self._is_scheduled = False
        if not self._pending or self._writing or self._dead is not None:
            return
        first = self._pending[0]
        if isinstance(first, _Rotation):
            self._writing = [self._pending.pop(0)]
            self._thread.post(
                lambda: self._journal.start_segment(first.first_sequence), self._rotated
            )
            return
        batch = self._take_batch()
        data = b"".join([entry.data for entry in batch])
        self.journal_bytes += len(data)
        self._thread.post(lambda: self._journal.append(data), self._written)

    def _take_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        for entry in self._pending:
            if isinstance(entry, _Rotation):
                break
            batch.append(entry)
        del self._pending[: len(batch)]
        self._writing = list(batch)
        return batch

    def _written(self, _result: None, error: BaseException | None) -> None:
        if error is not None:
            self._failed(error)
            return
        batch, self._writing = self._writing, []
        touched: set[str] = set()
        for entry in batch:
            assert isinstance(entry, _Entry)
            self._durable = entry.sequence
            touched.update(entry.touched)
            if not entry.answer.done():
                entry.answer.set_result(None)
        self._on_durable(touched)
        self._tell_waiters(is_undone=False)
        self._write_next()

    def _rotated(self, _result: None, error: BaseException | None) -> None:
        (rotation,), self._writing = self._writing, []
        assert isinstance(rotation, _Rotation)
        if isinstance(error, SyncFailed):
            self.die(str(error))
        if not rotation.answer.done():
            if error is None:
                rotation.answer.set_result(rotation.first_sequence)
            else:
                rotation.answer.set_exception(error)
        self._write_next()

    def _tell_waiters(self, *, is_undone: bool) -> None:
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, []
        for sequence, waiter in waiters:
            if sequence > self._durable and not is_undone:
                self._waiters.append((sequence, waiter))
            elif not waiter.done():
                waiter.set_result(sequence <= self._durable)

    # --- failing

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, OSError):
            self._fail(refusal("commit", error))
        else:
            self.die(
                f"the store was closed because data could not be made durable ({error}); check "
                "the disk, then start again"
            )

    def _fail(self, failure: ProviderError) -> None:
        """Undo everything that is not durable, newest first: later changes build on earlier."""
        entries, self._writing, self._pending = [*self._writing, *self._pending], [], []
        for entry in reversed(entries):
            if isinstance(entry, _Entry):
                entry.tx.undo()
        self._sequence = self._durable
        self._on_undone()
        self._tell_waiters(is_undone=True)
        for entry in entries:
            if not entry.answer.done():
                entry.answer.set_exception(failure)
                entry.answer.exception()  # a caller that went away must not leave a warning


def refusal(operation: str, error: OSError) -> ProviderError:
    """What a caller is told when the operating system said no."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StoreFull(operation, f"no space left ({error}); nothing was written")
    return StoreUnavailable(operation, f"{error}; nothing was written")
