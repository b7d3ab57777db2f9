"""What a durable call inside an orchestration returns: a future that asyncio takes everywhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

R = TypeVar("R")


class StepOwner(Protocol):
    """Whoever resolves a step; told when the code gives it up."""

    def step_cancelled(self, step: Step[Any]) -> None: ...


if TYPE_CHECKING:
    from collections.abc import Coroutine

    class Step(asyncio.Future[R], Coroutine[Any, Any, R]):
        """One durable operation: an activity, a child, a wait.

        Type checkers see a future and a coroutine at once, so that ``create_task`` takes it too.
        """

        _owner: StepOwner
        _identity: int
        event_id: int
        """The event that opened it; 0 if none did."""

        def send(self, value: Any, /) -> Any: ...

        def throw(self, *exception: Any) -> Any: ...

        def close(self) -> None: ...

        # Outside of orchestrations the plain function runs: assert price_of("lamp") == 400.
        def __eq__(self, other: object) -> bool: ...

        def __hash__(self) -> int: ...

else:

    class Step(asyncio.Future):
        """One durable operation: an activity, a child, a wait. asyncio takes it everywhere."""

        # Not a collections.abc.Coroutine at run time: asyncio.wait() refuses those. The durable
        # loop's create_task() takes a step as it is.
        # The loop fills these in: a constructor in Python costs more than the future itself.
        __slots__ = ("_identity", "_owner", "event_id")

        def __hash__(self) -> int:
            # By place in the program, never by address: sets of steps iterate alike on replay.
            return self._identity

        def cancel(self, msg: Any = None) -> bool:
            cancelled = super().cancel(msg)
            if cancelled:
                self._owner.step_cancelled(self)
            return cancelled
