"""The runtime: a client that also runs orchestrations and activities. Owns all background work."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from perdure.arguments import check_kind
from perdure.authoring.registry import Registry
from perdure.client.client import Client, TraceCarrier, check_loop
from perdure.codec import JSON
from perdure.errors import UsageError
from perdure.noise import unguessable
from perdure.providers.items import EnqueueCondition, WorkerInfo
from perdure.runtime.activities import ActivityDispatcher
from perdure.runtime.executors import Executors
from perdure.runtime.housekeeping import Housekeeping, seen
from perdure.runtime.keeper import KeeperThread, LockKeeper
from perdure.runtime.observe import Observer, log
from perdure.runtime.options import RuntimeOptions
from perdure.runtime.orchestrations import OrchestrationDispatcher
from perdure.runtime.retrying import FetchTrouble
from perdure.runtime.sources import check_not_reading, check_sources
from perdure.runtime.watchdog import Watchdog
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
    from types import ModuleType, TracebackType
    from typing import Self

    from perdure.authoring.registry import Handler
    from perdure.client.client import IfExists
    from perdure.client.view import Finished
    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.errors import StoreClosed
    from perdure.model import work
    from perdure.providers.contract import Provider
    from perdure.runtime.observe import Sink, SpanMaker

_REPLACE = EnqueueCondition.REPLACE  # found at once: members of an enum are looked up in Python
_GIVE_BACK_SECONDS = 5.0
"""For a store that does not answer, after the time to drain."""
_CLOSE_SECONDS = 5.0
"""For a store that did not answer."""


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
            check_sources(self.registry)
        self.observer = Observer(self.clock)
        self.worker_id = self.options.worker_id or f"worker-{secrets.token_hex(8)}"
        self._running: _Parts | None = None
        self.left_behind: tuple[str, ...] = ()
        """What still ran when this runtime had stopped: activities by their names, or the store.
        Python does not end a process before its threads have ended."""
        self._stopped = asyncio.Event()
        self._end: StoreClosed | None = None
        """Why it cannot go on."""

    async def __aenter__(self) -> Self:
        if self._running is not None:
            raise UsageError("this runtime runs already; make another one")
        check_not_reading()
        await super().__aenter__()
        self._running = _Parts(self, self._on_closed)
        self._running.start()
        log.info(
            "perdure %s on %s serves %s and %s",
            VERSION,
            self.provider.name,
            _counted(len(self.registry.orchestration_keys), "orchestration", "orchestrations"),
            _counted(len(self.registry.activity_names), "activity", "activities"),
        )
        for text in self.registry.misfits():
            log.warning("%s", text)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running, self._running = self._running, None
        try:
            if running is not None:
                self.left_behind = await running.stop(self.options.drain_seconds)
        finally:
            # A store that took everything back may close in peace; of another one nothing is hoped.
            is_out = running is not None and not running.has_given_back
            try:
                async with asyncio.timeout(_CLOSE_SECONDS if is_out else None):
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
                "serve() hears signals, which only the main thread can: use async with instead"
            )
        self._stopped.clear()
        self._end = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with self:
                await self._stopped.wait()
                if self._end is None:
                    log.info("draining; a second signal ends the process at once")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        if self._end is not None:
            raise self._end

    def _on_closed(self, error: StoreClosed) -> None:
        self._end = error
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

    # --- what being a worker makes faster: no detour over the store for local instances

    def _begin(
        self, item: work.StartOrchestration, delay_ms: int | None, condition: EnqueueCondition
    ) -> Awaitable[asyncio.Future[Any] | None] | None:
        running = self._running
        if running is None:
            return None
        check_loop(running.loop)
        if delay_ms is not None or condition is _REPLACE:
            return None
        return running.orchestrations.begin(item)

    async def _submit_many(
        self, items: Sequence[work.StartOrchestration], delay_ms: int | None, if_exists: IfExists
    ) -> list[asyncio.Future[Any] | None]:
        running = self._running
        if running is not None:
            check_loop(running.loop)
        if running is None or delay_ms is not None or if_exists != "get":
            return await super()._submit_many(items, delay_ms, if_exists)
        # Nobody is put out of memory for these: what does not fit waits in the queue.
        begun = [
            running.orchestrations.begin(item) for item in items[: running.orchestrations.room]
        ]
        answers = await asyncio.gather(
            *(each for each in begun if each is not None), return_exceptions=True
        )
        left = iter(answers)
        endings: list[Any] = [None if each is None else next(left) for each in begun]
        endings += [None] * (len(items) - len(begun))
        queued = [item for item, ending in zip(items, endings, strict=True) if ending is None]
        if queued:
            await super()._submit_many(queued, delay_ms, if_exists)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return endings

    def _finishes_here(self, instance_id: str) -> Finished | None:
        if self._running is None:
            return None
        live = self._running.orchestrations.live_instance(instance_id)
        return None if live is None else live.finished

    def abort(self) -> None:
        """Stop dead, as a crash would: nothing is finished, no lock is given back. For tests."""
        running, self._running = self._running, None
        if running is not None:
            running.abort()

    @property
    def is_busy(self) -> bool:
        """A turn, a commit or an activity is under way here."""
        parts = self._running
        return parts is not None and (parts.activities.busy > 0 or parts.orchestrations.is_busy)

    async def terminate(self, id: str, reason: str = "") -> None:  # noqa: A002
        await super().terminate(id, reason)
        running = self._running
        live = None if running is None else running.orchestrations.live_instance(id)
        if running is not None and live is not None:
            # Else that is heard of only when the lock is to be renewed.
            running.orchestrations.lost_locks(frozenset({live.lock_token}))

    def observe(self, exporter: Sink | SpanMaker | TraceCarrier) -> None:
        """Send metrics, spans or both to an exporter: ``OpenTelemetry()``, ``PrometheusMetrics()``.

        A failing exporter never affects the work.
        """
        self.observer.subscribe(exporter)
        if isinstance(exporter, TraceCarrier):
            super().observe(exporter)

    def metrics_snapshot(self) -> dict[str, int]:
        """Counts since this runtime started."""
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
    """Everything that runs in the background of one runtime."""

    def __init__(self, runtime: Runtime, closed: Callable[[StoreClosed], None]) -> None:
        self.loop = asyncio.get_running_loop()
        options, provider, clock = runtime.options, runtime.provider, runtime.clock
        self._watchdog = Watchdog(options.turn_warn_seconds, options.turn_abort_seconds)
        self._executors = Executors(options, runtime.codec, runtime.worker_id)
        self.activities = ActivityDispatcher(
            provider,
            runtime.registry,
            self._executors,
            codec=runtime.codec,
            clock=clock,
            options=options,
            owner=runtime.worker_id,
            observer=runtime.observer,
            trouble=FetchTrouble("activities", closed),
        )
        self.orchestrations = OrchestrationDispatcher(
            provider,
            runtime.registry,
            self.activities,
            codec=runtime.codec,
            clock=clock,
            options=options,
            # A name may be given twice, or again before its first bearer has ended; what is live in
            # this runtime is nobody else's.
            owner=unguessable(),
            framework_version=VERSION,
            observer=runtime.observer,
            watchdog=self._watchdog,
            trouble=FetchTrouble("orchestrations", closed),
        )
        self.activities.complete_here = self.orchestrations.complete
        self._executors.send_heartbeat = self.activities.heartbeat
        keepers = (
            LockKeeper(
                clock,
                options.orchestration_lock_seconds,
                lambda: self.orchestrations.lock_tokens,
                provider.renew_orchestration_item_locks,
                self.orchestrations.lost_locks,
            ),
            LockKeeper(
                clock,
                options.activity_lock_seconds,
                lambda: self.activities.lock_tokens,
                provider.renew_work_item_locks,
                self.activities.lost_locks,
            ),
        )
        self._keepers = KeeperThread(keepers, own_thread=provider.capabilities.other_loops)
        worker = WorkerInfo(
            worker_id=runtime.worker_id,
            host=socket.gethostname(),
            process_id=os.getpid(),
            started_at_ms=clock.now_ms(),
            framework_version=VERSION,
            handlers=tuple(sorted(runtime.registry.orchestration_keys)),
            activities=tuple(sorted(runtime.registry.activity_names)),
            slots=options.activity_slots,
        )
        self.has_given_back = False
        self._has_housekeeping = options.housekeeping
        self._housekeeping = Housekeeping(
            provider,
            self.orchestrations.intake,
            clock=clock,
            options=options,
            owner=runtime.worker_id,
            describe=lambda: seen(worker, busy=self.activities.busy, now_ms=clock.now_ms()),
        )

    def start(self) -> None:
        self._watchdog.start()
        self._keepers.start()
        self.orchestrations.start()
        self.activities.start()
        if self._has_housekeeping:
            self._housekeeping.start()

    async def stop(self, drain_seconds: float) -> tuple[str, ...]:
        """Stop fetching, keep renewing while what runs ends, then give everything back.

        Gives the names of the activities whose code did not end. Nothing goes on after it, even if
        it is cancelled.
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
        deaf = self.activities.code_running
        try:
            async with asyncio.timeout_at(max(deadline, loop.time()) + _GIVE_BACK_SECONDS):
                await self._give_back()
                self.has_given_back = True
        except TimeoutError:
            log.warning(
                "the store did not take everything back in time; stopping as a crash would: "
                "nothing is half done, and others go on when the locks have expired"
            )
            self.activities.abort()
            self.orchestrations.abort()
            self._housekeeping.abort()
        await self._keepers.stop()
        await self._executors.close()
        self._watchdog.stop()
        left = self._executors.in_threads + Counter(deaf)
        if left:
            log.warning(
                "still running, and given up: %s",
                ", ".join(f"{name} (x{count})" for name, count in sorted(left.items())),
            )
        return tuple(sorted(left))

    async def _give_back(self) -> None:
        await self.orchestrations.stop()
        await self.activities.give_back()
        if self._has_housekeeping:
            await self._housekeeping.stop()

    def abort(self) -> None:
        self.activities.abort()
        self.orchestrations.abort()
        self._keepers.abort()
        self._housekeeping.abort()
        self._executors.abort()
        self._watchdog.stop()
