"""One step of a chain, committed alone: how little it writes, and that it is seen all the same."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from perdure.clock import ManualClock
from perdure.conformance.factories import LOCK_MS, OWNER, activity, event, start, started
from perdure.model.status import Status
from perdure.providers.records import Claim, ExecutionMetadata, TurnCommit
from perdure.providers.sqlite import SqliteProvider

FRAME_BYTES = 4_096 + 24
LOCK = "lock-of-a"


class Chain:
    """Instance ``a``, one activity after the other, under a kept lock."""

    def __init__(self, provider):
        self.provider = provider
        self.activities = 0

    def commit(self, **fields):
        settled = (f"work-{self.activities}",) if self.activities else ()
        self.activities += 1
        claim = Claim(lock_token=f"work-{self.activities}", lock_timeout_ms=LOCK_MS)
        first = 2 * self.activities - 1
        fields = {"keep_lock_ms": LOCK_MS, "consumed": (), "settled_work": settled} | fields
        fields = {"worker_items": (activity("a", activity_id=first, claim=claim),)} | fields
        delta = (event("a", first), event("a", first + 1))
        return TurnCommit(execution_id=1, history_delta=delta, **fields)

    async def begin(self):
        commit = self.commit(metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"))
        assert await self.provider.start_orchestration_item(start("a"), commit, LOCK, OWNER)

    async def step(self, **fields):
        await self.provider.ack_orchestration_item(LOCK, self.commit(**fields))


def run(path, function):
    async def main():
        clock = ManualClock(1_800_000_000_000)
        async with SqliteProvider(path, clock=clock, durability="relaxed") as provider:
            chain = Chain(provider)
            await chain.begin()
            return await function(provider, chain, clock)

    return asyncio.run(main())


async def times_shown(provider):
    """Return the time of the last change of ``a``, by every way to ask."""
    admin = provider.admin
    page = await admin.list_instances()
    return {
        (await admin.get_instance_info("a")).updated_at_ms,
        *(info.updated_at_ms for info in page.instances),
        (await admin.export_instance("a")).updated_at_ms,
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


def test_a_step_changes_seven_pages(path):
    log = path.with_name(f"{path.name}-wal")

    async def count_pages(_provider, chain, clock):
        pages = []
        for _ in range(25):
            clock.advance(1)
            before = log.stat().st_size
            await chain.step()
            pages.append((log.stat().st_size - before) / FRAME_BYTES)
        return statistics.median(pages)

    # The history and its index, the work item and three indexes, the lock.
    assert run(path, count_pages) == 7


def test_a_step_is_seen_as_the_last_change_of_its_instance(path):
    async def go_on(provider, chain, clock):
        clock.advance(1_000)
        await chain.step()
        after_step = await times_shown(provider)
        clock.advance(1_000)
        await provider.renew_orchestration_item_lock(LOCK, LOCK_MS)
        return after_step, await times_shown(provider)

    assert run(path, go_on) == ({1_800_000_001_000}, {1_800_000_001_000})


@pytest.mark.parametrize("fields", [{}, {"keep_lock_ms": None}, {"keep_lock_ms": 1}])
def test_a_turn_after_a_step_is_seen_too(path, fields):
    async def go_on(provider, chain, clock):
        clock.advance(1_000)
        await chain.step()
        clock.advance(1_000)
        await chain.step(**fields)
        return await times_shown(provider)

    assert run(path, go_on) == {1_800_000_002_000}


def test_the_last_change_outlives_the_lock(path):
    async def give_up(provider, chain, clock):
        clock.advance(1_000)
        await chain.step()
        clock.advance(1_000)
        await provider.abandon_orchestration_item(LOCK)
        return await times_shown(provider)

    assert run(path, give_up) == {1_800_000_001_000}


def test_the_last_change_outlives_a_lock_that_nobody_renewed(path):
    async def die(provider, chain, clock):
        clock.advance(1_000)
        await chain.step()
        clock.advance(2 * LOCK_MS)
        assert await provider.fetch_orchestration_item(LOCK_MS, 0) is None
        return await times_shown(provider)

    assert run(path, die) == {1_800_000_001_000}


def test_work_comes_in_the_order_of_its_arrival_though_ids_are_used_again(path):
    async def take_turns(provider, _chain, _clock):
        for number in (101, 102):
            await provider.enqueue_for_worker(activity("b", activity_id=number))
        first = await provider.fetch_work_item(LOCK_MS, 0)
        second = await provider.fetch_work_item(LOCK_MS, 0)
        await provider.ack_work_item(second.lock_token)
        await provider.enqueue_for_worker(activity("b", activity_id=103))
        await provider.abandon_work_item(first.lock_token)
        return [(await provider.fetch_work_item(LOCK_MS, 0)).identity.activity_id for _ in range(2)]

    assert run(path, take_turns) == [101, 103]


def test_ids_of_messages_are_not_used_again(path):
    async def consume(provider, _chain, _clock):
        seen = []
        for number in range(3):
            await provider.enqueue_for_orchestrator(start(f"i-{number}"))
            fetched = await provider.fetch_orchestration_item(LOCK_MS, 0)
            seen += [message.message_id for message in fetched.item.messages]
            commit = TurnCommit(
                execution_id=1,
                history_delta=(started(f"i-{number}"),),
                metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"),
            )
            await provider.ack_orchestration_item(fetched.lock_token, commit)
        return seen

    seen = run(path, consume)
    assert seen == sorted(set(seen))


def test_the_last_turn_changes_no_index_of_what_stays_as_it_was(path):
    log = path.with_name(f"{path.name}-wal")

    async def count_pages(_provider, chain, clock):
        clock.advance(1)
        before = log.stat().st_size
        ended = ExecutionMetadata(status=Status.COMPLETED, output="1")
        await chain.step(metadata=ended, keep_lock_ms=None, worker_items=())
        return (log.stat().st_size - before) / FRAME_BYTES

    # As a step; and the instance with the indexes by status and by completion, its execution, and
    # two indexes of the lock that is gone.
    assert run(path, count_pages) == 13
