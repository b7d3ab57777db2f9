"""What all tests share: the conformance kit's fixtures, and that time bounds no example."""

import pytest
from hypothesis import HealthCheck, settings

from perdure.providers._shared import refusals

pytest_plugins = ["perdure.pytest_plugin"]

# A machine that is busy with something else is no failure.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def every_commit_is_checked(monkeypatch):
    """Also those of runtimes, which stores take to be sound."""
    monkeypatch.setattr(refusals, "SoundCommit", None)
