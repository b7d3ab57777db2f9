"""Deleting instances: what may be deleted, what goes with it, what a late holder can still do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perdure.conformance.factories import (
    activity,
    bodies,
    completion,
    continue_as_new,
    create,
    enqueue,
    enqueue_work,
    event,
    fetch,
    fetch_work,
    finish,
    raised,
    start,
    take,
    take_work,
    turn,
)
from perdure.conformance.harness import checks
from perdure.conformance.requires import requires
from perdure.errors import InstanceStillRunning, LockLost, NotARoot, NotFound, TreeChanged
from perdure.model.status import Status
from perdure.providers.records import ExecutionMetadata, TurnCommit

if TYPE_CHECKING:
    from perdure.conformance.harness import Store


async def family(store: Store) -> None:
    """A finished root with two children, and a grandchild under the first."""
    for instance, parent in (
        ("root", None),
        ("child-1", "root"),
        ("child-2", "root"),
        ("grandchild", "child-1"),
    ):
        await create(store, instance, parent=parent)
        await finish(store, instance)


async def exists(store: Store, *instances: str) -> list[bool]:
    found: list[bool] = []
    for instance in instances:
        try:
            await store.admin.get_instance_info(instance)
        except NotFound:
            found.append(False)
        else:
            found.append(True)
    return found


@checks
@requires("admin")
class TestDeletion:
    """Deletion removes all that belongs to an instance, or nothing."""

    verbs = ("delete_instance", "delete_instances_atomic")

    async def test_ended_instances_are_deleted_without_force(self, store: Store) -> None:
        for status in (Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.TERMINATED):
            await create(store, status)
            await finish(store, status, status)

            result = await store.admin.delete_instance(status)

            assert (result.instances, result.executions, result.events) == (1, 1, 1)
            assert await exists(store, status) == [False]

    async def test_a_running_instance_is_deleted_only_by_force(self, store: Store) -> None:
        await create(store, "busy")

        with pytest.raises(InstanceStillRunning):
            await store.admin.delete_instance("busy")

        assert await exists(store, "busy") == [True]
        await store.admin.delete_instance("busy", force=True)
        assert await exists(store, "busy") == [False]

    async def test_deleting_an_unknown_instance_says_not_found(self, store: Store) -> None:
        await enqueue(store, raised("early"))
        for force in (False, True):
            with pytest.raises(NotFound):
                await store.admin.delete_instances_atomic(["early"], force=force)
            with pytest.raises(NotFound):
                await store.admin.delete_instance("unknown", force=force)
            with pytest.raises(NotFound):
                await store.admin.delete_instances_atomic(["unknown"], force=force)

    async def test_a_deleted_id_starts_again_from_nothing(self, store: Store) -> None:
        await create(store, "again", worker_items=(activity("again"),))
        await finish(store, "again", history_delta=(event("again", 2),))
        await enqueue(store, raised("again"))
        await take(store, "again")

        result = await store.admin.delete_instance("again")

        assert result.messages == 2
        assert await fetch_work(store) is None
        assert await fetch(store) is None
        await enqueue(store, start("again", "Other", "2.0.0"))
        fetched = await take(store, "again")
        assert (fetched.item.name, fetched.item.version) == ("Other", "2.0.0")
        assert (fetched.item.execution_id, fetched.item.history) == (1, ())
        assert fetched.attempt_count == 1

    async def test_only_the_root_is_deleted_and_its_tree_with_it(self, store: Store) -> None:
        await family(store)

        for instance in ("child-1", "child-2", "grandchild"):
            for force in (False, True):
                with pytest.raises(NotARoot, match="root"):
                    await store.admin.delete_instance(instance, force=force)

        result = await store.admin.delete_instance("root")
        assert (result.instances, result.executions, result.events) == (4, 4, 4)
        gone = await exists(store, "root", "child-1", "child-2", "grandchild")
        assert gone == [False, False, False, False]

    async def test_a_holder_cannot_ack_after_a_forced_deletion(self, store: Store) -> None:
        await create(store, "held")
        await enqueue(store, raised("held"))
        held = await take(store, "held")
        await store.admin.delete_instance("held", force=True)

        commit = TurnCommit(
            execution_id=1,
            history_delta=(event("held", 2),),
            metadata=ExecutionMetadata(name="TestOrch", version="1.0.0"),
        )
        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(held.lock_token, commit)

        assert await exists(store, "held") == [False]
        assert await store.reader.read("held") == []

    async def test_several_ended_instances_are_deleted_at_once(self, store: Store) -> None:
        for instance in ("one", "two", "three"):
            await create(store, instance)
            await finish(store, instance, history_delta=(event(instance, 2),))

        result = await store.admin.delete_instances_atomic(["one", "two"])

        assert (result.instances, result.executions, result.events) == (2, 2, 4)
        assert await exists(store, "one", "two", "three") == [False, False, True]

    async def test_one_running_instance_saves_all_of_the_list(self, store: Store) -> None:
        await create(store, "ended")
        await finish(store, "ended")
        await create(store, "busy")

        for listed in (["ended", "busy"], ["busy", "ended"]):
            with pytest.raises(InstanceStillRunning):
                await store.admin.delete_instances_atomic(listed)
            assert await exists(store, "ended", "busy") == [True, True]

        result = await store.admin.delete_instances_atomic(["ended", "busy"], force=True)
        assert result.instances == 2
        assert await exists(store, "ended", "busy") == [False, False]

    async def test_a_child_that_is_not_listed_saves_its_parent(self, store: Store) -> None:
        await family(store)

        for force in (False, True):
            with pytest.raises(TreeChanged):
                await store.admin.delete_instances_atomic(
                    ["root", "child-1", "child-2"], force=force
                )

        everybody = ("root", "child-1", "child-2", "grandchild")
        assert await exists(store, *everybody) == [True, True, True, True]
        result = await store.admin.delete_instances_atomic(everybody)
        assert result.instances == 4

    async def test_a_stale_worker_cannot_reach_the_new_instance(self, store: Store) -> None:
        await create(store, "reborn", worker_items=(activity("reborn"),))
        stale = await take_work(store)
        await store.admin.delete_instance("reborn", force=True)
        await create(store, "reborn", worker_items=(activity("reborn", input="new"),))

        with pytest.raises(LockLost):
            await store.provider.ack_work_item(stale.lock_token, completion("reborn", result="old"))

        assert await fetch(store) is None
        fresh = await take_work(store)
        assert fresh.attempt_count == 1
        await store.provider.ack_work_item(fresh.lock_token, completion("reborn", result="new"))
        assert bodies(await take(store)) == [completion("reborn", result="new").body]

    async def test_a_duplicate_in_the_list_is_deleted_once(self, store: Store) -> None:
        await create(store, "twice")
        await finish(store, "twice")

        result = await store.admin.delete_instances_atomic(["twice", "twice"])

        assert result.instances == 1

    async def test_unknown_ids_beside_a_known_one_are_passed_over(self, store: Store) -> None:
        await create(store, "known")
        await finish(store, "known")

        result = await store.admin.delete_instances_atomic(["unknown", "known"])

        assert result.instances == 1
        assert await exists(store, "known") == [False]

    async def test_a_pending_start_is_deleted_only_by_force(self, store: Store) -> None:
        await enqueue(store, start("waiting"))

        with pytest.raises(InstanceStillRunning):
            await store.admin.delete_instance("waiting")

        result = await store.admin.delete_instance("waiting", force=True)
        assert result.messages == 1
        assert await fetch(store) is None
        assert await exists(store, "waiting") == [False]

    async def test_messages_of_others_survive_a_deletion(self, store: Store) -> None:
        await create(store, "gone")
        await finish(store, "gone")
        await create(store, "kept")
        await enqueue(store, raised("kept", data=1))
        await enqueue_work(store, activity("kept"))

        await store.admin.delete_instance("gone")

        assert bodies(await take(store, "kept")) == [raised("kept", data=1).body]
        assert (await take_work(store)).identity.instance_id == "kept"

    async def test_a_deletion_repeated_after_a_lost_answer_says_not_found(
        self, store: Store
    ) -> None:
        await create(store, "once")
        await finish(store, "once")
        await store.admin.delete_instance("once")

        with pytest.raises(NotFound):
            await store.admin.delete_instance("once")


@checks
@requires("admin")
class TestFamilies:
    """Parents and children, as administration sees them."""

    verbs = ("list_children", "get_parent_id", "get_instance_tree")

    async def test_children_are_direct_children_only(self, store: Store) -> None:
        await family(store)

        assert sorted(await store.admin.list_children("root")) == ["child-1", "child-2"]
        assert await store.admin.list_children("child-1") == ["grandchild"]
        assert await store.admin.list_children("grandchild") == []
        assert await store.admin.list_children("unknown") == []

    async def test_the_parent_is_known_and_a_root_has_none(self, store: Store) -> None:
        await family(store)

        assert await store.admin.get_parent_id("root") is None
        assert await store.admin.get_parent_id("grandchild") == "child-1"
        with pytest.raises(NotFound):
            await store.admin.get_parent_id("unknown")

    async def test_a_tree_lists_parents_before_their_children(self, store: Store) -> None:
        await family(store)

        tree = await store.admin.get_instance_tree("root")

        assert tree.root_id == tree.instance_ids[0] == "root"
        assert sorted(tree.instance_ids) == ["child-1", "child-2", "grandchild", "root"]
        assert tree.instance_ids.index("child-1") < tree.instance_ids.index("grandchild")
        leaf = await store.admin.get_instance_tree("child-2")
        assert (leaf.root_id, leaf.instance_ids) == ("child-2", ("child-2",))
        with pytest.raises(NotFound):
            await store.admin.get_instance_tree("unknown")

    async def test_children_come_oldest_first(self, store: Store) -> None:
        await create(store, "root")
        for child in ("z", "m", "a"):
            await store.advance(1_000)
            await create(store, child, parent="root")

        assert await store.admin.list_children("root") == ["z", "m", "a"]

    async def test_the_parent_never_changes_after_creation(self, store: Store) -> None:
        await create(store, "root")
        await create(store, "child", parent="root")

        await turn(
            store,
            "child",
            metadata=ExecutionMetadata(
                name="TestOrch", version="1.0.0", parent_instance_id="stranger"
            ),
        )

        assert await store.admin.get_parent_id("child") == "root"
        assert await store.admin.list_children("stranger") == []


@checks
@requires("admin")
class TestLifeBetweenExecutions:
    """An execution that continued as new has ended, its instance has not."""

    verbs = ("delete_instances_atomic",)

    async def test_an_instance_with_its_next_start_queued_is_alive(self, store: Store) -> None:
        await create(store, "x")
        await finish(
            store,
            "x",
            Status.CONTINUED_AS_NEW,
            orchestrator_items=(continue_as_new("x", 2),),
        )

        with pytest.raises(InstanceStillRunning):
            await store.admin.delete_instance("x")

        fetched = await take(store, "x")
        assert bodies(fetched) == [continue_as_new("x", 2).body]
        with pytest.raises(InstanceStillRunning):
            await store.admin.delete_instance("x")

    async def test_an_instance_whose_next_start_is_lost_can_be_deleted(self, store: Store) -> None:
        await create(store, "x")
        await finish(store, "x", Status.CONTINUED_AS_NEW)

        assert (await store.admin.delete_instance("x")).instances == 1

    async def test_a_suspended_or_blocked_instance_has_not_ended(self, store: Store) -> None:
        await create(store, "x")
        await store.admin.suspend_instance("x")

        with pytest.raises(InstanceStillRunning):
            await store.admin.delete_instance("x")

    async def test_what_was_held_is_not_held_under_the_same_id_again(self, store: Store) -> None:
        await create(store, "x")
        await store.admin.suspend_instance("x")
        await store.admin.delete_instance("x", force=True)

        await enqueue(store, start("x"))

        assert (await store.admin.get_instance_info("x")).status is Status.PENDING
        await take(store, "x")
