"""The readable files: one JSON document each, indented, with a stable order of keys and a checksum.

Payloads are shown as the JSON that they are whenever that gives back the very same text.
"""

from __future__ import annotations

import zlib
from typing import Final, TypeVar

import msgspec

from perdure.model.failures import Block
from perdure.model.status import Status
from perdure.providers.documents import NO_JSON
from perdure.providers.filesystem.readable import Time
from perdure.providers.filesystem.rows import SessionRow, WorkerRow
from perdure.providers.records import (
    ActivityIdentity,
    StartRouting,
    TimerIdentity,
)

_CHECKSUM_BYTES: Final = len(b',"checksum":"01234567"}')
_encoder = msgspec.json.Encoder()
_Document = TypeVar("_Document", bound=msgspec.Struct)


class Damaged(Exception):
    """A file does not hold what was written into it."""


def seal(document: msgspec.Struct) -> bytes:
    """The content of the document's file."""
    body = _encoder.encode(document)
    sealed = b'%b,"checksum":"%08x"}' % (body[:-1], zlib.crc32(body))
    return msgspec.json.format(sealed, indent=2) + b"\n"


def unseal(data: bytes, kind: type[_Document]) -> _Document:
    """The document in a file; raises Damaged if it is not what was sealed."""
    try:
        compact = msgspec.json.format(data, indent=-1)
        body = compact[:-_CHECKSUM_BYTES] + b"}"
        if compact[-_CHECKSUM_BYTES:] != b',"checksum":"%08x"}' % zlib.crc32(body):
            raise Damaged("the checksum does not fit")
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Damaged(str(error)) from error


# --- payloads


def required(payload: str | None) -> str:
    if payload is None:
        raise Damaged("a payload is missing")
    return payload


# --- what the files hold


class _DocumentBase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class StoreDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    format_version: int
    layout_version: int
    created_at: Time
    moved_to: str | None = None
    checkpoint: int = 0
    """The files hold everything up to this sequence number of the journal."""
    last_message_id: int = 0
    last_letter_id: int = 0


class LockDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    lock_token: str
    locked_until: Time
    owner: str | None = None
    is_kept: bool = False


class KvDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    value: msgspec.Raw = NO_JSON
    value_text: str | None = None
    updated_at: Time


class InstanceDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    instance_id: str
    name: str | None = None
    version: str | None = None
    status: Status | None = None
    """For people; it follows from the rest."""
    parent_instance_id: str | None = None
    execution_id: int | None = None
    """None: it has had no turn; there is only history, or a lock or a hold on its messages."""
    created_at: Time | None = None
    updated_at: Time | None = None
    custom_status: msgspec.Raw = NO_JSON
    custom_status_text: str | None = None
    custom_status_version: int = 0
    suspended: bool = False
    block: Block | None = None
    not_before: Time | None = None
    lock: LockDocument | None = None
    start: StartRouting | None = None
    executions: str = ""
    """Ranges of execution ids that have a directory."""
    kv_store: dict[str, KvDocument] = {}
    kv_delta: dict[str, KvDocument | None] = {}


class ExecutionDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    instance_id: str
    execution_id: int
    status: Status | None = None
    """None: there is only history."""
    output: msgspec.Raw = NO_JSON
    output_text: str | None = None
    started_at: Time | None = None
    completed_at: Time | None = None
    framework_version: str | None = None
    events: str = ""
    """Ranges of event ids."""
    event_count: int = 0
    history_bytes: int = 0
    """Length of the history file; what lies beyond is left from a crash."""
    archived: bool = False


class MessageDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    message_id: int
    instance_id: str
    kind: str
    visible_at: Time
    enqueued_at: Time
    attempt_count: int = 0
    lock_token: str | None = None
    start: StartRouting | None = None
    timer: TimerIdentity | None = None
    asked_visible_at: Time | None = None
    """The time that the message itself named."""
    body: msgspec.Raw = NO_JSON
    body_text: str | None = None


class WorkDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    message_id: int
    identity: ActivityIdentity
    name: str
    visible_at: Time
    enqueued_at: Time
    attempt_count: int = 0
    session_id: str | None = None
    tag: str | None = None
    lock_token: str | None = None
    locked_until: Time | None = None
    heartbeat: msgspec.Raw = NO_JSON
    heartbeat_text: str | None = None
    asked_visible_at: Time | None = None
    body: msgspec.Raw = NO_JSON
    body_text: str | None = None


class LetterDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    letter_id: int
    reason: str
    dead_since: Time
    instance_id: str
    kind: str
    start: StartRouting | None = None
    timer: TimerIdentity | None = None
    asked_visible_at: Time | None = None
    body: msgspec.Raw = NO_JSON
    body_text: str | None = None


class SessionsDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    sessions: tuple[SessionRow, ...]


class WorkersDocument(_DocumentBase, frozen=True, kw_only=True, omit_defaults=True):
    workers: tuple[WorkerRow, ...]
