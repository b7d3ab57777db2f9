"""Messages for an unknown instance: they block no others, wait for a start, then are kept.

A message may overtake the start of its instance, so it waits a while; after that it becomes a dead
letter for a person to decide about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from perdure.conformance.factories import (
    activity,
    bodies,
    cancel,
    completion,
    create,
    enqueue,
    enqueue_work,
    fetch,
    mailbox,
    raised,
    start,
    take,
    take_work,
    timer,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import NotFound
from perdure.limits import ORPHAN_GRACE_MS

if TYPE_CHECKING:
    from perdure.providers.records import DeadLetter

_LATER_MS: Final = ORPHAN_GRACE_MS + 1_000


async def letters(store: Store) -> list[DeadLetter]:
    return await store.admin.list_dead_letters()


@checks
class TestOrphans:
    verbs = ("fetch_orchestration_item", "enqueue_for_orchestrator")

    async def test_orphans_do_not_block_other_instances(self, store: Store) -> None:
        await enqueue(
            store,
            cancel("unknown"),
            raised("unknown"),
            completion("gone"),
            timer("stranger", await store.now_ms()),
            mailbox("ghost"),
        )
        await enqueue(store, start("x"))

        await take(store, "x")

        assert await fetch(store) is None

    async def test_many_orphans_do_not_block_other_instances(self, store: Store) -> None:
        for number in range(200):
            await enqueue(store, raised(f"unknown-{number}"))
        await enqueue(store, start("x"))

        await take(store, "x")

    async def test_an_early_event_is_delivered_with_its_start(self, store: Store) -> None:
        early, begin = raised("x", data="early"), start("x")
        await enqueue(store, early)
        assert await fetch(store) is None
        assert await fetch(store) is None

        await enqueue(store, begin)
        fetched = await take(store, "x")

        assert bodies(fetched) == [early.body, begin.body]
        assert fetched.attempt_count == 1, "waiting for a start is no attempt"

    async def test_an_early_event_waits_for_a_delayed_start(self, store: Store) -> None:
        await store.provider.enqueue_for_orchestrator(start("x"), 2 * _LATER_MS)
        await enqueue(store, raised("x", data="early"))
        await store.advance(_LATER_MS)
        assert await fetch(store) is None

        await store.advance(_LATER_MS)

        assert len((await take(store, "x")).item.messages) == 2

    async def test_a_completion_of_a_missing_instance_is_an_orphan(self, store: Store) -> None:
        await enqueue_work(store, activity("unknown"))
        item = await take_work(store)

        await store.provider.ack_work_item(item.lock_token, completion("unknown"))

        assert await fetch(store) is None
        await create(store, "x")
        await enqueue(store, raised("x"))
        await take(store, "x")


@checks
@requires("admin")
class TestDeadLetters:
    verbs = ("list_dead_letters", "requeue_dead_letter", "delete_dead_letter")

    async def test_an_orphan_within_the_grace_is_no_dead_letter(self, store: Store) -> None:
        await enqueue(store, raised("unknown"))
        await store.advance(ORPHAN_GRACE_MS - 5_000)

        assert await fetch(store) is None

        assert await letters(store) == []
        assert len(await store.admin.list_messages("unknown")) == 1

    async def test_an_orphan_past_the_grace_becomes_a_dead_letter(self, store: Store) -> None:
        message = raised("unknown", data="precious")
        await enqueue(store, message)
        await store.advance(_LATER_MS)

        assert await fetch(store) is None

        (letter,) = await letters(store)
        assert letter.message.instance_id == "unknown"
        assert (letter.message.kind, letter.message.body) == (message.kind, message.body)
        assert letter.reason
        assert await store.now_ms() - letter.dead_since_ms < 5_000
        depths = await store.admin.get_queue_depths()
        assert (depths.dead_letters, depths.orchestrator.visible) == (1, 0)

    async def test_a_message_for_later_does_not_save_an_orphan(self, store: Store) -> None:
        message = raised("unknown", "now")
        await store.provider.enqueue_for_orchestrator(raised("unknown", "later"), 9 * _LATER_MS)
        await enqueue(store, message)
        await store.advance(_LATER_MS)

        assert await fetch(store) is None

        assert [letter.message.body for letter in await letters(store)] == [message.body]

    async def test_a_busy_queue_does_not_save_orphans(self, store: Store) -> None:
        await enqueue(store, raised("unknown"))
        await store.advance(_LATER_MS)
        await enqueue(store, start("x"))

        await take(store, "x")
        assert await fetch(store) is None

        assert len(await letters(store)) == 1

    async def test_a_known_instance_never_loses_messages_by_age(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))
        await store.advance(10 * ORPHAN_GRACE_MS)

        assert len((await take(store, "x")).item.messages) == 1

        assert await letters(store) == []

    async def test_a_future_timer_of_an_unknown_instance_waits_for_its_time(
        self, store: Store
    ) -> None:
        await enqueue(store, timer("unknown", await store.now_ms() + 3 * ORPHAN_GRACE_MS))
        await store.advance(_LATER_MS)

        assert await fetch(store) is None

        assert await letters(store) == []

    async def test_a_requeued_letter_is_a_fresh_message(self, store: Store) -> None:
        early = raised("late", data="early")
        await enqueue(store, early)
        await store.advance(_LATER_MS)
        assert await fetch(store) is None
        (letter,) = await letters(store)
        await create(store, "late")

        await store.admin.requeue_dead_letter(letter.letter_id)

        assert await letters(store) == []
        fetched = await take(store, "late")
        assert bodies(fetched) == [early.body]
        assert fetched.attempt_count == 1

    async def test_a_requeued_letter_gets_its_grace_again(self, store: Store) -> None:
        await enqueue(store, raised("unknown"))
        await store.advance(_LATER_MS)
        assert await fetch(store) is None
        (letter,) = await letters(store)

        await store.admin.requeue_dead_letter(letter.letter_id)
        assert await fetch(store) is None

        assert await letters(store) == []
        assert len(await store.admin.list_messages("unknown")) == 1

    async def test_a_deleted_letter_is_gone(self, store: Store) -> None:
        await enqueue(store, raised("unknown", data=1), raised("unknown", data=2))
        await store.advance(_LATER_MS)
        assert await fetch(store) is None
        first, second = await letters(store)

        await store.admin.delete_dead_letter(first.letter_id)

        assert await letters(store) == [second]
        for call in (store.admin.delete_dead_letter, store.admin.requeue_dead_letter):
            with pytest.raises(NotFound):
                await call(first.letter_id)

    async def test_letters_come_oldest_first(self, store: Store) -> None:
        messages = [raised("unknown", data=number) for number in range(3)]
        for message in messages:
            await enqueue(store, message)
            await store.advance(_LATER_MS)
            assert await fetch(store) is None

        seen = [letter.message.body for letter in await letters(store)]

        assert seen == [message.body for message in messages]
