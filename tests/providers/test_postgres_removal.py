"""Removing an instance on Postgres also removes children that a turn adds meanwhile."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from psycopg import sql

from patience import HANG_SECONDS
from perdure.conformance.factories import start, started
from perdure.model.status import Status
from perdure.providers.postgres import PostgresProvider
from perdure.providers.records import EnqueueCondition, ExecutionMetadata, TurnCommit
from postgres_factory import new_schema
from postgres_server import shared_server

# The locks and writes of a turn's commit, in this order.
LOCK = "SELECT FROM {}.instance_locks WHERE instance_id = 'x' FOR UPDATE"
TURN = "UPDATE {}.instances SET updated_at = updated_at WHERE instance_id = 'x'"
CHILD = """
    INSERT INTO {}.instances (instance_id, parent_instance_id, status, created_at, updated_at)
    VALUES ('child', 'x', 'Pending', 0, 0)
"""
WAITERS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE wait_event_type = 'Lock' AND position(%s IN query) > 0
"""


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_replaced_instance_takes_a_child_with_it_that_comes_meanwhile(is_locked: bool) -> None:
    schema = new_schema()

    async def scenario() -> list[str]:
        provider = PostgresProvider(shared_server().dsn, schema=schema)
        await provider.open()
        await provider.enqueue_for_orchestrator(start("x"))
        fetched = await provider.fetch_orchestration_item(60_000, 0)
        assert fetched is not None
        if not is_locked:
            commit = TurnCommit(
                execution_id=1,
                history_delta=(started("x"),),
                metadata=ExecutionMetadata(name="Flow", version="1.0.0", status=Status.RUNNING),
            )
            await provider.ack_orchestration_item(fetched.lock_token, commit)
        async with await psycopg.AsyncConnection.connect(shared_server().dsn) as turn:
            for statement in (LOCK, TURN, CHILD):
                await turn.execute(sql.SQL(statement).format(sql.Identifier(schema)))
            replacing = asyncio.ensure_future(
                provider.enqueue_for_orchestrator(start("x"), condition=EnqueueCondition.REPLACE)
            )
            await until_waiting(schema)
            await turn.commit()
        await replacing
        admin = provider.admin
        assert admin is not None
        left = await admin.list_children("x")
        await provider.close()
        return list(left)

    assert asyncio.run(scenario()) == []


async def until_waiting(schema: str) -> None:
    """Until a statement of that schema waits for a lock."""
    async with (
        asyncio.timeout(HANG_SECONDS),
        await psycopg.AsyncConnection.connect(shared_server().dsn, autocommit=True) as eye,
    ):
        while True:
            row = await (await eye.execute(WAITERS, (schema,))).fetchone()
            if row != (0,):
                return
            await asyncio.sleep(0.01)
