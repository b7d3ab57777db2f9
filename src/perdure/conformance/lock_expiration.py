"""E: locks end by themselves, are prolonged by renewal and given back by abandon."""

from __future__ import annotations

import asyncio

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    activity,
    bodies,
    completion,
    create,
    enqueue,
    enqueue_work,
    fetch,
    fetch_work,
    raised,
    start,
    started,
    take,
    take_work,
)
from perdure.conformance.harness import UNTIL_SECONDS_MAX, Store, checks, outcomes
from perdure.conformance.requires import requires
from perdure.errors import LockLost
from perdure.providers.records import SessionFetch, TurnCommit

FIRST_TURN = TurnCommit(execution_id=1, history_delta=(started("a"),))


@checks
class TestInstanceLocksExpire:
    verbs = (
        "fetch_orchestration_item",
        "ack_orchestration_item",
        "abandon_orchestration_item",
        "renew_orchestration_item_lock",
        "renew_orchestration_item_locks",
    )

    async def test_a_new_holder_makes_the_old_token_worthless(self, store: Store) -> None:
        await enqueue(store, start("a"))
        old = await take(store, "a")
        await store.advance(LOCK_MS)
        new = await take(store, "a", provider=store.reader)

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(old.lock_token, FIRST_TURN)

        assert await store.reader.read("a") == []
        await store.reader.ack_orchestration_item(new.lock_token, FIRST_TURN)

    async def test_the_old_token_stays_worthless_when_the_new_lock_has_ended(
        self, store: Store
    ) -> None:
        await enqueue(store, start("a"))
        old = await take(store, "a")
        await store.advance(LOCK_MS)
        await take(store, "a")
        await store.advance(LOCK_MS)

        with pytest.raises(LockLost):
            await store.provider.abandon_orchestration_item(old.lock_token)
        with pytest.raises(LockLost):
            await store.provider.renew_orchestration_item_lock(old.lock_token, LOCK_MS)

    async def test_abandoning_frees_the_instance_at_once(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")

        await store.provider.abandon_orchestration_item(fetched.lock_token)

        again = await take(store, "a", provider=store.reader)
        assert bodies(again) == bodies(fetched)
        assert again.lock_token != fetched.lock_token

    async def test_an_expired_lock_that_nobody_took_can_be_abandoned(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await store.advance(LOCK_MS)

        await store.provider.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)

        assert (await take(store, "a")).attempt_count == 1

    async def test_a_late_message_is_ready_right_after_the_ack(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await enqueue(store, raised("a"))

        await store.provider.ack_orchestration_item(fetched.lock_token, FIRST_TURN)

        assert bodies(await take(store, "a")) == [raised("a").body]

    async def test_nobody_gets_in_before_the_lock_expires(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await take(store, "a")
        await store.advance(LOCK_MS - store.tick_ms)

        early = await outcomes(*(fetch(store) for _ in range(5)))
        await store.advance(store.tick_ms)

        assert early == [None] * 5
        await take(store, "a")

    async def test_an_expired_instance_lock_cannot_be_renewed(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await store.advance(LOCK_MS)

        with pytest.raises(LockLost):
            await store.provider.renew_orchestration_item_lock(fetched.lock_token, LOCK_MS)

        await take(store, "a")

    async def test_a_renewed_instance_lock_lives_from_the_renewal_on(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await store.advance(LOCK_MS * 6 // 10)
        await store.provider.renew_orchestration_item_lock(fetched.lock_token, LOCK_MS)
        await store.advance(LOCK_MS * 6 // 10)

        assert await fetch(store) is None
        await store.provider.ack_orchestration_item(fetched.lock_token, FIRST_TURN)

    @requires("long_poll")
    async def test_who_waits_gets_an_instance_as_soon_as_its_delay_is_over(
        self, store: Store
    ) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await store.provider.abandon_orchestration_item(fetched.lock_token, delay_ms=500)
        waiting = asyncio.ensure_future(fetch(store, poll_ms=60_000))
        await asyncio.wait({waiting}, timeout=0.05)

        assert not waiting.done()
        await store.advance(500)
        assert await asyncio.wait_for(waiting, timeout=UNTIL_SECONDS_MAX) is not None

    async def test_an_operator_that_gives_back_leaves_the_delay(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")
        await store.provider.abandon_orchestration_item(fetched.lock_token, delay_ms=LOCK_MS * 2)
        held = await store.admin.lock_instance("a", LOCK_MS)

        await store.provider.abandon_orchestration_item(held.lock_token)

        assert await fetch(store) is None
        await store.advance(LOCK_MS * 2)
        await take(store, "a")

    async def test_many_locks_are_renewed_at_once_and_the_lost_ones_named(
        self, store: Store
    ) -> None:
        await enqueue(store, start("a"), start("b"))
        first, second = await take(store, "a"), await take(store, "b")
        await store.provider.abandon_orchestration_item(second.lock_token, delay_ms=LOCK_MS * 9)

        lost = await store.provider.renew_orchestration_item_locks(
            [first.lock_token, second.lock_token, "unknown"], LOCK_MS * 2
        )

        assert lost == {second.lock_token, "unknown"}
        await store.advance(LOCK_MS * 2 - store.tick_ms)
        assert await fetch(store) is None
        await store.advance(store.tick_ms)
        await take(store, "a")

    async def test_a_renewal_may_end_a_lock_earlier(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a", lock_ms=LOCK_MS * 9)
        assert not await store.provider.renew_orchestration_item_locks(
            [fetched.lock_token], LOCK_MS
        )
        await store.advance(LOCK_MS - store.tick_ms)
        assert await fetch(store) is None
        await store.advance(store.tick_ms)

        await take(store, "a")


@checks
class TestWorkLocksExpire:
    verbs = (
        "renew_work_item_lock",
        "renew_work_item_locks",
        "abandon_work_item",
        "ack_work_item",
        "fetch_work_item",
    )

    async def test_a_renewed_item_stays_invisible(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)

        await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS * 2)

        assert await fetch_work(store, provider=store.reader) is None
        await store.advance(LOCK_MS)
        assert await fetch_work(store, provider=store.reader) is None

    async def test_an_unknown_token_cannot_be_renewed(self, store: Store) -> None:
        with pytest.raises(LockLost):
            await store.provider.renew_work_item_lock("unknown", LOCK_MS)

    async def test_an_expired_item_lock_cannot_be_renewed(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)
        await store.advance(LOCK_MS)

        with pytest.raises(LockLost):
            await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS)

    async def test_a_renewal_reaches_past_the_first_expiry(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)
        await store.advance(LOCK_MS * 6 // 10)
        await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS)
        await store.advance(LOCK_MS * 6 // 10)

        assert await fetch_work(store) is None
        await store.advance(LOCK_MS * 4 // 10)
        assert (await take_work(store)).attempt_count == 2

    async def test_a_settled_item_cannot_be_renewed(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)
        await store.provider.ack_work_item(item.lock_token, completion("a"))

        with pytest.raises(LockLost):
            await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS)

    async def test_an_abandoned_item_is_ready_at_once(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)

        await store.provider.abandon_work_item(item.lock_token)

        again = await take_work(store, provider=store.reader)
        assert again.identity == item.identity
        assert again.lock_token != item.lock_token

    async def test_an_item_abandoned_with_a_delay_is_hidden_until_then(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        await store.advance(LOCK_MS)
        item = await take_work(store)

        await store.provider.abandon_work_item(item.lock_token, delay_ms=500)

        assert await fetch_work(store) is None
        await store.advance(500)
        assert (await take_work(store)).identity == item.identity

    async def test_an_expired_token_cannot_settle_and_the_item_stays(self, store: Store) -> None:
        await create(store, "a")
        await enqueue_work(store, activity("a"))
        item = await take_work(store)
        await store.advance(LOCK_MS)

        with pytest.raises(LockLost) as refusal:
            await store.provider.ack_work_item(item.lock_token, completion("a"))

        assert not refusal.value.retryable
        assert await fetch(store) is None
        assert (await take_work(store)).identity == item.identity

    async def test_an_expired_lock_that_nobody_took_can_be_abandoned(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)
        await store.advance(LOCK_MS)

        await store.provider.abandon_work_item(item.lock_token, ignore_attempt=True)

        assert (await take_work(store)).attempt_count == 1

    async def test_a_heartbeat_is_shown_to_the_next_delivery(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)
        await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS, '"half way"')
        await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS)
        await store.advance(LOCK_MS)

        again = await take_work(store, provider=store.reader)

        assert (item.heartbeat, again.heartbeat) == (None, '"half way"')

    @requires("long_poll")
    async def test_who_waits_gets_an_item_as_soon_as_its_session_is_free(
        self, store: Store
    ) -> None:
        await enqueue_work(store, activity("a", 1, 2, session="s"))
        mine = SessionFetch(owner_id="mine", lock_timeout_ms=LOCK_MS)
        other = SessionFetch(owner_id="other", lock_timeout_ms=LOCK_MS)
        await take_work(store, session=mine, lock_ms=LOCK_MS * 9)
        await enqueue_work(store, activity("a", 1, 3, session="s"))
        waiting = asyncio.ensure_future(fetch_work(store, session=other, poll_ms=60_000))
        await asyncio.wait({waiting}, timeout=0.05)

        assert not waiting.done()
        await store.advance(LOCK_MS)
        taken = await asyncio.wait_for(waiting, timeout=UNTIL_SECONDS_MAX)
        assert taken is not None
        assert taken.identity.activity_id == 3

    async def test_many_item_locks_are_renewed_at_once_and_the_lost_ones_named(
        self, store: Store
    ) -> None:
        await enqueue_work(store, activity("a", 1, 2), activity("a", 1, 3))
        first, second = await take_work(store), await take_work(store)
        await store.provider.ack_work_item(second.lock_token)

        lost = await store.provider.renew_work_item_locks(
            [first.lock_token, second.lock_token, "unknown"], LOCK_MS * 2
        )

        assert lost == {second.lock_token, "unknown"}
        await store.advance(LOCK_MS * 2 - store.tick_ms)
        assert await fetch_work(store) is None
        await store.advance(store.tick_ms)
        await take_work(store)

    async def test_a_renewal_may_end_an_item_lock_earlier(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store, lock_ms=LOCK_MS * 9)
        assert not await store.provider.renew_work_item_locks([item.lock_token], LOCK_MS)
        await store.advance(LOCK_MS - store.tick_ms)
        assert await fetch_work(store) is None
        await store.advance(store.tick_ms)

        await take_work(store)
