"""Waits for events and messages that know whether the code took what came.

What came and was never taken is unread: ``continue_as_new()`` carries it along. A look with
``done()`` takes nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from perdure.authoring.steps import Step
from perdure.engine.tasks import DurableTask

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextvars import Context

    _Future = asyncio.Future[Any]
    _Step = Step[Any]
else:
    _Future = object
    _Step = Step


class _Taking(_Future):
    """A future whose readers take what came: those that await it, call back, or ask for it."""

    __slots__ = ()

    def take(self) -> None:
        """Called before the result is given away, and by those who wait for it."""

    def __await__(self) -> Generator[Any, None, Any]:
        self.take()
        return super().__await__()

    __iter__ = __await__

    def result(self) -> Any:
        self.take()
        return super().result()

    def exception(self) -> BaseException | None:
        self.take()
        return super().exception()

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        self.take()
        super().add_done_callback(fn, context=context)


class ArrivalStep(_Taking, _Step):
    """A wait for an event or a message."""

    __slots__ = ("carrier", "is_unread")

    def __init__(self, *, loop: asyncio.AbstractEventLoop, owner: Any, identity: int) -> None:
        self.is_unread = False
        """Whether something came that nobody took yet."""
        self.carrier: CarrierTask | None = None
        """What ``create_task()`` made of it: passes the result on, and takes nothing itself."""
        _Step.__init__(self, loop=loop, owner=owner, identity=identity)

    def take(self) -> None:
        if not self.done():
            return
        if self.carrier is not None:
            # Awaited by its carrier, or read by asyncio to wake the carrier up.
            reader = asyncio.current_task(self.get_loop())
            if reader is None or reader is self.carrier:
                return
        self.is_unread = False

    def has_reader(self) -> bool:
        """Whether anybody waits for it who will take what comes."""
        own = 0 if self.carrier is None else 1
        return _count_callbacks(self) > own or _count_callbacks(self.carrier) > own


class CarrierTask(_Taking, DurableTask):
    """A task that awaits one such step: whoever reads the task takes what came."""

    __slots__ = ("_step",)

    _step: ArrivalStep

    def carry(self, step: ArrivalStep) -> None:
        self._step = step
        step.carrier = self

    def take(self) -> None:
        if self._step.done():
            self._step.is_unread = False


def _count_callbacks(future: asyncio.Future[Any] | None) -> int:
    return 0 if future is None else len(cast("Any", future)._callbacks or ())  # noqa: SLF001
