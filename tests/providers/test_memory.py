"""The in-memory provider: the conformance kit, and what is special to it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import apsw
import pytest

from patience import HANG_SECONDS
from perdure.clock import ManualClock
from perdure.conformance import *  # noqa: F403
from perdure.conformance.factories import activity, raised, start
from perdure.conformance.harness import ProviderFactory
from perdure.errors import CorruptData, StoreMoved, UsageError
from perdure.providers.records import HistoryRecord, OrchestrationFilter, TurnCommit
from perdure.providers.sqlite.memory import InMemoryProvider, MemoryStore
from perdure.providers.sqlite.transaction import Verb

if TYPE_CHECKING:
    from perdure.providers.contract import Provider


class MemoryFactory(ProviderFactory):
    def __init__(self) -> None:
        self._store: MemoryStore | None = None

    def create(self, clock: ManualClock) -> Provider:
        if self._store is None:
            self._store = MemoryStore(clock)
        return InMemoryProvider(store=self._store)

    async def corrupt_history(self, instance_id: str) -> None:
        assert self._store is not None
        self._store.database.ready().execute(
            "UPDATE history SET data = CAST(x'7bff' AS TEXT) WHERE instance_key ="
            " (SELECT instance_key FROM instances WHERE instance_id = ?)",
            (instance_id,),
        )


@pytest.fixture
def provider_factory() -> ProviderFactory:
    return MemoryFactory()


def run(coroutine):
    return asyncio.run(coroutine)


def test_it_says_that_it_forgets():
    capabilities = InMemoryProvider().capabilities

    assert not capabilities.durable
    assert not capabilities.several_processes


def test_a_new_provider_knows_nothing_of_the_last_one():
    async def scenario():
        async with InMemoryProvider() as first:
            await first.enqueue_for_orchestrator(start("a"))
        async with InMemoryProvider() as second:
            return await second.fetch_orchestration_item(1000, 0)

    assert run(scenario()) is None


def test_handles_on_one_store_share_it_after_the_first_is_closed():
    async def scenario():
        store = MemoryStore()
        async with InMemoryProvider(store=store) as first:
            await first.enqueue_for_orchestrator(start("a"))
        async with InMemoryProvider(store=store) as second:
            return await second.fetch_orchestration_item(1000, 0)

    assert run(scenario()).item.instance_id == "a"


def test_a_clock_belongs_to_the_store():
    with pytest.raises(UsageError, match="MemoryStore"):
        InMemoryProvider(store=MemoryStore(), clock=ManualClock())


def test_a_store_that_was_moved_is_opened_only_on_demand():
    async def scenario():
        store = MemoryStore()
        async with InMemoryProvider(store=store) as provider:
            await provider.admin.mark_moved("sqlite:///new.db")
        with pytest.raises(StoreMoved, match=r"new\.db"):
            await InMemoryProvider(store=store).open()
        async with InMemoryProvider(store=store, allow_moved=True) as tool:
            return await tool.admin.get_store_info()

    assert run(scenario()).moved_to == "sqlite:///new.db"


def test_the_orphan_grace_is_an_option():
    async def scenario():
        clock = ManualClock()
        async with InMemoryProvider(clock=clock, orphan_grace=0.01) as provider:
            await provider.enqueue_for_orchestrator(raised("nobody"))
            clock.advance(10)
            assert await provider.fetch_orchestration_item(1000, 0) is None
            return await provider.admin.list_dead_letters()

    assert [letter.message for letter in run(scenario())] == [raised("nobody")]


def test_nothing_is_left_behind_when_all_is_consumed_and_deleted():
    async def scenario():
        store = MemoryStore(ManualClock())
        async with InMemoryProvider(store=store) as provider:
            await provider.enqueue_for_orchestrator(start("a"))
            await provider.enqueue_for_worker(activity("a", session="s"))
            await provider.enqueue_for_worker(activity("nobody"))
            work = await provider.fetch_work_item(1000, 0)
            await provider.ack_work_item(work.lock_token)
            turn = await provider.fetch_orchestration_item(1000, 0, owner="o")
            await provider.ack_orchestration_item(
                turn.lock_token, TurnCommit(execution_id=1, keep_lock_ms=1000)
            )
            await provider.admin.delete_instance("a", force=True)
        return store

    tables = run(scenario()).database.ready()
    names = tables.rows("SELECT name FROM sqlite_schema WHERE type = 'table'")
    left = {name: tables.row(f"SELECT count(*) FROM {name}")[0] for (name,) in names}
    assert left.pop("store_info") == 1
    left.pop("sqlite_sequence", None)
    assert set(left.values()) == {0}


def test_a_start_that_is_not_visible_yet_names_no_instance_with_history():
    async def scenario():
        clock = ManualClock()
        fitting = OrchestrationFilter(handlers=frozenset({("hello", "1.0.0")}))
        async with InMemoryProvider(clock=clock) as provider:
            record = HistoryRecord(event_id=1, data="{}")
            await provider.append_with_execution("a", 1, [record])
            await provider.enqueue_for_orchestrator(start("a", "hello"), delay_ms=1000)
            await provider.enqueue_for_orchestrator(raised("a"))
            early = await provider.fetch_orchestration_item(1000, 0, fitting)
            clock.advance(2000)
            late = await provider.fetch_orchestration_item(1000, 0, fitting)
            return early, late

    early, late = run(scenario())

    assert early is None
    assert late.item.name == "hello"
    assert len(late.item.messages) == 2


def test_it_starts_no_thread():
    async def scenario():
        before = set(threading.enumerate())
        async with InMemoryProvider() as provider:
            await provider.enqueue_for_orchestrator(start("a"))
            await provider.admin.list_instances()
            return set(threading.enumerate()) - before

    assert run(scenario()) == set()


def test_an_open_handle_serves_the_loop_that_runs():
    async def enqueue():
        return await provider.enqueue_for_orchestrator(start("a"))

    async def fetch():
        return await provider.fetch_orchestration_item(1000, 20)

    provider = InMemoryProvider()
    run(provider.open())
    assert run(enqueue()) is True
    assert run(fetch()).item.instance_id == "a"
    assert run(fetch()) is None


def test_handles_on_one_store_wake_each_other():
    async def scenario():
        store = MemoryStore()
        async with InMemoryProvider(store=store) as first, InMemoryProvider(store=store) as second:
            waiting = asyncio.ensure_future(first.fetch_orchestration_item(1000, 10_000))
            await asyncio.sleep(0.01)
            await second.enqueue_for_orchestrator(start("a"))
            return await asyncio.wait_for(waiting, HANG_SECONDS)

    assert run(scenario()).item.instance_id == "a"


def test_an_error_of_sqlite_in_a_query_reaches_its_caller():
    def broken(_snapshot):
        raise apsw.CorruptError("damaged")

    async def scenario():
        async with InMemoryProvider() as provider:
            with pytest.raises(CorruptData, match="damaged"):
                await provider._store.read(Verb("read", broken))
            return await provider.read("a")

    assert run(scenario()) == []
