"""Faults of Postgres that clients see: errors, cuts, stops, failovers, poolers and storms."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from campaigns.postgres_cuts import cut_connections
from campaigns.postgres_stops import stop_server
from patience import HANG_SECONDS
from perdure import Client, Runtime, orchestration
from perdure.conformance.factories import (
    LOCK_MS,
    NAME,
    VERSION,
    activity,
    completion,
    raised,
    start,
    started,
)
from perdure.errors import (
    CorruptData,
    LockLost,
    NotFound,
    StoreBusy,
    StoreFull,
    StoreUnavailable,
    WaitTimeout,
)
from perdure.providers.postgres import PostgresProvider
from perdure.providers.postgres.listener import Channels
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    InstanceInfo,
    TurnCommit,
)
from postgres_cluster import await_that
from postgres_factory import new_schema, spoil_text
from postgres_load import Load
from postgres_pooler import Pooler
from postgres_proxy import Proxy
from postgres_server import PostgresServer, shared_server

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRYABLE = (
    *("40001", "40P01", "55P03", "57014", "53200"),
    *("57P01", "57P02", "57P03", "08000", "08003", "08006", "53300", "0A000", "26000"),
)


@pytest.fixture
def schema() -> str:
    return new_schema()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """One of the test's own, to be stopped."""
    with PostgresServer() as server:
        yield server


class Saboteur:
    """Lets the next statements of a schema fail, by way of the function that tells the time."""

    def __init__(self, schema: str) -> None:
        self._connection = psycopg.connect(shared_server().dsn, autocommit=True)
        self._schema = sql.Identifier(schema)
        self._execute("CREATE SEQUENCE {}.faults")

    def fail(self, state: str, times: int) -> None:
        self._execute("SELECT setval('{}.faults', 1, false)")
        self._execute(
            """
            CREATE OR REPLACE FUNCTION {}.now_ms() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN
                IF nextval('{}.faults') <= {} THEN
                    RAISE EXCEPTION 'injected' USING ERRCODE = {}, HINT = 'Try this.';
                END IF;
                RETURN floor(extract(epoch FROM clock_timestamp()) * 1000);
            END $$
            """,
            sql.Literal(times),
            sql.Literal(state),
        )

    def close(self) -> None:
        self._connection.close()

    def _execute(self, statement: str, *values: sql.Composable) -> None:
        places = statement.count("{}") - len(values)
        composed = sql.SQL(statement).format(*[self._schema] * places, *values)
        self._connection.execute(composed)


@pytest.fixture
def saboteur(schema: str) -> Iterator[Saboteur]:
    saboteur = Saboteur(schema)
    yield saboteur
    saboteur.close()


@pytest.mark.parametrize("state", RETRYABLE)
def test_a_passing_fault_is_hidden_from_every_verb(
    schema: str, saboteur: Saboteur, state: str
) -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema, pool_size=3) as provider:
            saboteur.fail(state, 2)
            assert await provider.enqueue_for_orchestrator(start("x"))
            saboteur.fail(state, 2)
            fetched = await provider.fetch_orchestration_item(60_000, 0)
            assert fetched is not None
            assert fetched.attempt_count == 1
            saboteur.fail(state, 2)
            await provider.renew_orchestration_item_lock(fetched.lock_token, 60_000)
            saboteur.fail(state, 2)
            await provider.ack_orchestration_item(
                fetched.lock_token,
                TurnCommit(
                    execution_id=1,
                    history_delta=(started("x"),),
                    metadata=ExecutionMetadata(name=NAME, version=VERSION),
                    custom_status=CustomStatusChange(value="1"),
                    worker_items=(activity("x"),),
                ),
            )
            saboteur.fail(state, 2)
            work = await provider.fetch_work_item(60_000, 0)
            assert work is not None
            saboteur.fail(state, 2)
            await provider.ack_work_item(work.lock_token, completion("x"))

            assert await provider.get_custom_status("x") == ("1", 1)
            assert len(await provider.admin.list_messages("x")) == 1

    asyncio.run(check())


