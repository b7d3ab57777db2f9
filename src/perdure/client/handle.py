"""The handle of one instance: everything that can be done to it, by its id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    import asyncio

    from perdure.authoring import Orchestration
    from perdure.client.client import Client
    from perdure.client.view import InstanceStatus
    from perdure.model import events
    from perdure.providers.items import KvEntry

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class Handle(Generic[R_co]):
    """An instance by its id. Cheap, holds no connection, and may name what does not exist yet."""

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

    async def result(self, timeout: float | None = None) -> R_co:  # noqa: ASYNC109
        """Wait for the end and return the result, typed by the orchestration.

        Raises OrchestrationFailed, OrchestrationCancelled or OrchestrationTerminated as it ended,
        WaitTimeout after ``timeout`` seconds (the work goes on), NotFound for an unknown id.
        """
        return await self._client._result(self, timeout)  # noqa: SLF001

    async def status(self, *, waits: bool = True) -> InstanceStatus:
        """Where it stands now; ``waits=False`` leaves out what it waits for, and is cheaper."""
        return await self._client.status(self.id, waits=waits)

    async def raise_event(self, name: str, value: object = None) -> None:
        """Send an event to ``wait_for_event(name, ...)``; kept if nobody waits yet."""
        await self._client.raise_event(self.id, name, value)

    async def enqueue_event(self, queue: str, value: object = None) -> None:
        """Put a message into the mailbox that ``next_message(queue, ...)`` reads."""
        await self._client.enqueue_event(self.id, queue, value)

    async def cancel(self, reason: str = "") -> None:
        """Ask it to stop: CancelledError is raised once in its code, with time to clean up."""
        await self._client.cancel(self.id, reason)

    async def terminate(self, reason: str = "") -> None:
        """End it now, without running any of its code."""
        await self._client.terminate(self.id, reason)

    async def pause(self) -> None:
        """Let no further turn run until ``resume``."""
        await self._client.pause(self.id)

    async def resume(self) -> None:
        """Go on after ``pause``, or try a Blocked instance again."""
        await self._client.resume(self.id)

    async def wait_for_status_change(
        self,
        last_seen_version: int,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> InstanceStatus:
        """Wait until the custom status is newer than that version, or the instance has ended."""
        return await self._client.wait_for_status_change(self.id, last_seen_version, timeout)

    @overload
    async def state(self, key: str) -> Any: ...
    @overload
    async def state(self, key: str, type: type[T]) -> T | None: ...
    async def state(self, key: str, type: Any = Any) -> Any:  # noqa: A002
        """The live value of a key of its ``state``, or None."""
        return await self._client.state(self.id, key, type)

    async def state_items(self) -> dict[str, KvEntry]:
        """All keys of its ``state`` with their JSON texts and times."""
        return await self._client.provider.get_kv_all_values(self.id)

    async def history(self, execution_id: int | None = None) -> list[events.Event]:
        """The events of its latest execution, or of the one named; none before it has begun.

        Raises NotFound for an unknown id, and for an execution that it does not have (any more).
        """
        return await self._client.history(self.id, execution_id)
