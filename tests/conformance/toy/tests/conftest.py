import pytest
from toy_provider import ToyProvider, ToyStore

from perdure.conformance.harness import ProviderFactory

pytest_plugins = ["perdure.pytest_plugin"]


class ToyFactory(ProviderFactory):
    def __init__(self):
        self._store = ToyStore()

    def create(self, clock):
        return ToyProvider(self._store, clock)


@pytest.fixture
def provider_factory():
    return ToyFactory()