@pytest.mark.parametrize("state", RETRYABLE)
def test_a_batch_that_is_sent_again_does_not_get_the_answer_of_another_handle(
    schema: str, saboteur: Saboteur, state: str
) -> None:
    async def check() -> None:
        first, second = (
            PostgresProvider(shared_server().dsn, schema=schema, pool_size=3) for _ in range(2)
        )
        async with first, second:
            for number in range(3):  # each handle counts its own batches
                assert await first.enqueue_for_orchestrator(start(f"first-{number}"))
                saboteur.fail(state, 2)
                assert await second.enqueue_for_orchestrator(start(f"second-{number}"))
                assert len(await second.admin.list_messages(f"second-{number}")) == 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("state", "error"),
    [("40P01", StoreBusy), ("57P01", StoreUnavailable), ("53100", StoreFull)],
)
def test_a_lasting_fault_is_raised_as_retryable(
    schema: str, saboteur: Saboteur, state: str, error: type[Exception]
) -> None:
    async def check() -> None:
        options = {"pool_size": 3, "retry_timeout": 0.2}
        async with PostgresProvider(shared_server().dsn, schema=schema, **options) as provider:
            saboteur.fail(state, 1_000)
            with pytest.raises(error) as raised_error:
                await provider.enqueue_for_orchestrator(start("x"))
            assert raised_error.value.retryable
            said = raised_error.value.message
            assert "injected (Try this)" in said
            for inside in ("CONTEXT", "PL/pgSQL", "SELECT", "now_ms"):
                assert inside not in said

            saboteur.fail(state, 0)
            assert await provider.enqueue_for_orchestrator(start("y"))

    asyncio.run(check())


def test_answers_lost_before_during_and_after_commits_change_nothing() -> None:
    counts = asyncio.run(cut_connections(shared_server(), cuts=10, seed=7))

    assert counts["errors that reached a caller"] == 0


def test_stopping_the_server_dead_loses_nothing(server: PostgresServer) -> None:
    counts = asyncio.run(stop_server(server, stops=2, seed=7, roots=15))

    assert counts["errors that reached a caller"] == 0


def test_sixteen_fetchers_take_every_turn_once(schema: str) -> None:
    async def check() -> None:
        handles = [PostgresProvider(shared_server().dsn, schema=schema) for _ in range(4)]
        for handle in handles:
            await handle.open()
        load = Load(60)
        await load.start(handles[0])
        await load.run(handles, fetchers=16, workers=16)
        await load.check(handles[0])
        assert load.errors == []
        for handle in handles:
            await handle.close()

    asyncio.run(check())


def test_work_goes_on_at_the_standby_that_was_promoted(server: PostgresServer) -> None:
    standby = server.make_standby()
    standby.start()
    both = f"{server.dsn},{standby.socket_directory}"

    async def check() -> None:
        async with PostgresProvider(both, retry_timeout=60) as provider:
            await provider.enqueue_for_orchestrator(start("before"))
            await asyncio.to_thread(_wait_for_replay, server, standby)

            await asyncio.to_thread(server.stop, "immediate")
            going_on = asyncio.ensure_future(provider.enqueue_for_orchestrator(start("after")))
            await asyncio.to_thread(standby.promote)

            assert await going_on
            listed = await provider.admin.list_instances()
            assert {info.instance_id for info in listed.instances} == {"before", "after"}

    try:
        asyncio.run(check())
    finally:
        standby.remove()


def _wait_for_replay(primary: PostgresServer, standby: PostgresServer) -> None:
    with psycopg.connect(primary.dsn) as connection:
        written = connection.execute("SELECT pg_current_wal_lsn()").fetchone()
    assert written is not None
    with psycopg.connect(standby.dsn, autocommit=True) as connection:
        while connection.execute(
            "SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", written
        ).fetchone() != (False,):
            pass


