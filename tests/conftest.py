"""What all tests share: the conformance kit's fixtures, and that time bounds no example."""

import pytest
from hypothesis import HealthCheck, settings

from perdure.providers import validation

pytest_plugins = ["perdure.pytest_plugin"]

# A machine that is busy with something else is no failure.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture
def commits_are_validated(monkeypatch):
    """Let stores validate the commits of runtimes too, which they trust otherwise."""
    monkeypatch.setattr(validation, "TrustedCommit", None)
