"""The handle of one instance: the verbs of a client for one id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    import asyncio

    from perdure.arguments import Duration
    from perdure.authoring import Orchestration
    from perdure.client.client import Client
    from perdure.client.view import InstanceStatus
    from perdure.model import events
    from perdure.providers.records import KvEntry

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


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
        unknown id.
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

    async def history(self, execution_id: int | None = None) -> list[events.Event]:
        """Return the events of its latest execution, or of the given one.

        The list is empty before its first turn. Raises NotFound for an unknown id, and for an
        execution that never existed or was pruned.
        """
        return await self._client.history(self.id, execution_id)
