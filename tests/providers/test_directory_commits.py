"""Commits: many share one flush, and no answer comes before its flush."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from campaigns.filesystem_ops import CountedFileOps
from campaigns.filesystem_workload import (
    check_finished,
    run_to_the_end,
    start_instances,
    take_some_steps,
)
from integration.conditions import until
from perdure.clock import ManualClock
from perdure.conformance import factories
from perdure.errors import StoreUnavailable
from perdure.providers.directory import FileSystemProvider, layout
from perdure.providers.directory.documents import Documents
from perdure.providers.directory.histories import IN_FILE
from perdure.providers.directory.journal import Changes
from perdure.providers.records import HistoryRecord, TurnCommit
from perdure.providers.sqlite.connection import connect_memory
from perdure.providers.sqlite.transaction import Verb

if TYPE_CHECKING:
    from pathlib import Path

    from perdure.providers.local_files import Directory
    from perdure.providers.sqlite.transaction import Transaction


class WatchedFileOps(CountedFileOps):
    """Notes what is looked at, and which thread does what."""

    def __init__(self) -> None:
        super().__init__(lambda name: self.seen.append((threading.current_thread().name, name)))
        self.seen: list[tuple[str, str]] = []

    def open_file(self, path: str, *, at: Directory) -> int:
        self.seen.append((threading.current_thread().name, f"open {path.rpartition('/')[2]}"))
        return super().open_file(path, at=at)

    def list_directory(self, dir_fd: int) -> list[str]:
        self.seen.append((threading.current_thread().name, "list"))
        return super().list_directory(dir_fd)


class GatedFileOps(CountedFileOps):
    """Flushing the journal waits for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()

    def fdatasync(self, descriptor: int) -> None:
        self.is_waiting.set()
        self.gate.wait()
        super().fdatasync(descriptor)


def test_whatever_arrives_during_a_flush_shares_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = GatedFileOps()
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            ops.gate.clear()
            first = asyncio.ensure_future(provider.enqueue_for_orchestrator(factories.start("a")))
            await until(ops.is_waiting.is_set)
            others = [
                asyncio.ensure_future(provider.enqueue_for_orchestrator(factories.start(f"{n}")))
                for n in range(200)
            ]
            ops.gate.set()

            assert await asyncio.gather(first, *others) == [True] * 201

            assert ops.names.count("fdatasync") == 2

    asyncio.run(scenario())


