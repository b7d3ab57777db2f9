"""A single small operation is committed by the event loop itself, without waiting for others."""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial

import apsw
import msgspec
import pytest

from commit_points import ObservedProvider
from integration.conditions import until
from patience import HANG_SECONDS
from perdure.conformance.factories import LOCK_MS, event, raised, start, started
from perdure.errors import DuplicateEvent, LockLost, StoreBusy, StoreUnavailable
from perdure.providers.records import EnqueueCondition, ExecutionMetadata, TurnCommit
from perdure.providers.sqlite import SqliteProvider, connection, writer

NAMED = ExecutionMetadata(name="TestOrch", version="1.0.0")


class Noting(ObservedProvider):
    """Notes which thread commits, and may be told to do something there."""

    def __init__(self, path, **options):
        super().__init__(path, **options)
        self.threads = []
        self.at_point = {}

    def reached(self, point):
        self.at_point.pop(point, lambda: None)()
        if point == "after commit":
            self.threads.append(threading.current_thread())

    @property
    def last_was_here(self):
        return self.threads[-1] is threading.main_thread()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """However slow the disk of the tests is."""
    monkeypatch.setattr(writer, "QUICK_SECONDS", 3_600)


def run(path, function, **options):
    async def main():
        async with Noting(path, **options) as provider:
            await warm_up(provider)
            return await function(provider)

    return asyncio.run(main())


async def warm_up(provider):
    """Commit one by one until the disk counts as quick, and once more."""
    for number in range(writer.QUICK_COMMITS_MIN + 1):
        await provider.enqueue_for_orchestrator(start(f"warm-{number}"))


async def begin(provider, instance_id, keep_lock_ms=LOCK_MS):
    commit = TurnCommit(
        execution_id=1,
        history_delta=(started(instance_id),),
        metadata=NAMED,
        keep_lock_ms=keep_lock_ms,
    )
    token = f"lock of {instance_id}"
    assert await provider.start_orchestration_item(start(instance_id), commit, token, "me")
    return token


def turn(instance_id, event_id, **fields):
    return TurnCommit(
        execution_id=1,
        history_delta=(event(instance_id, event_id),),
        keep_lock_ms=LOCK_MS,
        **fields,
    )


def test_operations_one_after_the_other_are_committed_here(path):
    async def write(provider):
        provider.threads.clear()
        token = await begin(provider, "x")
        for event_id in (2, 3, 4):
            await provider.ack_orchestration_item(token, turn("x", event_id))
        await provider.enqueue_for_orchestrator(raised("x"))
        return provider.threads, [record.event_id for record in await provider.read("x")]

    threads, events = run(path, write)

    assert set(threads) == {threading.main_thread()}
    assert events == [1, 2, 3, 4]


def test_what_is_committed_here_is_answered_when_it_is_asked_for(path):
    async def write(provider):
        token = await begin(provider, "x")
        await asyncio.sleep(0)
        return provider.ack_orchestration_item(token, turn("x", 2)).done()

    assert run(path, write)


def test_several_at_once_share_a_commit_of_the_thread(path):
    async def write(provider):
        provider.threads.clear()
        sent = [provider.enqueue_for_orchestrator(start(f"i-{number}")) for number in range(20)]
        await asyncio.gather(*sent)
        return provider.threads

    threads = run(path, write)

    # At most the first of them: the others were not known then.
    assert threads.count(threading.main_thread()) <= 1
    assert len(threads) <= 3


def test_one_that_comes_after_others_does_not_overtake_them(path):
    async def write(provider):
        token = await begin(provider, "x")
        gone = [provider.cleanup_orphaned_sessions() for _ in range(2)]
        await asyncio.sleep(0)
        abandoned = provider.abandon_orchestration_item(token)
        await asyncio.sleep(0)
        acked = provider.ack_orchestration_item(token, turn("x", 2))
        return await asyncio.gather(*gone, abandoned, acked, return_exceptions=True)

    *_, abandoned, acked = run(path, write)

    assert abandoned is None
    assert isinstance(acked, LockLost)


