"""Fixtures and markers of the conformance kit; enable with ``pytest_plugins``.

It is outside of the package of the kit, so that loading it imports no check before pytest can
rewrite its assertions.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from perdure.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.conformance.harness import ProviderFactory, Store


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "perdure_check: a check of the conformance kit")
    config.addinivalue_line(
        "markers", "perdure_requires(*capabilities): only for providers that declare all of them"
    )
    config.addinivalue_line(
        "markers", "perdure_requires_absent(*capabilities): only for providers without them"
    )


@pytest.fixture
def provider_factory() -> ProviderFactory:
    """Fail: override this to return the ``ProviderFactory`` of the provider under test."""
    pytest.fail(
        "The conformance kit needs a fixture named 'provider_factory' that returns a "
        "perdure.conformance.harness.ProviderFactory for your provider; define it in conftest.py "
        "or beside the star import.",
        pytrace=False,
    )


@pytest.fixture
def conformance_runner() -> Iterator[asyncio.Runner]:
    """One event loop on which the store is opened, checked and closed."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(params=[1, 2], ids=["one-handle", "two-handles"])
def store(
    request: pytest.FixtureRequest,
    conformance_runner: asyncio.Runner,
    provider_factory: ProviderFactory,
) -> Iterator[Store]:
    """Yield an empty open store; read through the writing handle, and through a second one."""
    from perdure.conformance.harness import Store
    from perdure.conformance.requires import skip_unless_declared

    store = Store(provider_factory, ManualClock(), handles=request.param)
    try:
        skip_unless_declared(request.node, store.capabilities)
        conformance_runner.run(store.open())
        yield store
    finally:
        conformance_runner.run(store.cleanup())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Read from the reports: the tests may have run in other processes.
    runs = {
        outcome: [
            report.nodeid
            for report in terminalreporter.stats.get(outcome, [])
            if "perdure_check" in getattr(report, "keywords", ())
        ]
        for outcome in ("passed", "failed", "error", "skipped")
    }
    names = {_check_name(nodeid) for nodeids in runs.values() for nodeid in nodeids}
    if not names:
        return
    terminalreporter.write_sep("-", "provider conformance")
    terminalreporter.write_line(
        f"{len(names)} checks, {sum(map(len, runs.values()))} runs: "
        + ", ".join(f"{len(nodeids)} {outcome}" for outcome, nodeids in runs.items() if nodeids)
    )


def _check_name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2].partition("[")[0]