def test_nothing_is_answered_before_it_is_durable(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = GatedFileOps()
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            ops.gate.clear()
            calls = [
                asyncio.ensure_future(provider.enqueue_for_orchestrator(factories.start("a"))),
                asyncio.ensure_future(provider.fetch_orchestration_item(1000, 0)),
            ]
            await until(ops.is_waiting.is_set)
            calls.append(asyncio.ensure_future(provider.admin.count_instances()))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not any(call.done() for call in calls)
            ops.gate.set()

            taken, fetched, count = await asyncio.gather(*calls)

            assert (taken, fetched is not None, count) == (True, True, 1)

    asyncio.run(scenario())


def test_a_fetch_that_is_cancelled_gives_back_what_it_took(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = GatedFileOps()
        store = FileSystemProvider(tmp_path / "store", file_ops=ops, clock=ManualClock())
        async with store as provider:
            await provider.enqueue_for_orchestrator(factories.start("a"))
            await provider.enqueue_for_worker(factories.activity("a"))
            ops.is_waiting.clear()
            ops.gate.clear()
            calls = [
                asyncio.ensure_future(provider.fetch_orchestration_item(60_000, 0)),
                asyncio.ensure_future(provider.fetch_work_item(60_000, 0)),
            ]
            await until(ops.is_waiting.is_set)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            ops.gate.set()

            turn = await provider.fetch_orchestration_item(60_000, 60_000)
            work = await provider.fetch_work_item(60_000, 60_000)

            assert turn is not None
            assert work is not None
            assert (turn.attempt_count, work.attempt_count) == (1, 1)

    asyncio.run(scenario())


def long_history(instance: str) -> list[HistoryRecord]:
    """Too long to be a part of the document of its instance."""
    return [
        HistoryRecord(event_id=number, data=f'{{"text":"{instance * 400}"}}')
        for number in range(1, 50)
    ]


def test_verbs_write_to_the_journal_and_look_at_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a long history that is needed is read; files are written when the store is idle."""
    monkeypatch.setattr("perdure.providers.directory.store.IDLE_SECONDS", 3600.0)
    monkeypatch.setattr("perdure.providers.directory.store.AGE_SECONDS", 3600.0)

    async def scenario() -> None:
        ops = WatchedFileOps()
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            await start_instances(provider, 30, lambda _: None)
            await take_some_steps(provider, 3, 20)
            await provider.append_with_execution("long", 1, long_history("long"))
            await provider.checkpoint()
            ops.seen.clear()

            await run_to_the_end(provider, 3, lambda _: None)

            assert {what for _, what in ops.seen} == {"write", "fdatasync"}
            assert await provider.read("long") == long_history("long")
            assert ops.seen[-1][1] == "open 1.jsonl"

    asyncio.run(scenario())


def test_opening_reads_no_long_history(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as provider:
            await start_instances(provider, 30, lambda _: None)
            await run_to_the_end(provider, 3, lambda _: None)
            await provider.append_with_execution("long", 1, long_history("long"))
        ops = WatchedFileOps()
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            opened = [what for _, what in ops.seen if what.startswith("open ")]
            await check_finished(provider, 30, 3)

            assert sum(what.startswith("open order-") for what in opened) == 30
            assert opened.count("open meta.json") == opened.count("open 1.json") == 1
            assert "open 1.jsonl" not in opened
            assert await provider.read("long") == long_history("long")

    asyncio.run(scenario())


def test_texts_of_ended_executions_are_not_kept_in_memory(tmp_path: Path) -> None:
    def texts(tx: Transaction) -> int:
        return tx.row("SELECT count(*) FROM history WHERE data != ?", (IN_FILE,))[0]

    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as provider:
            await start_instances(provider, 5, lambda _: None)
            await run_to_the_end(provider, 3, lambda _: None)
            assert await provider._store.read(Verb("texts", texts)) == 30
            await provider.checkpoint()
            assert await provider._store.read(Verb("texts", texts)) == 0
            await check_finished(provider, 5, 3)
        async with FileSystemProvider(tmp_path / "store") as provider:
            assert await provider._store.read(Verb("texts", texts)) == 0
            await check_finished(provider, 5, 3)

    asyncio.run(scenario())


def test_several_work_items_are_locked_in_one_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        ops = CountedFileOps()
        async with FileSystemProvider(tmp_path / "store", file_ops=ops) as provider:
            for number in range(1, 8):
                await provider.enqueue_for_worker(factories.activity("a", activity_id=number))
            before = ops.names.count("fdatasync")

            found = await provider.fetch_work_items(5, 1000, 0)

            assert [work.identity.activity_id for work in found] == [1, 2, 3, 4, 5]
            assert ops.names.count("fdatasync") == before + 1
            assert len(await provider.fetch_work_items(5, 1000, 0)) == 2

    asyncio.run(scenario())


def test_a_checkpoint_empties_the_journal_and_writes_no_file_for_what_is_gone(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        root = tmp_path / "store"
        async with FileSystemProvider(root) as provider:
            for number in range(50):
                await provider.enqueue_for_worker(factories.activity("a", activity_id=number + 1))
            for work in await provider.fetch_work_items(49, 1000, 0):
                await provider.ack_work_item(work.lock_token)

            await provider.checkpoint()

            assert sum(path.stat().st_size for path in (root / layout.JOURNAL).iterdir()) == 0
            assert len(list((root / layout.WORKER_QUEUE).iterdir())) == 1

    asyncio.run(scenario())


def test_a_read_of_a_long_history_sees_it_whole_while_it_grows(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as provider:
            for number in range(1, 201):
                await provider.append_with_execution("a", 1, [factories.event("a", number)])
                if number % 37 == 0:
                    await provider.checkpoint()

                events = await provider.read("a")

                assert [record.event_id for record in events] == list(range(1, number + 1))

    asyncio.run(scenario())


def test_a_waiting_fetch_hears_of_what_becomes_visible_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with FileSystemProvider(tmp_path / "store", clock=clock) as provider:
            turn = asyncio.ensure_future(provider.fetch_orchestration_item(1000, 3_600_000))
            work = asyncio.ensure_future(provider.fetch_work_item(1000, 3_600_000))
            await provider.enqueue_for_orchestrator(factories.start("a"), delay_ms=500)
            due_ms = clock.now_ms() + 500
            await provider.enqueue_for_worker(factories.activity("a", visible_at_ms=due_ms))
            clock.advance(499)
            assert not turn.done()
            assert not work.done()

            while not (turn.done() and work.done()):
                # Step by step: a fetch may read the clock just before it moves, and sleep then.
                clock.advance(1)
                await asyncio.sleep(0.001)

            assert turn.result() is not None
            assert work.result() is not None

    asyncio.run(scenario())


def test_each_change_of_a_row_is_noted_under_the_primary_key_of_the_row() -> None:
    connection = connect_memory(ManualClock(0))
    documents = Documents(connection)
    changes = Changes(connection, documents.tables)
    for name, table in documents.tables.items():
        columns = connection.execute(f"PRAGMA table_info({name})").fetchall()
        row = tuple(40 + each[0] if each[2] == "INTEGER" else f"t{each[0]}" for each in columns)
        marks = ", ".join("?" * len(row))
        keys = {each[1]: value for each, value in zip(columns, row, strict=True) if each[5]}
        assert list(keys) == table.key_columns
        where = " AND ".join(f"{column} = ?" for column in keys)
        if name == "store_info":  # its row is there, and has no other number
            row, keys = (), {"id": 1}
        else:
            connection.execute(f"INSERT INTO {name} VALUES ({marks})", row)
        last = columns[-1][1]

        changes.watch(is_watching=True)
        connection.execute(
            f"UPDATE {name} SET {last} = ? WHERE {where}", (row[-1:] or (7,)) + tuple(keys.values())
        )
        updated = set(changes.rows)
        changes.clear()
        connection.execute(f"DELETE FROM {name} WHERE {where}", tuple(keys.values()))
        deleted = set(changes.rows)
        changes.clear()
        changes.watch(is_watching=False)

        assert updated == deleted == {(name, *keys.values())}


def test_a_turn_that_is_in_the_journal_counts_although_its_commit_broke(tmp_path: Path) -> None:
    async def look(provider: FileSystemProvider) -> tuple[int, int]:
        depths = await provider.admin.get_queue_depths()
        return len(await provider.read("a")), depths.orchestrator.visible

    async def scenario() -> None:
        async with FileSystemProvider(tmp_path / "store") as provider:
            await provider.enqueue_for_orchestrator(factories.start("a"))
            fetched = await provider.fetch_orchestration_item(factories.LOCK_MS, 0)
            assert fetched is not None
            hook = provider._database._journal_hook
            before_commit = hook.before_commit

            def before_commit_and_no_further() -> None:
                hook.before_commit = before_commit  # type: ignore[method-assign]
                before_commit()
                raise ZeroDivisionError

            hook.before_commit = before_commit_and_no_further  # type: ignore[method-assign]
            commit = TurnCommit(execution_id=1, history_delta=(factories.started("a"),))
            with pytest.raises(StoreUnavailable, match="unknown"):
                await provider.ack_orchestration_item(fetched.lock_token, commit)
            assert await look(provider) == (1, 0)
        async with FileSystemProvider(tmp_path / "store") as provider:
            assert await look(provider) == (1, 0)

    asyncio.run(scenario())
