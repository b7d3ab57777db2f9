"""Waits for events and messages that know whether the code took what came.

What came and was never taken is unread: ``continue_as_new()`` carries it along. A look with
``done()`` takes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from perdure.authoring.steps import Step
from perdure.engine.taking import Taking
from perdure.engine.tasks import DurableTask

if TYPE_CHECKING:
    import asyncio

    _Step = Step[Any]
else:
    _Step = Step


class ArrivalStep(Taking, _Step):
    """A wait for an event or a message."""

    __slots__ = ("is_unread", "passed_on")

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self.is_unread = False
        """Whether something came that nobody took yet."""
        self.passed_on: asyncio.Future[None] | None = None
        """What the task waits for that ``create_task()`` made of it."""
        _Step.__init__(self, loop=loop)

    def take(self) -> None:
        if self.done():
            self.is_unread = False

    def peek(self) -> Any:
        """The value, which is not taken by that."""
        return super(Taking, self).result()

    def set_result(self, result: Any) -> None:
        super().set_result(result)
        self._wake_carrier()

    def set_exception(self, exception: type | BaseException) -> None:
        super().set_exception(exception)
        self._wake_carrier()

    def cancel(self, msg: Any = None) -> bool:
        is_cancelled = super().cancel(msg)
        self._wake_carrier()
        return is_cancelled

    def hand_back(self) -> None:
        """Leave what came to the next wait."""
        if self.is_unread:
            self.is_unread = False
            cast("Any", self._owner).handed_back(self)

    def _wake_carrier(self) -> None:
        if self.passed_on is not None and not self.passed_on.done():
            self.passed_on.set_result(None)


class CarrierTask(Taking, DurableTask):
    """A task that passes on what comes to one such step: whoever reads the task takes it."""

    __slots__ = ("_step",)

    _step: ArrivalStep

    def carry(self, step: ArrivalStep) -> None:
        self._step = step

    def take(self) -> None:
        if self.done():
            self._step.take()


async def pass_on(step: ArrivalStep) -> Any:
    """What a carrier runs."""
    if not step.done():
        step.passed_on = step.get_loop().create_future()
        await step.passed_on
    return step.peek()
