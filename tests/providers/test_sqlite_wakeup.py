"""Commits of another handle wake a waiting fetch, also the very first one that waits."""

import asyncio

from perdure.conformance.factories import start
from perdure.providers.sqlite import SqliteProvider


async def first_wait_is_woken(path):
    async with SqliteProvider(path) as waits, SqliteProvider(path) as writes:
        fetch = asyncio.ensure_future(waits.fetch_orchestration_item(5_000, 10_000))
        while not waits._handle.turns.has_waiters:  # noqa: ASYNC110
            await asyncio.sleep(0)
        # Before the waiting handle has looked at the file for the first time.
        await writes.enqueue_for_orchestrator(start("late"))
        return await asyncio.wait_for(fetch, 5)


def test_a_commit_right_after_the_first_look_is_not_missed(tmp_path):
    for number in range(5):
        fetched = asyncio.run(first_wait_is_woken(tmp_path / f"{number}.db"))

        assert fetched.item.instance_id == "late"
