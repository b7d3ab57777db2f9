"""The conformance kit and the state machine on Postgres."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from conformance.naming import HANDLERS, SEQUENCES, fetch_after
from model import ModelFactory
from patience import HANG_SECONDS
from perdure.conformance import *  # noqa: F403
from perdure.conformance.factories import activity, completion, raised, start, started
from perdure.conformance.stateful import state_machine
from perdure.limits import BATCH_MESSAGES_MAX
from perdure.providers.postgres import PostgresProvider
from perdure.providers.records import EnqueueCondition, TurnCommit
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


def test_completing_work_locks_the_instance_before_the_work_item() -> None:
    """Turns lock in the same order. In another order the two could wait for each other."""
    schema = new_schema()

    async def check() -> None:
        async with (
            PostgresProvider(shared_server().dsn, schema=schema) as provider,
            await psycopg.AsyncConnection.connect(
                shared_server().dsn, options=f"-c search_path={schema}"
            ) as other,
        ):
            await provider.enqueue_for_orchestrator(start("a"))
            await provider.enqueue_for_worker(activity("a"))
            item = await provider.fetch_work_item(60_000, 0)
            assert item is not None
            await other.execute("SELECT FROM instance_locks WHERE instance_id = 'a' FOR UPDATE")
            me = other.info.backend_pid
            completing = asyncio.ensure_future(
                provider.ack_work_item(item.lock_token, completion("a"))
            )
            while True:
                waiting = await other.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))",
                    (me,),
                )
                if await waiting.fetchone() != (0,):
                    break
                assert not completing.done()

            await other.execute("SELECT FROM worker_queue FOR UPDATE NOWAIT")

            await other.rollback()
            await completing

    asyncio.run(asyncio.wait_for(check(), HANG_SECONDS))


@pytest.mark.parametrize("number", [1, BATCH_MESSAGES_MAX + 1])
def test_a_fetch_that_is_repeated_after_its_lock_has_expired_hands_out_the_same_batch(
    number: int,
) -> None:
    schema = new_schema()

    async def send() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema) as provider:
            await provider.enqueue_for_orchestrator(start("a"))
            fetched = await provider.fetch_orchestration_item(60_000, 0)
            assert fetched is not None
            await provider.ack_orchestration_item(
                fetched.lock_token, TurnCommit(execution_id=1, history_delta=(started("a"),))
            )
            await provider.enqueue_many_for_orchestrator([raised("a") for _ in range(number)])

    asyncio.run(send())
    with psycopg.connect(
        shared_server().dsn, options=f"-c search_path={schema}", autocommit=True
    ) as connection:

        def fetch(*, again: bool) -> tuple[Any, ...] | None:
            return connection.execute(
                "SELECT message_ids, attempts FROM fetch_turns(%s, %s, 60000, NULL, NULL, NULL, "
                "60000, true)",
                (["lost"], again),
            ).fetchone()

        first = fetch(again=False)
        connection.execute("UPDATE instance_locks SET locked_until = 0, wake_at = 0")

        assert fetch(again=True) == first
        assert first is not None
        assert len(first[0]) == min(number, BATCH_MESSAGES_MAX)


def test_a_repeated_fetch_counts_no_attempt_for_what_has_expired_unanswered() -> None:
    schema = new_schema()

    async def prepare() -> None:
        """Leave an instance under a kept lock, another one without, and an event for each."""
        async with PostgresProvider(shared_server().dsn, schema=schema) as provider:
            names = "kept", "free"
            for name, keep_lock_ms in zip(names, (60_000, None), strict=True):
                await provider.enqueue_for_orchestrator(start(name))
                fetched = await provider.fetch_orchestration_item(60_000, 0, None, "me")
                assert fetched is not None
                commit = TurnCommit(
                    execution_id=1, history_delta=(started(name),), keep_lock_ms=keep_lock_ms
                )
                await provider.ack_orchestration_item(fetched.lock_token, commit)
            await provider.enqueue_many_for_orchestrator([raised(name) for name in names])

    asyncio.run(prepare())
    with psycopg.connect(
        shared_server().dsn, options=f"-c search_path={schema}", autocommit=True
    ) as connection:

        def fetch(*, again: bool) -> dict[str, tuple[bool, list[int]]]:
            rows = connection.execute(
                "SELECT instance_id, continues, attempts FROM fetch_turns("
                "ARRAY['lost', 'lost too'], %s, 60000, 'me', NULL, NULL, 60000, true)",
                (again,),
            )
            return {row[0]: row[1:] for row in rows}

        def expire(name: str) -> None:
            connection.execute(
                "UPDATE instance_locks SET locked_until = 0, wake_at = 0 WHERE instance_id = %s",
                (name,),
            )

        both = {"kept": (True, [1]), "free": (False, [1])}
        assert fetch(again=False) == both

        expire("free")
        assert fetch(again=True) == {"kept": (True, [1])}
        found = connection.execute("SELECT instance_id, attempt_count FROM orchestrator_queue")
        assert dict(found.fetchall()) == {"kept": 1, "free": 0}

        expire("kept")
        assert fetch(again=True) == {"kept": (False, [1]), "free": (False, [1])}


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("steps", SEQUENCES, ids=", ".join)
def test_a_start_gives_an_instance_its_name_from_the_moment_at_which_it_is_visible(
    steps: tuple[str, ...], handler: str | None
) -> None:
    fetch_after(PostgresFactory, steps, handler)
