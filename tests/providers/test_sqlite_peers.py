"""Processes that have one SQLite file open wake each other, and release the locks of dead ones."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from patience import HANG_SECONDS
from perdure.conformance.factories import activity, start, started
from perdure.providers.records import ExecutionMetadata, SessionFetch, TurnCommit
from perdure.providers.sqlite import SqliteProvider, database, peers
from perdure.providers.sqlite.peers import EVERYTHING, TURNS, WORK, Peers, topic_of

HOUR_MS = 3_600_000

HOLDER = """
import asyncio, sys
from perdure.conformance.factories import start
from perdure.providers.sqlite import SqliteProvider

async def main(path):
    async with SqliteProvider(path) as provider:
        fetched = await provider.fetch_orchestration_item(3_600_000, 0)
        work = await provider.fetch_work_item(3_600_000, 0)
        print(fetched is not None, work is not None, flush=True)
        sys.stdin.read()

asyncio.run(main(sys.argv[1]))
"""

FORKER = HOLDER.replace(
    "        sys.stdin.read()",
    "        import os, time\n"
    "        child = os.fork()\n"
    "        if child == 0:\n"
    "            time.sleep(600)\n"
    "        print(child, flush=True)\n"
    "        sys.stdin.read()",
)


class Ear:
    """Notes what a process hears."""

    def __init__(self):
        self.heard = []
        self.something = asyncio.Event()

    def __call__(self, topics):
        self.heard += topics
        self.something.set()

    async def listen(self):
        await asyncio.wait_for(self.something.wait(), HANG_SECONDS)
        self.something.clear()
        return sorted(self.heard)


@contextmanager
def two_peers(path):
    waits, writes = Peers(path, "waits"), Peers(path, "writes")
    try:
        yield waits, writes
    finally:
        waits.close()
        writes.close()


def tell(peer, *instance_ids, turns=False, work=False, now=1e9):
    if peer.has_any(now):
        peer.tell(turns=turns, work=work, instance_ids=instance_ids)


@contextmanager
def process(path, program=HOLDER):
    """Run a process that has taken a turn and a work item for an hour."""
    running = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout.readline() == "True True\n"
        yield running
    finally:
        running.kill()
        running.wait()
        running.stdin.close()
        running.stdout.close()


async def fill(path):
    """Store an instance with a message, and a work item."""
    async with SqliteProvider(path) as provider:
        await provider.enqueue_for_orchestrator(start("a"))
        await provider.enqueue_for_worker(activity("b"))


# --- what is told


def test_a_process_hears_what_it_waits_for_and_nothing_else(tmp_path):
    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            ear = Ear()
            waits.listen(asyncio.get_running_loop(), ear)
            waits.want(topic_of("mine"))
            waits.want(WORK)
            tell(writes, "other", turns=True)
            tell(writes, "mine", "other", turns=True, work=True)
            return await ear.listen()

    assert asyncio.run(run()) == sorted([WORK, topic_of("mine")])


def test_what_is_waited_for_twice_is_told_until_both_waits_have_ended(tmp_path):
    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            ear = Ear()
            waits.listen(asyncio.get_running_loop(), ear)
            waits.want(topic_of("a"))
            waits.want(topic_of("a"))
            waits.want(TURNS)
            waits.release(topic_of("a"))
            tell(writes, "a")
            first = await ear.listen()
            waits.release(topic_of("a"))
            ear.heard.clear()
            tell(writes, "a")
            tell(writes, turns=True)
            return first, await ear.listen()

    assert asyncio.run(run()) == ([topic_of("a")], [TURNS])


def test_topics_that_share_a_bit_are_told_apart(tmp_path):
    bits = peers.BOARD_BYTES * 8
    by_bit = {}
    mine, other = next(
        (by_bit[topic % bits], name)
        for name in map(str, range(10_000))
        for topic in [topic_of(name)]
        if by_bit.setdefault(topic % bits, name) != name
    )

    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            ear = Ear()
            waits.listen(asyncio.get_running_loop(), ear)
            waits.want(topic_of(mine))
            waits.want(TURNS)
            tell(writes, other)
            tell(writes, turns=True)
            return await ear.listen()

    assert asyncio.run(run()) == [TURNS]


def test_a_burst_that_fills_the_pipe_is_heard_as_everything(tmp_path):
    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            ear = Ear()
            waits.listen(asyncio.get_running_loop(), ear)
            waits.want(TURNS)
            for _ in range(20_000):  # more than a pipe holds, and no write may block
                tell(writes, turns=True)
            return await ear.listen()

    assert asyncio.run(run()) == [EVERYTHING]


def test_a_commit_that_changes_very_many_instances_is_told_as_everything(tmp_path):
    names = [str(number) for number in range(peers.TOPICS_PER_WRITE_MAX + 1)]

    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            ear = Ear()
            waits.listen(asyncio.get_running_loop(), ear)
            for name in names:
                waits.want(topic_of(name))
            tell(writes, *names)
            return await ear.listen()

    assert asyncio.run(run()) == [EVERYTHING]


# --- files


def test_the_files_are_private_and_go_when_the_last_process_closes(tmp_path):
    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            waits.listen(asyncio.get_running_loop(), print)
            writes.listen(asyncio.get_running_loop(), print)
            modes = {each.name: each.lstat().st_mode for each in waits.directory.iterdir()}
            waits.close()
            left = sorted(each.name for each in writes.directory.iterdir())
            directory = stat.S_IMODE(waits.directory.stat().st_mode)
            return modes, left, directory

    modes, left, directory = asyncio.run(run())
    assert {stat.S_IMODE(mode) for mode in modes.values()} == {0o600}
    assert left == ["writes.board", "writes.pipe"]
    assert directory == 0o700
    assert list(tmp_path.iterdir()) == []


def _a_file(pipe):
    pipe.unlink()
    pipe.write_text("not a pipe")


def _for_all(pipe):
    pipe.chmod(0o622)


def _a_link(pipe):
    pipe.rename(pipe.with_suffix(".moved"))
    pipe.symlink_to(pipe.with_suffix(".moved"))


def _nothing(pipe):
    pipe.unlink()


@pytest.mark.parametrize("replace", [_a_file, _for_all, _a_link, _nothing])
def test_a_pipe_that_is_not_right_is_not_written_to(tmp_path, replace):
    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            waits.listen(asyncio.get_running_loop(), print)
            waits.want(TURNS)
            pipe = waits.directory / "waits.pipe"
            replace(pipe)
            before = pipe.read_bytes() if replace is _a_file else None
            tell(writes, turns=True)
            tell(writes, turns=True, now=2e9)
            after = pipe.read_bytes() if replace is _a_file else None
            return before == after, writes.take_dead(3e9)

    assert asyncio.run(run()) == (True, [])


KILLED = """
import asyncio, os, sys
from pathlib import Path
from perdure.providers.sqlite.peers import Peers

