"""Pure rules of the contract: what is live, visible, ended, shown.

Every store calls these functions, so that all of them decide alike.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from perdure.errors import (
    AlreadyExists,
    CorruptData,
    InstanceFinished,
    InstanceStillRunning,
    InvalidValue,
    LockLost,
    NotARoot,
    NotFound,
    QueueFull,
    StoreMoved,
    TreeChanged,
)
from perdure.model.status import Status
from perdure.providers.records import (
    KvClear,
    KvClearAll,
    KvEntry,
    KvSet,
    OrchestrationItem,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from perdure.providers.records import (
        Delivery,
        InstanceInfo,
        InstanceQuery,
        KvChange,
        OrchestrationFilter,
        PruneOptions,
        TurnCommit,
        Version,
    )

T = TypeVar("T")

UNKNOWN_NAME: Final = "unknown"
"""Name of an instance of which only history exists."""

ORPHAN_REASON: Final = "no instance and no start with that id"
"""Why a message became a dead letter."""

_MAIL: Final = frozenset({"ExternalRaised", "QueueMessage"})
"""The kinds of mail. The SQL of the stores names them too."""


# --- time and locks


def is_live(locked_until_ms: int, now_ms: int) -> bool:
    return locked_until_ms > now_ms


def is_visible(visible_at_ms: int, now_ms: int) -> bool:
    return visible_at_ms <= now_ms


def in_due_order(messages: Iterable[T], times_ms: Callable[[T], tuple[int, int]]) -> list[T]:
    """Return messages, given in the order of the queue, in the order in which they came due.

    ``times_ms`` returns when a message is visible, and when it was enqueued. One that was sent for
    later, as timers are, came due at its time: after an outage, a reply that was there before the
    timeout must be delivered before it. All others keep their order, even if the clock went back in
    between.
    """
    due: list[tuple[int, T]] = []
    latest_ms = 0
    for message in messages:
        visible_at_ms, enqueued_at_ms = times_ms(message)
        if visible_at_ms <= enqueued_at_ms:
            visible_at_ms = latest_ms = max(latest_ms, enqueued_at_ms)
        due.append((visible_at_ms, message))
    due.sort(key=lambda entry: entry[0])
    return [message for _, message in due]


def is_mail(kind: str) -> bool:
    """Return True for a message from outside. All others overtake mail that has to wait."""
    return kind in _MAIL


def is_full(messages: int, size: int, mail_max: int, mail_bytes_max: int) -> bool:
    """Return True if more mail waits than a limit allows. A single message is never too much."""
    return messages > mail_max or (size > mail_bytes_max and messages > 1)


def visible_at(message_time_ms: int | None, now_ms: int, delay_ms: int | None = None) -> int:
    """Return when a message is visible: after the delay, else at its own time, else at once."""
    if delay_ms is not None:
        return now_ms + delay_ms
    return now_ms if message_time_ms is None else message_time_ms


def lock_lost(operation: str, lock_token: str) -> LockLost:
    return LockLost(
        operation,
        f"invalid lock token {lock_token!r}: it is unknown, expired, already used or taken over",
    )


def message_lost(operation: str, lock_token: str) -> LockLost:
    """Refuse a turn that consumes a message which it cannot remove."""
    return LockLost(
        operation,
        f"the lock {lock_token!r} does not carry each message that the turn consumes: "
        "one is consumed already, or was freed",
    )


def predecessor(commit: TurnCommit) -> int:
    """Return the id of the event that must be stored before the turn; 0 if none must be."""
    delta = commit.history_delta
    return delta[0].event_id - 1 if delta else commit.after_event_id


def event_missing(operation: str, lock_token: str, event_id: int, execution_id: int) -> LockLost:
    """Refuse a turn that goes on from an event which is not stored."""
    return LockLost(
        operation,
        f"the turn under the lock {lock_token!r} goes on from event {event_id} of execution "
        f"{execution_id}, which is not stored: the holder of the lock is ahead of the store",
    )


# --- status


def has_ended(status: Status, *, start_queued: bool) -> bool:
    """Return True if the instance has ended, and no start of a next execution is queued."""
    return status.is_final or (status is Status.CONTINUED_AS_NEW and not start_queued)


def shown_status(execution_status: Status | None, *, suspended: bool, blocked: bool) -> Status:
    """Return the status of an instance from that of its execution; None if it has none yet."""
    if execution_status is not None and execution_status.is_final:
        return execution_status
    if suspended:
        return Status.PAUSED
    if blocked:
        return Status.BLOCKED
    return Status.PENDING if execution_status is None else execution_status


# --- filters


def fits_handlers(wanted: OrchestrationFilter | None, name: str, version: str | None) -> bool:
    if wanted is None or wanted.handlers is None:
        return True
    if version is None:
        return any(name == handler_name for handler_name, _ in wanted.handlers)
    return (name, version) in wanted.handlers


def fits_framework(wanted: OrchestrationFilter | None, pinned: Version | None) -> bool:
    if wanted is None or wanted.framework_versions is None:
        return True
    if pinned is None:
        return bool(wanted.framework_versions)
    return any(versions.contains(pinned) for versions in wanted.framework_versions)


def fits_query(info: InstanceInfo, query: InstanceQuery | None) -> bool:
    if query is None:
        return True
    return (
        (query.statuses is None or info.status in query.statuses)
        and query.name in {None, info.name}
        and query.version in {None, info.version}
        and (query.instance_ids is None or info.instance_id in query.instance_ids)
        and (query.id_prefix is None or info.instance_id.startswith(query.id_prefix))
        and query.parent_instance_id in {None, info.parent_instance_id}
        and not (query.roots_only and info.parent_instance_id is not None)
        and _is_between(info.created_at_ms, query.created_after_ms, query.created_before_ms)
        and _is_between(info.completed_at_ms, query.completed_after_ms, query.completed_before_ms)
        and (query.text is None or _mentions(info, query.text.casefold()))
    )


def is_before(value_ms: int | None, before_ms: int | None) -> bool:
    """Return True if the value is before the bound. No bound: always; else no value: never."""
    return _is_between(value_ms, None, before_ms)


def _is_between(value_ms: int | None, after_ms: int | None, before_ms: int | None) -> bool:
    if after_ms is None and before_ms is None:
        return True
    return (
        value_ms is not None
        and (after_ms is None or value_ms > after_ms)
        and (before_ms is None or value_ms < before_ms)
    )


def _mentions(info: InstanceInfo, text: str) -> bool:
    places = (info.instance_id, info.name, info.output, info.custom_status)
    return any(text in place.casefold() for place in places if place is not None)


def continuing_item(instance_id: str, messages: tuple[Delivery, ...]) -> OrchestrationItem:
    """Return the item of a fetch with ``continues``: the holder knows the rest."""
    return OrchestrationItem(
        instance_id=instance_id,
        name="",
        version=None,
        execution_id=0,
        history=(),
        messages=messages,
        kv_snapshot={},
    )


# --- state


def apply_kv_changes(
    kv_store: Mapping[str, KvEntry],
    kv_delta: dict[str, KvEntry | None],
    changes: Iterable[KvChange],
) -> None:
    """Fold changes into the delta of the current execution, where None stands for cleared."""
    for change in changes:
        match change:
            case KvSet():
                kv_delta[change.key] = KvEntry(
                    value=change.value, updated_at_ms=change.updated_at_ms
                )
            case KvClear():
                kv_delta[change.key] = None
            case KvClearAll():
                kv_delta.update(dict.fromkeys([*kv_store, *kv_delta]))


def merge_kv(
    kv_store: Mapping[str, KvEntry], kv_delta: Mapping[str, KvEntry | None]
) -> dict[str, KvEntry]:
    """Return the live values by key."""
    merged = {**kv_store, **kv_delta}
    return {key: value for key in sorted(merged) if (value := merged[key]) is not None}


def executions_to_prune(
    executions: Mapping[int, tuple[Status, int | None]],
    current_execution_id: int,
    options: PruneOptions,
) -> list[int]:
    """Return the executions, given as (status, completion time), that may be dropped."""
    kept = set(sorted(executions, reverse=True)[: max(options.keep_last or 0, 1)])
    return [
        execution_id
        for execution_id, (status, completed_at_ms) in sorted(executions.items())
        if execution_id != current_execution_id
        and execution_id not in kept
        and status.ends_execution
        and is_before(completed_at_ms, options.completed_before_ms)
    ]


# --- cursors


def encode_cursor(created_at_ms: int, instance_id: str) -> str:
    """Return the text that names the last instance of a page of ``list_instances``."""
    return base64.urlsafe_b64encode(msgspec.json.encode((created_at_ms, instance_id))).decode()


def decode_cursor(cursor: str) -> tuple[int, str]:
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True)
        return msgspec.json.decode(text, type=tuple[int, str])
    except ValueError as error:
        raise InvalidValue(f"not a cursor of this listing: {cursor!r}") from error


# --- errors that every store words alike


def check_readiness(without_row: Sequence[str], without_message: Sequence[str] = ()) -> None:
    """Raise CorruptData for instances whose messages and readiness rows do not go together."""
    found: list[str] = []
    if without_row:
        found.append(
            f"messages of {', '.join(map(repr, without_row))} are delivered to no worker: their "
            "rows in instance_locks are missing; perdure pause ID and perdure resume ID write them"
        )
    if without_message:
        found.append(
            f"a message of {', '.join(map(repr, without_message))} is missing from the queue; "
            "restore a backup, or go on without it by perdure pause ID and perdure resume ID"
        )
    if found:
        raise CorruptData("integrity_check", "; ".join(found))


def no_instance(instance_id: str) -> NotFound:
    return NotFound(f"there is no instance {instance_id!r}")


def none_exists(instance_ids: Iterable[str]) -> NotFound:
    return NotFound(f"none of these instances exists: {sorted(instance_ids)[:10]}")


def no_execution(instance_id: str, execution_id: int | None = None) -> NotFound:
    if execution_id is None:
        return NotFound(f"{instance_id!r} has no execution")
    return NotFound(f"there is no execution {execution_id} of {instance_id!r}")


def no_dead_letter(letter_id: int) -> NotFound:
    return NotFound(f"there is no dead letter {letter_id}")


def already_exists(instance_id: str) -> AlreadyExists:
    return AlreadyExists(f"{instance_id!r} is already in this store")


def instance_finished(instance_id: str, status: str | None = None) -> InstanceFinished:
    return InstanceFinished(f"{instance_id!r} has ended" + (f": {status}" if status else ""))


def queue_full(
    instance_id: str, messages: int, size: int, mail_max: int, mail_bytes_max: int
) -> QueueFull:
    """``messages`` and ``size`` are what would wait with the refused messages."""
    return QueueFull(
        f"{instance_id!r} is not sent more: {messages:,} events and messages of {size:,} bytes "
        f"would wait for it, and at most {mail_max:,} (mail_max) and {mail_bytes_max:,} bytes "
        "(mail_bytes_max) may. Nothing was stored: send it again when the instance has read some. "
        "'perdure show' tells why it does not; both figures are options of the store"
    )


def still_running(instance_id: str, status: str | None = None) -> InstanceStillRunning:
    shown = f" ({status})" if status else ""
    return InstanceStillRunning(
        f"{instance_id!r} is still running{shown}; wait for its end or force the deletion"
    )


def would_orphan(child_id: str, parent_id: str) -> TreeChanged:
    return TreeChanged(
        f"the child {child_id!r} of {parent_id!r} would be orphaned; read the tree again and "
        "delete it as a whole"
    )


def not_a_root(instance_id: str, parent_id: str) -> NotARoot:
    return NotARoot(
        f"{instance_id!r} is a sub-orchestration of {parent_id!r}; delete its root instead"
    )


# --- stores that were moved

_UNFINISHED: Final = "unfinished move to "


def unfinished_move(location: str) -> str:
    """Return the mark while a move to that location goes on, and after one that was cut off."""
    return _UNFINISHED + location


def is_unfinished_move(mark: str) -> bool:
    return mark.startswith(_UNFINISHED)


def place_of_move(mark: str) -> str:
    """Return the location in a mark, of a finished or unfinished move."""
    return mark.removeprefix(_UNFINISHED)


def store_moved(place: str, mark: str, operation: str = "open") -> StoreMoved:
    """Return the error for opening a marked store, where a part must not pass for the whole, and
    for writing to one, where the write would be lost.
    """
    if is_unfinished_move(mark):
        return StoreMoved(
            operation,
            f"a move of {place} to {place_of_move(mark)} is under way or was "
            "interrupted, and only a part is there; repeat 'perdure db copy --move' with the same "
            "two stores to go on where it was",
        )
    return StoreMoved(operation, f"the content of {place} was moved to {mark}; use that")
