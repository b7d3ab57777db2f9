"""Tells a signal that broke into the code from an exception that the code has raised itself.

Ctrl-C raises KeyboardInterrupt at whatever line is running, and a handler may raise SystemExit
there. Neither says anything about that line: that the process is to end is no outcome of its work.
"""

from __future__ import annotations

import dis
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_RAISE: Final = dis.opmap["RAISE_VARARGS"]


def is_interruption(error: BaseException) -> bool:
    """Whether a signal has raised it; asked on the thread on which it was caught."""
    if not isinstance(error, (KeyboardInterrupt, SystemExit)):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False  # Python hears signals on the main thread only
    frames = list(_frames(error))
    handlers = set(_handlers())
    if any(each.tb_frame.f_code in handlers for each in frames):
        return True
    if isinstance(error, SystemExit) or not frames:
        return False
    # Python's own handler has no frame: the code was at something else than a raise.
    innermost = frames[-1]
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] != _RAISE


def _frames(error: BaseException) -> Iterator[TracebackType]:
    place = error.__traceback__
    while place is not None:
        yield place
        place = place.tb_next


def _handlers() -> Iterator[Any]:
    """The code of what was registered for signals."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, partial):  # as asyncio.run() registers its own
            handler = handler.func
        for each in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - an object's own
            code = getattr(each, "__code__", None)
            if code is not None:
                yield code
