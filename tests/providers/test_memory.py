"""The in-memory provider: the conformance kit, and what is special to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from perdure.clock import ManualClock
from perdure.conformance import *  # noqa: F403
from perdure.conformance.factories import activity, raised, start
from perdure.conformance.harness import ProviderFactory
from perdure.errors import StoreMoved, UsageError
from perdure.providers.items import TurnCommit
from perdure.providers.memory import InMemoryProvider, MemoryStore
from perdure.providers.memory.state import SortedKeys

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
        for history in self._store.instances[instance_id].histories.values():
            for event_id in history:
                history[event_id] = "{damaged"


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
            await provider.admin().mark_moved("sqlite:///new.db")
        with pytest.raises(StoreMoved, match=r"new\.db"):
            await InMemoryProvider(store=store).open()
        async with InMemoryProvider(store=store, allow_moved=True) as tool:
            return await tool.admin().get_store_info()

    assert run(scenario()).moved_to == "sqlite:///new.db"


def test_the_orphan_grace_is_an_option():
    async def scenario():
        clock = ManualClock()
        async with InMemoryProvider(clock=clock, orphan_grace_ms=10) as provider:
            await provider.enqueue_for_orchestrator(raised("nobody"))
            clock.advance(10)
            assert await provider.fetch_orchestration_item(1000, 0) is None
            return await provider.admin().list_dead_letters()

    assert [letter.message for letter in run(scenario())] == [raised("nobody")]


class Probe(tuple):
    """A key that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __lt__(self, other):
        Probe.compared += 1
        return tuple.__lt__(self, other)


def test_keys_are_found_without_looking_at_all_of_them():
    keys = SortedKeys()
    for number in range(4096):
        keys.add(Probe((number * 7919 % 4096, number)))
    Probe.compared = 0

    assert Probe((3, 1)) not in keys
    assert keys.first_from((2048,))[0] == 2048

    assert Probe.compared <= 30


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
            await provider.admin().delete_instance("a", force=True)
        return store

    store = run(scenario())
    assert (store.instances, store.locks, list(store.listing)) == ({}, {}, [])
    assert (store.work.items, store.work.sessions) == ({}, {})
    assert store.agenda.next_due_ms("o", 0) is None
