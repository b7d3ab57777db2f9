"""The activity dispatcher: fetch or be handed a locked work item, run it, settle it.

A result leaves here only through a commit: together with the turn that it causes when the instance
is live in this process, through the orchestrator queue otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from perdure.client.messages import activity_envelope, envelope
from perdure.errors import (
    CannotUnwrap,
    CorruptData,
    LockLost,
    NotRegistered,
    PerdureError,
    ProviderError,
)
from perdure.limits import ERROR_TEXT_CHARACTERS_MAX
from perdure.model import wire, work
from perdure.model.failures import Category, Failure
from perdure.providers._shared.rules import new_lock_token
from perdure.providers.items import Claim, SessionFetch
from perdure.runtime.attempts import Attempts, completed
from perdure.runtime.background import Background, quietly
from perdure.runtime.failures import NotBegun
from perdure.runtime.missing import Missing
from perdure.runtime.observe import GuardedSpan, SpanNote, log
from perdure.runtime.retrying import Backoff, retry_delay_ms
from perdure.runtime.runners import Runners
from perdure.runtime.running import Running
from perdure.runtime.suspects import Suspects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.authoring.registry import Registry
    from perdure.clock import Clock
    from perdure.codec import Codec
    from perdure.engine.outcome import ScheduledActivity
    from perdure.providers.contract import Provider
    from perdure.providers.items import FetchedWork
    from perdure.runtime.executors import Executors
    from perdure.runtime.observe import Observer
    from perdure.runtime.options import RuntimeOptions
    from perdure.runtime.retrying import FetchTrouble
    from perdure.runtime.running import Completion

_FETCHED_AT_ONCE_MAX = 200
_ELSEWHERE_MS = 5_000
_APART_MS = 500
_AGAIN_MS = 1_000
_FETCH_END_SECONDS = 2.0


class ActivityDispatcher:
    """Runs the activities of one runtime."""

    def __init__(
        self,
        provider: Provider,
        registry: Registry,
        executors: Executors,
        *,
        codec: Codec,
        clock: Clock,
        options: RuntimeOptions,
        owner: str,
        observer: Observer,
        trouble: FetchTrouble,
    ) -> None:
        self._provider = provider
        self._registry = registry
        self._executors = executors
        self._attempts = Attempts(provider, executors, codec, clock)
        self._clock = clock
        self._options = options
        self._owner = owner
        self._observer = observer
        self._trouble = trouble
        self._poll_ms = round(options.poll_seconds * 1000)
        self._lock_ms = round(options.activity_lock_seconds * 1000)
        self._names = registry.activity_names
        self._missing = Missing(registry)
        self._takes = options.tags.matches
        self._takes_untagged = options.tags.matches(None)
        self._free = options.activity_slots if options.run_activities else 0
        self._running: dict[str, Running] = {}
        self._by_key: dict[tuple[str, int, int], Running] = {}
        self._sessions: Counter[str] = Counter()
        """Activities in flight here, by session."""
        self._suspects = Suspects(options.max_attempts)
        self._background = Background()
        self._tasks = self._background.tasks
        self._runners = Runners(self._run, self._give_up, self._tasks)
        self._stopping = False
        self._is_aborted = False
        self._slot_freed = asyncio.Event()
        self._session_ended = asyncio.Event()
        self.complete_here: Callable[[Completion, str], bool] = lambda _item, _token: False
        """Set by the runtime: gives a completion to an instance that is live in this process."""

    # --- life

    def start(self) -> None:
        self._fetching: asyncio.Task[None] | None = None
        if self._options.run_activities and self._names:
            self._fetching = asyncio.create_task(
                self._fetch_loop(), name="perdure-fetch-activities"
            )

    async def stop_fetching(self) -> None:
        self._stopping = self._attempts.is_stopping = True
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait((self._fetching,), timeout=_FETCH_END_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Let what runs finish; after that, interrupt it."""
        self._runners.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        self._runners.close()
        interrupted = self._code_tasks
        for running in self._running.values():
            running.is_cut_off = running.task is not None
            if running.scope is not None:
                running.scope.cancel()
        for task in interrupted:
            task.cancel("the runtime stops")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.cancel_grace_seconds):
                if interrupted:
                    await asyncio.wait(interrupted)
                await self._executors.settle_threads()

    async def give_back(self) -> None:
        """Let outcomes under way reach the store, and give back what has none."""
        while pending := self._tasks - self._code_tasks:
            await asyncio.wait(pending)
        returned = list(self._running.values())
        await asyncio.gather(*(quietly(self._return(running)) for running in returned))
        for running in returned:
            self._finish(running.lock_token)

    def _return(self, running: Running) -> Awaitable[None]:
        if not running.has_begun:
            return self._provider.abandon_work_item(running.lock_token, ignore_attempt=True)
        again = activity_envelope(running.again(redelivered=running.redelivered + 1))
        return self._provider.ack_work_item(running.lock_token, None, again)

    @property
    def _code_tasks(self) -> set[asyncio.Task[None]]:
        """Those that run the code of an activity right now."""
        return {running.task for running in self._running.values() if running.task is not None}

    @property
    def code_running(self) -> list[str]:
        """Names of the activities whose code runs on the event loop."""
        return [each.item.name for each in self._running.values() if each.task is not None]

    def abort(self) -> None:
        self._stopping = self._attempts.is_stopping = self._is_aborted = True
        self._runners.close()
        for task in (*self._tasks, *filter(None, (self._fetching,))):
            task.cancel()

    @property
    def lock_tokens(self) -> list[str]:
        """Every work item lock that must be renewed; may be asked from another thread."""
        return list(self._running)

    @property
    def busy(self) -> int:
        return len(self._running)

    def lost_locks(self, tokens: frozenset[str]) -> None:
        """The store says that nobody wants these any more."""
        for token in tokens:
            running = self._running.get(token)
            if running is not None:
                self._interrupt(running)

    # --- hand-over from the orchestration dispatcher

    def claim(self, scheduled: ScheduledActivity) -> Claim | None:
        """Reserve a slot for an activity that is about to be committed, if it can run here."""
        event = scheduled.event
        if event.name not in self._names:
            self._missing.activity(event.name)
            return None
        if (
            self._free <= 0
            or self._stopping
            or event.session_id is not None
            or not (self._takes_untagged if event.tag is None else self._takes(event.tag))
        ):
            return None
        self._free -= 1
        return Claim(lock_token=new_lock_token(), lock_timeout_ms=self._lock_ms)

    def unclaim(self, item: work.ActivityExecute, claim: Claim) -> None:
        """The commit that carried the claim did not happen."""
        self._release_slot()

    def run_claimed(self, item: work.ActivityExecute, claim: Claim) -> None:
        """The commit that carried the claim is durable: run the activity."""
        self._runners.launch(self._register(item, claim.lock_token))

    def cancel(self, instance_id: str, execution_id: int, activity_id: int) -> None:
        """The orchestration no longer wants it, and its work item is gone."""
        running = self._by_key.get((instance_id, execution_id, activity_id))
        if running is not None:
            self._interrupt(running)

    def settle_by_queue(self, lock_token: str) -> None:
        """No turn here will consume it: send the completion through the orchestrator queue."""
        running = self._running.get(lock_token)
        if running is not None and running.completion is not None and not self._is_aborted:
            self._background.spawn(self._settle(running, completion=running.completion))

    def heartbeat(self, running: Running) -> None:
        """Store what a running activity told last, with a renewal of its lock."""
        if running.lock_token in self._running and not running.is_being_told:
            running.is_being_told = True
            self._background.spawn(self._tell_store(running))

    async def _tell_store(self, running: Running) -> None:
        """What is told while the store writes waits for it: only the last one counts."""
        told: str | None = None
        try:
            while running.told is not told:
                told = running.told
                await quietly(
                    self._provider.renew_work_item_lock(running.lock_token, self._lock_ms, told)
                )
        finally:
            running.is_being_told = False

    # --- fetching

    async def _fetch_loop(self) -> None:
        is_idle = True
        while not self._stopping:
            if self._free <= 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            # While it waits for work it holds one slot, so that the others can be claimed.
            size = 1 if is_idle else min(_FETCHED_AT_ONCE_MAX, self._free)
            self._free -= size
            try:
                found = await self._fetch(size, self._poll_ms if is_idle else 0)
            except BaseException as error:  # noqa: BLE001 - told, or raised again, there
                self._free += size
                await self._clock.sleep(self._trouble.seconds_after(error))
                continue
            self._trouble.is_over()
            self._free += size - len(found)
            for fetched in found:
                try:
                    self._take(fetched)
                except Exception as error:  # noqa: BLE001 - told there
                    self._deliver_again(fetched.lock_token, fetched.name, error)
            is_idle = len(found) < size

    async def _fetch(self, limit: int, poll_ms: int) -> list[FetchedWork]:
        is_full = len(self._sessions) >= self._options.sessions
        fetching = self._provider.fetch_work_items(
            limit,
            self._lock_ms,
            poll_ms,
            SessionFetch(
                owner_id=self._owner,
                lock_timeout_ms=round(self._options.session_lock_seconds * 1000),
                only_owned=is_full,
            ),
            self._options.tags,
            self._names,
        )
        return await (self._until_session_ends(fetching) if is_full else fetching)

    async def _until_session_ends(
        self, fetching: Awaitable[list[FetchedWork]]
    ) -> list[FetchedWork]:
        """Then others may begin, and a fetch that waits for these alone would not hear of them."""
        self._session_ended.clear()
        found = asyncio.ensure_future(fetching)
        ended = asyncio.ensure_future(self._session_ended.wait())
        try:
            await asyncio.wait((found, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            found.cancel()
            await asyncio.wait((found,))  # it gives back what it may have got
        return [] if found.cancelled() else found.result()

    def _take(self, fetched: FetchedWork) -> None:
        try:
            item = wire.decode_activity(fetched.body)
        except CorruptData as error:
            item = work.ActivityExecute(
                instance_id=fetched.identity.instance_id,
                execution_id=fetched.identity.execution_id,
                activity_id=fetched.identity.activity_id,
                name=fetched.name,
            )
            self._refuse(item, fetched, Category.POISON, f"undecodable: {error.message}")
            return
        if fetched.attempt_count > self._options.max_attempts:
            self._observer.activity_poisoned(item.name)
            self._refuse(
                item,
                fetched,
                Category.POISON,
                f"delivered {fetched.attempt_count} times without an outcome: "
                "it kills its process, or holds it up for longer than its lock lasts",
            )
            return
        if not self._suspects.admit(fetched.lock_token, fetched.attempt_count):
            self._background.spawn_quietly(
                self._provider.abandon_work_item(fetched.lock_token, _APART_MS, ignore_attempt=True)
            )
            self._release_slot()
            return
        told = item.last_heartbeat if fetched.heartbeat is None else fetched.heartbeat
        redelivered = item.redelivered + max(0, fetched.attempt_count - 1)
        self._runners.launch(self._register(item, fetched.lock_token, told, redelivered))

    def _refuse(
        self, item: work.ActivityExecute, fetched: FetchedWork, category: Category, message: str
    ) -> None:
        """End an activity that cannot be run; what was stored travels in the failure."""
        running = self._register(item, fetched.lock_token)
        failure = Failure(
            category=category,
            message=f"activity {item.name!r} {message}",
            attempts=fetched.attempt_count,
            detail=fetched.body[:ERROR_TEXT_CHARACTERS_MAX],
        )
        self._conclude(running, _failed(item, failure))

    # --- running

    def _register(
        self,
        item: work.ActivityExecute,
        lock_token: str,
        last_heartbeat: str | None = None,
        redelivered: int = 0,
    ) -> Running:
        key = (item.instance_id, item.execution_id, item.activity_id)
        running = Running(item, lock_token, key, last_heartbeat, redelivered)
        self._running[lock_token] = self._by_key[key] = running
        if item.session_id is not None:
            self._sessions[item.session_id] += 1
        return running

    async def _run(self, running: Running) -> None:
        if running.cancelled:
            self._finish(running.lock_token)
            return
        item = running.item
        try:
            activity = self._registry.resolve_activity(item.name)
        except NotRegistered as error:
            await self._leave_to_others(running, error)
            return
        started_ms = self._clock.now_ms()
        if item.deadline_ms is not None and started_ms >= item.deadline_ms:
            late = Failure(
                category=Category.TIMEOUT, type_name="TimeoutError", message="deadline passed"
            )
            self._conclude(running, _failed(item, item.last_failure or late))
            return
        spans = self._observer.spans
        try:
            if spans is None:
                failure, result = await self._attempts.run(running, activity)
            else:
                note = SpanNote()
                with GuardedSpan(spans, item, note):
                    failure, result = await self._attempts.run(running, activity)
                    note.failure = failure
        except (CannotUnwrap, NotBegun) as error:
            await self._leave_to_others(running, error)
            return
        running.task = None  # the code has ended: nobody may interrupt the commit of its outcome
        if running.cancelled:
            self._observer.activity_ended(item, "cancelled", started_ms)
            self._finish(running.lock_token)
        elif failure is not None:
            self._observer.activity_ended(item, "failed", started_ms)
            self._fail(running, failure)
        else:
            self._observer.activity_ended(item, "success", started_ms)
            if result is not None:
                self._conclude(running, completed(item, result))
            else:
                self._finish(running.lock_token)  # settled with its own transaction

    async def _leave_to_others(self, running: Running, reason: PerdureError) -> None:
        """Somebody else may have the code, or the codec, that is missing here."""
        running.task = None
        log.warning("%s", reason)
        await quietly(
            self._provider.abandon_work_item(running.lock_token, _ELSEWHERE_MS, ignore_attempt=True)
        )
        self._finish(running.lock_token)

    def _retry_delay_ms(self, item: work.ActivityExecute, failure: Failure) -> int | None:
        plan = item.retry
        if plan is None or item.attempt >= plan.max_attempts:
            return None
        if any(name in plan.never for name in (failure.type_name, *failure.lineage)):
            return None
        delay_ms = retry_delay_ms(plan, item.attempt)
        if item.deadline_ms is not None and self._clock.now_ms() + delay_ms >= item.deadline_ms:
            return None
        return delay_ms

    def _fail(self, running: Running, failure: Failure) -> None:
        item = running.item
        delay_ms = self._retry_delay_ms(item, failure)
        if delay_ms is None:
            self._conclude(running, _failed(item, failure))
            return
        log.info("activity %r attempt %d failed: %s", item.name, item.attempt, failure)
        again = running.again(attempt=item.attempt + 1, last_failure=failure)
        due_ms = self._clock.now_ms() + delay_ms
        # On a task of its own: the code may have cancelled the one on which it ran.
        self._background.spawn(self._settle(running, retry=(again, due_ms)))

    # --- outcomes

    def _conclude(self, running: Running, completion: Completion) -> None:
        running.completion = completion
        if not self.complete_here(completion, running.lock_token):
            self._background.spawn(self._settle(running, completion=completion))

    async def _settle(
        self,
        running: Running,
        *,
        completion: Completion | None = None,
        retry: tuple[work.ActivityExecute, int] | None = None,
    ) -> None:
        """Commit the outcome through the queues; a lost lock means that nobody wants it."""
        backoff = Backoff()
        while True:
            try:
                await self._provider.ack_work_item(
                    running.lock_token,
                    None if completion is None else envelope(completion),
                    None if retry is None else activity_envelope(retry[0], visible_at_ms=retry[1]),
                )
            except LockLost as error:
                log.info("outcome of %r is dropped: %s", running.item.name, error)
            except ProviderError as error:
                log.warning("outcome of %r is sent again: %s", running.item.name, error)
                await self._clock.sleep(backoff.next_delay(retryable=error.retryable))
                continue
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - told there
                self._give_up(running, error)
                return
            self._finish(running.lock_token)
            return

    def _give_up(self, running: Running, error: BaseException) -> None:
        """Running or settling it failed in a way that nobody has thought of."""
        if not self._stopping:
            self._deliver_again(running.lock_token, running.item.name, error)
        elif isinstance(error, Exception):  # else interrupted, and given back
            log.error("activity %r was interrupted by an error", running.item.name, exc_info=error)

    def _deliver_again(self, lock_token: str, name: str, error: BaseException) -> None:
        """Here or elsewhere; its lock must not be renewed for ever. The attempt counts."""
        if lock_token in self._running:
            self._finish(lock_token)
        else:
            self._release_slot()
        self._background.spawn_quietly(self._provider.abandon_work_item(lock_token, _AGAIN_MS))
        log.error("activity %r is delivered again after an error", name, exc_info=error)

    def _finish(self, lock_token: str) -> None:
        running = self._running.pop(lock_token, None)
        if running is None:
            return
        found = self._by_key.pop(running.key, None)
        if found is not running and found is not None:
            self._by_key[running.key] = found
        session_id = running.item.session_id
        if session_id is not None:
            self._sessions[session_id] -= 1
            self._sessions += Counter()  # drops those that came to nothing
            if len(self._sessions) < self._options.sessions:
                self._session_ended.set()
        if running.redelivered:  # else it was never suspected
            self._suspects.ended(lock_token)
        self._release_slot()

    settled = _finish
    """For the orchestration dispatcher: the turn that consumed this completion is durable."""

    def _release_slot(self) -> None:
        self._free += 1
        if self._free == 1:  # whoever waits for a slot found none
            self._slot_freed.set()

    def _interrupt(self, running: Running) -> None:
        """Tell the code that its outcome is not wanted, and stop it."""
        if running.cancelled:
            return
        running.cancelled = True
        if running.completion is not None:
            self._finish(running.lock_token)
        elif running.scope is not None:
            running.scope.cancel()
        if running.completion is None and running.task is not None:
            running.task.cancel()
            self._executors.expect_end(running)


def _failed(item: work.ActivityExecute, failure: Failure) -> work.ActivityFailed:
    return work.ActivityFailed(
        instance_id=item.instance_id,
        execution_id=item.execution_id,
        activity_id=item.activity_id,
        failure=failure,
    )
