"""Runs orchestrations in a test: with a clock that jumps over waits, or from recorded histories."""

from __future__ import annotations

import asyncio
import inspect
import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from perdure.arguments import Duration, to_seconds
from perdure.authoring.definitions import Activity, Handler, Registry, definitions_in
from perdure.authoring.lint import check_lines
from perdure.clock import ManualClock
from perdure.codec import JSON, Codec
from perdure.engine.execution import Execution
from perdure.errors import PerdureError, UsageError
from perdure.model import events, wire
from perdure.model.status import Status
from perdure.providers.records import InstanceQuery, TagFilter
from perdure.providers.sqlite.memory import InMemoryProvider, MemoryStore
from perdure.runtime.runtime import Runtime
from perdure.runtime.worker import RuntimeOptions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from typing import Self

    from perdure.client.endings import Ending, Finished
    from perdure.client.instance import Handle
    from perdure.client.steps import OpenStep
    from perdure.providers.contract import Provider
    from perdure.schedules.spec import Schedule

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_FOREVER_SECONDS = 100 * 365 * 86_400.0
_HORIZON_MS = 10 * 365 * 86_400_000
_REAL_PAUSE_SECONDS = 0.001


class Stuck(PerdureError):
    """All instances wait, and no timer can wake one. The message says what they wait for."""


class Environment:
    """A runtime for tests.

    ``async with Environment([checkout, charge]) as env: assert await env.run(checkout, 1) == ...``

    Time stands still until the test waits for a result; then the clock jumps from one due timer to
    the next, so that a 30-day wait takes milliseconds. ``substitutes`` maps activities to
    functions or mocks that run instead of them, with the same types. ``resources`` are the objects
    that activities take by annotation; the ``lifespan`` of a module is not run. Activities of
    every tag run here, unless ``options`` name tags. Polling, time limits of locks and housekeeping
    are off, also with ``options``. The store is in memory, because a store with its own threads
    would be at work while the clock jumps.

    Orchestrations that read the clock, random numbers or the environment, or forget an ``await``,
    are refused with their lines.
    """

    def __init__(
        self,
        handlers: Iterable[object],
        *,
        substitutes: Mapping[Activity[..., Any], Callable[..., Any]] = MappingProxyType({}),
        resources: Iterable[object] = (),
        always_replay: bool = False,
        schedules: Iterable[Schedule] = (),
        options: RuntimeOptions | None = None,
        codec: Codec = JSON,
        provider: Provider | None = None,
        clock: ManualClock | None = None,
    ) -> None:
        if provider is not None and provider.capabilities.durable:
            raise UsageError(
                f"the store of a test environment is in memory, not {provider.name}: "
                "leave provider= out, or use Runtime(...) for a test on a real store"
            )
        self.clock = clock or ManualClock()
        self.provider = provider or InMemoryProvider(store=MemoryStore(self.clock))
        chosen = _substituted(handlers, substitutes)
        check_lines(Registry(chosen, codec=codec))
        self.runtime = _JumpingRuntime(
            self.provider,
            chosen,
            resources=resources,
            schedules=schedules,
            options=_without_polling(options or RuntimeOptions(), always_replay=always_replay),
            codec=codec,
            clock=self.clock,
        )
        # Polling by this clock would move time for ever for an instance that cannot end.
        self.runtime._waiter.watch_ms = round(_FOREVER_SECONDS * 1000)  # noqa: SLF001

    async def __aenter__(self) -> Self:
        await self.runtime.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.runtime.__aexit__(*exception)

    if not TYPE_CHECKING:  # a type checker finds these by itself

        def __getattr__(self, name: str) -> Any:
            way_out = f"; write env.runtime.{name}" if hasattr(Runtime, name) else ""
            raise AttributeError(f"an Environment has no {name!r}{way_out}")

    async def start(
        self,
        orchestration: Callable[[*Ts], Awaitable[R]],
        *args: *Ts,
        id: str | None = None,  # noqa: A002
        **options: Any,
    ) -> Handle[R]:
        """Start an instance; its first turn has run when this returns.

        ``options`` are those of ``Runtime.start``, as ``kwargs``.
        """
        start: Any = self.runtime.start
        handle: Handle[R] = await start(orchestration, *args, id=id, **options)
        return handle

    async def run(
        self,
        orchestration: Callable[[*Ts], Awaitable[R]],
        *args: *Ts,
        id: str | None = None,  # noqa: A002
        **options: Any,
    ) -> R:
        """Start an instance and return its result."""
        handle = await self.start(orchestration, *args, id=id, **options)
        return await handle.result()

    async def settle(self) -> None:
        """Run everything that can run without time passing."""
        await self.runtime.settle()

    async def advance(self, time: Duration) -> None:
        """Let ``time`` pass, seconds or a timedelta; timers fire on the way, in order."""
        await self.runtime.advance_to(self.clock.now_ms() + round(to_seconds(time, "time") * 1000))

    async def history(self, handle: Handle[Any]) -> list[events.Event]:
        return await handle.history()


