"""Fetching and settling work items. Each function checks first and then changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model import rules, validation
from perdure.errors import InvalidValue
from perdure.providers.records import FetchedWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.state import WorkItem
    from model.store import ModelStore
    from perdure.providers.records import (
        OrchestratorMessage,
        SessionFetch,
        TagFilter,
        WorkerMessage,
    )


def enqueue(store: ModelStore, message: WorkerMessage) -> None:
    _check_claim_is_new(store, message)
    store.add_work(message, store.clock.now_ms())


def fetch(
    store: ModelStore,
    lock_timeout_ms: int,
    session: SessionFetch | None,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> FetchedWork | None:
    now_ms = store.clock.now_ms()
    item = store.work.first_fit(session, tags, activities, now_ms)
    if item is None:
        return None
    token = rules.new_lock_token()
    item.attempt_count += 1
    store.work.lock(item, token, now_ms + lock_timeout_ms, now_ms)
    message = item.message
    if message.session_id is not None and session is not None:
        store.work.claim_session(message.session_id, session, now_ms)
    return FetchedWork(
        identity=message.identity,
        name=message.name,
        body=message.body,
        lock_token=token,
        attempt_count=item.attempt_count,
        session_id=message.session_id,
        tag=message.tag,
        heartbeat=item.heartbeat,
    )


def ack(
    store: ModelStore,
    lock_token: str,
    completion: OrchestratorMessage | None,
    retry: WorkerMessage | None,
) -> None:
    now_ms = store.clock.now_ms()
    item = _held(store, lock_token, "ack_work_item", now_ms)
    validation.check_settlement(item.identity, completion, retry)
    if retry is not None:
        _check_claim_is_new(store, retry)
    store.work.touch_session(item, now_ms)
    store.remove_work(item)
    if completion is not None:
        store.add_message(completion, now_ms, delay_ms=0)
    if retry is not None:
        store.add_work(retry, now_ms)


def abandon(
    store: ModelStore, lock_token: str, delay_ms: int | None, *, ignore_attempt: bool
) -> None:
    now_ms = store.clock.now_ms()
    item = store.work.holder_of(lock_token)
    if item is None:
        raise rules.lock_lost("abandon_work_item", lock_token)
    if ignore_attempt:
        item.attempt_count = max(item.attempt_count - 1, 0)
    store.work.unlock(item, now_ms + (delay_ms or 0), now_ms)


def renew(store: ModelStore, lock_token: str, extend_for_ms: int, heartbeat: str | None) -> None:
    now_ms = store.clock.now_ms()
    item = _held(store, lock_token, "renew_work_item_lock", now_ms)
    store.work.lock(item, lock_token, now_ms + extend_for_ms, now_ms)
    store.work.touch_session(item, now_ms)
    if heartbeat is not None:
        item.heartbeat = heartbeat


def renew_sessions(
    store: ModelStore, owner_ids: Sequence[str], extend_for_ms: int, idle_timeout_ms: int
) -> int:
    now_ms = store.clock.now_ms()
    renewed = 0
    for session in store.work.sessions.values():
        is_ours = session.owner_id in owner_ids
        is_active = session.last_activity_ms > now_ms - idle_timeout_ms
        if is_ours and is_active and rules.is_live(session.locked_until_ms, now_ms):
            session.locked_until_ms = now_ms + extend_for_ms
            renewed += 1
    return renewed


def cleanup_sessions(store: ModelStore) -> int:
    now_ms = store.clock.now_ms()
    orphaned = [
        session_id
        for session_id, session in store.work.sessions.items()
        if not rules.is_live(session.locked_until_ms, now_ms)
        and not store.work.has_items(session_id)
    ]
    for session_id in orphaned:
        del store.work.sessions[session_id]
    return len(orphaned)


def _held(store: ModelStore, lock_token: str, operation: str, now_ms: int) -> WorkItem:
    item = store.work.holder_of(lock_token)
    if item is None or not rules.is_live(item.locked_until_ms, now_ms):
        raise rules.lock_lost(operation, lock_token)
    return item


def _check_claim_is_new(store: ModelStore, message: WorkerMessage) -> None:
    if message.claim is not None and store.work.holder_of(message.claim.lock_token) is not None:
        raise InvalidValue(f"the lock token {message.claim.lock_token!r} is in use")
