"""Messages that are only taken if something holds, decided in the transaction that takes them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from perdure.conformance.factories import (
    activity,
    bodies,
    cancel,
    continue_as_new,
    create,
    enqueue,
    fetch,
    fetch_work,
    finish,
    raised,
    start,
    started,
    take,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.errors import InstanceFinished, InvalidValue, LockLost, NotARoot, NotFound
from perdure.model.status import Status
from perdure.providers.records import EnqueueCondition, KvSet, OrchestratorMessage, TurnCommit

ENDS = (Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.TERMINATED)


async def enqueue_if(
    store: Store, condition: EnqueueCondition, message: OrchestratorMessage
) -> bool:
    return await store.provider.enqueue_for_orchestrator(message, condition=condition)


@checks
class TestAlive:
    verbs = ("enqueue_for_orchestrator",)

    async def test_a_running_instance_takes_the_message(self, store: Store) -> None:
        await create(store, "a")

        assert await enqueue_if(store, EnqueueCondition.ALIVE, cancel("a"))

        assert bodies(await take(store, "a", provider=store.reader)) == [cancel("a").body]

    async def test_a_queued_start_counts_as_alive(self, store: Store) -> None:
        await store.provider.enqueue_for_orchestrator(start("a"), 60_000)

        assert await enqueue_if(store, EnqueueCondition.ALIVE, raised("a"))

    async def test_an_unknown_instance_is_not_found(self, store: Store) -> None:
        await enqueue(store, raised("a"))

        with pytest.raises(NotFound):
            await enqueue_if(store, EnqueueCondition.ALIVE, raised("a", "again"))

        await enqueue(store, start("a"))
        assert bodies(await take(store, "a")) == [raised("a").body, start("a").body]

    @pytest.mark.parametrize("status", ENDS)
    async def test_an_instance_that_has_ended_says_so(self, store: Store, status: Status) -> None:
        await create(store, "a")
        await finish(store, "a", status)

        with pytest.raises(InstanceFinished):
            await enqueue_if(store, EnqueueCondition.ALIVE, raised("a"))

        assert await fetch(store) is None

    async def test_an_instance_between_two_executions_is_alive(self, store: Store) -> None:
        await create(store, "a")
        again = continue_as_new("a", 2)
        await finish(store, "a", Status.CONTINUED_AS_NEW, orchestrator_items=(again,))

        assert await enqueue_if(store, EnqueueCondition.ALIVE, raised("a"))

        assert bodies(await take(store, "a")) == [again.body, raised("a").body]


@checks
class TestAbsent:
    verbs = ("enqueue_for_orchestrator",)

    async def test_a_new_id_is_taken(self, store: Store) -> None:
        assert await enqueue_if(store, EnqueueCondition.ABSENT, start("a"))

        await take(store, "a", provider=store.reader)

    async def test_an_id_with_a_queued_start_is_not(self, store: Store) -> None:
        await store.provider.enqueue_for_orchestrator(start("a"), 60_000)

        assert not await enqueue_if(store, EnqueueCondition.ABSENT, start("a", "Other"))

        assert await fetch(store) is None

    async def test_an_id_whose_start_is_being_worked_on_is_not(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await take(store, "a")

        assert not await enqueue_if(store, EnqueueCondition.ABSENT, start("a"))

    async def test_an_id_that_has_ended_is_not(self, store: Store) -> None:
        await create(store, "a")
        await finish(store, "a")

        assert not await enqueue_if(store, EnqueueCondition.ABSENT, start("a"))

        assert await fetch(store) is None

    async def test_messages_that_came_early_do_not_make_an_instance(self, store: Store) -> None:
        await enqueue(store, raised("a"))

        assert await enqueue_if(store, EnqueueCondition.ABSENT, start("a"))

        assert bodies(await take(store, "a")) == [raised("a").body, start("a").body]

    async def test_each_of_many_is_decided_alone(self, store: Store) -> None:
        await create(store, "b")

        taken = await store.provider.enqueue_many_for_orchestrator(
            [start("a"), start("b"), start("a"), start("c")], condition=EnqueueCondition.ABSENT
        )

        assert taken == [True, False, False, True]

    async def test_many_are_refused_as_a_whole(self, store: Store) -> None:
        invalid = msgspec.structs.replace(start("b"), instance_id="")

        with pytest.raises(InvalidValue):
            await store.provider.enqueue_many_for_orchestrator([start("a"), invalid, start("c")])
        with pytest.raises(InvalidValue):
            await store.provider.enqueue_many_for_orchestrator(
                [start("a"), raised("unknown")], condition=EnqueueCondition.ALIVE
            )

        assert await fetch(store) is None


@checks
class TestReplace:
    verbs = ("enqueue_for_orchestrator",)

    async def test_nothing_of_the_old_instance_is_left(self, store: Store) -> None:
        await create(
            store,
            "a",
            name="Old",
            worker_items=(activity("a"),),
            orchestrator_items=(raised("a"),),
            kv_changes=(KvSet(key="k", value="v", updated_at_ms=1),),
        )

        assert await enqueue_if(store, EnqueueCondition.REPLACE, start("a", "New"))

        assert await store.reader.read("a") == []
        assert await store.reader.get_kv_all_values("a") == {}
        assert await fetch_work(store) is None
        fetched = await take(store, "a")
        assert (fetched.item.name, fetched.item.execution_id) == ("New", 1)
        assert bodies(fetched) == [start("a", "New").body]

    async def test_children_go_with_their_parent(self, store: Store) -> None:
        queued = start("queued", parent="a")
        await create(store, "a", orchestrator_items=(start("child", parent="a"), queued))
        await turn(store, "child", poke=False, history_delta=(started("child"),))

        await enqueue_if(store, EnqueueCondition.REPLACE, start("a"))

        assert await store.reader.read("child") == []
        await take(store, "a")
        assert await fetch(store) is None

    async def test_who_holds_the_old_instance_cannot_commit(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        old = await take(store, "a")

        await enqueue_if(store, EnqueueCondition.REPLACE, start("a"))

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                old.lock_token, TurnCommit(execution_id=1, history_delta=(started("a"),))
            )
        assert await store.reader.read("a") == []

    async def test_an_unknown_id_is_simply_started(self, store: Store) -> None:
        assert await enqueue_if(store, EnqueueCondition.REPLACE, start("a"))

        await take(store, "a")

    async def test_a_child_is_not_taken_from_a_parent_that_may_wait_for_it(
        self, store: Store
    ) -> None:
        queued = start("queued", parent="a")
        await create(store, "a", orchestrator_items=(start("child", parent="a"), queued))
        await turn(store, "child", poke=False, history_delta=(started("child"),))

        for child in ("child", "queued"):
            with pytest.raises(NotARoot, match="'a'"):
                await enqueue_if(store, EnqueueCondition.REPLACE, start(child, "New"))

        assert await store.reader.read("child") == [started("child")]
        assert bodies(await take(store, "queued")) == [queued.body]
        assert await fetch(store) is None

    async def test_those_that_are_sent_beside_a_refused_one_are_replaced(
        self, store: Store
    ) -> None:
        await create(store, "b", name="Old")
        await create(store, "c", name="Old")
        await create(store, "a", orchestrator_items=(start("child", parent="a"),))

        outcomes = await asyncio.gather(
            *(
                enqueue_if(store, EnqueueCondition.REPLACE, start(each, "New"))
                for each in ("b", "child", "c")
            ),
            return_exceptions=True,
        )

        assert (outcomes[0], outcomes[2]) == (True, True)
        assert isinstance(outcomes[1], NotARoot)
        taken = [(await take(store)).item for _ in outcomes]
        new = {item.instance_id for item in taken if item.name == "New"}
        assert (len(taken), new) == (3, {"b", "c"})

    async def test_a_child_whose_parent_has_not_begun_is_not_taken_either(
        self, store: Store
    ) -> None:
        await store.provider.enqueue_for_orchestrator(start("a"), 60_000)
        await create(store, "child", parent="a")

        with pytest.raises(NotARoot):
            await enqueue_if(store, EnqueueCondition.REPLACE, start("child"))

    @pytest.mark.parametrize("status", ENDS)
    async def test_a_child_whose_parent_has_ended_is_replaced(
        self, store: Store, status: Status
    ) -> None:
        await create(store, "a", orchestrator_items=(start("child", parent="a"),))
        await finish(store, "a", status)

        assert await enqueue_if(store, EnqueueCondition.REPLACE, start("child", "New"))

        assert bodies(await take(store, "child")) == [start("child", "New").body]

    async def test_a_child_whose_parent_is_not_there_is_replaced(self, store: Store) -> None:
        await create(store, "child", parent="gone")

        assert await enqueue_if(store, EnqueueCondition.REPLACE, start("child", "New"))

        assert (await take(store, "child")).item.name == "New"

    async def test_others_are_left_alone(self, store: Store) -> None:
        await create(store, "b", worker_items=(activity("b"),))

        await enqueue_if(store, EnqueueCondition.REPLACE, start("a"))

        assert await store.reader.read("b") == [started("b")]
        assert await fetch_work(store) is not None
