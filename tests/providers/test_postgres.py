"""The conformance kit and the state machine on Postgres."""

from __future__ import annotations

import pytest

from perdure.conformance import *  # noqa: F403
from perdure.conformance.stateful import state_machine
from postgres_factory import PostgresFactory


@pytest.fixture
def provider_factory() -> PostgresFactory:
    return PostgresFactory()


TestPostgresMachine = pytest.mark.timeout(900)(state_machine(PostgresFactory, examples=12))
