"""The verbs of the contract on one SQLite file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perdure.arguments import check_path
from perdure.clock import SystemClock
from perdure.errors import InvalidValue
from perdure.limits import ORPHAN_GRACE_MS, check_id
from perdure.providers._shared import refusals
from perdure.providers._shared.polling import Poll
from perdure.providers.capabilities import Capabilities
from perdure.providers.contract import Provider
from perdure.providers.items import EnqueueCondition, TagFilter, TagMode
from perdure.providers.sqlite import commits, orchestrator_queue, reading, turns, worker_queue
from perdure.providers.sqlite.admin import SqliteAdmin
from perdure.providers.sqlite.handle import Handle

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    import apsw

    from perdure.clock import Clock
    from perdure.model.failures import Block
    from perdure.providers._shared.migrate import Migration
    from perdure.providers.items import (
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
    from perdure.providers.sqlite.connection import Durability
    from perdure.providers.watching import Signal, Watch

VERSION: Final = "1"

_SMALL_ROWS: Final = 12
_SMALL_CHARACTERS: Final = 32_768

_CAPABILITIES: Final = Capabilities(other_loops=True, transactions=True)


class SqliteProvider(Provider):
    """One local file, used by any number of processes of one machine.

    ``durability="full"`` survives power loss; ``"relaxed"`` is faster on slow disks and may forget
    the last commits when the power fails. Verbs queue whole operations to one writer thread, and
    whatever arrives while a commit is running shares the next one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Durability = "full",
        clock: Clock | None = None,
        orphan_grace_ms: int = ORPHAN_GRACE_MS,
        allow_moved: bool = False,
    ) -> None:
        text = check_path(path)
        if text == ":memory:":
            raise InvalidValue(
                f"{text!r} is no file; for a store that forgets use InMemoryProvider or 'memory:'"
            )
        if durability not in {"full", "relaxed"}:
            raise InvalidValue(f"durability must be 'full' or 'relaxed', not {durability!r}")
        refusals.check_number(orphan_grace_ms, "orphan_grace_ms", minimum=0)
        self._allow_moved = allow_moved
        self._handle = Handle(
            Path(text).absolute(),
            durability,
            SystemClock() if clock is None else clock,
            self._reached,
            orphan_grace_ms=orphan_grace_ms,
        )
        self._admin = SqliteAdmin(self._handle, durability)

    @property
    def name(self) -> str:
        return "sqlite"

    @property
    def version(self) -> str:
        return VERSION

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def _reached(self, point: str) -> None:
        """Called by the writer at named points of each commit; fault campaigns override it."""

    # --- life of the handle

    async def open(self) -> None:
        await self._handle.open(allow_moved=self._allow_moved)

    async def close(self) -> None:
        await self._handle.close()

    async def migrate(self, *, dry_run: bool = False) -> Sequence[Migration]:
        """Apply the migrations that are due, or only tell them; the provider need not be open."""
        due = await asyncio.to_thread(self._handle.due_migrations)
        if due and not dry_run:
            async with self:
                pass
        return due

    # --- turns

    def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> asyncio.Future[FetchedOrchestration | None]:
        refusals.check_fetch(lock_timeout_ms, poll_timeout_ms, owner)
        return self._handle.write(
            "fetch_orchestration_item",
            turns.fetch,
            lock_timeout_ms,
            filter,
            owner,
            poll=self._poll(self._handle.turns, poll_timeout_ms),
        )

    def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> asyncio.Future[None]:
        refusals.check_commit(commit)
        return self._handle.write(
            "ack_orchestration_item", turns.ack, lock_token, commit, is_small=_is_small(commit)
        )

    def abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None = None,
        *,
        ignore_attempt: bool = False,
        block: Block | None = None,
    ) -> asyncio.Future[None]:
        refusals.check_abandon(delay_ms, block)
        return self._handle.write(
            "abandon_orchestration_item", turns.abandon, lock_token, delay_ms, block, ignore_attempt
        )

    def renew_orchestration_item_lock(
        self, lock_token: str, extend_for_ms: int
    ) -> asyncio.Future[None]:
        refusals.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        return self._handle.write(
            "renew_orchestration_item_lock", turns.renew, lock_token, extend_for_ms
        )

    async def renew_orchestration_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        refusals.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        lost: frozenset[str] = await self._handle.write(
            "renew_orchestration_item_locks", turns.renew_many, tuple(lock_tokens), extend_for_ms
        )
        return lost

    def start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> asyncio.Future[bool]:
        refusals.check_first_turn(start, commit, lock_token, owner)
        return self._handle.write(
            "start_orchestration_item",
            commits.start_instance,
            start,
            commit,
            lock_token,
            owner,
            is_small=_is_small(commit),
        )

    # --- history

    def read(self, instance_id: str) -> asyncio.Future[list[HistoryRecord]]:
        check_id(instance_id, "instance id")
        return self._handle.read("read", reading.read, instance_id)

    def read_with_execution(
        self,
        instance_id: str,
        execution_id: int,
        *,
        after_event_id: int = 0,
        limit: int | None = None,
    ) -> asyncio.Future[list[HistoryRecord]]:
        check_id(instance_id, "instance id")
        refusals.check_history_page(after_event_id, limit)
        return self._handle.read(
            "read_with_execution",
            reading.read_page,
            instance_id,
            execution_id,
            after_event_id,
            -1 if limit is None else limit,
        )

    def append_with_execution(
        self, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
    ) -> asyncio.Future[None]:
        check_id(instance_id, "instance id")
        refusals.check_number(execution_id, "execution_id", minimum=1)
        refusals.check_records(records)
        return self._handle.write(
            "append_with_execution", commits.append, instance_id, execution_id, tuple(records)
        )

    # --- worker queue

    def enqueue_for_worker(self, message: WorkerMessage) -> asyncio.Future[None]:
        refusals.check_work(message)
        return self._handle.write("enqueue_for_worker", worker_queue.insert, message)

    def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> asyncio.Future[FetchedWork | None]:
        refusals.check_fetch(lock_timeout_ms, poll_timeout_ms)
        refusals.check_session_fetch(session)
        tags = tag_filter or TagFilter.default_only()
        can_wait = tags.mode is not TagMode.NONE
        return self._handle.write(
            "fetch_work_item",
            worker_queue.fetch,
            lock_timeout_ms,
            session,
            tags,
            activities,
            poll=self._poll(self._handle.work, poll_timeout_ms) if can_wait else None,
        )

    async def fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> list[FetchedWork]:
        refusals.check_number(limit, "limit", minimum=1)
        refusals.check_fetch(lock_timeout_ms, poll_timeout_ms)
        refusals.check_session_fetch(session)
        tags = tag_filter or TagFilter.default_only()
        can_wait = tags.mode is not TagMode.NONE
        found: list[FetchedWork] | None = await self._handle.write(
            "fetch_work_items",
            worker_queue.fetch_several,
            limit,
            lock_timeout_ms,
            session,
            tags,
            activities,
            poll=self._poll(self._handle.work, poll_timeout_ms) if can_wait else None,
        )
        return found or []

    def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> asyncio.Future[None]:
        refusals.check_follow_up(completion, retry)
        return self._handle.write("ack_work_item", worker_queue.ack, lock_token, completion, retry)

    def settle_in_transaction(
        self, lock_token: str, settle: Callable[[apsw.Connection], OrchestratorMessage]
    ) -> asyncio.Future[None]:
        # On the writer's thread: the connection is an apsw.Connection inside a transaction.
        return self._handle.write(
            "settle_in_transaction",
            worker_queue.settle_in_transaction,
            lock_token,
            settle,
            alone=True,
        )

    def abandon_work_item(
        self, lock_token: str, delay_ms: int | None = None, *, ignore_attempt: bool = False
    ) -> asyncio.Future[None]:
        refusals.check_abandon(delay_ms)
        return self._handle.write(
            "abandon_work_item", worker_queue.abandon, lock_token, delay_ms, ignore_attempt
        )

    def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> asyncio.Future[None]:
        refusals.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        refusals.check_text(heartbeat, "heartbeat")
        return self._handle.write(
            "renew_work_item_lock", worker_queue.renew, lock_token, extend_for_ms, heartbeat
        )

    async def renew_work_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        refusals.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        lost: frozenset[str] = await self._handle.write(
            "renew_work_item_locks", worker_queue.renew_many, tuple(lock_tokens), extend_for_ms
        )
        return lost

    # --- sessions

    def renew_session_lock(
        self, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
    ) -> asyncio.Future[int]:
        refusals.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        refusals.check_number(idle_timeout_ms, "idle_timeout_ms", minimum=0)
        return self._handle.write(
            "renew_session_lock",
            worker_queue.renew_sessions,
            tuple(owner_ids),
            extend_for_ms,
            idle_timeout_ms,
        )

    def cleanup_orphaned_sessions(self) -> asyncio.Future[int]:
        return self._handle.write("cleanup_orphaned_sessions", worker_queue.clean_sessions)

    # --- orchestrator queue

    def enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> asyncio.Future[bool]:
        refusals.check_enqueue(message, delay_ms, condition)
        return self._handle.write(
            "enqueue_for_orchestrator",
            orchestrator_queue.enqueue,
            message,
            delay_ms,
            condition,
            # What it replaces may be a tree of any size.
            is_small=condition is not EnqueueCondition.REPLACE
            and len(message.body) <= _SMALL_CHARACTERS,
        )

    async def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> list[bool]:
        refusals.check_enqueue_many(messages, delay_ms, condition)
        taken: list[bool] = await self._handle.write(
            "enqueue_many_for_orchestrator",
            orchestrator_queue.enqueue_many,
            tuple(messages),
            delay_ms,
            condition,
        )
        return taken

    # --- what clients read

    def get_custom_status(
        self, instance_id: str, last_seen_version: int = 0
    ) -> asyncio.Future[tuple[str | None, int] | None]:
        check_id(instance_id, "instance id")
        return self._handle.read(
            "get_custom_status", reading.custom_status, instance_id, last_seen_version
        )

    def get_kv_value(self, instance_id: str, key: str) -> asyncio.Future[str | None]:
        check_id(instance_id, "instance id")
        refusals.check_text(key, "key of a value")
        return self._handle.read("get_kv_value", reading.kv_value, instance_id, key)

    def get_kv_all_values(self, instance_id: str) -> asyncio.Future[dict[str, KvEntry]]:
        check_id(instance_id, "instance id")
        return self._handle.read("get_kv_all_values", reading.kv_all_values, instance_id)

    def watch(self, instance_id: str) -> Watch:
        check_id(instance_id, "instance id")
        return self._handle.watch(instance_id)

    def admin(self) -> SqliteAdmin:
        return self._admin

    def _poll(self, signal: Signal, timeout_ms: int) -> Poll | None:
        return Poll(signal, self._handle.clock, timeout_ms) if timeout_ms else None


def _is_small(commit: TurnCommit) -> bool:
    """What a turn adds stands in its history, but for what it carries to its next execution."""
    records = commit.history_delta
    if len(records) > _SMALL_ROWS or len(commit.consumed or ()) > _SMALL_ROWS:
        return False
    sizes = [len(record.data) for record in records]
    if commit.orchestrator_items:
        sizes += [len(message.body) for message in commit.orchestrator_items]
    return sum(sizes) <= _SMALL_CHARACTERS
