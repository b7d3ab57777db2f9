"""The base of all checks: the store under test, its factory, and the runner of async checks."""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from perdure.conformance.requires import skip_without
from perdure.errors import NotSupported

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from perdure.clock import ManualClock
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import Capabilities

RUNNER_FIXTURE = "conformance_runner"
UNTIL_SECONDS_MAX = 120.0
OWN_CLOCK_TICK_MS = 1_000
"""A store's own clock goes on while a check runs."""

_Class = TypeVar("_Class", bound=type)


class ProviderFactory(ABC):
    """Makes the store of one check; a provider author implements this, one object per check."""

    @abstractmethod
    def create(self, clock: ManualClock) -> Provider:
        """A handle, not yet opened, on the store of this check.

        The first call stands for a fresh, empty store; further calls give more handles on that
        same store (after the first was closed, or beside it with ``several_handles``).
        """

    async def advance(self, milliseconds: int) -> None:
        """Let time pass; only for providers that do not declare ``injected_clock``."""
        raise NotSupported("advance", "the factory of a provider with its own clock must move it")

    async def now_ms(self) -> int:
        """Time of the store; only for providers that do not declare ``injected_clock``."""
        raise NotSupported("now_ms", "the factory of a provider with its own clock must read it")

    async def corrupt_history(self, instance_id: str) -> None:
        """Damage every stored history text of the instance behind the provider's back."""
        raise NotSupported("corrupt_history", "the factory cannot damage stored history")

    async def cleanup(self) -> None:  # noqa: B027
        """Remove the store. All handles are closed by then."""


class Store:
    """The store under test, through one handle or two."""

    def __init__(self, factory: ProviderFactory, clock: ManualClock, handles: int) -> None:
        self._factory = factory
        self._handles = handles
        self._opened: list[Provider] = []
        self.clock = clock
        self.provider: Provider = factory.create(clock)
        """Does what the check is about."""
        self.reader: Provider = self.provider
        """Reads back what was done: the same handle, or an independent second one."""

    @property
    def capabilities(self) -> Capabilities:
        return self.provider.capabilities

    @property
    def admin(self) -> ProviderAdmin:
        """The reader's administration; a check that uses it needs the capability."""
        if not self.capabilities.admin:
            skip_without("admin")
        return self.reader.admin

    async def open(self) -> None:
        if self._handles > 1 and not self.capabilities.several_handles:
            skip_without("several_handles")
        await self._open(self.provider)
        self.reader = await self.second() if self._handles > 1 else self.provider

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def cleanup(self) -> None:
        try:
            await self.close()
        finally:
            await self._factory.cleanup()

    async def second(self) -> Provider:
        """One more opened handle on the same store; closed by the harness."""
        if not self.capabilities.several_handles:
            skip_without("several_handles")
        return await self._open(self._factory.create(self.clock))

    async def reopen(self) -> None:
        """Close every handle and open new ones, as after a restart."""
        if not self.capabilities.durable:
            skip_without("durable")
        await self.close()
        self.provider = self._factory.create(self.clock)
        await self.open()

    async def advance(self, milliseconds: int) -> None:
        """Let that much time of the store pass."""
        if self.capabilities.injected_clock:
            self.clock.advance(milliseconds)
            await asyncio.sleep(0)
        else:
            await self._factory.advance(milliseconds)

    async def now_ms(self) -> int:
        """Time of the store."""
        if self.capabilities.injected_clock:
            return self.clock.now_ms()
        return await self._factory.now_ms()

    @property
    def tick_ms(self) -> int:
        """A step in time that surely separates before from after on this store's clock."""
        if self.capabilities.injected_clock:
            return self.capabilities.time_resolution_ms
        return max(self.capabilities.time_resolution_ms, OWN_CLOCK_TICK_MS)

    async def corrupt_history(self, instance_id: str) -> None:
        """Damage every stored history text of the instance behind the provider's back."""
        try:
            await self._factory.corrupt_history(instance_id)
        except NotSupported as refusal:
            pytest.skip(refusal.message)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Give the event loop back until the condition holds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + UNTIL_SECONDS_MAX
        while not condition():
            assert loop.time() < deadline, f"still not true after {UNTIL_SECONDS_MAX} s"
            await asyncio.sleep(0)

    async def _open(self, provider: Provider) -> Provider:
        self._opened.append(provider)
        await provider.open()
        return provider


def checks(cls: _Class) -> _Class:
    """Class decorator: run each ``async def test_...`` on the runner that opened the store.

    A plain function needs no async plugin and is left alone by those that are installed.
    """
    for name, function in list(vars(cls).items()):
        if name.startswith("test_") and inspect.iscoroutinefunction(function):
            setattr(cls, name, _run_on_runner(function))
    if not getattr(cls, "verbs", ()):
        raise TypeError(f"{cls.__name__} must declare the verbs that it covers")
    marked: _Class = pytest.mark.perdure_check(cls)
    return marked


def _run_on_runner(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    signature = inspect.signature(function)
    runner = inspect.Parameter(RUNNER_FIXTURE, inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> None:
        kwargs.pop(RUNNER_FIXTURE).run(function(*args, **kwargs))

    vars(check)["__signature__"] = signature.replace(
        parameters=[*signature.parameters.values(), runner]
    )
    return check


async def outcomes(*calls: Awaitable[Any]) -> list[Any]:
    """Run the calls concurrently; each one's result, or the exception that it raised."""
    return await asyncio.gather(*calls, return_exceptions=True)
