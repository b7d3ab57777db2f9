"""Validation of arguments: raise InvalidValue for wrong ids, numbers, texts and commits.

The contract calls these functions before a store is asked, so that all stores refuse the same
calls.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from perdure import arguments
from perdure.errors import CorruptData, InvalidValue
from perdure.limits import (
    BULK_INSTANCES_MAX,
    CARRY_FORWARD_BYTES_MAX,
    CUSTOM_STATUS_BYTES_MAX,
    KV_VALUE_BYTES_MAX,
    PAGE_ITEMS_MAX,
    PAYLOAD_BYTES_MAX,
    TAG_BYTES_MAX,
    TIME_MS_MAX,
    check_id,
)
from perdure.model.status import Status
from perdure.model.wire import open_activity, open_message
from perdure.providers.records import (
    ActivityIdentity,
    EnqueueCondition,
    ExecutionMetadata,
    HistoryRecord,
    InstanceSnapshot,
    KvChange,
    KvClearAll,
    KvSet,
    OrchestratorMessage,
    PruneOptions,
    SessionFetch,
    TrustedCommit,
    TurnCommit,
    WorkerInfo,
    WorkerMessage,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.model.failures import Block

BODY_BYTES_MAX: Final = PAYLOAD_BYTES_MAX + CARRY_FORWARD_BYTES_MAX + 64 * 1024
"""A stored text holds one payload, what a continued execution carries along, and an envelope."""

_INTEGER_MAX: Final = arguments.INTEGER_MAX

check_number = arguments.check_number


def check_commit(commit: TurnCommit) -> None:
    if type(commit) is not TrustedCommit:
        check_parts(commit)


def check_parts(commit: TurnCommit) -> None:
    """Check every part of a commit, also of a trusted one."""
    check_number(commit.execution_id, "execution_id", minimum=1)
    check_records(commit.history_delta)
    _check_consecutive(commit.history_delta)
    check_number(commit.after_event_id, "after_event_id", minimum=0)
    for work in commit.worker_items:
        check_work(work)
    for message in commit.orchestrator_items:
        check_message(message)
    check_metadata(commit.metadata)
    if commit.custom_status is not None:
        check_text(commit.custom_status.value, "custom status", CUSTOM_STATUS_BYTES_MAX)
    for change in commit.kv_changes:
        _check_kv_change(change)
    for identity in commit.cancelled_activities:
        check_identity(identity)
    _check_hot_path(commit)


def _check_hot_path(commit: TurnCommit) -> None:
    claims = [work.claim.lock_token for work in commit.worker_items if work.claim is not None]
    settled = commit.settled_work
    if len({*claims, *settled}) < len(claims) + len(settled):
        for tokens, what in ((claims, "claims"), (settled, "settled_work")):
            if len(set(tokens)) < len(tokens):
                raise InvalidValue(f"{what} of a commit name one lock token twice")
        raise InvalidValue("a commit claims an item with a lock token that it settles")
    if commit.keep_lock_ms is None:
        return
    check_number(commit.keep_lock_ms, "keep_lock_ms", minimum=1)
    if commit.returned:
        raise InvalidValue("a commit that keeps the lock returns no message: release the lock")
    adds = commit.worker_items or commit.orchestrator_items or commit.custom_status
    if adds and not commit.history_delta:
        raise InvalidValue(
            "a commit that keeps the lock and adds items must add history: only a repeated event "
            "id shows that the commit is repeated"
        )


def check_metadata(metadata: ExecutionMetadata) -> None:
    if metadata.name is not None:
        check_id(metadata.name, "name")
    elif metadata.version is not None:
        raise InvalidValue(f"the version {metadata.version!r} needs a name beside it")
    _check_optional_ids(version=metadata.version, parent=metadata.parent_instance_id)
    status = metadata.status
    if status is not None and status is not Status.RUNNING and not status.ends_execution:
        raise InvalidValue(f"a turn leaves its execution running or ended, not {status}")
    for name in metadata.__struct_fields__:
        if isinstance(value := getattr(metadata, name), str):
            check_text(value, name)
    for part in metadata.framework_version or ():
        check_number(part, "framework_version", minimum=0)


def check_records(records: Sequence[HistoryRecord]) -> None:
    for record in records:
        check_number(record.event_id, "event_id", minimum=1)
        check_text(record.data, "event")


def _check_consecutive(records: Sequence[HistoryRecord]) -> None:
    """Refuse a hole among the events of a turn. An id that occurs twice is a DuplicateEvent."""
    for before, record in pairwise(records):
        if record.event_id > before.event_id + 1:
            raise InvalidValue(
                f"the events of a turn have consecutive ids: {record.event_id} cannot follow "
                f"{before.event_id}"
            )


def check_message(message: OrchestratorMessage) -> None:
    check_id(message.instance_id, "instance id")
    check_id(message.kind, "kind")
    check_text(message.body, "body of a message")
    _check_optional_number(message.visible_at_ms, "visible_at_ms", minimum=-_INTEGER_MAX)
    if message.start is not None:
        start = message.start
        check_id(start.name, "name")
        if start.version is not None:
            check_id(start.version, "version")
        if start.parent_instance_id is not None:
            check_id(start.parent_instance_id, "parent")
    if message.timer is not None:
        check_number(message.timer.execution_id, "execution_id", minimum=1)
        check_number(message.timer.timer_id, "timer_id", minimum=1)


def check_enqueue(
    messages: Sequence[OrchestratorMessage],
    delay_ms: int | None,
    condition: EnqueueCondition | None,
) -> None:
    _check_optional_number(delay_ms, "delay_ms")
    needs_start = condition in {EnqueueCondition.ABSENT, EnqueueCondition.REPLACE}
    for message in messages:
        check_message(message)
        if needs_start and message.start is None:
            raise InvalidValue(f"only a message with 'start' can be enqueued with {condition!r}")


def check_mail_limits(mail_max: int, mail_bytes_max: int) -> tuple[int, int]:
    """Check the limits of waiting mail, and return them."""
    check_number(mail_max, "mail_max", minimum=1)
    check_number(mail_bytes_max, "mail_bytes_max", minimum=1)
    return mail_max, mail_bytes_max


def check_enqueue_many(
    messages: Sequence[OrchestratorMessage],
    delay_ms: int | None,
    condition: EnqueueCondition | None,
) -> None:
    if condition is EnqueueCondition.ALIVE:
        raise InvalidValue(
            f"{condition!r} may refuse one of many after others were taken; enqueue them one by one"
        )
    check_enqueue(messages, delay_ms, condition)


def check_work(message: WorkerMessage) -> None:
    check_identity(message.identity)
    check_id(message.name, "name of an activity")
    check_text(message.body, "body of a work item")
    if message.session_id is not None:
        check_id(message.session_id, "session")
    check_text(message.tag, "tag", TAG_BYTES_MAX)
    _check_optional_number(message.visible_at_ms, "visible_at_ms", minimum=-_INTEGER_MAX)
    if message.claim is not None:
        check_id(message.claim.lock_token, "lock token")
        check_number(message.claim.lock_timeout_ms, "lock_timeout_ms", minimum=1)
        if message.session_id is not None:
            raise InvalidValue("a work item of a session cannot be claimed; it is fetched")


def check_identity(identity: ActivityIdentity) -> None:
    check_id(identity.instance_id, "instance id")
    check_number(identity.execution_id, "execution_id", minimum=1)
    check_number(identity.activity_id, "activity_id", minimum=1)


def check_items(commit: TurnCommit, instance_id: str) -> None:
    """Check that the work of a turn is its own instance's. Stores call it inside the commit."""
    for work in commit.worker_items:
        if work.identity.instance_id != instance_id:
            raise InvalidValue(f"a turn of {instance_id!r} adds the work item {work.identity}")
    for identity in commit.cancelled_activities:
        if identity.instance_id != instance_id:
            raise InvalidValue(f"a turn of {instance_id!r} cancels the activity {identity}")


