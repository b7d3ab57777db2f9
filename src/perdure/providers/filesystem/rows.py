"""The rows that make up a store, and the journal record that changes them.

Rows are frozen: a change replaces the row, so that undoing, journalling and writing files need only
hold on to one. What changes often is kept apart from what is big. A record holds whole rows with
their final values, so applying it twice is the same as once.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from perdure.model.failures import Block
from perdure.model.status import Status
from perdure.providers.records import (
    HistoryRecord,
    KvEntry,
    OrchestratorMessage,
    StartRouting,
    Version,
    WorkerInfo,
    WorkerMessage,
)


class _Row(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    gc=False,
    tag_field="row",
    tag=str,
):
    """Never part of a cycle, so the garbage collector need not look at the many of them."""


class MessageRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="message"):
    """A message in the orchestrator queue."""

    message_id: int
    message: OrchestratorMessage
    visible_at_ms: int
    enqueued_at_ms: int


class TagRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="tag"):
    """How often a message was handed out, and under which lock; absent for a fresh message."""

    message_id: int
    lock_token: str | None = None
    attempt_count: int = 0


class WorkRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="work"):
    """An item in the worker queue."""

    message_id: int
    message: WorkerMessage
    enqueued_at_ms: int


class ClaimRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="claim"):
    """The changing part of a work item; there is one beside each."""

    message_id: int
    visible_at_ms: int
    lock_token: str | None = None
    locked_until_ms: int = 0
    attempt_count: int = 0
    heartbeat: str | None = None


class InstanceRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="instance"):
    """An instance that has had a turn."""

    instance_id: str
    name: str | None = None
    version: str | None = None
    start: StartRouting | None = None
    """Of the start message that the first turn consumed: stands in for a missing name."""
    parent_instance_id: str | None = None
    created_at_ms: int


class ProgressRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="progress"):
    """Where an instance stands; there is one beside each."""

    instance_id: str
    execution_id: int
    updated_at_ms: int


class CustomStatusRow(
    _Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="custom_status"
):
    instance_id: str
    value: str | None
    version: int


class HoldRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="hold"):
    """What keeps an instance from being fetched besides a lock."""

    instance_id: str
    suspended: bool = False
    block: Block | None = None
    not_before_ms: int | None = None


class LockRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="lock"):
    instance_id: str
    lock_token: str
    locked_until_ms: int
    owner: str | None = None
    is_kept: bool = False
    """An ack kept it between turns: its owner may fetch what arrived since."""


class ExecutionRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="execution"):
    instance_id: str
    execution_id: int
    status: Status = Status.RUNNING
    output: str | None = None
    started_at_ms: int
    completed_at_ms: int | None = None
    framework_version: Version | None = None


class KvStoreRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="kv_store"):
    """A value at the end of the previous execution."""

    instance_id: str
    key: str
    entry: KvEntry


class KvDeltaRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="kv_delta"):
    """A change by the current execution; None: cleared."""

    instance_id: str
    key: str
    entry: KvEntry | None = None


class SessionRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="session"):
    session_id: str
    owner_id: str
    locked_until_ms: int
    last_activity_ms: int


class LetterRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="dead_letter"):
    letter_id: int
    reason: str
    dead_since_ms: int
    message: OrchestratorMessage


class WorkerRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="worker"):
    """A runtime that announced itself."""

    worker: WorkerInfo
    lapses_at_ms: int


class MovedRow(_Row, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="moved"):
    """Where the content of the store went."""

    location: str


Row: TypeAlias = (
    MessageRow
    | TagRow
    | WorkRow
    | ClaimRow
    | InstanceRow
    | ProgressRow
    | CustomStatusRow
    | HoldRow
    | LockRow
    | ExecutionRow
    | KvStoreRow
    | KvDeltaRow
    | SessionRow
    | LetterRow
    | WorkerRow
    | MovedRow
)

Key: TypeAlias = int | str | tuple[str, int | str]


class HistoryChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New events of one execution."""

    instance_id: str
    execution_id: int
    records: tuple[HistoryRecord, ...] = ()
    is_dropped: bool = False
    """What was there before is gone."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One commit."""

    sequence: int
    synced: int
    """Up to this sequence number everything was durable when the record was written."""
    at_ms: int
    verb: str
    """For people."""
    puts: tuple[Row, ...] = ()
    drops: dict[str, tuple[Key, ...]] = {}
    """Keys of rows that are gone, by the rows' tag."""
    history: tuple[HistoryChange, ...] = ()
