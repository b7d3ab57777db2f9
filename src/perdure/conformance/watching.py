"""Watching an instance: a waiting client learns of a change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from perdure.conformance.factories import (
    activity,
    completion,
    create,
    enqueue,
    finish,
    raised,
    start,
    take,
    take_work,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.model.failures import Block, BlockReason
from perdure.providers.records import CustomStatusChange, EnqueueCondition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.providers.waiting import Watch

WAIT_MS = 30_000
STEP_MS = 100
STEPS = WAIT_MS // STEP_MS
_MOMENT_SECONDS = 0.02


async def notices(store: Store, watch: Watch) -> bool:
    """Return True if the watch sees a change before its timeout.

    Another handle may look for changes from time to time, so the store's clock goes on in steps.
    """
    waiting = asyncio.ensure_future(watch.wait(WAIT_MS))
    for _ in range(STEPS):
        await asyncio.wait({waiting}, timeout=_MOMENT_SECONDS)
        if waiting.done():
            break
        if store.capabilities.injected_clock:
            await store.advance(STEP_MS)
    return await waiting


async def suspend(store: Store) -> None:
    await store.admin.suspend_instance("a")


async def delete(store: Store) -> None:
    await store.admin.delete_instance("a", force=True)


async def set_status(store: Store) -> None:
    await turn(store, "a", custom_status=CustomStatusChange(value='"half"'))


async def end(store: Store) -> None:
    await finish(store, "a")


async def enqueue_message(store: Store) -> None:
    await enqueue(store, raised("a"))


async def complete_work(store: Store) -> None:
    item = await take_work(store)
    await store.provider.ack_work_item(item.lock_token, completion("a"))


@checks
class TestWatching:
    verbs = ("watch",)

    @pytest.mark.parametrize(
        "change", [suspend, delete, set_status, end, enqueue_message, complete_work]
    )
    async def test_a_change_wakes_who_watches(
        self, store: Store, change: Callable[[Store], Awaitable[None]]
    ) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        with store.provider.watch("a") as watch:
            noticing = asyncio.ensure_future(notices(store, watch))
            await asyncio.sleep(0)

            await change(store)

            assert await noticing

    async def test_a_block_wakes_who_watches(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")
        assert (await store.admin.get_instance_info("a")).block is None
        reason = Block(reason=BlockReason.POISON, message="no")
        with store.provider.watch("a") as watch:
            noticing = asyncio.ensure_future(notices(store, watch))
            await asyncio.sleep(0)

            await store.provider.abandon_orchestration_item(
                fetched.lock_token, 60_000, block=reason
            )

            assert await noticing

    async def test_a_change_between_entering_and_waiting_is_not_missed(self, store: Store) -> None:
        await create(store, "a")
        with store.provider.watch("a") as watch:
            await finish(store, "a")

            assert await notices(store, watch)

    async def test_an_instance_can_be_watched_before_it_exists(self, store: Store) -> None:
        with store.provider.watch("a") as watch:
            await enqueue(store, start("a"))

            assert await notices(store, watch)

    async def test_starts_that_are_sent_together_wake_who_watches(self, store: Store) -> None:
        with store.provider.watch("b") as watch:
            noticing = asyncio.ensure_future(notices(store, watch))
            await asyncio.sleep(0)

            await store.provider.enqueue_many_for_orchestrator(
                [start("a"), start("b")], condition=EnqueueCondition.ABSENT
            )

            assert await noticing

    async def test_without_a_change_waiting_ends_with_its_timeout(self, store: Store) -> None:
        await create(store, "a")
        with store.provider.watch("a") as watch:
            waiting = asyncio.ensure_future(watch.wait(STEP_MS))
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=_MOMENT_SECONDS)
                await store.advance(STEP_MS)

            assert await waiting in {True, False}

    async def test_a_change_through_another_handle_is_noticed(self, store: Store) -> None:
        await create(store, "a")
        other = await store.second()
        with other.watch("a") as watch:
            await finish(store, "a")

            assert await notices(store, watch)