def check_first_turn(
    start: OrchestratorMessage, commit: TurnCommit, lock_token: str, owner: str
) -> None:
    """Check the arguments of ``start_orchestration_item``."""
    if type(commit) is TrustedCommit:
        return
    check_message(start)
    check_parts(commit)
    check_id(lock_token, "lock token")
    check_id(owner, "owner")
    if start.start is None or commit.metadata.name is None:
        raise InvalidValue("a first turn needs 'start' beside its message, and a name")


def check_settlement(
    identity: ActivityIdentity,
    completion: OrchestratorMessage | None,
    retry: WorkerMessage | None,
) -> None:
    """Check the follow-up of the work item with that identity. Stores call it inside the commit."""
    if completion is not None and completion.instance_id != identity.instance_id:
        raise InvalidValue(
            f"the completion goes to {completion.instance_id!r}, the work item belongs to "
            f"{identity.instance_id!r}"
        )
    if retry is not None and retry.identity != identity:
        raise InvalidValue(f"the retry is for {retry.identity}, the work item is {identity}")


def check_follow_up(completion: OrchestratorMessage | None, retry: WorkerMessage | None) -> None:
    """Check the follow-up of a work item that is not known yet."""
    if completion is not None and retry is not None:
        raise InvalidValue("a work item is either completed or retried, not both")
    if completion is not None:
        check_message(completion)
    if retry is not None:
        check_work(retry)


def check_fetch(lock_timeout_ms: int, poll_timeout_ms: int, owner: str | None = None) -> None:
    check_number(lock_timeout_ms, "lock_timeout_ms", minimum=1)
    check_number(poll_timeout_ms, "poll_timeout_ms", minimum=0)
    _check_optional_ids(owner=owner)


