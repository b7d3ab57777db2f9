"""Noticing that source files changed: a look at their times now and then, no dependency."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_SKIPPED: Final = frozenset(
    {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
)
_FILES_MAX: Final = 5_000


class SourceWatch:
    """Python files below some folders; hidden folders and installed packages are left out."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._seen = self._look()

    def changed(self) -> str | None:
        """A file that changed, came or went since the last call."""
        seen, self._seen = self._seen, self._look()
        for name in {**seen, **self._seen}:
            if seen.get(name) != self._seen.get(name):
                return name
        return None

    def _look(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for folder in self._folders:
            for entry in _python_files(os.fspath(folder)):
                try:
                    status = entry.stat()
                except OSError:
                    continue  # removed this very moment
                found[entry.path] = (status.st_mtime_ns, status.st_size)
                if len(found) >= _FILES_MAX:
                    return found
        return found


def _python_files(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        if entry.is_dir(follow_symlinks=False):
            if not Path(entry.path, "pyvenv.cfg").exists():
                yield from _python_files(entry.path)
        elif entry.name.endswith(".py"):
            yield entry
