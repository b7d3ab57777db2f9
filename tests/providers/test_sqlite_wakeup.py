"""Commits of another handle wake a waiting fetch, also the very first one that waits."""

import asyncio

from patience import HANG_SECONDS
from perdure.clock import ManualClock
from perdure.conformance.factories import activity, start, started
from perdure.providers.records import Claim, ExecutionMetadata, TurnCommit
from perdure.providers.sqlite import SqliteProvider


async def first_wait_is_woken(path):
    async with SqliteProvider(path) as waits, SqliteProvider(path) as writes:
        fetch = asyncio.ensure_future(waits.fetch_orchestration_item(5_000, 10_000))
        while not waits._store.signals.turns.has_waiters:  # noqa: ASYNC110
            await asyncio.sleep(0)
        # Before the waiting handle has looked at the file for the first time.
        await writes.enqueue_for_orchestrator(start("late"))
        return await asyncio.wait_for(fetch, HANG_SECONDS)


def test_a_commit_right_after_the_first_look_is_not_missed(tmp_path):
    for number in range(5):
        fetched = asyncio.run(first_wait_is_woken(tmp_path / f"{number}.db"))

        assert fetched.item.instance_id == "late"


async def a_lock_that_is_lost_wakes_the_fetch(path):
    clock = ManualClock()
    async with SqliteProvider(path, clock=clock) as provider:
        await provider.enqueue_for_orchestrator(start("a"))
        fetched = await provider.fetch_orchestration_item(5_000, 0)
        claim = Claim(lock_token="mine", lock_timeout_ms=1_000)
        await provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(
                execution_id=1,
                history_delta=(started("a"),),
                worker_items=(activity("a", claim=claim),),
                metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"),
            ),
        )
        fetch = asyncio.ensure_future(provider.fetch_work_item(5_000, 600_000))
        while not provider._store.signals.work.has_waiters:  # noqa: ASYNC110
            await asyncio.sleep(0)
        clock._now_ms += 2_000  # as if the machine had slept: no sleeper was woken
        lost = await provider.renew_work_item_locks(["mine"], 1_000)
        again = await asyncio.wait_for(fetch, HANG_SECONDS)
        return lost, again.identity.instance_id


def test_work_whose_lock_was_lost_is_looked_for_at_once(tmp_path):
    assert asyncio.run(a_lock_that_is_lost_wakes_the_fetch(tmp_path / "s.db")) == ({"mine"}, "a")
