import pytest
from toy_provider import ToyProvider

from perdure.conformance.harness import ProviderFactory

pytest_plugins = ["perdure.pytest_plugin"]


class ToyFactory(ProviderFactory):
    def create(self, clock):
        return ToyProvider(clock)


@pytest.fixture
def provider_factory():
    return ToyFactory()
