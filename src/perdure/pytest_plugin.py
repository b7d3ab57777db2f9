"""Fixtures and markers of the conformance kit; enable with ``pytest_plugins``.

Lives outside the kit's package, so that loading it imports no check before pytest can rewrite it.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from perdure.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.conformance.harness import ProviderFactory, Store

_collected = pytest.StashKey[dict[str, str]]()
_CHECK_NUMBER = re.compile(r"test_c(\d{3})_")


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
    """To be overridden: the ``ProviderFactory`` of the provider under test."""
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
    """An empty store, opened; once read through the writing handle and once through a second."""
    from perdure.conformance.harness import Store
    from perdure.conformance.requires import skip_unless_declared

    store = Store(provider_factory, ManualClock(), handles=request.param)
    try:
        skip_unless_declared(request.node, store.capabilities)
        conformance_runner.run(store.open())
        yield store
    finally:
        conformance_runner.run(store.cleanup())


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_collected] = {
        item.nodeid: getattr(item, "originalname", item.name)
        for item in session.items
        if item.get_closest_marker("perdure_check") is not None
    }


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    collected = config.stash.get(_collected, None)
    if not collected:
        return
    outcomes = {
        outcome: sum(
            getattr(report, "nodeid", None) in collected
            for report in terminalreporter.stats.get(outcome, [])
        )
        for outcome in ("passed", "failed", "error", "skipped")
    }
    names = set(collected.values())
    numbered = {match[1] for name in names if (match := _CHECK_NUMBER.match(name))}
    terminalreporter.write_sep("-", "provider conformance")
    terminalreporter.write_line(
        f"{len(names)} checks ({len(numbered)} of them numbered), {len(collected)} runs: "
        + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items() if count)
    )
