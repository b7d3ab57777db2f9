"""A provider of a third party: lists and dictionaries, looked through from end to end.

It declares neither administration nor the hot path, polls short, and forgets.
"""

# ruff: noqa: A002

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perdure.errors import DuplicateEvent, InstanceFinished, NotFound, StoreClosed, StoreRefused
from perdure.limits import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX, ORPHAN_GRACE_MS
from perdure.model.status import Status
from perdure.providers import Capabilities, Provider, rules, validation
from perdure.providers.records import (
    Delivery,
    EnqueueCondition,
    FetchedOrchestration,
    FetchedWork,
    HistoryRecord,
    KvEntry,
    OrchestrationItem,
    OrchestratorMessage,
    StartRouting,
)
from perdure.providers.waiting import ChangeHub

if TYPE_CHECKING:
    from perdure.clock import Clock


@dataclass
class Row:
    """An entry of either queue."""

    message: Any
    message_id: int
    visible_at_ms: int
    enqueued_at_ms: int
    attempts: int = 0
    token: str | None = None
    locked_until_ms: int = 0
    heartbeat: str | None = None


@dataclass
class Instance:
    routing: StartRouting | None = None
    named: bool = False
    execution_id: int = 0
    statuses: dict[int, Status] = field(default_factory=dict)
    pins: dict[int, Any] = field(default_factory=dict)
    histories: dict[int, dict[int, str]] = field(default_factory=dict)
    custom_status: str | None = None
    custom_status_version: int = 0
    kv_store: dict[str, KvEntry] = field(default_factory=dict)
    kv_delta: dict[str, KvEntry | None] = field(default_factory=dict)
    not_before_ms: int = 0
    token: str | None = None
    locked_until_ms: int = 0
    is_cut: bool = False
    mail_held: bool = False
    yielded_at_ms: int = 0


@dataclass
class ToyStore:
    holder: ToyProvider | None = None
    sequence: int = 0
    latest_ms: int = 0
    messages: list[Row] = field(default_factory=list)
    work: list[Row] = field(default_factory=list)
    dead_letters: list[OrchestratorMessage] = field(default_factory=list)
    instances: dict[str, Instance] = field(default_factory=dict)
    sessions: dict[str, tuple[str, int, int]] = field(default_factory=dict)


def _batch(visible: list[Row]) -> tuple[list[Row], bool]:
    """The messages of a fetch in the order of the queue, and whether some are left."""
    visible.sort(key=lambda row: (row.visible_at_ms, row.message_id))
    batch = _that_fit(visible)
    is_cut = len(batch) < len(visible)
    if is_cut:
        rest = visible[len(batch) :]
        batch += _that_fit([row for row in rest if not rules.is_mail(row.message.kind)])
        if not any(row.message.start for row in batch):
            batch += [row for row in rest if row.message.start][:1]
    return sorted(batch, key=lambda row: row.message_id), is_cut


def _that_fit(rows: list[Row]) -> list[Row]:
    size = 0
    for count, row in enumerate(rows):
        size += len(row.message.body.encode())
        if count == BATCH_MESSAGES_MAX or (count and size > BATCH_BYTES_MAX):
            return rows[:count]
    return list(rows)


