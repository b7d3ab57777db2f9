"""The runtime: a client that also runs orchestrations and activities."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections import Counter
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from inspect import isasyncgenfunction, isawaitable, iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from perdure.arguments import check_kind, in_seconds
from perdure.authoring.communication import ask_instance, promise_instance
from perdure.authoring.definitions import Handler, Orchestration, Registry
from perdure.authoring.lint import findings_in
from perdure.authoring.policies import Keep, parse_keep
from perdure.client.client import Client
from perdure.client.formats import counted
from perdure.client.retention import keep_rules
from perdure.client.starting import TraceCarrier
from perdure.clock import Clock, ManualClock
from perdure.codec import JSON, Codec
from perdure.errors import NotRegistered, StoreClosed, UsageError
from perdure.processes import on_stop_signals
from perdure.providers.records import WorkerInfo
from perdure.runtime.activities import ActivityDispatcher
from perdure.runtime.executors import check_not_loading, check_process_activities
from perdure.runtime.health import Probes, ProbeServer
from perdure.runtime.housekeeping import Housekeeping, LockRenewalThread, LockRenewer
from perdure.runtime.instance_results import instance_result_activity, instance_state_activity
from perdure.runtime.metrics import Observer, UnregisteredHandlerLog, log
from perdure.runtime.orchestrations import OrchestrationDispatcher
from perdure.runtime.worker import BackgroundTasks, RuntimeOptions, Worker
from perdure.schedules.orchestration import loop_handlers
from perdure.schedules.spec import Schedule, check_schedules
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable
    from types import ModuleType
    from typing import Self

    from perdure.providers.contract import Provider
    from perdure.runtime.metrics import Alert, Gauge, Sink, SpanMaker

T = TypeVar("T")

_RELEASE_SECONDS = 5.0
"""Time for the store to release the locks, after the time to drain."""
_CLOSE_SECONDS = 5.0
"""Time to close a store that did not release the locks in time."""


class Runtime(Client):
    """Runs the given handlers on a store: ``async with Runtime("shop.db", [checkout]) as runtime``.

    ``handlers`` are orchestrations, activities, modules that hold them, and objects whose methods
    are activities. ``resources`` are the objects, such as pools, that activities take by
    annotation: ``async def load(table: str, *, pool: Pool = RESOURCE)``. A module of handlers can
    open its own resources, in ``async def lifespan(runtime)``, which yields a list of them once.
    ``keep={"completed": "30d", "failed": "90d"}`` deletes roots that ended that long ago, each with
    its tree; without it they stay.
    """

    _runs_instances = True

    def __init__(
        self,
        store: str | os.PathLike[str] | Provider,
        handlers: Iterable[object],
        *,
        resources: Iterable[object] = (),
        schedules: Iterable[Schedule] = (),
        keep: Keep | None = None,
        options: RuntimeOptions | None = None,
        codec: Codec = JSON,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(store, codec=codec, clock=clock)
        self._resources = _listed_resources(resources, "resources=")
        self._opened = AsyncExitStack()
        """Closes the resources of modules, then the store, then the probes."""
        self.options = RuntimeOptions() if options is None else options
        check_kind(self.options, RuntimeOptions, "options", "RuntimeOptions(...)")
        built_in: tuple[Handler, ...] = (
            instance_result_activity(self.provider, self.options),
            instance_state_activity(self.provider),
            promise_instance,
            ask_instance,
            *loop_handlers(),
        )
        self.registry = Registry(handlers, built_in, self.options.pinned_versions, codec)
        self._schedules = check_schedules(schedules)
        self._keep = keep_rules(parse_keep(keep, "keep"), self.registry.keeps())
        _check_transactions(self.registry, self.provider)
        if self.options.run_activities:
            check_process_activities(self.registry)
        for finding in findings_in(self.registry):
            log.warning("%s", finding)
        self._unregistered = UnregisteredHandlerLog(self.registry)
        self.observer = Observer(self.clock)
        self.observer.alert = self._alert
        self._alerts: list[Callable[[Alert], object]] = []
        self.health_address: tuple[str, int] | None = None
        """The host and the port of the probes while they answer; see ``RuntimeOptions.health``."""
        self._is_stopping = False
        self.worker_id = self.options.worker_id or f"worker-{secrets.token_hex(8)}"
        self._running: _Parts | None = None
        self.left_behind: tuple[str, ...] = ()
        """The names of the activities, or of the store, that still ran when this runtime had
        stopped. Python does not end a process before its threads have ended."""
        self._stopped = asyncio.Event()
        self._store_closed: StoreClosed | None = None
        """Set when the store has closed for good."""

    async def __aenter__(self) -> Self:
        if self._running is not None:
            raise UsageError("this runtime runs already; make another one")
        check_not_loading()
        self._is_stopping = False
        async with AsyncExitStack() as opened:
            await self._start_probes(opened)
            await super().__aenter__()
            opened.push_async_exit(super().__aexit__)
            registry = await self._with_resources(opened)
            self._opened = opened.pop_all()
        worker = Worker(
            worker_id=self.worker_id,
            client=self,
            provider=self.provider,
            registry=registry,
            codec=self.codec,
            clock=self.clock,
            options=self.options,
            observer=self.observer,
            unregistered=self._unregistered,
            schedules=tuple(sorted(each.id for each in self._schedules)),
            keep=self._keep,
            on_closed=self._on_closed,
        )
        self._running = _Parts(worker)
        self._running.start()
        self._local = self._running.orchestrations
        log.info(
            "perdure %s on %s serves %s and %s",
            VERSION,
            self.provider.name,
            counted(self.registry.own_orchestrations, "orchestration"),
            counted(self.registry.own_activities, "activity"),
        )
        for text in self.registry.incompatible_versions():
            log.warning("%s", text)
        try:
            for schedule in self._schedules:
                await self.schedules.declare(schedule)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start_probes(self, opened: AsyncExitStack) -> None:
        """Let the probes answer from now on until the runtime has stopped."""
        if self.options.health is None:
            return
        with suppress(ModuleNotFoundError):  # /metrics then names what to install
            from perdure.runtime.prometheus import PrometheusMetrics

            sinks = [each for each in self.observer.sinks if isinstance(each, PrometheusMetrics)]
            if not any(each.is_default for each in sinks):
                self.observer.subscribe(PrometheusMetrics())
        server = ProbeServer(self.options.health, self.probes())
        self.health_address = await server.start()
        opened.push_async_callback(server.stop)

    def probes(self) -> Probes:
        """Return the answers to ``/livez``, ``/readyz`` and ``/metrics`` for a web application."""
        return Probes(
            self.provider,
            problem=self._problem,
            is_dead=lambda: self._store_closed is not None,
            gauges=self._gauges,
        )

    def _problem(self) -> str | None:
        """Return the reason why this runtime takes no work."""
        if self._store_closed is not None:
            return "the store has closed for good"
        if self._is_stopping:
            return "stopping"
        return "starting" if self._running is None else None

    def _gauges(self) -> list[Gauge]:
        parts = self._running
        if parts is None:
            return []
        return [
            ("activities_running", {}, parts.activities.busy),
            ("activity_slots", {}, self.options.activity_slots),
            ("live_instances", {}, parts.orchestrations.live_count),
        ]

    async def _with_resources(self, opened: AsyncExitStack) -> Registry:
        """Open the resources of the modules; return the handlers with what their functions take."""
        resources = self._resources
        for module in self.registry.modules:
            lifespan = _lifespan_of(module)
            if lifespan is not None:
                what = f"lifespan(runtime) of {module.__name__}"
                context = lifespan(self)
                if not hasattr(context, "__aenter__"):
                    raise UsageError(f"{what} must be an async def that yields once: yield [pool]")
                yielded = await opened.enter_async_context(_yields_once(context, what))
                resources = [*resources, *_listed_resources(yielded or (), what)]
        takes = self.options.run_activities
        return self.registry.with_resources(resources) if takes else self.registry

    async def __aexit__(self, *exception: object) -> None:
        self._is_stopping = True
        running, self._local = self._running, None
        try:
            if running is not None:
                self.left_behind = await running.stop(in_seconds(self.options.drain_timeout))
        finally:
            self._running = None
            # If locks could not be released, the store may hang: limit the time to close it.
            may_hang = running is not None and not running.has_released
            limit = asyncio.timeout(_CLOSE_SECONDS if may_hang else None)
            try:
                async with limit:
                    await self._opened.aclose()
            except TimeoutError:
                if not limit.expired():  # raised by the lifespan of a module
                    raise
                log.warning("the store did not close: something in it still runs")
                self.left_behind = (*self.left_behind, self.provider.name)

    async def serve(self) -> None:
        """Run until SIGTERM or SIGINT, then drain. A second signal ends the process at once.

        On Windows: until Ctrl-C or Ctrl-Break.

        Opens the runtime itself. Raises StoreClosed if the store has closed for good.
        """
        if self._running is not None:
            raise UsageError("serve() opens the runtime itself: leave out the async with around it")
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "serve() handles signals, which only the main thread can: use async with instead"
            )
        self._stopped.clear()
        self._store_closed = None
        with on_stop_signals(self._on_signal):
            async with self:
                await self._stopped.wait()
                if self._store_closed is None:
                    log.info("draining; a second signal ends the process at once")
        if self._store_closed is not None:
            raise self._store_closed

    def _on_closed(self, error: StoreClosed) -> None:
        self._store_closed = error
        self._stopped.set()

    def _on_signal(self, number: int) -> None:
        if self._stopped.is_set():
            os._exit(128 + number)  # as safe as a crash: locks expire, nothing is half done
        self._stopped.set()

    def abort(self) -> None:
        """Stop as a crash would: nothing is finished, and no lock is released. For tests."""
        running, self._running, self._local = self._running, None, None
        if running is not None:
            running.abort()

    @property
    def is_busy(self) -> bool:
        """True while a turn, a commit or an activity is under way here."""
        parts = self._running
        return parts is not None and (parts.activities.busy > 0 or parts.orchestrations.is_busy)

    def observe(self, exporter: Sink | SpanMaker | TraceCarrier) -> None:
        """Send metrics, spans or both to an exporter: ``OpenTelemetry()``, ``PrometheusMetrics()``.

        A failing exporter never affects the work.
        """
        self.observer.subscribe(exporter)
        if isinstance(exporter, TraceCarrier):
            super().observe(exporter)

    def on_alert(self, callback: Callable[[Alert], object]) -> None:
        """Call back for each instance that fails or is Blocked here, after it is stored.

        A failed child is left out: its parent gets the failure. The callback may be async. What it
        raises is logged. Alerts are not stored: a crash at that moment loses one.
        """
        self._alerts.append(callback)

    def _alert(self, alert: Alert) -> None:
        parts = self._running
        if parts is not None:
            for callback in self._alerts:
                parts.alerts.spawn(_call_back(callback, alert))

    def _code_of(self, name: str, version: str | None) -> Orchestration[..., Any] | None:
        with suppress(NotRegistered):
            return self.registry.resolve_orchestration(name, version)
        return None

    def metrics_snapshot(self) -> dict[str, int]:
        """Return the counts since this runtime started."""
        return dict(self.observer.counts)


@asynccontextmanager
async def _yields_once(context: AbstractAsyncContextManager[T], what: str) -> AsyncGenerator[T]:
    """Run the lifespan of a module; say which one does not yield once."""
    try:
        async with context as yielded:
            yield yielded
    except RuntimeError as error:
        if str(error) not in {"generator didn't yield", "generator didn't stop"}:
            raise
        raise UsageError(f"{what} must yield once: yield [pool]") from error


def _listed_resources(resources: Any, what: str) -> list[object]:
    if isinstance(resources, (list, tuple, set, frozenset)):
        return list(cast("Iterable[object]", resources))
    raise UsageError(f"{what} gives a list of resources, as [pool]; not {resources!r}")


def _lifespan_of(module: ModuleType) -> Any:
    """Return a function that opens the resources of a module; None if the module has none.

    Web frameworks use the name too, with another parameter: ``lifespan(app)`` is none of ours.
    """
    found = vars(module).get("lifespan")
    if not callable(found):
        return None
    parameters = [*signature(found).parameters]
    if parameters != ["runtime"]:
        if len(parameters) == 1 and not parameters[0].endswith(("app", "_")):
            log.warning(
                "lifespan(%s) of %s is not run: its parameter must have the name runtime",
                parameters[0],
                module.__name__,
            )
        return None
    if iscoroutinefunction(found):
        raise UsageError(f"lifespan(runtime) of {module.__name__} must yield once: yield [pool]")
    return asynccontextmanager(found) if isasyncgenfunction(found) else found


def _check_transactions(registry: Registry, provider: Provider) -> None:
    for name in sorted(registry.activity_names):
        activity = registry.resolve_activity(name)
        if not activity.settings.transactional:
            continue
        if activity.is_async:
            raise UsageError(f"activity {name!r} is transactional, so it must be a plain function")
        if not provider.capabilities.transactions:
            raise UsageError(
                f"activity {name!r} is transactional, but the {provider.name} store cannot run "
                "user code in its transactions; SQLite can"
            )


async def _call_back(callback: Callable[[Alert], object], alert: Alert) -> None:
    try:
        answer = callback(alert)
        if isawaitable(answer):
            await answer
    except Exception:  # noqa: BLE001
        log.exception("an alert callback failed")


class _Parts:
    """The parts of one runtime that work in the background, from its start to its stop."""

    def __init__(self, worker: Worker) -> None:
        options, provider, registry = worker.options, worker.provider, worker.registry
        self.activities = ActivityDispatcher(worker)
        self.orchestrations = OrchestrationDispatcher(worker, self.activities)
        self.activities.complete_here = self.orchestrations.complete
        renewers = (
            LockRenewer(
                worker.clock,
                in_seconds(options.orchestration_lock_timeout),
                lambda: self.orchestrations.lock_tokens,
                provider.renew_orchestration_item_locks,
                self.orchestrations.lost_locks,
                partial(worker.observer.locks_renewed, "orchestration"),
            ),
            LockRenewer(
                worker.clock,
                in_seconds(options.activity_lock_timeout),
                lambda: self.activities.lock_tokens,
                provider.renew_work_item_locks,
                self.activities.lost_locks,
                partial(worker.observer.locks_renewed, "activity"),
            ),
        )
        # Time of a clock that is moved by hand stands still while the event loop is blocked.
        passes = not isinstance(worker.clock, ManualClock)
        own_thread = passes and provider.capabilities.other_loops
        self._renewals = LockRenewalThread(renewers, own_thread=own_thread)
        self._clock = worker.clock
        self._worker = WorkerInfo(
            worker_id=worker.worker_id,
            host=socket.gethostname(),
            process_id=os.getpid(),
            started_at_ms=worker.clock.now_ms(),
            framework_version=VERSION,
            handlers=tuple(sorted(registry.orchestration_keys)),
            activities=tuple(sorted(registry.activity_names)),
            slots=options.activity_slots,
            schedules=worker.schedules,
            keep=worker.keep,
        )
        self.alerts = BackgroundTasks()
        """Calls of the callbacks of ``on_alert``."""
        self.has_released = False
        """The store has released all locks of this runtime."""
        self._has_housekeeping = options.housekeeping
        self._housekeeping = Housekeeping(worker, self.orchestrations.intake, self._describe_worker)

    def _describe_worker(self) -> WorkerInfo:
        return msgspec.structs.replace(
            self._worker, busy=self.activities.busy, seen_at_ms=self._clock.now_ms()
        )

    def start(self) -> None:
        self._renewals.start()
        self.orchestrations.start()
        self.activities.start()
        if self._has_housekeeping:
            self._housekeeping.start()

    async def stop(self, drain_seconds: float) -> tuple[str, ...]:
        """Stop fetching, renew locks while running work ends, then release all locks.

        Returns the names of the activities whose code did not end. All background work has stopped
        afterwards, even if this is cancelled.
        """
        try:
            return await self._stop(drain_seconds)
        except BaseException:
            self.abort()
            raise

    async def _stop(self, drain_seconds: float) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_seconds
        await self.activities.stop_fetching()
        await self.activities.drain(drain_seconds)
        still_running = self.activities.code_running
        try:
            async with asyncio.timeout_at(max(deadline, loop.time()) + _RELEASE_SECONDS):
                await self._release_locks()
                self.has_released = True
        except TimeoutError:
            log.warning(
                "the store did not release all locks in time; stopping as a crash would: nothing "
                "is half done, and other workers continue when the locks have expired"
            )
            self.activities.abort()
            self.orchestrations.abort()
            self._housekeeping.abort()
        if self.alerts.tasks:
            await asyncio.wait(self.alerts.tasks, timeout=_RELEASE_SECONDS)
            self.alerts.cancel()
        await self._renewals.stop()
        await self.activities.attempts.close()
        left = self.activities.attempts.threads.abandoned + Counter(still_running)
        if left:
            log.warning(
                "still running, and abandoned: %s",
                ", ".join(f"{name} (x{count})" for name, count in sorted(left.items())),
            )
        return tuple(sorted(left))

    async def _release_locks(self) -> None:
        await self.orchestrations.stop()
        await self.activities.release_all()
        if self._has_housekeeping:
            await self._housekeeping.stop()

    def abort(self) -> None:
        self.activities.abort()
        self.orchestrations.abort()
        self._renewals.abort()
        self._housekeeping.abort()
        self.alerts.cancel()
