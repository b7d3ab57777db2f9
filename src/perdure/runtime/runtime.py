"""The runtime: a client that also runs orchestrations and activities."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from perdure.arguments import check_kind, in_seconds
from perdure.authoring.definitions import Registry
from perdure.client.client import Client, TraceCarrier
from perdure.clock import ManualClock
from perdure.codec import JSON
from perdure.errors import UsageError
from perdure.providers.records import WorkerInfo
from perdure.runtime.activities import ActivityDispatcher
from perdure.runtime.executors import check_not_loading, check_process_activities
from perdure.runtime.housekeeping import Housekeeping, LockRenewalThread, LockRenewer
from perdure.runtime.metrics import Observer, UnregisteredHandlerLog, log
from perdure.runtime.orchestrations import OrchestrationDispatcher
from perdure.runtime.worker import RuntimeOptions, Worker
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable
    from types import ModuleType, TracebackType
    from typing import Self

    from perdure.authoring.definitions import Handler
    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.errors import StoreClosed
    from perdure.providers.contract import Provider
    from perdure.runtime.metrics import Sink, SpanMaker

_RELEASE_SECONDS = 5.0
"""Time for the store to release the locks, after the time to drain."""
_CLOSE_SECONDS = 5.0
"""Time to close a store that did not release the locks in time."""


class Runtime(Client):
    """Runs the given handlers on a store: ``async with Runtime("shop.db", [checkout]) as runtime``.

    ``handlers`` are orchestrations, activities, or modules that hold them.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Provider,
        handlers: Iterable[Handler | ModuleType],
        *,
        options: RuntimeOptions | None = None,
        codec: Codec = JSON,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(store, codec=codec, clock=clock)
        self.registry = Registry(handlers)
        self.options = RuntimeOptions() if options is None else options
        check_kind(self.options, RuntimeOptions, "options", "RuntimeOptions(...)")
        _check_transactions(self.registry, self.provider)
        if self.options.run_activities:
            check_process_activities(self.registry)
        self.observer = Observer(self.clock)
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
        await super().__aenter__()
        worker = Worker(
            worker_id=self.worker_id,
            provider=self.provider,
            registry=self.registry,
            codec=self.codec,
            clock=self.clock,
            options=self.options,
            observer=self.observer,
            unregistered=UnregisteredHandlerLog(self.registry),
            on_closed=self._on_closed,
        )
        self._running = _Parts(worker)
        self._running.start()
        self._local = self._running.orchestrations
        log.info(
            "perdure %s on %s serves %s and %s",
            VERSION,
            self.provider.name,
            _counted(len(self.registry.orchestration_keys), "orchestration", "orchestrations"),
            _counted(len(self.registry.activity_names), "activity", "activities"),
        )
        for text in self.registry.incompatible_versions():
            log.warning("%s", text)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running, self._running, self._local = self._running, None, None
        try:
            if running is not None:
                self.left_behind = await running.stop(in_seconds(self.options.drain_timeout))
        finally:
            # If locks could not be released, the store may hang: limit the time to close it.
            may_hang = running is not None and not running.has_released
            try:
                async with asyncio.timeout(_CLOSE_SECONDS if may_hang else None):
                    await super().__aexit__(exc_type, exc, traceback)
            except TimeoutError:
                log.warning("the store did not close: something in it still runs")
                self.left_behind = (*self.left_behind, self.provider.name)

    async def serve(self) -> None:
        """Run until SIGTERM or SIGINT, then drain. A second signal ends the process at once.

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
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with self:
                await self._stopped.wait()
                if self._store_closed is None:
                    log.info("draining; a second signal ends the process at once")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        if self._store_closed is not None:
            raise self._store_closed

    def _on_closed(self, error: StoreClosed) -> None:
        self._store_closed = error
        self._stopped.set()

    def _on_signal(self, number: int) -> None:
        if self._stopped.is_set():
            os._exit(128 + number)  # as safe as a crash: locks expire, nothing is half done
        self._stopped.set()

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncGenerator[None]:
        """For ASGI frameworks: ``FastAPI(lifespan=runtime.lifespan)``."""
        async with self:
            yield

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

    def metrics_snapshot(self) -> dict[str, int]:
        """Return the counts since this runtime started."""
        return dict(self.observer.counts)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


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
            ),
            LockRenewer(
                worker.clock,
                in_seconds(options.activity_lock_timeout),
                lambda: self.activities.lock_tokens,
                provider.renew_work_item_locks,
                self.activities.lost_locks,
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
        )
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
