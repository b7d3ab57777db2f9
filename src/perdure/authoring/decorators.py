"""``@activity`` and ``@orchestration``: a plain function becomes a typed handler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from perdure.authoring.definitions import VERSION_DEFAULT, Activity, Orchestration
from perdure.authoring.policies import ActivityOptions, Executor, Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
R = TypeVar("R")


class ActivityDecorator(Protocol):
    """What ``@activity(...)`` gives: turns a sync or async function into an activity."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Activity[P, R]: ...


class OrchestrationDecorator(Protocol):
    """What ``@orchestration(...)`` gives: turns an async function into an orchestration."""

    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Orchestration[P, R]: ...


@overload
def activity(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...
@overload
def activity(fn: Callable[P, R], /) -> Activity[P, R]: ...
@overload
def activity(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: float | None = None,
    heartbeat_timeout: float | None = None,
    deadline: float | None = None,
    tag: str | None = None,
    session: str | None = None,
    executor: Executor | None = None,
    transactional: bool = False,
) -> ActivityDecorator: ...
def activity(
    fn: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any
) -> Any:
    """Make a sync or async function an activity: real work, called durably from orchestrations.

    Times are in seconds. ``timeout`` bounds one attempt, ``deadline`` all of them:

        @activity(retry=Retry(max_attempts=5), timeout=30)
        def charge(order: str, cents: int) -> str: ...
    """
    settings = ActivityOptions.of(options)

    def decorate(function: Callable[..., Any]) -> Activity[Any, Any]:
        return Activity(function, name=name, options=settings)

    return decorate if fn is None else decorate(fn)


@overload
def orchestration(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Orchestration[P, R]: ...
@overload
def orchestration(
    *, name: str | None = None, version: str = VERSION_DEFAULT
) -> OrchestrationDecorator: ...
def orchestration(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str = VERSION_DEFAULT,
) -> Any:
    """Make an ``async def`` durable: it survives crashes and deploys.

    A running instance stays on the version that it began with:

        @orchestration(version="1.1.0")
        async def checkout(order: str) -> str: ...
    """

    def decorate(function: Callable[..., Any]) -> Orchestration[Any, Any]:
        return Orchestration(function, name=name, version=version)

    return decorate if fn is None else decorate(fn)
