"""Distinguishes an exception that a signal raised from one that the code raised itself.

Ctrl-C raises KeyboardInterrupt at the line that happens to run, and a signal handler may raise
SystemExit there. The end of the process is not an outcome of that code, so it is not recorded.
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
    """Return True if a signal raised the error. Call it on the thread that caught the error."""
    if not isinstance(error, (KeyboardInterrupt, SystemExit)):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False  # Python handles signals on the main thread only
    frames = list(_frames(error))
    handlers = set(_handlers())
    if any(each.tb_frame.f_code in handlers for each in frames):
        return True
    if isinstance(error, SystemExit) or not frames:
        return False
    # The default handler has no frame: then the code was not executing a raise statement.
    innermost = frames[-1]
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] != _RAISE


def _frames(error: BaseException) -> Iterator[TracebackType]:
    place = error.__traceback__
    while place is not None:
        yield place
        place = place.tb_next


def _handlers() -> Iterator[Any]:
    """Yield the code objects of registered signal handlers."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, partial):  # as asyncio.run() registers its own
            handler = handler.func
        for each in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - an object's own
            code = getattr(each, "__code__", None)
            if code is not None:
                yield code
