"""The write-ahead log: reserved for a new file, overwritten while it is open, gone afterwards."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys

import apsw
import pytest

from perdure.providers.records import OrchestratorMessage, StartRouting
from perdure.providers.sqlite import SqliteProvider, guards
from perdure.providers.sqlite.database import PAGES_TO_CHECKPOINT

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
    died = subprocess.run([sys.executable, "-c", DYING, str(path)], check=False, timeout=60)

    assert died.returncode == 9
    assert log_of(path).stat().st_size == RESERVED
    assert count_messages(path) == 5
