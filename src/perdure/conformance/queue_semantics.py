"""G: queues are in order, keep what is fetched until it is settled, and honour visibility."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
from msgspec import structs

from perdure.conformance.factories import (
    LOCK_MS,
    OWNER,
    activity,
    bodies,
    completion,
    create,
    enqueue,
    enqueue_work,
    fetch,
    fetch_work,
    mailbox,
    raised,
    start,
    take,
    take_work,
    timer,
    turn,
)
from perdure.conformance.harness import UNTIL_SECONDS_MAX, Store, checks
from perdure.conformance.requires import requires
from perdure.errors import InvalidValue, LockLost
from perdure.limits import ORPHAN_GRACE_MS
from perdure.providers.records import SessionFetch

LARGE: Final = 100_000
"""Characters of a text that a store may read apart from the others."""


@checks
class TestQueueSemantics:
    verbs = (
        "enqueue_for_worker",
        "enqueue_for_orchestrator",
        "enqueue_many_for_orchestrator",
        "fetch_work_item",
        "ack_work_item",
        "abandon_work_item",
        "fetch_orchestration_item",
        "list_dead_letters",
    )

    async def test_work_comes_out_in_the_order_it_went_in(self, store: Store) -> None:
        await enqueue_work(store, *(activity("a", 1, each) for each in (5, 3, 9, 4)))

        order = [(await take_work(store)).identity.activity_id for _ in range(4)]

        assert order == [5, 3, 9, 4]

    async def test_fetched_work_is_hidden_but_not_gone(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)

        assert await fetch_work(store, provider=store.reader) is None
        await store.provider.ack_work_item(item.lock_token, completion("a"))
        await store.advance(LOCK_MS)
        assert await fetch_work(store, provider=store.reader) is None

    async def test_settling_an_item_delivers_exactly_its_completion(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        done = completion("a", result="done")

        await store.provider.ack_work_item(item.lock_token, done)

        assert bodies(await take(store, "a", provider=store.reader)) == [done.body]
        assert await fetch_work(store) is None

    async def test_a_timer_is_not_fetched_before_its_time(self, store: Store) -> None:
        fire_at_ms = await store.now_ms() + 1_000
        await create(store, "a", orchestrator_items=(timer("a", fire_at_ms),))

        assert await fetch(store) is None
        await store.advance(1_000)
        assert bodies(await take(store, "a")) == [timer("a", fire_at_ms).body]

    async def test_a_delay_hides_a_message_until_it_has_passed(self, store: Store) -> None:
        await store.provider.enqueue_for_orchestrator(start("a"), 1_000)

        await store.advance(1_000 - store.tick_ms)
        assert await fetch(store) is None
        await store.advance(store.tick_ms)
        await take(store, "a")

    async def test_a_delay_wins_over_the_time_of_the_message(self, store: Store) -> None:
        await create(store, "a")
        await store.provider.enqueue_for_orchestrator(timer("a", 0), 1_000)

        assert await fetch(store) is None
        await store.advance(1_000)
        await take(store, "a")

    async def test_lost_work_comes_back_when_its_lock_expires(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        lost = await take_work(store)
        await store.advance(LOCK_MS)

        again = await take_work(store, provider=store.reader)

        assert again.identity == lost.identity
        with pytest.raises(LockLost):
            await store.provider.ack_work_item(lost.lock_token, completion("a"))

    async def test_new_work_is_ready_at_once(self, store: Store) -> None:
        await enqueue_work(store, activity("a", input={"n": 1}))

        item = await take_work(store, provider=store.reader)

        assert (item.name, item.body) == ("act", activity("a", input={"n": 1}).body)

    async def test_a_delayed_item_lets_a_later_one_pass(self, store: Store) -> None:
        await enqueue_work(store, activity("a", 1, 2))
        first = await take_work(store)
        await store.provider.abandon_work_item(first.lock_token, delay_ms=500)
        await enqueue_work(store, activity("a", 1, 3))

        assert (await take_work(store)).identity.activity_id == 3
        assert await fetch_work(store) is None
        await store.advance(500)
        assert (await take_work(store)).identity.activity_id == 2

    async def test_a_mailbox_message_for_nobody_is_parked_and_then_a_dead_letter(
        self, store: Store
    ) -> None:
        lost = mailbox("unknown")
        await enqueue(store, lost)

        assert [await fetch(store), await fetch(store)] == [None, None]
        await store.advance(ORPHAN_GRACE_MS)
        assert await fetch(store) is None

        assert [letter.message for letter in await store.admin.list_dead_letters()] == [lost]
        assert await store.admin.list_messages("unknown") == []

    async def test_a_mailbox_message_for_an_instance_is_delivered(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, mailbox("a", data="hello"))

        assert bodies(await take(store, "a")) == [mailbox("a", data="hello").body]

    async def test_a_start_in_time_joins_what_came_before_it(self, store: Store) -> None:
        await enqueue(store, mailbox("a"))
        assert await fetch(store) is None
        await store.advance(ORPHAN_GRACE_MS - store.tick_ms)
        await enqueue(store, start("a"))

        fetched = await take(store, "a")

        assert bodies(fetched) == [mailbox("a").body, start("a").body]
        assert fetched.attempt_count == 1

    async def test_a_delayed_item_is_not_fetched_before_its_time(self, store: Store) -> None:
        visible_at_ms = await store.now_ms() + 1_000
        await enqueue_work(store, activity("a", visible_at_ms=visible_at_ms))

        assert await fetch_work(store) is None
        await store.advance(1_000)
        await take_work(store)

    async def test_a_retry_takes_the_place_of_its_item(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        visible_at_ms = await store.now_ms() + 1_000
        retry = activity("a", input="again", visible_at_ms=visible_at_ms)

        await store.provider.ack_work_item(item.lock_token, retry=retry)

        assert await fetch_work(store) is None
        assert await fetch(store) is None
        await store.advance(1_000)
        again = await take_work(store, provider=store.reader)
        assert (again.body, again.attempt_count) == (retry.body, 1)
        assert await fetch_work(store) is None

    async def test_a_completion_is_visible_at_once_whatever_it_says(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        done = structs.replace(completion("a"), visible_at_ms=await store.now_ms() + 60_000)

        await store.provider.ack_work_item(item.lock_token, done)

        assert bodies(await take(store, "a")) == [done.body]

    async def test_what_was_sent_for_later_has_its_place_by_the_time_it_came_due(
        self, store: Store
    ) -> None:
        await create(store, "a")
        await store.provider.enqueue_for_orchestrator(raised("a", "last timer"), 90_000)
        await store.provider.enqueue_for_orchestrator(raised("a", "first timer"), 50_000)
        await enqueue(store, raised("a", "before"))
        await store.advance(60_000)
        await enqueue(store, raised("a", "between"), raised("a", "right after"))
        await store.advance(60_000)
        await enqueue(store, raised("a", "after"))

        names = ("before", "first timer", "between", "right after", "last timer", "after")
        assert bodies(await take(store, "a")) == [raised("a", name).body for name in names]

    async def test_a_completion_for_another_instance_is_refused(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        item = await take_work(store)

        with pytest.raises(InvalidValue):
            await store.provider.ack_work_item(item.lock_token, completion("b"))

        await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS)

    async def test_a_worker_takes_only_what_it_can_run(self, store: Store) -> None:
        await enqueue_work(
            store, activity("a", 1, 2, name="other"), activity("a", 1, 3, name="mine")
        )

        item = await take_work(store, activities=frozenset({"mine"}))

        assert item.identity.activity_id == 3
        assert await fetch_work(store, activities=frozenset({"mine"})) is None
        assert (await take_work(store)).identity.activity_id == 2

    async def test_many_messages_are_taken_in_their_order(self, store: Store) -> None:
        messages = [start("a"), *(raised("a", data=each) for each in range(20))]

        taken = await store.provider.enqueue_many_for_orchestrator(messages)

        assert taken == [True] * 21
        assert bodies(await take(store, "a")) == [message.body for message in messages]

    async def test_messages_of_one_instance_come_as_one_batch(self, store: Store) -> None:
        await create(store, "a")
        await create(store, "b")
        for each in range(3):
            await enqueue(store, raised("a", data=each), raised("b", data=each))

        fetched = await turn(store, "a", poke=False)

        assert bodies(fetched) == [raised("a", data=each).body for each in range(3)]
        assert len((await take(store, "b")).item.messages) == 3


@checks
class TestFetchingSeveral:
    verbs = ("fetch_work_items",)

    async def test_up_to_the_limit_in_the_order_of_the_queue(self, store: Store) -> None:
        await enqueue_work(store, *(activity("a", 1, each) for each in (5, 3, 9, 4)))

        first = await store.provider.fetch_work_items(3, LOCK_MS, 0)
        rest = await store.reader.fetch_work_items(3, LOCK_MS, 0)

        assert [item.identity.activity_id for item in first + rest] == [5, 3, 9, 4]
        assert len({item.lock_token for item in first + rest}) == 4
        assert {item.attempt_count for item in first + rest} == {1}
        assert await store.provider.fetch_work_items(3, LOCK_MS, 0) == []

    async def test_each_is_settled_and_expires_alone(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a", 1, 2), activity("a", 1, 3)))
        one, two = await store.provider.fetch_work_items(9, LOCK_MS, 0)

        await store.provider.ack_work_item(two.lock_token, completion("a", 1, 3))
        await store.advance(LOCK_MS)

        assert bodies(await take(store, "a")) == [completion("a", 1, 3).body]
        (again,) = await store.provider.fetch_work_items(9, LOCK_MS, 0)
        assert (again.identity, again.attempt_count) == (one.identity, 2)

    async def test_a_large_item_is_not_overtaken(self, store: Store) -> None:
        large = "x" * LARGE
        await enqueue_work(
            store, activity("a", 1, 2, input=large), activity("a", 1, 3), activity("a", 1, 4)
        )

        order: list[int] = []
        while items := await store.provider.fetch_work_items(9, LOCK_MS, 0):
            order += [item.identity.activity_id for item in items]
            assert all((large in item.body) == (item.identity.activity_id == 2) for item in items)

        assert order == [2, 3, 4]

    async def test_only_what_the_worker_may_take(self, store: Store) -> None:
        await enqueue_work(
            store,
            activity("a", 1, 2),
            activity("a", 1, 3, tag="gpu"),
            activity("a", 1, 4, session="mine"),
            activity("a", 1, 5, name="other"),
            activity("a", 1, 6, session="mine"),
        )

        fetched = await store.provider.fetch_work_items(
            9,
            LOCK_MS,
            0,
            SessionFetch(owner_id=OWNER, lock_timeout_ms=LOCK_MS),
            None,
            frozenset({"act"}),
        )

        assert [item.identity.activity_id for item in fetched] == [2, 4, 6]

    async def test_sessions_of_others_are_left_alone(self, store: Store) -> None:
        await enqueue_work(store, *(activity("a", 1, each, session="s") for each in (2, 3, 4)))
        mine = SessionFetch(owner_id="mine", lock_timeout_ms=LOCK_MS)
        other = SessionFetch(owner_id="other", lock_timeout_ms=LOCK_MS)

        (first,) = await store.provider.fetch_work_items(1, LOCK_MS, 0, mine)

        assert first.identity.activity_id == 2
        assert await store.reader.fetch_work_items(9, LOCK_MS, 0, other) == []
        assert len(await store.provider.fetch_work_items(9, LOCK_MS, 0, mine)) == 2

    @requires("long_poll")
    async def test_waiting_is_only_for_the_first(self, store: Store) -> None:
        waiting = asyncio.ensure_future(store.provider.fetch_work_items(9, LOCK_MS, 60_000))
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()

        await enqueue_work(store, activity("a"))

        (item,) = await asyncio.wait_for(waiting, timeout=UNTIL_SECONDS_MAX)
        assert item.identity.activity_id == 2


@checks
class TestLookingIntoQueues:
    verbs = ("list_messages", "list_work")

    async def test_messages_are_listed_in_queue_order_with_their_fate(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a", "one"), raised("b"))
        await take(store, "a")
        await store.provider.enqueue_for_orchestrator(raised("a", "two"), 1_000)
        now_ms = await store.now_ms()

        one, two = await store.admin.list_messages("a")

        assert (one.message, one.attempt_count, one.locked) == (raised("a", "one"), 1, True)
        assert (two.message, two.attempt_count, two.locked) == (raised("a", "two"), 0, False)
        assert two.visible_at_ms - two.enqueued_at_ms == 1_000
        assert abs(two.enqueued_at_ms - now_ms) <= store.tick_ms
        assert one.message_id < two.message_id

    async def test_work_is_listed_in_queue_order_with_its_fate(self, store: Store) -> None:
        await enqueue_work(store, activity("a", 1, 2), activity("a", 1, 3), activity("b"))
        item = await take_work(store)
        await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS, '"half way"')
        now_ms = await store.now_ms()

        held, free = await store.admin.list_work("a")

        assert (held.message, free.message) == (activity("a", 1, 2), activity("a", 1, 3))
        assert (held.attempt_count, free.attempt_count) == (1, 0)
        assert held.locked_until_ms is not None
        assert abs(held.locked_until_ms - now_ms - LOCK_MS) <= store.tick_ms
        assert (held.heartbeat, free.locked_until_ms) == ('"half way"', None)

    async def test_an_expired_lock_is_no_lock(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        await enqueue(store, raised("a"))
        await take(store, "a")
        await take_work(store)
        await store.advance(LOCK_MS)

        assert not (await store.admin.list_messages("a"))[0].locked
        assert (await store.admin.list_work("a"))[0].locked_until_ms is None

    async def test_a_listing_stops_at_its_limit(self, store: Store) -> None:
        await enqueue(store, *(raised("a", data=each) for each in range(5)))
        await enqueue_work(store, *(activity("a", 1, each) for each in range(1, 6)))

        messages = await store.admin.list_messages("a", limit=2)
        work = await store.admin.list_work("a", limit=3)

        assert [each.message for each in messages] == [raised("a", data=each) for each in (0, 1)]
        assert [each.message.identity.activity_id for each in work] == [1, 2, 3]
        assert await store.admin.list_messages("unknown") == []
        assert await store.admin.list_work("unknown") == []
