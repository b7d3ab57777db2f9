"""Workers of one host on Postgres notice at once that another one has died, and take over."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, contextmanager

import msgspec
import psycopg
import pytest

from patience import HANG_SECONDS
from perdure.conformance.factories import activity, start
from perdure.providers.postgres import PostgresProvider, neighbours
from perdure.providers.postgres.neighbours import Neighbours, is_dead, this_process
from perdure.providers.records import SessionFetch, WorkerInfo
from postgres_factory import new_schema
from postgres_server import shared_server

HOUR_MS = 3_600_000
ME = WorkerInfo(
    worker_id="me", host="h", process_id=os.getpid(), started_at_ms=1, framework_version="1.0.0"
)

HOLDER = """
import asyncio, sys
from perdure.providers.postgres import PostgresProvider
from perdure.providers.records import SessionFetch, WorkerInfo

async def main(dsn, schema):
    async with PostgresProvider(dsn, schema=schema, pool_size=2) as provider:
        worker = WorkerInfo(
            worker_id="w1", host="h", process_id=1, started_at_ms=1, framework_version="1.0.0"
        )
        await provider.admin.register_worker(worker, 3_600_000)
        turn = await provider.fetch_orchestration_item(3_600_000, 0)
        session = SessionFetch(owner_id="w1", lock_timeout_ms=3_600_000)
        work = [await provider.fetch_work_item(3_600_000, 0, session) for _ in range(2)]
        print(turn is not None, None not in work, flush=True)
        sys.stdin.read()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def dsn():
    return shared_server().dsn


@pytest.fixture
def schema():
    return new_schema()


