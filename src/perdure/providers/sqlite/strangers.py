"""Keeps Python's own ``sqlite3`` away from a file that is open as a store in this process.

It is a second copy of SQLite. Locks on files belong to a process, so the two copies do not see each
other: when one of them closes the file, it takes the other's locks away, and removes its log.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from perdure.errors import UsageError

File: TypeAlias = "tuple[int, int] | None"
"""Device and inode; None if it is not there."""

_open: Counter[File] = Counter()
"""Stores of this process."""
_hooks: list[object] = []
_DESCRIPTORS: Final = Path("/proc/self/fd")

_log = logging.getLogger("perdure.sqlite")


def look_for(path: Path) -> None:
    """Warn of whoever has the file open before it becomes a store of this process."""
    file = _find(path)
    if file is None or file in _open or "sqlite3" not in sys.modules:
        return
    try:
        descriptors = list(_DESCRIPTORS.iterdir())
    except OSError:
        return  # the system does not say
    if any(_find(each) == file for each in descriptors):
        _log.warning(
            "%r is open in this program already: if that was sqlite3.connect(), its end takes the "
            "log of the store away. Close it before, or use the package apsw",
            str(path),
        )


def keep_away(path: Path) -> File:
    """From now on; the answer is for ``let_in``."""
    if not _hooks:
        _hooks.append(_audit)
        sys.addaudithook(_audit)
    file = _find(path)
    _open[file] += 1
    return file


def let_in(file: File) -> None:
    """It is no longer open here, or one time less."""
    _open[file] -= 1
    if _open[file] <= 0:
        del _open[file]


def forget_all() -> None:
    """In a forked child: it has no locks, and never closes what it inherited."""
    _open.clear()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "sqlite3.connect" and _open and _is_open(args[0]):
        raise UsageError(
            f"{args[0]!r} is a store that this program has open: a second copy of SQLite would "
            "take its locks and its log away. Read it with the package apsw here, which shares "
            "the store's copy, or with sqlite3 from another process"
        )


def _is_open(database: Any) -> bool:
    try:
        name = os.fsdecode(database)
        file = _find(unquote(urlsplit(name).path) if name.startswith("file:") else name)
    except (TypeError, ValueError):
        return False
    return file is not None and file in _open


def _find(path: str | Path) -> File:
    try:
        found = os.stat(path)  # noqa: PTH116 - also of names that are no paths
    except OSError:
        return None
    return found.st_dev, found.st_ino
