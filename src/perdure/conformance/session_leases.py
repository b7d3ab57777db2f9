"""The lease of a session and the lock of an item are two things: how one outlives the other."""

from __future__ import annotations

from perdure.conformance.factories import completion, create, fetch_work, take, take_work
from perdure.conformance.harness import Store, checks
from perdure.conformance.sessions import LEASE_MS, drained, enqueue_sessions, worker


@checks
class TestSessionTakeover:
    verbs = ("fetch_work_item", "abandon_work_item", "ack_work_item")

    async def test_a_pending_item_goes_to_the_next_owner(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        assert await fetch_work(store, session=worker("b")) is None
        await store.advance(LEASE_MS)

        item = await take_work(store, session=worker("b"))

        assert item.identity.activity_id == 2
        assert await fetch_work(store, session=worker("a")) is None

    async def test_a_session_that_was_cleaned_up_can_begin_again(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a"))
        await store.provider.ack_work_item(item.lock_token)
        await store.advance(LEASE_MS)
        await store.provider.cleanup_orphaned_sessions()

        await enqueue_sessions(store, "s")

        assert (await take_work(store, session=worker("b"))).session_id == "s"

    async def test_an_abandoned_item_returns_to_its_owner(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a"))
        await store.provider.abandon_work_item(item.lock_token)

        assert await fetch_work(store, session=worker("b")) is None
        again = await take_work(store, session=worker("a"))
        assert again.attempt_count == 2
        await store.provider.ack_work_item(again.lock_token)
        assert await fetch_work(store, session=worker("a")) is None

    async def test_an_attempt_of_a_session_item_can_be_ignored(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a"))

        await store.provider.abandon_work_item(item.lock_token, ignore_attempt=True)

        assert (await take_work(store, session=worker("a"))).attempt_count == 1

    async def test_the_first_owner_may_claim_its_expired_session(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS)

        item = await take_work(store, session=worker("a"))

        assert item.identity.activity_id == 2
        assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS) == 1

    async def test_a_lost_item_lock_leaves_the_session_with_its_owner(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        await take_work(store, session=worker("a"), lock_ms=1_000)
        await store.advance(1_000)

        assert await fetch_work(store, session=worker("b")) is None
        assert (await take_work(store, session=worker("a"))).attempt_count == 2

    async def test_the_new_owner_also_gets_what_the_old_one_gives_back(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        first = await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS)
        await take_work(store, session=worker("b"))

        await store.provider.abandon_work_item(first.lock_token)

        assert await fetch_work(store, session=worker("a")) is None
        item = await take_work(store, session=worker("b"))
        assert (item.identity.activity_id, item.attempt_count) == (1, 2)

    async def test_the_same_owner_takes_its_lease_again(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS)
        await take_work(store, session=worker("a"))

        await enqueue_sessions(store, "s")

        assert await fetch_work(store, session=worker("b")) is None

    async def test_with_both_expired_another_owner_takes_the_item(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        await take_work(store, session=worker("a"), lock_ms=1_000)
        await store.advance(LEASE_MS)

        item = await take_work(store, session=worker("b"))

        assert item.attempt_count == 2
        assert await store.provider.renew_session_lock(["b"], LEASE_MS, LEASE_MS) == 1
        assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS) == 0

    async def test_an_ack_needs_the_item_lock_not_the_lease(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS)

        await store.provider.ack_work_item(item.lock_token)

        assert await drained(store, worker("a")) == []

    async def test_the_lease_runs_from_each_fetch(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s", "s")
        await take_work(store, session=worker("a"))
        await store.advance(LEASE_MS // 2)
        await take_work(store, session=worker("a"))
        await store.advance(LEASE_MS // 2)

        assert await fetch_work(store, session=worker("b")) is None

    async def test_a_lock_can_be_renewed_without_the_lease(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a"), lock_ms=LEASE_MS + 1_000)
        await store.advance(LEASE_MS)
        await store.provider.renew_work_item_lock(item.lock_token, LEASE_MS)
        await store.advance(5_000)

        assert await fetch_work(store, session=worker("b")) is None
        # The lease that ran out is not revived by looking after the item.
        assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS) == 0

    async def test_a_session_that_was_taken_over_does_not_stop_the_old_ack(
        self, store: Store
    ) -> None:
        await enqueue_sessions(store, "s", "s")
        first = await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS)
        await take_work(store, session=worker("b"))

        await store.provider.ack_work_item(first.lock_token)

        assert await store.provider.renew_session_lock(["b"], LEASE_MS, LEASE_MS) == 1


@checks
class TestSessionRenewal:
    verbs = ("renew_session_lock",)

    async def test_an_expired_lease_is_never_revived(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        await take_work(store, session=worker("a"))
        await store.advance(LEASE_MS)

        assert await store.provider.renew_session_lock(["a"], LEASE_MS, 10 * LEASE_MS) == 0

    async def test_a_renewed_lease_outlives_its_first_end(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS * 6 // 10)
        await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS)
        await store.advance(LEASE_MS * 6 // 10)

        assert await fetch_work(store, session=worker("b")) is None
        assert (await take_work(store, session=worker("a"))).identity.activity_id == 2

    async def test_a_renewed_lease_ends_as_long_after_the_renewal(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS // 2)
        assert await store.provider.renew_session_lock(["a", "c"], LEASE_MS, LEASE_MS) == 1
        await store.advance(LEASE_MS - store.tick_ms)
        assert await fetch_work(store, session=worker("b")) is None
        await store.advance(store.tick_ms)

        assert (await take_work(store, session=worker("b"))).identity.activity_id == 2

    async def test_a_renewal_shortens_too(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.provider.renew_session_lock(["a"], 1_000, LEASE_MS)
        await store.advance(1_000)

        assert (await take_work(store, session=worker("b"))).identity.activity_id == 2

    async def test_an_idle_session_is_left_to_expire(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS // 2)

        assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS // 2) == 0
        await store.advance(LEASE_MS // 2)

        assert (await take_work(store, session=worker("b"))).identity.activity_id == 2

    async def test_renewing_the_lease_is_no_activity(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        await take_work(store, session=worker("a"))
        for _ in range(3):
            await store.advance(LEASE_MS // 4)
            assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS) == 1

        await store.advance(LEASE_MS // 4)

        assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS) == 0

    async def test_a_completion_of_a_session_item_reaches_its_instance(self, store: Store) -> None:
        await create(store, "x")
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a"))

        await store.provider.ack_work_item(item.lock_token, completion("x", activity_id=1))

        assert len((await take(store, "x")).item.messages) == 1
