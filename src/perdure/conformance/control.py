"""Verbs of operators on an instance: suspend, resume, and take its lock."""

from __future__ import annotations

from typing import Final

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    NAME,
    activity,
    bodies,
    completion,
    create,
    enqueue,
    event,
    fetch,
    finish,
    raised,
    start,
    take,
    take_work,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.key_value import put
from perdure.conformance.requires import requires
from perdure.errors import InstanceFinished, LockLost, NotFound
from perdure.model.failures import Block, BlockReason
from perdure.model.status import Status
from perdure.providers.records import ExecutionMetadata, TurnCommit

BLOCK: Final = Block(
    reason=BlockReason.NONDETERMINISM,
    message="step 3 differs",
    detail="a report",
    since_ms=17,
    code="abc",
)


async def status(store: Store, instance: str) -> Status:
    return (await store.admin.get_instance_info(instance)).status


async def ready(store: Store, instance: str) -> None:
    """A running instance with a message waiting."""
    await create(store, instance)
    await enqueue(store, raised(instance))


@checks
@requires("admin")
class TestSuspending:
    verbs = ("suspend_instance", "resume_instance")

    async def test_a_suspended_instance_is_not_handed_out(self, store: Store) -> None:
        await ready(store, "held")
        await ready(store, "other")

        await store.admin.suspend_instance("held")

        assert await status(store, "held") is Status.PAUSED
        await take(store, "other")
        assert await fetch(store) is None

    async def test_its_messages_wait_for_it_to_be_resumed(self, store: Store) -> None:
        await create(store, "x", worker_items=(activity("x"),))
        await store.admin.suspend_instance("x")
        work = await take_work(store)
        await store.provider.ack_work_item(work.lock_token, completion("x"))
        await enqueue(store, raised("x"))
        await store.advance(3_600_000)
        assert await fetch(store) is None

        await store.admin.resume_instance("x")

        assert await status(store, "x") is Status.RUNNING
        assert bodies(await take(store, "x")) == [completion("x").body, raised("x").body]

    async def test_suspending_takes_the_lock_away(self, store: Store) -> None:
        await ready(store, "x")
        held = await take(store, "x")

        await store.admin.suspend_instance("x")

        commit = TurnCommit(execution_id=1, history_delta=(event("x", 2),))
        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(held.lock_token, commit)
        with pytest.raises(LockLost):
            await store.provider.renew_orchestration_item_lock(held.lock_token, 5_000)
        with pytest.raises(LockLost):
            await store.provider.abandon_orchestration_item(held.lock_token)
        assert len(await store.reader.read("x")) == 1
        await store.admin.resume_instance("x")
        assert len((await take(store, "x")).item.messages) == 1

    @requires("hot_path")
    async def test_suspending_takes_a_kept_lock_away(self, store: Store) -> None:
        await create(store, "x")
        held = await turn(
            store, "x", owner="w", history_delta=(event("x", 2),), keep_lock_ms=60_000
        )

        await store.admin.suspend_instance("x")
        await enqueue(store, raised("x"))

        assert await fetch(store, owner="w") is None
        with pytest.raises(LockLost):
            await store.provider.renew_orchestration_item_lock(held.lock_token, 5_000)

    async def test_a_queued_start_can_be_suspended(self, store: Store) -> None:
        await enqueue(store, start("x"))

        await store.admin.suspend_instance("x")

        assert await status(store, "x") is Status.PAUSED
        assert await fetch(store) is None
        await store.admin.resume_instance("x")
        assert await status(store, "x") is Status.PENDING
        await take(store, "x")

    async def test_repeating_it_changes_nothing(self, store: Store) -> None:
        await ready(store, "x")

        for _ in range(2):
            await store.admin.suspend_instance("x")
        for _ in range(2):
            await store.admin.resume_instance("x")

        assert (await take(store, "x")).attempt_count == 1

    async def test_only_a_known_and_unfinished_instance_is_held(self, store: Store) -> None:
        await create(store, "ended")
        await finish(store, "ended")

        for call in (store.admin.suspend_instance, store.admin.resume_instance):
            with pytest.raises(NotFound):
                await call("unknown")
            with pytest.raises(InstanceFinished):
                await call("ended")

    async def test_resuming_starts_the_attempts_again(self, store: Store) -> None:
        await ready(store, "x")
        for _ in range(4):
            fetched = await take(store, "x")
            await store.provider.abandon_orchestration_item(fetched.lock_token)

        await store.admin.resume_instance("x")

        assert (await take(store, "x")).attempt_count == 1


