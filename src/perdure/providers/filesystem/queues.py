"""Messages, work items and sessions as rows, changed inside a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.errors import InvalidValue
from perdure.providers import rules, validation
from perdure.providers.filesystem.rows import (
    ClaimRow,
    LetterRow,
    MessageRow,
    SessionRow,
    WorkRow,
)
from perdure.providers.records import FetchedWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.filesystem.state import State
    from perdure.providers.filesystem.tables import Transaction
    from perdure.providers.records import (
        OrchestratorMessage,
        SessionFetch,
        TagFilter,
        WorkerMessage,
    )


# --- messages


def add_message(
    state: State, tx: Transaction, message: OrchestratorMessage, delay_ms: int | None = None
) -> None:
    tx.put(
        state.tables.messages,
        MessageRow(
            message_id=tx.next_message_id(),
            message=message,
            visible_at_ms=rules.visible_at(message.visible_at_ms, tx.now_ms, delay_ms),
            enqueued_at_ms=tx.now_ms,
        ),
    )


def remove_message(state: State, tx: Transaction, message_id: int) -> None:
    tx.drop(state.tables.tags, message_id)
    tx.drop(state.tables.messages, message_id)


def bury_orphans(state: State, tx: Transaction) -> None:
    """Turn messages that waited too long for a start into dead letters."""
    for message_id in state.ready_instances.expired_orphans(tx.now_ms):
        letter = LetterRow(
            letter_id=tx.next_letter_id(),
            reason=rules.ORPHAN_REASON,
            dead_since_ms=tx.now_ms,
            message=state.tables.messages.rows[message_id].message,
        )
        remove_message(state, tx, message_id)
        tx.put(state.tables.letters, letter)


# --- work items


def add_work(state: State, tx: Transaction, message: WorkerMessage) -> None:
    claim = message.claim
    if claim is not None and claim.lock_token in state.lookups.claims:
        raise InvalidValue(f"the lock token {claim.lock_token!r} is in use")
    message_id = tx.next_message_id()
    visible_at_ms = rules.visible_at(message.visible_at_ms, tx.now_ms)
    stored = message if claim is None else msgspec.structs.replace(message, claim=None)
    tx.put(
        state.tables.work,
        WorkRow(message_id=message_id, message=stored, enqueued_at_ms=tx.now_ms),
    )
    if claim is None:
        row = ClaimRow(message_id=message_id, visible_at_ms=visible_at_ms)
    else:
        row = ClaimRow(
            message_id=message_id,
            visible_at_ms=visible_at_ms,
            lock_token=claim.lock_token,
            locked_until_ms=tx.now_ms + claim.lock_timeout_ms,
            attempt_count=1,
        )
    tx.put(state.tables.claims, row)


def remove_work(state: State, tx: Transaction, message_id: int) -> None:
    tx.drop(state.tables.claims, message_id)
    tx.drop(state.tables.work, message_id)


def fetch_work(
    state: State,
    tx: Transaction,
    limit: int,
    lock_timeout_ms: int,
    session: SessionFetch | None,
    tags: TagFilter,
    activities: frozenset[str] | None,
) -> list[FetchedWork] | None:
    """The oldest items that this worker may take; None if there is none."""
    found: list[FetchedWork] = []
    while len(found) < limit:
        message_id = state.ready_work.first(session, tags, activities, tx.now_ms)
        if message_id is None:
            break
        found.append(_lock_work(state, tx, message_id, lock_timeout_ms, session))
        state.settle_work(tx.now_ms)
    return found or None


def give_back(state: State, found: list[FetchedWork] | None, tx: Transaction) -> None:
    """Undo a fetch whose caller went away: nobody would do the work before the locks expire."""
    for work in found or ():
        if work.lock_token in state.lookups.claims:
            abandon_work(state, tx, work.lock_token, None, ignore_attempt=True)


def _lock_work(
    state: State,
    tx: Transaction,
    message_id: int,
    lock_timeout_ms: int,
    session: SessionFetch | None,
) -> FetchedWork:
    message = state.tables.work.rows[message_id].message
    claim = msgspec.structs.replace(
        state.tables.claims.rows[message_id],
        lock_token=rules.new_lock_token(),
        locked_until_ms=tx.now_ms + lock_timeout_ms,
        attempt_count=state.tables.claims.rows[message_id].attempt_count + 1,
    )
    tx.put(state.tables.claims, claim)
    if message.session_id is not None and session is not None:
        tx.put(
            state.tables.sessions,
            SessionRow(
                session_id=message.session_id,
                owner_id=session.owner_id,
                locked_until_ms=tx.now_ms + session.lock_timeout_ms,
                last_activity_ms=tx.now_ms,
            ),
        )
    assert claim.lock_token is not None
    return FetchedWork(
        identity=message.identity,
        name=message.name,
        body=message.body,
        lock_token=claim.lock_token,
        attempt_count=claim.attempt_count,
        session_id=message.session_id,
        tag=message.tag,
        heartbeat=claim.heartbeat,
    )


def held_work(state: State, tx: Transaction, lock_token: str) -> int:
    """The work item with that live lock; raises LockLost if there is none."""
    message_id = state.lookups.claims.get(lock_token)
    if message_id is None or not rules.is_live(
        state.tables.claims.rows[message_id].locked_until_ms, tx.now_ms
    ):
        raise rules.lock_lost(tx.verb, lock_token)
    return message_id


def ack_work(
    state: State,
    tx: Transaction,
    lock_token: str,
    completion: OrchestratorMessage | None,
    retry: WorkerMessage | None,
) -> None:
    message_id = held_work(state, tx, lock_token)
    message = state.tables.work.rows[message_id].message
    validation.check_settlement(message.identity, completion, retry)
    _touch_session(state, tx, message.session_id)
    remove_work(state, tx, message_id)
    if completion is not None:
        add_message(state, tx, completion, delay_ms=0)
    if retry is not None:
        add_work(state, tx, retry)


def abandon_work(
    state: State, tx: Transaction, lock_token: str, delay_ms: int | None, *, ignore_attempt: bool
) -> None:
    message_id = state.lookups.claims.get(lock_token)
    if message_id is None:
        raise rules.lock_lost(tx.verb, lock_token)
    claim = state.tables.claims.rows[message_id]
    attempt_count = max(claim.attempt_count - 1, 0) if ignore_attempt else claim.attempt_count
    tx.put(
        state.tables.claims,
        msgspec.structs.replace(
            claim,
            visible_at_ms=tx.now_ms + (delay_ms or 0),
            lock_token=None,
            locked_until_ms=0,
            attempt_count=attempt_count,
        ),
    )


def renew_work(
    state: State, tx: Transaction, lock_token: str, extend_for_ms: int, heartbeat: str | None
) -> None:
    message_id = held_work(state, tx, lock_token)
    claim = state.tables.claims.rows[message_id]
    tx.put(
        state.tables.claims,
        msgspec.structs.replace(
            claim,
            locked_until_ms=tx.now_ms + extend_for_ms,
            heartbeat=claim.heartbeat if heartbeat is None else heartbeat,
        ),
    )
    _touch_session(state, tx, state.tables.work.rows[message_id].message.session_id)


# --- sessions


def _touch_session(state: State, tx: Transaction, session_id: str | None) -> None:
    session = state.tables.sessions.get(session_id) if session_id is not None else None
    if session is not None and rules.is_live(session.locked_until_ms, tx.now_ms):
        tx.put(state.tables.sessions, msgspec.structs.replace(session, last_activity_ms=tx.now_ms))


def renew_sessions(
    state: State,
    tx: Transaction,
    owner_ids: Sequence[str],
    extend_for_ms: int,
    idle_timeout_ms: int,
) -> int:
    renewed = 0
    for owner_id in set(owner_ids):
        for session_id in list(state.lookups.owner_sessions.get(owner_id, ())):
            session = state.tables.sessions.rows[session_id]
            is_active = session.last_activity_ms > tx.now_ms - idle_timeout_ms
            if is_active and rules.is_live(session.locked_until_ms, tx.now_ms):
                until_ms = tx.now_ms + extend_for_ms
                tx.put(
                    state.tables.sessions,
                    msgspec.structs.replace(session, locked_until_ms=until_ms),
                )
                renewed += 1
    return renewed


def cleanup_sessions(state: State, tx: Transaction) -> int:
    orphaned = [
        session_id
        for session_id, session in state.tables.sessions.rows.items()
        if not rules.is_live(session.locked_until_ms, tx.now_ms)
        and session_id not in state.lookups.session_work
    ]
    for session_id in orphaned:
        tx.drop(state.tables.sessions, session_id)
    return len(orphaned)
