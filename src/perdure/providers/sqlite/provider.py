"""The verbs of the contract on the SQLite engine, and the store in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from perdure.arguments import Duration, check_path, to_milliseconds
from perdure.errors import InvalidValue
from perdure.ids import new_id
from perdure.limits import MAIL_BYTES_MAX, MAIL_MAX, ORPHAN_GRACE_SECONDS
from perdure.providers import validation
from perdure.providers.contract import Provider
from perdure.providers.records import Capabilities, EnqueueCondition, TagFilter
from perdure.providers.sqlite import peers, reading
from perdure.providers.sqlite.admin import EngineAdmin, SqliteAdmin
from perdure.providers.sqlite.commit import ACK_TURN, APPEND_EVENTS, START_INSTANCE
from perdure.providers.sqlite.database import FileDatabase, System
from perdure.providers.sqlite.messages import ENQUEUE_MESSAGE, ENQUEUE_MESSAGES
from perdure.providers.sqlite.store import Store, reads, writes
from perdure.providers.sqlite.transaction import Verb
from perdure.providers.sqlite.turns import ABANDON_TURN, FETCH_TURN, RENEW_TURNS
from perdure.providers.sqlite.work import (
    ABANDON_WORK,
    ACK_WORK,
    CLEAN_SESSIONS,
    ENQUEUE_WORK,
    FETCH_WORK_ITEMS,
    RENEW_SESSIONS,
    RENEW_WORK_ITEMS,
    SETTLE_IN_TRANSACTION,
)
from perdure.providers.waiting import Poll, Signal, Watch

if TYPE_CHECKING:
    import asyncio
    import os
    from collections.abc import Sequence

    from perdure.clock import Clock
    from perdure.model.failures import Block
    from perdure.providers.migrate import Migration
    from perdure.providers.records import (
        FetchedOrchestration,
        FetchedWork,
        OrchestrationFilter,
        OrchestratorMessage,
        SessionFetch,
        TurnCommit,
    )
    from perdure.providers.sqlite.connection import Durability

VERSION: Final = "1"


_SMALL_ROWS: Final = 12
_SMALL_CHARACTERS: Final = 32_768

_CAPABILITIES: Final = Capabilities(other_loops=True, transactions=True)


class EngineProvider(Provider):
    """The verbs of the contract on a ``Store`` of any kind."""

    def __init__(
        self,
        store: Store,
        admin: EngineAdmin,
        *,
        allow_moved: bool,
        mail_max: int,
        mail_bytes_max: int,
    ) -> None:
        limits = validation.check_mail_limits(mail_max, mail_bytes_max)
        self.mail_max, self.mail_bytes_max = limits
        self._store = store
        self._admin = admin
        self._allow_moved = allow_moved

    @property
    def version(self) -> str:
        return VERSION

    @property
    def admin(self) -> EngineAdmin:
        return self._admin

    def clock(self) -> Clock:
        return self._store.clock

    # --- life of the handle

    async def open(self) -> None:
        await self._store.open(allow_moved=self._allow_moved)

    async def close(self) -> None:
        await self._store.close()

    def _require_open(self, operation: str) -> None:
        if not self._store.is_open:
            raise self._store.closed(operation)

    def new_lock_token(self) -> str:
        return self._store.database.holder + new_id()

    # --- turns

    def _fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None,  # noqa: A002
        owner: str | None,
    ) -> asyncio.Future[FetchedOrchestration | None]:
        self._store.expect(peers.TURNS)
        poll = self._poll(self._store.signals.turns, poll_timeout_ms)
        return self._store.write(FETCH_TURN, lock_timeout_ms, filter, owner, poll=poll)

    def _ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> asyncio.Future[None]:
        return self._store.write(ACK_TURN, lock_token, commit, is_small=_is_small(commit))

    def _abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None,
        *,
        ignore_attempt: bool,
        block: Block | None,
    ) -> asyncio.Future[None]:
        return self._store.write(ABANDON_TURN, lock_token, delay_ms, block, ignore_attempt)

    _renew_orchestration_item_locks = writes(RENEW_TURNS)

    def _start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> asyncio.Future[bool]:
        is_small = _is_small(commit)
        return self._store.write(
            START_INSTANCE, start, commit, lock_token, owner, is_small=is_small
        )

    # --- history

    _read = reads(Verb("read", reading.read))
    _read_with_execution = reads(Verb("read_with_execution", reading.read_page))
    _append_with_execution = writes(APPEND_EVENTS)

    # --- worker queue and its sessions

    _enqueue_for_worker = writes(ENQUEUE_WORK)

    async def _fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None,
        tags: TagFilter,
        activities: frozenset[str] | None,
    ) -> list[FetchedWork]:
        self._store.expect(peers.WORK)
        found: list[FetchedWork] | None = await self._store.write(
            FETCH_WORK_ITEMS,
            limit,
            lock_timeout_ms,
            session,
            tags,
            activities,
            poll=self._poll(self._store.signals.work, poll_timeout_ms),
        )
        return found or []

    _ack_work_item = writes(ACK_WORK)

    def _abandon_work_item(
        self, lock_token: str, delay_ms: int | None, *, ignore_attempt: bool
    ) -> asyncio.Future[None]:
        return self._store.write(ABANDON_WORK, lock_token, delay_ms, ignore_attempt)

    _renew_work_item_locks = writes(RENEW_WORK_ITEMS)
    _renew_session_lock = writes(RENEW_SESSIONS)
    _cleanup_orphaned_sessions = writes(CLEAN_SESSIONS)

    # --- orchestrator queue

    def _enqueue_for_orchestrator(
        self, message: OrchestratorMessage, delay_ms: int | None, condition: EnqueueCondition
    ) -> asyncio.Future[bool]:
        # What it replaces may be a tree of any size.
        replaces = condition is EnqueueCondition.REPLACE
        is_small = not replaces and len(message.body) <= _SMALL_CHARACTERS
        return self._store.write(
            ENQUEUE_MESSAGE,
            message,
            delay_ms,
            condition,
            self.mail_max,
            self.mail_bytes_max,
            is_small=is_small,
        )

    def _enqueue_many_for_orchestrator(
        self,
        messages: tuple[OrchestratorMessage, ...],
        delay_ms: int | None,
        condition: EnqueueCondition,
    ) -> asyncio.Future[list[bool]]:
        return self._store.write(
            ENQUEUE_MESSAGES, messages, delay_ms, condition, self.mail_max, self.mail_bytes_max
        )

    # --- what clients read

    _get_custom_status = reads(Verb("get_custom_status", reading.custom_status))
    _get_kv_value = reads(Verb("get_kv_value", reading.kv_value))
    _get_kv_all_values = reads(Verb("get_kv_all_values", reading.kv_all_values))

    def _watch(self, instance_id: str) -> Watch:
        return self._store.watch(instance_id)

    def _poll(self, signal: Signal, timeout_ms: int) -> Poll | None:
        return Poll(signal, self._store.clock, timeout_ms) if timeout_ms else None


class SqliteProvider(EngineProvider):
    """One local file, used by any number of processes of one machine.

    ``durability="full"`` survives power loss; ``"relaxed"`` is faster on slow disks and may forget
    the last commits when the power fails. Verbs queue whole operations to one writer thread, and
    all that arrive while a commit is running share the next one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Durability = "full",
        clock: Clock | None = None,
        orphan_grace: Duration = ORPHAN_GRACE_SECONDS,
        mail_max: int = MAIL_MAX,
        mail_bytes_max: int = MAIL_BYTES_MAX,
        allow_moved: bool = False,
    ) -> None:
        text = check_path(path)
        if text == ":memory:":
            raise InvalidValue(
                f"{text!r} is no file; for a store that forgets use InMemoryProvider or 'memory:'"
            )
        if durability not in {"full", "relaxed"}:
            raise InvalidValue(f"durability must be 'full' or 'relaxed', not {durability!r}")
        self._database = FileDatabase(
            Path(text).absolute(),
            durability,
            System(clock),
            orphan_grace_ms=to_milliseconds(orphan_grace, "orphan_grace"),
        )
        store = Store(self._database)
        super().__init__(
            store,
            SqliteAdmin(store, self._database),
            allow_moved=allow_moved,
            mail_max=mail_max,
            mail_bytes_max=mail_bytes_max,
        )

    @property
    def name(self) -> str:
        return "sqlite"

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    async def migrate(self, *, dry_run: bool = False) -> Sequence[Migration]:
        """Apply the migrations that are due, or only tell them; the provider need not be open."""
        database = self._database
        due = await database.system.run_in_thread(database.due_migrations)
        if due and not dry_run:
            async with self:
                pass
        return due

    # On the writer's thread: the connection is an apsw.Connection inside a transaction.
    _settle_in_transaction = writes(SETTLE_IN_TRANSACTION)


def _is_small(commit: TurnCommit) -> bool:
    """Return True if the commit has few rows and little text."""
    records = commit.history_delta
    if len(records) > _SMALL_ROWS or len(commit.consumed or ()) > _SMALL_ROWS:
        return False
    size = sum([len(record.data) for record in records])
    for message in commit.orchestrator_items:
        size += len(message.body)
    return size <= _SMALL_CHARACTERS
