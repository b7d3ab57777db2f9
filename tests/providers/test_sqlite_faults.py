"""Real faults under a store: no space, a failing disk, a writer that does not let go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

import apsw
import pytest

from patience import HANG_SECONDS
from perdure.conformance.factories import LOCK_MS, start, started
from perdure.errors import ProviderError, StoreBusy, StoreFull, StoreUnavailable
from perdure.providers.records import EnqueueCondition, ExecutionMetadata, TurnCommit
from perdure.providers.sqlite import SqliteProvider, connection, database, writer

NAMED = ExecutionMetadata(name="TestOrch", version="1.0.0")


# --- no space left


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two megabytes, and a function that makes it bigger."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a small tmpfs")
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")

    def grow():
        subprocess.run(["mount", "-o", "remount,size=50m", str(place)], check=True)

    yield place, grow
    subprocess.run(["umount", str(place)], check=True)


def big(name):
    message = start(name)
    return type(message)(
        instance_id=name, kind=message.kind, body='"' + "x" * 100_000 + '"', start=message.start
    )


async def enqueue_until_full(provider):
    taken = []
    with contextlib.suppress(StoreFull):
        while len(taken) < 1000:
            await provider.enqueue_for_orchestrator(big(f"i-{len(taken)}"))
            taken.append(f"i-{len(taken)}")
    return taken


def test_a_full_disk_is_reported_and_overcome_without_a_restart(small_disk):
    place, grow = small_disk

    async def fill_and_go_on():
        async with SqliteProvider(place / "store.db") as provider:
            taken = await enqueue_until_full(provider)
            for _ in range(3):
                with pytest.raises(StoreFull) as caught:
                    await provider.enqueue_for_orchestrator(big("too much"))
                assert caught.value.retryable
            page = await provider.admin.list_instances()
            assert sorted(info.instance_id for info in page.instances) == sorted(taken)

            grow()
            await provider.enqueue_for_orchestrator(big("after"))
            await provider.admin.integrity_check()
            page = await provider.admin.list_instances()
            assert sorted(info.instance_id for info in page.instances) == sorted([*taken, "after"])
            assert len(taken) > 3

    asyncio.run(fill_and_go_on())


def test_what_fits_is_taken_beside_what_does_not(small_disk):
    place, _ = small_disk

    async def fill():
        async with SqliteProvider(place / "store.db") as provider:
            await enqueue_until_full(provider)
            found = await asyncio.gather(
                provider.enqueue_for_orchestrator(big("too much")),
                provider.enqueue_for_orchestrator(start("small")),
                return_exceptions=True,
            )
            return [type(each) for each in found]

    assert asyncio.run(fill())[0] is StoreFull


# --- a failing disk


class FailingDisk:
    """While it is entered, the n-th write or sync of any file of SQLite fails."""

    def __init__(self, operation, number):
        self.operation = operation
        self.left = number
        self.has_failed = False

    def check(self, operation):
        if operation == self.operation:
            self.left -= 1
            if self.left == 0:
                self.has_failed = True
                raise apsw.IOError

    def __enter__(self):
        disk, base = self, apsw.vfs_names()[0]

        class File(apsw.VFSFile):
            def __init__(self, name, flags):
                super().__init__(base, name, flags)

            def xWrite(self, data, offset):  # noqa: N802 - SQLite's name
                disk.check("write")
                super().xWrite(data, offset)

            def xSync(self, flags):  # noqa: N802 - SQLite's name
                disk.check("sync")
                super().xSync(flags)

            def xTruncate(self, size):  # noqa: N802 - SQLite's name
                disk.check("truncate")
                super().xTruncate(size)

        class Layer(apsw.VFS):
            def __init__(self):
                super().__init__("failing", base, makedefault=True)

            def xOpen(self, name, flags):  # noqa: N802 - SQLite's name
                return File(name, flags)

        self._layer = Layer()
        return self

    def __exit__(self, *details):
        self._layer.unregister()


async def one_life(path):
    """Start and finish one instance, repeating what storage refuses; how often it did."""
    refusals = 0

    async def insist(call):
        nonlocal refusals
        while True:
            try:
                return await call()
            except ProviderError as error:
                refusals += 1
                if not error.retryable or refusals == 20:
                    raise

    provider = SqliteProvider(path)
    await insist(provider.open)
    async with provider:
        absent = EnqueueCondition.ABSENT
        await insist(lambda: provider.enqueue_for_orchestrator(start("x"), None, absent))
        fetched = await insist(lambda: provider.fetch_orchestration_item(LOCK_MS, 0))
        commit = TurnCommit(execution_id=1, history_delta=(started("x"),), metadata=NAMED)
        if fetched is not None:
            # A commit whose outcome was not known may have happened.
            with contextlib.suppress(ProviderError):
                await provider.ack_orchestration_item(fetched.lock_token, commit)
        await provider.admin.integrity_check()
        history = await provider.read("x")
        depths = await provider.admin.get_queue_depths()
        total = depths.orchestrator.visible + depths.orchestrator.locked
        # Either the turn is committed and its message consumed, or neither.
        assert (len(history), total) in {(1, 0), (0, 1)}
    return refusals


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("operation", ["write", "sync", "truncate"])
def test_each_failing_operation_of_the_disk_is_survived(tmp_path, operation, monkeypatch):
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    for number in range(1, 500):
        path = tmp_path / f"{operation}-{number}.db"
        with FailingDisk(operation, number) as disk:
            asyncio.run(one_life(path))

        if not disk.has_failed:
            break
    assert not disk.has_failed, "the loop never got past the last operation"
    assert number > 2, "nothing has failed"


# --- others on the same file


def test_a_writer_that_does_not_let_go_is_reported_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "BUSY_SECONDS_MAX", 0.1)

    async def wait_for_another():
        async with SqliteProvider(tmp_path / "store.db") as provider:
            other = apsw.Connection(str(tmp_path / "store.db"))
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreBusy) as caught:
                await provider.enqueue_for_orchestrator(start("x"))
            other.execute("ROLLBACK")
            other.close()
            taken = await provider.enqueue_for_orchestrator(start("x"))
            return caught.value.retryable, taken

    assert asyncio.run(wait_for_another()) == (True, True)


def test_the_log_stays_within_its_bound(tmp_path):
    async def write_a_lot():
        largest = 0
        async with SqliteProvider(tmp_path / "store.db", durability="relaxed") as provider:
            for number in range(900):
                await provider.enqueue_for_orchestrator(big(f"i-{number}"))
                largest = max(largest, (tmp_path / "store.db-wal").stat().st_size)
        return largest

    largest = asyncio.run(write_a_lot())

    assert database.PAGES_TO_CHECKPOINT * 4096 < largest < 64 * 1024 * 1024


# --- a defect of ours


@pytest.mark.parametrize("number", [1, 20])
def test_the_writer_outlives_whatever_breaks_a_commit(tmp_path, monkeypatch, number):
    whole = writer.Writer._attempt
    broken = [True]

    def attempt(self, *args, **options):
        if broken:
            broken.clear()
            raise ZeroDivisionError("a defect")
        return whole(self, *args, **options)

    async def check():
        async with SqliteProvider(tmp_path / "store.db") as provider:
            monkeypatch.setattr(writer.Writer, "_attempt", attempt)
            answers = await asyncio.gather(
                *(provider.enqueue_for_orchestrator(start(f"i-{n}")) for n in range(number)),
                return_exceptions=True,
            )
            assert any(isinstance(answer, StoreUnavailable) for answer in answers)
            assert all(answer is None or "a defect" in str(answer) for answer in answers)
            await provider.enqueue_for_orchestrator(start("after"))
            assert await provider.fetch_orchestration_item(LOCK_MS, 0) is not None

    asyncio.run(asyncio.wait_for(check(), HANG_SECONDS))
