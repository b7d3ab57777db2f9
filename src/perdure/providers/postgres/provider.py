"""The contract on Postgres: one store for many machines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.arguments import Duration, check_kind, check_string, to_milliseconds, to_seconds
from perdure.errors import PerdureError
from perdure.ids import new_id
from perdure.limits import MAIL_BYTES_MAX, MAIL_MAX, ORPHAN_GRACE_SECONDS
from perdure.providers import rules, validation
from perdure.providers.contract import Provider
from perdure.providers.postgres import records, statements
from perdure.providers.postgres.address import ANSWER_SECONDS
from perdure.providers.postgres.admin import PostgresAdmin
from perdure.providers.postgres.fetching import (
    TokenCache,
    TurnFetcher,
    TurnWant,
    WorkFetcher,
    WorkWant,
)
from perdure.providers.postgres.pipeline import Operation
from perdure.providers.postgres.pool import RETRY_SECONDS
from perdure.providers.postgres.records import check_no_repeated_event
from perdure.providers.postgres.store import PostgresStore
from perdure.providers.records import Capabilities, EnqueueCondition, TagFilter, TrustedCommit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from typing import LiteralString

    from perdure.clock import Clock
    from perdure.model.failures import Block
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.migrate import Migration
    from perdure.providers.records import (
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

VERSION: Final = "1"
_CAPABILITIES: Final = Capabilities(injected_clock=False, other_loops=True)


class PostgresProvider(Provider):
    """A store in one schema of a Postgres database.

    ``pool_size`` limits the connections, one of which is kept for renewals; ``listen`` takes one
    more. Behind a pooler such as PgBouncer, set ``prepare`` to False, and in transaction mode set
    ``listen`` to False, or to the connection string of the server itself. ``auto_migrate=False``
    refuses a store whose schema is not up to date, so that only a role that owns the schema
    migrates it.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema: str = "perdure",
        pool_size: int = 10,
        listen: bool | str = True,
        prepare: bool = True,
        orphan_grace: Duration = ORPHAN_GRACE_SECONDS,
        mail_max: int = MAIL_MAX,
        mail_bytes_max: int = MAIL_BYTES_MAX,
        allow_moved: bool = False,
        auto_migrate: bool = True,
        retry_timeout: Duration = RETRY_SECONDS,
        answer_timeout: Duration = ANSWER_SECONDS,
        connect_timeout: Duration | None = None,
    ) -> None:
        limits = validation.check_mail_limits(mail_max, mail_bytes_max)
        self.mail_max, self.mail_bytes_max = limits
        validation.check_number(pool_size, "pool_size", minimum=2, maximum=1000)
        grace_ms = to_milliseconds(orphan_grace, "orphan_grace")
        check_string(schema, "schema")
        check_kind(dsn, str, "the connection string", "a text, e.g. 'postgresql://host/shop'")
        if not isinstance(listen, bool):
            check_kind(listen, str, "listen", "True, False or a connection string")
        self._open_options = {"allow_moved": allow_moved, "auto_migrate": auto_migrate}
        self._store = store = PostgresStore(
            dsn,
            schema,
            pool_size=pool_size,
            listen=listen,
            prepare=prepare,
            retry_seconds=to_seconds(retry_timeout, "retry_timeout"),
            answer_seconds=to_seconds(answer_timeout, "answer_timeout", minimum=0.1),
            connect_seconds=(
                None
                if connect_timeout is None
                else to_seconds(connect_timeout, "connect_timeout", minimum=2)
            ),
        )
        self._turn_tokens = TokenCache(lambda tokens: self._find(statements.FIND_TURNS, tokens))
        self._work_tokens = TokenCache(lambda tokens: self._find(statements.FIND_WORK, tokens))
        self._turns = TurnFetcher(
            store, self._turn_tokens, self._give_back_turn, grace_ms
        ).coalescer
        self._work = WorkFetcher(store, self._work_tokens, self._give_back_work).coalescer
        store.attach_fetches(self._turns, self._work)
        self._admin = PostgresAdmin(store, self._turn_tokens)
        self._ask = store.ask
        self._send = store.pipeline.send
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

    # --- opening and closing

    async def open(self) -> None:
        if not self._is_open:
            await self._store.open(**self._open_options)
            self._is_open = True

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._closing = asyncio.create_task(self._store.close(), name="perdure-close")
        if self._closing is not None:
            # A cancelled call does not stop the closing, and can be repeated.
            await asyncio.shield(self._closing)
            self._closing = None

    def clock(self) -> Clock:
        return self._store.clock

    async def migrate(self, *, dry_run: bool = False) -> Sequence[Migration]:
        """Apply what is due, or only return it with ``dry_run``; the handle need not be open."""
        return await self._store.migrate(dry_run=dry_run)

    def _require_open(self, operation: str) -> None:
        self._store.require_open(operation)

    def new_lock_token(self) -> str:
        return self._store.new_lock_token()

    # --- turns

    async def _fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None,  # noqa: A002
        owner: str | None,
    ) -> FetchedOrchestration | None:
        want = TurnWant(lock_timeout_ms, filter, owner)
        found = await self._turns.fetch(want, 1, poll_timeout_ms / 1000)
        return found[0] if found else None

    def _ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> Awaitable[None]:
        instance_id = self._turn_tokens.known(lock_token)
        if instance_id is None:
            return self._ack_unknown(lock_token, commit)
        return self._commit(instance_id, lock_token, commit)

    async def _ack_unknown(self, lock_token: str, commit: TurnCommit) -> None:
        instance_id = await self._turn_tokens.instance_of(lock_token, "ack_orchestration_item")
        await self._commit(instance_id, lock_token, commit)

    def _start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> asyncio.Future[bool]:
        return self._commit(start.instance_id, lock_token, commit, owner)

    def _commit(
        self, instance_id: str, lock_token: str, commit: TurnCommit, owner: str | None = None
    ) -> asyncio.Future[Any]:
        """Commit a turn; with an owner, the first one of a new instance."""
        is_first = owner is not None
        operation = "start_orchestration_item" if is_first else "ack_orchestration_item"
        check_no_repeated_event(commit.history_delta, commit.execution_id, operation)
        validation.check_items(commit, instance_id)
        row, parts = records.turn_row(instance_id, lock_token, commit, is_first=is_first)
        if is_first:
            row["owner"] = owner

        def done() -> None:
            if commit.keep_lock_ms is None:
                self._turn_tokens.forget((lock_token,))
            else:
                self._turn_tokens.note(lock_token, instance_id)
            self._committed(instance_id, commit)

        return self._send(
            Operation(
                operation,
                statements.START_TURNS if is_first else statements.COMMIT_TURNS,
                row,
                key=instance_id,
                parts=parts,
                size=records.size_of(commit),
                sets_timers=bool(commit.orchestrator_items) and type(commit) is TrustedCommit,
                done=done,
                answers=is_first,
            )
        )

    def _committed(self, instance_id: str, commit: TurnCommit) -> None:
        """Note the tokens of a committed turn, and wake watchers of the changed instances."""
        self._work_tokens.forget(commit.settled_work)
        for work in commit.worker_items:
            if work.claim is not None:
                self._work_tokens.note(work.claim.lock_token, work.identity.instance_id)
        is_visible = commit.metadata.status or commit.custom_status or commit.kv_changes
        self._store.changed((instance_id,), notify=bool(is_visible))
        if commit.orchestrator_items:
            self._store.changed(
                {message.instance_id for message in commit.orchestrator_items}, notify=False
            )

    async def _abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None,
        *,
        ignore_attempt: bool,
        block: Block | None,
    ) -> None:
        operation = "abandon_orchestration_item"
        instance_id = await self._turn_tokens.instance_of(lock_token, operation)
        row = {
            "instance_id": instance_id,
            "token": lock_token,
            "delay_ms": delay_ms,
            "ignore_attempt": ignore_attempt,
            "block": None if block is None else msgspec.json.encode(block).decode(),
        }
        await self._send(Operation(operation, statements.ABANDON_TURNS, row, key=instance_id))
        self._turn_tokens.forget((lock_token,))
        self._store.changed((instance_id,), notify=block is not None)

    async def _renew_orchestration_item_locks(
        self, lock_tokens: tuple[str, ...], extend_for_ms: int
    ) -> frozenset[str]:
        return await self._renew(
            "renew_orchestration_item_lock",
            statements.RENEW_TURNS,
            self._turn_tokens,
            lock_tokens,
            {"extend_for_ms": extend_for_ms},
        )

    async def _renew(
        self,
        operation: str,
        template: LiteralString,
        known: TokenCache,
        lock_tokens: Sequence[str],
        change: dict[str, Any],
    ) -> frozenset[str]:
        """Renew locks and return the tokens of lost ones; unknown tokens are lost."""
        instances = await known.instances_of(lock_tokens)
        lost = frozenset(lock_tokens) - instances.keys()
        if instances:
            renewals = [
                {"instance_id": instance_id, "token": token, **change}
                for token, instance_id in instances.items()
            ]
            text = msgspec.json.encode(renewals).decode()
            ((found,),) = await self._store.renew(operation, template, (text,))
            lost |= frozenset(found)
        return lost

    # --- history

    async def _read(self, instance_id: str) -> list[HistoryRecord]:
        found = await self._ask("read", statements.READ_LATEST_HISTORY, (instance_id,))
        return list(records.records(found))

    async def _read_with_execution(
        self, instance_id: str, execution_id: int, after_event_id: int, limit: int | None
    ) -> list[HistoryRecord]:
        found = await self._ask(
            "read_with_execution",
            statements.READ_HISTORY,
            (instance_id, execution_id, after_event_id, limit),
        )
        return list(records.records(found))

    async def _append_with_execution(
        self, instance_id: str, execution_id: int, records: tuple[HistoryRecord, ...]
    ) -> None:
        operation = "append_with_execution"
        check_no_repeated_event(records, execution_id, operation)
        row = {"instance_id": instance_id, "execution_id": execution_id, "records": records}
        await self._send(Operation(operation, statements.APPEND_HISTORY, row, key=instance_id))
        self._store.changed((instance_id,))

    # --- worker queue

    async def _enqueue_for_worker(self, message: WorkerMessage) -> None:
        operation = "enqueue_for_worker"
        row: dict[str, Any] = msgspec.structs.asdict(message)
        key = "" if message.claim is None else message.claim.lock_token
        await self._send(
            Operation(operation, statements.ENQUEUE_WORK, row, key=key, size=len(message.body))
        )
        if message.claim is not None:
            self._work_tokens.note(message.claim.lock_token, message.identity.instance_id)

    async def _fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None,
        tags: TagFilter,
        activities: frozenset[str] | None,
    ) -> list[FetchedWork]:
        want = WorkWant(lock_timeout_ms, session, tags, activities)
        return await self._work.fetch(want, limit, poll_timeout_ms / 1000)

    async def _ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None,
        retry: WorkerMessage | None,
    ) -> None:
        operation = "ack_work_item"
        instance_id = await self._work_tokens.instance_of(lock_token, operation)
        row = {
            "instance_id": instance_id,
            "token": lock_token,
            "completion": completion,
            "retry": retry,
        }
        size = len(completion.body) if completion else len(retry.body) if retry else 0
        await self._send(
            Operation(operation, statements.COMPLETE_WORK, row, key=lock_token, size=size)
        )
        self._work_tokens.forget((lock_token,))
        if retry is not None and retry.claim is not None:
            self._work_tokens.note(retry.claim.lock_token, instance_id)
        self._store.changed((instance_id,), notify=False)

    async def _abandon_work_item(
        self, lock_token: str, delay_ms: int | None, *, ignore_attempt: bool
    ) -> None:
        operation = "abandon_work_item"
        instance_id = await self._work_tokens.instance_of(lock_token, operation)
        row = {
            "instance_id": instance_id,
            "token": lock_token,
            "delay_ms": delay_ms or 0,
            "ignore_attempt": ignore_attempt,
        }
        await self._send(Operation(operation, statements.ABANDON_WORK, row, key=lock_token))
        self._work_tokens.forget((lock_token,))

    async def _renew_work_item_locks(
        self, lock_tokens: tuple[str, ...], extend_for_ms: int, heartbeat: str | None
    ) -> frozenset[str]:
        return await self._renew(
            "renew_work_item_lock",
            statements.RENEW_WORK,
            self._work_tokens,
            lock_tokens,
            {"extend_for_ms": extend_for_ms, "heartbeat": heartbeat},
        )

    # --- sessions

    async def _renew_session_lock(
        self, owner_ids: tuple[str, ...], extend_for_ms: int, idle_timeout_ms: int
    ) -> int:
        operation = "renew_session_lock"
        ((renewed,),) = await self._store.renew(
            operation, statements.RENEW_SESSIONS, (list(owner_ids), extend_for_ms, idle_timeout_ms)
        )
        return int(renewed)

    async def _cleanup_orphaned_sessions(self) -> int:
        ((removed,),) = await self._ask("cleanup_orphaned_sessions", statements.CLEANUP_SESSIONS)
        return int(removed)

    # --- orchestrator queue

    def _enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None,
        condition: EnqueueCondition,
        call: str = "",
    ) -> asyncio.Future[bool]:
        """Send a message. Calls without an await in between share a commit, in their order.

        Of the messages of one ``call`` all are taken, or none.
        """
        row: dict[str, Any] = msgspec.structs.asdict(message)
        if delay_ms is not None:
            row["delay_ms"] = delay_ms
        template, parts, key = statements.ENQUEUE_MESSAGES, 0, ""
        match condition:
            case EnqueueCondition.ALIVE:
                row["condition"], parts, key = "alive", records.SOME_ALIVE, message.instance_id
            case EnqueueCondition.ABSENT:
                row["condition"], parts, key = "absent", records.SOME_ABSENT, message.instance_id
            case EnqueueCondition.REPLACE:
                template, key = statements.REPLACE_INSTANCES, message.instance_id
            case _:
                pass
        if rules.is_mail(message.kind):
            row["mail_max"], row["mail_bytes_max"] = self.mail_max, self.mail_bytes_max
            parts |= records.SOME_MAIL
        if call:
            row["call"] = call
        sent = self._send(
            Operation(
                "enqueue_for_orchestrator",
                template,
                row,
                key=key,
                parts=parts,
                size=len(message.body),
                call=call,
            )
        )
        ids, notify = (message.instance_id,), message.start is not None
        sent.add_done_callback(lambda _: self._store.changed(ids, notify=notify))
        return sent

    async def _enqueue_many_for_orchestrator(
        self,
        messages: tuple[OrchestratorMessage, ...],
        delay_ms: int | None,
        condition: EnqueueCondition,
    ) -> list[bool]:
        if condition is EnqueueCondition.REPLACE:
            # A later message may delete the instance of an earlier one, so send one by one.
            return [
                await self._enqueue_for_orchestrator(message, delay_ms, condition)
                for message in messages
            ]
        # A full queue refuses all messages of the call, so mail shares one batch of any size.
        call = new_id() if any(rules.is_mail(message.kind) for message in messages) else ""
        sent = [
            self._enqueue_for_orchestrator(message, delay_ms, condition, call)
            for message in messages
        ]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer is True for answer in answers]

    # --- reading

    async def _get_custom_status(
        self, instance_id: str, last_seen_version: int
    ) -> tuple[str | None, int] | None:
        found = await self._ask(
            "get_custom_status", statements.GET_CUSTOM_STATUS, (instance_id, last_seen_version)
        )
        return (found[0][0], found[0][1]) if found else None

    async def _get_kv_value(self, instance_id: str, key: str) -> str | None:
        ((value,),) = await self._ask("get_kv_value", statements.GET_KV_VALUE, (instance_id, key))
        return None if value is None else str(value)

    async def _get_kv_all_values(self, instance_id: str) -> dict[str, KvEntry]:
        found = await self._ask("get_kv_all_values", statements.GET_KV_VALUES, (instance_id,))
        return records.kv_entries(found)

    def _watch(self, instance_id: str) -> Watch:
        return self._store.hub_of(instance_id).watch(instance_id)

    @property
    def admin(self) -> ProviderAdmin:
        return self._admin

    # --- tokens

    async def _find(self, template: LiteralString, tokens: Sequence[str]) -> dict[str, str]:
        return dict(await self._store.renew("find_tokens", template, (list(tokens),)))

    async def _give_back_turn(self, fetched: FetchedOrchestration) -> None:
        abandoning = self.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)
        await _give_back(abandoning, self._turn_tokens, fetched.lock_token)

    async def _give_back_work(self, fetched: FetchedWork) -> None:
        abandoning = self.abandon_work_item(fetched.lock_token, ignore_attempt=True)
        await _give_back(abandoning, self._work_tokens, fetched.lock_token)


async def _give_back(abandoning: Awaitable[None], known: TokenCache, token: str) -> None:
    """Give back an item whose caller was cancelled. If that fails, the lock expires."""
    try:
        await abandoning
    except PerdureError:
        known.forget((token,))
