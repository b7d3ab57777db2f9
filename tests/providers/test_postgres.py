"""The conformance kit and the state machine on Postgres."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from model import ModelFactory
from perdure.conformance import *  # noqa: F403
from perdure.conformance._machine.plans import MessagePlan
from perdure.conformance.factories import start
from perdure.conformance.stateful import machine, state_machine
from perdure.providers.postgres import PostgresProvider
from perdure.providers.records import EnqueueCondition, OrchestrationFilter
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


DELAYED = MessagePlan("x", "start", 1, "Mail", None, None, 1)
STEPS = {
    "delayed start": lambda made: made.enqueue(DELAYED, None, None),
    "start": lambda made: made.enqueue(replace(DELAYED, name="Shop", delay=None), None, None),
    "event": lambda made: made.enqueue(replace(DELAYED, kind="event", delay=None), None, None),
    "history": lambda made: made.append("x", 1, [1]),
    "time": lambda made: made.let_time_pass(2),
}


@pytest.mark.parametrize("handler", [None, "Mail", "Shop", "unknown"])
@pytest.mark.parametrize(
    "steps",
    [
        ("delayed start", "start"),
        ("delayed start", "start", "time"),
        ("start", "delayed start"),
        ("delayed start", "event", "history"),
        ("history", "event", "delayed start"),
        ("history", "delayed start", "event", "time"),
        ("delayed start", "history", "start"),
    ],
    ids=", ".join,
)
def test_a_start_gives_an_instance_its_name_from_the_moment_at_which_it_is_visible(
    steps: tuple[str, ...], handler: str | None
) -> None:
    compared = machine(PostgresFactory, model=ModelFactory)()
    wanted = OrchestrationFilter(handlers=frozenset({(handler, "1.0.0")})) if handler else None

    for step in steps:
        STEPS[step](compared)
        compared.stores_look_the_same()
    compared.fetch(wanted, "w1", 5)  # raises if the stores differ

    compared.teardown()
