"""D: at most one holder of an instance, and what arrives meanwhile is kept."""

from __future__ import annotations

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    bodies,
    completion,
    create,
    enqueue,
    event,
    fetch,
    raised,
    start,
    started,
    take,
)
from perdure.conformance.harness import Store, checks, outcomes
from perdure.errors import LockLost
from perdure.providers.records import ExecutionMetadata, FetchedOrchestration, TurnCommit

FIRST_TURN = ExecutionMetadata(name="TestOrch", version="1.0.0")


async def ack(store: Store, fetched: FetchedOrchestration, event_id: int = 1) -> None:
    delta = (event(fetched.item.instance_id, event_id),)
    await store.provider.ack_orchestration_item(
        fetched.lock_token,
        TurnCommit(execution_id=1, history_delta=delta, metadata=FIRST_TURN),
    )


@checks
class TestInstanceLocking:
    verbs = (
        "fetch_orchestration_item",
        "ack_orchestration_item",
        "abandon_orchestration_item",
        "renew_orchestration_item_lock",
    )

    async def test_a_held_instance_is_not_handed_out(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await take(store, "a")

        assert await fetch(store) is None
        assert await fetch(store, provider=store.reader) is None

    async def test_every_fetch_has_a_token_of_its_own(self, store: Store) -> None:
        await enqueue(store, *(start(f"i{each}") for each in range(5)))

        tokens = {(await take(store)).lock_token for _ in range(5)}

        assert len(tokens) == 5

    async def test_tokens_cannot_be_guessed_from_one_another(self, store: Store) -> None:
        await enqueue(store, *(start(f"i{each}") for each in range(20)))

        tokens = [(await take(store)).lock_token for _ in range(20)]

        assert min(len(token) for token in tokens) >= 16
        assert len({token[-8:] for token in tokens}) == 20

    async def test_a_wrong_token_leaves_the_lock_with_its_holder(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item("wrong", TurnCommit(execution_id=1))
        with pytest.raises(LockLost):
            await store.provider.abandon_orchestration_item("wrong")

        assert await fetch(store) is None
        await ack(store, fetched)

    async def test_ten_fetchers_share_ten_instances(self, store: Store) -> None:
        names = {f"i{each}" for each in range(10)}
        await enqueue(store, *(start(name) for name in names))

        fetched = await outcomes(*(take(store) for _ in range(10)))

        assert {each.item.instance_id for each in fetched} == names

    async def test_what_arrives_at_a_held_instance_comes_with_the_next_holder(
        self, store: Store
    ) -> None:
        await enqueue(store, start("a"))
        await take(store, "a")
        late = [completion("a", 1, each) for each in (2, 3, 4)]
        await enqueue(store, *late)

        assert await fetch(store, provider=store.reader) is None
        await store.advance(LOCK_MS)
        fetched = await take(store, "a", provider=store.reader)

        assert bodies(fetched) == [start("a").body, *(message.body for message in late)]

    async def test_a_held_instance_does_not_stop_others(self, store: Store) -> None:
        await enqueue(store, start("a"), start("b"))
        await take(store, "a")

        await ack(store, await take(store, "b"))
        await enqueue(store, raised("b"))

        await ack(store, await take(store, "b"), event_id=2)

    async def test_a_late_message_survives_the_ack_and_comes_alone(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        late = raised("a")
        await enqueue(store, late)

        await ack(store, fetched)

        again = await take(store, "a", provider=store.reader)
        assert bodies(again) == [late.body]
        assert again.attempt_count == 1

    async def test_an_ack_removes_its_own_batch_only(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        late = [raised("a", data=each) for each in ("one", "two")]
        await enqueue(store, *late)

        assert await fetch(store) is None
        await ack(store, fetched)

        assert bodies(await take(store, "a")) == [message.body for message in late]

    async def test_of_ten_contenders_for_one_instance_one_wins(self, store: Store) -> None:
        await enqueue(store, start("a"))

        fetched = await outcomes(
            *(fetch(store, provider=each) for each in [store.provider, store.reader] * 5)
        )

        assert sum(each is not None for each in fetched) == 1
        assert await fetch(store) is None

    async def test_forty_fetchers_over_twenty_instances_get_no_duplicate(
        self, store: Store
    ) -> None:
        await enqueue(store, *(start(f"i{each}") for each in range(20)))

        fetched = await outcomes(
            *(fetch(store, provider=each) for each in [store.provider, store.reader] * 20)
        )

        got = [each.item.instance_id for each in fetched if each is not None]
        assert len(got) == len(set(got)) == 20

    async def test_after_a_crash_the_next_holder_has_another_token(self, store: Store) -> None:
        await enqueue(store, start("a"))
        crashed = await take(store, "a")

        assert await fetch(store, provider=store.reader) is None
        await store.advance(LOCK_MS)
        rescuer = await take(store, "a", provider=store.reader)

        assert rescuer.lock_token != crashed.lock_token

    async def test_an_unfinished_turn_is_seen_by_nobody(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        await take(store, "a")

        assert await store.reader.read("a") == [started("a")]
        assert len(await store.admin.list_messages("a")) == 1

    async def test_the_oldest_visible_message_decides_who_is_next(self, store: Store) -> None:
        now_ms = await store.now_ms()
        await store.provider.enqueue_for_orchestrator(start("late"), 300)
        await store.provider.enqueue_for_orchestrator(start("early"), 100)
        await store.advance(500)
        await enqueue(store, start("fresh"))

        order = [(await take(store)).item.instance_id for _ in range(3)]

        assert order == ["early", "late", "fresh"]
        assert await store.now_ms() >= now_ms + 500
