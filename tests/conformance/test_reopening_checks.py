"""The checks of reopening, on a store that outlives its handles but not the process.

The in-memory provider is not durable, so its own run of the kit skips them; here they are run
without any disk, which shows that the checks themselves hold together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perdure.conformance.harness import ProviderFactory
from perdure.conformance.reopening import TestSurvivingARestart  # noqa: F401
from perdure.providers.records import Capabilities
from perdure.providers.sqlite.memory import InMemoryProvider, MemoryStore

if TYPE_CHECKING:
    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider


class OutlivingProvider(InMemoryProvider):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(several_processes=False)


class SharedStoreFactory(ProviderFactory):
    def __init__(self) -> None:
        self._store: MemoryStore | None = None

    def create(self, clock: ManualClock) -> Provider:
        if self._store is None:
            self._store = MemoryStore(clock)
        return OutlivingProvider(store=self._store)


@pytest.fixture
def provider_factory() -> ProviderFactory:
    return SharedStoreFactory()
