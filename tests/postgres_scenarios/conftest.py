"""Gives the scenarios of the runtime a store on Postgres instead of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.conftest import make_environment, make_runtime, pytest_pyfunc_call, replays
from perdure.providers.postgres import PostgresProvider
from postgres_factory import empty, new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["make_environment", "make_provider", "make_runtime", "pytest_pyfunc_call", "replays"]

_emptied: list[str] = []


@pytest.fixture
def make_provider() -> Iterator[Callable[[], PostgresProvider]]:
    """A function that opens the store of this test; it may be opened again."""
    schema = _emptied.pop() if _emptied else new_schema()
    yield lambda: PostgresProvider(shared_server().dsn, schema=schema, pool_size=4)
    empty(schema)
    _emptied.append(schema)