def kill(*_):
    os.kill(os.getpid(), 9)

setattr(os, sys.argv[2], kill)
asyncio.run(asyncio.sleep(0))
loop = asyncio.new_event_loop()
Peers(Path(sys.argv[1]), "killed").listen(loop, print)
"""


@pytest.mark.parametrize("moment", ["ftruncate", "mkfifo", "rename"])
def test_files_of_a_process_that_was_killed_on_its_way_are_removed(tmp_path, monkeypatch, moment):
    path = tmp_path / "s.db"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    directory = Peers(path, "").directory
    left = {each.name for each in directory.iterdir()}
    assert "killed.new" in left

    async def come_and_go(seconds):
        monkeypatch.setattr(peers, "ABANDONED_SECONDS", seconds)
        comer = Peers(path, "comer")
        comer.listen(asyncio.get_running_loop(), print)
        comer.close()

    asyncio.run(come_and_go(60))  # it may be about to go on
    assert {each.name for each in directory.iterdir()} == left
    asyncio.run(come_and_go(0))
    assert not directory.exists()


def test_a_pipe_whose_board_was_removed_goes_when_its_process_has_died(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "ABANDONED_SECONDS", 0)
    path = tmp_path / "s.db"

    async def come_and_go():
        comer = Peers(path, "comer")
        comer.listen(asyncio.get_running_loop(), print)
        comer.close()

    asyncio.run(fill(path))
    with process(path) as running:
        directory = Peers(path, "").directory
        (board,) = directory.glob("*.board")
        board.unlink()
        asyncio.run(come_and_go())
        assert [each.suffix for each in directory.iterdir()] == [".pipe"]
        running.kill()
        running.wait()
        asyncio.run(come_and_go())
        assert not directory.exists()


def test_files_of_others_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "ABANDONED_SECONDS", 0)

    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            waits.listen(asyncio.get_running_loop(), print)
            for name in ("notes", "notes.txt", "a.pipe"):
                (waits.directory / name).write_text("mine")
            (waits.directory / "open.new").write_text("")
            (waits.directory / "open.new").chmod(0o666)
            writes.listen(asyncio.get_running_loop(), print)
            waits.close()
            writes.close()
            return sorted(each.name for each in waits.directory.iterdir())

    assert asyncio.run(run()) == ["a.pipe", "notes", "notes.txt", "open.new"]


def test_a_board_of_another_length_is_no_peer(tmp_path):
    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            waits.listen(asyncio.get_running_loop(), print)
            board = waits.directory / "odd.board"
            board.write_bytes(b"")
            board.chmod(0o600)
            tell(writes, turns=True)
            return writes.take_dead(2e9)

    assert asyncio.run(run()) == []


@pytest.mark.parametrize("spoil", ["for all", "a file"])
def test_a_store_works_where_the_directory_is_not_private(tmp_path, spoil):
    directory = Path(f"{tmp_path / 's.db'}-peers")
    if spoil == "a file":
        directory.write_text("")
    else:
        directory.mkdir()
        directory.chmod(0o777)

    async def run():
        path = tmp_path / "s.db"
        async with SqliteProvider(path) as waits, SqliteProvider(path) as writes:
            fetch = asyncio.ensure_future(waits.fetch_orchestration_item(5_000, HOUR_MS))
            await writes.enqueue_for_orchestrator(start("a"))
            return (await asyncio.wait_for(fetch, HANG_SECONDS)).item.instance_id

    assert asyncio.run(run()) == "a"


# --- stores


@pytest.fixture
def without_polling(monkeypatch):
    """Only other processes wake a waiting process."""
    monkeypatch.setattr(database, "WATCH_BESIDE_PEERS_SECONDS", 3_600)


async def _wait_until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.usefixtures("without_polling")
def test_a_message_wakes_a_fetch_of_another_handle(tmp_path):
    async def run():
        path = tmp_path / "s.db"
        async with SqliteProvider(path) as waits, SqliteProvider(path) as writes:
            fetch = asyncio.ensure_future(waits.fetch_orchestration_item(5_000, HOUR_MS))
            await _wait_until(lambda: waits._store.signals.turns.has_waiters)
            await writes.enqueue_for_orchestrator(start("a"))
            return (await asyncio.wait_for(fetch, HANG_SECONDS)).item.instance_id

    assert asyncio.run(run()) == "a"


@pytest.mark.usefixtures("without_polling")
def test_work_wakes_a_fetch_of_another_handle(tmp_path):
    async def run():
        path = tmp_path / "s.db"
        async with SqliteProvider(path) as waits, SqliteProvider(path) as writes:
            fetch = asyncio.ensure_future(waits.fetch_work_item(5_000, HOUR_MS))
            await _wait_until(lambda: waits._store.signals.work.has_waiters)
            await writes.enqueue_for_worker(activity("a"))
            return (await asyncio.wait_for(fetch, HANG_SECONDS)).identity.instance_id

    assert asyncio.run(run()) == "a"


@pytest.mark.usefixtures("without_polling")
def test_a_turn_wakes_a_watch_of_another_handle(tmp_path):
    async def run():
        path = tmp_path / "s.db"
        async with SqliteProvider(path) as waits, SqliteProvider(path) as works:
            await works.enqueue_for_orchestrator(start("a"))
            with waits.watch("a") as watch:
                seen = await waits.read("a")
                fetched = await works.fetch_orchestration_item(5_000, 0)
                turn = TurnCommit(
                    execution_id=1,
                    history_delta=(started("a"),),
                    metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"),
                )
                await works.ack_orchestration_item(fetched.lock_token, turn)
                changed = await watch.wait(HANG_SECONDS * 1000)
                return seen, changed, len(await waits.read("a"))

    seen, changed, events = asyncio.run(run())
    assert (seen, changed) == ([], True)
    assert events > 0


# --- takeover


def test_the_locks_of_a_killed_process_are_free_at_once(tmp_path):
    path = tmp_path / "s.db"

    async def take():
        async with SqliteProvider(path) as provider:
            turn = await provider.fetch_orchestration_item(1_000, HANG_SECONDS * 1000)
            work = await provider.fetch_work_item(1_000, HANG_SECONDS * 1000)
            return turn.item.instance_id, turn.attempt_count, work.identity.instance_id

    asyncio.run(fill(path))
    with process(path) as running:
        running.kill()
        running.wait()
        assert asyncio.run(take()) == ("a", 2, "b")
    assert not Path(f"{path}-peers").exists()


def test_a_process_that_waits_takes_the_locks_of_one_that_is_killed_meanwhile(tmp_path):
    path = tmp_path / "s.db"

    async def take(running):
        async with SqliteProvider(path) as provider:
            fetch = asyncio.ensure_future(provider.fetch_orchestration_item(1_000, HOUR_MS))
            await _wait_until(lambda: provider._store.signals.turns.has_waiters)
            running.kill()
            return (await asyncio.wait_for(fetch, HANG_SECONDS)).item.instance_id

    asyncio.run(fill(path))
    with process(path) as running:
        assert asyncio.run(take(running)) == "a"


@pytest.mark.parametrize("stop", [None, signal.SIGSTOP], ids=["runs", "is stopped"])
def test_the_locks_of_a_live_process_are_never_taken(tmp_path, stop):
    path = tmp_path / "s.db"

    async def take():
        async with SqliteProvider(path) as provider:
            for _ in range(5):
                dead = provider._store.database.peers.take_dead(time.monotonic())
                provider._store._release_dead(dead)
                assert await provider.fetch_orchestration_item(1_000, 0) is None
                assert await provider.fetch_work_item(1_000, 0) is None

    asyncio.run(fill(path))
    with process(path) as running:
        if stop is not None:
            running.send_signal(stop)
        asyncio.run(take())


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "new"])
def test_a_handle_that_is_closed_while_others_look_is_not_dead(tmp_path, monkeypatch, is_known):
    """Its locks last until they end: another handle may hold their tokens."""

    async def run():
        with two_peers(tmp_path / "s.db") as (waits, writes):
            waits.listen(asyncio.get_running_loop(), print)
            if is_known:
                assert writes.take_dead(1e9) == []
                assert set(writes._known) == {"waits"}
            is_locked = peers.is_locked

            def close_and_look(descriptor):
                waits.close()
                return is_locked(descriptor)

            # The directory has been read, and the board is looked at next.
            monkeypatch.setattr(peers, "is_locked", close_and_look)
            return [*writes.take_dead(2e9), *writes.take_dead(3e9)]

    assert asyncio.run(run()) == []


def test_a_forked_child_does_not_keep_its_dead_parent_alive(tmp_path):
    path = tmp_path / "s.db"

    async def take():
        async with SqliteProvider(path) as provider:
            return await provider.fetch_orchestration_item(1_000, HANG_SECONDS * 1000)

    asyncio.run(fill(path))
    with process(path, FORKER) as running:
        child = int(running.stdout.readline())
        try:
            running.kill()
            running.wait()
            assert asyncio.run(take()).item.instance_id == "a"
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_copied_store_takes_nothing_from_the_processes_of_the_first(tmp_path):
    path, copied = tmp_path / "s.db", tmp_path / "copy.db"

    async def copy():
        async with SqliteProvider(path) as provider:
            await provider.admin.backup(copied)

    async def take():
        async with SqliteProvider(copied) as provider:
            return await provider.fetch_orchestration_item(1_000, 0)

    asyncio.run(fill(path))
    with process(path) as running:
        asyncio.run(copy())
        running.kill()
        running.wait()
        assert asyncio.run(take()) is None


def test_sessions_and_entry_of_a_killed_worker_go_with_it(tmp_path):
    path = tmp_path / "s.db"
    program = """
