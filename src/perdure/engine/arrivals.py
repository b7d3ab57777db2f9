"""Waits for events and messages that know whether the code took what came.

What came and was never taken is unread: ``continue_as_new()`` carries it along. A look with
``done()`` takes nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from perdure.authoring.steps import Step
from perdure.engine.tasks import DurableTask

if TYPE_CHECKING:
    from collections.abc import Generator

    _Future = asyncio.Future[Any]
    _Step = Step[Any]
else:
    _Future = object
    _Step = Step


class _Taking(_Future):
    """A future that takes note when its value, or its error, is given away.

    Callbacks of asyncio that only look (``wait``, ``TaskGroup``, a ``gather`` that is over) ask for
    no value; a task that wakes up with it does.
    """

    __slots__ = ()

    def take(self) -> None:
        """Called before the result is given away."""

    def __await__(self) -> Generator[Any, None, Any]:
        self.take()
        return super().__await__()

    __iter__ = __await__

    def result(self) -> Any:
        self.take()
        return super().result()

    def exception(self) -> BaseException | None:
        error = super().exception()
        if error is not None:
            self.take()
        return error


class ArrivalStep(_Taking, _Step):
    """A wait for an event or a message."""

    __slots__ = ("_giver", "carrier", "is_unread")

    def __init__(self, *, loop: asyncio.AbstractEventLoop, owner: Any, identity: int) -> None:
        self._giver = owner
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

    def hand_back(self) -> None:
        """Leave what came to the next wait."""
        if self.is_unread:
            self.is_unread = False
            self._giver.handed_back(self)


class CarrierTask(_Taking, DurableTask):
    """A task that awaits one such step: whoever reads the task takes what came."""

    __slots__ = ("_step",)

    _step: ArrivalStep

    def carry(self, step: ArrivalStep) -> None:
        self._step = step
        step.carrier = self

    def take(self) -> None:
        if self.done():
            self._step.is_unread = False
