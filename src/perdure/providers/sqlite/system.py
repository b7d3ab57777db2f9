"""The clock, the random numbers and the threads of a store.

The engine takes them from a ``System`` alone, so a simulator can replace all of them at once.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from perdure.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.clock import Clock

_P = ParamSpec("_P")
_T = TypeVar("_T")


class System:
    """Those of the machine. A simulator overrides every method."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = SystemClock() if clock is None else clock
        """For leases and due times, which are written into the store."""

    monotonic = staticmethod(time.monotonic)
    """Seconds for measuring how long something takes."""

    file_time_ns = staticmethod(time.time_ns)
    """The clock that the file system stamps its files with, in nanoseconds."""

    pause = staticmethod(time.sleep)
    """Block this thread for that many seconds."""

    uniform = staticmethod(random.uniform)
    """A random number between two others, for waits that should not meet."""

    random_hex = staticmethod(secrets.token_hex)
    """That many unguessable random bytes in hexadecimal digits."""

    def start_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Run a function in a thread that does not keep the process alive."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    async def run_in_thread(
        self, function: Callable[_P, _T], *args: _P.args, **named: _P.kwargs
    ) -> _T:
        """Run a function that blocks in another thread and return its result."""
        return await asyncio.to_thread(function, *args, **named)