@pytest.mark.parametrize(
    "data", ["x" * 40_000, pytest.param("x", id="many rows")], ids=["big", None]
)
def test_what_takes_long_is_left_to_the_thread(path, data):
    async def write(provider):
        token = await begin(provider, "x")
        count = 1 if len(data) > 1 else 100
        delta = tuple(event("x", number + 2, data=data) for number in range(count))
        commit = TurnCommit(execution_id=1, history_delta=delta, keep_lock_ms=LOCK_MS)
        await provider.ack_orchestration_item(token, commit)
        return provider.last_was_here

    assert not run(path, write)


def test_a_turn_that_carries_much_along_is_left_to_the_thread(path):
    async def write(provider):
        token = await begin(provider, "x")
        carried = msgspec.structs.replace(raised("x"), body="x" * 40_000)
        await provider.ack_orchestration_item(token, turn("x", 2, orchestrator_items=(carried,)))
        return provider.last_was_here

    assert not run(path, write)


def test_a_slow_disk_is_left_to_the_thread_until_it_is_quick_again(path, monkeypatch):
    async def write(provider):
        places = []
        token = await begin(provider, "x")
        for event_id in range(2, 4 + writer.QUICK_COMMITS_MIN):
            monkeypatch.setattr(writer, "QUICK_SECONDS", 0 if event_id == 2 else 3_600)
            await provider.ack_orchestration_item(token, turn("x", event_id))
            places.append(provider.last_was_here)
        return places

    assert run(path, write) == [True, *[False] * writer.QUICK_COMMITS_MIN, True]


def test_another_process_that_writes_is_waited_for_in_the_thread(path):
    async def write(provider):
        token = await begin(provider, "x")
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        answer = provider.ack_orchestration_item(token, turn("x", 2))
        for _ in range(100):
            await asyncio.sleep(0)  # the loop goes on
        assert not answer.done()
        other.execute("ROLLBACK")
        other.close()
        await answer
        return provider.last_was_here

    assert not run(path, write)


def test_a_store_that_was_opened_again_waits_for_another_process(path, monkeypatch):
    is_busy = threading.Event()
    wait = connection.BusyHandler.__call__

    def note(handler, attempts):
        is_busy.set()
        return wait(handler, attempts)

    async def write(provider):
        await provider.close()
        await provider.open()
        monkeypatch.setattr(connection.BusyHandler, "__call__", note)
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        calls = [provider.enqueue_for_orchestrator(start(name)) for name in ("x", "y")]
        answers = asyncio.gather(*calls)
        await asyncio.to_thread(is_busy.wait, HANG_SECONDS)
        other.execute("ROLLBACK")
        other.close()
        return await answers

    assert run(path, write) == [True, True]


def test_another_process_that_never_ends_is_an_error_in_time(path, monkeypatch):
    monkeypatch.setattr(connection, "BUSY_SECONDS_MAX", 0.05)

    async def write(provider):
        token = await begin(provider, "x")
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy):
            await provider.ack_orchestration_item(token, turn("x", 2))
        other.close()
        await provider.ack_orchestration_item(token, turn("x", 2))

    run(path, write)


def test_what_is_refused_here_is_refused_as_in_the_thread(path):
    async def write(provider):
        token = await begin(provider, "x")
        provider.threads.clear()
        with pytest.raises(DuplicateEvent):
            await provider.ack_orchestration_item(token, turn("x", 1))
        with pytest.raises(LockLost):
            await provider.ack_orchestration_item("nobody's", turn("x", 2))
        await provider.ack_orchestration_item(token, turn("x", 2))
        return provider.threads, [record.event_id for record in await provider.read("x")]

    threads, events = run(path, write)

    assert set(threads) == {threading.main_thread()}
    assert events == [1, 2]


def test_a_defect_is_told_and_the_store_goes_on(path):
    async def write(provider):
        token = await begin(provider, "x")
        provider.at_point["before commit"] = partial(raise_error, ZeroDivisionError("a defect"))
        with pytest.raises(StoreUnavailable, match="a defect"):
            await provider.ack_orchestration_item(token, turn("x", 2))
        await provider.ack_orchestration_item(token, turn("x", 2))
        return [record.event_id for record in await provider.read("x")]

    assert run(path, write) == [1, 2]