class ToyProvider(Provider):
    name = "toy"
    version = "0.0.1"
    capabilities = Capabilities(
        durable=False,
        several_handles=False,
        several_processes=False,
        long_poll=False,
        hot_path=False,
        admin=False,
    )

    def __init__(self, store: ToyStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._hub = ChangeHub(clock)

    def clock(self) -> Clock:
        return self._clock

    async def open(self):
        if self._store.holder not in {None, self}:
            raise StoreRefused("open", "another handle is open on this toy store; close it first")
        self._store.holder = self

    async def close(self):
        if self._store.holder is self:
            self._store.holder = None

    def _require_open(self, operation: str) -> None:
        if self._store.holder is not self:
            raise StoreClosed(operation, "the toy is not open")
        now_ms, latest_ms = self._clock.now_ms(), self._store.latest_ms
        self._store.latest_ms = now_ms
        if now_ms < latest_ms:
            self._follow_clock_back(now_ms, latest_ms - now_ms)

    def _follow_clock_back(self, now_ms: int, by_ms: int) -> None:
        for row in (*self._store.messages, *self._store.work):
            if row.visible_at_ms <= row.enqueued_at_ms:
                row.visible_at_ms = min(row.visible_at_ms, now_ms)
            row.enqueued_at_ms = min(row.enqueued_at_ms, now_ms)
            row.locked_until_ms -= by_ms
        for instance in self._store.instances.values():
            instance.locked_until_ms -= by_ms
            instance.not_before_ms -= by_ms
            instance.yielded_at_ms = min(instance.yielded_at_ms, now_ms)

    def _row(self, message, now_ms: int, delay_ms: int | None = None) -> Row:
        self._store.sequence += 1
        visible_at_ms = rules.visible_at(message.visible_at_ms, now_ms, delay_ms)
        return Row(message, self._store.sequence, visible_at_ms, now_ms)

    # --- turns

    async def _fetch_orchestration_item(self, lock_timeout_ms, poll_timeout_ms, filter, owner):
        now_ms = self._clock.now_ms()
        self._bury_orphans(now_ms)
        visible = [
            row for row in self._store.messages if rules.is_visible(row.visible_at_ms, now_ms)
        ]
        for row in sorted(visible, key=self._place):
            instance_id = row.message.instance_id
            batch, is_cut = _batch([each for each in visible if self._is_of(each, instance_id)])
            instance = self._store.instances.get(instance_id)
            routing = self._routing(instance, batch)
            if routing is None or not self._is_free(instance, filter, routing, now_ms):
                continue
            if instance and instance.mail_held and rules.is_mail(row.message.kind):
                continue
            token = self.new_lock_token()
            instance = self._store.instances.setdefault(instance_id, Instance())
            instance.is_cut, instance.mail_held, instance.yielded_at_ms = is_cut, False, 0
            instance.token, instance.locked_until_ms = token, now_ms + lock_timeout_ms
            for each in self._store.messages:
                if each.message.instance_id == instance_id:
                    each.token = None
            for each in batch:
                each.token = token
                each.attempts += 1
            return FetchedOrchestration(
                item=self._item(instance_id, instance, routing, batch),
                lock_token=token,
                attempt_count=max(each.attempts for each in batch),
            )
        return None

    def _place(self, row):
        instance = self._store.instances.get(row.message.instance_id)
        yielded_at_ms = 0 if instance is None else instance.yielded_at_ms
        return max(row.visible_at_ms, yielded_at_ms), row.message_id

    def _is_of(self, row, instance_id) -> bool:
        return row.message.instance_id == instance_id

    def _routing(self, instance, batch):
        if instance is not None and instance.routing is not None:
            return instance.routing
        for row in batch:
            if row.message.start is not None:
                return row.message.start
        if instance is not None and instance.histories:
            return StartRouting(name=rules.UNKNOWN_NAME)
        return None

    def _is_free(self, instance, filter, routing, now_ms) -> bool:
        pin = None
        if instance is not None:
            if rules.is_live(instance.locked_until_ms, now_ms) or instance.not_before_ms > now_ms:
                return False
            pin = instance.pins.get(instance.execution_id)
        return rules.fits_framework(filter, pin) and rules.fits_handlers(
            filter, routing.name, routing.version
        )

    def _item(self, instance_id, instance, routing, batch):
        execution_id = instance.execution_id or max(instance.histories, default=1)
        return OrchestrationItem(
            instance_id=instance_id,
            name=routing.name,
            version=routing.version,
            execution_id=execution_id,
            history=tuple(self._records(instance, execution_id)),
            messages=tuple(
                Delivery(
                    message_id=row.message_id, body=row.message.body, attempt_count=row.attempts
                )
                for row in rules.in_due_order(
                    batch, lambda row: (row.visible_at_ms, row.enqueued_at_ms)
                )
            ),
            kv_snapshot=dict(instance.kv_store),
            parent_instance_id=routing.parent_instance_id,
        )

    def _bury_orphans(self, now_ms: int) -> None:
        with_start = {row.message.instance_id for row in self._store.messages if row.message.start}
        for row in list(self._store.messages):
            instance = self._store.instances.get(row.message.instance_id)
            is_known = instance is not None and (instance.routing or instance.histories)
            is_old = rules.is_visible(
                max(row.visible_at_ms, row.enqueued_at_ms + ORPHAN_GRACE_MS), now_ms
            )
            if is_old and not is_known and row.message.instance_id not in with_start:
                self._store.messages.remove(row)
                self._store.dead_letters.append(row.message)

    def _held(self, operation, lock_token, now_ms, *, even_expired=False):
        for instance_id, instance in self._store.instances.items():
            if instance.token == lock_token and (
                even_expired or rules.is_live(instance.locked_until_ms, now_ms)
            ):
                return instance_id, instance
        raise rules.lock_lost(operation, lock_token)

    def _release(self, instance) -> None:
        for row in self._store.messages:
            if row.token == instance.token:
                row.token = None
        instance.token, instance.locked_until_ms = None, 0

    async def _ack_orchestration_item(self, lock_token, commit):
        now_ms = self._clock.now_ms()
        instance_id, instance = self._held("ack_orchestration_item", lock_token, now_ms)
        if rules.predecessor(commit) > max(
            instance.histories.get(commit.execution_id, ()), default=0
        ):
            needed = rules.predecessor(commit)
            raise rules.event_missing("ack", lock_token, needed, commit.execution_id)
        self._check_new(instance, commit.execution_id, commit.history_delta)
        validation.check_items(commit, instance_id)
        self._consume(instance, lock_token, commit.consumed)
        self._apply_metadata(instance, commit)
        self._append(instance, commit.execution_id, commit.history_delta)
        self._apply_state(instance, commit)
        self._store.work += [self._row(work, now_ms) for work in commit.worker_items]
        self._store.messages += [
            self._row(message, now_ms) for message in commit.orchestrator_items
        ]
        cancelled = commit.cancelled_activities
        self._store.work = [
            row for row in self._store.work if row.message.identity not in cancelled
        ]
        self._store.messages = [
            row
            for row in self._store.messages
            if row.message.instance_id != instance_id
            or row.message.timer is None
            or row.message.timer not in commit.cancelled_timers
        ]
        instance.not_before_ms = 0
        for row in self._store.messages:
            if row.token == lock_token and row.message_id in commit.returned:
                row.attempts -= 1
        status = commit.metadata.status
        goes_on = status is None or not status.ends_execution
        instance.mail_held = bool(commit.returned) and goes_on
        instance.yielded_at_ms = now_ms if commit.returned or instance.is_cut else 0
        self._release(instance)
        self._hub.notify([instance_id])

    def _consume(self, instance, lock_token, consumed) -> None:
        def is_used(row) -> bool:
            return row.token == lock_token and (consumed is None or row.message_id in consumed)

        for row in self._store.messages:
            if is_used(row) and row.message.start is not None and instance.routing is None:
                instance.routing = row.message.start
        self._store.messages = [row for row in self._store.messages if not is_used(row)]

    def _apply_metadata(self, instance, commit) -> None:
        metadata = commit.metadata
        if metadata.name is not None:
            parent = instance.routing.parent_instance_id if instance.named else None
            instance.routing = StartRouting(
                name=metadata.name,
                version=metadata.version,
                parent_instance_id=parent or metadata.parent_instance_id,
            )
            instance.named = True
        instance.execution_id = max(instance.execution_id, commit.execution_id)
        instance.statuses.setdefault(commit.execution_id, Status.RUNNING)
        if metadata.status is not None:
            instance.statuses[commit.execution_id] = metadata.status
        if metadata.framework_version is not None:
            instance.pins[commit.execution_id] = metadata.framework_version

    def _apply_state(self, instance, commit) -> None:
        if commit.custom_status is not None:
            instance.custom_status = commit.custom_status.value
            instance.custom_status_version += 1
        rules.apply_kv_changes(instance.kv_store, instance.kv_delta, commit.kv_changes)
        if commit.metadata.status is not None and commit.metadata.status.ends_execution:
            instance.kv_store = rules.merge_kv(instance.kv_store, instance.kv_delta)
            instance.kv_delta = {}

    async def _abandon_orchestration_item(self, lock_token, delay_ms, *, ignore_attempt, block):
        now_ms = self._clock.now_ms()
        _, instance = self._held(
            "abandon_orchestration_item", lock_token, now_ms, even_expired=True
        )
        for row in self._store.messages:
            if row.token == lock_token and ignore_attempt:
                row.attempts = max(row.attempts - 1, 0)
        if delay_ms is not None:
            instance.not_before_ms = now_ms + delay_ms
        self._release(instance)

    async def _renew_orchestration_item_locks(self, lock_tokens, extend_for_ms):
        now_ms = self._clock.now_ms()
        renewed = set()
        for instance in self._store.instances.values():
            if instance.token in lock_tokens and rules.is_live(instance.locked_until_ms, now_ms):
                instance.locked_until_ms = now_ms + extend_for_ms
                renewed.add(instance.token)
        return frozenset(lock_tokens) - renewed

    # --- history

    def _records(self, instance, execution_id):
        history = instance.histories.get(execution_id, {})
        return [HistoryRecord(event_id=each, data=history[each]) for each in sorted(history)]

    def _check_new(self, instance, execution_id, records) -> None:
        seen = set(instance.histories.get(execution_id, ()))
        for record in records:
            if record.event_id in seen:
                raise DuplicateEvent("append", f"event {record.event_id} exists")
            seen.add(record.event_id)

    def _append(self, instance, execution_id, records) -> None:
        history = instance.histories.setdefault(execution_id, {})
        history.update({record.event_id: record.data for record in records})

    async def _read(self, instance_id):
        instance = self._store.instances.get(instance_id, Instance())
        return self._records(instance, max([instance.execution_id, *instance.histories]))

    async def _read_with_execution(self, instance_id, execution_id, after_event_id, limit):
        records = self._records(self._store.instances.get(instance_id, Instance()), execution_id)
        return [record for record in records if record.event_id > after_event_id][:limit]

    async def _append_with_execution(self, instance_id, execution_id, records):
        instance = self._store.instances.get(instance_id, Instance())
        self._check_new(instance, execution_id, records)
        self._append(instance, execution_id, records)
        self._store.instances[instance_id] = instance

    # --- worker queue

    async def _enqueue_for_worker(self, message):
        now_ms = self._clock.now_ms()
        self._store.work.append(self._row(message, now_ms))

    async def _fetch_work_items(
        self, limit, lock_timeout_ms, poll_timeout_ms, session, tags, activities
    ):
        now_ms = self._clock.now_ms()
        found = []
        for row in self._store.work:
            if len(found) == limit:
                break
            message = row.message
            is_free = not rules.is_live(row.locked_until_ms, now_ms)
            is_ready = is_free and rules.is_visible(row.visible_at_ms, now_ms)
            fits = tags.matches(message.tag) and (activities is None or message.name in activities)
            if is_ready and fits and self._may_use(message.session_id, session, now_ms):
                row.token, row.locked_until_ms = self.new_lock_token(), now_ms + lock_timeout_ms
                row.attempts += 1
                if message.session_id is not None:
                    until_ms = now_ms + session.lock_timeout_ms
                    self._store.sessions[message.session_id] = (session.owner_id, until_ms, now_ms)
                found.append(self._fetched(row))
        return found

    def _fetched(self, row) -> FetchedWork:
        return FetchedWork(
            identity=row.message.identity,
            name=row.message.name,
            body=row.message.body,
            lock_token=row.token,
            attempt_count=row.attempts,
            session_id=row.message.session_id,
            tag=row.message.tag,
            heartbeat=row.heartbeat,
        )

    def _may_use(self, session_id, fetch, now_ms) -> bool:
        if session_id is None:
            return True
        if fetch is None:
            return False
        owner, until_ms, _ = self._store.sessions.get(session_id, (None, 0, 0))
        if rules.is_live(until_ms, now_ms):
            return owner == fetch.owner_id
        return not fetch.only_owned

    def _held_work(self, operation, lock_token, now_ms, *, even_expired=False):
        for row in self._store.work:
            if row.token == lock_token and (
                even_expired or rules.is_live(row.locked_until_ms, now_ms)
            ):
                return row
        raise rules.lock_lost(operation, lock_token)

    def _touch(self, row, now_ms) -> None:
        owner, until_ms, _ = self._store.sessions.get(row.message.session_id, (None, 0, 0))
        if rules.is_live(until_ms, now_ms):
            self._store.sessions[row.message.session_id] = (owner, until_ms, now_ms)

    async def _ack_work_item(self, lock_token, completion, retry):
        now_ms = self._clock.now_ms()
        row = self._held_work("ack_work_item", lock_token, now_ms)
        validation.check_settlement(row.message.identity, completion, retry)
        self._touch(row, now_ms)
        self._store.work.remove(row)
        if completion is not None:
            self._store.messages.append(self._row(completion, now_ms, delay_ms=0))
            self._hub.notify([completion.instance_id])
        if retry is not None:
            self._store.work.append(self._row(retry, now_ms))

    async def _abandon_work_item(self, lock_token, delay_ms, *, ignore_attempt):
        now_ms = self._clock.now_ms()
        row = self._held_work("abandon_work_item", lock_token, now_ms, even_expired=True)
        row.token, row.locked_until_ms = None, 0
        row.visible_at_ms = now_ms + (delay_ms or 0)
        if ignore_attempt:
            row.attempts = max(row.attempts - 1, 0)

    async def _renew_work_item_locks(self, lock_tokens, extend_for_ms, heartbeat):
        now_ms = self._clock.now_ms()
        renewed = set()
        for row in self._store.work:
            if row.token in lock_tokens and rules.is_live(row.locked_until_ms, now_ms):
                row.locked_until_ms = now_ms + extend_for_ms
                row.heartbeat = heartbeat or row.heartbeat
                self._touch(row, now_ms)
                renewed.add(row.token)
        return frozenset(lock_tokens) - renewed

    # --- sessions

    async def _renew_session_lock(self, owner_ids, extend_for_ms, idle_timeout_ms):
        now_ms = self._clock.now_ms()
        renewed = 0
        for session_id, (owner, until_ms, active_ms) in self._store.sessions.items():
            is_active = active_ms > now_ms - idle_timeout_ms
            if owner in owner_ids and is_active and rules.is_live(until_ms, now_ms):
                self._store.sessions[session_id] = (owner, now_ms + extend_for_ms, active_ms)
                renewed += 1
        return renewed

    async def _cleanup_orphaned_sessions(self):
        now_ms = self._clock.now_ms()
        used = {row.message.session_id for row in self._store.work}
        orphaned = [
            session_id
            for session_id, (_, until_ms, _) in self._store.sessions.items()
            if session_id not in used and not rules.is_live(until_ms, now_ms)
        ]
        for session_id in orphaned:
            del self._store.sessions[session_id]
        return len(orphaned)

    # --- orchestrator queue

    async def _enqueue_many_for_orchestrator(self, messages, delay_ms, condition):
        self._check_room(messages, delay_ms)
        return [
            await self._enqueue_for_orchestrator(message, delay_ms, condition)
            for message in messages
        ]

    def _check_room(self, messages, delay_ms) -> None:
        mail = [each for each in messages if rules.is_mail(each.kind) and not delay_ms]
        for instance_id in {each.instance_id for each in mail}:
            queued = [
                row.message for row in self._store.messages if rules.is_mail(row.message.kind)
            ]
            sizes = [
                len(each.body.encode())
                for each in (*queued, *mail)
                if each.instance_id == instance_id and each.visible_at_ms is None
            ]
            bounds = self.mail_max, self.mail_bytes_max
            if rules.is_full(len(sizes), sum(sizes), *bounds):
                raise rules.queue_full(instance_id, len(sizes), sum(sizes), *bounds)

    async def _enqueue_for_orchestrator(self, message, delay_ms, condition):
        now_ms = self._clock.now_ms()
        if not self._meets(message.instance_id, condition):
            return False
        self._check_room([message], delay_ms)
        self._store.messages.append(self._row(message, now_ms, delay_ms))
        self._hub.notify([message.instance_id])
        return True

    def _meets(self, instance_id, condition) -> bool:
        exists, has_ended = self._standing(instance_id)
        if condition is EnqueueCondition.ABSENT:
            return not exists
        if condition is EnqueueCondition.ALIVE:
            if not exists:
                raise NotFound(f"there is no instance {instance_id!r}")
            if has_ended:
                raise InstanceFinished(f"{instance_id!r} has ended")
        if condition is EnqueueCondition.REPLACE:
            parent_id = self._parent_of(instance_id)
            if self._standing(parent_id) == (True, False):
                raise rules.not_a_root(instance_id, parent_id)
            self._delete(instance_id)
        return True

    def _starts(self, instance_id):
        messages = [row.message for row in self._store.messages]
        return [each.start for each in messages if each.start and each.instance_id == instance_id]

    def _standing(self, instance_id):
        """Return whether the instance exists, and whether it has ended."""
        instance, queued = self._store.instances.get(instance_id), bool(self._starts(instance_id))
        if instance is None or not instance.execution_id:
            return queued, False
        status = instance.statuses[instance.execution_id]
        return True, rules.has_ended(status, start_queued=queued)

    def _parent_of(self, instance_id):
        instance = self._store.instances.get(instance_id)
        named = [instance.routing] if instance is not None and instance.routing else []
        routing = next(iter(named + self._starts(instance_id)), None)
        return None if routing is None else routing.parent_instance_id

    def _delete(self, instance_id) -> None:
        children = [
            child_id
            for child_id, child in self._store.instances.items()
            if child.routing is not None and child.routing.parent_instance_id == instance_id
        ]
        for child_id in children:
            self._delete(child_id)
        self._store.instances.pop(instance_id, None)
        self._store.messages = [
            row
            for row in self._store.messages
            if row.message.instance_id != instance_id
            and getattr(row.message.start, "parent_instance_id", None) != instance_id
        ]
        self._store.work = [
            row for row in self._store.work if row.message.identity.instance_id != instance_id
        ]

    # --- what clients read

    async def _get_custom_status(self, instance_id, last_seen_version):
        instance = self._store.instances.get(instance_id, Instance())
        if instance.custom_status_version <= last_seen_version:
            return None
        return instance.custom_status, instance.custom_status_version

    async def _get_kv_value(self, instance_id, key):
        entry = (await self._get_kv_all_values(instance_id)).get(key)
        return None if entry is None else entry.value

    async def _get_kv_all_values(self, instance_id):
        instance = self._store.instances.get(instance_id, Instance())
        return rules.merge_kv(instance.kv_store, instance.kv_delta)

    def _watch(self, instance_id):
        return self._hub.watch(instance_id)
