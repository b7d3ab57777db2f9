"""Giving an instance back for later: the delay holds the instance, never its messages."""

from __future__ import annotations

import pytest

from perdure.conformance.factories import (
    bodies,
    create,
    enqueue,
    event,
    fetch,
    raised,
    take,
    timer,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import LockLost
from perdure.providers.records import TurnCommit


@checks
class TestBackingOff:
    verbs = ("abandon_orchestration_item", "fetch_orchestration_item")

    async def test_nothing_of_the_instance_comes_before_the_delay_is_over(
        self, store: Store
    ) -> None:
        await create(store, "x")
        await enqueue(store, raised("x", data=1))
        held = await take(store, "x")
        await store.provider.abandon_orchestration_item(held.lock_token, 10_000)
        await enqueue(store, raised("x", data=2))
        await store.advance(9_000)
        assert await fetch(store) is None

        await store.advance(1_000)

        assert bodies(await take(store, "x")) == [raised("x", data=n).body for n in (1, 2)]

    async def test_others_do_not_wait_with_it(self, store: Store) -> None:
        for instance in ("x", "y"):
            await create(store, instance)
            await enqueue(store, raised(instance))
        held = await take(store, "x")

        await store.provider.abandon_orchestration_item(held.lock_token, 10_000)

        await take(store, "y")

    async def test_no_delay_gives_it_back_at_once(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))

        for delay in (None, 0):
            held = await take(store, "x")
            await store.provider.abandon_orchestration_item(held.lock_token, delay)

        assert (await take(store, "x")).attempt_count == 3

    @requires("admin")
    async def test_the_times_of_the_messages_stay_as_they_were(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"), timer("x", await store.now_ms() + 60_000))
        before = [seen.visible_at_ms for seen in await store.admin.list_messages("x")]
        held = await take(store, "x")

        await store.provider.abandon_orchestration_item(held.lock_token, 10_000)

        after = await store.admin.list_messages("x")
        assert [seen.visible_at_ms for seen in after] == before
        assert [seen.locked for seen in after] == [False, False]

    async def test_order_survives_any_number_of_returns(self, store: Store) -> None:
        await create(store, "x")
        messages = [raised("x", data=number) for number in range(4)]
        for message in messages:
            await enqueue(store, message)
            held = await take(store, "x")
            await store.provider.abandon_orchestration_item(held.lock_token, 1_000)
            await store.advance(1_000)

        assert bodies(await take(store, "x")) == [message.body for message in messages]

    async def test_only_the_batch_is_forgiven_its_attempt(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x", data=1))
        for _ in range(2):
            held = await take(store, "x")
            await store.provider.abandon_orchestration_item(held.lock_token)
        held = await take(store, "x")
        await enqueue(store, raised("x", data=2))

        await store.provider.abandon_orchestration_item(held.lock_token, ignore_attempt=True)

        again = await take(store, "x")
        assert [message.attempt_count for message in again.item.messages] == [3, 1]

    async def test_the_delay_ends_with_the_next_turn(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))
        held = await take(store, "x")
        await store.provider.abandon_orchestration_item(held.lock_token, 10_000)
        await store.advance(10_000)
        await turn(store, "x", poke=False)

        await enqueue(store, raised("x"))

        assert (await take(store, "x")).attempt_count == 1

    @requires("admin")
    async def test_an_operators_turn_ends_the_delay(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))
        held = await take(store, "x")
        await store.provider.abandon_orchestration_item(held.lock_token, 3_600_000)
        locked = await store.admin.lock_instance("x", 5_000)

        await store.provider.ack_orchestration_item(
            locked.lock_token, TurnCommit(execution_id=1, history_delta=(event("x", 2),))
        )

        await take(store, "x")

    async def test_a_late_return_of_an_expired_lock_still_counts(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))
        held = await take(store, "x", lock_ms=1_000)
        await store.advance(2_000)

        await store.provider.abandon_orchestration_item(held.lock_token, 10_000)

        assert await fetch(store) is None
        await store.advance(10_000)
        assert (await take(store, "x")).attempt_count == 2

    async def test_a_lock_that_was_taken_over_cannot_be_given_back(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))
        held = await take(store, "x", lock_ms=1_000)
        await store.advance(1_000)
        await take(store, "x")

        with pytest.raises(LockLost):
            await store.provider.abandon_orchestration_item(held.lock_token, 10_000)

        assert await fetch(store) is None
        await store.advance(5_000)
        assert (await take(store, "x")).attempt_count == 3