import asyncio, sys
from perdure.conformance.factories import start
from perdure.providers.records import SessionFetch, WorkerInfo
from perdure.providers.sqlite import SqliteProvider

async def main(path):
    async with SqliteProvider(path) as provider:
        worker = WorkerInfo("w1", "here", 1, 0, "1.0.0")
        await provider.admin.register_worker(worker, 3_600_000)
        session = SessionFetch(owner_id="w1", lock_timeout_ms=3_600_000)
        work = await provider.fetch_work_item(3_600_000, 0, session)
        print(True, work is not None, flush=True)
        sys.stdin.read()

asyncio.run(main(sys.argv[1]))
"""

    async def prepare():
        async with SqliteProvider(path) as provider:
            await provider.enqueue_for_worker(activity("a", session="s"))

    async def take():
        async with SqliteProvider(path) as provider:
            session = SessionFetch(owner_id="w2", lock_timeout_ms=1_000)
            work = await provider.fetch_work_item(1_000, HANG_SECONDS * 1000, session)
            return work.identity.instance_id, await provider.admin.list_workers()

    asyncio.run(prepare())
    with process(path, program) as running:
        running.kill()
        running.wait()
        assert asyncio.run(take()) == ("a", [])


def test_a_commit_finds_new_peers_while_the_event_loop_greets_others(tmp_path, monkeypatch):
    """The thread that commits looks for peers at any time, also while ``listen`` runs."""
    path = tmp_path / "store.db"
    first, second, comer = everyone = [Peers(path, each) for each in ("first", "second", "comer")]
    greet = peers._Peer.greet
    threads = []

    def greet_slowly(peer):
        if not threads:
            threads.append(threading.Thread(target=comer.has_any, args=(1e9,)))
            second.listen(asyncio.get_running_loop(), print)
            threads[0].start()
            threads[0].join(0.2)
        greet(peer)

    async def run():
        loop = asyncio.get_running_loop()
        first.listen(loop, print)
        monkeypatch.setattr(peers._Peer, "greet", greet_slowly)
        comer.listen(loop, print)
        threads[0].join(HANG_SECONDS)
        known = set(comer._known)
        for each in everyone:
            each.close()
        return known

    assert asyncio.run(run()) == {"first", "second"}
