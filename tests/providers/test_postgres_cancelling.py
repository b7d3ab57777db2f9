"""A call that is cancelled at any moment leaves no connection open and gives back its locks."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from perdure.conformance.factories import activity, start
from perdure.providers.postgres import PostgresProvider, hosts
from perdure.providers.postgres.address import address_of
from perdure.providers.postgres.fetching import FetchCoalescer, FetchResult
from postgres_factory import new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from perdure.providers.records import FetchedWork

MOMENTS = range(0, 60, 3)
"""Passes of the event loop between the call and its cancellation."""


@pytest.fixture
def schema() -> str:
    return new_schema()


@pytest.fixture(autouse=True)
def _leaks() -> Iterator[None]:
    """Fails if a connection was left to the garbage collector."""
    gc.collect()  # connections that earlier tests have left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(each.message) for each in caught if each.category is ResourceWarning] == []


async def cancel_after(passes: int, call: Awaitable[Any]) -> Any:
    """Return its result if it ended before it was cancelled."""
    task = asyncio.ensure_future(call)
    for _ in range(passes):
        await asyncio.sleep(0.0002)
    task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() or task.exception() else task.result()


def connections_of(name: str) -> int:
    with psycopg.connect(shared_server().dsn) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", (name,)
        ).fetchone()
    assert row is not None
    return int(row[0])


def wait_until_gone(name: str) -> None:
    """The server notices a little later than the client."""
    while connections_of(name):
        pass


@pytest.mark.parametrize("listen", [True, False])
def test_opening_can_be_cancelled_at_any_moment(schema: str, *, listen: bool) -> None:
    name = f"cancelled-{schema}"
    dsn = f"{shared_server().dsn}&application_name={name}"

    async def check() -> None:
        for moment in MOMENTS:
            provider = PostgresProvider(dsn, schema=schema, listen=listen)
            await cancel_after(moment, provider.open())
            await provider.close()
        await asyncio.to_thread(wait_until_gone, name)
        async with provider:  # the last one can be opened still
            assert await provider.fetch_orchestration_item(1_000, 0) is None

    asyncio.run(check())


def test_the_search_for_the_primary_can_be_cancelled_at_any_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "_STAGGER_SECONDS", 0)  # both are asked at the same time
    name = f"searched-{new_schema()}"
    dsn = f"{shared_server().dsn},{shared_server().socket_directory}"

    async def check() -> None:
        address = address_of(f"{dsn}&application_name={name}", "s", sessions=True)
        searched = hosts.Hosts(address, hosts.Fence(lambda: None))
        for moment in MOMENTS:
            connection = await cancel_after(moment, searched.connect())
            if connection is not None:
                await connection.close()
        await asyncio.to_thread(wait_until_gone, name)

    asyncio.run(check())


@pytest.mark.parametrize(
    "verb",
    [
        lambda provider: provider.read("x"),
        lambda provider: provider.admin.list_instances(),
        lambda provider: provider.enqueue_for_orchestrator(start("x")),
        lambda provider: provider.renew_work_item_lock("unknown", 1_000),
    ],
    ids=["read", "list", "enqueue", "renew"],
)
def test_verbs_can_be_cancelled_at_any_moment(
    schema: str, verb: Callable[[PostgresProvider], Awaitable[object]]
) -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema, pool_size=3) as provider:
            for moment in MOMENTS:
                await asyncio.gather(*[cancel_after(moment, verb(provider)) for _ in range(4)])
            assert await provider.read("y") == []

    asyncio.run(check())


def test_fetches_can_be_cancelled_at_any_moment_and_lose_nothing(schema: str) -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema, pool_size=3) as provider:
            for number in range(1, 21):
                await provider.enqueue_for_worker(activity("x", activity_id=number))
            for moment in MOMENTS:
                fetching = provider.fetch_work_items(7, 60_000, 0)
                for work in await cancel_after(moment, fetching) or []:
                    await provider.abandon_work_item(work.lock_token, ignore_attempt=True)
            fetched: list[FetchedWork] = []
            while len(fetched) < 20:  # what was in flight is on its way back
                fetched += await provider.fetch_work_items(20, 60_000, 0)

            assert {work.identity.activity_id for work in fetched} == set(range(1, 21))
            assert {work.attempt_count for work in fetched} == {1}

    asyncio.run(check())


def test_closing_can_be_cancelled_and_repeated(schema: str) -> None:
    name = f"closed-{schema}"
    dsn = f"{shared_server().dsn}&application_name={name}"

    async def check() -> None:
        for moment in range(12):
            provider = PostgresProvider(dsn, schema=schema)
            await provider.open()
            waiting = asyncio.create_task(provider.fetch_orchestration_item(1_000, 60_000))
            await asyncio.sleep(0)
            await cancel_after(moment, provider.close())
            await provider.close()
            assert await asyncio.gather(waiting) == [None]
        await asyncio.to_thread(wait_until_gone, name)

    asyncio.run(check())


def test_closing_ends_although_a_fetch_has_ended_at_the_same_moment() -> None:
    """Since Python 3.12 gather() of ended tasks does not yield, so nothing may loop over it."""

    async def check() -> None:
        async def nothing(_want: str, _number: int) -> FetchResult[str]:
            return FetchResult([])

        async def give_back(_item: str) -> None:
            pass

        fetches: FetchCoalescer[str, str] = FetchCoalescer(nothing, give_back, lambda: 1.0, 1)
        fetches.open()
        task = asyncio.create_task(asyncio.sleep(0))
        await asyncio.wait({task})
        fetches._tasks.add(task)
        task.add_done_callback(fetches._tasks.discard)

        await fetches.close()

        assert not fetches._tasks

    asyncio.run(check())
