"""Who gets a connection to Postgres first when there are fewer than callers."""

from __future__ import annotations

from asyncio import create_task, gather, run, timeout
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from perdure.providers.postgres import connections
from perdure.providers.postgres.connections import Connections, Rank
from perdure.providers.postgres.place import place_of
from postgres_factory import new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody opens a second connection."""
    monkeypatch.setattr(connections, "_PATIENCE_SECONDS", dict.fromkeys(Rank, 60.0))


@asynccontextmanager
async def one_connection() -> AsyncGenerator[Connections]:
    place = place_of(shared_server().dsn, new_schema(), sessions=True)
    pool = Connections(place, size=5, prepare=True, retry_seconds=5.0)
    pool.open()
    try:
        yield pool
    finally:
        await pool.close()


async def order_of(pool: Connections, first: Rank, *later: Rank) -> list[Rank]:
    """Who was served, with one who waits during a commit and others who ask when it has ended."""
    order: list[Rank] = []

    async def ask(rank: Rank) -> None:
        await pool.run("test", b"SELECT 1", rank=rank)
        order.append(rank)

    await pool.run("test", b"SELECT 'it is open'")
    commit = create_task(pool.call_once("test", b"SELECT pg_sleep(0.02)::text", ()))
    waiting = create_task(ask(first))
    await commit
    await gather(waiting, *map(ask, later))
    return order


def test_what_is_not_urgent_does_not_go_between_a_commit_and_the_fetch_that_waits() -> None:
    async def scenario() -> None:
        async with one_connection() as pool:
            order = await order_of(pool, Rank.FETCH_TURNS, Rank.CHORE, Rank.READ)
            assert order == [Rank.FETCH_TURNS, Rank.READ, Rank.CHORE]

    run(scenario())


def test_what_waits_is_let_through_when_no_commit_follows() -> None:
    async def scenario() -> None:
        async with one_connection() as pool, timeout(30):
            for _ in range(20):
                commits = [create_task(pool.call_once("test", b"SELECT 'x'", ())) for _ in range(3)]
                others = [create_task(pool.run("test", b"SELECT 1", rank=rank)) for rank in Rank]
                await gather(*commits, *others)

    run(scenario())
