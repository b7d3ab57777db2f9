"""The conformance kit on Postgres."""

from __future__ import annotations

import pytest

from perdure.conformance import *  # noqa: F403
from postgres_factory import PostgresFactory


@pytest.fixture
def provider_factory() -> PostgresFactory:
    return PostgresFactory()
