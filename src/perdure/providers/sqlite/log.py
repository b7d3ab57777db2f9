"""How long the write-ahead log is, and when it is copied into the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import apsw

from perdure.providers.sqlite.place import LOG_BYTES_RESERVED

if TYPE_CHECKING:
    from perdure.providers.sqlite.connection import Durability

PAGES_TO_CHECKPOINT: Final = 8_000
"""32 MiB: often enough for a short pause, seldom enough that a hot page is copied back once."""
PAGES_IN_PLACE: Final = LOG_BYTES_RESERVED // 4_200
"""What a new log has room for without growing; then it is used from its start again."""
PAGES_BETWEEN_LOOKS: Final = 250
"""A checkpoint that readers did not let finish is tried again after so many more."""
PAGES_TO_INSIST: Final = 14_000
"""55 MiB: past this a reader that pins the log is waited for."""


class Log:
    """Counts pages; whoever writes asks it, and copies."""

    def __init__(self, durability: Durability) -> None:
        self.pages = 0
        self._first_due = PAGES_IN_PLACE if durability == "full" else PAGES_TO_CHECKPOINT
        self._due = self._first_due

    def note(self, _connection: apsw.Connection, _database: str, pages: int) -> int:
        """After each commit."""
        if pages < self.pages:
            self._due = self._first_due
        self.pages = pages
        return apsw.SQLITE_OK

    def is_due(self, *, is_waited_for: bool) -> bool:
        """Whether to copy it now, although somebody may wait for a commit."""
        pages = self.pages
        return pages >= self._due and (pages >= PAGES_TO_CHECKPOINT or not is_waited_for)

    def mode(self) -> int:
        insists = self.pages >= PAGES_TO_INSIST
        return apsw.SQLITE_CHECKPOINT_RESTART if insists else apsw.SQLITE_CHECKPOINT_PASSIVE

    def put_off(self) -> None:
        """It was tried, whatever came of it."""
        self._due = self.pages + PAGES_BETWEEN_LOOKS

    def rest(self) -> None:
        """Nothing to do until the next commit."""
        self.pages = 0
        self._due = self._first_due
