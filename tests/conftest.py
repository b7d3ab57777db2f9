"""What all tests share: the conformance kit's fixtures, and that time bounds no example."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["perdure.pytest_plugin"]

# A machine that is busy with something else is no failure.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
