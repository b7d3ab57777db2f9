"""The provider over a directory: checks what comes in, waits for work, and hands out answers."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from functools import partial
from typing import TYPE_CHECKING

from perdure.arguments import Duration, check_path, to_milliseconds
from perdure.clock import SystemClock
from perdure.errors import LockLost, StoreClosed
from perdure.limits import ORPHAN_GRACE_SECONDS, check_id
from perdure.providers import rules, validation
from perdure.providers.filesystem import acking, enqueueing, queues, turns, waiting
from perdure.providers.filesystem.admin import FileSystemAdmin
from perdure.providers.filesystem.fileops import FileOps
from perdure.providers.filesystem.store import open_store
from perdure.providers.records import Capabilities, TagFilter, TagMode
from perdure.providers.whole import WholeProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from perdure.clock import Clock
    from perdure.errors import PerdureError
    from perdure.model.failures import Block
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.filesystem.store import OpenStore
    from perdure.providers.filesystem.tables import Transaction
    from perdure.providers.records import (
        EnqueueCondition,
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

VERSION = "1"
_MESSAGES_PER_COMMIT = 500
_CAPABILITIES = Capabilities(several_handles=False, several_processes=False)


class FileSystemProvider(WholeProvider):  # type: ignore[misc]
    """Keeps everything in a directory of readable files; one process at a time.

    Every commit is one fsynced record in a journal; the files follow from it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        orphan_grace: Duration = ORPHAN_GRACE_SECONDS,
        archive: Duration | None = None,
        allow_moved: bool = False,
        file_ops: FileOps | None = None,
    ) -> None:
        """``archive``: compress the history of an execution that ended that long ago."""
        self._path = os.path.abspath(check_path(path))  # noqa: PTH100 - resolving would hide a symbolic link
        self._clock: Clock = SystemClock() if clock is None else clock
        self._orphan_grace_ms = to_milliseconds(orphan_grace, "orphan_grace")
        self._archive_after_ms = None if archive is None else to_milliseconds(archive, "archive")
        self._allow_moved = allow_moved
        self._file_ops = file_ops if file_ops is not None else FileOps()
        self._opened: OpenStore | None = None
        self._opening = asyncio.Lock()
        self._is_temporary = False
        self._admin = FileSystemAdmin(self)

    @classmethod
    def new_temp(cls, *, clock: Clock | None = None) -> Self:
        """A provider over a new directory that is removed when the provider is closed."""
        provider = cls(tempfile.mkdtemp(prefix="perdure-"), clock=clock)
        provider._is_temporary = True
        return provider

    @property
    def name(self) -> str:
        return "filesystem"

    @property
    def version(self) -> str:
        return VERSION

    @property
    def path(self) -> str:
        return self._path

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    # --- life of the handle

    async def open(self) -> None:
        async with self._opening:
            if self._opened is None or not self._opened.is_open:
                self._opened = await open_store(
                    self._path,
                    self._file_ops,
                    self._clock,
                    orphan_grace_ms=self._orphan_grace_ms,
                    archive_after_ms=self._archive_after_ms,
                    allow_moved=self._allow_moved,
                )

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
            if self._is_temporary:
                shutil.rmtree(self._path, ignore_errors=True)

    async def checkpoint(self) -> None:
        """Bring the readable files up to date, and archive, now instead of after a moment."""
        await self.store("checkpoint").checkpoint()

    def store(self, operation: str) -> OpenStore:
        """The opened store; raises StoreClosed."""
        if self._opened is None:
            raise StoreClosed(operation, f"{self._path} is not open; use async with")
        self._opened.require_open(operation)
        return self._opened

    # --- turns

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        verb = "fetch_orchestration_item"
        store = self.store(verb)
        validation.check_fetch(lock_timeout_ms, poll_timeout_ms, owner)
        state = store.state
        locked = await waiting.poll(
            store,
            store.turn_signal,
            poll_timeout_ms,
            lambda: store.change(
                verb,
                lambda tx: turns.fetch(state, tx, lock_timeout_ms, filter, owner),
                may_find_nothing=True,
                give_back=partial(turns.give_back, state),
            ),
            state.ready_instances.next_change_ms,
        )
        return await waiting.with_history(store, locked) if locked is not None else None

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        verb = "ack_orchestration_item"
        store = self.store(verb)
        validation.check_commit(commit)
        await store.change(verb, lambda tx: acking.ack(store.state, tx, lock_token, commit))

    async def abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None = None,
        *,
        ignore_attempt: bool = False,
        block: Block | None = None,
    ) -> None:
        verb = "abandon_orchestration_item"
        store = self.store(verb)
        validation.check_abandon(delay_ms, block)

        def abandon(tx: Transaction) -> None:
            turns.abandon(
                store.state, tx, lock_token, delay_ms, block, ignore_attempt=ignore_attempt
            )

        await store.change(verb, abandon)

    async def renew_orchestration_item_lock(self, lock_token: str, extend_for_ms: int) -> None:
        verb = "renew_orchestration_item_lock"
        store = self.store(verb)
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        await store.change(verb, lambda tx: turns.renew(store.state, tx, lock_token, extend_for_ms))

    async def renew_orchestration_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        verb = "renew_orchestration_item_locks"
        store = self.store(verb)
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)

        def renew(tx: Transaction, lock_token: str) -> None:
            turns.renew(store.state, tx, lock_token, extend_for_ms)

        return await store.change(verb, lambda tx: _lost_tokens(tx, lock_tokens, renew))

    async def start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> bool:
        verb = "start_orchestration_item"
        store = self.store(verb)
        validation.check_first_turn(start, commit, lock_token, owner)
        store.state.quarantine.check(verb, start.instance_id)
        return await store.change(
            verb, lambda tx: acking.start(store.state, tx, start, commit, lock_token, owner)
        )

    # --- history

    async def read(self, instance_id: str) -> list[HistoryRecord]:
        store = self._store_for("read", instance_id)
        lookups, standing = store.state.lookups, store.state.standing
        excerpt = await store.look(
            "read",
            lambda: store.excerpt(
                instance_id,
                max(standing.execution_id(instance_id), *lookups.histories.get(instance_id, (1,))),
            ),
        )
        return await store.read_history(excerpt)

    async def read_with_execution(
        self,
        instance_id: str,
        execution_id: int,
        *,
        after_event_id: int = 0,
        limit: int | None = None,
    ) -> list[HistoryRecord]:
        verb = "read_with_execution"
        store = self._store_for(verb, instance_id)
        validation.check_history_page(after_event_id, limit)
        excerpt = await store.look(verb, lambda: store.excerpt(instance_id, execution_id))
        records = await store.read_history(excerpt)
        if after_event_id > 0:
            records = [record for record in records if record.event_id > after_event_id]
        return records[:limit]

    async def append_with_execution(
        self, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
    ) -> None:
        verb = "append_with_execution"
        store = self._store_for(verb, instance_id)
        validation.check_number(execution_id, "execution_id", minimum=1)
        validation.check_records(records)
        await store.change(verb, lambda tx: tx.append(instance_id, execution_id, records))

    # --- worker queue

    async def enqueue_for_worker(self, message: WorkerMessage) -> None:
        verb = "enqueue_for_worker"
        store = self.store(verb)
        validation.check_work(message)
        await store.change(verb, lambda tx: queues.add_work(store.state, tx, message))

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
        verb = "fetch_work_items"
        store = self.store(verb)
        validation.check_number(limit, "limit", minimum=1)
        validation.check_fetch(lock_timeout_ms, poll_timeout_ms)
        validation.check_session_fetch(session)
        tags = tag_filter or TagFilter.default_only()
        if tags.mode is TagMode.NONE:
            return []
        state = store.state

        def fetch(tx: Transaction) -> list[FetchedWork] | None:
            return queues.fetch_work(state, tx, limit, lock_timeout_ms, session, tags, activities)

        found = await waiting.poll(
            store,
            store.work_signal,
            poll_timeout_ms,
            lambda: store.change(
                verb, fetch, may_find_nothing=True, give_back=partial(queues.give_back, state)
            ),
            state.ready_work.next_change_ms,
        )
        return found or []

    async def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> None:
        verb = "ack_work_item"
        store = self.store(verb)
        validation.check_follow_up(completion, retry)
        await store.change(
            verb, lambda tx: queues.ack_work(store.state, tx, lock_token, completion, retry)
        )

    async def abandon_work_item(
        self, lock_token: str, delay_ms: int | None = None, *, ignore_attempt: bool = False
    ) -> None:
        verb = "abandon_work_item"
        store = self.store(verb)
        validation.check_abandon(delay_ms)

        def abandon(tx: Transaction) -> None:
            queues.abandon_work(
                store.state, tx, lock_token, delay_ms, ignore_attempt=ignore_attempt
            )

        await store.change(verb, abandon)

    async def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> None:
        verb = "renew_work_item_lock"
        store = self.store(verb)
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        validation.check_text(heartbeat, "heartbeat")
        await store.change(
            verb,
            lambda tx: queues.renew_work(store.state, tx, lock_token, extend_for_ms, heartbeat),
        )

    async def renew_work_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        verb = "renew_work_item_locks"
        store = self.store(verb)
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)

        def renew(tx: Transaction, lock_token: str) -> None:
            queues.renew_work(store.state, tx, lock_token, extend_for_ms, None)

        return await store.change(verb, lambda tx: _lost_tokens(tx, lock_tokens, renew))

    # --- sessions

    async def renew_session_lock(
        self, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
    ) -> int:
        verb = "renew_session_lock"
        store = self.store(verb)
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        validation.check_number(idle_timeout_ms, "idle_timeout_ms", minimum=0)
        return await store.change(
            verb,
            lambda tx: queues.renew_sessions(
                store.state, tx, owner_ids, extend_for_ms, idle_timeout_ms
            ),
        )

    async def cleanup_orphaned_sessions(self) -> int:
        verb = "cleanup_orphaned_sessions"
        store = self.store(verb)
        return await store.change(verb, lambda tx: queues.cleanup_sessions(store.state, tx))

    # --- orchestrator queue

    async def enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> bool:
        verb = "enqueue_for_orchestrator"
        store = self.store(verb)
        validation.check_enqueue(message, delay_ms, condition)
        return await store.change(
            verb, lambda tx: enqueueing.enqueue(store.state, tx, message, delay_ms, condition)
        )

    async def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> list[bool]:
        verb = "enqueue_many_for_orchestrator"
        store = self.store(verb)
        validation.check_enqueue_many(messages, delay_ms, condition)
        taken: list[bool] = []
        for start in range(0, len(messages), _MESSAGES_PER_COMMIT):
            part = messages[start : start + _MESSAGES_PER_COMMIT]

            def enqueue(
                tx: Transaction, part: Sequence[OrchestratorMessage] = part
            ) -> tuple[list[bool], PerdureError | None]:
                return enqueueing.enqueue_each(store.state, tx, part, delay_ms, condition)

            results, refusal = await store.change(verb, enqueue)
            taken += results
            if refusal is not None:
                raise refusal
        return taken

    # --- what clients read

    async def get_custom_status(
        self, instance_id: str, last_seen_version: int = 0
    ) -> tuple[str | None, int] | None:
        verb = "get_custom_status"
        store = self._store_for(verb, instance_id)
        row = await store.look(verb, lambda: store.state.tables.custom_statuses.get(instance_id))
        if row is None or row.version <= last_seen_version:
            return None
        return row.value, row.version

    async def get_kv_value(self, instance_id: str, key: str) -> str | None:
        validation.check_text(key, "key of a value")
        entry = (await self.get_kv_all_values(instance_id)).get(key)
        return None if entry is None else entry.value

    async def get_kv_all_values(self, instance_id: str) -> dict[str, KvEntry]:
        verb = "get_kv_all_values"
        store = self._store_for(verb, instance_id)
        lookups = store.state.lookups
        return await store.look(
            verb,
            lambda: rules.merge_kv(
                lookups.kv_store.get(instance_id, {}), lookups.kv_delta.get(instance_id, {})
            ),
        )

    def watch(self, instance_id: str) -> Watch:
        return self._store_for("watch", instance_id).changes.watch(instance_id)

    @property
    def admin(self) -> ProviderAdmin:
        return self._admin

    # --- inside

    def _store_for(self, operation: str, instance_id: str) -> OpenStore:
        store = self.store(operation)
        check_id(instance_id, "instance id")
        store.state.quarantine.check(operation, instance_id)
        return store


def _lost_tokens(
    tx: Transaction, lock_tokens: Sequence[str], renew: Callable[[Transaction, str], None]
) -> frozenset[str]:
    lost: set[str] = set()
    for lock_token in lock_tokens:
        try:
            renew(tx, lock_token)
        except LockLost:
            lost.add(lock_token)
    return frozenset(lost)