@checks
@requires("admin")
class TestBlocking:
    verbs = ("abandon_orchestration_item", "resume_instance")

    async def test_a_blocked_instance_shows_why(self, store: Store) -> None:
        await ready(store, "x")
        held = await take(store, "x")

        await store.provider.abandon_orchestration_item(held.lock_token, block=BLOCK)

        info = await store.admin.get_instance_info("x")
        assert (info.status, info.block) == (Status.BLOCKED, BLOCK)
        assert await store.admin.list_instances_by_status(Status.BLOCKED) == ["x"]

    async def test_an_instance_without_messages_can_be_blocked(self, store: Store) -> None:
        await create(store, "x")
        held = await store.provider.admin.lock_instance("x", LOCK_MS)

        await store.provider.abandon_orchestration_item(held.lock_token, block=BLOCK)

        info = await store.admin.get_instance_info("x")
        assert (info.status, info.block) == (Status.BLOCKED, BLOCK)

    async def test_its_messages_and_history_are_intact(self, store: Store) -> None:
        await create(store, "x", history_delta=(event("x", 2),))
        await enqueue(store, raised("x"))
        held = await take(store, "x")

        await store.provider.abandon_orchestration_item(held.lock_token, 5_000, block=BLOCK)
        assert await fetch(store) is None
        await store.advance(5_000)

        fetched = await take(store, "x")
        assert (len(fetched.item.history), bodies(fetched)) == (2, [raised("x").body])

    async def test_the_next_turn_clears_the_block(self, store: Store) -> None:
        await ready(store, "x")
        held = await take(store, "x")
        await store.provider.abandon_orchestration_item(held.lock_token, block=BLOCK)

        await turn(store, "x", poke=False)

        info = await store.admin.get_instance_info("x")
        assert (info.status, info.block) == (Status.RUNNING, None)

    async def test_a_later_abandon_without_a_block_leaves_it(self, store: Store) -> None:
        await ready(store, "x")
        held = await take(store, "x")
        await store.provider.abandon_orchestration_item(held.lock_token, block=BLOCK)

        again = await take(store, "x")
        await store.provider.abandon_orchestration_item(again.lock_token)

        assert await status(store, "x") is Status.BLOCKED

    async def test_resuming_clears_the_block_and_its_delay(self, store: Store) -> None:
        await ready(store, "x")
        held = await take(store, "x")
        await store.provider.abandon_orchestration_item(held.lock_token, 3_600_000, block=BLOCK)
        assert await fetch(store) is None

        await store.admin.resume_instance("x")

        info = await store.admin.get_instance_info("x")
        assert (info.status, info.block) == (Status.RUNNING, None)
        assert (await store.admin.export_instance("x")).block is None
        assert (await take(store, "x")).attempt_count == 1

    async def test_a_paused_instance_stays_so_when_its_delay_has_ended(self, store: Store) -> None:
        await ready(store, "x")
        held = await take(store, "x")
        await store.provider.abandon_orchestration_item(held.lock_token, LOCK_MS)
        await store.admin.suspend_instance("x")

        await store.advance(2 * LOCK_MS)

        assert await fetch(store) is None
        await store.admin.resume_instance("x")
        await take(store, "x")

    async def test_a_start_that_cannot_run_is_blocked_too(self, store: Store) -> None:
        await enqueue(store, start("x"))
        held = await take(store, "x")

        await store.provider.abandon_orchestration_item(held.lock_token, block=BLOCK)

        info = await store.admin.get_instance_info("x")
        assert (info.status, info.block) == (Status.BLOCKED, BLOCK)

    async def test_an_ended_instance_is_not_shown_as_blocked(self, store: Store) -> None:
        await create(store, "x")
        await finish(store, "x")
        await enqueue(store, raised("x"))
        held = await take(store, "x")

        await store.provider.abandon_orchestration_item(held.lock_token, block=BLOCK)

        assert await status(store, "x") is Status.COMPLETED


