"""Random sequences of every verb: each provider against the in-memory model."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from perdure.clock import ManualClock
from perdure.conformance.harness import ProviderFactory
from perdure.conformance.stateful import state_machine
from perdure.providers.memory import InMemoryProvider, MemoryStore
from perdure.providers.sqlite import SqliteProvider

if TYPE_CHECKING:
    from perdure.providers.capabilities import Capabilities
    from perdure.providers.contract import Provider


class MemoryFactory(ProviderFactory):
    def __init__(self) -> None:
        self._store: MemoryStore | None = None

    def create(self, clock: ManualClock) -> Provider:
        self._store = self._store or MemoryStore(clock)
        return InMemoryProvider(store=self._store)


class SqliteFactory(ProviderFactory):
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()

    def create(self, clock: ManualClock) -> Provider:
        path = Path(self._directory.name, "store.db")
        return SqliteProvider(path, clock=clock, durability="relaxed")

    async def cleanup(self) -> None:
        self._directory.cleanup()


class ProviderWithItsOwnClock(InMemoryProvider):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, injected_clock=False)


class OwnClockFactory(ProviderFactory):
    def __init__(self) -> None:
        self._clock = ManualClock(1_800_000_000_000, tick_ms=1)
        self._store = MemoryStore(self._clock)

    def create(self, clock: ManualClock) -> Provider:
        return ProviderWithItsOwnClock(store=self._store)

    async def advance(self, milliseconds: int) -> None:
        self._clock.advance(milliseconds)

    async def now_ms(self) -> int:
        return self._clock.now_ms()


# The model against itself only shows that the machine tells no lies.
TestMemoryMachine = state_machine(MemoryFactory, examples=20)
TestOwnClockMachine = state_machine(OwnClockFactory, examples=40)
TestSqliteMachine = pytest.mark.timeout(900)(state_machine(SqliteFactory))
