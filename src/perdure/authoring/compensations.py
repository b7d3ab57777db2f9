"""Sagas: undo in reverse order what was done, if a later step fails or the code is cancelled."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from perdure.authoring.context import require_recorder
from perdure.authoring.definitions import Activity, Orchestration
from perdure.errors import CompensationFailed, UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

P = ParamSpec("P")


class Saga:
    """The compensations of one ``async with saga() as undo`` block."""

    __slots__ = ("_is_open", "_undo")

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[..., Awaitable[Any]], tuple[Any, ...], dict[str, Any]]] = []
        self._is_open = False

    def __call__(
        self, compensation: Callable[P, Awaitable[Any]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Register a call that undoes what was done: of an activity, orchestration or function.

        The arguments are checked now.
        """
        recorder = require_recorder("saga()")
        called: Any = compensation
        if not self._is_open:
            raise UsageError("undo() works inside of its async with saga() block")
        if isinstance(called, (Activity, Orchestration)):
            signature = cast("Activity[..., Any]", called).signature
            payload = signature.encode_arguments(args, kwargs, recorder.codec)
            signature.check_arguments(args, kwargs, payload, recorder.codec)
        elif inspect.iscoroutinefunction(called):
            inspect.signature(compensation).bind(*args, **kwargs)
        else:
            raise UsageError(
                "undo() takes an activity, an orchestration or an async function, and its "
                f"arguments: undo(release, item); not {shown(compensation)}"
            )
        self._undo.append((compensation, args, kwargs))

    async def __aenter__(self) -> Self:
        require_recorder("saga()")
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        # Other exceptions stop the code without an end of the orchestration: continue_as_new(), and
        # an instance that leaves the memory of a worker.
        if not isinstance(error, (Exception, asyncio.CancelledError)) or not self._undo:
            return
        recorder = require_recorder("saga()")
        cancelled: asyncio.CancelledError | None = None
        failed: list[str] = []
        first: Exception | None = None
        count = len(self._undo)
        before = recorder.begin_compensation()
        try:
            while self._undo:
                compensation, args, kwargs = self._undo.pop()
                step: asyncio.Future[Any] = asyncio.ensure_future(compensation(*args, **kwargs))
                cancelled = await _wait_for(step) or cancelled
                problem = None if step.cancelled() else step.exception()
                if isinstance(problem, Exception):
                    first = first or problem
                    failed.append(f"{_name(compensation)}: {type(problem).__name__}: {problem}")
        finally:
            recorder.end_compensation(before)
        if failed:
            raise CompensationFailed(
                f"{len(failed)} of {count} compensations failed, after {type(error).__name__}: "
                f"{error}; {'; '.join(failed)}"
            ) from first
        if cancelled is not None:
            raise cancelled


async def _wait_for(step: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait for the end of a compensation; return a cancellation that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not step.done():
        try:
            await asyncio.wait([step])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def _name(compensation: Any) -> str:
    return str(getattr(compensation, "name", None) or compensation.__name__)


def saga() -> Saga:
    """Return a block that undoes in reverse order what was done, if it does not end well.

    An exception, and a cancellation, run the compensations that were registered until then, and
    then go on. One that fails does not keep the others from running: CompensationFailed names it.

        async with saga() as undo:
            await reserve(item)
            undo(release, item)
            await charge(order)
    """
    require_recorder("saga()")
    return Saga()
