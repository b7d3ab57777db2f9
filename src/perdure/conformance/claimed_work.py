"""The hot path of activities: items written already locked, and settled by the turn they cause."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from perdure.conformance.factories import (
    LOCK_MS,
    OWNER,
    activity,
    bodies,
    completion,
    create,
    enqueue,
    event,
    fetch,
    fetch_work,
    identity,
    raised,
    start,
    started,
    take,
    take_work,
    turn,
)
from perdure.conformance.harness import Store, checks, outcomes
from perdure.conformance.hot_path import keep, keeping
from perdure.conformance.requires import requires
from perdure.errors import DuplicateEvent, InvalidValue, LockLost
from perdure.providers.records import Claim, TagFilter, TurnCommit, WorkerMessage

CLAIM = "claim-1"


def claimed(activity_id: int) -> WorkerMessage:
    """A work item of instance ``a``, locked with CLAIM from the start."""
    claim = Claim(lock_token=CLAIM, lock_timeout_ms=LOCK_MS)
    return activity("a", 1, activity_id, claim=claim)


@requires("hot_path")
@checks
class TestClaimedWork:
    verbs = (
        "new_lock_token",
        "ack_orchestration_item",
        "fetch_work_item",
        "ack_work_item",
        "renew_work_item_lock",
        "abandon_work_item",
    )

    async def test_tokens_of_the_provider_are_unique_and_can_be_claimed_with(
        self, store: Store
    ) -> None:
        tokens = [store.provider.new_lock_token() for _ in range(1_000)]
        claim = Claim(lock_token=tokens[0], lock_timeout_ms=LOCK_MS)
        await create(store, "a", worker_items=(activity("a", 1, 2, claim=claim),))

        await store.provider.ack_work_item(tokens[0], completion("a"))

        assert len(set(tokens)) == len(tokens)
        assert bodies(await take(store, "a")) == [completion("a").body]

    async def test_a_claimed_item_is_its_runtime_s_alone_until_expiry(self, store: Store) -> None:
        await create(store, "a", worker_items=(claimed(2),))

        await store.advance(LOCK_MS - store.tick_ms)
        assert await fetch_work(store, provider=store.reader) is None
        await store.advance(store.tick_ms)
        again = await take_work(store, provider=store.reader)

        assert (again.identity, again.attempt_count) == (identity("a"), 2)
        with pytest.raises(LockLost):
            await store.provider.ack_work_item(CLAIM, completion("a"))

    async def test_the_claim_settles_the_item_like_a_fetched_one(self, store: Store) -> None:
        await create(store, "a", worker_items=(claimed(2),))
        await store.provider.renew_work_item_lock(CLAIM, LOCK_MS * 2)
        await store.advance(LOCK_MS)

        await store.provider.ack_work_item(CLAIM, completion("a"))

        assert bodies(await take(store, "a")) == [completion("a").body]
        with pytest.raises(LockLost):
            await store.provider.ack_work_item(CLAIM, completion("a"))

    async def test_a_claim_can_be_given_back(self, store: Store) -> None:
        await create(store, "a", worker_items=(claimed(2),))

        await store.provider.abandon_work_item(CLAIM, ignore_attempt=True)

        assert (await take_work(store, provider=store.reader)).attempt_count == 1

    async def test_a_listing_does_not_give_the_token_away(self, store: Store) -> None:
        await create(store, "a", worker_items=(claimed(2),))

        (listed,) = await store.admin.list_work("a")
        (exported,) = (await store.admin.export_instance("a")).work

        assert listed.message == exported.message == activity("a", 1, 2)
        assert listed.locked_until_ms is not None

    @pytest.mark.parametrize("delay_ms", [None, LOCK_MS * 2])
    async def test_a_claimed_item_with_a_tag_or_a_time_is_locked_too(
        self, store: Store, delay_ms: int | None
    ) -> None:
        visible_at_ms = None if delay_ms is None else await store.now_ms() + delay_ms
        item = replace(claimed(2), tag="gpu", visible_at_ms=visible_at_ms)
        await keep(store, worker_items=(item,))
        gpu = TagFilter.only("gpu")
        await store.advance((delay_ms or LOCK_MS) - store.tick_ms)

        assert await fetch_work(store, tags=gpu) is None
        await store.advance(store.tick_ms)
        assert (await take_work(store, tags=gpu)).attempt_count == 2

    async def test_items_without_a_claim_are_free_for_others(self, store: Store) -> None:
        await create(store, "a", worker_items=(claimed(2), activity("a", 1, 3)))

        assert (await take_work(store, provider=store.reader)).identity.activity_id == 3
        assert await fetch_work(store) is None

    async def test_a_claimed_item_is_cancelled_by_identity(self, store: Store) -> None:
        await create(store, "a", worker_items=(claimed(2),))

        await turn(store, "a", cancelled_activities=(identity("a"),))

        with pytest.raises(LockLost):
            await store.provider.renew_work_item_lock(CLAIM, LOCK_MS)

    async def test_an_item_claimed_and_cancelled_by_one_turn_is_gone(self, store: Store) -> None:
        await create(
            store,
            "a",
            worker_items=(claimed(2),),
            cancelled_activities=(identity("a"),),
        )

        with pytest.raises(LockLost):
            await store.provider.ack_work_item(CLAIM, completion("a"))
        await store.advance(LOCK_MS)
        assert await fetch_work(store) is None

    async def test_one_token_cannot_claim_two_items(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a")
        items = (claimed(2), claimed(3))

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(
                fetched.lock_token, keeping(2, worker_items=items)
            )

        assert await store.reader.read("a") == [started("a")]


@requires("hot_path")
@checks
class TestFusedCommits:
    verbs = ("ack_orchestration_item", "ack_work_item")

    async def test_a_settled_token_cannot_claim_the_next_item(self, store: Store) -> None:
        token = await keep(store, worker_items=(claimed(2),))

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(
                token, keeping(3, settled_work=(CLAIM,), worker_items=(claimed(3),))
            )

        assert [record.event_id for record in await store.reader.read("a")] == [1, 2]
        await store.provider.ack_work_item(CLAIM, completion("a"))

    async def test_a_completion_and_its_turn_are_one_commit(self, store: Store) -> None:
        token = await keep(store, worker_items=(claimed(2),))

        await store.provider.ack_orchestration_item(
            token, keeping(3, settled_work=(CLAIM,), worker_items=(activity("a", 1, 9),))
        )

        assert [record.event_id for record in await store.reader.read("a")] == [1, 2, 3]
        with pytest.raises(LockLost):
            await store.provider.ack_work_item(CLAIM, completion("a"))
        await store.advance(LOCK_MS - store.tick_ms)
        assert (await take_work(store)).identity.activity_id == 9
        assert await fetch_work(store) is None

    async def test_a_fetched_item_can_be_settled_too(self, store: Store) -> None:
        token = await keep(store, worker_items=(activity("a"),))
        item = await take_work(store)

        await store.provider.ack_orchestration_item(
            token, keeping(3, settled_work=(item.lock_token,))
        )

        with pytest.raises(LockLost):
            await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS)

    async def test_a_turn_can_settle_several_items(self, store: Store) -> None:
        token = await keep(store, worker_items=tuple(activity("a", 1, n) for n in (2, 3, 4)))
        tokens = [(await take_work(store)).lock_token for _ in range(3)]

        await store.provider.ack_orchestration_item(
            token, keeping(3, consumed=(), settled_work=tuple(tokens[:2]))
        )

        left = await store.admin.list_work("a")
        assert [each.message.identity for each in left] == [identity("a", 1, 4)]
        for lost in tokens[:2]:
            with pytest.raises(LockLost):
                await store.provider.renew_work_item_lock(lost, LOCK_MS)
        await store.provider.renew_work_item_lock(tokens[2], LOCK_MS)

    @pytest.mark.parametrize("death", ["expired", "settled", "cancelled", "unknown"])
    async def test_a_dead_work_token_stops_the_whole_commit(self, store: Store, death: str) -> None:
        await create(store, "a", worker_items=(activity("a", 1, 2), activity("a", 1, 3)))
        dead = (await take_work(store, lock_ms=1_000)).lock_token
        good = (await take_work(store)).lock_token
        if death == "settled":
            await store.provider.ack_work_item(dead)
        if death == "cancelled":
            await turn(store, "a", cancelled_activities=(identity("a", 1, 2),))
        if death == "expired":
            await store.advance(1_000)
        await enqueue(store, raised("a"))
        fetched = await take(store, "a", owner=OWNER)
        tokens = (good, "unknown" if death == "unknown" else dead)

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                fetched.lock_token,
                keeping(2, settled_work=tokens, orchestrator_items=(start("b"),)),
            )

        assert await store.reader.read("a") == [started("a")]
        assert await fetch(store) is None
        await store.provider.renew_work_item_lock(good, LOCK_MS)
        await store.provider.ack_orchestration_item(
            fetched.lock_token, keeping(2, settled_work=(good,))
        )

    async def test_another_instance_s_item_cannot_be_settled(self, store: Store) -> None:
        await create(store, "b", worker_items=(activity("b"),))
        token = await keep(store)
        item = await take_work(store)

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(
                token, keeping(3, settled_work=(item.lock_token,))
            )

        await store.provider.ack_work_item(item.lock_token, completion("b"))

    @pytest.mark.parametrize("fault", ["of another instance", "expired"])
    async def test_of_turns_that_are_committed_at_once_only_the_wrong_one_is_refused(
        self, store: Store, fault: str
    ) -> None:
        items: dict[str, str] = {}
        for instance in ("first", "a", "b", "c"):
            await create(store, instance, worker_items=(activity(instance),))
            await enqueue(store, raised(instance))
            lock_ms = 1_000 if instance == "a" else LOCK_MS
            items[instance] = (await take_work(store, lock_ms=lock_ms)).lock_token
        if fault == "expired":
            await store.advance(1_000)
        settled = items | {"a": items["a" if fault == "expired" else "b"]}
        del settled["b"]
        turns = [await take(store) for _ in items]
        commits = [
            store.provider.ack_orchestration_item(
                each.lock_token,
                TurnCommit(
                    execution_id=1,
                    history_delta=(event(each.item.instance_id, 2),),
                    settled_work=(settled[each.item.instance_id],),
                ),
            )
            for each in turns
            if each.item.instance_id in settled
        ]

        answers = await outcomes(*commits)

        refused = LockLost if fault == "expired" else InvalidValue
        assert [type(answer) for answer in answers] == [type(None), refused, type(None)]
        assert [len(await store.reader.read(each)) for each in ("a", "c")] == [1, 2]
        await store.provider.renew_work_item_lock(items["b"], LOCK_MS)
        with pytest.raises(LockLost):
            await store.provider.renew_work_item_lock(items["c"], LOCK_MS)

    async def test_a_repeated_fused_commit_is_not_applied_again(self, store: Store) -> None:
        token = await keep(store, worker_items=(claimed(2),))
        commit = keeping(3, settled_work=(CLAIM,), worker_items=(activity("a", 1, 9),))
        await store.provider.ack_orchestration_item(token, commit)

        with pytest.raises((LockLost, DuplicateEvent)):
            await store.provider.ack_orchestration_item(token, commit)

        await take_work(store)
        assert await fetch_work(store) is None

    async def test_worker_and_turn_racing_for_one_item_have_one_winner(self, store: Store) -> None:
        token = await keep(store, worker_items=(claimed(2),))

        results = await outcomes(
            store.provider.ack_orchestration_item(token, keeping(3, settled_work=(CLAIM,))),
            store.reader.ack_work_item(CLAIM, completion("a")),
        )

        assert [type(result) for result in results if result is not None] == [LockLost]
        committed = len(await store.reader.read("a")) == 3
        arrived = await fetch(store, owner=OWNER) is not None
        assert committed != arrived
