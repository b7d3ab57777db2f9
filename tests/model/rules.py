"""Pure rules of the contract (live, visible, ended, shown), apart from those of the library."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from perdure.errors import InvalidValue, LockLost, NotARoot, StoreMoved
from perdure.ids import new_id
from perdure.model.status import Status
from perdure.providers.records import (
    KvClear,
    KvClearAll,
    KvEntry,
    KvSet,
    OrchestrationItem,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from perdure.providers.records import (
        Delivery,
        InstanceInfo,
        InstanceQuery,
        KvChange,
        OrchestrationFilter,
        PruneOptions,
        Version,
    )

T = TypeVar("T")

UNKNOWN_NAME: Final = "unknown"
"""Name of an instance of which only history exists."""

ORPHAN_REASON: Final = "no instance and no start with that id"
"""Why a message became a dead letter."""


# --- time and locks


def is_live(locked_until_ms: int, now_ms: int) -> bool:
    return locked_until_ms > now_ms


def is_visible(visible_at_ms: int, now_ms: int) -> bool:
    return visible_at_ms <= now_ms


def in_due_order(messages: Iterable[T], times_ms: Callable[[T], tuple[int, int]]) -> list[T]:
    """A batch as its messages came due, from the order of the queue.

    ``times_ms``: when a message is visible, and when it was enqueued. One that was sent for later,
    as timers are, came due when its time had come: after an outage, a reply that was there before
    the timeout must be heard before it. All others keep their order, even if the clock went back
    in between.
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
    """Return True for a message from outside; all others overtake a queue that is too long."""
    return kind in {"ExternalRaised", "QueueMessage"}


def visible_at(message_time_ms: int | None, now_ms: int, delay_ms: int | None = None) -> int:
    """A delay wins over the message's own time; without both it is visible at once."""
    if delay_ms is not None:
        return now_ms + delay_ms
    return now_ms if message_time_ms is None else message_time_ms


def new_lock_token() -> str:
    """Unguessable and unique."""
    return new_id()


def lock_lost(operation: str, lock_token: str) -> LockLost:
    return LockLost(
        operation,
        f"invalid lock token {lock_token!r}: it is unknown, expired, already used or taken over",
    )


def not_a_root(instance_id: str, parent_id: str) -> NotARoot:
    return NotARoot(
        f"{instance_id!r} is a sub-orchestration of {parent_id!r}; delete its root instead"
    )


# --- status


def has_ended(status: Status, *, start_queued: bool) -> bool:
    """Ended for good: a continued execution has not while its next start is queued."""
    return status.is_final or (status is Status.CONTINUED_AS_NEW and not start_queued)


def shown_status(execution_status: Status | None, *, suspended: bool, blocked: bool) -> Status:
    """Status of an instance from that of its current execution, None if it has none yet."""
    if execution_status is not None and execution_status.is_final:
        return execution_status
    if suspended:
        return Status.PAUSED
    if blocked:
        return Status.BLOCKED
    return Status.PENDING if execution_status is None else execution_status


# --- filters


def fits_handlers(
    filter: OrchestrationFilter | None,  # noqa: A002
    name: str,
    version: str | None,
) -> bool:
    if filter is None or filter.handlers is None:
        return True
    if version is None:
        return any(name == handler_name for handler_name, _ in filter.handlers)
    return (name, version) in filter.handlers


def fits_framework(
    filter: OrchestrationFilter | None,  # noqa: A002
    pinned: Version | None,
) -> bool:
    if filter is None or filter.framework_versions is None:
        return True
    if pinned is None:
        return bool(filter.framework_versions)
    return any(versions.contains(pinned) for versions in filter.framework_versions)


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
    """Strictly; no bound fits always, no value never fits a bound."""
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
    """The live values, by key."""
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
    """Names the last instance of a page in the order of ``list_instances``."""
    return base64.urlsafe_b64encode(msgspec.json.encode((created_at_ms, instance_id))).decode()


def decode_cursor(cursor: str) -> tuple[int, str]:
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True)
        return msgspec.json.decode(text, type=tuple[int, str])
    except ValueError as error:
        raise InvalidValue(f"not a cursor of this listing: {cursor!r}") from error


def store_moved(place: str, mark: str) -> StoreMoved:
    return StoreMoved("open", f"the content of {place} was moved to {mark}")
