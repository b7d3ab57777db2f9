"""The write-ahead log: reserved for a new file, overwritten while it is open, gone afterwards."""

from __future__ import annotations

import asyncio
import logging
import re
import stat
import subprocess
import sys
import threading

import apsw
import pytest

from commit_points import ObservedProvider
from patience import HANG_SECONDS
from perdure.clock import ManualClock
from perdure.conformance.factories import activity
from perdure.errors import StoreBusy
from perdure.providers.records import OrchestratorMessage, StartRouting
from perdure.providers.sqlite import SqliteProvider, guards
from perdure.providers.sqlite.control import STALL_GRACE_MS
from perdure.providers.sqlite.database import PAGES_TO_CHECKPOINT, PAGES_TO_WARN

RESERVED = guards.LOG_BYTES_RESERVED


@pytest.fixture
def path(tmp_path, monkeypatch):
    # Also where the tests themselves lie in memory.
    monkeypatch.setattr(guards, "_MEMORY_FILE_SYSTEMS", frozenset())
    return tmp_path / "store.db"


def log_of(path):
    return path.with_name(f"{path.name}-wal")


def start(number, size=10):
    return OrchestratorMessage(
        instance_id=f"i-{number}",
        kind="start",
        body="x" * size,
        start=StartRouting(name="Shop", version="1.0.0"),
    )


async def write(path, count, *, size=10, **options):
    """Sizes of the log: before the first of so many commits, and the largest after that."""
    async with SqliteProvider(path, **options) as provider:
        before = log_of(path).stat().st_size
        largest = 0
        for number in range(count):
            await provider.enqueue_for_orchestrator(start(number, size))
            largest = max(largest, log_of(path).stat().st_size)
    return before, largest


def count_messages(path):
    connection = apsw.Connection(str(path))
    try:
        return connection.execute("SELECT count(*) FROM orchestrator_queue").get
    finally:
        connection.close()


def test_commits_to_a_new_file_do_not_make_its_log_longer(path):
    before, largest = asyncio.run(write(path, 50))

    assert (before, largest) == (RESERVED, RESERVED)
    assert count_messages(path) == 50


def test_a_full_log_is_used_from_its_start_again(path):
    before, largest = asyncio.run(write(path, 450, size=100_000))

    assert before == RESERVED
    # Earlier if the writer has a moment for it; of the last commit before that nothing is cut off.
    assert largest < PAGES_TO_CHECKPOINT * 4_200 + 500_000
    assert count_messages(path) == 450


def test_a_closed_store_is_one_file(path):
    asyncio.run(write(path, 3))

    assert sorted(each.name for each in path.parent.iterdir()) == ["store.db"]


def test_a_reserved_log_is_as_private_as_its_file(path):
    path.touch(mode=0o600)
    path.chmod(0o640)

    async def look():
        async with SqliteProvider(path):
            return stat.S_IMODE(log_of(path).stat().st_mode)

    assert asyncio.run(look()) == 0o640


def test_a_store_that_may_forget_reserves_nothing(path):
    before, _ = asyncio.run(write(path, 1, durability="relaxed"))

    assert before < RESERVED


@pytest.mark.parametrize("broken", ["open", "write", "fsync", "link"])
def test_where_a_log_cannot_be_reserved_the_store_works_and_nothing_is_left(
    path, broken, monkeypatch
):
    path.touch(mode=0o600)

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    async def write_anyway():
        provider = SqliteProvider(path)
        with monkeypatch.context() as patch:
            patch.setattr(guards.os, broken, refuse)
            await provider.open()
        names = sorted(each.name for each in path.parent.iterdir())
        taken = await provider.enqueue_for_orchestrator(start(1))
        await provider.close()
        return names, taken

    names, taken = asyncio.run(write_anyway())

    assert names == ["store.db", "store.db-shm", "store.db-wal"]
    assert taken


def test_a_log_that_somebody_made_first_is_left_alone(path):
    asyncio.run(write(path, 1))
    log_of(path).write_bytes(b"theirs")

    guards.reserve_log(path)

    assert log_of(path).read_bytes() == b"theirs"


DYING = """
import asyncio, os, sys
from perdure.providers.records import OrchestratorMessage
from perdure.providers.sqlite import SqliteProvider, guards
from perdure.providers.sqlite.database import PAGES_TO_CHECKPOINT

guards._MEMORY_FILE_SYSTEMS = frozenset()

async def write_and_die():
    provider = SqliteProvider(sys.argv[1])
    await provider.open()
    for number in range(5):
        message = OrchestratorMessage(instance_id=f"i-{number}", kind="event", body="x")
        await provider.enqueue_for_orchestrator(message)
    os._exit(9)

asyncio.run(write_and_die())
"""


def test_what_was_committed_to_a_reserved_log_survives_a_death(path):
    died = subprocess.run(
        [sys.executable, "-c", DYING, str(path)], check=False, timeout=HANG_SECONDS
    )

    assert died.returncode == 9
    assert log_of(path).stat().st_size == RESERVED
    assert count_messages(path) == 5


# --- readers that keep the log, and stalls

READING = """
import sys
import apsw

connection = apsw.Connection(sys.argv[1], flags=apsw.SQLITE_OPEN_READONLY)
connection.execute("BEGIN")
print(connection.execute("SELECT count(*) FROM orchestrator_queue").get, flush=True)
sys.stdin.read()
"""