@checks
@requires("admin")
class TestTakingTheLock:
    verbs = ("lock_instance",)

    async def test_it_gives_history_and_state_but_no_messages(self, store: Store) -> None:
        await create(store, "x", history_delta=(event("x", 2),), kv_changes=(put("k", "v"),))
        await finish(store, "x")
        await enqueue(store, raised("x"))

        locked = await store.admin.lock_instance("x", 5_000)

        assert (locked.item.instance_id, locked.item.messages) == ("x", ())
        assert (locked.item.name, locked.item.version) == ("TestOrch", "1.0.0")
        assert [record.event_id for record in locked.item.history] == [1, 2]
        assert locked.item.kv_snapshot["k"].value == "v"
        assert await fetch(store) is None

    async def test_a_previous_holder_has_lost_its_lock(self, store: Store) -> None:
        await ready(store, "x")
        held = await take(store, "x")

        locked = await store.admin.lock_instance("x", 5_000)

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                held.lock_token, TurnCommit(execution_id=1, history_delta=(event("x", 2),))
            )
        await store.provider.ack_orchestration_item(
            locked.lock_token, TurnCommit(execution_id=1, history_delta=(event("x", 2),))
        )
        assert len(await store.reader.read("x")) == 2

    async def test_its_turn_consumes_no_messages(self, store: Store) -> None:
        await ready(store, "x")
        await take(store, "x")
        locked = await store.admin.lock_instance("x", 5_000)

        await store.provider.ack_orchestration_item(
            locked.lock_token,
            TurnCommit(execution_id=1, metadata=ExecutionMetadata(status=Status.TERMINATED)),
        )

        assert await status(store, "x") is Status.TERMINATED
        assert len((await take(store, "x")).item.messages) == 1

    @pytest.mark.parametrize("has_more", [False, True])
    async def test_the_end_of_an_instance_ends_its_suspension(
        self, store: Store, has_more: bool
    ) -> None:
        await create(store, "x")
        if has_more:
            await enqueue(store, raised("x"))
        await store.admin.suspend_instance("x")
        locked = await store.admin.lock_instance("x", 5_000)

        await store.provider.ack_orchestration_item(
            locked.lock_token,
            TurnCommit(execution_id=1, metadata=ExecutionMetadata(status=Status.TERMINATED)),
        )

        assert await status(store, "x") is Status.TERMINATED
        assert (await fetch(store) is not None) is has_more
        assert not (await store.admin.export_instance("x")).suspended

    async def test_a_turn_of_a_suspended_instance_leaves_it_suspended(self, store: Store) -> None:
        await ready(store, "x")
        await store.admin.suspend_instance("x")
        locked = await store.admin.lock_instance("x", 5_000)

        await store.provider.ack_orchestration_item(
            locked.lock_token, TurnCommit(execution_id=1, history_delta=(event("x", 2),))
        )

        assert await status(store, "x") is Status.PAUSED
        assert await fetch(store) is None

    async def test_holds_and_delays_do_not_keep_an_operator_out(self, store: Store) -> None:
        await ready(store, "x")
        held = await take(store, "x")
        await store.provider.abandon_orchestration_item(held.lock_token, 3_600_000, block=BLOCK)
        await store.admin.suspend_instance("x")

        locked = await store.admin.lock_instance("x", 5_000)
        await store.provider.abandon_orchestration_item(locked.lock_token)

        assert await status(store, "x") is Status.PAUSED
        await store.admin.resume_instance("x")
        assert len((await take(store, "x")).item.messages) == 1

    async def test_its_lock_expires_like_any_other(self, store: Store) -> None:
        await ready(store, "x")
        locked = await store.admin.lock_instance("x", 1_000)
        await store.advance(1_000)

        await take(store, "x")

        with pytest.raises(LockLost):
            await store.provider.abandon_orchestration_item(locked.lock_token)

    async def test_there_must_be_an_instance(self, store: Store) -> None:
        await enqueue(store, raised("early"))

        for instance in ("early", "unknown"):
            with pytest.raises(NotFound):
                await store.admin.lock_instance(instance, 5_000)

    @pytest.mark.parametrize("delay_ms", [0, 3_600_000])
    async def test_an_instance_can_end_before_it_begins(self, store: Store, delay_ms: int) -> None:
        queued = start("x", parent="p")
        await store.provider.enqueue_for_orchestrator(queued, delay_ms=delay_ms)
        locked = await store.admin.lock_instance("x", 5_000)
        assert (locked.item.name, locked.item.parent_instance_id) == (NAME, "p")
        assert locked.item.execution_id == 1
        assert not locked.item.history
        assert not locked.item.messages
        metadata = ExecutionMetadata(
            name="Flow", version="1.0.0", parent_instance_id="p", status=Status.TERMINATED
        )

        await store.provider.ack_orchestration_item(
            locked.lock_token,
            TurnCommit(execution_id=1, history_delta=(event("x", 1),), metadata=metadata),
        )

        info = await store.admin.get_instance_info("x")
        assert (info.status, info.name, info.execution_id) == (Status.TERMINATED, "Flow", 1)
        assert info.parent_instance_id == "p"
        await store.advance(3_600_000)
        assert len((await take(store, "x")).item.messages) == 1

    async def test_a_start_that_was_locked_and_abandoned_begins_as_it_would_have(
        self, store: Store
    ) -> None:
        await enqueue(store, start("x"))
        locked = await store.admin.lock_instance("x", 5_000)
        assert await fetch(store) is None

        await store.provider.abandon_orchestration_item(locked.lock_token)

        assert await status(store, "x") is Status.PENDING
        assert (await take(store, "x")).attempt_count == 1
