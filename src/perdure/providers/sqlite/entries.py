"""What travels between the event loop and the threads: operations there, outcomes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from perdure.providers.sqlite.polling import Poll


class Entry:
    """An accepted operation and the future that waits for it."""

    __slots__ = ("alone", "args", "future", "name", "operation", "poll", "raw")

    def __init__(
        self,
        future: asyncio.Future[Any],
        name: str,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        alone: bool = False,
        poll: Poll | None = None,
        raw: bool = False,
    ) -> None:
        self.future = future
        self.name = name
        self.operation = operation
        self.args = args
        self.alone = alone
        """In a transaction of its own; errors reach the caller as they are."""
        self.poll = poll
        """How to wait and try again, if this may wait."""
        self.raw = raw
        """``Nothing`` is handed on as it is: the caller is such a wait."""


Outcome: TypeAlias = tuple[Entry, Any, BaseException | None]
"""An operation with its answer or its error."""


@dataclass(slots=True)
class Delivery:
    """What one commit, or a look at the file, has to tell the event loop."""

    outcomes: list[Outcome] = field(default_factory=list["Outcome"])
    turns_changed: bool = False
    work_changed: bool = False
    changed_instances: list[str] = field(default_factory=list[str])
    foreign: bool = False
    """Another process has written: anything may have changed."""
