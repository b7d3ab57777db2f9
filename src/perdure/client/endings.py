"""Wait for the end of an instance: in this process if it runs here, else through the store.

A plain client talks to the store only. A ``Runtime`` is a client that also runs instances, so its
starts can skip the queue, and its waits can skip the store.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar

import msgspec

from perdure.authoring.context import find_recorder
from perdure.client.insights import read_insight
from perdure.client.instance import block_of
from perdure.errors import ProviderError, UsageError, WaitTimeout
from perdure.logs import get_logger
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from contextvars import Context

    from perdure.authoring.definitions import Orchestration
    from perdure.clock import Clock
    from perdure.model import work
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo

T = TypeVar("T")

log = get_logger("perdure.client")

_LOOK_SECONDS = 1.0
"""Time for a look at the store after the deadline, so that a timeout of 0 looks once."""
_PAUSE_SECONDS = 0.5
"""The pause between two looks at a store that is busy or away."""


class Ending(msgspec.Struct, frozen=True, gc=False):
    """The committed end of an instance."""

    status: Status
    output: str | None
    name: str
    """Name of the orchestration."""


Finished: TypeAlias = asyncio.Future[Ending | None]
"""The end of an instance that runs in this process; None if it leaves the process before."""


class PendingStart:
    """A start that the runtime of this process has taken up."""

    __slots__ = ("committed", "ended", "item", "unsure")

    def __init__(self, item: work.StartOrchestration, loop: asyncio.AbstractEventLoop) -> None:
        self.item = item
        self.committed: asyncio.Future[bool] = loop.create_future()
        """True once the first turn is in the store; False if the start must be enqueued instead.
        Raises what the store raised. Cancelling it withdraws a start that has not begun."""
        self.ended: Finished = loop.create_future()
        """The committed end; None if the instance leaves this process before it ends."""
        self.unsure: str | None = None
        """The first event, with its random seed, if it was sent and the answer was lost: an
        instance that begins with it was created by this start."""


class LocalInstances(Protocol):
    """The live instances of a running runtime."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that drives them."""
        ...

    @property
    def room(self) -> int:
        """The number of instances that can be started without evicting a live one."""
        ...

    def check_start(
        self, item: work.StartOrchestration, target: Orchestration[..., Any] | str
    ) -> None:
        """Log a warning if this runtime does not have the orchestration, or has other code."""
        ...

    def begin(self, item: work.StartOrchestration) -> PendingStart | None:
        """Create an instance and commit its first turn. None: enqueue the start instead."""
        ...

    def ended(self, instance_id: str) -> Finished | None:
        """Return the future of the instance's end; None if it is not live here."""
        ...

    def check_arrival(self, item: work.ExternalRaised | work.QueueMessage) -> None:
        """Raise PayloadError if the instance is live here and waits for another type."""
        ...

    def terminated(self, instance_id: str) -> None:
        """Stop working on an instance that an operator has ended."""
        ...


