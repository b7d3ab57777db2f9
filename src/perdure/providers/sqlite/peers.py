"""Wake-up across processes: the processes that have one file open tell each other of commits.

Beside the store lies a directory (``shop.db-peers``). Each process that waits has two files in it:

- a board: 4 KiB of shared memory, one bit for each topic that the process waits for. The process
  holds a lock (flock) on it as long as it lives, so others can tell a dead process from a live one;
- a pipe (FIFO): the process reads from it the topics that have changed.

A topic is a number: waiting for turns, waiting for work, or the checksum of an instance id. After a
commit the writing process looks at the boards of the others and writes to the pipes of those that
wait for one of the changed topics. A process that waits for something else is not woken.

Nothing depends on it: every waiting process also polls the file, more slowly. A pipe that is full,
stale, missing or not ours costs at most the time until the next poll.

The same lock tells when a process has died: its identity begins every lock token that it has taken,
so its locks can be released at once. The kernel releases the lock with the last descriptor of the
board, however the process ends; ids of processes, which are used again and differ between
containers, play no part.

A second lock, of one byte of the board, shows until when the worker of this process has announced
itself: the position of that byte is the time. So an idle worker is seen as alive, and nothing is
written.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perdure.logs import get_logger
from perdure.providers.local_files import PLAIN_FILE, is_locked, own_user, try_lock

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence

_log = get_logger("perdure.sqlite")

EVERYTHING: Final = 0
"""Anything may have changed."""
TURNS: Final = 1
WORK: Final = 2
_GREETING: Final = 3
_FIRST_INSTANCE: Final = 4

BOARD_BYTES: Final = 4096
_BYTE_MASK: Final = BOARD_BYTES - 1
_TOPIC_BYTES: Final = 4
TOPICS_PER_WRITE_MAX: Final = 256
"""1 KiB: a write to a pipe is not mixed with others up to 4 KiB."""
_PIPE_BYTES: Final = 64 * 1024
_FULL_BYTES: Final = _PIPE_BYTES - TOPICS_PER_WRITE_MAX * _TOPIC_BYTES
"""If more than this was waiting to be read, a write may have found the pipe full."""
RESCAN_SECONDS: Final = 0.05
"""A process that commits looks for new peers at most this often."""
CHECK_SECONDS: Final = 0.2
"""Known peers are asked whether they live at most this often."""
ABANDONED_SECONDS: Final = 60.0
"""A file without a board is removed after this time: its process may be about to make the board."""
PACE_SECONDS: Final = 0.001
"""After a wake-up the pipe is read again after this time, so that a burst wakes only now and then.
"""


def topic_of(instance_id: str) -> int:
    """Return the topic of changes of an instance."""
    return max(zlib.crc32(instance_id.encode(errors="surrogatepass")), _FIRST_INSTANCE)


class NoPeers:
    """The peers of a store that only one process can have open: there are none."""

    @property
    def is_listening(self) -> bool:
        """Return True if other processes can wake this one."""
        return False

    def listen(
        self, loop: asyncio.AbstractEventLoop, heard: Callable[[Sequence[int]], None]
    ) -> None:
        """Call ``heard`` on the loop with the topics that other processes tell of."""

    def want(self, topic: int) -> None:
        """Show that this process waits for a topic. Call it before reading the store."""

    def release(self, topic: int) -> None:
        """End one ``want``."""

    def show_until(self, time_ms: int) -> bool:
        """Show until when the worker of this process has announced itself; writes nothing.

        False if other processes could not see it: then the store has to tell them.
        """
        return False

    def has_any(self, now: float) -> bool:
        """Return True if there is another process; ``now`` is the time by ``System.monotonic``."""
        return False

    def tell(self, *, turns: bool, work: bool, instance_ids: Iterable[str]) -> None:
        """Wake the processes that wait for what a commit has changed. Never blocks."""

    def take_dead(self, now: float) -> Sequence[str]:
        """Return the identities of processes that have died; each is returned once.

        Call ``remove`` when everything that such a process held is released.
        """
        return ()

    def remove(self, identity: str) -> None:
        """Remove the files of a dead process."""

    def presence(self) -> Mapping[str, int | None]:
        """Return for each identity that can be seen until when its worker has announced itself.

        0: it has shown no time; None: its process is dead. May be called from any thread.
        """
        return {}

    def close(self) -> None:
        """Remove the files of this process, and forget the others."""

    def disown(self) -> None:
        """Close the descriptors of a forked child. The parent's lock and files stay."""


