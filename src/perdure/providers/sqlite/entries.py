"""What travels between the event loop and the threads: operations there, outcomes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from perdure.providers._shared.polling import Poll


class Entry:
    """An accepted operation and the future that waits for it."""

    __slots__ = ("alone", "args", "future", "is_small", "name", "operation", "poll", "raw")

    def __init__(
        self,
        future: asyncio.Future[Any],
        name: str,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        alone: bool = False,
        is_small: bool = False,
        poll: Poll | None = None,
        raw: bool = False,
    ) -> None:
        self.future = future
        self.name = name
        self.operation = operation
        self.args = args
        self.alone = alone
        """In a transaction of its own."""
        self.is_small = is_small
        """Its statements take less time than a hop to another thread."""
        self.poll = poll
        """How to wait and try again, if this may wait."""
        self.raw = raw
        """``Nothing`` is handed on as it is: the caller is such a wait."""


Outcome: TypeAlias = tuple[Entry, Any, BaseException | None]
"""An operation with its answer or its error."""


class Delivery:
    """What one commit, or a look at the file, has to tell the event loop."""

    __slots__ = ("changed_instances", "foreign", "outcomes", "turns_changed", "work_changed")

    def __init__(self, *, foreign: bool = False) -> None:
        self.outcomes: list[Outcome] = []
        self.turns_changed = False
        self.work_changed = False
        self.changed_instances: list[str] = []
        self.foreign = foreign
        """Another process has written: anything may have changed."""
