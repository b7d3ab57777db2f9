"""The storage seam: an abstract class whose docstrings are the contract.

Rules for every method: it may be called from many tasks at once. Time is integer milliseconds of
the store's one clock. A lock is live iff ``locked_until > now``; a message is visible iff
``visible_at <= now``. Ids, tags and sizes are checked (``InvalidValue``) before anything is
written. Errors are ``ProviderError`` with ``retryable`` set, or the state errors named below; a
call that raised has written nothing, except for an unknown outcome, which is retryable.
"Repeats" says what happens when a call is made again because its answer was lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from perdure.errors import LockLost, NotSupported
from perdure.providers._shared import refusals

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType
    from typing import Self

    from perdure.clock import Clock
    from perdure.model.failures import Block
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.capabilities import Capabilities
    from perdure.providers.items import (
        EnqueueCondition,
        FetchedOrchestration,
        FetchedWork,
        HistoryRecord,
        KvEntry,
        OrchestrationFilter,
        OrchestratorMessage,
        SessionFetch,
        TagFilter,
        TurnCommit,
        WorkerMessage,
    )
    from perdure.providers.watching import Watch


class Provider(ABC):
    """History, two queues, locks, sessions, custom status and state of many instances."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name of the provider, for people."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Version of the provider, for people."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this provider declares; constant for the life of the handle."""

    def clock(self) -> Clock | None:
        """The store's own clock, if leases and timers follow another one than this machine's.

        Runtimes and clients that were given no clock take their time from it. Usable before
        ``open`` and from any thread.
        """
        return None

    # --- life of the handle

    @abstractmethod
    async def open(self) -> None:
        """Make the store ready: create, migrate or recover it, then start background work.

        Effect: after it returns, every other method may be called from this event loop.
        Repeats: opening an open handle does nothing.
        Errors: StoreRefused (newer format, unsafe place, held by another process), StoreMoved,
        StoreUnavailable, CorruptData; each names the store and the way out.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish what was accepted, wake waiting fetches with None, release the store.

        Repeats: closing a closed handle does nothing. Errors: later calls raise StoreClosed.
        """

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- turns

    @abstractmethod
    def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> Awaitable[FetchedOrchestration | None]:
        """Lock one instance that has visible messages and hand out all of them as one batch.

        Effect: a candidate has a visible message that no live lock covers, is not suspended, is
        past its ``not_before``, fits the filter, and is known (it has an instance or history, or
        a message with ``start`` in the batch). The one whose oldest message has the lowest
        (visible_at, message id) wins. A live lock excludes it, except, with ``owner`` given, a
        lock kept by that same owner: then only messages that this lock does not yet carry are
        handed out, with ``continues`` set. Every visible message of the instance is tagged with
        the token, whatever older token it carries, and its attempt count rises by one.
        Name, version and execution come from the instance; without one from its stored
        OrchestrationStarted metadata if there is history; else from the ``start`` message, with
        execution 1. The batch is in queue order, except that a message that was sent for later
        has its place by the moment when it came due. An unknown instance's messages are skipped
        (attempts untouched), and become dead letters when older than the orphan grace.
        Atomic with: choice, lock, tags and attempt counts. A lost race tries the next candidate.
        Visible when: returns as soon as there is work; None after ``poll_timeout_ms`` at the
        latest (+200 ms), at once with 0. None and an error both mean that no lock is held.
        Repeats: a lost answer leaves a lock that expires.
        Errors: unreadable history is not one: the item comes with ``history_error`` set.
        """

    @abstractmethod
    def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> Awaitable[None]:
        """Commit a turn.

        Effect: in this order, all or nothing: the token must be live; each ``settled_work`` token
        must be live and its item is removed; consumed messages are deleted, later arrivals stay;
        name + version create the instance (with the parent) or overwrite both; the execution
        exists from now on (RUNNING); current execution = max(current, commit's); the pinned
        framework version is set; ``history_delta`` is inserted, never reading old rows; status,
        output and completion time are set, also with an empty delta; custom status; state
        changes (see ``get_kv_value``); worker items are inserted, then cancelled activities and
        cancelled timers are deleted by identity (so an item both scheduled and cancelled is
        gone; unknown identities are ignored); orchestrator items are inserted (no instance is
        created for them). ``not_before`` and a block are cleared, and if the
        instance has ended hereby, so is a suspension. With ``keep_lock_ms`` the same
        token lives on from now, for the owner that fetched it; else the lock is released and
        messages tagged but not consumed are free again.
        Repeats: LockLost, or with a kept lock DuplicateEvent; never applied twice. Therefore a
        commit that keeps the lock and adds items must add history (InvalidValue).
        Errors: LockLost, DuplicateEvent (lock still held), InvalidValue (event id below 1).
        """

    @abstractmethod
    def abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None = None,
        *,
        ignore_attempt: bool = False,
        block: Block | None = None,
    ) -> Awaitable[None]:
        """Give the lock back without a turn.

        Effect: the lock is released and the batch untagged, in its order. ``delay_ms`` sets the
        instance's ``not_before``: nothing of it is fetched until then; message visibility is not
        touched; the next ack clears it. ``ignore_attempt`` takes one attempt off the batch, not
        below 0. ``block`` marks the instance Blocked until the next ack or ``resume_instance``.
        Repeats: LockLost. Errors: LockLost for a token that is not the current one; an expired
        token that nobody took over is still good.
        """

    @abstractmethod
    def renew_orchestration_item_lock(self, lock_token: str, extend_for_ms: int) -> Awaitable[None]:
        """Let the lock live until now + ``extend_for_ms``.

        Repeats: extends again. Errors: LockLost if the token is not live.
        """

    async def renew_orchestration_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        """Renew many at once; returns the tokens that were lost."""
        lost: set[str] = set()
        for token in lock_tokens:
            try:
                await self.renew_orchestration_item_lock(token, extend_for_ms)
            except LockLost:
                lost.add(token)
        return frozenset(lost)

    def start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> Awaitable[bool]:
        """Hot path: create an instance and commit its first turn at once.

        Effect: as enqueueing ``start`` with ABSENT, fetching it with ``lock_token`` for
        ``owner``, and acking ``commit``, in one transaction. Returns False, writing nothing, if
        an instance or a queued start with that id exists. ``commit.metadata`` must carry name
        and version. Repeats: False.
        Errors: NotSupported without the ``hot_path`` capability.
        """
        raise NotSupported("start_orchestration_item", f"{self.name} does not declare hot_path")

    # --- history

    @abstractmethod
    def read(self, instance_id: str) -> Awaitable[list[HistoryRecord]]:
        """History of the latest execution, by event id; empty for an unknown instance."""

    @abstractmethod
    def read_with_execution(
        self,
        instance_id: str,
        execution_id: int,
        *,
        after_event_id: int = 0,
        limit: int | None = None,
    ) -> Awaitable[list[HistoryRecord]]:
        """One execution's history, by event id, past ``after_event_id``; empty if unknown."""

    @abstractmethod
    def append_with_execution(
        self, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
    ) -> Awaitable[None]:
        """Tools only: insert events as given. Creates no instance and no execution.

        Errors: DuplicateEvent; InvalidValue for an event id below 1. Nothing is written then.
        """

    # --- worker queue

    @abstractmethod
    def enqueue_for_worker(self, message: WorkerMessage) -> Awaitable[None]:
        """Add a work item; visible at once or at its time. Runtimes do this through an ack."""

    @abstractmethod
    def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> Awaitable[FetchedWork | None]:
        """Lock the oldest eligible work item.

        Effect: eligible is visible, not locked (or its lock expired), its tag fits (None: untagged
        only), its name is in ``activities`` (None: any). Without ``session`` only items without
        one; with it also items whose session is free, expired or held by this owner (with
        ``only_owned``: held by this owner). Lowest message id first. Attempts rise by one. A
        session item claims or refreshes its session: owner, lease from now, activity time now.
        Whether the instance still exists or runs does not matter.
        Atomic with: item lock, attempt and session claim; a lost claim tries the next item.
        Visible when: as ``fetch_orchestration_item``. TagFilter.none() returns None at once.
        """

    async def fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> list[FetchedWork]:
        """As ``fetch_work_item``, but up to ``limit`` items at once; empty instead of None.

        A provider may lock them in one commit. It returns what there is and waits only for the
        first.
        """
        fetched = await self.fetch_work_item(
            lock_timeout_ms, poll_timeout_ms, session, tag_filter, activities
        )
        found: list[FetchedWork] = []
        while fetched is not None:
            found.append(fetched)
            if len(found) == limit:
                break
            fetched = await self.fetch_work_item(
                lock_timeout_ms, 0, session, tag_filter, activities
            )
        return found

    @abstractmethod
    def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> Awaitable[None]:
        """Remove the item and, in the same transaction, enqueue what follows from it.

        Effect: ``completion`` goes to the orchestrator queue, visible at once, whatever became of
        the instance; ``retry`` goes to the worker queue in its place, with its own visibility and
        attempt count 0; at most one of the two. A session item refreshes its live session's
        activity time.
        Repeats: LockLost. Errors: LockLost if the token is not live (cancelled, taken over,
        expired, already acked, instance deleted): nothing is enqueued. InvalidValue if the
        completion is routed to another instance than the item's.
        """

    def settle_in_transaction(
        self, lock_token: str, settle: Callable[[Any], OrchestratorMessage]
    ) -> Awaitable[None]:
        """Run user code on the store's own connection, and settle its work item with it.

        Effect: what ``settle(connection)`` writes, the removal of the item and the completion that
        it returns are committed together. It runs in a thread of the provider and may hold
        everybody up; it must neither commit nor roll back.
        Repeats: LockLost. Errors: as ``ack_work_item``; what ``settle`` raises is raised, and
        nothing stays. NotSupported without the ``transactions`` capability.
        """
        raise NotSupported("settle_in_transaction", f"{self.name} does not declare transactions")

    @abstractmethod
    def abandon_work_item(
        self, lock_token: str, delay_ms: int | None = None, *, ignore_attempt: bool = False
    ) -> Awaitable[None]:
        """Unlock the item, visible at now + ``delay_ms``; the session lease stays.

        Repeats: LockLost. Errors: LockLost for a token that is not the current one; an expired
        token that nobody took over is still good.
        """

    @abstractmethod
    def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> Awaitable[None]:
        """Let the item's lock live until now + ``extend_for_ms``; store the heartbeat if given.

        Also refreshes the activity time of the item's live session. Repeats: extends again.
        Errors: LockLost if the token is not live; this is how a worker learns of cancellation.
        """

    async def renew_work_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        """Renew many at once; returns the tokens that were lost."""
        lost: set[str] = set()
        for token in lock_tokens:
            try:
                await self.renew_work_item_lock(token, extend_for_ms)
            except LockLost:
                lost.add(token)
        return frozenset(lost)

    # --- sessions

    @abstractmethod
    def renew_session_lock(
        self, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
    ) -> Awaitable[int]:
        """Extend every live session of these owners that was active within the idle timeout.

        Returns how many. Idle ones (``last_activity <= now - idle_timeout``) are left to expire;
        an expired lease is never revived.
        """

    @abstractmethod
    def cleanup_orphaned_sessions(self) -> Awaitable[int]:
        """Remove sessions whose lease has expired and that have no item, locked or not.

        Returns how many.
        """

    # --- orchestrator queue

    @abstractmethod
    def enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> Awaitable[bool]:
        """Add a message for an instance; True if it was taken.

        Effect: visible at now + ``delay_ms``, which wins over the message's own time; else at its
        own time, else at once. Creates no instance; a message with ``start`` makes the instance
        visible to administration as Pending. ``condition`` (None: ALWAYS) is checked in the same
        transaction. ABSENT and REPLACE need a ``start`` (InvalidValue).
        Errors: NotFound and InstanceFinished with ALIVE; NotARoot with REPLACE for a child whose
        parent is in the store and has not ended: it may wait for that child.
        Repeats: ALWAYS and ALIVE add another message; ABSENT returns False.
        """

    async def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> list[bool]:
        """Add many; each as if alone, in order. A provider may commit them together.

        Errors: InvalidValue before anything is written, if one of them is not valid, and for the
        condition ``ALIVE``, which could refuse one after others were taken. With ``REPLACE``
        NotARoot, as for one; then any number of the others, in order, may have been taken.
        """
        refusals.check_enqueue_many(messages, delay_ms, condition)
        return [
            await self.enqueue_for_orchestrator(message, delay_ms, condition)
            for message in messages
        ]

    # --- what clients read

    @abstractmethod
    def get_custom_status(
        self, instance_id: str, last_seen_version: int = 0
    ) -> Awaitable[tuple[str | None, int] | None]:
        """(status, version) if the version is above ``last_seen_version``; else None."""

    @abstractmethod
    def get_kv_value(self, instance_id: str, key: str) -> Awaitable[str | None]:
        """The live value: changes of the current execution over the state before it.

        Changes of an execution are kept apart until it ends (``status.ends_execution``), then
        merged; a cleared key hides an older value; clear-all hides every older key. Missing key or
        instance: None. Pruning never removes keys; deleting the instance does.
        """

    @abstractmethod
    def get_kv_all_values(self, instance_id: str) -> Awaitable[dict[str, KvEntry]]:
        """All live values by key, sorted by key."""

    @abstractmethod
    def watch(self, instance_id: str) -> Watch:
        """A context manager that notices commits which may concern the instance.

        Enter it before reading; then ``await watch.wait(timeout_ms)`` returns True as soon as
        anything may have changed since entering or since the last wait, False after the timeout.
        False alarms are allowed; a missed change only until the timeout.
        """

    @abstractmethod
    def admin(self) -> ProviderAdmin | None:
        """The administration of this store, or None without the capability."""
