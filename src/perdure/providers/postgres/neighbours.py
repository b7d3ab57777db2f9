"""Workers of this host: each notices at once when the process of another one has died.

The entry of a worker in the store names its process: a place (host, boot, namespaces of process ids
and of time), the process id, and when the process started. Only processes of the same place can
tell whether it lives; for all others it is foreign, and its locks end by time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SYSTEM = Path("/proc")


class Process(NamedTuple):
    """A process, told apart from all others that were ever there."""

    place: str
    process_id: int
    started: str


def this_process() -> Process | None:
    """Return this process; None on a system that does not say what is needed."""
    process_id = os.getpid()
    try:
        # A /proc of another container would have other numbers.
        if (_SYSTEM / "self").readlink() != Path(str(process_id)):
            return None
        boot = (_SYSTEM / "sys/kernel/random/boot_id").read_text()
        spaces = [str((_SYSTEM / "self/ns/pid").readlink())]
        with suppress(FileNotFoundError):  # older systems have one time for all
            spaces.append(str((_SYSTEM / "self/ns/time").readlink()))
        seen = _look_at(process_id)
    except OSError:
        return None
    text = "\n".join([socket.gethostname(), boot, *spaces])
    return Process(hashlib.sha256(text.encode()).hexdigest()[:16], process_id, seen.started)


def is_dead(process: Process, observer: Process | None) -> bool:
    """Return True if a process has certainly died; False if the observer is elsewhere."""
    if observer is None or process.place != observer.place:
        return False
    try:
        os.kill(process.process_id, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it belongs to another user
    try:
        seen = _look_at(process.process_id)
    except OSError:  # it may be hidden, or have died just now
        return False
    return seen.is_over or seen.started != process.started


class _Look(NamedTuple):
    started: str
    """Start of the process, in ticks since the boot: it tells apart two processes with one id."""
    is_over: bool
    """All of its threads have ended; it only waits for its parent to notice."""


def _look_at(process_id: int) -> _Look:
    # The name, which may contain anything, stands in parentheses.
    fields = (_SYSTEM / str(process_id) / "stat").read_text().rpartition(")")[2].split()
    state, threads, started = fields[0], int(fields[17]), fields[19]
    return _Look(started, state == "X" or (state == "Z" and threads <= 1))


class Neighbours:
    """The processes of this host that serve the same store.

    ``died`` is called on the event loop, once for each, with the holder of a process that has died.
    """

    def __init__(self, died: Callable[[str], None]) -> None:
        self.holder = secrets.token_hex(8)
        """Begins the tokens of all locks that are taken through this handle."""
        self.process: Process | None = None
        self._died = died
        self._watched: dict[str, int] = {}
        """Holders, and what tells that their process has ended."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.process = this_process()

    def close(self) -> None:
        for holder in list(self._watched):
            self._forget(holder)

    def meet(self, others: Iterable[tuple[str, Process]]) -> None:
        """Watch other processes from now on."""
        given = dict(others)
        for holder in self._watched.keys() - given.keys():
            self._forget(holder)
        for holder in given.keys() - self._watched.keys() - {self.holder}:
            self._watch(holder, given[holder])

    def _watch(self, holder: str, process: Process) -> None:
        assert self._loop is not None
        if self.process is None or process.place != self.process.place:
            return
        descriptor = -1
        # Where it cannot be watched, it is looked at each time when it is met.
        with suppress(OSError, AttributeError, NotImplementedError):
            if sys.platform == "linux":
                descriptor = os.pidfd_open(process.process_id)
            self._loop.add_reader(descriptor, self._end, holder)
            self._watched[holder] = descriptor
        # After that: the id may have been given to another process in between.
        if is_dead(process, self.process):
            self._end(holder)
        elif descriptor >= 0 and holder not in self._watched:
            os.close(descriptor)

    def _end(self, holder: str) -> None:
        self._forget(holder)
        self._died(holder)

    def _forget(self, holder: str) -> None:
        descriptor = self._watched.pop(holder, None)
        if descriptor is not None:
            assert self._loop is not None
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
