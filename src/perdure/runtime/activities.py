"""The activity dispatcher: takes locked work items, runs them, commits their outcomes.

Work items are fetched, or handed over by the turn that scheduled them. An outcome is committed with
the turn that it causes if the instance is live in this process, else through the orchestrator
queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from perdure.arguments import in_milliseconds, in_seconds
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
from perdure.model.wire import (
    activity_envelope,
    envelope,
    identity_of,
    unreadable_activity,
)
from perdure.providers.records import Claim, FetchedWork, SessionFetch
from perdure.runtime.attempts import (
    ActivityTasks,
    Attempts,
    CrashIsolation,
    LookAgain,
    RunningActivity,
    completed,
    failed,
    retry_delay_ms,
)
from perdure.runtime.executors import NotBegun
from perdure.runtime.metrics import GuardedSpan, SpanNote, log, log_failed_activity
from perdure.runtime.worker import BackgroundTasks, Backoff, FetchErrors, Worker, log_failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.engine.outcome import ScheduledActivity
    from perdure.runtime.attempts import Completion

_FETCHED_AT_ONCE_MAX = 200
_RETRY_ELSEWHERE_MS = 5_000
_ISOLATION_DELAY_MS = 500
_REDELIVERY_DELAY_MS = 1_000
_TAG_SECONDS = 2.0
"""After this time the log names an activity whose tag no worker takes."""
_FETCH_END_SECONDS = 2.0


class ActivityDispatcher:
    """Runs the activities of one runtime."""

    def __init__(self, worker: Worker) -> None:
        options = worker.options
        self._provider = worker.provider
        self._registry = worker.registry
        self._clock = worker.clock
        self._options = options
        self._owner = worker.worker_id
        self._observer = worker.observer
        self._unregistered = worker.unregistered
        self._fetch_errors = FetchErrors("activities", worker)
        self.attempts = Attempts(worker, self._heartbeat)
        self._lock_ms = in_milliseconds(options.activity_lock_timeout)
        # A waiting fetch does not notice locks that are taken meanwhile; the next one does.
        self._poll_ms = min(in_milliseconds(options.poll_interval), self._lock_ms)
        self._session_lock_ms = in_milliseconds(options.session_lock_timeout)
        self._names = worker.registry.activity_names
        self._takes = options.tags.matches
        self._takes_untagged = options.tags.matches(None)
        self._free_slots = options.activity_slots if options.run_activities else 0
        self._running: dict[str, RunningActivity] = {}
        self._by_key: dict[tuple[str, int, int], RunningActivity] = {}
        self._sessions: Counter[str] = Counter()
        """The number of activities in flight here, by session."""
        self._crash_isolation = CrashIsolation(options.max_attempts)
        self._background = BackgroundTasks()
        self._activity_tasks = ActivityTasks(self._run, self._on_error, self._background.tasks)
        self._fetching: asyncio.Task[None] | None = None
        self._stopping = False
        self._is_aborted = False
        self._noted_tags: set[tuple[str, str]] = set()
        self._slot_freed = asyncio.Event()
        self._session_ended = asyncio.Event()
        self.complete_here: Callable[[Completion, str], bool] = lambda _item, _token: False
        """Set by the runtime: hands a completion to an instance that is live in this process.
        Returns False if there is none."""

    # --- start and stop

    def start(self) -> None:
        if self._options.run_activities and self._names:
            self._fetching = asyncio.create_task(
                self._fetch_loop(), name="perdure-fetch-activities"
            )

    async def stop_fetching(self) -> None:
        self._stopping = self.attempts.is_stopping = True
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait((self._fetching,), timeout=_FETCH_END_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Let the running activities end; interrupt those that run longer."""
        self._activity_tasks.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._background.tasks:
                    await asyncio.wait(self._background.tasks)
        self._activity_tasks.close()
        interrupted = self._code_tasks
        for running in self._running.values():
            running.is_stopped = running.task is not None
            if running.scope is not None:
                running.scope.cancel()
        for task in interrupted:
            task.cancel("the runtime stops")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(in_seconds(self._options.cancel_grace)):
                if interrupted:
                    await asyncio.wait(interrupted)
                await self.attempts.threads.wait_for_abandoned()

    async def release_all(self) -> None:
        """Let outcomes under way reach the store, and release the work items without one."""
        while pending := self._background.tasks - self._code_tasks:
            await asyncio.wait(pending)
        released = list(self._running.values())
        await asyncio.gather(*(log_failure(self._release(running)) for running in released))
        for running in released:
            self.forget(running.lock_token)

    async def _release(self, running: RunningActivity) -> None:
        # A coroutine, so that an item which the store refuses keeps no other from its release.
        if not running.has_begun:
            await self._provider.abandon_work_item(running.lock_token, ignore_attempt=True)
            return
        again = activity_envelope(running.next_item(redelivered=running.redelivered + 1))
        await self._provider.ack_work_item(running.lock_token, None, again)

    @property
    def _code_tasks(self) -> set[asyncio.Task[None]]:
        """The tasks that run the code of an activity right now."""
        return {running.task for running in self._running.values() if running.task is not None}

    @property
    def code_running(self) -> list[str]:
        """The names of the activities whose code runs on the event loop."""
        return [each.item.name for each in self._running.values() if each.task is not None]

    def abort(self) -> None:
        self._stopping = self.attempts.is_stopping = self._is_aborted = True
        self._activity_tasks.close()
        for task in (*self._background.tasks, *filter(None, (self._fetching,))):
            task.cancel()
        self.attempts.abort()

    @property
    def lock_tokens(self) -> list[str]:
        """The work item locks to renew. Safe to read from another thread."""
        return list(self._running)

    @property
    def busy(self) -> int:
        return len(self._running)

    def lost_locks(self, tokens: frozenset[str]) -> None:
        """Interrupt the activities whose locks the store does not know any more."""
        for token in tokens:
            running = self._running.get(token)
            if running is not None:
                self._interrupt(running)

    # --- called by turns

    def _note_tag(self, name: str, tag: str) -> None:
        """Look after a moment whether another worker takes the tag, once for each activity."""
        if (name, tag) not in self._noted_tags:
            self._noted_tags.add((name, tag))
            asyncio.get_running_loop().call_later(_TAG_SECONDS, self._look_for_tag, name, tag)

    def _look_for_tag(self, name: str, tag: str) -> None:
        if not self._stopping and self._provider.capabilities.admin:
            self._background.spawn_logged(self._warn_of_tag(name, tag))

    async def _warn_of_tag(self, name: str, tag: str) -> None:
        depths = await self._provider.admin.get_queue_depths()
        for each in depths.activities:
            if (each.name, each.tag) == (name, tag) and each.visible and not each.locked:
                log.warning(
                    "activity %r waits for a worker that takes its tag %r, and this runtime does "
                    "not; start one with --tag %s, or RuntimeOptions(tags=TagFilter.only(%r))",
                    *(name, tag, tag, tag),
                )

    def claim(self, scheduled: ScheduledActivity) -> Claim | None:
        """Reserve a slot and a lock for an activity that a turn schedules, if it can run here."""
        event = scheduled.event
        if event.name not in self._names:
            self._unregistered.check_activity(event.name)
            return None
        if not (self._takes_untagged if event.tag is None else self._takes(event.tag)):
            if event.tag is not None:
                self._note_tag(event.name, event.tag)
            return None
        if self._free_slots <= 0 or self._stopping or event.session_id is not None:
            return None
        self._free_slots -= 1
        return Claim(lock_token=self._provider.new_lock_token(), lock_timeout_ms=self._lock_ms)

    def release_slot(self) -> None:
        """Free a slot: of an activity that has ended, or of a claim that was not committed."""
        self._free_slots += 1
        if self._free_slots == 1:  # the fetch loop waits only while there is none
            self._slot_freed.set()

    def run_claimed(self, item: work.ActivityExecute, claim: Claim) -> None:
        """Run an activity: the turn that claimed it is committed."""
        self._activity_tasks.launch(self._register(item, claim.lock_token))

    def cancel(self, instance_id: str, execution_id: int, activity_id: int) -> None:
        """Interrupt an activity that its orchestration has cancelled: its work item is gone."""
        running = self._by_key.get((instance_id, execution_id, activity_id))
        if running is not None:
            self._interrupt(running)

    def enqueue_completion(self, lock_token: str) -> None:
        """Commit a completion through the orchestrator queue: no turn here will consume it."""
        running = self._running.get(lock_token)
        if running is not None and running.completion is not None and not self._is_aborted:
            self._background.spawn(self._commit(running, completion=running.completion))

    def forget(self, lock_token: str) -> None:
        """Forget an activity: its outcome is committed, or is not wanted any more."""
        running = self._running.pop(lock_token, None)
        if running is None:
            return
        found = self._by_key.pop(running.key, None)
        if found is not running and found is not None:
            self._by_key[running.key] = found
        session_id = running.item.session_id
        if session_id is not None:
            self._sessions[session_id] -= 1
            self._sessions += Counter()  # drops the sessions whose count is 0
            if len(self._sessions) < self._options.sessions:
                self._session_ended.set()
        if running.redelivered:  # only these can have been isolated
            self._crash_isolation.ended(lock_token)
        self.release_slot()

    # --- fetching

    async def _fetch_loop(self) -> None:
        is_idle = True
        while not self._stopping:
            if self._free_slots <= 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            # A fetch that waits for work holds only one slot: turns can claim the others.
            size = 1 if is_idle else min(_FETCHED_AT_ONCE_MAX, self._free_slots)
            self._free_slots -= size
            try:
                found = await self._fetch(size, self._poll_ms if is_idle else 0)
            except BaseException as error:  # noqa: BLE001 - logged, or raised again, there
                self._free_slots += size
                await self._clock.sleep(self._fetch_errors.delay_after(error))
                continue
            self._fetch_errors.reset()
            self._free_slots += size - len(found)
            for fetched in found:
                try:
                    self._begin(fetched)
                except Exception as error:  # noqa: BLE001 - logged there
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
                lock_timeout_ms=self._session_lock_ms,
                only_owned=is_full,
            ),
            self._options.tags,
            self._names,
        )
        return await (self._until_session_ends(fetching) if is_full else fetching)

    async def _until_session_ends(
        self, fetching: Awaitable[list[FetchedWork]]
    ) -> list[FetchedWork]:
        """Stop a fetch that is limited to the sessions held here as soon as one of them ends."""
        self._session_ended.clear()
        found = asyncio.ensure_future(fetching)
        ended = asyncio.ensure_future(self._session_ended.wait())
        try:
            await asyncio.wait((found, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            found.cancel()
            await asyncio.wait((found,))  # a cancelled fetch releases what it has locked
        return [] if found.cancelled() else found.result()

    def _begin(self, fetched: FetchedWork) -> None:
        try:
            item = wire.decode_activity(fetched.body)
            if identity_of(item) != fetched.identity or item.name != fetched.name:
                raise CorruptData("read", f"its body is {item.name!r} of {identity_of(item)}")
        except CorruptData as error:
            item = unreadable_activity(fetched.identity, fetched.name)
            self._fail_unrun(item, fetched, f"undecodable: {error.message}")
            return
        if fetched.attempt_count > 1:
            self._observer.delivered_again("activity")
        if fetched.attempt_count > self._options.max_attempts:
            self._observer.activity_poisoned(item.name)
            self._fail_unrun(
                item,
                fetched,
                f"delivered {fetched.attempt_count} times without an outcome: "
                "it kills its process, or holds it up for longer than its lock lasts",
            )
            return
        if not self._crash_isolation.may_run(fetched.lock_token, fetched.attempt_count):
            self._background.spawn_logged(
                self._provider.abandon_work_item(
                    fetched.lock_token, _ISOLATION_DELAY_MS, ignore_attempt=True
                )
            )
            self.release_slot()
            return
        heartbeat = item.last_heartbeat if fetched.heartbeat is None else fetched.heartbeat
        redelivered = item.redelivered + max(0, fetched.attempt_count - 1)
        self._activity_tasks.launch(
            self._register(item, fetched.lock_token, heartbeat, redelivered)
        )

    def _fail_unrun(self, item: work.ActivityExecute, fetched: FetchedWork, message: str) -> None:
        """Fail an activity that cannot be run. The failure holds its stored body."""
        running = self._register(item, fetched.lock_token)
        failure = Failure(
            category=Category.POISON,
            message=f"activity {item.name!r} {message}",
            attempts=fetched.attempt_count,
            detail=fetched.body[:ERROR_TEXT_CHARACTERS_MAX],
        )
        self._complete(running, failed(item, failure))

    # --- running

    def _register(
        self,
        item: work.ActivityExecute,
        lock_token: str,
        last_heartbeat: str | None = None,
        redelivered: int = 0,
    ) -> RunningActivity:
        key = (item.instance_id, item.execution_id, item.activity_id)
        running = RunningActivity(item, lock_token, key, last_heartbeat, redelivered)
        self._running[lock_token] = self._by_key[key] = running
        if item.session_id is not None:
            self._sessions[item.session_id] += 1
        return running

    async def _run(self, running: RunningActivity) -> None:
        if running.cancelled:
            self.forget(running.lock_token)
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
            self._complete(running, failed(item, item.last_failure or late))
            return
        spans = self._observer.spans
        try:
            if spans is None:
                failure, result = await self.attempts.run(running, activity)
            else:
                note = SpanNote()
                with GuardedSpan(spans, item, note):
                    failure, result = await self.attempts.run(running, activity)
                    note.failure = failure
        except (CannotUnwrap, NotBegun) as error:
            await self._leave_to_others(running, error)
            return
        except LookAgain as later:
            running.task = None
            note_text = bytes(self.attempts.codec.encode(later.note, where="note")).decode()
            at_ms = self._clock.now_ms() + round(later.seconds * 1000)
            again = running.next_item(last_heartbeat=note_text)
            self._background.spawn(self._commit(running, retry=(again, at_ms)))
            return
        running.task = None  # the code has ended: the commit of its outcome is not interrupted
        if running.cancelled:
            self._observer.activity_ended(item, "cancelled", started_ms)
            self.forget(running.lock_token)
        elif failure is not None:
            self._observer.activity_ended(item, "failed", started_ms)
            self._fail(running, failure)
        else:
            self._observer.activity_ended(item, "success", started_ms)
            if result is not None:
                self._complete(running, completed(item, result))
            else:
                self.forget(running.lock_token)  # committed by its own transaction

    async def _leave_to_others(self, running: RunningActivity, reason: PerdureError) -> None:
        """Release an activity whose code, codec, thread or process is missing here."""
        running.task = None
        log.warning("%s", reason)
        await log_failure(
            self._provider.abandon_work_item(
                running.lock_token, _RETRY_ELSEWHERE_MS, ignore_attempt=True
            )
        )
        self.forget(running.lock_token)

    def _fail(self, running: RunningActivity, failure: Failure) -> None:
        item = running.item
        now_ms = self._clock.now_ms()
        delay_ms = retry_delay_ms(item, failure, now_ms)
        if delay_ms is None:
            self._complete(running, failed(item, failure))
            return
        log.info("activity %r attempt %d failed: %s", item.name, item.attempt, failure)
        again = running.next_item(attempt=item.attempt + 1, last_failure=failure)
        # On its own task: the activity's code may have cancelled the task on which it ran.
        self._background.spawn(self._commit(running, retry=(again, now_ms + delay_ms)))

    # --- heartbeats

    def _heartbeat(self, running: RunningActivity) -> None:
        """Store the last heartbeat of a running activity with a renewal of its lock."""
        if running.lock_token in self._running and not running.is_storing_heartbeat:
            running.is_storing_heartbeat = True
            self._background.spawn(self._store_heartbeat(running))

    async def _store_heartbeat(self, running: RunningActivity) -> None:
        """Store heartbeats until none is newer: those sent during a write need one write more."""
        stored: str | None = None
        try:
            while running.heartbeat is not stored:
                stored = running.heartbeat
                await log_failure(
                    self._provider.renew_work_item_lock(running.lock_token, self._lock_ms, stored)
                )
        finally:
            running.is_storing_heartbeat = False

    # --- outcomes

    def _complete(self, running: RunningActivity, completion: Completion) -> None:
        running.completion = completion
        if not self.complete_here(completion, running.lock_token):
            self._background.spawn(self._commit(running, completion=completion))
        if isinstance(completion, work.ActivityFailed):
            name = running.item.name
            is_known = name in self._names
            place = self._registry.resolve_activity(name).place if is_known else ""
            log_failed_activity(running.item, completion.failure, place)

    async def _commit(
        self,
        running: RunningActivity,
        *,
        completion: Completion | None = None,
        retry: tuple[work.ActivityExecute, int] | None = None,
    ) -> None:
        """Commit the outcome through the queues. A lost lock means that it is not wanted."""
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
                self._observer.commit_repeated()
                await self._clock.sleep(backoff.next_delay(retryable=error.retryable))
                continue
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - logged there
                self._on_error(running, error)
                return
            else:
                is_retry = retry is not None
                self._observer.activity_committed(is_retry=is_retry, name=running.item.name)
            self.forget(running.lock_token)
            return

    def _on_error(self, running: RunningActivity, error: BaseException) -> None:
        """Handle an unexpected error while running or completing the activity."""
        if not self._stopping:
            self._deliver_again(running.lock_token, running.item.name, error)
        elif isinstance(error, Exception):  # else the stop interrupted it, and releases it
            log.error("activity %r was interrupted by an error", running.item.name, exc_info=error)

    def _deliver_again(self, lock_token: str, name: str, error: BaseException) -> None:
        """Give up the lock, so that the activity is delivered again. The attempt counts."""
        if lock_token in self._running:
            self.forget(lock_token)
        else:
            self.release_slot()
        self._background.spawn_logged(
            self._provider.abandon_work_item(lock_token, _REDELIVERY_DELAY_MS)
        )
        log.error("activity %r is delivered again after an error", name, exc_info=error)

    def _interrupt(self, running: RunningActivity) -> None:
        """Stop an activity whose outcome is not wanted any more."""
        if running.cancelled:
            return
        running.cancelled = True
        if running.completion is not None:
            self.forget(running.lock_token)
            return
        if running.scope is not None:
            running.scope.cancel()
        if running.task is not None:
            running.task.cancel()
            self.attempts.check_end_later(running)
