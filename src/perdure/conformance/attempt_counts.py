"""H: deliveries are counted, so that poison can be told from bad luck."""

from __future__ import annotations

from perdure.conformance.factories import (
    LOCK_MS,
    activity,
    create,
    enqueue,
    enqueue_work,
    raised,
    start,
    take,
    take_work,
)
from perdure.conformance.harness import Store, checks


async def abandon(store: Store, *, ignore_attempt: bool = False) -> int:
    """Fetch the only instance, give it back, and say which attempt it was."""
    fetched = await take(store)
    await store.provider.abandon_orchestration_item(
        fetched.lock_token, ignore_attempt=ignore_attempt
    )
    return fetched.attempt_count


async def abandon_work(store: Store, *, ignore_attempt: bool = False) -> int:
    """Fetch the only work item, give it back, and say which attempt it was."""
    item = await take_work(store)
    await store.provider.abandon_work_item(item.lock_token, ignore_attempt=ignore_attempt)
    return item.attempt_count


@checks
class TestAttemptCounts:
    verbs = (
        "fetch_orchestration_item",
        "abandon_orchestration_item",
        "fetch_work_item",
        "abandon_work_item",
    )

    async def test_the_first_delivery_of_a_message_is_attempt_one(self, store: Store) -> None:
        await enqueue(store, start("a"))

        fetched = await take(store, "a")

        assert fetched.attempt_count == 1
        assert [delivery.attempt_count for delivery in fetched.item.messages] == [1]

    async def test_every_delivery_after_an_abandon_counts(self, store: Store) -> None:
        await enqueue(store, start("a"))

        assert [await abandon(store) for _ in range(3)] == [1, 2, 3]

    async def test_a_delivery_after_an_expiry_counts_too(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await take(store, "a")
        await store.advance(LOCK_MS)

        assert (await take(store, "a", provider=store.reader)).attempt_count == 2

    async def test_the_first_delivery_of_work_is_attempt_one(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))

        assert (await take_work(store)).attempt_count == 1

    async def test_a_delivery_of_work_after_an_expiry_counts(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        await take_work(store)
        await store.advance(LOCK_MS)

        assert (await take_work(store, provider=store.reader)).attempt_count == 2

    async def test_attempts_are_counted_for_each_message(self, store: Store) -> None:
        await enqueue_work(store, activity("a", 1, 2))
        assert await abandon_work(store) == 1
        await enqueue_work(store, activity("a", 1, 3))

        first, second = await take_work(store), await take_work(store)

        assert (first.attempt_count, second.attempt_count) == (2, 1)

    async def test_an_ignored_delivery_of_work_does_not_count(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        await abandon_work(store)

        assert await abandon_work(store, ignore_attempt=True) == 2
        assert await abandon_work(store) == 2

    async def test_an_ignored_delivery_of_a_message_does_not_count(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await abandon(store)

        assert await abandon(store, ignore_attempt=True) == 2
        assert await abandon(store) == 2

    async def test_a_count_never_falls_below_zero(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await enqueue_work(store, activity("a"))

        assert [await abandon(store, ignore_attempt=True) for _ in range(4)] == [1, 1, 1, 1]
        assert [await abandon_work(store, ignore_attempt=True) for _ in range(4)] == [1, 1, 1, 1]

    async def test_a_count_that_was_reset_meanwhile_does_not_fall_either(
        self, store: Store
    ) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await store.admin.resume_instance("a")
        await store.provider.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)

        assert (await take(store, "a")).attempt_count == 1

    async def test_a_batch_has_the_count_of_its_most_tried_message(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await abandon(store)
        await abandon(store)
        await enqueue(store, raised("a"))

        fetched = await take(store, "a")

        assert fetched.attempt_count == 3
        assert [delivery.attempt_count for delivery in fetched.item.messages] == [3, 1]

    async def test_ignoring_an_attempt_spares_what_arrived_later(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await enqueue(store, raised("a"))
        await store.provider.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)

        again = await take(store, "a")

        assert [delivery.attempt_count for delivery in again.item.messages] == [1, 1]

    async def test_a_message_that_was_consumed_takes_its_count_along(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await abandon(store)
        await create(store, "b")

        await enqueue(store, raised("b"))

        assert (await take(store, "a")).attempt_count == 2
        assert (await take(store, "b")).attempt_count == 1