@pytest.mark.parametrize(
    ("point", "stored"), [("begun", [1]), ("before commit", [1]), ("after commit", [1, 2])]
)
def test_a_signal_that_breaks_into_a_commit_leaves_nobody_waiting(path, point, stored):
    answers = []

    async def write(provider):
        token = await begin(provider, "x")
        provider.at_point[point] = partial(raise_error, KeyboardInterrupt())
        answers.append(provider.ack_orchestration_item(token, turn("x", 2)))
        answers.extend(await asyncio.gather(*answers, return_exceptions=True))

    with pytest.raises(KeyboardInterrupt):
        run(path, write)

    async def look():
        async with SqliteProvider(path) as provider:
            return [record.event_id for record in await provider.read("x")]

    assert isinstance(answers[0].exception(), StoreUnavailable)
    assert "whether it was written is unknown" in str(answers[0].exception())
    assert asyncio.run(look()) == stored


def test_a_second_signal_does_not_have_it_written_twice(path, monkeypatch):
    answers = []

    class SecondSignal(logging.Handler):
        """While the log tells of the first one."""

        def emit(self, record):
            raise KeyboardInterrupt

    async def write(provider):
        await provider.enqueue_for_orchestrator(start("x"))
        provider.at_point["after commit"] = partial(raise_error, KeyboardInterrupt())
        answers.append(provider.enqueue_for_orchestrator(raised("x")))
        answers.extend(await asyncio.gather(*answers, return_exceptions=True))

    monkeypatch.setattr(logging.getLogger("perdure.sqlite"), "handlers", [SecondSignal()])
    with pytest.raises(KeyboardInterrupt):
        run(path, write)

    assert isinstance(answers[0].exception(), StoreUnavailable)
    other = apsw.Connection(str(path))
    counted = "SELECT count(*) FROM orchestrator_queue WHERE instance_id = 'x'"
    assert other.execute(counted).get == 2
    other.close()


def test_a_connection_that_broke_is_opened_again_in_the_thread(path):
    async def write(provider):
        token = await begin(provider, "x")
        provider.at_point["before commit"] = partial(raise_error, apsw.IOError("a bad disk"))
        with pytest.raises(StoreUnavailable, match="a bad disk"):
            await provider.ack_orchestration_item(token, turn("x", 2))
        await provider.ack_orchestration_item(token, turn("x", 2))
        return provider.last_was_here

    assert not run(path, write)


def test_an_instance_is_replaced_in_the_thread_however_small_the_new_one_is(path):
    async def write(provider):
        await begin(provider, "x")
        await provider.enqueue_for_orchestrator(start("x"), None, EnqueueCondition.REPLACE)
        return provider.last_was_here

    assert not run(path, write)


def test_the_thread_copies_the_log_that_is_written_here(path):
    async def write(provider):
        token = await begin(provider, "x")
        for event_id in range(2, 600):
            await provider.ack_orchestration_item(token, turn("x", event_id))
        await until(lambda: count_rows(path, "history") > 100)
        return provider.threads.count(threading.main_thread())

    assert run(path, write) > 300


def test_an_idle_store_has_copied_what_was_written_here(path):
    async def write(provider):
        await until(lambda: count_rows(path, "instance_locks") > writer.QUICK_COMMITS_MIN)
        # No thread watches the file: the thread sleeps until it is told of the commit.
        await provider.enqueue_for_orchestrator(start("x"))
        assert provider.last_was_here
        await until(lambda: count_rows(path, "instance_locks") > writer.QUICK_COMMITS_MIN + 1)

    run(path, write)


def count_rows(path, table):
    """In the file itself, without its log."""
    copy = path.with_name("copy.db")
    copy.write_bytes(path.read_bytes())
    flags = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READONLY
    other = apsw.Connection(f"file:{copy}?immutable=1", flags=flags)
    try:
        return other.execute(f"SELECT count(*) FROM {table}").get
    except apsw.CorruptError:  # copied while it was being written
        return 0
    finally:
        other.close()


def raise_error(error):
    raise error
