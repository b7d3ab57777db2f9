"""The orchestration dispatcher: starts and fetches instances, keeps them live, releases them.

``TurnScheduler`` decides when a turn runs. The turns themselves are in ``turns``.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from perdure.arguments import in_milliseconds, in_seconds
from perdure.client.endings import Finished, PendingStart
from perdure.engine.inbox import is_mail
from perdure.errors import CorruptData, NotRegistered
from perdure.ids import new_id
from perdure.model.failures import Block, BlockReason
from perdure.model.wire import envelope
from perdure.providers.records import FetchedOrchestration, OrchestrationFilter, VersionRange
from perdure.runtime.commit_builder import FRAMEWORK_VERSION
from perdure.runtime.instances import (
    Arrival,
    Ended,
    Intake,
    LiveCache,
    LiveInstance,
    Runnable,
    arrivals_of,
)
from perdure.runtime.turns import TurnRunner, TurnTooLong
from perdure.runtime.worker import FetchErrors, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.authoring.definitions import Orchestration
    from perdure.model import work
    from perdure.runtime.activities import ActivityDispatcher
    from perdure.runtime.instances import IntakeResult

SLICE_SECONDS: Final = 0.005
FIRST_TURNS_MAX: Final = 128
"""First turns whose commits are under way: enough for a group commit to be worth it."""
_FETCHES_AT_ONCE_MAX: Final = 64


class TurnScheduler:
    """Runs due turns in slices of the event loop's time, running instances before new ones.

    A program may start 20,000 instances at once. If all their first turns ran before any second
    one, all other code on the event loop would wait for seconds, and memory would hold all of them
    half done. So a slice ends after a few milliseconds, and new instances begin only as fast as the
    store commits them. Until then their starts are not answered.
    """

    def __init__(self, begin: Callable[[PendingStart], None]) -> None:
        self._begin = begin
        """Runs the first turn of a new instance."""
        self._loop = asyncio.get_running_loop()
        self._due: deque[Callable[[], None]] = deque()
        self._new: deque[PendingStart] = deque()
        self._first_turns = 0
        self._is_scheduled = False

    def __bool__(self) -> bool:
        """Return True if a turn waits to be run."""
        return bool(self._due or self._new)

    def run(self, turn: Callable[[], None]) -> None:
        """Run a turn soon."""
        self._due.append(turn)
        if not self._is_scheduled:
            self._schedule()

    def begin(self, new: PendingStart) -> None:
        """Begin a new instance when there is room for its commit; ``begun`` must follow."""
        self._new.append(new)
        if not self._is_scheduled and self._may_begin():
            self._schedule()

    def begun(self) -> None:
        """Note that the commit of a first turn is durable, or will never be."""
        self._first_turns -= 1
        if not self._is_scheduled and self._may_begin():
            self._schedule()

    def clear(self) -> list[PendingStart]:
        """Drop all due turns; return the starts that had not begun."""
        new = list(self._new)
        self._due.clear()
        self._new.clear()
        return new

    def _may_begin(self) -> bool:
        return bool(self._new) and self._first_turns < FIRST_TURNS_MAX

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        until = perf_counter() + SLICE_SECONDS
        due, new = self._due, self._new
        # Collect garbage once after the slice instead of once every few turns: objects that die
        # within the slice are never visited, and full collections happen half as often.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            if new and self._may_begin():
                self._begin_one()  # at least one each slice, however many turns are due
            while due or (new and self._may_begin()):
                if due:
                    due.popleft()()
                else:
                    self._begin_one()
                if perf_counter() >= until:
                    break
        finally:
            if was_collecting:
                gc.enable()
            self._is_scheduled = False
            if due or (new and self._may_begin()):
                self._schedule()

    def _begin_one(self) -> None:
        self._first_turns += 1
        self._begin(self._new.popleft())


class OrchestrationDispatcher:
    """The instances of one runtime. Implements ``LocalInstances`` for its client side."""

    def __init__(self, worker: Worker, activities: ActivityDispatcher) -> None:
        options = worker.options
        self._provider = worker.provider
        self._clock = worker.clock
        self._options = options
        self._observer = worker.observer
        self._unregistered = worker.unregistered
        # Not the worker id: two runtimes can have the same one, but each has its instances.
        self._owner = new_id()
        self._fetch_errors = FetchErrors("orchestrations", worker)
        self.intake = Intake(worker)
        self._filter = OrchestrationFilter(
            framework_versions=(VersionRange(minimum=(0, 0, 0), maximum=FRAMEWORK_VERSION),),
            handlers=worker.registry.startable_keys,
        )
        self._lock_ms = in_milliseconds(options.orchestration_lock_timeout)
        # A waiting fetch does not notice locks that are taken meanwhile; the next one does.
        self._poll_ms = min(in_milliseconds(options.poll_interval), self._lock_ms)
        self._keeps_locks = worker.provider.capabilities.hot_path and not options.always_replay
        self._live = LiveCache(
            options.cached_instances, options.cached_events, activities.enqueue_completion
        )
        self.loop = asyncio.get_running_loop()
        self._scheduler = TurnScheduler(self._begin)
        self._fetch_tasks: list[asyncio.Task[None]] = []
        self._turns = TurnRunner(
            worker,
            self._owner,
            intake=self.intake,
            activities=activities,
            live=self._live,
            scheduler=self._scheduler,
            keep_lock_ms=self._lock_ms if self._keeps_locks else None,
        )
        self._background = self._turns.background
        self._releaser = self._turns.releaser
        self._watchdog = self._turns.watchdog
        self._stopping = False

    # --- start and stop

    def start(self) -> None:
        self._watchdog.start()
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
        self._watchdog.stop()

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
        self._watchdog.stop()

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

    def check_arrival(self, item: work.ExternalRaised | work.QueueMessage) -> None:
        """Raise PayloadError if the instance is live here and waits for another type.

        Only for the first message since its last turn that fits a wait: a later one may be for
        another wait.
        """
        live = self._live.get(item.instance_id)
        if live is None or live.busy or live.sent_in_turn == live.execution.turn:
            return
        if live.execution.check_arrival(item):
            live.sent_in_turn = live.execution.turn

    def terminated(self, instance_id: str) -> None:
        """Stop working on an instance that an operator has ended."""
        live = self._live.get(instance_id)
        if live is not None:
            self.lost_locks(frozenset({live.lock_token}))

    def check_start(
        self, item: work.StartOrchestration, target: Orchestration[..., Any] | str
    ) -> None:
        """Log a warning if this runtime does not have the orchestration, or has other code."""
        self._unregistered.check_orchestration(item.name, item.version)
        if not isinstance(target, str):
            self._unregistered.check_code(target)

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
        live = LiveInstance(
            self._provider.new_lock_token(), execution, envelope(item), pending.ended
        )
        self._live.add(live)
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
        if fetched.attempt_count > 1:
            self._observer.delivered_again("orchestration")
        stale = self._live.get(fetched.item.instance_id)
        if stale is not None and not stale.busy:
            self._live.forget(stale)  # its lock had expired, so its state may be old
        if self._releaser.block_remembered(fetched):
            return
        match self._read(fetched):
            case Block() as block:
                instance_id = fetched.item.instance_id
                self._releaser.block(fetched.item, instance_id, fetched.lock_token, block)
            case Ended() as ended:
                self._releaser.consume_late_messages(fetched, ended)
            case Runnable(execution=execution, arrivals=arrivals):
                live = LiveInstance(fetched.lock_token, execution)
                live.history_bytes = sum([len(record.data) for record in fetched.item.history])
                self._live.add(live)
                self._turns.run(live, arrivals)

    def _read(self, fetched: FetchedOrchestration) -> IntakeResult:
        item, now_ms = fetched.item, self._clock.now_ms()
        try:
            return self._watchdog.run(item.instance_id, self.intake.read, fetched, now_ms)
        except TurnTooLong as error:
            if isinstance(error.result, Runnable):
                error.result.execution.close()
            return self.intake.block(item, BlockReason.LIMIT, str(error))

    def _on_more_messages(self, fetched: FetchedOrchestration) -> None:
        """Take messages for an instance that this runtime has locked already."""
        live = self._live.get(fetched.item.instance_id)
        if live is None or live.lock_token != fetched.lock_token:
            self._releaser.release(fetched.lock_token)
            return
        try:
            arrivals = arrivals_of(fetched.item)
        except CorruptData:
            # Release it: the next fetch replays it, and blocks it with the reason.
            self._live.forget(live)
            self._releaser.release(fetched.lock_token)
            return
        if (
            not live.busy
            and not live.execution.wants_mail
            and all(is_mail(arrival.item) for arrival in arrivals)
        ):
            live.mail += arrivals
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
        if live.start is None and live.mail:
            self._releaser.return_mail(live)
        elif live.start is None:
            self._releaser.release(live.lock_token)

    async def _release_idle_loop(self) -> None:
        """Release the locks of instances that have waited for long."""
        idle_ms = in_milliseconds(self._options.idle_timeout)
        while True:
            await self._clock.sleep(max(in_seconds(self._options.idle_timeout) / 4, 0.05))
            for live in self._live.idle_since(self._clock.now_ms() - idle_ms):
                self._release(live)
