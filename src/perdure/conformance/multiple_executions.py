"""F: executions of one instance keep their histories apart."""

from __future__ import annotations

from perdure.conformance.factories import (
    activity,
    bodies,
    continue_as_new,
    create,
    enqueue,
    event,
    finish,
    next_execution,
    raised,
    start,
    started,
    take,
    take_work,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.model.status import Status
from perdure.providers.records import (
    ExecutionMetadata,
    InstanceQuery,
    KvClearAll,
    KvEntry,
    KvSet,
    TurnCommit,
)


@checks
class TestMultipleExecutions:
    verbs = ("read", "read_with_execution", "ack_orchestration_item", "fetch_orchestration_item")

    async def test_executions_have_separate_histories(self, store: Store) -> None:
        await create(store, "a", history_delta=(event("a", 2),))
        await next_execution(store, "a", 2)

        first = await store.reader.read_with_execution("a", 1)
        second = await store.reader.read_with_execution("a", 2)

        assert first == [started("a"), event("a", 2)]
        assert second == [started("a", 2)] == await store.reader.read("a")

    async def test_a_plain_read_is_of_the_latest_even_if_event_ids_repeat(
        self, store: Store
    ) -> None:
        await create(store, "a", history_delta=(event("a", 2, data="old"),))
        await next_execution(store, "a", 2, history_delta=(event("a", 2, 2, data="new"),))

        assert await store.reader.read("a") == [started("a", 2), event("a", 2, 2, data="new")]

    async def test_a_commit_for_a_later_execution_advances_the_instance(self, store: Store) -> None:
        await enqueue(store, start("a"))
        first = await turn(store, "a", poke=False, execution=2, history_delta=(started("a", 2),))

        second = await turn(store, "a")

        assert (first.item.execution_id, second.item.execution_id) == (1, 2)
        assert second.item.history == (started("a", 2),)

    async def test_continuing_as_new_is_fetched_under_the_old_execution(self, store: Store) -> None:
        await create(store, "a")
        again = continue_as_new("a", 2)
        await finish(store, "a", Status.CONTINUED_AS_NEW, orchestrator_items=(again,))

        fetched = await turn(store, "a", poke=False, execution=2, history_delta=(started("a", 2),))

        assert fetched.item.execution_id == 1
        assert bodies(fetched) == [again.body]
        assert (await turn(store, "a")).item.execution_id == 2

    async def test_three_executions_stay_readable(self, store: Store) -> None:
        await create(store, "a")
        await next_execution(store, "a", 2)
        await next_execution(store, "a", 3)

        histories = [await store.reader.read_with_execution("a", each) for each in (1, 2, 3)]

        assert histories == [[started("a", each)] for each in (1, 2, 3)]
        assert await store.reader.read("a") == histories[2]

    async def test_a_commit_for_an_earlier_execution_does_not_turn_the_instance_back(
        self, store: Store
    ) -> None:
        await create(store, "a")
        await next_execution(store, "a", 2)

        await turn(store, "a", execution=1, history_delta=(event("a", 2),))

        assert (await turn(store, "a")).item.execution_id == 2
        assert await store.reader.read_with_execution("a", 1) == [started("a"), event("a", 2)]

    async def test_without_metadata_the_start_says_who_it_is(self, store: Store) -> None:
        await enqueue(store, start("a", "Named", "7.0.0"))
        await turn(store, "a", poke=False, history_delta=(started("a"),))

        again = await turn(store, "a")

        assert (again.item.name, again.item.version) == ("Named", "7.0.0")
        assert again.item.execution_id == 1
        assert again.item.history == (started("a"),)

    async def test_history_that_a_tool_wrote_makes_an_instance_known(self, store: Store) -> None:
        await create(store, "other")
        await store.provider.append_with_execution("a", 3, [started("a", 3)])
        assert await store.admin.list_executions("a") == []

        fetched = await turn(store, "a")

        assert fetched.item.execution_id == 3
        assert fetched.item.history == (started("a", 3),)
        info = await store.admin.get_instance_info("a")
        assert (info.execution_id, info.status) == (3, Status.RUNNING)

    async def test_an_instance_is_created_once(self, store: Store) -> None:
        await enqueue(store, start("a"))
        pending = await store.admin.get_instance_info("a")
        await store.advance(1_000)
        await turn(store, "a", poke=False, history_delta=(started("a"),))
        await store.advance(1_000)

        await next_execution(store, "a", 2)

        info = await store.admin.get_instance_info("a")
        assert info.created_at_ms == pending.created_at_ms < info.updated_at_ms
        assert (await store.admin.get_execution_info("a", 2)).started_at_ms > info.created_at_ms

    async def test_only_an_ended_execution_has_a_completion_time(self, store: Store) -> None:
        await create(store, "a")
        await finish(store, "a", Status.FAILED)
        failed = await store.admin.get_execution_info("a", 1)

        await turn(store, "a", metadata=ExecutionMetadata(status=Status.RUNNING))

        again = await store.admin.get_execution_info("a", 1)
        assert failed.completed_at_ms is not None
        assert (again.status, again.completed_at_ms) == (Status.RUNNING, None)
        assert again.started_at_ms == failed.started_at_ms

    async def test_an_ended_execution_can_be_opened_again(self, store: Store) -> None:
        await create(store, "a")
        kv = KvSet(key="k", value="v", updated_at_ms=1)
        await finish(store, "a", Status.FAILED, kv_changes=(kv,))
        locked = await store.admin.lock_instance("a", 30_000)
        again = raised("a", "again")

        commit = TurnCommit(
            execution_id=1,
            history_delta=(event("a", 2),),
            orchestrator_items=(again,),
            worker_items=(activity("a"),),
            metadata=ExecutionMetadata(status=Status.RUNNING, output="null"),
            kv_changes=(KvClearAll(),),
        )
        await store.provider.ack_orchestration_item(locked.lock_token, commit)

        info = await store.admin.get_instance_info("a")
        listed = await store.admin.list_instances(
            InstanceQuery(statuses=frozenset({Status.RUNNING}))
        )
        assert (info.status, info.output, info.completed_at_ms) == (Status.RUNNING, "null", None)
        assert [each.instance_id for each in listed.instances] == ["a"]
        assert await store.reader.read("a") == [started("a"), event("a", 2)]
        assert await store.reader.get_kv_all_values("a") == {}
        fetched = await take(store, "a")
        assert bodies(fetched) == [again.body]
        assert (await take_work(store)).identity.instance_id == "a"

    async def test_state_of_an_ended_execution_is_no_longer_a_change(self, store: Store) -> None:
        value = KvSet(key="k", value="v", updated_at_ms=1)
        await create(store, "a", kv_changes=(value,))
        running = await store.admin.export_instance("a")

        await finish(store, "a", Status.CONTINUED_AS_NEW)

        ended = await store.admin.export_instance("a")
        entry = KvEntry(value="v", updated_at_ms=1)
        assert (running.kv_store, running.kv_delta) == ({}, {"k": entry})
        assert (ended.kv_store, ended.kv_delta) == ({"k": entry}, {})

    async def test_metadata_overwrites_name_and_version(self, store: Store) -> None:
        await create(store, "a", version="1.0.0")

        await turn(store, "a", metadata=ExecutionMetadata(name="Other", version="2.0.0"))

        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        assert (fetched.item.name, fetched.item.version) == ("Other", "2.0.0")
