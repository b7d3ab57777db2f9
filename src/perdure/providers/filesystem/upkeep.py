"""When checkpoints happen: soon after things calm down, now and then under load, and on demand."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from perdure.errors import PerdureError
from perdure.providers.filesystem.commits import refusal
from perdure.providers.filesystem.root import SyncFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.errors import ProviderError
    from perdure.providers.filesystem.commits import Committer

_LOOK_SECONDS: Final = 0.25
_LOOKS_UNDER_LOAD: Final = 20
"""A busy store gets a checkpoint after so many looks at the latest."""
_JOURNAL_BYTES_DUE: Final = 16 * 1024 * 1024
_JOURNAL_BYTES_MAX: Final = 256 * 1024 * 1024
"""Beyond this, commits wait for the files to catch up."""
_LOOKS_AFTER_FAILURE: Final = 8

_log = logging.getLogger("perdure.filesystem")


class Upkeep:
    """Runs checkpoints in the background, in real time: the store's clock has no part in it."""

    def __init__(
        self, path: str, committer: Committer, checkpoint: Callable[[], Awaitable[None]]
    ) -> None:
        self._path = path
        self._committer = committer
        self._checkpoint = checkpoint
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._seen_sequence = -1
        self._looks = 0
        self._pause = 0
        self._finished = asyncio.Event()
        self.last_error: ProviderError | None = None
        """Of the last checkpoint, if it failed."""

    def note_commit(self) -> None:
        if self._timer is None and self._task is None:
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    async def room(self, operation: str) -> None:
        """Return when the journal may grow."""
        while self._committer.journal_bytes > _JOURNAL_BYTES_MAX:
            self._pause = 0
            self._start()
            self._finished.clear()
            await self._finished.wait()
            if self.last_error is not None:
                error = self.last_error
                raise type(error)(operation, error.message, retryable=error.retryable)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await asyncio.wait((self._task,))

    def report(self, error: Exception) -> None:
        _log.warning(
            "the readable files in %s could not be brought up to date: %s; nothing is lost, the "
            "journal holds it, and they will be",
            self._path,
            error,
        )

    def _look(self) -> None:
        self._timer = None
        self._looks += 1
        is_calm = self._committer.sequence == self._seen_sequence
        self._seen_sequence = self._committer.sequence
        is_due = (
            is_calm
            or self._looks >= _LOOKS_UNDER_LOAD
            or self._committer.journal_bytes > _JOURNAL_BYTES_DUE
        )
        if is_due and self._pause <= 0:
            self._start()
        else:
            self._pause -= 1
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _start(self) -> None:
        if self._task is None and self._committer.cause_of_death is None:
            self._task = self._loop.create_task(self._run(), name="perdure checkpoint")

    async def _run(self) -> None:
        self._looks = 0
        try:
            await self._checkpoint()
        except OSError as error:
            self.last_error = refusal("checkpoint", error)
            self.report(error)
        except SyncFailed as error:
            self._committer.die(f"the store was closed: {error}; check the disk, then start again")
        except PerdureError as error:
            _log.warning("checkpoint given up: %s", error)
        else:
            self.last_error = None
        finally:
            self._task = None
            self._finished.set()
        if self.last_error is not None:
            self._pause = _LOOKS_AFTER_FAILURE
            self.note_commit()
