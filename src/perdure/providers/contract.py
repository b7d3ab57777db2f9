"""The storage contract: the docstrings of ``Provider`` are its text.

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

from perdure.errors import NotSupported
from perdure.ids import new_id
from perdure.limits import MAIL_BYTES_MAX, MAIL_MAX, check_id
from perdure.providers import rules, validation
from perdure.providers.records import EnqueueCondition, TagFilter, TagMode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Self

    from perdure.clock import Clock
    from perdure.model.failures import Block
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.records import (
        Capabilities,
        FetchedOrchestration,
        FetchedWork,
        HistoryRecord,
        KvEntry,
        OrchestrationFilter,
        OrchestratorMessage,
        SessionFetch,
        TurnCommit,
        WorkerMessage,
    )
    from perdure.providers.waiting import Watch


class Openable(ABC):
    """Verbs that can be called while a handle is open."""

    @abstractmethod
    def _require_open(self, operation: str) -> None:
        """Raise StoreClosed unless the handle is open in this process."""

    def _check_instance(self, operation: str, instance_id: str) -> None:
        """Raise InvalidValue for a bad id, and the errors of the two other methods."""
        self._require_open(operation)
        check_id(instance_id, "instance id")
        self._require_sound(operation, instance_id)

    def _require_sound(self, operation: str, instance_id: str) -> None:  # noqa: B027 - optional
        """Raise CorruptData for an instance that the store refuses because it is damaged."""


class Provider(Openable):
    """History, two queues, locks, sessions, custom status and state of many instances.

    A public verb checks that the store is open and that its arguments are valid, fills in defaults,
    and calls the verb with an underscore that follows it here. A store implements that one: what it
    must do is the docstring of the public verb. It may be a coroutine function, or return a future.
    One that has a body here is optional.
    """

    mail_max = MAIL_MAX
    mail_bytes_max = MAIL_BYTES_MAX
    """The limit of mail that waits for one instance, see ``enqueue_for_orchestrator``."""

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
        """The features of this provider; constant for the life of the handle."""

    def clock(self) -> Clock | None:
        """The clock that leases and timers follow; None if it is this machine's.

        With the capability ``injected_clock`` it is the clock that was handed in. Runtimes and
        clients that were given no clock take their time from it. Usable before ``open`` and from
        any thread.
        """
        return None

    def new_lock_token(self) -> str:
        """Return a token for a lock that the caller takes: unguessable and unique.

        A store may begin it with a mark of this handle, to find the locks of a process that died.
        """
        return new_id()

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

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- turns

    def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> Awaitable[FetchedOrchestration | None]:
        """Lock one instance that has visible messages and hand out a batch of them.

        Effect: a candidate has a visible message that no live lock covers, is not suspended, is
        past its ``not_before``, fits the filter, and is known (it has an instance or history, or
        a message with ``start`` in the batch). The one whose oldest message has the lowest
        (visible_at, message id) wins. A live lock excludes it, except, with ``owner`` given, a lock
        kept by that owner: then messages that it does not yet carry are handed out, with
        ``continues`` set. Each message of the batch gets the token, and its attempt count rises by
        one. A delivery counts only if its turn could be committed: a store that can write locks
        while commits fail delivers nothing twice until they succeed.
        Batch: the oldest visible messages within ``BATCH_..._MAX`` for all that the lock carries;
        at least one. If some are left, as many that are not mail (``rules.is_mail``) and a start
        are added; mail follows after the next commit, behind other instances. It is in queue order;
        what was sent for later has its place by the moment when it came due.
        Name, version and execution: of the instance; without one from OrchestrationStarted if there
        is history; else from the ``start``, with execution 1. Messages of an unknown instance are
        skipped (attempts untouched), and become dead letters when older than the orphan grace.
        Atomic with: choice, lock, tags and attempt counts. A lost race tries the next candidate.
        Order: concurrent fetches of one owner through one handle take effect in the order in which
        they began, so that the messages of an instance are in their order over all the answers.
        Visible when: returns as soon as there is work; None after ``poll_timeout_ms`` at the
        latest (+200 ms), at once with 0. The end of a lock that was taken during the wait need not
        end it, so poll no longer than a lock lasts. None and an error both mean that no lock is
        held; a lost answer leaves a lock that expires.
        Errors: unreadable history is not one: the item comes with ``history_error`` set.
        """
        self._require_open("fetch_orchestration_item")
        validation.check_fetch(lock_timeout_ms, poll_timeout_ms, owner)
        return self._fetch_orchestration_item(lock_timeout_ms, poll_timeout_ms, filter, owner)

    @abstractmethod
    def _fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None,  # noqa: A002
        owner: str | None,
    ) -> Awaitable[FetchedOrchestration | None]: ...

    def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> Awaitable[None]:
        """Commit a turn.

        Effect: in this order, all or nothing: the token must be live; the event before the first
        new one, or ``after_event_id`` without new events, must not be beyond the last stored event
        of the execution (no holes: the turn is refused with LockLost); each ``settled_work`` token
        must be live and its item is removed; consumed messages are deleted, later arrivals stay
        (consumed means gone: each must carry this token, else the turn is refused with LockLost);
        name + version create the instance (with the parent) or overwrite both; the execution
        exists from now on (RUNNING); current execution = max(current, commit's); the pinned
        framework version is set; ``history_delta`` is inserted; status, output and completion
        time are set, also with an empty delta; custom status; state changes (see
        ``get_kv_value``); worker items are inserted, then cancelled activities and cancelled
        timers are deleted by identity (so an item both scheduled and cancelled is gone; unknown
        identities are ignored); orchestrator items are inserted (no instance is created for
        them). ``not_before`` and a block are cleared, and if the instance has ended hereby, so is
        a suspension. With ``keep_lock_ms`` the token lives on from now, for the owner that fetched
        it; else the lock is released, and what it tagged is free again (see ``returned``).
        Repeats: LockLost, or with a kept lock DuplicateEvent; never applied twice. Therefore a
        commit that keeps the lock and adds items must add history (InvalidValue).
        Errors: LockLost, DuplicateEvent, InvalidValue (event ids below 1 or with a hole, work
        items or cancelled activities of another instance). The lock stays as it was: after LockLost
        for an event, a message or a work item, and after DuplicateEvent, it is still held.
        """
        self._require_open("ack_orchestration_item")
        validation.check_commit(commit)
        return self._ack_orchestration_item(lock_token, commit)

    @abstractmethod
    def _ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> Awaitable[None]: ...

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
        token is still good until the lock is taken over.
        """
        self._require_open("abandon_orchestration_item")
        validation.check_abandon(delay_ms, block)
        return self._abandon_orchestration_item(
            lock_token, delay_ms, ignore_attempt=ignore_attempt, block=block
        )

    @abstractmethod
    def _abandon_orchestration_item(
        self, lock_token: str, delay_ms: int | None, *, ignore_attempt: bool, block: Block | None
    ) -> Awaitable[None]: ...

    def renew_orchestration_item_lock(self, lock_token: str, extend_for_ms: int) -> Awaitable[None]:
        """Let the lock live until now + ``extend_for_ms``.

        Repeats: extends again. Errors: LockLost if the token is not live.
        Does not wait for commits of other turns: one that hangs must not let other locks expire.
        """
        self._require_open("renew_orchestration_item_lock")
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        lost = self._renew_orchestration_item_locks((lock_token,), extend_for_ms)
        return _all_renewed(lost, "renew_orchestration_item_lock", lock_token)

    def renew_orchestration_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> Awaitable[frozenset[str]]:
        """Renew many at once; returns the tokens that were lost."""
        self._require_open("renew_orchestration_item_locks")
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        return self._renew_orchestration_item_locks(tuple(lock_tokens), extend_for_ms)

    @abstractmethod
    def _renew_orchestration_item_locks(
        self, lock_tokens: tuple[str, ...], extend_for_ms: int
    ) -> Awaitable[frozenset[str]]: ...

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
        self._require_open("start_orchestration_item")
        validation.check_first_turn(start, commit, lock_token, owner)
        self._require_sound("start_orchestration_item", start.instance_id)
        return self._start_orchestration_item(start, commit, lock_token, owner)

    def _start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> Awaitable[bool]:
        raise NotSupported("start_orchestration_item", f"{self.name} does not declare hot_path")

    # --- history

    def read(self, instance_id: str) -> Awaitable[list[HistoryRecord]]:
        """History of the latest execution, by event id; empty for an unknown instance."""
        self._check_instance("read", instance_id)
        return self._read(instance_id)

    @abstractmethod
    def _read(self, instance_id: str) -> Awaitable[list[HistoryRecord]]: ...

    def read_with_execution(
        self,
        instance_id: str,
        execution_id: int,
        *,
        after_event_id: int = 0,
        limit: int | None = None,
    ) -> Awaitable[list[HistoryRecord]]:
        """One execution's history, by event id, past ``after_event_id``; empty if unknown."""
        self._check_instance("read_with_execution", instance_id)
        validation.check_history_page(after_event_id, limit)
        return self._read_with_execution(instance_id, execution_id, after_event_id, limit)

    @abstractmethod
    def _read_with_execution(
        self, instance_id: str, execution_id: int, after_event_id: int, limit: int | None
    ) -> Awaitable[list[HistoryRecord]]: ...

    def append_with_execution(
        self, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
    ) -> Awaitable[None]:
        """Tools only: insert events as given. Creates no instance and no execution.

        Errors: DuplicateEvent; InvalidValue for an event id below 1. Nothing is written then.
        """
        self._check_instance("append_with_execution", instance_id)
        validation.check_number(execution_id, "execution_id", minimum=1)
        validation.check_records(records)
        return self._append_with_execution(instance_id, execution_id, tuple(records))

    @abstractmethod
    def _append_with_execution(
        self, instance_id: str, execution_id: int, records: tuple[HistoryRecord, ...]
    ) -> Awaitable[None]: ...

    # --- worker queue

    def enqueue_for_worker(self, message: WorkerMessage) -> Awaitable[None]:
        """Add a work item; visible at once or at its time. Runtimes do this through an ack."""
        self._require_open("enqueue_for_worker")
        validation.check_work(message)
        return self._enqueue_for_worker(message)

    @abstractmethod
    def _enqueue_for_worker(self, message: WorkerMessage) -> Awaitable[None]: ...

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
        self._require_open("fetch_work_item")
        return _first(
            self.fetch_work_items(
                1, lock_timeout_ms, poll_timeout_ms, session, tag_filter, activities
            )
        )

    def fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> Awaitable[list[FetchedWork]]:
        """Fetch up to ``limit`` items as ``fetch_work_item`` does; empty instead of None.

        A provider may lock them in one commit. It returns what there is and waits only for the
        first.
        """
        self._require_open("fetch_work_items")
        validation.check_number(limit, "limit", minimum=1)
        validation.check_fetch(lock_timeout_ms, poll_timeout_ms)
        validation.check_session_fetch(session)
        tags = tag_filter or TagFilter.default_only()
        if tags.mode is TagMode.NONE:
            return _no_work()
        return self._fetch_work_items(
            limit, lock_timeout_ms, poll_timeout_ms, session, tags, activities
        )

    @abstractmethod
    def _fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None,
        tags: TagFilter,
        activities: frozenset[str] | None,
    ) -> Awaitable[list[FetchedWork]]: ...

    def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> Awaitable[None]:
        """Remove the item and, in the same transaction, enqueue what follows from it.

        Effect: ``completion`` goes to the orchestrator queue, visible at once, even if the
        instance has ended or is gone; ``retry`` goes to the worker queue in its place, with its
        own visibility and attempt count 0; at most one of the two. A session item
        refreshes its live session's activity time.
        Repeats: LockLost. Errors: LockLost if the token is not live (cancelled, taken over,
        expired, already acked, instance deleted): nothing is enqueued. InvalidValue if the
        completion is routed to another instance than the item's.
        """
        self._require_open("ack_work_item")
        validation.check_follow_up(completion, retry)
        return self._ack_work_item(lock_token, completion, retry)

    @abstractmethod
    def _ack_work_item(
        self, lock_token: str, completion: OrchestratorMessage | None, retry: WorkerMessage | None
    ) -> Awaitable[None]: ...

    def settle_in_transaction(
        self, lock_token: str, settle: Callable[[Any], OrchestratorMessage]
    ) -> Awaitable[None]:
        """Run user code on the store's own connection, and settle its work item with it.

        Effect: what ``settle(connection)`` writes, the removal of the item and the completion that
        it returns are committed together. It runs in a thread of the provider and may delay
        other calls; it must neither commit nor roll back.
        Repeats: LockLost. Errors: as ``ack_work_item``; what ``settle`` raises is raised, and
        nothing stays. NotSupported without the ``transactions`` capability.
        """
        self._require_open("settle_in_transaction")
        return self._settle_in_transaction(lock_token, settle)

    def _settle_in_transaction(
        self, lock_token: str, settle: Callable[[Any], OrchestratorMessage]
    ) -> Awaitable[None]:
        raise NotSupported("settle_in_transaction", f"{self.name} does not declare transactions")

    def abandon_work_item(
        self, lock_token: str, delay_ms: int | None = None, *, ignore_attempt: bool = False
    ) -> Awaitable[None]:
        """Unlock the item, visible at now + ``delay_ms``; the session lease stays.

        Repeats: LockLost. Errors: LockLost for a token that is not the current one; an expired
        token is still good until the lock is taken over.
        """
        self._require_open("abandon_work_item")
        validation.check_abandon(delay_ms)
        return self._abandon_work_item(lock_token, delay_ms, ignore_attempt=ignore_attempt)

    @abstractmethod
    def _abandon_work_item(
        self, lock_token: str, delay_ms: int | None, *, ignore_attempt: bool
    ) -> Awaitable[None]: ...

    def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> Awaitable[None]:
        """Let the item's lock live until now + ``extend_for_ms``; store the heartbeat if given.

        Also refreshes the activity time of the item's live session. Repeats: extends again.
        Errors: LockLost if the token is not live; this is how a worker learns of cancellation.
        """
        self._require_open("renew_work_item_lock")
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        validation.check_text(heartbeat, "heartbeat")
        lost = self._renew_work_item_locks((lock_token,), extend_for_ms, heartbeat)
        return _all_renewed(lost, "renew_work_item_lock", lock_token)

    def renew_work_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> Awaitable[frozenset[str]]:
        """Renew many at once; returns the tokens that were lost."""
        self._require_open("renew_work_item_locks")
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        return self._renew_work_item_locks(tuple(lock_tokens), extend_for_ms, None)

    @abstractmethod
    def _renew_work_item_locks(
        self, lock_tokens: tuple[str, ...], extend_for_ms: int, heartbeat: str | None
    ) -> Awaitable[frozenset[str]]: ...

    # --- sessions

    def renew_session_lock(
        self, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
    ) -> Awaitable[int]:
        """Extend every live session of these owners that was active within the idle timeout.

        Returns how many. Idle ones (``last_activity <= now - idle_timeout``) are left to expire;
        an expired lease is never revived.
        """
        self._require_open("renew_session_lock")
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        validation.check_number(idle_timeout_ms, "idle_timeout_ms", minimum=0)
        return self._renew_session_lock(tuple(owner_ids), extend_for_ms, idle_timeout_ms)

    @abstractmethod
    def _renew_session_lock(
        self, owner_ids: tuple[str, ...], extend_for_ms: int, idle_timeout_ms: int
    ) -> Awaitable[int]: ...

    def cleanup_orphaned_sessions(self) -> Awaitable[int]:
        """Remove sessions whose lease has expired and that have no item, locked or not.

        Returns how many.
        """
        self._require_open("cleanup_orphaned_sessions")
        return self._cleanup_orphaned_sessions()

    @abstractmethod
    def _cleanup_orphaned_sessions(self) -> Awaitable[int]: ...

    # --- orchestrator queue

    def enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> Awaitable[bool]:
        """Add a message for an instance; True if it was taken.

        Effect: visible at now + ``delay_ms``, else at the message's own time, else at once. Creates
        no instance; a message with ``start`` makes the instance visible to administration as
        Pending. ``condition`` (None: ALWAYS) is checked in the same transaction. ABSENT and REPLACE
        need a ``start`` (InvalidValue).
        Errors: NotFound and InstanceFinished with ALIVE; NotARoot with REPLACE for a child whose
        parent is in the store and has not ended: it may wait for that child. QueueFull for mail
        after which too much would wait (``rules.is_mail``, ``is_full``); what was handed out or is
        sent for later need not count. Other messages, and the mail of turns, are never refused.
        Repeats: ALWAYS and ALIVE add another message; ABSENT returns False.
        """
        self._require_open("enqueue_for_orchestrator")
        validation.check_enqueue((message,), delay_ms, condition)
        self._require_sound("enqueue_for_orchestrator", message.instance_id)
        return self._enqueue_for_orchestrator(
            message, delay_ms, condition or EnqueueCondition.ALWAYS
        )

    @abstractmethod
    def _enqueue_for_orchestrator(
        self, message: OrchestratorMessage, delay_ms: int | None, condition: EnqueueCondition
    ) -> Awaitable[bool]: ...

    def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> Awaitable[list[bool]]:
        """Add many; each as if alone, in order. A provider may commit them together.
        Errors: InvalidValue before anything is written, if one of them is not valid, and for the
        condition ``ALIVE``. QueueFull; then none was taken. NotARoot, as for one; then some were.
        """
        self._require_open("enqueue_many_for_orchestrator")
        validation.check_enqueue_many(messages, delay_ms, condition)
        for message in messages:
            self._require_sound("enqueue_many_for_orchestrator", message.instance_id)
        return self._enqueue_many_for_orchestrator(
            tuple(messages), delay_ms, condition or EnqueueCondition.ALWAYS
        )

    @abstractmethod
    def _enqueue_many_for_orchestrator(
        self,
        messages: tuple[OrchestratorMessage, ...],
        delay_ms: int | None,
        condition: EnqueueCondition,
    ) -> Awaitable[list[bool]]: ...

    # --- what clients read

    def get_custom_status(
        self, instance_id: str, last_seen_version: int = 0
    ) -> Awaitable[tuple[str | None, int] | None]:
        """(status, version) if the version is above ``last_seen_version``; else None."""
        self._check_instance("get_custom_status", instance_id)
        return self._get_custom_status(instance_id, last_seen_version)

    @abstractmethod
    def _get_custom_status(
        self, instance_id: str, last_seen_version: int
    ) -> Awaitable[tuple[str | None, int] | None]: ...

    def get_kv_value(self, instance_id: str, key: str) -> Awaitable[str | None]:
        """The live value: changes of the current execution over the state before it.

        Changes of an execution are kept apart until it ends (``status.ends_execution``), then
        merged; a cleared key hides an older value; clear-all hides every older key. Missing key or
        instance: None. Pruning never removes keys; deleting the instance does.
        """
        self._check_instance("get_kv_value", instance_id)
        validation.check_text(key, "key of a value")
        return self._get_kv_value(instance_id, key)

    @abstractmethod
    def _get_kv_value(self, instance_id: str, key: str) -> Awaitable[str | None]: ...

    def get_kv_all_values(self, instance_id: str) -> Awaitable[dict[str, KvEntry]]:
        """All live values by key, sorted by key."""
        self._check_instance("get_kv_all_values", instance_id)
        return self._get_kv_all_values(instance_id)

    @abstractmethod
    def _get_kv_all_values(self, instance_id: str) -> Awaitable[dict[str, KvEntry]]: ...

    def watch(self, instance_id: str) -> Watch:
        """A context manager that notices commits which may concern the instance.

        Enter it before reading; then ``await watch.wait(timeout_ms)`` returns True as soon as
        anything may have changed since entering or since the last wait, False after the timeout.
        False alarms are allowed; a missed change only until the timeout.
        """
        self._check_instance("watch", instance_id)
        return self._watch(instance_id)

    @abstractmethod
    def _watch(self, instance_id: str) -> Watch: ...

    @property
    def admin(self) -> ProviderAdmin:
        """The administration of this store. Errors: NotSupported without the capability."""
        raise NotSupported("admin", f"the provider {self.name!r} has no administration")


async def _no_work() -> list[FetchedWork]:
    """Answer without asking the store."""
    return []


async def _first(fetching: Awaitable[list[FetchedWork]]) -> FetchedWork | None:
    found = await fetching
    return found[0] if found else None


async def _all_renewed(
    renewing: Awaitable[frozenset[str]], operation: str, lock_token: str
) -> None:
    if await renewing:
        raise rules.lock_lost(operation, lock_token)
