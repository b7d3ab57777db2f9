"""Faults that durable-execution stores have really had, each as the check that would have found it.

About locks and turns here; names, times and load have their own modules.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from perdure.conformance.factories import (
    activity,
    bodies,
    completion,
    create,
    enqueue,
    enqueue_work,
    event,
    fetch,
    fetch_work,
    raised,
    start,
    take,
    take_work,
    timer,
    turn,
)
from perdure.conformance.harness import ProviderFactory, Store, checks, outcomes
from perdure.conformance.key_value import put, values
from perdure.conformance.requires import requires, requires_absent
from perdure.errors import DuplicateEvent, InvalidValue, LockLost, StoreClosed, StoreRefused
from perdure.providers.records import CustomStatusChange, TurnCommit


@checks
class TestFencing:
    """A token is checked inside the commit; a call with a lost token changes nothing."""

    verbs = ("ack_orchestration_item", "ack_work_item", "abandon_orchestration_item")

    async def test_two_who_take_at_once_are_not_both_owners(self, store: Store) -> None:
        for round_number in range(20):
            await enqueue(store, start(f"x-{round_number}"))

            taken = await asyncio.gather(
                *(fetch(store, provider=each) for each in (store.provider, store.reader) * 2)
            )

            assert sum(fetched is not None for fetched in taken) == 1

    async def test_a_zombie_cannot_give_back_the_lock_of_its_successor(self, store: Store) -> None:
        await enqueue(store, start("x"))
        await enqueue_work(store, activity("y"))
        zombie = await take(store, "x", lock_ms=1_000)
        zombie_work = await take_work(store, lock_ms=1_000)
        await store.advance(1_000)
        await take(store, "x", lock_ms=60_000)
        await take_work(store, lock_ms=60_000)

        with pytest.raises(LockLost):
            await store.provider.abandon_orchestration_item(zombie.lock_token)
        with pytest.raises(LockLost):
            await store.provider.abandon_work_item(zombie_work.lock_token)

        assert await fetch(store) is None
        assert await fetch_work(store) is None

    async def test_the_completion_of_a_zombie_is_not_accepted(self, store: Store) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        zombie = await take_work(store, lock_ms=1_000)
        await store.advance(1_000)
        successor = await take_work(store)

        with pytest.raises(LockLost):
            await store.provider.ack_work_item(zombie.lock_token, completion("x", result="zombie"))
        assert await fetch(store) is None
        await store.provider.ack_work_item(successor.lock_token, completion("x", result="good"))

        assert bodies(await take(store, "x")) == [completion("x", result="good").body]

    async def test_a_second_ack_of_one_work_item_enqueues_nothing(self, store: Store) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        work = await take_work(store)
        await store.provider.ack_work_item(work.lock_token, completion("x"))

        with pytest.raises(LockLost):
            await store.provider.ack_work_item(work.lock_token, completion("x"))

        assert len((await take(store, "x")).item.messages) == 1

    async def test_a_zombie_writes_none_of_its_turn(self, store: Store) -> None:
        await create(store, "x", worker_items=(activity("x", activity_id=9),))
        await enqueue(store, raised("x"))
        zombie = await take(store, "x", lock_ms=1_000)
        await store.advance(1_000)
        await take(store, "x")
        commit = TurnCommit(
            execution_id=1,
            history_delta=(event("x", 2),),
            worker_items=(activity("x", activity_id=2),),
            orchestrator_items=(start("child"),),
            custom_status=CustomStatusChange(value="1"),
            kv_changes=(put("k", "1"),),
            cancelled_activities=(activity("x", activity_id=9).identity,),
        )

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(zombie.lock_token, commit)

        assert len(await store.reader.read("x")) == 1
        assert await values(store, "x") == {}
        assert await store.reader.get_custom_status("x") is None
        assert (await take_work(store)).identity.activity_id == 9
        assert await fetch_work(store) is None
        assert await fetch(store) is None

    async def test_a_late_message_lets_no_second_owner_in(self, store: Store) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")

        for number in range(3):
            await enqueue(store, raised("x", data=number))
            assert await fetch(store) is None

        await store.provider.ack_orchestration_item(
            held.lock_token, TurnCommit(execution_id=1, history_delta=(event("x", 1),))
        )
        assert len((await take(store, "x")).item.messages) == 3

    async def test_at_the_very_moment_of_expiry_one_takes_over(self, store: Store) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x", lock_ms=1_000)
        await store.advance(1_000)

        results = await outcomes(
            fetch(store),
            fetch(store, provider=store.reader),
            store.provider.ack_orchestration_item(held.lock_token, TurnCommit(execution_id=1)),
        )

        assert isinstance(results[2], LockLost)
        assert sum(fetched is not None for fetched in results[:2]) == 1

    async def test_tokens_cannot_be_guessed(self, store: Store) -> None:
        turns: list[str] = []
        work: list[str] = []
        for number in range(10):
            await enqueue(store, start(f"x-{number}"))
            await enqueue_work(store, activity(f"x-{number}"))
            turns.append((await take(store)).lock_token)
            work.append((await take_work(store)).lock_token)

        # Counted or timed tokens agree in most places; 16 random hexadecimal digits hardly in four.
        for one, other in (*pairwise(turns), *pairwise(work)):
            assert sum(left != right for left, right in zip(one, other, strict=False)) >= 12


@checks
class TestWholeTurns:
    """All of a turn or nothing, once."""

    verbs = ("ack_orchestration_item", "ack_work_item")

    async def test_a_refused_turn_leaves_no_trace_and_can_be_repeated(self, store: Store) -> None:
        await create(store, "x", worker_items=(activity("x", activity_id=9),))
        await enqueue(store, raised("x"))
        held = await take(store, "x")
        commit = TurnCommit(
            execution_id=1,
            history_delta=(event("x", 2), event("x", 1)),
            worker_items=(activity("x", activity_id=2),),
            orchestrator_items=(start("child"), raised("x", "self")),
            custom_status=CustomStatusChange(value="1"),
            kv_changes=(put("k", "1"),),
            cancelled_activities=(activity("x", activity_id=9).identity,),
        )

        with pytest.raises(DuplicateEvent):
            await store.provider.ack_orchestration_item(held.lock_token, commit)

        assert [record.event_id for record in await store.reader.read("x")] == [1]
        assert await values(store, "x") == {}
        assert await store.reader.get_custom_status("x") is None
        assert await fetch(store) is None, "the lock is held and no child was started"
        assert (await take_work(store)).identity.activity_id == 9
        assert await fetch_work(store) is None
        await store.provider.ack_orchestration_item(
            held.lock_token, TurnCommit(execution_id=1, history_delta=(event("x", 2),))
        )
        assert await fetch(store) is None, "the message was consumed by the turn that worked"

    async def test_a_completion_is_never_lost_between_two_steps(self, store: Store) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        work = await take_work(store)

        with pytest.raises(InvalidValue):
            await store.provider.ack_work_item(work.lock_token, completion("elsewhere"))

        await store.provider.ack_work_item(work.lock_token, completion("x"))
        assert bodies(await take(store, "x")) == [completion("x").body]
        assert await fetch_work(store) is None

    async def test_a_repeated_turn_does_not_double_its_items(self, store: Store) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")
        commit = TurnCommit(
            execution_id=1,
            history_delta=(event("x", 1),),
            worker_items=(activity("x"),),
            orchestrator_items=(raised("x"),),
        )
        await store.provider.ack_orchestration_item(held.lock_token, commit)

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(held.lock_token, commit)

        await take_work(store)
        assert await fetch_work(store) is None
        assert len((await take(store, "x")).item.messages) == 1

    async def test_a_timer_of_a_turn_is_visible_at_its_time(self, store: Store) -> None:
        due = await store.now_ms() + 60_000
        await create(store, "x", orchestrator_items=(timer("x", due),))
        assert await fetch(store) is None
        await store.advance(30_000)
        assert await fetch(store) is None

        await store.advance(30_000)

        assert bodies(await take(store, "x")) == [timer("x", due).body]

    @requires("admin")
    async def test_giving_back_touches_only_the_batch(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x", data="mine"))
        held = await take(store, "x")
        await store.provider.enqueue_for_orchestrator(raised("x", data="delayed"), 60_000)
        await enqueue(store, raised("x", data="late"))
        before = await store.admin.list_messages("x")

        await store.provider.abandon_orchestration_item(
            held.lock_token, 10_000, ignore_attempt=True
        )

        after = await store.admin.list_messages("x")
        assert [seen.visible_at_ms for seen in after] == [seen.visible_at_ms for seen in before]
        assert [seen.attempt_count for seen in after] == [0, 0, 0]

    async def test_a_long_history_is_not_cut_off(self, store: Store) -> None:
        await create(store, "x")
        await turn(
            store, "x", history_delta=tuple(event("x", number) for number in range(2, 1_501))
        )

        assert len(await store.reader.read("x")) == 1_500
        fetched = await turn(store, "x")
        assert [record.event_id for record in fetched.item.history] == list(range(1, 1_501))

    async def test_a_second_start_leaves_the_first_untouched(self, store: Store) -> None:
        await create(store, "x", name="First", version="1.0.0")

        await enqueue(store, start("x", "Second", "2.0.0"))

        fetched = await take(store, "x")
        assert (fetched.item.name, fetched.item.version) == ("First", "1.0.0")
        assert len(fetched.item.history) == 1


@checks
class TestErrorsAreNotSilence:
    verbs = ("close", "open")

    async def test_a_closed_handle_says_so(self, store: Store) -> None:
        await store.provider.close()
        provider = store.provider

        with pytest.raises(StoreClosed):
            await provider.fetch_orchestration_item(5_000, 0)
        with pytest.raises(StoreClosed):
            await provider.fetch_work_item(5_000, 0)
        with pytest.raises(StoreClosed):
            await provider.enqueue_for_orchestrator(start("x"))
        with pytest.raises(StoreClosed):
            await provider.enqueue_for_worker(activity("x"))
        with pytest.raises(StoreClosed):
            await provider.ack_orchestration_item("token", TurnCommit(execution_id=1))
        with pytest.raises(StoreClosed):
            await provider.read("x")

    async def test_opening_and_closing_twice_does_nothing(self, store: Store) -> None:
        await store.provider.open()
        await enqueue(store, start("x"))
        await take(store, "x")

        await store.provider.close()
        await store.provider.close()

    @requires_absent("several_handles")
    async def test_where_there_can_be_one_handle_a_second_is_refused(
        self, store: Store, provider_factory: ProviderFactory
    ) -> None:
        second = provider_factory.create(store.clock)

        with pytest.raises(StoreRefused):
            await second.open()

        await second.close()
        await enqueue(store, start("x"))
        await take(store, "x")
