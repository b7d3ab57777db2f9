"""Crashes a workflow before and after each of its commits, and checks that its end is the same."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from perdure.clock import ManualClock
from perdure.errors import InternalError, RemoteFailure
from perdure.providers.administration import ProviderAdmin
from perdure.providers.contract import Provider
from perdure.providers.sqlite.memory import InMemoryProvider, MemoryStore
from perdure.testing.environment import Environment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from perdure.authoring.definitions import Activity, Orchestration

    Around: TypeAlias = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]

Phase: TypeAlias = Literal["before", "after"]

_COMMITS = frozenset({"ack_orchestration_item", "start_orchestration_item", "ack_work_item"})
_ID = "crash-test"


class CrashPoint:
    """Crashes at the n-th commit: from then on no call reaches the store, and none is answered."""

    def __init__(self, inner: Provider, point: int = 0, phase: Phase = "before") -> None:
        self.provider = intercept(inner, self._around)
        self.commits = 0
        self.crashed = asyncio.Event()
        self._point = point
        self._phase: Phase = phase

    async def _around(self, verb: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if self.crashed.is_set() and verb != "close":
            await _never()
        if verb not in _COMMITS:
            return await call()
        self.commits += 1
        is_here = self.commits == self._point
        if is_here and self._phase == "before":
            await self._crash()
        answer = await call()
        if is_here:
            await self._crash()
        return answer

    async def _crash(self) -> None:
        self.crashed.set()
        await _never()


async def _never() -> None:
    """Wait for ever. The task is dropped with the crashed runtime, without a warning of asyncio."""
    task: Any = asyncio.current_task()
    task._log_destroy_pending = False  # noqa: SLF001
    await asyncio.Event().wait()


async def assert_crash_safe(
    orchestration: Orchestration[..., Any],
    *args: Any,
    handlers: Iterable[object],
    events: Sequence[tuple[str, object]] = (),
    substitutes: Mapping[Activity[..., Any], Callable[..., Any]] = MappingProxyType({}),
    resources: Iterable[object] = (),
) -> int:
    """Run an orchestration once undisturbed, then with a crash before and after each commit.

    Raises AssertionError unless every run ends with the same result or the same kind of failure.
    ``events`` are raised right after the start; ``substitutes`` and ``resources`` are those of an
    Environment. Returns the number of crashes. Activities run again after a crash, as they do in
    production, so it must be harmless to repeat them.
    """
    make = partial(Environment, list(handlers), substitutes=substitutes, resources=tuple(resources))
    clock = ManualClock()
    undisturbed = CrashPoint(InMemoryProvider(store=MemoryStore(clock)))
    process = _Process(make(provider=undisturbed.provider, clock=clock))
    expected = await process.run(orchestration, args, events)
    crashes = 0
    for point in range(1, undisturbed.commits + 1):
        for phase in ("before", "after"):
            found = await _with_crash(make, orchestration, args, events, point, phase)
            crashes += 1
            assert found == expected, (
                f"after a crash {phase} commit {point} of {undisturbed.commits}, "
                f"{orchestration.name} ended with {found!r} instead of {expected!r}"
            )
    return crashes


async def _with_crash(
    make: Callable[..., Environment],
    orchestration: Orchestration[..., Any],
    args: tuple[Any, ...],
    events: Sequence[tuple[str, object]],
    point: int,
    phase: Phase,
) -> Any:
    clock = ManualClock()
    inner = InMemoryProvider(store=MemoryStore(clock))
    crashing = CrashPoint(inner, point, phase)
    first = _Process(make(provider=crashing.provider, clock=clock))
    running = asyncio.ensure_future(first.run(orchestration, args, events))
    crashed = asyncio.ensure_future(crashing.crashed.wait())
    await asyncio.wait((running, crashed), return_when=asyncio.FIRST_COMPLETED)
    crashed.cancel()
    if running.done():
        return running.result()
    await first.crash(running)
    survivor = InMemoryProvider(store=MemoryStore(clock))
    await _copy(inner, survivor)
    second = _Process(make(provider=survivor, clock=clock))
    return await second.run(orchestration, args, events[first.events_sent :])


async def _copy(source: Provider, target: Provider) -> None:
    """Copy everything that was committed, without locks, as a new process finds it."""
    await source.open()
    await target.open()
    reading, writing = source.admin, target.admin
    page = await reading.list_instances(limit=1000)
    for info in page.instances:
        await writing.import_instance(await reading.export_instance(info.instance_id))


class _Process:
    """Stands for one process, from its start to its end or its crash."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.events_sent = 0

    async def run(
        self,
        orchestration: Orchestration[..., Any],
        args: tuple[Any, ...],
        events: Sequence[tuple[str, object]],
    ) -> Any:
        async with self._environment as environment:
            handle = await environment.start(orchestration, *args, id=_ID)
            for name, value in events:
                await handle.raise_event(name, value)
                self.events_sent += 1
            try:
                return await handle.result()
            except RemoteFailure as error:
                return type(error).__name__, error.type_name, error.message

    async def crash(self, running: asyncio.Future[Any]) -> None:
        self._environment.runtime.abort()
        running.cancel()
        await asyncio.wait((running,))


# --- a provider with a hook around every verb


def intercept(inner: Provider, around: Around) -> Provider:
    """Return a provider whose every verb goes through ``around(verb, call)``.

    ``around`` may make the call, skip it, repeat it, or fail before or after it. Members that are
    not awaited, such as ``clock`` and ``watch``, are passed on as they are.
    """
    members: dict[str, Any] = {verb: _passed_on(verb) for verb in _verbs()}
    kind: Any = type("InterceptedProvider", (WholeProvider,), members)
    provider = kind()
    provider.inner = inner
    provider.around = around
    return provider  # type: ignore[no-any-return]


def _verbs() -> list[str]:
    return [
        name
        for name, member in inspect.getmembers(Provider)
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]


def _is_awaited(verb: str) -> bool:
    member = getattr(Provider, verb)
    returned = str(member.__annotations__.get("return", ""))
    return inspect.iscoroutinefunction(member) or returned.startswith("Awaitable")


def _passed_on(verb: str) -> Any:
    if isinstance(getattr(Provider, verb), property):
        return property(attrgetter(f"inner.{verb}"))
    if not _is_awaited(verb):

        def pass_on(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.inner, verb)(*args, **kwargs)

        return pass_on

    def call(self: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        answer: Awaitable[Any] = self.around(
            verb, lambda: getattr(self.inner, verb)(*args, **kwargs)
        )
        return answer

    return call


def _whole(base: type[Any]) -> Any:
    """Return a base class for a provider that implements the public verbs itself.

    The contract's own checks are then not used: a wrapper passes every verb on to another provider,
    and a reference that other stores are compared with must not share their checks.
    """
    below = [name for name in base.__abstractmethods__ if name.startswith("_")]
    members = {name: _unused(name) for name in below} | {"_require_open": _accept}
    return type(f"Whole{base.__name__}", (base,), members)


def _unused(name: str) -> Any:
    def refuse(self: object, *_: object, **__: object) -> Any:
        raise InternalError(f"{type(self).__name__} has no {name}: it implements the public verb")

    return refuse


def _accept(self: object, operation: str) -> None:
    """Do not check: each public verb of such a provider does so itself."""


WholeProvider: Any = _whole(Provider)
WholeAdmin: Any = _whole(ProviderAdmin)
