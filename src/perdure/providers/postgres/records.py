"""Converts records of the contract to parameters of the schema's functions, and rows to records.

Operations are sent as JSON, which msgspec writes faster than the driver writes arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.errors import DuplicateEvent
from perdure.providers import rules
from perdure.providers.postgres.statements import INSTANCE_COLUMNS
from perdure.providers.records import (
    ActivityIdentity,
    Delivery,
    ExecutionInfo,
    FetchedOrchestration,
    FetchedWork,
    HistoryRecord,
    InstanceInfo,
    KvChange,
    KvClear,
    KvClearAll,
    KvEntry,
    KvSet,
    OrchestrationFilter,
    OrchestrationItem,
    TagFilter,
    TagMode,
    TurnCommit,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.providers.postgres.hosts import Row

# The steps of apply_turns that a turn needs.
COMPLETES_WORK: Final = 1
CONSUMES: Final = 2
UPDATES_EXECUTION: Final = 4
CHANGES_STATE: Final = 8
ENDS_EXECUTION: Final = 16
ADDS_WORK: Final = 32
CANCELS_WORK: Final = 64
ADDS_MESSAGES: Final = 128
CANCELS_TIMERS: Final = 256
NAMES: Final = 512
UNCOMMON: Final = 1024
"""The turn needs the general form: the short forms in commits.sql do not cover it."""
FOLLOWS: Final = 2048
"""The turn goes on from an event, which must be stored."""
RETURNS: Final = 4096
"""The turn gives deliveries back."""

_LISTS: Final = {
    "history_delta": 0,
    "settled_work": COMPLETES_WORK,
    "worker_items": ADDS_WORK,
    "cancelled_activities": CANCELS_WORK,
    "orchestrator_items": ADDS_MESSAGES,
    "cancelled_timers": CANCELS_TIMERS,
    "returned": RETURNS,
}
"""The fields of a commit that are lists, with the step that each needs."""
_UNCOMMON_PARTS: Final = CHANGES_STATE | CANCELS_WORK | ADDS_MESSAGES | CANCELS_TIMERS | RETURNS
_UNCOMMON_FIRST: Final = _UNCOMMON_PARTS | CONSUMES | COMPLETES_WORK | ENDS_EXECUTION | FOLLOWS
_UNCOMMON_LATER: Final = _UNCOMMON_PARTS | NAMES
_CONSUMED_MAX: Final = 20
"""The general form is faster for more messages than this."""

# What enqueue_messages has to check.
SOME_ALIVE: Final = 1
SOME_ABSENT: Final = 2
SOME_MAIL: Final = 4

_SEPARATOR: Final = "\x1f"


# --- into the store


def check_no_repeated_event(
    records: Sequence[HistoryRecord], execution_id: int, operation: str
) -> None:
    if len({record.event_id for record in records}) < len(records):
        raise DuplicateEvent(operation, f"an event of execution {execution_id} is given twice")


def turn_row(
    instance_id: str, token: str, commit: TurnCommit, *, is_first: bool
) -> tuple[dict[str, Any], int]:
    """Return a turn as ``apply_turns`` takes it, and the steps that it needs."""
    metadata = commit.metadata
    row: dict[str, Any] = {
        "instance_id": instance_id,
        "token": token,
        "execution_id": commit.execution_id,
        "consumed": commit.consumed,
    }
    parts = CONSUMES if commit.consumed is None or commit.consumed else 0
    if after := rules.predecessor(commit):
        row["after"] = after
        parts |= FOLLOWS
    for name, part in _LISTS.items():
        value = getattr(commit, name)
        if value:
            row[name] = value
            parts |= part
    for name in ("status", "output", "framework_version"):
        value = getattr(metadata, name)
        if value is not None:
            row[name] = value
            parts |= UPDATES_EXECUTION
    if metadata.status is not None and metadata.status.ends_execution:
        parts |= ENDS_EXECUTION
    if metadata.name is not None:
        row["name"], row["version"] = metadata.name, metadata.version
        row["parent_instance_id"] = metadata.parent_instance_id
        parts |= NAMES
    if commit.keep_lock_ms is not None:
        row["keep_lock_ms"] = commit.keep_lock_ms
    if commit.custom_status is not None:
        row["custom_status"] = commit.custom_status
    if commit.kv_changes:
        row["kv_cleared"], row["kv"] = _folded(commit.kv_changes)
        parts |= CHANGES_STATE
    is_common = _is_common_start if is_first else _is_common_step
    return row, parts if is_common(parts, commit) else parts | UNCOMMON


def _is_common_start(parts: int, commit: TurnCommit) -> bool:
    return (
        not parts & _UNCOMMON_FIRST
        and commit.keep_lock_ms is not None
        and commit.custom_status is None
        and commit.metadata.output is None
    )


def _is_common_step(parts: int, commit: TurnCommit) -> bool:
    if commit.keep_lock_ms is None:
        status = commit.metadata.status
        if status is None or not status.is_final or commit.metadata.framework_version is not None:
            return False
    elif parts & UPDATES_EXECUTION:
        return False
    return (
        not parts & _UNCOMMON_LATER
        and commit.custom_status is None
        and len(commit.settled_work) <= 1
        and (commit.consumed is not None and len(commit.consumed) <= _CONSUMED_MAX)
    )


def _folded(changes: Iterable[KvChange]) -> tuple[bool, list[dict[str, Any]]]:
    """Return True if all older values are cleared, and the last change of each key after that."""
    cleared = False
    last: dict[str, dict[str, Any]] = {}
    for change in changes:
        match change:
            case KvSet():
                last[change.key] = {
                    "key": change.key,
                    "value": change.value,
                    "updated_at_ms": change.updated_at_ms,
                }
            case KvClear():
                last[change.key] = {"key": change.key, "value": None}
            case KvClearAll():
                cleared = True
                last = {key: {"key": key, "value": None} for key in last}
    return cleared, list(last.values())


def size_of(commit: TurnCommit) -> int:
    """Return roughly the size of a turn, to limit a batch."""
    return (
        sum(len(record.data) for record in commit.history_delta)
        + sum(len(work.body) for work in commit.worker_items)
        + sum(len(message.body) for message in commit.orchestrator_items)
    )


# --- filters


def routes_of(filter: OrchestrationFilter | None) -> list[str] | None:  # noqa: A002
    """Return the routes (name and version) of instances that fit; None: any."""
    if filter is not None and filter.framework_versions == ():
        return []
    if filter is None or filter.handlers is None:
        return None
    routes = {f"{name}{_SEPARATOR}#{version}" for name, version in filter.handlers}
    return sorted(routes | {f"{name}{_SEPARATOR}" for name, _ in filter.handlers})


def ranges_of(filter: OrchestrationFilter | None) -> str | None:  # noqa: A002
    if filter is None or filter.framework_versions is None:
        return None
    return msgspec.json.encode(filter.framework_versions).decode()


def suffixes_of(tags: TagFilter) -> list[str] | None:
    """Return the parts of a route after the activity's name that fit; None: any."""
    if tags.mode is TagMode.ANY:
        return None
    suffixes = [f"#{tag}" for tag in sorted(tags.tags)]
    return suffixes if tags.mode is TagMode.TAGS else ["", *suffixes]