def test_open_handles_go_on_while_the_schema_is_widened_under_them(schema: str) -> None:
    async def check() -> None:
        dsn = shared_server().dsn
        async with (
            PostgresProvider(dsn, schema=schema) as one,
            PostgresProvider(dsn, schema=schema) as other,
        ):
            load = Load(30)
            await load.start(one)
            running = asyncio.create_task(load.run([one, other], fetchers=4, workers=4))
            await one.admin.list_instances()
            await one.admin.get_instance_info("root-0")
            await asyncio.to_thread(_widen, schema)
            await one.admin.get_instance_info("root-0")
            await running
            await load.check(one)
            assert load.errors == []

    asyncio.run(check())


def _widen(schema: str) -> None:
    """Change tables as a later migration would: new columns, and another type for one column."""
    with psycopg.connect(shared_server().dsn, autocommit=True) as connection:
        for table in ("instances", "history", "orchestrator_queue", "worker_queue"):
            connection.execute(
                sql.SQL("ALTER TABLE {}.{} ADD COLUMN later text DEFAULT 'x'").format(
                    sql.Identifier(schema), sql.Identifier(table)
                )
            )
        # Statements that were prepared before return another type from now on.
        connection.execute(
            sql.SQL(
                "DROP VIEW {s}.v_instances; "
                "ALTER TABLE {s}.executions ALTER COLUMN output TYPE varchar"
            ).format(s=sql.Identifier(schema))
        )


def test_it_works_behind_a_pooler_that_hands_out_transactions(schema: str) -> None:
    async def check() -> None:
        async with Pooler(Path(shared_server().socket_directory)) as pooler:
            handles = [
                PostgresProvider(pooler.dsn, schema=schema, listen=False, prepare=False)
                for _ in range(2)
            ]
            for handle in handles:
                await handle.open()
            load = Load(10)
            await load.start(handles[0])
            await load.run(handles, fetchers=4, workers=4)
            await load.check(handles[0])
            for handle in handles:
                await handle.close()
            assert pooler.transactions > 40

    asyncio.run(check())


def test_locks_are_renewed_while_every_connection_is_stuck(schema: str) -> None:
    async def check() -> None:
        dsn = shared_server().dsn
        async with PostgresProvider(dsn, schema=schema, pool_size=2) as provider:
            await provider.enqueue_for_orchestrator(start("x"))
            fetched = await provider.fetch_orchestration_item(60_000, 0)
            assert fetched is not None
            with psycopg.connect(dsn) as blocker:
                blocker.execute(
                    sql.SQL("LOCK TABLE {}.worker_queue").format(sql.Identifier(schema))
                )
                stuck = [asyncio.create_task(provider.fetch_work_item(1_000, 0)) for _ in range(50)]
                await asyncio.sleep(0)

                await provider.renew_orchestration_item_lock(fetched.lock_token, 60_000)

                assert not any(task.done() for task in stuck)
            assert await asyncio.gather(*stuck) == [None] * 50

    asyncio.run(check())


def test_locks_are_renewed_from_another_thread_while_the_loop_is_blocked(schema: str) -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema) as provider:
            await provider.enqueue_for_orchestrator(start("x"))
            fetched = await provider.fetch_orchestration_item(60_000, 0)
            assert fetched is not None

            async def renew() -> None:
                await provider.renew_orchestration_item_lock(fetched.lock_token, 60_000)
                with pytest.raises(LockLost):
                    await provider.renew_orchestration_item_lock("unknown", 60_000)

            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(1) as thread:
                thread.submit(lambda: asyncio.run(renew())).result()  # this blocks the loop

    asyncio.run(check())


def test_a_machine_whose_clock_is_wrong_keeps_the_time_of_the_server(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        dsn = shared_server().dsn
        early, late = (PostgresProvider(dsn, schema=schema, listen=False) for _ in range(2))
        real_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() - 600 * 10**9)
        monkeypatch.setattr(time, "time", lambda: real_ns() / 1e9 - 600)
        async with early:
            await early.enqueue_for_orchestrator(start("locked"))
            await early.enqueue_for_orchestrator(start("timer"), 60_000)
            assert await early.fetch_orchestration_item(60_000, 0) is not None
            monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 600 * 10**9)
            monkeypatch.setattr(time, "time", lambda: real_ns() / 1e9 + 600)
            async with late:
                # Ten minutes late by its own clock: neither is it time, nor has the lock expired.
                assert await late.fetch_orchestration_item(60_000, 0) is None
                before_ms = real_ns() // 1_000_000
                assert 0 <= late.clock().now_ms() - before_ms < 2_000

    asyncio.run(check())


