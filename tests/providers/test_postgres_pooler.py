"""A store behind a pooler: what its URL says, and what it is told without that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from perdure.errors import StoreUnavailable
from perdure.providers.url import open_provider
from postgres_factory import new_schema
from postgres_load import Load
from postgres_pooler import Pooler
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.fixture
def schema() -> str:
    return new_schema()


def run(check: Callable[[Pooler], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Pooler(shared_server().socket_directory) as pooler:
            await check(pooler)

    asyncio.run(main())


@pytest.mark.parametrize("off", ["false", "False"])
def test_a_url_says_all_that_a_pooler_needs(schema: str, off: str) -> None:
    async def check(pooler: Pooler) -> None:
        url = f"{pooler.dsn}&prepare={off}&listen={off}&pool_size=3&schema={schema}"
        async with open_provider(url) as provider:
            load = Load(3)
            await load.start(provider)
            await load.run([provider], fetchers=2, workers=2)
            await load.check(provider)
        assert 0 < pooler.clients <= 3

    run(check)


@pytest.mark.parametrize("tail", ["", "&prepare=true", "&listen=false"])
def test_a_pooler_that_takes_no_settings_is_known_by_its_words(tail: str) -> None:
    async def check(pooler: Pooler) -> None:
        with pytest.raises(StoreUnavailable, match="unsupported startup parameter") as refused:
            await open_provider(pooler.dsn + tail).open()

        said = refused.value.message
        assert "prepare=false&listen=false" in said
        assert "ignore_startup_parameters = options" in said
        assert "pg_hba" not in said

    run(check)
