"""What a client sees of an instance: a frozen view with decoded values."""

from __future__ import annotations

import asyncio
import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

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
    from perdure.client.waits import OpenStep
    from perdure.codec import Codec
    from perdure.providers.items import InstanceInfo


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance stands, as of one moment."""

    id: str
    name: str
    version: str | None
    execution_id: int
    status: Status
    output: Any
    """The decoded result of a Completed instance, else None; as it is stored if the client's codec
    lacks the transform that wrapped it."""
    failure: Failure | None
    """Why it Failed, was Cancelled or Terminated."""
    block: Block | None
    """Why it is Blocked."""
    custom_status: Any
    custom_status_version: int
    created_at: datetime.datetime
    updated_at: datetime.datetime
    completed_at: datetime.datetime | None
    parent_id: str | None
    waiting_for: tuple[Any, ...] = ()
    """Open steps, oldest first; empty when it has ended, was not asked for, or its history cannot
    be read."""


class Ending(msgspec.Struct, frozen=True, gc=False):
    """How an instance ended, as committed."""

    status: Status
    output: str | None
    name: str
    """Of the orchestration."""


Finished: TypeAlias = asyncio.Future[Ending | None]
"""What an instance that runs in this process resolves: with its end; None if it leaves before."""


def view_of(
    info: InstanceInfo, codec: Codec, waiting_for: tuple[OpenStep, ...] = ()
) -> InstanceStatus:
    status = info.status
    # Between two executions an instance is alive, whatever the store calls the first one.
    if status is Status.CONTINUED_AS_NEW:
        status = Status.RUNNING
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
        created_at=_time(info.created_at_ms),
        updated_at=_time(info.updated_at_ms),
        completed_at=None if info.completed_at_ms is None else _time(info.completed_at_ms),
        parent_id=info.parent_instance_id,
        waiting_for=waiting_for,
    )


def failure_of(info: InstanceInfo) -> Failure | None:
    """The stored failure of an instance that did not end well."""
    return failure_in_output(info.status, info.output)


def failure_in_output(status: Status, output: str | None) -> Failure | None:
    if output is None or not status.is_final or status is Status.COMPLETED:
        return None
    try:
        return msgspec.json.decode(output, type=Failure)
    except msgspec.MsgspecError:
        return Failure(message=output)


def failure_error(status: Status, failure: Failure, what: str) -> RemoteFailure:
    """The exception that a failure is for whoever waits for the result."""
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


def _time(milliseconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(milliseconds / 1000, tz=datetime.UTC)