def test_a_storm_of_forged_notifications_does_no_harm(schema: str) -> None:
    async def check() -> None:
        channel = sql.Identifier(Channels(schema).turns)
        async with (
            Proxy(shared_server().socket_directory, lambda _message: None) as proxy,
            PostgresProvider(proxy.dsn, schema=schema) as provider,
        ):
            waiting = asyncio.create_task(provider.fetch_orchestration_item(5_000, 60_000))
            with psycopg.connect(shared_server().dsn, autocommit=True) as forger:
                before = proxy.statements
                begin = asyncio.get_running_loop().time()
                for _ in range(300):
                    await asyncio.to_thread(forger.execute, sql.SQL("NOTIFY {}").format(channel))
                seconds = asyncio.get_running_loop().time() - begin

            assert proxy.statements - before <= 100 * seconds + 20
            await provider.enqueue_for_orchestrator(start("x"))
            assert await waiting is not None

    asyncio.run(check())


def test_an_idle_handle_asks_less_than_twice_a_second(schema: str) -> None:
    async def check() -> None:
        async with (
            Proxy(shared_server().socket_directory, lambda _message: None) as proxy,
            PostgresProvider(proxy.dsn, schema=schema) as provider,
        ):

            async def wait(milliseconds: int) -> None:
                assert await asyncio.gather(
                    provider.fetch_orchestration_item(5_000, milliseconds),
                    provider.fetch_work_item(5_000, milliseconds),
                ) == [None, None]

            await wait(500)  # it listens from then on
            before = proxy.statements
            await wait(2_500)

            assert proxy.statements - before < 2 * 2.5

    asyncio.run(check())


def test_without_listening_what_others_write_is_found_by_looking(schema: str) -> None:
    async def check() -> None:
        dsn = shared_server().dsn
        async with (
            PostgresProvider(dsn, schema=schema, listen=False) as deaf,
            PostgresProvider(dsn, schema=schema, listen=False) as other,
        ):
            waiting = asyncio.create_task(deaf.fetch_orchestration_item(5_000, 20_000))
            await asyncio.sleep(0)

            await other.enqueue_for_orchestrator(start("x"))
            await other.enqueue_for_orchestrator(raised("x"))

            assert await waiting is not None

    asyncio.run(check())


# --- waiting for results


def test_many_waiters_share_one_look(schema: str) -> None:
    async def check() -> None:
        async with (
            Proxy(shared_server().socket_directory, lambda _message: None) as proxy,
            PostgresProvider(proxy.dsn, schema=schema, listen=False, pool_size=2) as provider,
        ):
            await provider.enqueue_many_for_orchestrator([start(f"w{n}") for n in range(500)])
            before = proxy.statements

            looks = [provider.admin.get_instance_info(f"w{n % 500}") for n in range(1000)]
            unknown, *found = await asyncio.gather(
                provider.admin.get_instance_info("unknown"), *looks, return_exceptions=True
            )

            # A second look is allowed: the first may have begun before all had said what they want.
            assert proxy.statements - before <= 2
            assert isinstance(unknown, NotFound)
            infos = [each for each in found if isinstance(each, InstanceInfo)]
            assert [each.instance_id for each in infos] == [f"w{n % 500}" for n in range(1000)]

    asyncio.run(check())


def test_a_look_at_one_instance_is_not_planned_again_and_again(schema: str) -> None:
    async def check() -> None:
        dsn = shared_server().dsn
        async with PostgresProvider(dsn, schema=schema, listen=False, pool_size=2) as provider:
            await provider.enqueue_for_orchestrator(start("x"))
            for _ in range(20):
                await provider.admin.get_instance_info("x")

            ((planned, reused),) = await provider._store.ask(
                "plans",
                "SELECT custom_plans, generic_plans FROM pg_prepared_statements "
                "WHERE statement LIKE '%custom_status_version%'",
            )

            assert planned + reused >= 15
            assert planned <= 5

    asyncio.run(check())