def start_reader(path):
    command = [sys.executable, "-c", READING, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_reader_of_another_process_delays_nothing_and_is_reported(path, caplog):
    """Past 55 MiB each copy of the log used to wait ten seconds for the reader."""
    caplog.set_level(logging.WARNING, "perdure.sqlite")

    async def write_beside_a_reader():
        provider = SqliteProvider(path)
        pauses = []
        provider._database.system.pause = pauses.append
        async with provider:
            await provider.enqueue_for_orchestrator(start(0))
            reader = start_reader(path)
            try:
                assert reader.stdout.readline() == b"1\n"
                number = 0
                while log_of(path).stat().st_size < (PAGES_TO_WARN + 1_000) * 4_120:
                    number += 1
                    await provider.enqueue_for_orchestrator(start(number, size=1_000_000))
                await provider.close()
            finally:
                reader.communicate()
        return number, pauses

    written, pauses = asyncio.run(write_beside_a_reader())

    assert pauses == []
    assert count_messages(path) == written + 1
    [warning] = [each.getMessage() for each in caplog.records]
    assert int(re.search(r"store.db-wal has grown to (\d+) MiB", warning)[1]) >= 55
    assert "end its transaction" in warning


@pytest.mark.parametrize("kind", ["before", "during", "refused"])
def test_a_lock_that_ran_out_while_the_store_stalled_is_still_held(path, kind):
    """Its holder could not renew it, so the delivery must not be repeated and counted."""
    clock = ManualClock()

    async def stall():
        provider = ObservedProvider(path, clock=clock)
        async with provider:
            await provider.enqueue_for_worker(activity("i-1"))
            held = await provider.fetch_work_item(30_000, 0)
            if kind == "during":
                writer = provider._store._writer
                writer._monotonic = lambda: clock.now_ms() / 1_000
                stall = stalls_once(clock, lambda: None)
                provider.reached = lambda point: point == "before commit" and stall()
                await provider.enqueue_for_orchestrator(start(1))
            elif kind == "before":
                database = provider._database
                database.ready = stalls_once(clock, database.ready)
            else:
                database, ready = provider._database, provider._database.ready

                def refuse():
                    database.ready = ready
                    clock.advance(60_000)
                    raise apsw.BusyError

                database.ready = refuse
                with pytest.raises(StoreBusy):
                    await provider.fetch_work_item(30_000, 0)
            fetched = await provider.fetch_work_item(30_000, 0)
            lost = await provider.renew_work_item_locks([held.lock_token], 30_000)
            clock.advance(30_001)
            again = await provider.fetch_work_item(30_000, 0)
            return fetched, lost, again.attempt_count

    assert asyncio.run(stall()) == (None, frozenset(), 2)


def stalls_once(clock, function):
    has_stalled = []

    def call(*args):
        if not has_stalled:
            has_stalled.append(True)
            clock.advance(60_000)
        return function(*args)

    return call


@pytest.mark.parametrize("is_stall", [True, False], ids=["stalls", "the clock was set"])
def test_upkeep_counts_as_a_stall_if_it_took_long(path, is_stall):
    clock = ManualClock()

    async def keep_up():
        async with SqliteProvider(path, clock=clock) as provider:
            await provider.enqueue_for_worker(activity("i-1"))
            await provider.fetch_work_item(30_000, 0)
            writer, database = provider._store._writer, provider._database
            if is_stall:
                writer._monotonic = lambda: clock.now_ms() / 1_000
            is_done = threading.Event()
            stall = stalls_once(clock, is_done.set)
            database.is_upkeep_due = lambda **_: not is_done.is_set()
            database.keep_up = stall
            # Two at once: the thread commits them, and then does its upkeep.
            await asyncio.gather(*(provider.enqueue_for_orchestrator(start(n)) for n in (1, 2)))
            await asyncio.to_thread(is_done.wait, HANG_SECONDS)
            fetched = await provider.fetch_work_item(30_000, 0)
            return fetched and fetched.attempt_count

    assert asyncio.run(keep_up()) == (None if is_stall else 2)


def test_a_lock_that_ran_out_before_a_stall_is_free(path):
    clock = ManualClock()

    async def stall():
        async with SqliteProvider(path, clock=clock) as provider:
            for name in ("early", "late"):
                await provider.enqueue_for_worker(activity(name))
            held = [await provider.fetch_work_item(ms, 0) for ms in (1_000, 30_000)]
            clock.advance(1_001)
            database = provider._database
            database.ready = stalls_once(clock, database.ready)
            free = await provider.fetch_work_items(2, 30_000, 0)
            return held[0].identity, [each.identity for each in free]

    early, free = asyncio.run(stall())
    assert free == [early]


def test_a_lock_that_is_not_renewed_after_a_stall_runs_out(path):
    clock = ManualClock()

    async def stall():
        async with SqliteProvider(path, clock=clock) as provider:
            await provider.enqueue_for_worker(activity("i-1"))
            await provider.fetch_work_item(30_000, 0)
            database = provider._database
            database.ready = stalls_once(clock, database.ready)
            assert await provider.fetch_work_item(30_000, 0) is None
            clock.advance(STALL_GRACE_MS + 1)
            return await provider.fetch_work_item(30_000, 0)

    assert asyncio.run(stall()).attempt_count == 2
