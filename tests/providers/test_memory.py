"""The in-memory provider: the conformance kit, and what is special to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perdure.conformance import *  # noqa: F403
from perdure.conformance.harness import ProviderFactory
from perdure.providers.memory import InMemoryProvider, MemoryStore

if TYPE_CHECKING:
    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider


class MemoryFactory(ProviderFactory):
    def __init__(self) -> None:
        self._store: MemoryStore | None = None

    def create(self, clock: ManualClock) -> Provider:
        if self._store is None:
            self._store = MemoryStore(clock)
        return InMemoryProvider(store=self._store)

    async def corrupt_history(self, instance_id: str) -> None:
        assert self._store is not None
        for history in self._store.instances[instance_id].histories.values():
            for event_id in history:
                history[event_id] = "{damaged"


@pytest.fixture
def provider_factory() -> ProviderFactory:
    return MemoryFactory()
