"""Shared by all tests: the kit's fixtures, no deadline for examples, the summary of skips."""

import logging
import os
from collections import Counter

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


@pytest.fixture(autouse=True)
def no_log_file_is_left_open():
    """A log file of one test would be written by the next ones, when its directory is gone."""
    yield
    handlers = logging.getLogger().handlers
    left = {each.baseFilename for each in handlers if isinstance(each, logging.FileHandler)}
    assert left <= {os.path.abspath(os.devnull)}  # noqa: PTH100 - as logging names it, also on Windows


def pytest_terminal_summary(terminalreporter):
    """Say once for each reason how many tests were skipped for it."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if not hasattr(report, "wasxfail")
    )
    if reasons:
        terminalreporter.write_sep("-", "skipped")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5} {reason}")