class _JumpingRuntime(Runtime):
    """A runtime whose clock jumps while a caller waits for a result."""

    @property
    def _jumps(self) -> ManualClock:
        return cast("ManualClock", self.clock)

    async def _wait_finished(
        self, instance_id: str, finished: Finished | None, deadline_ms: int | None
    ) -> Ending:
        waiting = super()._wait_finished(instance_id, finished, deadline_ms)
        return await self._jumping(instance_id, waiting)

    async def _jumping(self, instance_id: str, waiting: Awaitable[R]) -> R:
        task = asyncio.ensure_future(waiting)
        jumps = 0
        try:
            while True:
                await self.settle()
                if task.done():
                    return task.result()
                due_ms = self._jumps.next_due_ms()
                if (
                    due_ms is None
                    or due_ms - self._jumps.now_ms() > _HORIZON_MS
                    or await self._is_blocked(instance_id, is_thorough=jumps % 50 == 0)
                ):
                    raise Stuck(await self._describe_waits())
                jumps += 1
                self._jumps.advance(max(0, due_ms - self._jumps.now_ms()))
        finally:
            if not task.done():
                task.cancel()

    async def _is_blocked(self, instance_id: str, *, is_thorough: bool) -> bool:
        """Return True if the instance, or if thorough a descendant, is Blocked."""
        ids = (await self.admin.tree(instance_id)).instance_ids if is_thorough else (instance_id,)
        views = [await self.describe(each, waits=False) for each in ids]
        return any(view.status is Status.BLOCKED for view in views)

    async def settle(self) -> None:
        """Return when no callback is ready and no activity is running."""
        loop: Any = asyncio.get_running_loop()
        if not hasattr(loop, "_ready"):
            raise UsageError(
                f"the test environment needs asyncio's own event loop, not {type(loop).__name__}"
            )
        while True:
            await asyncio.sleep(0)
            if loop._ready:  # noqa: SLF001
                continue
            if not self.is_busy:
                return
            await asyncio.sleep(_REAL_PAUSE_SECONDS)

    async def advance_to(self, target_ms: int) -> None:
        while True:
            await self.settle()
            due_ms = self._jumps.next_due_ms()
            if due_ms is None or due_ms > target_ms:
                self._jumps.advance(target_ms - self._jumps.now_ms())
                await self.settle()
                return
            self._jumps.advance(max(0, due_ms - self._jumps.now_ms()))

    async def _describe_waits(self) -> str:
        lines = ["nothing will happen any more; unfinished instances:"]
        live = frozenset(status for status in Status if not status.is_final)
        async for view in self.admin.instances(InstanceQuery(statuses=live)):
            steps = (await self.describe(view.id)).waiting_for
            waits = ", ".join(map(self._described, steps)) or "nothing"
            if view.name not in {name for name, _ in self.registry.startable_keys}:
                waits = f"{view.name}, which is not registered here"
            reason = f" ({view.block.reason}: {view.block.message})" if view.block else ""
            lines.append(f"  {view.name} {view.id!r} is {view.status}{reason}, waits for {waits}")
        return "\n".join(lines)

    def _described(self, step: OpenStep) -> str:
        if step.kind == "activity" and step.name not in self.registry.activity_names:
            return f"{step}, which is not registered here"
        return str(step)