@contextmanager
def python(program, *args):
    running = subprocess.Popen(
        [sys.executable, "-c", program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        running.stdin.close()
        running.stdout.close()


@contextmanager
def holder_of(dsn, schema):
    """Run a process that holds an instance, a work item and a session for an hour."""

    async def fill():
        async with PostgresProvider(dsn, schema=schema, pool_size=2) as provider:
            await provider.enqueue_for_orchestrator(start("a"))
            await provider.enqueue_for_worker(activity("b"))
            await provider.enqueue_for_worker(activity("c", session="s"))

    asyncio.run(fill())
    with python(HOLDER, dsn, schema) as running:
        assert running.stdout.readline() == "True True\n"
        yield running


def kill(running):
    running.kill()
    running.wait()


async def take(provider, poll_ms, owner_id="me"):
    """Fetch all that the other process has held."""
    turn = await provider.fetch_orchestration_item(1_000, poll_ms)
    session = SessionFetch(owner_id=owner_id, lock_timeout_ms=1_000)
    work = [await provider.fetch_work_item(1_000, poll_ms, session) for _ in range(2)]
    if turn is None:
        return None
    attempts = turn.attempt_count, [each.attempt_count for each in work]
    return turn.item.instance_id, sorted(each.identity.instance_id for each in work), attempts


TAKEN = ("a", ["b", "c"], (2, [2, 2]))


# --- processes


def test_this_process_lives():
    assert not is_dead(this_process(), this_process())


@pytest.mark.parametrize("stop", [None, signal.SIGSTOP], ids=["runs", "is stopped"])
def test_another_live_process_is_not_dead(stop):
    with python("print(1, flush=True); input()") as other:
        other.stdout.readline()
        seen = this_process()._replace(
            process_id=other.pid, started=neighbours._look_at(other.pid).started
        )
        if stop is not None:
            other.send_signal(stop)
        assert not is_dead(seen, this_process())


def test_a_process_that_ended_is_dead_also_before_its_parent_has_noticed():
    with python("print(1, flush=True); input()") as other:
        other.stdout.readline()
        seen = this_process()._replace(
            process_id=other.pid, started=neighbours._look_at(other.pid).started
        )
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert is_dead(seen, this_process())
        other.wait()
        assert is_dead(seen, this_process())


def test_another_process_with_the_same_id_is_not_taken_for_it():
    assert is_dead(this_process()._replace(started="1"), this_process())


def test_nothing_is_known_of_a_process_elsewhere():
    here = this_process()
    elsewhere = here._replace(place="another host, boot or container", started="1")
    assert not is_dead(elsewhere, here)
    assert not is_dead(elsewhere, None)


def test_a_process_that_is_hidden_is_not_dead(monkeypatch, tmp_path):
    here = this_process()
    monkeypatch.setattr(neighbours, "_SYSTEM", tmp_path)  # as /proc mounted with hidepid
    assert not is_dead(here, here)
    assert this_process() is None


def test_a_proc_of_another_container_is_not_believed(monkeypatch, tmp_path):
    (tmp_path / "self").symlink_to("1")
    monkeypatch.setattr(neighbours, "_SYSTEM", tmp_path)
    assert this_process() is None


@pytest.mark.parametrize("can_watch", [True, False])
def test_the_end_of_a_neighbour_is_told_once(monkeypatch, can_watch):
    if not can_watch:
        monkeypatch.delattr(os, "pidfd_open")

    async def run():
        died = []
        neighbour = Neighbours(died.append)
        neighbour.open()
        with python("print(1, flush=True); input()") as other:
            other.stdout.readline()
            seen = this_process()._replace(
                process_id=other.pid, started=neighbours._look_at(other.pid).started
            )
            met = [("other", seen), ("foreign", seen._replace(place="x", process_id=1))]
            neighbour.meet(met)
            assert died == []
            kill(other)
            deadline = time.monotonic() + HANG_SECONDS
            while not died:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)
                if not can_watch:
                    neighbour.meet(met)
        await asyncio.sleep(0.01)
        neighbour.close()
        return died

    assert asyncio.run(run()) == ["other"]


# --- takeover


def test_a_new_worker_takes_over_from_one_that_was_killed(dsn, schema):
    async def run():
        async with PostgresProvider(dsn, schema=schema, pool_size=2) as provider:
            listed = await provider.admin.list_workers()
            await provider.admin.register_worker(ME, HOUR_MS)
            return listed, await take(provider, HANG_SECONDS * 1000)

    with holder_of(dsn, schema) as running:
        kill(running)
        assert asyncio.run(run()) == ([], TAKEN)


def test_a_worker_takes_over_from_one_of_the_same_name(dsn, schema):
    async def run():
        async with PostgresProvider(dsn, schema=schema, pool_size=2) as provider:
            again = msgspec.structs.replace(ME, worker_id="w1")
            await provider.admin.register_worker(again, HOUR_MS)
            taken = await take(provider, HANG_SECONDS * 1000, "w1")
            return taken, await provider.admin.list_workers()

    with holder_of(dsn, schema) as running:
        kill(running)
        taken, (listed,) = asyncio.run(run())
    assert taken == TAKEN
    assert listed.process_id == os.getpid()


def test_a_worker_takes_over_from_one_that_is_killed_beside_it(dsn, schema):
    async def run(running):
        async with PostgresProvider(dsn, schema=schema, pool_size=2) as provider:
            await provider.admin.register_worker(ME, HOUR_MS)
            listed = [each.worker_id for each in await provider.admin.list_workers()]
            fetch = asyncio.ensure_future(take(provider, HANG_SECONDS * 1000))
            await asyncio.sleep(0)
            kill(running)
            taken = await fetch
            return listed, taken, [each.worker_id for each in await provider.admin.list_workers()]

    with holder_of(dsn, schema) as running:
        assert asyncio.run(run(running)) == (["me", "w1"], TAKEN, ["me"])


@pytest.mark.parametrize("stop", [None, signal.SIGSTOP], ids=["runs", "is stopped"])
def test_nothing_is_taken_from_a_live_worker(dsn, schema, stop):
    async def run():
        async with PostgresProvider(dsn, schema=schema, pool_size=2) as provider:
            for _ in range(3):
                await provider.admin.register_worker(ME, HOUR_MS)
                assert await take(provider, 0) is None
            return [each.worker_id for each in await provider.admin.list_workers()]

    with holder_of(dsn, schema) as running:
        if stop is not None:
            running.send_signal(stop)
        assert asyncio.run(run()) == ["me", "w1"]


def test_nothing_is_taken_from_a_worker_of_another_host(dsn, schema, monkeypatch):
    async def run():
        async with PostgresProvider(dsn, schema=schema, pool_size=2) as provider:
            await provider.admin.register_worker(ME, HOUR_MS)
            taken = await take(provider, 0)
            return taken, [each.worker_id for each in await provider.admin.list_workers()]

    with holder_of(dsn, schema) as running:
        kill(running)
        here = this_process()
        monkeypatch.setattr(neighbours, "this_process", lambda: here._replace(place="elsewhere"))
        assert asyncio.run(run()) == (None, ["me", "w1"])


def test_only_the_locks_of_the_dead_process_are_released(dsn, schema):
    async def check():
        async with AsyncExitStack() as stack:
            handles = [
                await stack.enter_async_context(PostgresProvider(dsn, schema=schema, pool_size=2))
                for _ in range(3)
            ]
            handles.sort(key=lambda handle: handle.new_lock_token())
            for name, handle in zip(("first", "dead", "last"), handles, strict=True):
                worker = msgspec.structs.replace(ME, worker_id=name)
                await handle.admin.register_worker(worker, HOUR_MS)
                await handle.enqueue_for_orchestrator(start(name))
                await handle.enqueue_for_worker(activity(name))
                await handle.enqueue_for_worker(activity(name, activity_id=3, session=name))
                assert await handle.fetch_orchestration_item(HOUR_MS, 0) is not None
                session = SessionFetch(owner_id=name, lock_timeout_ms=HOUR_MS)
                assert len(await handle.fetch_work_items(2, HOUR_MS, 0, session)) == 2
            holder = handles[1].new_lock_token()[:16]
        async with await psycopg.AsyncConnection.connect(
            dsn, options=f"-c search_path={schema}"
        ) as connection:
            await connection.execute("SELECT release_holder(%s)", (holder,))
            held = await connection.execute(
                "SELECT 'turn', instance_id FROM instance_locks WHERE locked_until > now_ms() "
                "UNION ALL SELECT 'work', instance_id FROM worker_queue "
                "WHERE locked_until > now_ms() AND wake_at = locked_until "
                "UNION ALL SELECT 'session', owner_id FROM sessions WHERE locked_until > now_ms() "
                "UNION ALL SELECT 'worker', worker_id FROM workers ORDER BY 2, 1"
            )
            assert await held.fetchall() == [
                (kind, name)
                for name in ("first", "last")
                for kind in ("session", "turn", "work", "work", "worker")
            ]

    asyncio.run(check())
