"""The orchestration dispatcher: starts and fetches instances, keeps them live, releases them.

The turns themselves run in ``turn_runner``.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from perdure.arguments import in_seconds
from perdure.authoring.definitions import parse_version
from perdure.client.waiting import PendingStart
from perdure.errors import CorruptData, NotRegistered
from perdure.model import wire
from perdure.model.failures import BlockReason
from perdure.providers.envelopes import envelope
from perdure.providers.records import FetchedOrchestration, OrchestrationFilter, VersionRange
from perdure.runtime.background import BackgroundTasks
from perdure.runtime.commit_builder import facts_of
from perdure.runtime.intake import Blocked, Ended, Intake, Runnable
from perdure.runtime.live_instances import Arrival, LiveCache, LiveInstance, LockReleaser
from perdure.runtime.metrics import UnregisteredHandlerLog
from perdure.runtime.turn_runner import TurnRunner, TurnScheduler
from perdure.runtime.watchdog import TurnAborted

if TYPE_CHECKING:
    from perdure.authoring.registry import Registry
    from perdure.client.waiting import Finished
    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.model import work
    from perdure.providers.contract import Provider
    from perdure.runtime.activities import ActivityDispatcher
    from perdure.runtime.background import FetchErrors
    from perdure.runtime.intake import IntakeResult
    from perdure.runtime.metrics import Observer
    from perdure.runtime.options import RuntimeOptions
    from perdure.runtime.watchdog import Watchdog

_FETCHES_AT_ONCE_MAX = 64


class OrchestrationDispatcher:
    """The instances of one runtime. Implements ``LocalInstances`` for its client side."""

    def __init__(
        self,
        provider: Provider,
        registry: Registry,
        activities: ActivityDispatcher,
        *,
        codec: Codec,
        clock: Clock,
        options: RuntimeOptions,
        owner: str,
        framework_version: str,
        observer: Observer,
        watchdog: Watchdog,
        fetch_errors: FetchErrors,
    ) -> None:
        self._provider = provider
        self._clock = clock
        self._options = options
        self._owner = owner
        self._watchdog = watchdog
        self._fetch_errors = fetch_errors
        self._unregistered = UnregisteredHandlerLog(registry)
        self.intake = Intake(registry, codec, framework_version, options.max_attempts)
        self._version = parse_version(framework_version)
        self._filter = OrchestrationFilter(
            framework_versions=(VersionRange(minimum=(0, 0, 0), maximum=self._version),),
            handlers=registry.orchestration_keys,
        )
        self._poll_ms = round(in_seconds(options.poll_interval) * 1000)
        self._lock_ms = round(in_seconds(options.orchestration_lock_timeout) * 1000)
        self._keeps_locks = provider.capabilities.hot_path and not options.always_replay
        self._live = LiveCache(
            options.cached_instances, options.cached_events, activities.enqueue_completion
        )
        self.loop = asyncio.get_running_loop()
        self._scheduler = TurnScheduler(self._begin)
        self._fetch_tasks: list[asyncio.Task[None]] = []
        self._background = BackgroundTasks()
        self._releaser = LockReleaser(provider, clock, observer, self._background)
        self._turns = TurnRunner(
            provider,
            self.intake,
            activities,
            self._live,
            self._scheduler,
            self._releaser,
            clock=clock,
            owner=owner,
            observer=observer,
            watchdog=watchdog,
            unregistered=self._unregistered,
            background=self._background,
            keep_lock_ms=self._lock_ms if self._keeps_locks else None,
        )
        self._stopping = False

    # --- start and stop

    def start(self) -> None:
        if self._options.run_orchestrations:
            self._fetch_tasks = [
                self.loop.create_task(self._fetch_loop(), name="perdure-fetch-turns"),
                self.loop.create_task(self._release_idle_loop(), name="perdure-release-idle"),
            ]

    async def stop(self) -> None:
        """Fetch no more, wait for the commits under way, release every lock."""
        self._stopping = True
        self._turns.stop_keeping()
        self._live.wake()
        for task in self._fetch_tasks:
            task.cancel()
        await asyncio.gather(*self._fetch_tasks, return_exceptions=True)
        while self.is_busy:
            pending = {live.ended for live in self._live if live.busy} | self._background.tasks
            if pending:
                await asyncio.wait(pending, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)
        for live in self._live:
            self._release(live)
        await asyncio.gather(*self._background.tasks)

    def abort(self) -> None:
        """Stop without writing to the store. Waiting callers then look at the store."""
        self._stopping = self._turns.is_aborted = True
        self._turns.stop_keeping()
        self._background.cancel()
        for task in self._fetch_tasks:
            task.cancel()
        for pending in self._scheduler.clear():
            self._turns.answer_start(pending)
        for live in self._live:
            live.close()

    @property
    def is_busy(self) -> bool:
        return (
            bool(self._scheduler)
            or bool(self._background.tasks)
            or any(live.busy for live in self._live)
        )

    @property
    def live_count(self) -> int:
        return len(self._live)

    # --- locks

    @property
    def lock_tokens(self) -> list[str]:
        """The instance locks to renew. Safe to read from another thread."""
        return [live.lock_token for live in self._live if live.start is None]

    def lost_locks(self, tokens: frozenset[str]) -> None:
        """Drop the instances whose locks are lost. The commit of a busy one finds out itself."""
        for live in self._live:
            if live.lock_token in tokens and not live.busy:
                self._live.forget(live)

    # --- the client of this process

    @property
    def room(self) -> int:
        """The number of instances that can be started without evicting a live one."""
        return self._live.room

    def ended(self, instance_id: str) -> Finished | None:
        """Return the future of the instance's end; None if it is not live here."""
        live = self._live.get(instance_id)
        return None if live is None else live.ended

    def terminated(self, instance_id: str) -> None:
        """Stop working on an instance that an operator has ended."""
        live = self._live.get(instance_id)
        if live is not None:
            self.lost_locks(frozenset({live.lock_token}))

    def begin(self, item: work.StartOrchestration) -> PendingStart | None:
        """Create an instance and commit its first turn. None: enqueue the start instead."""
        if self._stopping or not self._keeps_locks or not self._options.run_orchestrations:
            return None
        pending = PendingStart(item, self.loop)
        self._scheduler.begin(pending)
        return pending

    def _begin(self, pending: PendingStart) -> None:
        item = pending.item
        if (
            pending.committed.done()  # the caller was cancelled
            or self._stopping
            or item.instance_id in self._live
            or not self._has_room()
        ):
            self._turns.answer_start(pending)
            return
        try:
            execution = self.intake.begin(item, kv={}, now_ms=self._clock.now_ms())
        except NotRegistered:
            self._unregistered.check_orchestration(item.name, item.version)
            self._turns.answer_start(pending)
            return
        facts = facts_of(execution, None, self._version)
        live = LiveInstance(
            self._provider.new_lock_token(), execution, facts, envelope(item), pending.ended
        )
        self._live.add(live)
        live.busy = True
        self._turns.run(live, [Arrival(item)], pending)

    # --- completions of activities that ran here

    def complete(self, item: work.ActivityCompleted | work.ActivityFailed, work_token: str) -> bool:
        """Take the completion of an activity. Returns False if its instance is not live here."""
        live = self._live.get(item.instance_id)
        if live is None or live.execution.execution_id != item.execution_id:
            return False
        live.inbox.append(Arrival(item, None, work_token))
        if not live.busy:
            live.busy = True
            self._scheduler.run(partial(self._turns.run_inbox, live))
        return True

    # --- fetching

    async def _fetch_loop(self) -> None:
        count = 1
        while not self._stopping:
            if not self._has_room():
                await self._live.wait_for_room()
                continue
            fetches = [self._fetch(0 if count > 1 else self._poll_ms) for _ in range(count)]
            answers = await asyncio.gather(*fetches, return_exceptions=True)
            # This runtime has locked the instances that were found, even if other fetches failed.
            found = [each for each in answers if isinstance(each, FetchedOrchestration)]
            for fetched in found:
                self._scheduler.run(partial(self._on_fetched, fetched))
            error = next((each for each in answers if isinstance(each, BaseException)), None)
            if error is not None:
                await self._clock.sleep(self._fetch_errors.delay_after(error))
                continue
            self._fetch_errors.reset()
            self._turns.start_deadline.reset()
            count = min(count * 2, _FETCHES_AT_ONCE_MAX) if len(found) == count else 1

    async def _fetch(self, poll_ms: int) -> FetchedOrchestration | None:
        return await self._provider.fetch_orchestration_item(
            self._lock_ms, poll_ms, self._filter, self._owner if self._keeps_locks else None
        )

    def _on_fetched(self, fetched: FetchedOrchestration) -> None:
        if fetched.continues:
            self._on_more_messages(fetched)
            return
        stale = self._live.get(fetched.item.instance_id)
        if stale is not None and not stale.busy:
            self._live.forget(stale)  # its lock had expired, so its state may be old
        if self._releaser.block_remembered(fetched):
            return
        match self._read(fetched):
            case Blocked(block=block):
                self._releaser.block(fetched.item.instance_id, fetched.lock_token, block)
            case Ended() as ended:
                self._releaser.consume_late_messages(fetched, ended)
            case Runnable(execution=execution, parent=parent, arrivals=arrivals):
                facts = facts_of(execution, parent, self._version)
                live = LiveInstance(fetched.lock_token, execution, facts)
                self._live.add(live)
                live.busy = True
                self._turns.run(live, arrivals)

    def _read(self, fetched: FetchedOrchestration) -> IntakeResult:
        result: IntakeResult | None = None
        try:
            with self._watchdog.guard(fetched.item.instance_id):
                result = self.intake.read(fetched, self._clock.now_ms())
        except TurnAborted:
            if not self._watchdog.aborted_at:
                raise
        too_long = self._watchdog.too_long()
        if too_long is None:
            assert result is not None
            return result
        if isinstance(result, Runnable):
            result.execution.close()
        return self.intake.blocked(fetched.item, BlockReason.LIMIT, str(too_long))

    def _on_more_messages(self, fetched: FetchedOrchestration) -> None:
        """Take messages for an instance that this runtime has locked already."""
        live = self._live.get(fetched.item.instance_id)
        if live is None or live.lock_token != fetched.lock_token:
            self._releaser.release(fetched.lock_token)
            return
        try:
            arrivals = [
                Arrival(wire.decode_item(delivery.body), delivery.message_id)
                for delivery in fetched.item.messages
            ]
        except CorruptData:
            # Release it: the next fetch replays it, and blocks it with the reason.
            self._live.forget(live)
            self._releaser.release(fetched.lock_token)
            return
        live.inbox.extend(arrivals)
        if not live.busy:
            live.busy = True
            self._turns.run_inbox(live)

    # --- room and idle instances

    def _has_room(self) -> bool:
        """Return True if one more instance fits; evict an idle one if necessary."""
        if self._live.room:
            return True
        oldest = self._live.oldest_idle()
        if oldest is None:
            return False
        self._release(oldest)
        return True

    def _release(self, live: LiveInstance) -> None:
        """Drop an idle instance and release its lock. Its next message goes to the queue."""
        self._live.forget(live)
        if live.start is None:
            self._releaser.release(live.lock_token)

    async def _release_idle_loop(self) -> None:
        """Release the locks of instances that have waited for long."""
        idle_ms = round(in_seconds(self._options.idle_timeout) * 1000)
        while True:
            await self._clock.sleep(max(in_seconds(self._options.idle_timeout) / 4, 0.05))
            for live in self._live.idle_since(self._clock.now_ms() - idle_ms):
                self._release(live)
