"""The conformance kit and the state machine on Postgres."""

from __future__ import annotations

import asyncio

import pytest

from conformance.naming import HANDLERS, SEQUENCES, fetch_after
from model import ModelFactory
from perdure.conformance import *  # noqa: F403
from perdure.conformance.factories import start
from perdure.conformance.stateful import state_machine
from perdure.providers.postgres import PostgresProvider
from perdure.providers.records import EnqueueCondition
from postgres_factory import PostgresFactory, new_schema
from postgres_server import shared_server


@pytest.fixture
def provider_factory() -> PostgresFactory:
    return PostgresFactory()


TestPostgresMachine = pytest.mark.timeout(900)(
    state_machine(PostgresFactory, model=ModelFactory, examples=12)
)


def test_replacing_what_is_not_there_leaves_those_that_name_it_as_their_parent() -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=new_schema()) as provider:
            await provider.enqueue_for_orchestrator(start("child", parent="later"))
            await provider.enqueue_for_orchestrator(
                start("later"), condition=EnqueueCondition.REPLACE
            )

            listed = await provider.admin.list_instances()
            assert {info.instance_id for info in listed.instances} == {"child", "later"}

            await provider.enqueue_for_orchestrator(
                start("later"), condition=EnqueueCondition.REPLACE
            )

            listed = await provider.admin.list_instances()
            assert {info.instance_id for info in listed.instances} == {"later"}

    asyncio.run(check())


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("steps", SEQUENCES, ids=", ".join)
def test_a_start_gives_an_instance_its_name_from_the_moment_at_which_it_is_visible(
    steps: tuple[str, ...], handler: str | None
) -> None:
    fetch_after(PostgresFactory, steps, handler)
