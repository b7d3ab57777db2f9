"""Whether the names of a store still lead to the files that are open.

Somebody may remove or replace them at any time. Then a commit would go where nobody finds it; or,
without the index of the log (-shm), where SQLite keeps its locks, beside that of another process.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_SETTLED_NS: Final = 100_000_000
"""Clocks of file systems go in steps: a change that is older than this has a time of its own."""

_Mark = tuple[int, int, int]


class Whereabouts:
    """Looks at the directory, which shows whether any name in it has changed."""

    def __init__(self, path: Path) -> None:
        name, real = os.fspath(path), os.path.realpath(path)
        self._names = (name, f"{real}-wal", f"{real}-shm")
        self._directories = tuple({os.path.dirname(each) for each in (name, real)})  # noqa: PTH120
        self._files: tuple[_Mark, ...] = ()
        self._unchanged: tuple[_Mark, ...] | None = None
        """The directory as it was when all names were right, if that tells anything."""

    def note(self) -> None:
        """The files are open now."""
        self._files = self._find_files()
        self._unchanged = None

    def are_right(self) -> bool:
        marks = tuple([_mark(each, is_file=False) for each in self._directories])
        if marks == self._unchanged:
            return True
        is_right = self._find_files() == self._files
        settled = time.time_ns() - _SETTLED_NS
        is_settled = all(0 < changed_at < settled for _, _, changed_at in marks)
        self._unchanged = marks if is_right and is_settled else None
        return is_right

    def _find_files(self) -> tuple[_Mark, ...]:
        return tuple([_mark(each, is_file=True) for each in self._names])


def _mark(path: str, *, is_file: bool) -> _Mark:
    """What tells it from another, and for a directory when a name in it was last changed.

    That is not its mtime, which a tool that restores a backup sets back.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - several times for each commit, and twice as fast
    except OSError:
        return (0, 0, 0)
    return found.st_dev, found.st_ino, 0 if is_file else found.st_ctime_ns
