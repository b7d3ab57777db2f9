"""The pool of connections to Postgres: waiting in line, opening, closing and cancelling."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from patience import HANG_SECONDS
from perdure.errors import StoreBusy, StoreClosed, StoreUnavailable
from perdure.providers.postgres.address import address_of
from perdure.providers.postgres.hosts import Fence, Hosts
from perdure.providers.postgres.pool import ConnectionPool
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

HOLD = b"SELECT pg_sleep(0.1)::text"


def pool_of(dsn: str, *, size: int, retry_seconds: float) -> ConnectionPool:
    hosts = Hosts(address_of(dsn, "s", sessions=True), Fence(lambda: None))
    return ConnectionPool(hosts, size=size, prepare=True, retry_seconds=retry_seconds)


@asynccontextmanager
async def opened(*, size: int = 5, retry_seconds: float = 5.0) -> AsyncGenerator[ConnectionPool]:
    connections = pool_of(shared_server().dsn, size=size, retry_seconds=retry_seconds)
    connections.open()
    try:
        async with asyncio.timeout(HANG_SECONDS):
            yield connections
    finally:
        connections.close()


@contextmanager
def held() -> Generator[tuple[bytes, Callable[[], object]]]:
    """Yield a statement that is answered only after the function beside it is called."""
    key = random.getrandbits(62)
    with psycopg.connect(shared_server().dsn, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", (key,))
        yield b"SELECT pg_advisory_lock(%d)::text" % key, other.close


async def session_of(connections: ConnectionPool) -> Any:
    ((pid,),) = await connections.run("test", b"SELECT pg_backend_pid()")
    return pid


def test_statements_after_one_another_use_one_connection() -> None:
    async def check() -> None:
        async with opened() as connections:
            sessions = {await session_of(connections) for _ in range(5)}

            assert len(sessions) == 1

    asyncio.run(check())


def test_a_statement_that_waits_too_long_gets_a_new_connection() -> None:
    async def check() -> None:
        async with opened() as connections:
            first = await session_of(connections)
            with held() as (hold, release):
                holding = asyncio.create_task(connections.run("test", hold))
                await asyncio.sleep(0)

                second = await session_of(connections)

                assert not holding.done()
                assert second != first
                release()
                await holding

    asyncio.run(check())


def test_many_callers_share_few_connections() -> None:
    async def check() -> None:
        async with opened(size=2) as connections:
            reads = [session_of(connections) for _ in range(50)]
            commits = [connections.call_once("test", b"SELECT 'x'", ()) for _ in range(50)]

            sessions = await asyncio.gather(*reads)
            assert await asyncio.gather(*commits) == [b"x"] * 50

            assert len(set(sessions)) <= 2

    asyncio.run(check())


def test_a_connection_is_not_lost_with_a_caller_that_was_cancelled_at_its_turn() -> None:
    async def check() -> None:
        async with opened(size=1) as connections:
            holding = asyncio.create_task(connections.run("test", HOLD))
            await asyncio.sleep(0.03)
            waiting = asyncio.create_task(session_of(connections))
            holding.add_done_callback(lambda _: waiting.cancel())
            await holding
            await asyncio.gather(waiting, return_exceptions=True)

            assert await session_of(connections)

    asyncio.run(check())


def test_a_pool_whose_connections_are_all_in_use_says_so() -> None:
    async def check() -> None:
        async with opened(size=1, retry_seconds=0.05) as connections:
            await session_of(connections)
            with held() as (hold, release):
                holding = asyncio.create_task(connections.run("test", hold))
                await asyncio.sleep(0)

                with pytest.raises(StoreBusy, match="all connections were in use"):
                    await session_of(connections)

                release()
                await holding
            assert await session_of(connections)

    asyncio.run(check())


def test_closing_ends_the_wait_for_a_connection() -> None:
    async def check() -> None:
        async with opened(size=1, retry_seconds=20.0) as connections:
            holding = asyncio.create_task(connections.run("test", HOLD))
            await asyncio.sleep(0.03)
            waiting = [asyncio.create_task(session_of(connections)) for _ in range(3)]
            await asyncio.sleep(0)

            connections.close()

            for task in waiting:
                with pytest.raises(StoreClosed):
                    await task
            await holding

    asyncio.run(check())


def test_those_who_wait_go_on_after_their_connection_broke() -> None:
    async def check() -> None:
        async with opened(size=1) as connections:
            pid = await session_of(connections)
            holding = asyncio.create_task(connections.run("test", HOLD))
            await asyncio.sleep(0.03)
            waiting = [asyncio.create_task(session_of(connections)) for _ in range(3)]
            with psycopg.connect(shared_server().dsn, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (pid,))

            assert pid not in await asyncio.gather(*waiting)
            await holding

    asyncio.run(check())


def test_a_server_that_is_away_fails_all_who_wait() -> None:
    async def check() -> None:
        dsn = "postgresql://me@127.0.0.1:1/shop"
        connections = pool_of(dsn, size=2, retry_seconds=0.05)
        connections.open()
        asked = [connections.run("test", b"SELECT 1") for _ in range(5)]

        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(outcome, StoreUnavailable)

    asyncio.run(check())
