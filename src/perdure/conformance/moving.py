"""Instances travel between stores with everything that belongs to them, work in flight included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    NAME,
    OWNER,
    VERSION,
    activity,
    bodies,
    completion,
    create,
    enqueue,
    event,
    fetch,
    fetch_work,
    finish,
    next_execution,
    raised,
    start,
    started,
    take,
    take_work,
    timer,
    turn,
)
from perdure.conformance.harness import Store, checks, outcomes
from perdure.conformance.key_value import clear, put, values
from perdure.conformance.observation import comparable
from perdure.conformance.requires import requires
from perdure.conformance.sessions import worker
from perdure.errors import AlreadyExists, InvalidValue, LockLost, NotFound, StoreMoved
from perdure.model.failures import Block, BlockReason
from perdure.model.status import Status
from perdure.providers.records import (
    CustomStatusChange,
    ExecutionMetadata,
    KvClearAll,
    TagFilter,
    TurnCommit,
    WorkerInfo,
)
from perdure.providers.sqlite.memory import InMemoryProvider

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perdure.providers.contract import Provider


async def busy(store: Store, instance: str) -> None:
    """An instance with something of every kind: two executions, state, queues, a held lock."""
    await create(
        store,
        instance,
        parent="parent",
        framework_version=(1, 2, 3),
        custom_status=CustomStatusChange(value='"half"'),
        kv_changes=(put("old", "1", 11), put("hidden", "1", 12)),
    )
    await store.advance(1_000)
    await next_execution(
        store,
        instance,
        2,
        framework_version=(2, 0, 0),
        history_delta=(event(instance, 2, 2, data="ü"), event(instance, 3, 2)),
        kv_changes=(put("new", "2", 13), clear("hidden")),
        worker_items=(
            activity(instance, 2, 2, tag="gpu"),
            activity(instance, 2, 3, session="s"),
            activity(instance, 2, 4, visible_at_ms=await store.now_ms() + 50_000),
        ),
        orchestrator_items=(timer(instance, await store.now_ms() + 60_000, 2, 5),),
    )
    work = await take_work(store, tags=TagFilter.any(), session=worker("w"))
    await store.provider.renew_work_item_lock(work.lock_token, 60_000, heartbeat='"70 %"')
    await enqueue(store, raised(instance, data="first"))
    held = await take(store, instance)
    block = Block(reason=BlockReason.POISON, message="held up", since_ms=5)
    await store.provider.abandon_orchestration_item(held.lock_token, 20_000, block=block)
    await enqueue(store, raised(instance, data="second"))


async def open_again(store: Store) -> Provider:
    """A fresh handle: beside the others, or instead of them where there can be only one."""
    if store.capabilities.several_handles:
        return await store.second()
    await store.reopen()
    return store.provider


@checks
@requires("admin")
class TestExport:
    verbs = ("export_instance",)

    async def test_it_holds_everything_about_the_instance(self, store: Store) -> None:
        await busy(store, "x")

        snapshot = await store.admin.export_instance("x")

        assert (snapshot.instance_id, snapshot.name, snapshot.version) == ("x", "TestOrch", "1.0.0")
        assert (snapshot.execution_id, snapshot.parent_instance_id) == (2, "parent")
        assert (snapshot.custom_status, snapshot.custom_status_version) == ('"half"', 1)
        first, second = snapshot.executions
        assert (first.status, second.status) == (Status.CONTINUED_AS_NEW, Status.RUNNING)
        assert (first.framework_version, second.framework_version) == ((1, 2, 3), (2, 0, 0))
        assert [record.event_id for record in second.history] == [1, 2, 3]
        assert sorted(snapshot.kv_store) == ["hidden", "old"]
        assert snapshot.kv_delta["hidden"] is None
        assert snapshot.kv_delta["new"] is not None
        assert snapshot.block is not None
        assert snapshot.not_before_ms is not None
        assert not snapshot.suspended

    async def test_it_holds_the_queues_with_their_times_and_attempts(self, store: Store) -> None:
        await busy(store, "x")

        snapshot = await store.admin.export_instance("x")

        assert [seen.message.kind for seen in snapshot.messages] == [
            "TimerFired",
            "ExternalRaised",
            "ExternalRaised",
        ]
        assert [seen.attempt_count for seen in snapshot.messages] == [0, 1, 0]
        assert [seen.message.identity.activity_id for seen in snapshot.work] == [2, 3, 4]
        assert [seen.attempt_count for seen in snapshot.work] == [1, 0, 0]
        assert snapshot.work[0].heartbeat == '"70 %"'
        assert [seen.message.tag for seen in snapshot.work] == ["gpu", None, None]
        assert [seen.message.session_id for seen in snapshot.work] == [None, "s", None]

    async def test_a_queued_start_is_exported_too(self, store: Store) -> None:
        await enqueue(store, start("x"))

        snapshot = await store.admin.export_instance("x")

        assert (snapshot.name, snapshot.executions) == (None, ())
        assert [seen.message.start is not None for seen in snapshot.messages] == [True]

    async def test_an_unknown_instance_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFound):
            await store.admin.export_instance("unknown")

    async def test_a_snapshot_is_one_document(self, store: Store) -> None:
        await busy(store, "x")
        snapshot = await store.admin.export_instance("x")

        text = msgspec.json.encode(snapshot)

        assert msgspec.json.decode(text, type=type(snapshot)) == snapshot


@checks
@requires("admin")
class TestImport:
    verbs = ("import_instance", "export_instance")

    async def test_what_was_exported_comes_back_the_same(self, store: Store) -> None:
        await busy(store, "x")
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)

        await store.admin.import_instance(snapshot)

        assert comparable(await store.admin.export_instance("x")) == comparable(snapshot)
        assert await values(store, "x") == {"new": "2", "old": "1"}

    @pytest.mark.parametrize("part", ["name", "version", "parent_instance_id"])
    async def test_a_name_that_is_none_is_refused(self, store: Store, part: str) -> None:
        await busy(store, "x")
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)

        with pytest.raises(InvalidValue):
            await store.admin.import_instance(msgspec.structs.replace(snapshot, **{part: "a\0b"}))

        assert await store.admin.count_instances() == 0

    @pytest.mark.parametrize("part", ["messages", "work"])
    async def test_a_snapshot_with_parts_of_another_instance_is_refused(
        self, store: Store, part: str
    ) -> None:
        for name in ("x", "y"):
            await create(store, name, worker_items=(activity(name),))
            await enqueue(store, raised(name))
        snapshot = await store.admin.export_instance("x")
        foreign = getattr(await store.admin.export_instance("y"), part)
        for name in ("x", "y"):
            await store.admin.delete_instances_atomic([name], force=True)

        with pytest.raises(InvalidValue):
            await store.admin.import_instance(msgspec.structs.replace(snapshot, **{part: foreign}))

        assert await store.admin.count_instances() == 0
        assert await fetch(store) is None
        assert await fetch_work(store) is None

    @pytest.mark.parametrize("part", ["messages", "work"])
    async def test_a_snapshot_with_a_bad_item_is_refused(self, store: Store, part: str) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        await enqueue(store, raised("x"))
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)
        (queued,) = getattr(snapshot, part)
        # Only too long: it says the same as its envelope.
        body = queued.message.body + " " * 4_000_000
        item = msgspec.structs.replace(queued.message, body=body)
        items = (msgspec.structs.replace(queued, message=item),)

        with pytest.raises(InvalidValue):
            await store.admin.import_instance(msgspec.structs.replace(snapshot, **{part: items}))

        assert await store.admin.count_instances() == 0
        assert await fetch_work(store) is None

    async def test_an_instance_survives_the_way_to_another_store_and_back(
        self, store: Store
    ) -> None:
        await busy(store, "x")
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)

        async with InMemoryProvider(clock=store.clock) as elsewhere:
            await elsewhere.admin.import_instance(snapshot)
            returned = await elsewhere.admin.export_instance("x")
        await store.admin.import_instance(returned)

        assert comparable(await store.admin.export_instance("x")) == comparable(snapshot)

    async def test_it_goes_on_where_it_was(self, store: Store) -> None:
        await busy(store, "x")
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)
        await store.admin.import_instance(snapshot)
        assert await fetch(store) is None, "its back-off travels with it"

        await store.advance(20_000)
        fetched = await take(store, "x")

        assert bodies(fetched) == [raised("x", data=text).body for text in ("first", "second")]
        assert fetched.attempt_count == 2
        assert (fetched.item.execution_id, len(fetched.item.history)) == (2, 3)
        assert {key: entry.value for key, entry in fetched.item.kv_snapshot.items()} == {
            "hidden": "1",
            "old": "1",
        }

    async def test_work_in_flight_is_free_again_and_its_old_holder_is_not(
        self, store: Store
    ) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        held = await take_work(store)
        snapshot = await store.admin.export_instance("x")

        await store.admin.import_instance(snapshot, replace=True)

        with pytest.raises(LockLost):
            await store.provider.ack_work_item(held.lock_token, completion("x"))
        assert (await take_work(store)).attempt_count == 2

    async def test_a_turn_in_flight_is_free_again_and_its_old_holder_is_not(
        self, store: Store
    ) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))
        held = await take(store, "x")
        snapshot = await store.admin.export_instance("x")

        await store.admin.import_instance(snapshot, replace=True)

        with pytest.raises(LockLost):
            await store.provider.renew_orchestration_item_lock(held.lock_token, 5_000)
        assert (await take(store, "x")).attempt_count == 2

    async def test_an_existing_instance_is_only_replaced_on_demand(self, store: Store) -> None:
        await create(store, "x", kv_changes=(put("k", "old"),))
        snapshot = await store.admin.export_instance("x")
        await turn(store, "x", history_delta=(event("x", 2),), kv_changes=(KvClearAll(),))
        await enqueue(store, raised("x"))

        with pytest.raises(AlreadyExists):
            await store.admin.import_instance(snapshot)
        assert len(await store.reader.read("x")) == 2

        await store.admin.import_instance(snapshot, replace=True)
        assert len(await store.reader.read("x")) == 1
        assert await values(store, "x") == {"k": "old"}
        assert await fetch(store) is None

    async def test_a_queued_start_counts_as_existing(self, store: Store) -> None:
        await create(store, "x")
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)
        await enqueue(store, start("x"))

        with pytest.raises(AlreadyExists):
            await store.admin.import_instance(snapshot)

        assert len(await store.admin.list_messages("x")) == 1

    @pytest.mark.parametrize("part", ["start", "parent", "message", "kind", "timer", "work"])
    async def test_a_body_that_is_not_what_its_envelope_says_is_refused(
        self, store: Store, part: str
    ) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        await enqueue(store, raised("x"), timer("x", await store.now_ms() + 60_000))
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)
        (queued, timed), (item,) = snapshot.messages, snapshot.work
        genuine, true_start = queued.message, start("x")
        replace = msgspec.structs.replace
        false = {
            "start": replace(true_start, body=start("victim").body),
            "parent": replace(true_start, body=start("x", parent="victim").body),
            "message": replace(genuine, body=raised("victim").body),
            "kind": replace(genuine, body=completion("x").body),
            "timer": replace(timed.message, body=timer("x", 1, 1, 9).body),
        }
        if part == "work":
            bad = replace(item.message, body=activity("victim").body)
            forged = replace(snapshot, work=(replace(item, message=bad),))
        else:
            forged = replace(snapshot, messages=(replace(queued, message=false[part]),))

        with pytest.raises(InvalidValue):
            await store.admin.import_instance(forged)

        with pytest.raises(NotFound):
            await store.admin.export_instance("x")

    @pytest.mark.parametrize("time_ms", [2**60, -1])
    async def test_a_time_that_no_calendar_has_is_refused(self, store: Store, time_ms: int) -> None:
        await create(store, "x")
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)

        for field in ("created_at_ms", "updated_at_ms", "not_before_ms"):
            forged = msgspec.structs.replace(snapshot, **{field: time_ms})
            with pytest.raises(InvalidValue, match=field):
                await store.admin.import_instance(forged)

    async def test_others_keep_their_place_in_the_queue(self, store: Store) -> None:
        for instance in ("x", "y"):
            await create(store, instance)
        await enqueue(store, raised("x"))
        await store.advance(1_000)
        await enqueue(store, raised("y"))
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)

        await store.admin.import_instance(snapshot)

        await take(store, "x")
        await take(store, "y")

    async def test_a_suspended_instance_stays_suspended(self, store: Store) -> None:
        await create(store, "x")
        await enqueue(store, raised("x"))
        await store.admin.suspend_instance("x")
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instances_atomic(["x"], force=True)

        await store.admin.import_instance(snapshot)

        assert (await store.admin.get_instance_info("x")).status is Status.PAUSED
        assert await fetch(store) is None

    async def test_an_ended_instance_is_still_ended(self, store: Store) -> None:
        await create(store, "x")
        await finish(store, "x", Status.FAILED, output='"why"')
        before = await store.admin.get_instance_info("x")
        snapshot = await store.admin.export_instance("x")
        await store.admin.delete_instance("x")

        await store.admin.import_instance(snapshot)

        assert await store.admin.get_instance_info("x") == before


@checks
@requires("admin")
class TestMovedStores:
    verbs = ("mark_moved", "get_store_info")

    async def test_a_moved_store_is_not_opened_again(self, store: Store) -> None:
        await create(store, "x")
        await store.admin.mark_moved("postgresql://elsewhere/db")

        with pytest.raises(StoreMoved, match="elsewhere"):
            await open_again(store)

    async def test_the_handle_that_marked_it_can_still_read(self, store: Store) -> None:
        await create(store, "x")

        await store.admin.mark_moved("postgresql://elsewhere/db")

        assert (await store.admin.get_store_info()).moved_to == "postgresql://elsewhere/db"
        assert len(await store.reader.read("x")) == 1
        assert (await store.admin.export_instance("x")).instance_id == "x"

    async def test_the_mark_can_be_taken_back(self, store: Store) -> None:
        await create(store, "x")
        await store.admin.mark_moved("postgresql://elsewhere/db")

        await store.admin.mark_moved(None)
        provider = await open_again(store)

        assert (await store.admin.get_store_info()).moved_to is None
        assert len(await provider.read("x")) == 1


ELSEWHERE = "postgresql://elsewhere/db"


async def _every_write(store: Store) -> dict[str, Callable[[], Awaitable[object]]]:
    """Calls of verbs that write, each of which would succeed on a store that was not moved."""
    provider, admin = store.provider, store.provider.admin
    for name in ("held", "given back", "kept", "waiting"):
        await create(store, name, worker_items=(activity(name),))
    await create(store, "ended")
    await finish(store, "ended")
    snapshot = await admin.export_instance("ended")
    tokens: dict[str, str] = {}
    for name in ("held", "given back", "kept"):
        await enqueue(store, raised(name))
        tokens[name] = (await take(store, name)).lock_token
    await enqueue(store, raised("waiting"))
    done, abandoned, renewed = [(await take_work(store)).lock_token for _ in range(3)]
    commit = TurnCommit(execution_id=1, history_delta=(event("held", 2),))
    first = TurnCommit(
        execution_id=1,
        history_delta=(started("new"),),
        metadata=ExecutionMetadata(name=NAME, version=VERSION),
    )
    token = provider.new_lock_token()
    worker_info = WorkerInfo(
        worker_id="w", host="h", process_id=1, started_at_ms=0, framework_version="0.1.0"
    )
    return {
        "fetch_orchestration_item": lambda: fetch(store),
        "ack_orchestration_item": lambda: provider.ack_orchestration_item(tokens["held"], commit),
        "abandon_orchestration_item": lambda: provider.abandon_orchestration_item(
            tokens["given back"]
        ),
        "renew_orchestration_item_lock": lambda: provider.renew_orchestration_item_lock(
            tokens["kept"], LOCK_MS
        ),
        "start_orchestration_item": lambda: provider.start_orchestration_item(
            start("new"), first, token, OWNER
        ),
        "append_with_execution": lambda: provider.append_with_execution(
            "waiting", 1, [event("waiting", 2)]
        ),
        "enqueue_for_worker": lambda: provider.enqueue_for_worker(activity("x", activity_id=7)),
        "fetch_work_item": lambda: fetch_work(store),
        "ack_work_item": lambda: provider.ack_work_item(done, completion("held")),
        "abandon_work_item": lambda: provider.abandon_work_item(abandoned),
        "renew_work_item_lock": lambda: provider.renew_work_item_lock(renewed, LOCK_MS),
        "enqueue_for_orchestrator": lambda: enqueue(store, raised("waiting", data="late")),
        "enqueue a start": lambda: enqueue(store, start("late")),
        "enqueue_many_for_orchestrator": lambda: provider.enqueue_many_for_orchestrator(
            [raised("waiting", data="later"), start("later")]
        ),
        "suspend_instance": lambda: admin.suspend_instance("waiting"),
        "lock_instance": lambda: admin.lock_instance("waiting", LOCK_MS),
        "delete_instances_atomic": lambda: admin.delete_instances_atomic(["ended"], force=False),
        "register_worker": lambda: admin.register_worker(worker_info, 1_000),
        "import_instance": lambda: admin.import_instance(snapshot, replace=True),
    }


@checks
@requires("admin")
class TestWritesAfterAMove:
    verbs = ("mark_moved",)

    async def test_a_handle_that_was_open_writes_nothing_any_more(self, store: Store) -> None:
        writes = await _every_write(store)
        before = await _content(store)

        await store.admin.mark_moved(ELSEWHERE)
        answers = {name: (await outcomes(write()))[0] for name, write in writes.items()}

        accepted = [name for name, each in answers.items() if not isinstance(each, StoreMoved)]
        assert not accepted, f"written after the move: {accepted}"
        assert all("elsewhere" in str(refused) for refused in answers.values())
        assert await _content(store) == before

    async def test_writes_pass_again_when_the_mark_is_taken_back(self, store: Store) -> None:
        writes = await _every_write(store)
        await store.admin.mark_moved(ELSEWHERE)
        await outcomes(*(write() for write in writes.values()))

        await store.admin.mark_moved(None)

        for name, write in writes.items():
            assert not isinstance((await outcomes(write()))[0], Exception), name

    async def test_a_write_beside_the_mark_is_refused_or_in_the_copy(self, store: Store) -> None:
        await create(store, "x")
        senders = [
            store.provider.enqueue_for_orchestrator(raised("x", data=number))
            for number in range(20)
        ]

        *sent, marked = await outcomes(*senders, store.admin.mark_moved(ELSEWHERE))
        copied = await store.admin.export_instance("x")
        late = await outcomes(store.provider.enqueue_for_orchestrator(raised("x", data="late")))

        assert marked is None
        assert isinstance(late[0], StoreMoved)
        assert all(isinstance(answer, (bool, StoreMoved)) for answer in sent), sent
        assert len(copied.messages) == sum(answer is True for answer in sent)


async def _content(store: Store) -> list[object]:
    ids = [info.instance_id for info in (await store.admin.list_instances()).instances]
    return [comparable(await store.admin.export_instance(each)) for each in ids]
