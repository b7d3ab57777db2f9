"""The contract on Postgres: one store for many machines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.arguments import check_kind, check_seconds, check_string
from perdure.errors import PerdureError
from perdure.limits import ORPHAN_GRACE_MS, check_id
from perdure.providers._shared import refusals, rules
from perdure.providers.capabilities import Capabilities
from perdure.providers.contract import Provider
from perdure.providers.items import EnqueueCondition, TagFilter, TagMode
from perdure.providers.postgres import queries, rows
from perdure.providers.postgres.admin import PostgresAdmin
from perdure.providers.postgres.commits import Commits
from perdure.providers.postgres.connections import RETRY_SECONDS, Rank
from perdure.providers.postgres.fetching import Turns, TurnWant, Work, WorkWant
from perdure.providers.postgres.handle import Handle
from perdure.providers.postgres.tokens import TokenBook

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from typing import LiteralString

    from perdure.clock import Clock
    from perdure.model.failures import Block
    from perdure.providers._shared.migrate import Migration
    from perdure.providers.administration import ProviderAdmin
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
    from perdure.providers.watching import Watch

VERSION: Final = "1"
_CAPABILITIES: Final = Capabilities(injected_clock=False, other_loops=True)


class PostgresProvider(Provider):
    """A store in one schema of a Postgres database.

    ``pool_size`` bounds the connections, one of which is kept for renewals; ``listen`` takes one
    more. Behind a pooler, such as PgBouncer, set ``prepare`` to False, and ``listen`` as well if it
    hands out transactions. ``auto_migrate=False`` leaves migrating to a role that may.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema: str = "perdure",
        pool_size: int = 10,
        listen: bool = True,
        prepare: bool = True,
        orphan_grace_ms: int = ORPHAN_GRACE_MS,
        allow_moved: bool = False,
        auto_migrate: bool = True,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        refusals.check_number(pool_size, "pool_size", minimum=2, maximum=1000)
        refusals.check_number(orphan_grace_ms, "orphan_grace_ms", minimum=0)
        check_seconds(retry_seconds, "retry_seconds")
        check_string(schema, "schema")
        check_kind(dsn, str, "the connection string", "a text, e.g. 'postgresql://host/shop'")
        self._open_options = {"allow_moved": allow_moved, "auto_migrate": auto_migrate}
        self._handle = handle = Handle(
            dsn,
            schema,
            pool_size=pool_size,
            listen=listen,
            prepare=prepare,
            retry_seconds=retry_seconds,
        )
        self._turn_tokens = TokenBook(lambda tokens: self._find(queries.FIND_TURNS, tokens))
        self._work_tokens = TokenBook(lambda tokens: self._find(queries.FIND_WORK, tokens))
        self._turns = Turns(handle, self._turn_tokens, orphan_grace_ms, self._give_back_turn)
        self._work = Work(handle, self._work_tokens, self._give_back_work)
        self._commits = Commits(handle)
        self._admin = PostgresAdmin(handle, self._turn_tokens)
        self._is_open = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return "postgres"

    @property
    def version(self) -> str:
        return VERSION

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    # --- life of the handle

    async def open(self) -> None:
        if not self._is_open:
            await self._handle.open(**self._open_options)
            self._is_open = True

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._closing = asyncio.create_task(self._handle.close(), name="perdure-close")
        if self._closing is not None:
            # Whoever is cancelled here may call again; the rest is done in any case.
            await asyncio.shield(self._closing)
            self._closing = None

    def clock(self) -> Clock:
        return self._handle.clock

    async def migrate(self, *, dry_run: bool = False) -> Sequence[Migration]:
        """Apply the migrations that are due, or only tell them; the handle need not be open."""
        return await self._handle.migrate(dry_run=dry_run)

    # --- turns

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        self._handle.require_open("fetch_orchestration_item")
        refusals.check_fetch(lock_timeout_ms, poll_timeout_ms, owner)
        return await self._turns.fetch(TurnWant(lock_timeout_ms, filter, owner), poll_timeout_ms)

    def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> Awaitable[None]:
        instance_id = self._turn_tokens.known(lock_token)
        if instance_id is None:
            return self._ack_unknown(lock_token, commit)
        return self._ack(instance_id, lock_token, commit)

    async def _ack_unknown(self, lock_token: str, commit: TurnCommit) -> None:
        operation = "ack_orchestration_item"
        self._handle.require_open(operation)
        refusals.check_commit(commit)
        instance_id = await self._turn_tokens.instance_of(lock_token, operation)
        await self._ack(instance_id, lock_token, commit)

    def _ack(self, instance_id: str, lock_token: str, commit: TurnCommit) -> asyncio.Future[None]:
        operation = "ack_orchestration_item"
        self._handle.require_open(operation)
        refusals.check_commit(commit)
        rows.check_no_repeated_event(commit.history_delta, commit.execution_id, operation)
        row, parts = rows.turn_row(instance_id, lock_token, commit, is_first=False)

        def done() -> None:
            if commit.keep_lock_ms is None:
                self._turn_tokens.forget((lock_token,))
            self._committed(instance_id, commit)

        return self._commits.send(
            operation,
            queries.COMMIT_TURNS,
            row,
            key=instance_id,
            parts=parts,
            weight=rows.weight_of(commit),
            done=done,
            answers=False,
        )

    def start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> asyncio.Future[bool]:
        operation = "start_orchestration_item"
        self._handle.require_open(operation)
        refusals.check_first_turn(start, commit, lock_token, owner)
        rows.check_no_repeated_event(commit.history_delta, commit.execution_id, operation)
        row, parts = rows.turn_row(start.instance_id, lock_token, commit, is_first=True)
        row["owner"] = owner

        def done() -> None:
            if commit.keep_lock_ms is not None:
                self._turn_tokens.note(lock_token, start.instance_id)
            self._committed(start.instance_id, commit)

        return self._commits.send(
            operation,
            queries.START_TURNS,
            row,
            key=start.instance_id,
            parts=parts,
            weight=rows.weight_of(commit),
            done=done,
        )

    def _committed(self, instance_id: str, commit: TurnCommit) -> None:
        """Take note of a turn, and wake who waits for what it changed."""
        self._work_tokens.forget(commit.settled_work)
        for work in commit.worker_items:
            if work.claim is not None:
                self._work_tokens.note(work.claim.lock_token, work.identity.instance_id)
        shows = commit.metadata.status or commit.custom_status or commit.kv_changes
        self._handle.changed((instance_id,), tell=bool(shows))
        if commit.orchestrator_items:
            self._handle.changed(
                {message.instance_id for message in commit.orchestrator_items}, tell=False
            )

    async def abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None = None,
        *,
        ignore_attempt: bool = False,
        block: Block | None = None,
    ) -> None:
        operation = "abandon_orchestration_item"
        self._handle.require_open(operation)
        refusals.check_abandon(delay_ms, block)
        instance_id = await self._turn_tokens.instance_of(lock_token, operation)
        row = {
            "instance_id": instance_id,
            "token": lock_token,
            "delay_ms": delay_ms,
            "ignore_attempt": ignore_attempt,
            "block": None if block is None else msgspec.json.encode(block).decode(),
        }
        await self._commits.send(operation, queries.ABANDON_TURNS, row, key=instance_id)
        self._turn_tokens.forget((lock_token,))
        self._handle.changed((instance_id,), tell=block is not None)

    async def renew_orchestration_item_lock(self, lock_token: str, extend_for_ms: int) -> None:
        lost = await self.renew_orchestration_item_locks((lock_token,), extend_for_ms)
        if lost:
            raise rules.lock_lost("renew_orchestration_item_lock", lock_token)

    async def renew_orchestration_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        operation = "renew_orchestration_item_lock"
        self._handle.require_open(operation)
        refusals.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        instances = await self._turn_tokens.instances_of(lock_tokens)
        renewals = [
            {"instance_id": instances[token], "token": token, "extend_for_ms": extend_for_ms}
            for token in lock_tokens
            if token in instances
        ]
        return await self._commits.renew(operation, queries.RENEW_TURNS, renewals, lock_tokens)

    # --- history

    async def read(self, instance_id: str) -> list[HistoryRecord]:
        check_id(instance_id, "instance id")
        found = await self._ask("read", queries.READ_LATEST_HISTORY, {"id": instance_id})
        return list(rows.records(found))

    async def read_with_execution(
        self,
        instance_id: str,
        execution_id: int,
        *,
        after_event_id: int = 0,
        limit: int | None = None,
    ) -> list[HistoryRecord]:
        check_id(instance_id, "instance id")
        refusals.check_history_page(after_event_id, limit)
        found = await self._ask(
            "read_with_execution",
            queries.READ_HISTORY,
            (instance_id, execution_id, after_event_id, limit),
        )
        return list(rows.records(found))

    async def append_with_execution(
        self, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
    ) -> None:
        operation = "append_with_execution"
        check_id(instance_id, "instance id")
        refusals.check_number(execution_id, "execution_id", minimum=1)
        refusals.check_records(records)
        rows.check_no_repeated_event(records, execution_id, operation)
        row = {"instance_id": instance_id, "execution_id": execution_id, "records": records}
        await self._commits.send(operation, queries.APPEND_HISTORY, row, key=instance_id)
        self._handle.changed((instance_id,))

    # --- worker queue

    async def enqueue_for_worker(self, message: WorkerMessage) -> None:
        operation = "enqueue_for_worker"
        self._handle.require_open(operation)
        refusals.check_work(message)
        row: dict[str, Any] = msgspec.structs.asdict(message)
        key = "" if message.claim is None else message.claim.lock_token
        await self._commits.send(
            operation, queries.ENQUEUE_WORK, row, key=key, weight=len(message.body)
        )
        if message.claim is not None:
            self._work_tokens.note(message.claim.lock_token, message.identity.instance_id)

    async def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> FetchedWork | None:
        found = await self.fetch_work_items(
            1, lock_timeout_ms, poll_timeout_ms, session, tag_filter, activities
        )
        return found[0] if found else None

    async def fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> list[FetchedWork]:
        self._handle.require_open("fetch_work_items")
        refusals.check_number(limit, "limit", minimum=1)
        refusals.check_fetch(lock_timeout_ms, poll_timeout_ms)
        refusals.check_session_fetch(session)
        tags = tag_filter or TagFilter.default_only()
        if tags.mode is TagMode.NONE:
            return []
        want = WorkWant(lock_timeout_ms, session, tags, activities)
        return await self._work.fetch(want, limit, poll_timeout_ms)

    async def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> None:
        operation = "ack_work_item"
        self._handle.require_open(operation)
        refusals.check_follow_up(completion, retry)
        instance_id = await self._work_tokens.instance_of(lock_token, operation)
        row = {
            "instance_id": instance_id,
            "token": lock_token,
            "completion": completion,
            "retry": retry,
        }
        weight = len(completion.body) if completion else len(retry.body) if retry else 0
        await self._commits.send(operation, queries.SETTLE_WORK, row, key=lock_token, weight=weight)
        self._work_tokens.forget((lock_token,))
        if retry is not None and retry.claim is not None:
            self._work_tokens.note(retry.claim.lock_token, instance_id)
        self._handle.changed((instance_id,), tell=False)

    async def abandon_work_item(
        self, lock_token: str, delay_ms: int | None = None, *, ignore_attempt: bool = False
    ) -> None:
        operation = "abandon_work_item"
        self._handle.require_open(operation)
        refusals.check_abandon(delay_ms)
        instance_id = await self._work_tokens.instance_of(lock_token, operation)
        row = {
            "instance_id": instance_id,
            "token": lock_token,
            "delay_ms": delay_ms or 0,
            "ignore_attempt": ignore_attempt,
        }
        await self._commits.send(operation, queries.ABANDON_WORK, row, key=lock_token)
        self._work_tokens.forget((lock_token,))

    async def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> None:
        refusals.check_text(heartbeat, "heartbeat")
        lost = await self._renew_work((lock_token,), extend_for_ms, heartbeat)
        if lost:
            raise rules.lock_lost("renew_work_item_lock", lock_token)

    async def renew_work_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        return await self._renew_work(lock_tokens, extend_for_ms, None)

    async def _renew_work(
        self, lock_tokens: Sequence[str], extend_for_ms: int, heartbeat: str | None
    ) -> frozenset[str]:
        operation = "renew_work_item_lock"
        self._handle.require_open(operation)
        refusals.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        instances = await self._work_tokens.instances_of(lock_tokens)
        renewals = [
            {
                "instance_id": instances[token],
                "token": token,
                "extend_for_ms": extend_for_ms,
                "heartbeat": heartbeat,
            }
            for token in lock_tokens
            if token in instances
        ]
        return await self._commits.renew(operation, queries.RENEW_WORK, renewals, lock_tokens)

    # --- sessions

    async def renew_session_lock(
        self, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
    ) -> int:
        operation = "renew_session_lock"
        self._handle.require_open(operation)
        refusals.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        refusals.check_number(idle_timeout_ms, "idle_timeout_ms", minimum=0)
        ((renewed,),) = await self._handle.renew(
            operation, queries.RENEW_SESSIONS, (list(owner_ids), extend_for_ms, idle_timeout_ms)
        )
        return int(renewed)

    async def cleanup_orphaned_sessions(self) -> int:
        ((removed,),) = await self._handle.ask(
            "cleanup_orphaned_sessions", queries.CLEANUP_SESSIONS, rank=Rank.CHORE
        )
        return int(removed)

    # --- orchestrator queue

    async def enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> bool:
        self._handle.require_open("enqueue_for_orchestrator")
        refusals.check_enqueue(message, delay_ms, condition)
        return await self._enqueue(message, delay_ms, condition)

    async def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> list[bool]:
        self._handle.require_open("enqueue_many_for_orchestrator")
        refusals.check_enqueue_many(messages, delay_ms, condition)
        if condition is EnqueueCondition.REPLACE:
            # A later one may delete an earlier one with its tree: only one by one is in order.
            return await super().enqueue_many_for_orchestrator(messages, delay_ms, condition)
        sent = [self._enqueue(message, delay_ms, condition) for message in messages]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer is True for answer in answers]

    def _enqueue(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None,
        condition: EnqueueCondition | None,
    ) -> asyncio.Future[bool]:
        """Messages that are sent in one go are committed together, in their order."""
        row = rows.message_row(message, delay_ms)
        template, parts, key = queries.ENQUEUE_MESSAGES, 0, ""
        match condition:
            case EnqueueCondition.ALIVE:
                row["condition"], parts, key = "alive", rows.SOME_ALIVE, message.instance_id
            case EnqueueCondition.ABSENT:
                row["condition"], parts, key = "absent", rows.SOME_ABSENT, message.instance_id
            case EnqueueCondition.REPLACE:
                template, key = queries.REPLACE_INSTANCES, message.instance_id
            case _:
                pass
        sent = self._commits.send(
            "enqueue_for_orchestrator",
            template,
            row,
            key=key,
            parts=parts,
            weight=len(message.body),
        )
        ids, tell = (message.instance_id,), message.start is not None
        sent.add_done_callback(lambda _: self._handle.changed(ids, tell=tell))
        return sent

    # --- what clients read

    async def get_custom_status(
        self, instance_id: str, last_seen_version: int = 0
    ) -> tuple[str | None, int] | None:
        check_id(instance_id, "instance id")
        found = await self._ask(
            "get_custom_status", queries.GET_CUSTOM_STATUS, (instance_id, last_seen_version)
        )
        return (found[0][0], found[0][1]) if found else None

    async def get_kv_value(self, instance_id: str, key: str) -> str | None:
        check_id(instance_id, "instance id")
        refusals.check_text(key, "key of a value")
        ((value,),) = await self._ask("get_kv_value", queries.GET_KV_VALUE, (instance_id, key))
        return None if value is None else str(value)

    async def get_kv_all_values(self, instance_id: str) -> dict[str, KvEntry]:
        check_id(instance_id, "instance id")
        found = await self._ask("get_kv_all_values", queries.GET_KV_VALUES, {"id": instance_id})
        return rows.kv_entries(found)

    def watch(self, instance_id: str) -> Watch:
        self._handle.require_open("watch")
        check_id(instance_id, "instance id")
        return self._handle.hub_of(instance_id).watch(instance_id)

    def admin(self) -> ProviderAdmin:
        return self._admin

    # --- asking and committing

    async def _ask(
        self, operation: str, template: LiteralString, parameters: Any = ()
    ) -> list[Any]:
        return await self._handle.ask(operation, template, parameters, binary=True)

    async def _find(self, template: LiteralString, tokens: Sequence[str]) -> dict[str, str]:
        return dict(await self._handle.renew("find_tokens", template, (list(tokens),)))

    async def _give_back_turn(self, fetched: FetchedOrchestration) -> None:
        """What nobody waits for any more. At worst the lock expires."""
        try:
            await self.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)
        except PerdureError:
            self._turn_tokens.forget((fetched.lock_token,))

    async def _give_back_work(self, fetched: FetchedWork) -> None:
        try:
            await self.abandon_work_item(fetched.lock_token, ignore_attempt=True)
        except PerdureError:
            self._work_tokens.forget((fetched.lock_token,))
