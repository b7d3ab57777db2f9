"""Limits the time of a turn: logs a warning, then interrupts code that does not return.

Turns run on the thread of the event loop, so code that loops for ever would stop the whole worker.
Another thread watches, and raises an exception inside the turn when its time is up.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import TYPE_CHECKING

from perdure.engine.loop import DurableLoop
from perdure.errors import PerdureError
from perdure.runtime.metrics import log

if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Self

_CHECK_SECONDS = 0.5
_RUN_LOOP = DurableLoop.run_until_idle.__code__
"""Frames outside of this one belong to the program, not to the turn."""
_WAY_OUT = (
    "a turn ends when all branches wait for steps, timers or events: move long work into an "
    "activity, and do not loop around asyncio.sleep(0)"
)


class TurnAborted(BaseException):
    """Raised inside user code whose turn takes too long. User code should not catch it."""


class TurnTooLong(PerdureError):
    """Code between two awaits did not return in time."""


class Watchdog:
    """One for each runtime. Use ``with watchdog.guard(instance_id):`` around a turn or a replay."""

    def __init__(self, warn_seconds: float, abort_seconds: float) -> None:
        self._warn_seconds = warn_seconds
        self._abort_seconds = abort_seconds
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._turn_thread = 0
        self._instance_id: str | None = None
        self._since = 0.0
        self._warned = False
        self.aborted_at = ""
        """The line of user code where the last guarded turn was interrupted, or empty."""

    def start(self) -> None:
        self._turn_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="perdure-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def guard(self, instance_id: str) -> Self:
        self._since = time.monotonic()
        self._warned = False
        self.aborted_at = ""
        self._instance_id = instance_id
        return self

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._mutex:
            self._instance_id = None
            if self.aborted_at:
                # The exception may not have been raised yet: withdraw it.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._turn_thread), None)

    def too_long(self) -> TurnTooLong | None:
        """Return the error of the last turn if it was interrupted."""
        if not self.aborted_at:
            return None
        return TurnTooLong(
            f"a turn ran for more than {self._abort_seconds:g} s and was interrupted at "
            f"{self.aborted_at}; {_WAY_OUT}"
        )

    def _watch(self) -> None:
        while not self._stop.wait(_CHECK_SECONDS):
            with self._mutex:
                instance_id = self._instance_id
                if instance_id is None:
                    continue
                elapsed = time.monotonic() - self._since
                if elapsed > self._abort_seconds and not self.aborted_at:
                    self.aborted_at = self._place()
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._turn_thread), ctypes.py_object(TurnAborted)
                    )
                elif elapsed > self._warn_seconds and not self._warned:
                    self._warned = True
                    log.warning(
                        "a turn of %r has run for %.1f s, now at %s; %s",
                        instance_id,
                        elapsed,
                        self._place(),
                        _WAY_OUT,
                    )

    def _place(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._turn_thread)  # noqa: SLF001
        while frame is not None and frame.f_code is not _RUN_LOOP:
            module = str(frame.f_globals.get("__name__", ""))
            if not module.startswith(("perdure.", "asyncio")):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return "no line of its own"