def _without_polling(options: RuntimeOptions, *, always_replay: bool) -> RuntimeOptions:
    """Return the options with which only the code under test waits for time to pass."""
    return replace(
        options,
        always_replay=always_replay or options.always_replay,
        housekeeping=False,
        tags=TagFilter.any() if options.tags == TagFilter() else options.tags,
        poll_interval=_FOREVER_SECONDS,
        idle_timeout=_FOREVER_SECONDS,
        orchestration_lock_timeout=_FOREVER_SECONDS * 4,
        activity_lock_timeout=_FOREVER_SECONDS * 4,
        session_idle_timeout=_FOREVER_SECONDS * 4,
    )


def _substituted(
    handlers: Iterable[object],
    substitutes: Mapping[Activity[..., Any], Callable[..., Any]],
) -> list[Handler]:
    for activity in substitutes:
        if not isinstance(activity, Activity):
            raise UsageError(f"substitutes maps activities to functions; {activity!r} is none")
    names = {activity.name for activity in substitutes}
    chosen: list[Handler] = [
        handler
        for handler in definitions_in(handlers)
        if not (isinstance(handler, Activity) and handler.name in names)
    ]
    chosen += [
        # Executor and transaction are settings of the replaced function.
        Activity(
            _as_function(activity, substitute),
            name=activity.name,
            options=replace(activity.settings, executor=None, transactional=False),
            stands_for=activity.signature,
        )
        for activity, substitute in substitutes.items()
    ]
    return chosen


def _as_function(activity: Activity[..., Any], substitute: Any) -> Callable[..., Any]:
    """Return a plain function that calls the substitute: a mock, a partial, a method."""
    if not callable(substitute):
        raise UsageError(
            f"the substitute of activity {activity.name!r} is {substitute!r}, and no function: "
            "substitutes maps an activity to a function, such as lambda order: 'receipt'"
        )
    if inspect.isfunction(substitute):
        return substitute
    if inspect.iscoroutinefunction(substitute):

        async def wait(*args: Any, **kwargs: Any) -> Any:
            return await substitute(*args, **kwargs)

        return wait

    def call(*args: Any, **kwargs: Any) -> Any:
        return substitute(*args, **kwargs)

    return call


def assert_replays(
    history: Sequence[events.Event] | str | os.PathLike[str],
    *handlers: Handler,
    state: Mapping[str, Any] | None = None,
    codec: Codec = JSON,
) -> None:
    """Raise Nondeterminism, with a report, unless the code repeats what the history says.

    ``history`` is a list of events (``await handle.history()``) or a file with one JSON event a
    line. ``state`` is the state at the start of the execution, for a history that does not hold it.
    """
    recorded = _read(Path(history)) if isinstance(history, (str, os.PathLike)) else history
    started = recorded[0] if recorded else None
    if not isinstance(started, events.OrchestrationStarted):
        raise UsageError("a history begins with OrchestrationStarted")
    handler = Registry(handlers, codec=codec).resolve_orchestration(started.name, started.version)
    kv = {key: bytes(codec.encode(value)).decode() for key, value in (state or {}).items()}
    Execution.replay(handler, recorded, kv=kv, codec=codec).close()


def _read(path: Path) -> list[events.Event]:
    return [wire.decode_event(line) for line in path.read_text().splitlines() if line.strip()]
