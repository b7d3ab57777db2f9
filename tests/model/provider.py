"""The reference provider: the whole contract over plain dictionaries. It forgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from model import rules, turns, validation, working
from model.admin import ModelAdmin
from model.polling import Poll
from model.store import ModelStore
from perdure.errors import (
    InstanceFinished,
    LockLost,
    NotFound,
    QueueFull,
    StoreClosed,
    UsageError,
)
from perdure.limits import ORPHAN_GRACE_MS, check_id
from perdure.providers.records import Capabilities, EnqueueCondition, TagFilter, TagMode
from perdure.testing.crashes import WholeProvider

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from model.state import Instance
    from perdure.clock import Clock
    from perdure.model.failures import Block
    from perdure.providers.administration import ProviderAdmin
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
    from perdure.providers.waiting import Signal, Watch

_Fetched = TypeVar("_Fetched")

_CAPABILITIES = Capabilities(durable=False, several_processes=False)


_READING = ("count_", "export_", "get_", "latest_", "list_", "mark_moved", "read", "watch")
"""Beginnings of the verbs that change nothing, and of the one that takes the mark back."""


class ModelProvider(WholeProvider):
    """Keeps everything in this process and forgets it with the last reference to its store.

    Handles that are given the same ``ModelStore`` see the same content. They must be used on one
    event loop.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        store: ModelStore | None = None,
        orphan_grace_ms: int = ORPHAN_GRACE_MS,
        allow_moved: bool = False,
    ) -> None:
        if store is not None and clock is not None:
            raise UsageError("give the clock to the ModelStore: a store has one clock")
        self._store = store or ModelStore(clock, orphan_grace_ms=orphan_grace_ms)
        self._admin = ModelAdmin(self._store, self._require_open)
        self._allow_moved = allow_moved
        self._is_open = False

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "1"

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def clock(self) -> Clock:
        return self._store.clock

    # --- life of the handle

    async def open(self) -> None:
        if self._store.moved_to is not None and not self._allow_moved:
            raise rules.store_moved("the memory store", self._store.moved_to)
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        self._store.turn_signal.notify()
        self._store.work_signal.notify()
        self._store.changes.notify_all()

    def _require_open(self, operation: str) -> None:
        if not self._is_open:
            raise StoreClosed(operation, "the in-memory provider is not open; use async with")
        self._store.follow_clock()
        self._require_writable(operation)

    def _require_writable(self, operation: str) -> None:
        """Raise StoreMoved for a verb that would change a store whose content was moved."""
        moved_to = self._store.moved_to
        if moved_to is not None and not operation.startswith(_READING):
            raise rules.store_moved("the memory store", moved_to)

    # --- turns

    async def fetch_orchestration_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        filter: OrchestrationFilter | None = None,  # noqa: A002
        owner: str | None = None,
    ) -> FetchedOrchestration | None:
        self._require_open("fetch_orchestration_item")
        validation.check_fetch(lock_timeout_ms, poll_timeout_ms, owner)
        store = self._store
        return await self._poll(
            store.turn_signal,
            poll_timeout_ms,
            lambda: turns.fetch(store, lock_timeout_ms, filter, owner),
            lambda now_ms: store.agenda.next_due_ms(owner, now_ms),
        )

    async def ack_orchestration_item(self, lock_token: str, commit: TurnCommit) -> None:
        self._require_open("ack_orchestration_item")
        validation.check_commit(commit)
        turns.ack(self._store, lock_token, commit)

    async def abandon_orchestration_item(
        self,
        lock_token: str,
        delay_ms: int | None = None,
        *,
        ignore_attempt: bool = False,
        block: Block | None = None,
    ) -> None:
        self._require_open("abandon_orchestration_item")
        validation.check_abandon(delay_ms, block)
        turns.abandon(self._store, lock_token, delay_ms, block, ignore_attempt=ignore_attempt)

    async def renew_orchestration_item_lock(self, lock_token: str, extend_for_ms: int) -> None:
        self._require_open("renew_orchestration_item_lock")
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        turns.renew(self._store, lock_token, extend_for_ms)

    async def start_orchestration_item(
        self, start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
    ) -> bool:
        self._require_open("start_orchestration_item")
        validation.check_first_turn(start, commit, lock_token, owner)
        return turns.start(self._store, start, commit, lock_token, owner)

    # --- history

    async def read(self, instance_id: str) -> list[HistoryRecord]:
        self._require_open("read")
        check_id(instance_id, "instance id")
        return turns.records_of(self._store.instances.get(instance_id), None)

    async def read_with_execution(
        self,
        instance_id: str,
        execution_id: int,
        *,
        after_event_id: int = 0,
        limit: int | None = None,
    ) -> list[HistoryRecord]:
        self._require_open("read_with_execution")
        check_id(instance_id, "instance id")
        validation.check_history_page(after_event_id, limit)
        records = turns.records_of(self._store.instances.get(instance_id), execution_id)
        return [record for record in records if record.event_id > after_event_id][:limit]

    async def append_with_execution(
        self, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
    ) -> None:
        self._require_open("append_with_execution")
        check_id(instance_id, "instance id")
        validation.check_number(execution_id, "execution_id", minimum=1)
        validation.check_records(records)
        turns.append(self._store, instance_id, execution_id, records)

    # --- worker queue

    async def enqueue_for_worker(self, message: WorkerMessage) -> None:
        self._require_open("enqueue_for_worker")
        validation.check_work(message)
        working.enqueue(self._store, message)

    async def fetch_work_item(
        self,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> FetchedWork | None:
        self._require_open("fetch_work_item")
        validation.check_fetch(lock_timeout_ms, poll_timeout_ms)
        validation.check_session_fetch(session)
        tags = tag_filter or TagFilter.default_only()
        if tags.mode is TagMode.NONE:
            return None
        store = self._store
        return await self._poll(
            store.work_signal,
            poll_timeout_ms,
            lambda: working.fetch(store, lock_timeout_ms, session, tags, activities),
            store.work.sleep_until_ms,
        )

    async def ack_work_item(
        self,
        lock_token: str,
        completion: OrchestratorMessage | None = None,
        retry: WorkerMessage | None = None,
    ) -> None:
        self._require_open("ack_work_item")
        validation.check_follow_up(completion, retry)
        working.ack(self._store, lock_token, completion, retry)

    async def abandon_work_item(
        self, lock_token: str, delay_ms: int | None = None, *, ignore_attempt: bool = False
    ) -> None:
        self._require_open("abandon_work_item")
        validation.check_abandon(delay_ms)
        working.abandon(self._store, lock_token, delay_ms, ignore_attempt=ignore_attempt)

    async def renew_work_item_lock(
        self, lock_token: str, extend_for_ms: int, heartbeat: str | None = None
    ) -> None:
        self._require_open("renew_work_item_lock")
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        validation.check_text(heartbeat, "heartbeat")
        working.renew(self._store, lock_token, extend_for_ms, heartbeat)

    # --- sessions

    async def renew_session_lock(
        self, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
    ) -> int:
        self._require_open("renew_session_lock")
        validation.check_number(extend_for_ms, "extend_for_ms", minimum=1)
        validation.check_number(idle_timeout_ms, "idle_timeout_ms", minimum=0)
        return working.renew_sessions(self._store, owner_ids, extend_for_ms, idle_timeout_ms)

    async def cleanup_orphaned_sessions(self) -> int:
        self._require_open("cleanup_orphaned_sessions")
        return working.cleanup_sessions(self._store)

    # --- orchestrator queue

    async def enqueue_for_orchestrator(
        self,
        message: OrchestratorMessage,
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> bool:
        self._require_open("enqueue_for_orchestrator")
        validation.check_enqueue(message, delay_ms, condition)
        if not self._meets(message.instance_id, condition or EnqueueCondition.ALWAYS):
            return False
        self._refuse_too_much_mail([message], delay_ms)
        self._store.add_message(message, self._store.clock.now_ms(), delay_ms)
        return True

    def _refuse_too_much_mail(
        self, messages: Sequence[OrchestratorMessage], delay_ms: int | None
    ) -> None:
        """Count the mail that no lock carries and that is not for later."""
        mail = [each for each in messages if rules.is_mail(each.kind)]
        if delay_ms:
            return
        for instance_id in {each.instance_id for each in mail if each.visible_at_ms is None}:
            instance = self._store.instances.get(instance_id)
            sizes = [len(each.body.encode()) for each in mail if each.instance_id == instance_id]
            if instance is not None:
                sizes += instance.free_mail_sizes()
            if len(sizes) > self.mail_max or (sum(sizes) > self.mail_bytes_max and len(sizes) > 1):
                raise QueueFull(
                    f"{instance_id!r} would have {len(sizes)} messages of {sum(sizes)} bytes to "
                    f"read; mail_max is {self.mail_max}, mail_bytes_max {self.mail_bytes_max}"
                )

    def _meets(self, instance_id: str, condition: EnqueueCondition) -> bool:
        instance = self._store.instances.get(instance_id)
        exists = instance is not None and instance.exists
        match condition:
            case EnqueueCondition.ALWAYS:
                return True
            case EnqueueCondition.ABSENT:
                return not exists
            case EnqueueCondition.ALIVE:
                if instance is None or not exists:
                    raise NotFound(f"there is no instance {instance_id!r}")
                if instance.has_ended:
                    raise InstanceFinished(f"{instance_id!r} has ended: {instance.status}")
                return True
            case EnqueueCondition.REPLACE:
                if instance is not None:
                    self._refuse_to_take_from_parent(instance)
                    for member in self._store.tree_of(instance):
                        self._store.delete(member)
                return True

    def _refuse_to_take_from_parent(self, child: Instance) -> None:
        parent_id = child.who().parent_instance_id if child.exists else None
        parent = None if parent_id is None else self._store.instances.get(parent_id)
        if parent is not None and parent.exists and not parent.has_ended:
            raise rules.not_a_root(child.instance_id, parent.instance_id)

    async def enqueue_many_for_orchestrator(
        self,
        messages: Sequence[OrchestratorMessage],
        delay_ms: int | None = None,
        condition: EnqueueCondition | None = None,
    ) -> list[bool]:
        self._require_open("enqueue_many_for_orchestrator")
        validation.check_enqueue_many(messages, delay_ms, condition)
        self._refuse_too_much_mail(messages, delay_ms)
        return [
            await self.enqueue_for_orchestrator(message, delay_ms, condition)
            for message in messages
        ]

    async def renew_orchestration_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        return await _lost(self.renew_orchestration_item_lock, lock_tokens, extend_for_ms)

    async def renew_work_item_locks(
        self, lock_tokens: Sequence[str], extend_for_ms: int
    ) -> frozenset[str]:
        return await _lost(self.renew_work_item_lock, lock_tokens, extend_for_ms)

    async def fetch_work_items(
        self,
        limit: int,
        lock_timeout_ms: int,
        poll_timeout_ms: int,
        session: SessionFetch | None = None,
        tag_filter: TagFilter | None = None,
        activities: frozenset[str] | None = None,
    ) -> list[FetchedWork]:
        validation.check_number(limit, "limit", minimum=1)
        found: list[FetchedWork] = []
        while len(found) < limit:
            fetched = await self.fetch_work_item(
                lock_timeout_ms, 0 if found else poll_timeout_ms, session, tag_filter, activities
            )
            if fetched is None:
                break
            found.append(fetched)
        return found

    # --- what clients read

    async def get_custom_status(
        self, instance_id: str, last_seen_version: int = 0
    ) -> tuple[str | None, int] | None:
        self._require_open("get_custom_status")
        check_id(instance_id, "instance id")
        instance = self._store.instances.get(instance_id)
        if instance is None or instance.custom_status_version <= last_seen_version:
            return None
        return instance.custom_status, instance.custom_status_version

    async def get_kv_value(self, instance_id: str, key: str) -> str | None:
        validation.check_text(key, "key of a value")
        entry = (await self.get_kv_all_values(instance_id)).get(key)
        return None if entry is None else entry.value

    async def get_kv_all_values(self, instance_id: str) -> dict[str, KvEntry]:
        self._require_open("get_kv_all_values")
        check_id(instance_id, "instance id")
        instance = self._store.instances.get(instance_id)
        if instance is None:
            return {}
        return rules.merge_kv(instance.kv_store, instance.kv_delta)

    def watch(self, instance_id: str) -> Watch:
        self._require_open("watch")
        check_id(instance_id, "instance id")
        return self._store.changes.watch(instance_id)

    @property
    def admin(self) -> ProviderAdmin:
        return self._admin

    # --- waiting

    async def _poll(
        self,
        signal: Signal,
        poll_timeout_ms: int,
        look: Callable[[], _Fetched | None],
        next_due_ms: Callable[[int], int | None],
    ) -> _Fetched | None:
        """Look until there is something; in between wait for a signal or for the next due time."""
        clock = self._store.clock
        patience = Poll(signal, clock, poll_timeout_ms)
        while True:
            # Before the look: what comes due after this may not be seen by it.
            now_ms = clock.now_ms()
            fetched = look()
            if (
                fetched is not None
                or not await patience.wait(next_due_ms(now_ms))
                or not self._is_open
            ):
                return fetched


async def _lost(
    renew: Callable[[str, int], Awaitable[None]], lock_tokens: Sequence[str], extend_for_ms: int
) -> frozenset[str]:
    lost: set[str] = set()
    for token in lock_tokens:
        try:
            await renew(token, extend_for_ms)
        except LockLost:
            lost.add(token)
    return frozenset(lost)