def work_routes(names: Sequence[str] | None, suffixes: Sequence[str] | None) -> list[str] | None:
    """Return all routes that a worker takes, or None if they cannot be listed."""
    if names is None or suffixes is None:
        return None
    return [f"{name}{_SEPARATOR}{suffix}" for name in names for suffix in suffixes]


# --- out of the store


def fetched_turn(row: Row, history_error: str | None = None) -> FetchedOrchestration:
    (instance_id, token, continues, name, version, parent, execution_id, *arrays) = row[:15]
    message_ids, bodies, attempts, event_ids, events, keys, values, times = arrays
    messages = tuple(
        Delivery(message_id=message_id, body=body, attempt_count=attempt)
        for message_id, body, attempt in zip(message_ids, bodies, attempts, strict=True)
    )
    if continues:
        item = rules.continuing_item(instance_id, messages)
    else:
        item = OrchestrationItem(
            instance_id=instance_id,
            name=name,
            version=version,
            execution_id=execution_id,
            history=records(zip(event_ids or (), events or (), strict=True)),
            messages=messages,
            kv_snapshot=kv_entries(zip(keys or (), values or (), times or (), strict=True)),
            parent_instance_id=parent,
            history_error=history_error,
        )
    return FetchedOrchestration(
        item=item, lock_token=token, attempt_count=max(attempts), continues=continues
    )


def fetched_work(row: Row) -> FetchedWork:
    instance_id, execution_id, activity_id, name, body, token, attempts, *rest = row
    session_id, tag, heartbeat = rest[:3]
    return FetchedWork(
        identity=ActivityIdentity(
            instance_id=instance_id, execution_id=execution_id, activity_id=activity_id
        ),
        name=name,
        body=body,
        lock_token=token,
        attempt_count=attempts,
        session_id=session_id,
        tag=tag,
        heartbeat=heartbeat,
    )


def records(rows: Iterable[Row]) -> tuple[HistoryRecord, ...]:
    return tuple(HistoryRecord(event_id=event_id, data=data) for event_id, data in rows)


def kv_entries(rows: Iterable[Row]) -> dict[str, KvEntry]:
    return {key: KvEntry(value=value, updated_at_ms=at_ms) for key, value, at_ms in rows}


def instance_info(row: Row) -> InstanceInfo:
    return msgspec.convert(dict(zip(INSTANCE_COLUMNS, row, strict=True)), InstanceInfo)


def execution_info(row: Row) -> ExecutionInfo:
    fields = zip(ExecutionInfo.__struct_fields__, row, strict=True)
    return msgspec.convert(dict(fields), ExecutionInfo)
