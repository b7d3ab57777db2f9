"""Many callers at once: each gets work, and no two get the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from perdure.conformance.factories import (
    LOCK_MS,
    activity,
    completion,
    create,
    enqueue,
    enqueue_work,
    event,
    fetch,
    fetch_work,
    identity,
    raised,
    start,
    take,
    take_work,
)
from perdure.conformance.harness import Store, checks, outcomes
from perdure.errors import LockLost
from perdure.providers.records import EnqueueCondition, FetchedOrchestration, TurnCommit

if TYPE_CHECKING:
    from perdure.providers.contract import Provider

ROUNDS = 25


def handles(store: Store, number: int) -> list[Provider]:
    """Return so many callers, which take turns on the handles."""
    return [(store.provider, store.reader)[each % 2] for each in range(number)]


@checks
class TestContention:
    verbs = (
        "fetch_orchestration_item",
        "ack_orchestration_item",
        "renew_orchestration_item_lock",
        "fetch_work_item",
        "ack_work_item",
        "renew_work_item_lock",
        "enqueue_for_orchestrator",
    )

    async def test_ten_fetches_over_ten_ready_instances_get_ten_in_every_round(
        self, store: Store
    ) -> None:
        names = [f"i{each}" for each in range(10)]
        for name in names:
            await create(store, name)

        for event_id in range(2, 2 + ROUNDS):
            await asyncio.gather(*(enqueue(store, raised(name)) for name in names))
            fetched = await asyncio.gather(
                *(take(store, provider=each) for each in handles(store, 10))
            )
            assert sorted(each.item.instance_id for each in fetched) == names
            await asyncio.gather(*(self.commit(store, each, event_id) for each in fetched))

        for name in names:
            assert len(await store.reader.read(name)) == 1 + ROUNDS

    async def commit(self, store: Store, fetched: FetchedOrchestration, event_id: int) -> None:
        delta = (event(fetched.item.instance_id, event_id),)
        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, history_delta=delta)
        )

    async def test_forty_fetches_over_twenty_instances_get_twenty(self, store: Store) -> None:
        await enqueue(store, *(start(f"i{each}") for each in range(20)))

        fetched = await asyncio.gather(
            *(fetch(store, provider=each) for each in handles(store, 40))
        )

        got = Counter(each.item.instance_id for each in fetched if each is not None)
        assert len(got) == 20
        assert set(got.values()) == {1}

    async def test_one_instance_has_one_holder_in_every_round(self, store: Store) -> None:
        await create(store, "a")

        for event_id in range(2, 2 + ROUNDS):
            await enqueue(store, raised("a"))
            fetched = await asyncio.gather(
                *(fetch(store, provider=each) for each in handles(store, 10))
            )
            (winner,) = [each for each in fetched if each is not None]
            await self.commit(store, winner, event_id)

    async def test_one_expired_lock_has_one_heir(self, store: Store) -> None:
        await enqueue(store, start("a"))

        for attempt in range(1, 6):
            fetched = await asyncio.gather(
                *(fetch(store, provider=each) for each in handles(store, 10))
            )
            (heir,) = [each for each in fetched if each is not None]
            assert heir.attempt_count == attempt
            await store.advance(LOCK_MS)

    async def test_every_work_item_has_one_worker(self, store: Store) -> None:
        await enqueue_work(store, *(activity("a", 1, each) for each in range(1, 41)))

        fetched = await asyncio.gather(
            *(fetch_work(store, provider=each) for each in handles(store, 60))
        )

        got = sorted(each.identity.activity_id for each in fetched if each is not None)
        assert got == list(range(1, 41))

    async def test_renewing_and_settling_one_item_leave_one_completion(self, store: Store) -> None:
        await create(store, "a")
        for each in range(1, ROUNDS + 1):
            await enqueue_work(store, activity("a", 1, each))
            token = (await take_work(store)).lock_token

            renewed, settled = await outcomes(
                store.reader.renew_work_item_lock(token, LOCK_MS),
                store.provider.ack_work_item(token, completion("a", 1, each)),
            )

            assert settled is None
            assert renewed is None or isinstance(renewed, LockLost)
        await store.advance(LOCK_MS)
        assert await fetch_work(store) is None
        assert len((await take(store, "a")).item.messages) == ROUNDS

    async def test_renewing_and_committing_one_turn_leave_the_instance_free(
        self, store: Store
    ) -> None:
        await create(store, "a")
        for event_id in range(2, 2 + ROUNDS):
            await enqueue(store, raised("a"))
            fetched = await take(store, "a")

            renewed, committed = await outcomes(
                store.reader.renew_orchestration_item_lock(fetched.lock_token, LOCK_MS),
                self.commit(store, fetched, event_id),
            )

            assert committed is None
            assert renewed is None or isinstance(renewed, LockLost)

    async def test_settling_and_cancelling_one_item_have_one_winner(self, store: Store) -> None:
        await create(store, "a")
        events = 1
        for each in range(2, 2 + ROUNDS):
            await enqueue_work(store, activity("a", 1, each))
            token = (await take_work(store)).lock_token
            await enqueue(store, raised("a"))
            held = await take(store, "a")

            settled, cancelled = await outcomes(
                store.reader.ack_work_item(token, completion("a", 1, each)),
                store.provider.ack_orchestration_item(
                    held.lock_token,
                    TurnCommit(execution_id=1, cancelled_activities=(identity("a", 1, each),)),
                ),
            )

            assert cancelled is None
            arrived = await fetch(store)
            assert (arrived is None) == isinstance(settled, LockLost)
            if arrived is not None:
                events += 1
                await self.commit(store, arrived, events)

    async def test_of_many_starts_with_one_id_one_is_taken(self, store: Store) -> None:
        answers = await asyncio.gather(
            *(
                each.enqueue_for_orchestrator(start("a"), condition=EnqueueCondition.ABSENT)
                for each in handles(store, 10)
            )
        )

        assert sorted(answers) == [False] * 9 + [True]
        assert len((await take(store, "a")).item.messages) == 1

    async def test_messages_sent_at_once_all_arrive(self, store: Store) -> None:
        await create(store, "a")
        messages = [raised("a", data=each) for each in range(30)]

        await asyncio.gather(
            *(
                each.enqueue_for_orchestrator(message)
                for each, message in zip(handles(store, 30), messages, strict=True)
            )
        )

        fetched = await take(store, "a")
        assert sorted(each.body for each in fetched.item.messages) == sorted(
            each.body for each in messages
        )
