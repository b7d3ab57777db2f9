"""Futures that know whether the code took what they hold.

asyncio reads futures for many reasons; a value is taken by whoever gives it to the code.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from types import CodeType

    _Future = asyncio.Future[Any]
else:
    _Future = object

_Gathering: Any = getattr(asyncio.tasks, "_GatheringFuture")  # noqa: B009
GATHERING_INIT: Final[CodeType] = _Gathering.__init__.__code__
_COLLECT: Final[CodeType] = next(
    each
    for each in asyncio.gather.__code__.co_consts
    if getattr(each, "co_name", "") == "_done_callback"
)
"""With which ``gather`` collects results: they are given to the code when it is read itself."""


_error_of: Callable[[Any], BaseException | None] = cast("Any", asyncio.Future).exception
"""A look that takes nothing."""


class Taking(_Future):
    """A future that takes note when its value, or its error, is given away.

    Callbacks of asyncio that only look (``wait``, ``TaskGroup``) ask for neither.
    """

    __slots__ = ()

    def take(self) -> None:
        """Called before the result is given away; may be called before there is one."""

    def __await__(self) -> Generator[Any, None, Any]:
        self.take()
        return super().__await__()

    __iter__ = __await__

    def result(self) -> Any:
        if sys._getframe(1).f_code is not _COLLECT:  # noqa: SLF001
            self.take()
        return super().result()

    def exception(self) -> BaseException | None:
        error = super().exception()
        if error is not None and sys._getframe(1).f_code is not _COLLECT:  # noqa: SLF001
            self.take()
        return error


class DurableGathering(_Gathering):  # type: ignore[misc]
    """The future of ``asyncio.gather`` under a stable hash."""

    _identity: int

    def __hash__(self) -> int:
        return self._identity


class TakingGathering(Taking, DurableGathering):
    """One with children that take note: whoever reads it takes from all of them."""

    def take(self) -> None:
        if not self.done() or self.cancelled():
            return
        error = _error_of(self)
        for child in self._children:
            if not isinstance(child, Taking) or not child.done() or child.cancelled():
                continue
            if error is None or _error_of(child) is error:
                child.take()


def adopt_gathering(future: Any, children: Iterable[Any], identity: int) -> None:
    """Give a future that asyncio is just creating inside ``gather`` its durable face."""
    if type(future) is _Gathering:
        kinds = set(map(type, children))  # few, however many children there are
        is_taking = any(issubclass(kind, Taking) for kind in kinds)
        future._identity = identity  # noqa: SLF001
        future.__class__ = TakingGathering if is_taking else DurableGathering
