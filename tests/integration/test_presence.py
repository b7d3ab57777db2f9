"""Workers on one SQLite file are listed while they live, and an idle one writes nothing."""

import asyncio
import subprocess
import sys

import apsw
import msgspec
import pytest

from integration.conditions import until
from perdure import Runtime, orchestration
from perdure.clock import ManualClock
from perdure.providers.records import WorkerInfo
from perdure.providers.sqlite import SqliteProvider
from perdure.providers.sqlite.peers import Peers
from perdure.runtime import housekeeping

MINUTE_MS = 60_000
WORKER = WorkerInfo(
    worker_id="w", host="h", process_id=1, started_at_ms=1, framework_version="1.0.0", busy=0
)

ANNOUNCER = """
import asyncio, sys
from perdure.providers.records import WorkerInfo
from perdure.providers.sqlite import SqliteProvider

async def main(path):
    async with SqliteProvider(path) as provider:
        await provider.fetch_orchestration_item(1_000, 0)
        worker = WorkerInfo("w", "h", 1, 1, "1.0.0")
        for _ in range(2):  # the second time it is shown, not written
            await provider.admin.register_worker(worker, 3_600_000)
        print("ready", flush=True)
        sys.stdin.read()

asyncio.run(main(sys.argv[1]))
"""


OTHER = WorkerInfo(
    worker_id="x", host="h", process_id=2, started_at_ms=1, framework_version="1.0.0"
)


@orchestration
async def nothing() -> None: ...


@pytest.fixture
def clock():
    return ManualClock()


async def fetched_from(provider):
    """Let a process be one that fetches: only those have a board."""
    await provider.fetch_orchestration_item(1_000, 0)


async def listed(provider):
    return [worker.worker_id for worker in await provider.admin.list_workers()]


async def test_an_idle_worker_stays_listed_and_writes_nothing(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(housekeeping, "_ANNOUNCE_SECONDS", 0.01)
    path = tmp_path / "s.db"
    provider = SqliteProvider(path, clock=clock)

    async def pass_a_minute():
        clock.advance(MINUTE_MS)
        minute_ms = clock.now_ms()

        async def is_seen():
            clock.advance(10)  # it may have begun its pause after the minute
            workers = await provider.admin.list_workers()
            return [each.seen_at_ms >= minute_ms for each in workers] == [True]

        await until(is_seen)

    async with Runtime(provider, [nothing]):
        await pass_a_minute()
        observer = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        before = observer.execute("PRAGMA data_version").get  # each commit that writes changes it
        for _ in range(60):
            await pass_a_minute()  # the last announcement has lapsed long ago
        assert observer.execute("PRAGMA data_version").get == before
        observer.close()
    async with SqliteProvider(path, clock=clock) as after:
        assert await listed(after) == []


async def test_a_worker_that_is_shown_lapses_when_it_is_not_announced(tmp_path, clock):
    path = tmp_path / "s.db"
    async with SqliteProvider(path, clock=clock) as one, SqliteProvider(path, clock=clock) as other:
        await fetched_from(one)
        for _ in range(5):
            await one.admin.register_worker(WORKER, MINUTE_MS)
            clock.advance(MINUTE_MS - 1)
            (seen,) = await other.admin.list_workers()
            assert seen.seen_at_ms == clock.now_ms() - MINUTE_MS + 1
        clock.advance(1)
        assert await listed(other) == []


async def test_another_worker_does_not_remove_one_that_is_shown(tmp_path, clock):
    path = tmp_path / "s.db"
    async with SqliteProvider(path, clock=clock) as one, SqliteProvider(path, clock=clock) as other:
        await fetched_from(one)
        for _ in range(2):
            await one.admin.register_worker(WORKER, MINUTE_MS)
            clock.advance(MINUTE_MS - 1)
        await other.admin.register_worker(OTHER, MINUTE_MS)
        assert await listed(other) == ["w", "x"]
        clock.advance(1)
        await other.admin.register_worker(OTHER, MINUTE_MS)
        assert await listed(other) == ["x"]


async def test_a_clock_that_goes_back_shows_a_worker_again(tmp_path, clock):
    async with SqliteProvider(tmp_path / "s.db", clock=clock) as one:
        await one.admin.register_worker(WORKER, MINUTE_MS)
        clock.advance(MINUTE_MS)
        await one.admin.register_worker(OTHER, MINUTE_MS)
        assert await listed(one) == ["x"]
        clock.advance(-1)
        assert await listed(one) == ["w", "x"]


async def test_a_worker_that_has_changed_is_written(tmp_path, clock):
    path = tmp_path / "s.db"
    async with SqliteProvider(path, clock=clock) as one, SqliteProvider(path, clock=clock) as other:
        await fetched_from(one)
        for busy in (0, 0, 3):
            changed = msgspec.structs.replace(WORKER, busy=busy)
            await one.admin.register_worker(changed, MINUTE_MS)
            assert [worker.busy for worker in await other.admin.list_workers()] == [busy]


async def test_the_entry_is_written_again_after_a_namesake_has_left(tmp_path, clock):
    path = tmp_path / "s.db"
    async with SqliteProvider(path, clock=clock) as one, SqliteProvider(path, clock=clock) as other:
        await fetched_from(one)
        for ttl_ms in (MINUTE_MS, 0):
            await one.admin.register_worker(WORKER, MINUTE_MS)
            await other.admin.register_worker(WORKER, ttl_ms)
        await one.admin.register_worker(WORKER, MINUTE_MS)
        assert await listed(other) == ["w"]


def _remove_board(path):
    for board in Peers(path, "").directory.glob("*.board"):
        board.unlink()


def _open_board(path):
    for board in Peers(path, "").directory.glob("*.board"):
        board.chmod(0o666)


def _share_store(path):
    path.chmod(0o660)


@pytest.mark.parametrize("spoil", [_remove_board, _open_board, _share_store])
async def test_a_worker_that_others_cannot_see_is_written(tmp_path, clock, spoil):
    path = tmp_path / "s.db"
    async with SqliteProvider(path, clock=clock) as one, SqliteProvider(path, clock=clock) as other:
        await fetched_from(one)
        await one.admin.register_worker(WORKER, MINUTE_MS)
        spoil(path)
        for _ in range(3):
            clock.advance(MINUTE_MS - 1)
            await one.admin.register_worker(WORKER, MINUTE_MS)
            assert await listed(other) == ["w"]


def test_a_killed_worker_is_not_listed_any_more(tmp_path):
    path = tmp_path / "s.db"

    async def look():
        async with SqliteProvider(path) as provider:
            return await listed(provider)

    worker = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout.readline() == "ready\n"
        assert asyncio.run(look()) == ["w"]
        worker.kill()
        worker.wait()
        assert asyncio.run(look()) == []


def test_the_time_that_is_shown_can_be_read_and_moved(tmp_path):
    async def run():
        one, other = Peers(tmp_path / "s.db", "one"), Peers(tmp_path / "s.db", "other")
        seen = [other.presence()]
        assert not one.show_until(1)
        one.listen(asyncio.get_running_loop(), print)
        seen.append(other.presence())
        for time_ms in (1_700_000_000_000, 1_800_000_000_000, 5):
            assert one.show_until(time_ms)
            seen.append(other.presence())
        one.close()
        seen.append(other.presence())
        return seen

    assert asyncio.run(run()) == [
        {},
        {"one": 0},
        {"one": 1_700_000_000_000},
        {"one": 1_800_000_000_000},
        {"one": 5},
        {},
    ]