class EndWaiter:
    """Waits for the ends of instances of one store."""

    def __init__(self, provider: Provider, clock: Clock) -> None:
        self._provider = provider
        self._clock = clock
        self.local: LocalInstances | None = None
        """The instances that are live in this process, while a runtime runs them."""
        self.watch_ms = 5_000
        """The store notices changes, also of other processes. This bounds a missed notice."""

    async def wait(
        self, instance_id: str, finished: Finished | None, deadline_ms: int | None
    ) -> Ending:
        """Return the end of the instance, or raise WaitTimeout.

        ``finished`` is the future of its end if it was started in this process.
        """
        if finished is None or _may_have_been_retried(finished):
            finished = self._find_here(instance_id)
        while True:
            ending = None if finished is None else await self._wait_here(finished, deadline_ms)
            if ending is None:
                ending, finished = await self._wait_for_store(instance_id, deadline_ms)
            if ending is not None:
                return ending

    async def until(
        self,
        instance_id: str,
        look: Callable[[InstanceInfo], Awaitable[T | None]],
        deadline_ms: int | None,
        awaited: str,
    ) -> T:
        """Return what ``look`` finds after a change of the instance, or raise WaitTimeout."""
        has_warned = False
        with self._provider.watch(instance_id) as watch:
            while True:
                info = await self._provider.admin.get_instance_info(instance_id)
                found = await look(info)
                if found is not None:
                    return found
                has_warned = has_warned or _warned_of_block(info)
                await watch.wait(await self.rest_ms(info, deadline_ms, awaited))

    async def rest_ms(
        self, info: InstanceInfo, deadline_ms: int | None, awaited: str = "ended"
    ) -> int:
        """Return how long to watch the store before the next look, or raise WaitTimeout."""
        if deadline_ms is None:
            return self.watch_ms
        left_ms = deadline_ms - self._clock.now_ms()
        if left_ms <= 0:
            raise await timed_out(self._provider, info, self._clock.now_ms(), awaited)
        return min(left_ms, self.watch_ms)

    async def _wait_here(self, finished: Finished, deadline_ms: int | None) -> Ending | None:
        """Wait for an end in this process. None: it left the process, or no time is left."""
        check_loop(finished.get_loop())
        if finished.done():
            return finished.result()
        if deadline_ms is None:
            return await Shielded(finished)
        seconds = (deadline_ms - self._clock.now_ms()) / 1000
        alarm = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((finished, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            alarm.cancel()
        return finished.result() if finished.done() else None

    async def _wait_for_store(
        self, instance_id: str, deadline_ms: int | None
    ) -> tuple[Ending | None, Finished | None]:
        """Return the stored end, or its future as soon as the instance runs in this process."""
        has_warned = False
        with self._provider.watch(instance_id) as watch:
            while True:
                info = await self._look(instance_id, deadline_ms)
                if info is not None:
                    if info.status.is_final:
                        return Ending(info.status, info.output, info.name or instance_id), None
                    has_warned = has_warned or _warned_of_block(info)
                    rest_ms = await self.rest_ms(info, deadline_ms)
                    if self._find_here(instance_id) is None:
                        await watch.wait(rest_ms)
                finished = self._find_here(instance_id)
                if finished is not None:
                    return None, finished

    async def _look(self, instance_id: str, deadline_ms: int | None) -> InstanceInfo | None:
        """Read the stored status. Waits for a store that is busy or away until the deadline.

        Without a deadline the error of the store is raised.
        """
        if deadline_ms is None:
            return await self._read_info(instance_id)
        while True:
            left = max(deadline_ms - self._clock.now_ms(), 0) / 1000
            failure: Exception
            try:
                async with asyncio.timeout(left + _LOOK_SECONDS):
                    return await self._read_info(instance_id)
            except ProviderError as error:
                if not error.retryable:
                    raise
                failure = error
            except TimeoutError as error:
                failure, left = error, 0
            if not left:
                said = str(failure) or "there is no answer"
                raise WaitTimeout(
                    f"{instance_id!r} has not ended in time, as far as the store can tell: {said}"
                ) from failure
            await self._clock.sleep(min(left, _PAUSE_SECONDS))

    async def _read_info(self, instance_id: str) -> InstanceInfo | None:
        """Read the stored status. None: the instance came to this process while a busy store
        had not answered yet.
        """
        was_here = self._find_here(instance_id) is not None
        reading = asyncio.ensure_future(self._provider.admin.get_instance_info(instance_id))
        try:
            with self._provider.watch(instance_id) as watch:
                while not reading.done():
                    if not was_here and self._find_here(instance_id) is not None:
                        return None
                    changing = asyncio.ensure_future(watch.wait(self.watch_ms))
                    try:
                        await asyncio.wait((reading, changing), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changing.cancel()
            return reading.result()
        finally:
            reading.cancel()

    def _find_here(self, instance_id: str) -> Finished | None:
        """Return the future of the instance's end if it runs in this process."""
        return None if self.local is None else self.local.ended(instance_id)


class Shielded(Generic[T]):
    """A future that several tasks await: a waiter that is cancelled does not cancel it.

    ``asyncio.shield`` puts a second future in between, which costs one more pass of the event loop.
    Here the task waits for the future itself, and only its cancellation is kept away from it. To
    asyncio, an object with these members is a future.
    """

    __slots__ = ("_asyncio_future_blocking", "_context", "_future", "_message", "_wake")

    def __init__(self, future: asyncio.Future[T]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, T]:
        self._asyncio_future_blocking = True  # says that this is awaited, not just yielded
        yield self
        return self._future.result()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def add_done_callback(self, wake: Callable[[Any], object], *, context: Context) -> None:
        self._wake = wake
        self._context = context
        self._future.add_done_callback(wake, context=context)

    def cancel(self, msg: Any = None) -> bool:
        """Wake this waiter only; False if it is being woken already."""
        if not self._future.remove_done_callback(self._wake):
            return False
        self._message = msg
        self.get_loop().call_soon(self._wake, self, context=self._context)
        return True

    def result(self) -> NoReturn:
        """Raise CancelledError in a waiter that the future did not wake."""
        raise asyncio.CancelledError(*() if self._message is None else (self._message,))


async def timed_out(
    provider: Provider, info: InstanceInfo, now_ms: int, awaited: str = "ended"
) -> WaitTimeout:
    """Return the error of a wait that took too long. It says what the instance is doing."""
    insight = await read_insight(provider, info, await provider.admin.list_workers(), now_ms)
    return WaitTimeout(
        f"{info.instance_id!r} has not {awaited} in time and goes on: {insight.explanation}"
    )


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise UsageError on another event loop: instances of this process run and end on one."""
    if find_recorder() is not None:
        raise UsageError(
            "an orchestration uses no runtime and no client: call the other orchestration "
            "(await child(...)), or use start_detached(), raise_event_to() or instance(id).result()"
        )
    if asyncio.get_running_loop() is not loop:
        raise UsageError(
            "this runtime runs on another event loop: from here, hand the call over to it with "
            "asyncio.run_coroutine_threadsafe(..., its_loop), or use a Client of your own"
        )


def _may_have_been_retried(finished: Finished) -> bool:
    """Return True after a bad end: an operator may have let the instance begin again since."""
    ending = finished.result() if finished.done() else None
    return ending is not None and ending.status.is_bad_end


def _warned_of_block(info: InstanceInfo) -> bool:
    """Log why a Blocked instance does not go on: a caller without a timeout would never learn it.

    Return False for an instance that is not Blocked.
    """
    if info.status is not Status.BLOCKED:
        return False
    block = block_of(info)
    reason = "" if block is None else f": {block.message}"
    log.warning("%r is Blocked%s; still waiting", info.instance_id, reason)
    return True
