"""The hot path: a lock kept between turns, and an instance created by its first turn.

Falling back to fetch and replay must be possible at any moment.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    OWNER,
    activity,
    bodies,
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
)
from perdure.conformance.harness import Store, checks, outcomes
from perdure.conformance.requires import requires
from perdure.errors import DuplicateEvent, InvalidValue, LockLost
from perdure.model.status import Status
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    KvEntry,
    KvSet,
    TurnCommit,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from perdure.providers.records import FetchedOrchestration

OTHER = "owner-2"
NAMED = ExecutionMetadata(name="TestOrch", version="1.0.0")


def keeping(*events: int, **fields: Any) -> TurnCommit:
    """A commit of instance ``a`` that keeps the lock."""
    fields.setdefault("keep_lock_ms", LOCK_MS)
    delta = tuple(event("a", each) for each in events)
    return TurnCommit(execution_id=1, history_delta=delta, **fields)


async def keep(store: Store, **fields: Any) -> str:
    """Create ``a`` by a turn of OWNER that keeps its lock; returns the token."""
    await create(store, "a", owner=OWNER, keep_lock_ms=LOCK_MS, **fields)
    await enqueue(store, raised("a", "first"))
    fetched = await take(store, "a", owner=OWNER)
    await store.provider.ack_orchestration_item(fetched.lock_token, keeping(2))
    return fetched.lock_token


@requires("hot_path")
@checks
class TestKeptLocks:
    verbs = (
        "ack_orchestration_item",
        "fetch_orchestration_item",
        "renew_orchestration_item_lock",
        "abandon_orchestration_item",
    )

    async def test_a_kept_lock_cannot_be_stolen(self, store: Store) -> None:
        await keep(store)
        await enqueue(store, raised("a"))

        assert await fetch(store) is None
        assert await fetch(store, owner=OTHER, provider=store.reader) is None

    async def test_a_late_arrival_is_handed_to_the_owner_exactly_once(self, store: Store) -> None:
        token = await keep(store)
        late = raised("a", "late")
        await enqueue(store, late)

        fetched = await take(store, "a", owner=OWNER)

        assert fetched.continues
        assert (fetched.lock_token, bodies(fetched)) == (token, [late.body])
        assert fetched.attempt_count == 1
        assert fetched.item.history == ()
        assert await fetch(store, owner=OWNER) is None

    async def test_the_owner_of_a_lock_gets_another_message_first_if_it_was_sent_before(
        self, store: Store
    ) -> None:
        await create(store, "a", owner=OWNER, keep_lock_ms=600_000)
        await create(store, "b")
        await enqueue(store, raised("a"))
        for instance in ("b", "a"):
            await store.provider.enqueue_for_orchestrator(raised(instance), 50_000)
        assert (await take(store, "a", owner=OWNER)).continues
        await store.advance(60_000)

        await take(store, "b", owner=OWNER)
        await take(store, "a", owner=OWNER)

    async def test_late_arrivals_come_in_the_order_in_which_they_came_due(
        self, store: Store
    ) -> None:
        token = await keep(store)
        await store.provider.ack_orchestration_item(token, keeping(3, keep_lock_ms=600_000))
        await store.provider.enqueue_for_orchestrator(raised("a", "last timer"), 90_000)
        await store.provider.enqueue_for_orchestrator(raised("a", "first timer"), 50_000)
        await enqueue(store, raised("a", "before"))
        await store.advance(100_000)

        fetched = await take(store, "a", owner=OWNER)

        assert fetched.continues
        names = ("before", "first timer", "last timer")
        assert bodies(fetched) == [raised("a", name).body for name in names]

    async def test_concurrent_fetches_of_one_owner_are_answered_in_the_order_of_their_calls(
        self, store: Store
    ) -> None:
        await keep(store)
        sent = [raised("a", data=number) for number in range(1, 29)]
        await enqueue(store, raised("a", data=0))
        others: list[str] = []
        answers: list[FetchedOrchestration | None] = []
        for first in range(0, len(sent), 4):
            # Fetches and messages at once, and instances with which a fetch could be late.
            calls: list[Awaitable[Any]] = []
            for message in sent[first : first + 4]:
                others.append(f"other-{len(others)}")
                calls += [
                    fetch(store, owner=OWNER),
                    store.provider.enqueue_for_orchestrator(message),
                    store.provider.enqueue_for_orchestrator(start(others[-1])),
                ]
            answers += (await asyncio.gather(*calls))[::3]
        while (answer := await fetch(store, owner=OWNER)) is not None:
            answers.append(answer)

        found = [each for each in answers if each is not None]
        arrived = [body for each in found if each.continues for body in bodies(each)]
        assert arrived == [raised("a", data=0).body, *(each.body for each in sent)]
        assert [each.item.instance_id for each in found if not each.continues] == others

    async def test_a_message_for_later_reaches_the_owner_after_others_did(
        self, store: Store
    ) -> None:
        token = await keep(store)
        await store.provider.enqueue_for_orchestrator(raised("a", "later"), delay_ms=1_000)
        await enqueue(store, raised("a", "now"))
        first = await take(store, "a", owner=OWNER)
        await store.advance(1_000)

        second = await take(store, "a", owner=OWNER)

        assert (bodies(first), bodies(second)) == (
            [raised("a", "now").body],
            [raised("a", "later").body],
        )
        assert (second.continues, second.lock_token) == (True, token)

    async def test_a_lock_that_was_fetched_but_not_kept_hands_out_nothing_more(
        self, store: Store
    ) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        await take(store, "a", owner=OWNER)
        await enqueue(store, raised("a"))

        assert await fetch(store, owner=OWNER) is None

    async def test_the_kept_lock_commits_turn_after_turn(self, store: Store) -> None:
        token = await keep(store)

        for each in (3, 4, 5):
            await store.provider.ack_orchestration_item(token, keeping(each))
            await store.advance(LOCK_MS // 2)

        assert [record.event_id for record in await store.reader.read("a")] == [1, 2, 3, 4, 5]

    async def test_the_kept_lock_lives_from_the_commit_on(self, store: Store) -> None:
        token = await keep(store)
        await store.advance(LOCK_MS - store.tick_ms)
        await store.provider.ack_orchestration_item(token, keeping(3, keep_lock_ms=LOCK_MS * 2))
        await enqueue(store, raised("a"))
        await store.advance(LOCK_MS * 2 - store.tick_ms)

        assert await fetch(store) is None
        await store.advance(store.tick_ms)
        assert not (await take(store, "a", owner=OWNER)).continues

    async def test_a_kept_lock_is_renewed_like_any_other(self, store: Store) -> None:
        token = await keep(store)
        await store.advance(LOCK_MS // 2)

        await store.provider.renew_orchestration_item_lock(token, LOCK_MS)

        await store.advance(LOCK_MS // 2)
        await store.provider.ack_orchestration_item(token, keeping(3))

    async def test_messages_that_a_turn_did_not_consume_stay(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a", "one"), raised("a", "two"))
        fetched = await take(store, "a", owner=OWNER)
        first, second = fetched.item.messages

        await store.provider.ack_orchestration_item(
            fetched.lock_token, keeping(2, consumed=(first.message_id,))
        )

        assert await fetch(store, owner=OWNER) is None
        await store.provider.ack_orchestration_item(
            fetched.lock_token, keeping(3, consumed=(second.message_id,), keep_lock_ms=None)
        )
        assert await fetch(store) is None

    async def test_unconsumed_messages_are_free_when_the_lock_is_released(
        self, store: Store
    ) -> None:
        await create(store, "a")
        await enqueue(store, raised("a", "one"), raised("a", "two"))
        fetched = await take(store, "a", owner=OWNER)
        first, second = fetched.item.messages

        await store.provider.ack_orchestration_item(
            fetched.lock_token, keeping(2, consumed=(first.message_id,), keep_lock_ms=None)
        )

        again = await take(store, "a", provider=store.reader)
        assert [delivery.body for delivery in again.item.messages] == [second.body]
        assert again.attempt_count == 2

    async def test_a_turn_consumes_nothing_if_it_names_nothing(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        fetched = await take(store, "a", owner=OWNER)

        await store.provider.ack_orchestration_item(
            fetched.lock_token, keeping(2, consumed=(), keep_lock_ms=None)
        )

        assert bodies(await take(store, "a")) == [raised("a").body]

    async def test_another_instance_s_message_cannot_be_consumed(self, store: Store) -> None:
        await create(store, "a")
        await create(store, "b")
        await enqueue(store, raised("a"), raised("b"))
        mine, other = await take(store, "a"), await take(store, "b")

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                mine.lock_token,
                TurnCommit(execution_id=1, consumed=(other.item.messages[0].message_id,)),
            )

        await store.provider.abandon_orchestration_item(mine.lock_token)
        await store.provider.abandon_orchestration_item(other.lock_token)
        left = {(await take(store)).item.instance_id for _ in range(2)}
        assert left == {"a", "b"}

    @pytest.mark.parametrize("custom_status", [None, CustomStatusChange(value='"x"')])
    async def test_a_message_is_consumed_once(
        self, store: Store, custom_status: CustomStatusChange | None
    ) -> None:
        token = await keep(store)
        await enqueue(store, raised("a", "first"), raised("a", "second"))
        first, second = (await take(store, "a", owner=OWNER)).item.messages
        await store.provider.ack_orchestration_item(token, keeping(3, consumed=(first.message_id,)))

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                token,
                keeping(
                    4,
                    consumed=(first.message_id, second.message_id),
                    custom_status=custom_status,
                    worker_items=(activity("a"),),
                ),
            )

        assert [record.event_id for record in await store.reader.read("a")] == [1, 2, 3]
        assert await fetch_work(store) is None
        await store.provider.abandon_orchestration_item(token)
        assert bodies(await take(store, "a")) == [raised("a", "second").body]

    @pytest.mark.parametrize("custom_status", [None, CustomStatusChange(value='"x"')])
    async def test_a_message_that_is_named_twice_is_consumed(
        self, store: Store, custom_status: CustomStatusChange | None
    ) -> None:
        token = await keep(store)
        await enqueue(store, raised("a"))
        (message,) = (await take(store, "a", owner=OWNER)).item.messages
        twice = (message.message_id, message.message_id)

        await store.provider.ack_orchestration_item(
            token, keeping(3, consumed=twice, custom_status=custom_status, keep_lock_ms=None)
        )

        assert await fetch(store) is None

    async def test_a_refused_turn_takes_no_other_along(self, store: Store) -> None:
        for instance_id in ("a", "b", "c"):
            await create(store, instance_id)
            await enqueue(store, raised(instance_id))
        turns = [await take(store) for _ in range(3)]
        ids = [turn.item.messages[0].message_id for turn in turns]
        ids[1] += 1_000_000

        answers = await outcomes(
            *(
                store.provider.ack_orchestration_item(
                    turn.lock_token, TurnCommit(execution_id=1, consumed=(message_id,))
                )
                for turn, message_id in zip(turns, ids, strict=True)
            )
        )

        assert [type(answer) for answer in answers] == [type(None), LockLost, type(None)]
        await store.provider.abandon_orchestration_item(turns[1].lock_token)
        assert (await take(store)).item.instance_id == turns[1].item.instance_id
        assert await fetch(store) is None

    @pytest.mark.parametrize("custom_status", [None, CustomStatusChange(value='"x"')])
    async def test_the_holder_of_a_kept_lock_cannot_skip_an_event(
        self, store: Store, custom_status: CustomStatusChange | None
    ) -> None:
        token = await keep(store)
        await enqueue(store, raised("a"))
        (message,) = (await take(store, "a", owner=OWNER)).item.messages

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                token,
                keeping(
                    4,
                    consumed=(message.message_id,),
                    custom_status=custom_status,
                    worker_items=(activity("a"),),
                ),
            )
        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                token, keeping(consumed=(message.message_id,), after_event_id=3)
            )

        assert [record.event_id for record in await store.reader.read("a")] == [1, 2]
        assert await fetch_work(store) is None
        await store.provider.abandon_orchestration_item(token)
        assert bodies(await take(store, "a")) == [raised("a").body]

    async def test_a_lock_that_is_not_known_takes_no_other_turn_along(self, store: Store) -> None:
        for instance_id in ("a", "b"):
            await create(store, instance_id)
            await enqueue(store, raised(instance_id))
        held = [await take(store) for _ in range(2)]
        tokens = [held[0].lock_token, "not a lock", held[1].lock_token]

        answers = await outcomes(
            *(
                store.provider.ack_orchestration_item(token, TurnCommit(execution_id=1))
                for token in tokens
            )
        )

        assert [type(answer) for answer in answers] == [type(None), LockLost, type(None)]
        assert await fetch(store) is None

    async def test_an_execution_without_events_cannot_begin_in_its_middle(
        self, store: Store
    ) -> None:
        await enqueue(store, start("b"))
        held = await take(store, "b")
        named = ExecutionMetadata(name="TestOrch", version="1.0.0")
        first = TurnCommit(execution_id=1, metadata=named)
        await store.provider.ack_orchestration_item(held.lock_token, first)
        await enqueue(store, raised("b"))
        held = await take(store, "b")

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                held.lock_token, TurnCommit(execution_id=1, history_delta=(event("b", 2),))
            )

        assert await store.reader.read("b") == []

    async def test_a_turn_that_skips_an_event_takes_no_other_along(self, store: Store) -> None:
        for instance_id in ("a", "b", "c"):
            await create(store, instance_id)
            await enqueue(store, raised(instance_id))
        turns = [await take(store) for _ in range(3)]

        answers = await outcomes(
            *(
                store.provider.ack_orchestration_item(
                    turn.lock_token,
                    TurnCommit(
                        execution_id=1, history_delta=(event(turn.item.instance_id, event_id),)
                    ),
                )
                for turn, event_id in zip(turns, (2, 3, 2), strict=True)
            )
        )

        assert [type(answer) for answer in answers] == [type(None), LockLost, type(None)]
        lengths = [len(await store.reader.read(turn.item.instance_id)) for turn in turns]
        assert lengths == [2, 1, 2]

    async def test_abandoning_a_kept_lock_frees_all_that_it_carries(self, store: Store) -> None:
        token = await keep(store)
        await enqueue(store, raised("a", "late"))
        await take(store, "a", owner=OWNER)

        await store.provider.abandon_orchestration_item(token)

        again = await take(store, "a", owner=OTHER)
        assert (again.continues, again.attempt_count) == (False, 2)

    async def test_after_expiry_anybody_gets_the_whole_history(self, store: Store) -> None:
        token = await keep(store)
        await store.provider.ack_orchestration_item(token, keeping(3))
        await enqueue(store, raised("a", "late"))
        await take(store, "a", owner=OWNER)
        await store.advance(LOCK_MS)

        rescuer = await take(store, "a", owner=OTHER, provider=store.reader)

        assert not rescuer.continues
        assert rescuer.item.name == "TestOrch"
        assert [record.event_id for record in rescuer.item.history] == [1, 2, 3]
        assert bodies(rescuer) == [raised("a", "late").body]
        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(token, keeping(4))

    async def test_adding_items_under_a_kept_lock_needs_history(self, store: Store) -> None:
        token = await keep(store)

        for fields in (
            {"worker_items": (activity("a"),)},
            {"orchestrator_items": (raised("a"),)},
            {"custom_status": CustomStatusChange(value='"x"')},
        ):
            with pytest.raises(InvalidValue):
                await store.provider.ack_orchestration_item(token, keeping(**fields))

        assert await fetch_work(store) is None
        assert await store.reader.get_custom_status("a") is None

    async def test_a_repeated_commit_under_a_kept_lock_is_a_duplicate(self, store: Store) -> None:
        token = await keep(store)
        commit = keeping(3, worker_items=(activity("a"),), orchestrator_items=(start("b"),))
        await store.provider.ack_orchestration_item(token, commit)

        with pytest.raises(DuplicateEvent):
            await store.provider.ack_orchestration_item(token, commit)

        await take_work(store)
        assert await fetch_work(store) is None
        assert len((await take(store, "b")).item.messages) == 1
        await store.provider.ack_orchestration_item(token, keeping(4))

    async def test_two_owners_keep_their_own_instances(self, store: Store) -> None:
        await create(store, "a", owner=OWNER, keep_lock_ms=LOCK_MS)
        await create(store, "b", owner=OTHER, keep_lock_ms=LOCK_MS)
        await enqueue(store, raised("a"), raised("b"))

        for_other = await take(store, "b", owner=OTHER)
        for_owner = await take(store, "a", owner=OWNER)

        assert for_owner.continues
        assert for_other.continues
        assert await fetch(store, owner=OWNER) is None
        assert await fetch(store, owner=OTHER) is None

    async def test_suspending_takes_a_kept_lock_away(self, store: Store) -> None:
        token = await keep(store)
        await store.admin.suspend_instance("a")

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(token, keeping(3))
        await enqueue(store, raised("a"))
        assert await fetch(store, owner=OWNER) is None


@requires("hot_path")
@checks
class TestFirstTurnAtOnce:
    verbs = ("start_orchestration_item",)

    async def start(self, store: Store, **fields: Any) -> bool:
        fields.setdefault("metadata", NAMED)
        fields.setdefault("keep_lock_ms", LOCK_MS)
        delta = fields.pop("history_delta", (started("a"),))
        return await store.provider.start_orchestration_item(
            start("a"), TurnCommit(execution_id=1, history_delta=delta, **fields), "turn-1", OWNER
        )

    async def test_it_creates_the_instance_and_commits_its_first_turn(self, store: Store) -> None:
        assert await self.start(
            store,
            worker_items=(activity("a"),),
            kv_changes=(KvSet(key="k", value="v", updated_at_ms=1),),
        )

        info = await store.admin.get_instance_info("a")
        assert (info.name, info.version, info.status) == ("TestOrch", "1.0.0", Status.RUNNING)
        assert abs(info.created_at_ms - await store.now_ms()) <= store.tick_ms
        assert await store.reader.read("a") == [started("a")]
        values = {"k": KvEntry(value="v", updated_at_ms=1)}
        assert await store.reader.get_kv_all_values("a") == values
        assert (await take_work(store)).identity == identity("a")

    async def test_its_lock_is_kept_for_the_owner(self, store: Store) -> None:
        await self.start(store)
        await enqueue(store, raised("a"))

        assert await fetch(store) is None
        fetched = await take(store, "a", owner=OWNER)

        assert (fetched.continues, fetched.lock_token) == (True, "turn-1")
        await store.provider.ack_orchestration_item("turn-1", keeping(2))

    async def test_without_keeping_the_lock_is_free(self, store: Store) -> None:
        await self.start(store, keep_lock_ms=None)
        await enqueue(store, raised("a"))

        assert (await take(store, "a")).item.history == (started("a"),)

    async def test_a_repetition_says_no_and_writes_nothing(self, store: Store) -> None:
        assert await self.start(store, worker_items=(activity("a"),))
        assert not await self.start(store, worker_items=(activity("a"),))

        await take_work(store)
        assert await fetch_work(store) is None

    async def test_an_existing_instance_is_left_alone(self, store: Store) -> None:
        await create(store, "a", name="Other")

        assert not await self.start(store)

        assert (await store.admin.get_instance_info("a")).name == "Other"

    async def test_a_queued_start_is_left_alone(self, store: Store) -> None:
        await store.provider.enqueue_for_orchestrator(start("a", "Queued"), 60_000)

        assert not await self.start(store)

        assert await store.reader.read("a") == []
        assert (await store.admin.get_instance_info("a")).name == "Queued"

    async def test_messages_that_came_early_are_delivered_afterwards(self, store: Store) -> None:
        early = raised("a", "early")
        await enqueue(store, early)

        assert await self.start(store)

        fetched = await take(store, "a", owner=OWNER)
        assert bodies(fetched) == [early.body]

    async def test_who_held_history_without_a_turn_has_lost_it(self, store: Store) -> None:
        await store.provider.append_with_execution("a", 9, [event("a", 1, 9)])
        await enqueue(store, raised("a"))
        old = await take(store, "a")

        assert await self.start(store)

        with pytest.raises(LockLost):
            await store.provider.abandon_orchestration_item(old.lock_token)
        assert bodies(await take(store, "a", owner=OWNER)) == [raised("a").body]

    async def test_it_may_end_the_instance_at_once(self, store: Store) -> None:
        metadata = ExecutionMetadata(
            name="TestOrch", version="1.0.0", status=Status.COMPLETED, output="1"
        )
        assert await self.start(store, metadata=metadata, keep_lock_ms=None)

        info = await store.admin.get_instance_info("a")
        assert (info.status, info.output) == (Status.COMPLETED, "1")

    async def test_it_needs_name_and_version(self, store: Store) -> None:
        with pytest.raises(InvalidValue):
            await self.start(store, metadata=ExecutionMetadata())

        assert await store.reader.read("a") == []
        assert await self.start(store)

    async def test_a_token_that_is_in_use_is_refused(self, store: Store) -> None:
        await self.start(store)
        commit = TurnCommit(
            execution_id=1, history_delta=(started("b"),), metadata=NAMED, keep_lock_ms=LOCK_MS
        )

        with pytest.raises(InvalidValue):
            await store.provider.start_orchestration_item(start("b"), commit, "turn-1", OWNER)

        assert await store.reader.read("b") == []
        assert await store.provider.start_orchestration_item(start("b"), commit, "turn-2", OWNER)
        await store.provider.ack_orchestration_item("turn-1", keeping(2))

    async def test_of_two_starts_at_once_one_wins(self, store: Store) -> None:
        commit = TurnCommit(execution_id=1, history_delta=(started("a"),), metadata=NAMED)

        results = await outcomes(
            *(
                handle.start_orchestration_item(start("a"), commit, f"turn-{number}", OWNER)
                for number, handle in enumerate([store.provider, store.reader] * 3)
            )
        )

        assert sorted(results) == [False] * 5 + [True]
