"""The public view of an instance: a frozen record with decoded values."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.client.durations import utc_time
from perdure.client.steps import OpenStep
from perdure.errors import (
    CannotUnwrap,
    OrchestrationCancelled,
    OrchestrationFailed,
    OrchestrationTerminated,
    RemoteFailure,
)
from perdure.model.failures import Block, Failure
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.codec import Codec
    from perdure.providers.records import InstanceInfo


ENDED: Final = frozenset(status for status in Status if status.is_final)
OPEN: Final = frozenset(Status) - ENDED


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status, times and open steps of an instance at one moment."""

    id: str
    name: str
    version: str | None
    execution_id: int
    status: Status
    output: Any
    """The decoded result of a Completed instance, else None. It stays encoded if the codec of the
    client lacks the transform that wrapped it."""
    failure: Failure | None
    """The reason if it Failed, was Cancelled or Terminated."""
    block: Block | None
    """The reason if it is Blocked."""
    custom_status: Any
    custom_status_version: int
    created_at: datetime.datetime
    updated_at: datetime.datetime
    completed_at: datetime.datetime | None
    parent_id: str | None
    waiting_for: tuple[OpenStep, ...] = ()
    """Open steps, oldest first. Empty after the end, with ``waits=False``, and for a history that
    cannot be read."""


def view_of(
    info: InstanceInfo, codec: Codec, waiting_for: tuple[OpenStep, ...] = ()
) -> InstanceStatus:
    status = info.status.of_instance
    completed = status is Status.COMPLETED and info.output is not None
    return InstanceStatus(
        id=info.instance_id,
        name=info.name,
        version=info.version,
        execution_id=info.execution_id,
        status=status,
        output=_decoded(info.output, codec, "output") if completed else None,
        failure=failure_of(info),
        block=info.block,
        custom_status=_decoded(info.custom_status, codec, "custom status"),
        custom_status_version=info.custom_status_version,
        created_at=utc_time(info.created_at_ms),
        updated_at=utc_time(info.updated_at_ms),
        completed_at=None if info.completed_at_ms is None else utc_time(info.completed_at_ms),
        parent_id=info.parent_instance_id,
        waiting_for=waiting_for,
    )


def failure_of(info: InstanceInfo) -> Failure | None:
    """Return the stored failure of an instance; None if it has none."""
    return failure_in_output(info.status, info.output)


def failure_in_output(status: Status, output: str | None) -> Failure | None:
    if output is None or not status.is_final or status is Status.COMPLETED:
        return None
    try:
        return msgspec.json.decode(output, type=Failure)
    except msgspec.MsgspecError:
        return Failure(message=output)


def failure_error(status: Status, failure: Failure, what: str) -> RemoteFailure:
    """Return the exception that ``result()`` raises for a failure."""
    kinds: dict[Status, type[RemoteFailure]] = {
        Status.CANCELLED: OrchestrationCancelled,
        Status.TERMINATED: OrchestrationTerminated,
    }
    return kinds.get(status, OrchestrationFailed)(
        f"{what}: {failure}",
        message=failure.message,
        type_name=failure.type_name,
        traceback=failure.traceback,
        lineage=failure.lineage,
    )


def _decoded(text: str | None, codec: Codec, where: str) -> Any:
    if text is None:
        return None
    try:
        return codec.decode(msgspec.Raw(text), where=where)
    except CannotUnwrap:
        return msgspec.json.decode(text)
