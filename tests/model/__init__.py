"""The oracle: a second, independent implementation of the contract over plain dictionaries.

Every store is compared with it by the state machine, so it shares no code with them: it has its own
validation and its own rules, and no store may import it. Of the library it uses the records, the
errors and the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.provider import ModelProvider
from model.store import ModelStore
from perdure.conformance.harness import ProviderFactory

if TYPE_CHECKING:
    from perdure.clock import ManualClock
    from perdure.providers.contract import Provider

__all__ = ["ModelFactory", "ModelProvider", "ModelStore"]


class ModelFactory(ProviderFactory):
    """Makes handles on one store; ``provider`` may be a subclass with a fault."""

    def __init__(self, provider: type[ModelProvider] = ModelProvider) -> None:
        self._provider = provider
        self._store: ModelStore | None = None

    def create(self, clock: ManualClock) -> Provider:
        self._store = self._store or ModelStore(clock)
        return self._provider(store=self._store)

    async def corrupt_history(self, instance_id: str) -> None:
        assert self._store is not None
        for history in self._store.instances[instance_id].histories.values():
            history.update(dict.fromkeys(history, "{damaged"))