def check_session_fetch(session: SessionFetch | None) -> None:
    if session is not None:
        check_id(session.owner_id, "owner")
        check_number(session.lock_timeout_ms, "lock_timeout_ms", minimum=1)


def check_abandon(delay_ms: int | None, block: Block | None = None) -> None:
    _check_optional_number(delay_ms, "delay_ms")
    if block is not None:
        for text in (block.message, str(block.detail), block.code):
            check_text(text, "block")


def check_history_page(after_event_id: int, limit: int | None) -> None:
    check_number(after_event_id, "after_event_id", minimum=0)
    _check_optional_number(limit, "limit", minimum=1)


def check_page(limit: int, maximum: int = PAGE_ITEMS_MAX) -> None:
    check_number(limit, "limit", minimum=1, maximum=maximum)


def check_bulk_limit(limit: int | None) -> None:
    if limit is not None:
        check_page(limit, BULK_INSTANCES_MAX)


def check_prune_options(options: PruneOptions) -> None:
    _check_optional_number(options.keep_last, "keep_last")


def check_worker(worker: WorkerInfo, ttl_ms: int) -> None:
    check_id(worker.worker_id, "worker id")
    check_number(ttl_ms, "ttl_ms", minimum=0)


def check_snapshot(snapshot: InstanceSnapshot) -> None:
    """Check that every part of the snapshot is valid and belongs to its instance."""
    check_id(snapshot.instance_id, "instance id")
    _check_optional_ids(
        name=snapshot.name, version=snapshot.version, parent=snapshot.parent_instance_id
    )
    check_text(snapshot.custom_status, "custom status", CUSTOM_STATUS_BYTES_MAX)
    for execution in snapshot.executions:
        check_number(execution.execution_id, "execution_id", minimum=1)
        check_records(execution.history)
    for message in snapshot.messages:
        check_message(message.message)
    for work in snapshot.work:
        check_work(work.message)
    owners = {message.message.instance_id for message in snapshot.messages}
    owners |= {work.message.identity.instance_id for work in snapshot.work}
    if owners - {snapshot.instance_id}:
        raise InvalidValue(f"the snapshot of {snapshot.instance_id!r} holds parts of others")
    _check_times(snapshot)
    # A body that cannot be decoded blocks its instance, in the copy as in the original.
    for message in snapshot.messages:
        with contextlib.suppress(CorruptData):
            open_message(message.message)
    for work in snapshot.work:
        with contextlib.suppress(CorruptData):
            open_activity(work.message)


def _check_times(snapshot: InstanceSnapshot) -> None:
    """Refuse times that no calendar has: one of them would break every listing of the store."""
    instance = {
        "created_at_ms": snapshot.created_at_ms,
        "updated_at_ms": snapshot.updated_at_ms,
        "not_before_ms": snapshot.not_before_ms,
        "since_ms": None if snapshot.block is None else snapshot.block.since_ms,
    }
    times = [
        *instance.items(),
        *(("started_at_ms", each.started_at_ms) for each in snapshot.executions),
        *(("completed_at_ms", each.completed_at_ms) for each in snapshot.executions),
        *(("enqueued_at_ms", each.enqueued_at_ms) for each in snapshot.messages),
        *(("enqueued_at_ms", each.enqueued_at_ms) for each in snapshot.work),
    ]
    for what, time_ms in times:
        if time_ms is not None:
            check_number(time_ms, what, minimum=0, maximum=TIME_MS_MAX)


def check_text(text: str | None, what: str, bytes_max: int = BODY_BYTES_MAX) -> None:
    """Check that every store can keep the text: UTF-8 without NUL, and not too long; or None."""
    if text is None or (text.isascii() and len(text) <= bytes_max and "\0" not in text):
        return
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidValue(f"the {what} holds lone surrogates: {text[:40]!r}...") from error
    if size > bytes_max:
        raise InvalidValue(
            f"the {what} has {size} bytes, at most {bytes_max} are allowed; keep big values "
            "elsewhere and pass a reference"
        )
    if "\0" in text:
        raise InvalidValue(f"the {what} holds a NUL character: {text[:40]!r}...")


def _check_kv_change(change: KvChange) -> None:
    if not isinstance(change, KvClearAll):
        check_text(change.key, "key of a value")
    if isinstance(change, KvSet):
        check_text(change.value, "value", KV_VALUE_BYTES_MAX)
        check_number(change.updated_at_ms, "updated_at_ms", minimum=0)


def _check_optional_number(value: int | None, what: str, minimum: int = 0) -> None:
    if value is not None:
        check_number(value, what, minimum=minimum)


def _check_optional_ids(**ids: str | None) -> None:
    for what, value in ids.items():
        if value is not None:
            check_id(value, what)
