"""Guards of a database file: where it may lie, its names, and no other copy of SQLite opens it.

- ``prepare_file`` and ``check_existing`` refuse unsafe places before SQLite touches anything, and
  ``check_users`` files that another user could have put there.
- ``FileIdentity`` notices that a name was removed or replaced while the file is open.
- ``warn_if_open``, ``forbid`` and ``allow`` keep Python's own ``sqlite3`` away from a file that is
  open as a store in this process. It is a second copy of SQLite. Locks on files belong to a
  process, so the two copies do not see each other: when one of them closes the file, it takes the
  other's locks away, and removes its log.
"""

from __future__ import annotations

import os
import stat
import sys
from collections import Counter
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from perdure.errors import StoreRefused, StoreUnavailable, UsageError
from perdure.logs import get_logger
from perdure.processes import on_audit_events
from perdure.providers.local_files import (
    draft_beside,
    drafts_of,
    file_system_of,
    is_device,
    own_user,
    refuse_network,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_log = get_logger("perdure.sqlite")

_HEADER_BYTES: Final = 100

LOG_BYTES_RESERVED: Final = 4 * 1024 * 1024
_ZEROS_BYTES: Final = 64 * 1024
_MEMORY_FILE_SYSTEMS: Final = frozenset({"ramfs", "tmpfs"})
"""File systems without a disk."""


def prepare_file(path: Path) -> None:
    """Check the place and make sure that a private file is there.

    A new file is readable by its owner only, with any umask; SQLite gives the same mode to the
    files that it creates beside it. A file that exists is never opened here: closing it would take
    away the locks that other connections of this process hold on it.
    """
    if is_device(path.name):
        raise StoreRefused("open", f"{path.name!r} is a device on Windows; name another file")
    _check_directory(path)
    refuse_network(path)
    if path.exists() or path.is_symlink():
        check_existing(path)
    else:
        _create(path)
        check_users(path)


def reserve_log(path: Path) -> None:
    """Put a log of zeros beside a new file that is not open: SQLite takes it for empty.

    A commit that overwrites blocks waits for the disk about half as long as one that makes its file
    longer, because the new length is written too. It is only a matter of speed: where it cannot be
    done, SQLite makes the log as it goes.
    """
    log = path.with_name(f"{path.name}-wal")
    if sys.platform != "linux" or file_system_of(path) in _MEMORY_FILE_SYSTEMS or log.exists():
        return
    try:
        model = path.stat()
        # Without a name until it is whole: a crash leaves nothing behind.
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, stat.S_IMODE(model.st_mode))
            if (model.st_uid, model.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, model.st_uid, model.st_gid)
            for _ in range(LOG_BYTES_RESERVED // _ZEROS_BYTES):
                os.write(descriptor, bytes(_ZEROS_BYTES))
            os.fsync(descriptor)
            if os.fstat(descriptor).st_size == LOG_BYTES_RESERVED:
                os.link(f"/proc/self/fd/{descriptor}", log, src_dir_fd=descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        pass  # no room, no such files here, or another process was faster


_CREATE_ATTEMPTS: Final = 20
"""A directory such as /proc, in which no file can be created, gives the error of a lost draft."""


def _create(path: Path) -> None:
    """Put an empty file in place in one step, so that it cannot have been opened before."""
    attempts_left = _CREATE_ATTEMPTS
    while path.parent.is_dir():
        attempts_left -= 1
        try:
            with draft_beside(path) as draft:
                draft.put_in_place()
        except FileExistsError:
            return  # another process was faster, and that is as good
        except OSError as error:
            # Another process may have taken the draft for one of a killed process.
            if not (isinstance(error, FileNotFoundError) and attempts_left):
                raise cannot_create(path, error) from error
        else:
            return
    _check_directory(path)


def cannot_create(path: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(
        "open", f"cannot create {str(path)!r}: {error.strerror}; choose a writable directory"
    )


def _check_directory(path: Path) -> None:
    parent = path.parent
    if not parent.is_dir():
        raise StoreUnavailable(
            "open",
            f"the directory {str(parent)!r} of {path.name!r} does not exist; create it first, or "
            "check the path",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreUnavailable(
            "open",
            f"the directory {str(parent)!r} cannot be written; SQLite needs to create files beside "
            f"{path.name!r}. Change its permissions, or choose another place",
        )


def _check_names(path: Path) -> None:
    """SQLite names the log after the file, so a file with two names would get two logs."""
    if path.stat().st_nlink > 1:
        _remove_drafts(path.resolve())
    names = path.stat().st_nlink
    if names > 1:
        raise StoreRefused(
            "open",
            f"{str(path)!r} has {names} names (hard links); if it were opened under another one as "
            "well, commits would be lost. Remove the other names, or copy the file",
        )


def _remove_drafts(path: Path) -> None:
    """Remove the drafts of processes that create the file now, or were killed while doing so."""
    for each in drafts_of(path):
        with suppress(FileNotFoundError):  # its process has just removed it
            if each.samefile(path):
                each.unlink()


def not_a_database(path: Path) -> StoreRefused:
    return StoreRefused(
        "open", f"{str(path)!r} is not an SQLite database; name another file for the store"
    )


def check_existing(path: Path) -> None:
    """Raise an error if the file cannot be a store of ours. It is not opened."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise StoreRefused("open", f"{str(path)!r} is not a regular file; name a database file")
        _check_names(path)
        if 0 < found.st_size < _HEADER_BYTES:
            # SQLite would take it for an empty database, and overwrite it.
            raise not_a_database(path)
        if not os.access(path, os.R_OK | os.W_OK):
            raise StoreUnavailable(
                "open", f"{str(path)!r} cannot be read and written; change its permissions"
            )
        check_users(path)
    except OSError as error:
        raise StoreUnavailable("open", f"cannot read {str(path)!r}: {error.strerror}") from error


# --- other users

_BESIDE: Final = ("-wal", "-shm", "-journal")


def check_users(path: Path) -> None:
    """Raise StoreRefused if another user could have changed the content of the store.

    SQLite believes the log and the journal that it finds beside a database. So they must belong to
    the owner of the store or to root, and only the users of the store may add files there.
    """
    if (own := own_user()) is None:
        return  # rights of files have another form here
    path = path.resolve()  # SQLite names the other files after the file, not after a link to it
    _check_writers(path)
    found = _status(str(path))
    trusted = {own, 0}
    if own == 0:
        trusted.add(found.st_uid)  # SQLite gives the files that root makes to this user
    elif found.st_uid not in trusted:
        raise StoreRefused(
            "open",
            f"{str(path)!r} belongs to user {found.st_uid}, and this process runs as {own}; run it "
            "as that user, or give the file to this one with chown",
        )
    if found.st_mode & stat.S_IWOTH:
        raise StoreRefused(
            "open", f"every user may write to {str(path)!r}; run chmod o-w {str(path)!r}"
        )
    for ending in _BESIDE:
        _check_beside(f"{path}{ending}", stat.S_IMODE(found.st_mode), trusted)


def _status(path: str) -> os.stat_result:
    return os.lstat(path)


def _check_beside(name: str, mode: int, trusted: set[int]) -> None:
    try:
        found = _status(name)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise StoreRefused(
            "open", f"{name!r} is a link or no regular file, and SQLite would use it; move it away"
        )
    if found.st_uid not in trusted:
        raise StoreRefused(
            "open",
            f"{name!r} belongs to user {found.st_uid}, and SQLite would take its content for a "
            "part of the store. Give it to the owner of the store with chown if it is yours, else "
            "move it away",
        )
    if wider := stat.S_IMODE(found.st_mode) & 0o077 & ~mode:
        raise StoreRefused(
            "open",
            f"more users may use {name!r} than the store itself (mode {wider:03o} beyond it); run "
            f"chmod {mode:03o} {name!r}",
        )


def _check_writers(path: Path) -> None:
    """Refuse a directory in which other users may add, remove and replace files."""
    parent = str(path.parent)
    found = _status(parent)
    if found.st_mode & stat.S_ISVTX:
        return  # as in /tmp: only the owner of a file may remove or replace it
    if found.st_mode & stat.S_IWOTH:
        raise StoreRefused(
            "open",
            f"every user may write to the directory {parent!r}, and so replace {path.name!r}; run "
            f"chmod o-w {parent!r}, or choose another place",
        )
    if found.st_mode & stat.S_IWGRP and (others := _others_in_group(found.st_gid)):
        raise StoreRefused(
            "open",
            f"other users ({', '.join(others[:5])}) may write to the directory {parent!r} as "
            f"members of its group, and so replace {path.name!r}; run chmod g-w {parent!r}, or "
            "choose another place",
        )


def _others_in_group(group_id: int) -> list[str]:
    """Return the members of a group beside this user and root.

    Often there are none: many systems give each user a group, and a container has one for a volume.
    """
    if sys.platform == "win32":
        return []
    else:  # noqa: RET505 - type checkers tell systems apart by it
        import grp
        import pwd

        try:
            members = set(grp.getgrgid(group_id).gr_mem)
            own = pwd.getpwuid(os.geteuid()).pw_name if members else ""
        except KeyError:
            return []
        return sorted(members - {own, "root"})


# --- names of an open file

_SETTLED_NS: Final = 100_000_000
"""File systems stamp in steps: two changes further apart than this have different times."""

_Mark: TypeAlias = tuple[int, int, int]
"""Device, inode, and the time at which a name in the directory was last changed.

That is not its mtime, which a tool that restores a backup sets back.
"""

_mark_of: Final = attrgetter("st_dev", "st_ino", "st_ctime_ns")


class FileIdentity:
    """Notices that a name of the store no longer leads to the file that is open.

    A commit would then go to a file without a name; or, without the index of the log (-shm), where
    SQLite keeps its locks, collide with another process. The time of the directory shows that no
    name in it has changed.
    """

    def __init__(self, path: Path, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        name, real = os.fspath(path), os.path.realpath(path)
        self._names = (name, f"{real}-wal", f"{real}-shm")
        self._directories = tuple({os.path.dirname(each) for each in (name, real)})  # noqa: PTH120
        self._files: list[tuple[int, int]] = []
        self._unchanged_marks: list[_Mark] | None = None
        """State of the directory when all names were right; None if its time is too recent."""

    def note(self) -> None:
        """Remember the files, which are open now."""
        self._files = self._find_files()
        self._unchanged_marks = None

    def unchanged(self) -> bool:
        """Called twice for each commit."""
        try:
            marks = list(map(_mark_of, map(os.stat, self._directories)))
        except OSError:
            marks = []
        if marks == self._unchanged_marks:
            return True
        is_right = bool(self._files) and self._find_files() == self._files
        settled = self._now_ns() - _SETTLED_NS
        is_settled = bool(marks) and all(changed_at < settled for _, _, changed_at in marks)
        self._unchanged_marks = marks if is_right and is_settled else None
        return is_right

    def _find_files(self) -> list[tuple[int, int]]:
        try:
            return [mark[:2] for mark in map(_mark_of, map(os.stat, self._names))]
        except OSError:
            return []


# --- no other copy of SQLite

File: TypeAlias = "tuple[int, int] | None"
"""Device and inode; None if it is not there."""

_open: Counter[File] = Counter()
"""Stores of this process."""
_is_guarding = False
_DESCRIPTORS: Final = Path("/proc/self/fd")


def warn_if_open(path: Path) -> None:
    """Log a warning if this process has the file open before it becomes a store."""
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


def forbid(path: Path) -> File:
    """Let ``sqlite3.connect`` of this file raise UsageError; pass the result to ``allow``."""
    global _is_guarding  # noqa: PLW0603
    if not _is_guarding:
        _is_guarding = True
        on_audit_events(("sqlite3.connect",), _refuse_open)
    file = _find(path)
    _open[file] += 1
    return file


def allow(file: File) -> None:
    """End one ``forbid``."""
    _open[file] -= 1
    if _open[file] <= 0:
        del _open[file]


def forget_all() -> None:
    """End every ``forbid``, in a forked child, which has no locks of its parent."""
    _open.clear()


def _refuse_open(_event: str, args: tuple[Any, ...]) -> None:
    if _open and _is_open(args[0]):
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
