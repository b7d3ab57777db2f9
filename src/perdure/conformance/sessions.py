"""Sessions pin work items to one worker: who may take what, in which order, and what is cleaned."""

from __future__ import annotations

from typing import Final

from perdure.conformance.factories import (
    activity,
    completion,
    create,
    enqueue_work,
    fetch_work,
    take_work,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.providers.records import SessionFetch, TagFilter

LEASE_MS: Final = 10_000


def worker(owner: str, lease_ms: int = LEASE_MS, *, only_owned: bool = False) -> SessionFetch:
    return SessionFetch(owner_id=owner, lock_timeout_ms=lease_ms, only_owned=only_owned)


async def enqueue_sessions(store: Store, *sessions: str | None) -> None:
    """One item for each, in order; activity ids from 1 tell them apart."""
    for number, session in enumerate(sessions, start=1):
        await enqueue_work(store, activity("x", activity_id=number, session=session))


async def drained(store: Store, session: SessionFetch | None) -> list[int]:
    """Activity ids of everything that this worker may take now, in order; they stay locked."""
    taken: list[int] = []
    while (item := await fetch_work(store, session=session)) is not None:
        taken.append(item.identity.activity_id)
    return taken


@checks
class TestSessionRouting:
    verbs = ("fetch_work_item",)

    async def test_an_item_without_session_goes_to_any_owner(self, store: Store) -> None:
        await enqueue_sessions(store, None, None)

        assert (await take_work(store, session=worker("a"))).session_id is None
        assert (await take_work(store, session=worker("b"))).session_id is None

    async def test_a_free_session_can_be_claimed(self, store: Store) -> None:
        await enqueue_sessions(store, "s")

        item = await take_work(store, session=worker("a"))

        assert (item.session_id, item.attempt_count) == ("s", 1)

    async def test_its_owner_gets_the_later_items(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"))

        item = await take_work(store, session=worker("a"))

        assert item.identity.activity_id == 2

    async def test_another_owner_gets_nothing_of_it(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"))

        assert await fetch_work(store, session=worker("b")) is None

    async def test_two_owners_hold_two_sessions(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "t", "t", "s")

        assert (await take_work(store, session=worker("a"))).session_id == "s"
        assert (await take_work(store, session=worker("b"))).session_id == "t"
        assert await drained(store, worker("a")) == [4]
        assert await drained(store, worker("b")) == [3]

    async def test_a_foreign_session_does_not_hide_a_plain_item(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s", None)
        await take_work(store, session=worker("a"))

        item = await take_work(store, session=worker("b"))

        assert item.identity.activity_id == 3

    async def test_an_expired_session_can_be_claimed_by_another(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        await take_work(store, session=worker("a"), lock_ms=10 * LEASE_MS)
        await store.advance(LEASE_MS)

        item = await take_work(store, session=worker("b"))

        assert item.identity.activity_id == 2

    async def test_without_session_only_plain_items_are_seen(self, store: Store) -> None:
        await enqueue_sessions(store, "s", None, "t")

        assert await drained(store, None) == [2]
        assert await drained(store, worker("a")) == [1, 3]

    async def test_sessions_and_plain_items_come_in_queue_order(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "t", None, "u")

        assert await drained(store, worker("a")) == [1, 2, 3, 4]

    async def test_items_of_one_session_come_in_order(self, store: Store) -> None:
        await enqueue_sessions(store, *["s"] * 6)

        assert await drained(store, worker("a")) == [1, 2, 3, 4, 5, 6]

    async def test_an_owner_of_a_session_still_gets_plain_items(self, store: Store) -> None:
        await enqueue_sessions(store, "s", None, None)
        await take_work(store, session=worker("a"))

        assert await drained(store, worker("a")) == [2, 3]

    async def test_callers_who_share_an_owner_share_its_sessions(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s", "s")

        first = await take_work(store, session=worker("a"))
        second = await take_work(store, session=worker("a"), provider=store.reader)

        assert first.lock_token != second.lock_token
        assert await fetch_work(store, session=worker("b")) is None
        assert await drained(store, worker("a")) == [3]

    async def test_an_item_in_flight_keeps_others_away(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        await take_work(store, session=worker("a"))
        await enqueue_sessions(store, "s")

        assert await fetch_work(store, session=worker("b")) is None

    async def test_at_capacity_an_owner_keeps_being_served(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "t", "s", None)
        await take_work(store, session=worker("a"))

        assert await drained(store, worker("a", only_owned=True)) == [3, 4]
        assert (await take_work(store, session=worker("b"))).session_id == "t"

    async def test_at_capacity_no_session_is_claimed(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        await take_work(store, session=worker("a"), lock_ms=LEASE_MS)
        await store.advance(LEASE_MS)

        # Its own session, but the lease has run out: taking it would be a new claim.
        assert await fetch_work(store, session=worker("a", only_owned=True)) is None

    async def test_session_tag_and_name_must_all_fit(self, store: Store) -> None:
        await enqueue_work(
            store,
            activity("x", activity_id=1, session="s", tag="gpu", name="train"),
            activity("x", activity_id=2, session="s", tag="cpu", name="train"),
            activity("x", activity_id=3, session="s", tag="gpu", name="show"),
        )

        item = await take_work(
            store,
            session=worker("a"),
            tags=TagFilter.only("gpu"),
            activities=frozenset({"show"}),
        )

        assert item.identity.activity_id == 3

    async def test_the_session_comes_back_through_a_turn(self, store: Store) -> None:
        await create(store, "x", worker_items=(activity("x", session="s"),))

        assert await fetch_work(store) is None
        assert (await take_work(store, session=worker("a"))).session_id == "s"


@checks
class TestSessionUpkeep:
    verbs = ("renew_session_lock", "cleanup_orphaned_sessions")

    async def test_renewal_counts_the_sessions(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "t")
        await take_work(store, session=worker("a"))
        assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS) == 1

        await take_work(store, session=worker("a"))

        assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS) == 2

    async def test_an_idle_timeout_of_zero_renews_none(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        await take_work(store, session=worker("a"))

        assert await store.provider.renew_session_lock(["a"], LEASE_MS, 0) == 0

    async def test_an_owner_without_sessions_renews_none(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        await take_work(store, session=worker("a"))

        assert await store.provider.renew_session_lock(["b"], LEASE_MS, LEASE_MS) == 0
        assert await store.provider.renew_session_lock([], LEASE_MS, LEASE_MS) == 0

    async def test_an_expired_session_without_items_is_removed(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a"))
        await store.provider.ack_work_item(item.lock_token)
        await store.advance(LEASE_MS)

        assert await store.provider.cleanup_orphaned_sessions() == 1
        assert await store.provider.cleanup_orphaned_sessions() == 0

    async def test_an_expired_session_with_items_is_kept(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "s")
        item = await take_work(store, session=worker("a"))
        await store.provider.ack_work_item(item.lock_token)
        await store.advance(LEASE_MS)

        assert await store.provider.cleanup_orphaned_sessions() == 0

    async def test_a_live_session_is_kept(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a"))
        await store.provider.ack_work_item(item.lock_token)

        assert await store.provider.cleanup_orphaned_sessions() == 0

    async def test_an_ack_counts_as_activity(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a", 60_000), lock_ms=60_000)
        await store.advance(5_000)
        assert await store.provider.renew_session_lock(["a"], 60_000, 3_000) == 0

        await store.provider.ack_work_item(item.lock_token, completion("x", activity_id=1))

        assert await store.provider.renew_session_lock(["a"], 60_000, 3_000) == 1

    async def test_a_renewed_item_counts_as_activity(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a", 60_000), lock_ms=60_000)
        await store.advance(5_000)
        assert await store.provider.renew_session_lock(["a"], 60_000, 3_000) == 0

        await store.provider.renew_work_item_lock(item.lock_token, 60_000)

        assert await store.provider.renew_session_lock(["a"], 60_000, 3_000) == 1

    async def test_many_owners_are_renewed_at_once(self, store: Store) -> None:
        await enqueue_sessions(store, "s", "t", "u")
        for owner in ("a", "b", "c"):
            await take_work(store, session=worker(owner))

        assert await store.provider.renew_session_lock(["a", "c"], LEASE_MS, LEASE_MS) == 2

    async def test_renewing_many_items_counts_as_activity(self, store: Store) -> None:
        await enqueue_sessions(store, "s")
        item = await take_work(store, session=worker("a", 60_000), lock_ms=60_000)
        await store.advance(5_000)

        lost = await store.provider.renew_work_item_locks([item.lock_token, "never issued"], 60_000)

        assert lost == {"never issued"}
        assert await store.provider.renew_session_lock(["a"], 60_000, 3_000) == 1

    @requires("admin")
    async def test_a_deletion_removes_the_sessions_that_it_empties(self, store: Store) -> None:
        await create(store, "gone", worker_items=(activity("gone", session="s"),))
        await take_work(store, session=worker("a"))

        await store.admin.delete_instance("gone", force=True)

        assert await store.provider.renew_session_lock(["a"], LEASE_MS, LEASE_MS) == 0
