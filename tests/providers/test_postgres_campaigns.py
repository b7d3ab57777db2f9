"""Short tiers of the campaigns that run whole runtimes on Postgres."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from campaigns.postgres_copy import move
from campaigns.postgres_kills import kill_workers
from perdure.providers.postgres import PostgresProvider
from postgres_factory import new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    from pathlib import Path


def test_killing_workers_loses_nothing_and_doubles_nothing() -> None:
    assert kill_workers(shared_server(), kills=4, seed=7, instances=14) == 4


def test_a_load_under_way_moves_from_sqlite_to_postgres_and_back(tmp_path: Path) -> None:
    schema, dsn = new_schema(), shared_server().dsn

    moved = asyncio.run(
        move(tmp_path, lambda: PostgresProvider(dsn, schema=schema), 42, lock_seconds=3)
    )

    assert moved[0] >= 42
    assert moved[1] > 0