def test_an_unreadable_row_fails_its_own_look_and_no_other(schema: str) -> None:
    dsn = shared_server().dsn

    async def check() -> None:
        async with PostgresProvider(dsn, schema=schema, listen=False) as provider:
            await provider.enqueue_many_for_orchestrator([start("sound"), start("damaged")])
            spoil_text(schema, "instances", "custom_status", "damaged")

            damaged, sound = await asyncio.wait_for(
                asyncio.gather(
                    provider.admin.get_instance_info("damaged"),
                    provider.admin.get_instance_info("sound"),
                    return_exceptions=True,
                ),
                HANG_SECONDS,
            )

            assert isinstance(damaged, CorruptData)
            assert isinstance(sound, InstanceInfo)

    asyncio.run(check())


def test_a_damaged_body_is_handed_out_as_no_json_and_keeps_no_other_back(schema: str) -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema, listen=False) as provider:
            await provider.enqueue_many_for_orchestrator([start("damaged"), start("sound")])
            for instance in ("damaged", "sound"):
                await provider.enqueue_for_worker(activity(instance, 1))
            spoil_text(schema, "orchestrator_queue", "body", "damaged")
            spoil_text(schema, "worker_queue", "body", "damaged")

            turns = await asyncio.gather(
                *[provider.fetch_orchestration_item(LOCK_MS, 0) for _ in range(2)]
            )
            items = await provider.fetch_work_items(2, LOCK_MS, 0)

            bodies = {each.item.instance_id: each.item.messages[0].body for each in turns if each}
            assert bodies["damaged"].startswith("not UTF-8: ")
            assert bodies["sound"] == start("sound").body
            assert [item.identity.instance_id for item in items] == ["damaged", "sound"]
            assert items[0].body.startswith("not UTF-8: ")

    asyncio.run(check())


def test_a_look_that_fails_unexpectedly_fails_all_that_wait_for_it(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema, listen=False) as provider:

            async def ask(*_arguments: object) -> None:
                raise ZeroDivisionError

            monkeypatch.setattr(provider.admin, "_ask", ask)
            answers = await asyncio.wait_for(
                asyncio.gather(
                    *[provider.admin.get_instance_info(f"w{n}") for n in range(3)],
                    return_exceptions=True,
                ),
                HANG_SECONDS,
            )

            assert [type(each) for each in answers] == [ZeroDivisionError] * 3

    asyncio.run(check())


@orchestration
async def quick() -> int:
    return 7


def test_a_result_is_waited_for_until_its_own_timeout(
    schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The store gives up much earlier each time, because the table cannot be read."""
    options: dict[str, Any] = {"retry_timeout": 0.1, "answer_timeout": 0.2, "listen": False}
    table = sql.Identifier(schema, "instances")

    async def check() -> None:
        dsn = shared_server().dsn
        async with (
            Runtime(PostgresProvider(dsn, schema=schema), [quick]) as runtime,
            Client(PostgresProvider(dsn, schema=schema, **options)) as client,
        ):
            await (await runtime.start(quick, id="x")).result(HANG_SECONDS)
            with psycopg.connect(dsn) as owner:
                owner.execute(sql.SQL("LOCK TABLE {}").format(table))
                with pytest.raises(WaitTimeout, match="'x' has not ended in time"):
                    await client.get("x").result(0)
                caplog.set_level(logging.DEBUG, logger="perdure.providers.postgres.faults")
                waiting = asyncio.create_task(client.get("x").result(HANG_SECONDS))
                # The store has given up twice.
                await asyncio.to_thread(await_that, lambda: len(caplog.records) > 1, "it gives up")
                assert not waiting.done()
            assert await waiting == 7

    asyncio.run(check())