class Peers(NoPeers):
    """The other processes of a store, and this one's board and pipe.

    ``listen``, ``want``, ``release`` and ``close`` are called on the event loop; ``tell`` by the
    one thread that commits at that moment, perhaps at the same time.
    """

    is_supported: Final = sys.platform != "win32"

    def __init__(self, store: Path, identity: str) -> None:
        self.directory = Path(f"{os.path.realpath(store)}-peers")
        self._identity = identity
        self._own: _Own | None = None
        self._lock = threading.Lock()
        """Held while the known peers are read or changed."""
        self._known: dict[str, _Peer] = {}
        self._ignored: set[str] = set()
        """Identities that are not peers: dead ones, files of other users or of another form."""
        self._dead: list[str] = []
        self._scan_at = 0.0
        self._check_at = 0.0

    # --- this process

    @property
    def is_listening(self) -> bool:
        return self._own is not None

    def listen(
        self, loop: asyncio.AbstractEventLoop, heard: Callable[[Sequence[int]], None]
    ) -> None:
        # Where it is impossible, nothing is heard, and the caller's polling has to do.
        if self._own is not None or not self.is_supported:
            return
        try:
            self._own = _Own(self.directory, self._identity, loop, heard, self._expect_peers)
        except (OSError, NotImplementedError) as error:
            _log.info("other processes cannot wake this one: %s: %s", self.directory, error)
            return
        self._sweep()
        with self._lock:
            self._scan(0.0)
            for peer in self._known.values():
                peer.greet()

    def _expect_peers(self) -> None:
        """Look for new peers at the next commit: one that tells this process may wait for it."""
        self._scan_at = 0.0

    def want(self, topic: int) -> None:
        if self._own is not None:
            self._own.want(topic)

    def release(self, topic: int) -> None:
        if self._own is not None:
            self._own.release(topic)

    def show_until(self, time_ms: int) -> bool:
        return self._own is not None and self._own.show_until(time_ms)

    def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()
            self._sweep()
        self._forget_all()
        with suppress(OSError):  # others are there, or there is no directory
            self.directory.rmdir()

    def disown(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.disown()
        self._lock = threading.Lock()  # a thread of the parent may hold the old one
        self._forget_all()

    def _forget_all(self) -> None:
        with self._lock:
            for peer in self._known.values():
                peer.close()
            self._known.clear()
            self._ignored.clear()
            self._scan_at = 0.0

    # --- the others

    def has_any(self, now: float) -> bool:
        # A process that listens is greeted by new peers; one that does not has to look each time.
        if now >= self._scan_at or self._own is None:
            with self._lock:
                self._scan(now)
        return bool(self._known)

    def tell(self, *, turns: bool, work: bool, instance_ids: Iterable[str]) -> None:
        topics = [topic_of(each) for each in instance_ids]
        if turns:
            topics.append(TURNS)
        if work:
            topics.append(WORK)
        with self._lock:
            for peer in self._known.values():
                peer.tell(topics)

    def take_dead(self, now: float) -> list[str]:
        with self._lock:
            self._scan(now)
            if now >= self._check_at:
                self._check_at = now + CHECK_SECONDS
                for peer in [each for each in self._known.values() if each.is_dead()]:
                    del self._known[peer.name]
                    peer.close()
                    self._ignored.add(peer.name)
                    self._dead.append(peer.name)
            dead, self._dead = self._dead, []
        return dead

    def remove(self, identity: str) -> None:
        for suffix in (_PIPE, _BOARD):
            with suppress(OSError):
                os.unlink(self.directory / f"{identity}{suffix}")  # noqa: PTH108

    def presence(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for name in self._names():
            with suppress(OSError):
                found[name] = _shown_until(self.directory / f"{name}{_BOARD}")
        return found

    def _sweep(self) -> None:
        """Remove what processes have left that were killed before their board had its name."""
        names = self._names()
        for path in (*self.directory.glob(f"*{_DRAFT}"), *self.directory.glob(f"*{_PIPE}")):
            with suppress(OSError):
                if path.stem not in names and _is_abandoned(path):
                    path.unlink()

    def _names(self) -> set[str]:
        """Return the identities that have a board."""
        try:
            return {
                name.removesuffix(_BOARD)
                for name in os.listdir(self.directory)  # noqa: PTH208 - at many commits
                if name.endswith(_BOARD)
            }
        except OSError:
            return set()

    def _scan(self, now: float) -> None:
        """Find new peers, and forget those that are gone."""
        self._scan_at = now + RESCAN_SECONDS
        names = self._names()
        for name in self._known.keys() - names:
            self._known.pop(name).close()
        self._ignored &= names
        for name in names - self._known.keys() - self._ignored - {self._identity}:
            self._meet(name)

    def _meet(self, name: str) -> None:
        try:
            self._known[name] = _Peer(self.directory, name)
        except _Stale:
            self._ignored.add(name)
            self._dead.append(name)
        except OSError as error:
            self._ignored.add(name)
            _log.debug("%s in %s is not a peer: %s", name, self.directory, error)


_TRIES: Final = 5
_BOARD: Final = ".board"
_DRAFT: Final = ".new"
_PIPE: Final = ".pipe"


class _Stale(OSError):
    """The process of a board is dead."""


class _Own:
    """The board and the pipe of this process."""

    def __init__(
        self,
        directory: Path,
        identity: str,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[Sequence[int]], None],
        expect_peers: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._heard = heard
        self._expect_peers = expect_peers
        self._wanted: Counter[int] = Counter()
        self._bits: Counter[int] = Counter()
        self._paths = [directory / f"{identity}{suffix}" for suffix in (_PIPE, _BOARD)]
        pipe_path, board_path = self._paths
        self._pace: asyncio.TimerHandle | None = None
        draft = board_path.with_suffix(_DRAFT)
        self._lock = board = _make_file(draft)
        self._descriptors = [board]
        try:
            try_lock(board)
            os.ftruncate(board, BOARD_BYTES)
            self._board = mmap.mmap(board, BOARD_BYTES)
            if sys.platform != "win32":  # which has no pipes with names
                os.mkfifo(pipe_path, 0o600)
            self._pipe = os.open(pipe_path, os.O_RDONLY | PLAIN_FILE)
            self._descriptors.append(self._pipe)
            # A writer of its own: without one the pipe would be at its end, and always readable.
            self._descriptors.append(os.open(pipe_path, os.O_WRONLY | PLAIN_FILE))
            # The name comes last: under it, others find a whole board that is locked.
            os.rename(draft, board_path)  # noqa: PTH104
            loop.add_reader(self._pipe, self._read)
        except BaseException:
            self._close_descriptors()
            self._unlink()
            raise

    def want(self, topic: int) -> None:
        self._wanted[topic] += 1
        if self._wanted[topic] == 1:
            bit = topic & (BOARD_BYTES * 8 - 1)
            self._bits[bit] += 1
            self._board[bit >> 3] |= 1 << (bit & 7)

    def release(self, topic: int) -> None:
        self._wanted[topic] -= 1
        if self._wanted[topic] <= 0:
            del self._wanted[topic]
            bit = topic & (BOARD_BYTES * 8 - 1)
            self._bits[bit] -= 1
            if self._bits[bit] <= 0:
                del self._bits[bit]
                self._board[bit >> 3] &= ~(1 << (bit & 7)) & 0xFF

    def show_until(self, time_ms: int) -> bool:
        try:
            seen = os.lstat(self._paths[1])
            held = os.fstat(self._lock)
            if not os.path.samestat(seen, held) or not _is_private(seen):
                return False
            return _lock_time(self._lock, time_ms)
        except OSError:
            return False

    def _read(self) -> None:
        """Called by the event loop when the pipe has something."""
        try:
            data = os.read(self._pipe, _PIPE_BYTES)
        except BlockingIOError:
            return
        self._expect_peers()
        whole = len(data) // _TOPIC_BYTES
        topics = set(struct.unpack_from(f"={whole}I", data))
        if len(data) > _FULL_BYTES or EVERYTHING in topics:
            self._heard([EVERYTHING])
        else:
            # Others see one bit for many topics: here it is decided which was meant.
            wanted = [topic for topic in topics if topic in self._wanted]
            if wanted:
                self._heard(wanted)
        self._loop.remove_reader(self._pipe)
        self._pace = self._loop.call_later(PACE_SECONDS, self._read_on)

    def _read_on(self) -> None:
        self._pace = None
        self._loop.add_reader(self._pipe, self._read)

    def close(self) -> None:
        if self._pace is not None:
            self._pace.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pipe)
        self._unlink()
        self._board.close()
        self._close_descriptors()

    def disown(self) -> None:
        """Close the descriptors of a forked child. The parent's lock and files stay."""
        self._board.close()
        self._close_descriptors()

    def _unlink(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths[1].with_suffix(_DRAFT).unlink(missing_ok=True)

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


class _Peer:
    """Another process: what it waits for, and the way to wake it."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._board: mmap.mmap | None = None
        # The map needs no descriptor; this one is for the lock.
        self._descriptor = _open_own(directory / f"{name}{_BOARD}", os.O_RDONLY, stat.S_ISREG)
        self._pipe = -1
        try:
            if os.fstat(self._descriptor).st_size != BOARD_BYTES:
                raise OSError(errno.EINVAL, "a board has 4096 bytes")
            if self.is_dead():
                raise _Stale
            self._board = mmap.mmap(self._descriptor, BOARD_BYTES, access=mmap.ACCESS_READ)
        except BaseException:
            self.close()
            raise
        # Without a pipe it cannot be woken; that it has died is still seen by its board.
        with suppress(OSError):
            self._pipe = _open_own(directory / f"{name}{_PIPE}", os.O_WRONLY, stat.S_ISFIFO)

    def is_dead(self) -> bool:
        """Return True if no process holds the lock of the board, which is still in its place.

        A handle that is closed removes its board first: its locks last until they end.
        """
        return not is_locked(self._descriptor) and os.fstat(self._descriptor).st_nlink > 0

    def tell(self, topics: Sequence[int]) -> None:
        """Write the topics that it waits for to its pipe."""
        board = self._board
        assert board is not None
        wanted = [topic for topic in topics if board[topic >> 3 & _BYTE_MASK] & (1 << (topic & 7))]
        if len(wanted) > TOPICS_PER_WRITE_MAX:
            wanted = [EVERYTHING]
        if wanted:
            self._write(wanted)

    def greet(self) -> None:
        """Let it look for new peers at its next commit."""
        self._write([_GREETING])

    def _write(self, topics: Sequence[int]) -> None:
        if self._pipe < 0:
            return
        try:
            os.write(self._pipe, struct.pack(f"={len(topics)}I", *topics))
        except BlockingIOError:
            pass  # full: it has enough to read, and will take that for everything
        except OSError:  # it does not read any more
            os.close(self._pipe)
            self._pipe = -1

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        for descriptor in (self._descriptor, self._pipe):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._pipe = -1


# --- a time as the position of a locked byte

if sys.platform == "linux":  # the only system with locks of open files in this format
    import fcntl

    _LOCK_FORMAT: Final = "hhqqi4x"
    """``struct flock``: type, origin, first byte, number of bytes (0: all that follow), process."""

    def _lock_time(board: int, time_ms: int) -> bool:
        """Lock the byte of a board at that position; False if the system cannot do it."""
        # The new byte first: at each moment one is locked.
        for kind, first, count in (
            (fcntl.F_WRLCK, time_ms, 1),
            (fcntl.F_UNLCK, 0, time_ms),
            (fcntl.F_UNLCK, time_ms + 1, 0),
        ):
            lock = struct.pack(_LOCK_FORMAT, kind, os.SEEK_SET, first, count, 0)
            fcntl.fcntl(board, fcntl.F_OFD_SETLK, lock)
        return True

    def _locked_time(board: int) -> int:
        """Return the position of the locked byte; 0 if none is locked."""
        asked = struct.pack(_LOCK_FORMAT, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        found = fcntl.fcntl(board, fcntl.F_OFD_GETLK, asked)
        kind, _, first, _, _ = struct.unpack(_LOCK_FORMAT, found)
        return 0 if kind == fcntl.F_UNLCK else int(first)

else:

    def _lock_time(board: int, time_ms: int) -> bool:  # noqa: ARG001
        """Lock the byte of a board at that position; False if the system cannot do it."""
        return False

    def _locked_time(board: int) -> int:  # noqa: ARG001
        """Return the position of the locked byte; 0 if none is locked."""
        return 0


def _shown_until(board: Path) -> int | None:
    """Return the time that a board shows; None if its process is dead. Errors: OSError."""
    # The administrator of the machine may look, too.
    owner = board.parent.stat().st_uid if own_user() == 0 else None
    descriptor = _open_own(board, os.O_RDONLY, stat.S_ISREG, owner)
    try:
        return _locked_time(descriptor) if is_locked(descriptor) else None
    finally:
        os.close(descriptor)


# --- files


def _make_file(path: Path) -> int:
    """Make a private file, and its directory if that is not there; return the open file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | PLAIN_FILE
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):  # the last other process has just removed the directory
            _make_directory(path.parent)
            return os.open(path, flags, 0o600)
    _make_directory(path.parent)
    return os.open(path, flags, 0o600)


def _make_directory(directory: Path) -> None:
    """Make the directory, or check that the one that is there is ours alone."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_private(found):
        raise PermissionError(errno.EPERM, "the directory is not private to this user")


def _is_abandoned(path: Path) -> bool:
    """Return True if a draft or a pipe without a board is left from a process that has died.

    Errors: OSError, also if it cannot be told.
    """
    found = path.lstat()
    if time.time() - found.st_mtime < ABANDONED_SECONDS or not _is_private(found):
        return False
    if path.suffix == _DRAFT:
        descriptor = _open_own(path, os.O_RDONLY, stat.S_ISREG)
        try:
            return not is_locked(descriptor)
        finally:
            os.close(descriptor)
    try:
        os.close(_open_own(path, os.O_WRONLY, stat.S_ISFIFO))
    except OSError as error:
        return error.errno == errno.ENXIO  # no process reads it
    return False


def _open_own(
    path: Path, flags: int, is_kind: Callable[[int], bool], owner: int | None = None
) -> int:
    """Open a file that only its owner can use, without following links or waiting."""
    descriptor = os.open(path, flags | PLAIN_FILE)
    found = os.fstat(descriptor)
    if not is_kind(found.st_mode) or not _is_private(found, owner):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"{path.name} is not a file of this user alone")
    return descriptor


def _is_private(found: os.stat_result, owner: int | None = None) -> bool:
    """Return True if a file belongs to that user, or else to this one, and to no other."""
    return not found.st_mode & 0o077 and found.st_uid == (own_user() if owner is None else owner)
