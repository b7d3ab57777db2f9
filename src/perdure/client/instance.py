"""One instance: the handle with the verbs of a client for its id, and its status."""

from __future__ import annotations

import datetime
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

import msgspec

from perdure.client.formats import record_from, utc_time
from perdure.client.steps import OpenStep
from perdure.codec import Codec, shown_text
from perdure.errors import CannotUnwrap
from perdure.model.failures import Block, Failure
from perdure.model.status import Status

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from perdure.arguments import Duration
    from perdure.authoring.definitions import Orchestration
    from perdure.client.client import Client
    from perdure.model import events
    from perdure.providers.records import InstanceInfo, KvEntry

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

ENDED: Final = frozenset(status for status in Status if status.is_final)
OPEN: Final = frozenset(Status) - ENDED
ACTS_ON: Final = {
    "cancel": OPEN,
    "terminate": OPEN,
    "pause": OPEN - {Status.PAUSED},
    "resume": frozenset({Status.PAUSED, Status.BLOCKED}),
    "retry": frozenset({Status.BLOCKED, Status.FAILED}),
    "purge": ENDED,
}
"""The instances that each action takes from a query; one that is named by its id is always tried.
"""


def is_given(_value: object) -> bool:
    """Return True: any value ends the wait."""
    return True


class Handle(Generic[R_co]):
    """An instance by its id. It holds no connection, and the instance need not exist yet."""

    __slots__ = ("_client", "_finished", "_orchestration", "id")

    def __init__(
        self,
        client: Client,
        instance_id: str,
        orchestration: Orchestration[..., R_co] | None,
        finished: asyncio.Future[Any] | None = None,
    ) -> None:
        self.id = instance_id
        self._client = client
        self._orchestration = orchestration
        self._finished = finished

    def __repr__(self) -> str:
        return f"<Handle {self.id!r}>"

    async def result(self, timeout: Duration | None = None) -> R_co:  # noqa: ASYNC109
        """Wait for the end and return the result, typed by the orchestration.

        Raises OrchestrationFailed, OrchestrationCancelled or OrchestrationTerminated as it ended,
        WaitTimeout after ``timeout`` (seconds or a timedelta; the work goes on), NotFound for an
        unknown id. A store that is busy or away is asked again until the timeout; without one, its
        error is raised.
        """
        return await self._client._result(self, timeout)  # noqa: SLF001

    async def describe(self, *, waits: bool = True) -> InstanceStatus:
        """Return its status, custom status, times and open steps.

        ``waits=False`` leaves the open steps out, which is cheaper.
        """
        return await self._client.describe(self.id, waits=waits)

    async def raise_event(self, name: str, value: object = None) -> None:
        """Send an event to ``wait_for_event(name, ...)``. It is kept until then."""
        await self._client.raise_event(self.id, name, value)

    async def send_message(self, queue: str, value: object = None) -> None:
        """Put a message into the mailbox that ``next_message(queue, ...)`` reads in order."""
        await self._client.send_message(self.id, queue, value)

    @overload
    async def ask(
        self,
        name: str,
        value: object = None,
        *,
        timeout: Duration | None = ...,  # noqa: ASYNC109
        id: str | None = ...,
    ) -> Any: ...
    @overload
    async def ask(
        self,
        name: str,
        value: object,
        type: type[T],
        *,
        timeout: Duration | None = ...,  # noqa: ASYNC109
        id: str | None = ...,
    ) -> T: ...
    async def ask(
        self,
        name: str,
        value: object = None,
        type: Any = Any,  # noqa: A002
        *,
        timeout: Duration | None = None,  # noqa: ASYNC109
        id: str | None = None,  # noqa: A002
    ) -> Any:
        """Ask it, and return the reply of its ``requests(name)``, checked against the type.

        The request is read once, and its reply is part of the commit of a turn. Asking again with
        the same ``id`` waits for the reply of the first time. Raises RequestRejected, WaitTimeout
        after ``timeout``, InstanceFinished or NotFound if no reply can come any more.
        """
        from perdure.client.answers import ask

        return await ask(self._client, self.id, name, value, type, timeout=timeout, given_id=id)

    async def peek(self, expression: str) -> Any:
        """Return a copy of a local variable of its code: ``"items"``, ``"order.lines[0]"``.

        The stored history is replayed here, with the code of the runtime or of
        ``client.get(id, orchestration)``. No worker is needed, and nothing is written.
        """
        from perdure.client.recorded import peek

        return await peek(self._client, self.id, expression, self._orchestration)

    async def cancel(self, reason: str = "") -> None:
        """Request its cancellation: its code gets CancelledError once, and may clean up."""
        await self._client.cancel(self.id, reason)

    async def terminate(self, reason: str = "") -> None:
        """End it now, without running its code."""
        await self._client.terminate(self.id, reason)

    async def pause(self) -> None:
        """Stop running its turns until ``resume``."""
        await self._client.pause(self.id)

    async def resume(self) -> None:
        """Continue after ``pause``, or retry a Blocked instance."""
        await self._client.resume(self.id)

    async def wait_for_status_change(
        self,
        last_seen_version: int,
        timeout: Duration | None = None,  # noqa: ASYNC109
    ) -> InstanceStatus:
        """Wait until the custom status is newer than that version, or the instance has ended."""
        return await self._client.wait_for_status_change(self.id, last_seen_version, timeout)

    @overload
    async def state(self, key: str) -> Any: ...
    @overload
    async def state(self, key: str, type: type[T]) -> T | None: ...
    async def state(self, key: str, type: Any = Any) -> Any:  # noqa: A002
        """Return the current value of a key of its ``state``, or None."""
        return await self._client.state(self.id, key, type)

    async def state_items(self) -> dict[str, KvEntry]:
        """Return all keys of its ``state`` with their JSON texts and times."""
        return await self._client.provider.get_kv_all_values(self.id)

    @overload
    async def wait_for_state(
        self,
        key: str,
        *,
        until: Callable[[Any], bool] = ...,
        timeout: Duration | None = ...,  # noqa: ASYNC109
    ) -> Any: ...
    @overload
    async def wait_for_state(
        self,
        key: str,
        type: type[T],
        *,
        until: Callable[[T], bool] = ...,
        timeout: Duration | None = ...,  # noqa: ASYNC109
    ) -> T: ...
    async def wait_for_state(
        self,
        key: str,
        type: Any = Any,  # noqa: A002
        *,
        until: Callable[[Any], bool] = is_given,
        timeout: Duration | None = None,  # noqa: ASYNC109
    ) -> Any:
        """Wait until a key of its ``state`` has a value, and ``until(value)`` is true.

        Raises InstanceFinished if it ends before, WaitTimeout after ``timeout``.
        """
        client = self._client
        return await client.wait_for_state(self.id, key, type, until=until, timeout=timeout)

    async def stats(self) -> InstanceStats:
        """Return the size of its history, queues and state."""
        return await self._client.stats(self.id)

    async def history(self, execution_id: int | None = None) -> list[events.Event]:
        """Return the events of its latest execution, or of the given one.

        The list is empty before its first turn. Raises NotFound for an unknown id, and for an
        execution that never existed or was pruned.
        """
        return await self._client.history(self.id, execution_id)


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


class InstanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """The size of an instance at one moment. Bytes are those of the stored JSON."""

    history_events: int
    """Events of the current execution; ``docs/reference/limits.md`` has the limit."""
    history_bytes: int
    pending_messages: int
    """Events, messages, timers and answers that wait for a turn; at most 10,000 are counted."""
    pending_activities: int
    state_keys: int
    state_bytes: int


def view_of(
    info: InstanceInfo, codec: Codec, waiting_for: tuple[OpenStep, ...] = ()
) -> InstanceStatus:
    status = info.status.of_instance
    completed = status is Status.COMPLETED and info.output is not None
    return record_from(
        InstanceStatus,
        info,
        id=info.instance_id,
        status=status,
        output=_decoded(info.output, codec, "output") if completed else None,
        failure=failure_of(info),
        block=block_of(info),
        custom_status=_decoded(info.custom_status, codec, "custom status"),
        created_at=utc_time(info.created_at_ms),
        updated_at=utc_time(info.updated_at_ms),
        completed_at=None if info.completed_at_ms is None else utc_time(info.completed_at_ms),
        parent_id=info.parent_instance_id,
        waiting_for=waiting_for,
    )


def count_by_status(counts: Mapping[Status, int]) -> dict[Status, int]:
    """Count instances between two executions as Running, and leave out statuses without any."""
    found: Counter[Status] = Counter()
    for status in Status:
        found[status.of_instance] += counts.get(status, 0)
    return dict(+found)


def block_of(info: InstanceInfo) -> Block | None:
    """Return the reason of a Blocked instance, with a readable message."""
    block = info.block
    return block and msgspec.structs.replace(block, message=shown_text(block.message))


def failure_of(info: InstanceInfo) -> Failure | None:
    """Return the stored failure of an instance; None if it has none."""
    return failure_in_output(info.status, info.output)


def failure_in_output(status: Status, output: str | None) -> Failure | None:
    if output is None or not status.is_bad_end:
        return None
    try:
        failure = msgspec.json.decode(output, type=Failure)
    except msgspec.MsgspecError:
        return Failure(message=output)
    return msgspec.structs.replace(failure, message=shown_text(failure.message))


def _decoded(text: str | None, codec: Codec, where: str) -> Any:
    if text is None:
        return None
    try:
        return codec.decode(msgspec.Raw(text), where=where)
    except CannotUnwrap:
        return msgspec.json.decode(text)
