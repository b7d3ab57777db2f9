"""Forked processes of a campaign, which report what was acknowledged through a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Child:
    """Runs an async function of (report, *args); forked while its parent runs no threads."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._read, write = os.pipe()
        self.process_id = os.fork()
        if self.process_id == 0:
            os.close(self._read)
            _be_a_child(function, write, *args)
        os.close(write)
        self._text = b""
        self.is_dead = False

    def kill(self) -> bool:
        """True if it was still alive."""
        is_alive = (
            os.waitid(os.P_PID, self.process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        )
        if is_alive:
            os.kill(self.process_id, signal.SIGKILL)
        return is_alive

    def collect(self, note: Callable[..., None]) -> None:
        """Wait for its end and hand on each of its reports."""
        while not self.is_dead:
            self.take()
        os.close(self._read)
        _, status = os.waitpid(self.process_id, 0)
        assert os.WIFSIGNALED(status) or status == 0, f"a process failed: {self._text[-2000:]!r}"
        # What was cut off by death was not reported, and need not be kept.
        for line in self._text.split(b"\n")[:-1]:
            note(*json.loads(line))

    def fileno(self) -> int:
        return self._read

    def take(self) -> None:
        """Read what it has reported; waits until there is something or it is gone."""
        data = os.read(self._read, 65536)
        self._text += data
        self.is_dead = not data


def await_deaths(children: list[Child], seconds: float) -> None:
    """Read the reports of all, so that none has to wait, until all are gone or time is up."""
    deadline = time.monotonic() + seconds
    while alive := [child for child in children if not child.is_dead]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        for child in select.select(alive, [], [], left)[0]:
            child.take()


def _be_a_child(function: Callable[..., Any], write: int, *args: Any) -> None:
    """Never returns: a fork of the campaign must not go on with the campaign."""

    def report(*words: Any) -> None:
        os.write(write, json.dumps(words).encode() + b"\n")

    try:
        asyncio.run(function(report, *args))
    except BaseException as error:
        print(f"{function.__name__}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
