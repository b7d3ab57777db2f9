"""Everything that was answered is there after a restart: content, queues, locks and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perdure.conformance import observation
from perdure.conformance.factories import (
    LOCK_MS,
    OWNER,
    activity,
    bodies,
    completion,
    create,
    enqueue,
    enqueue_work,
    event,
    fetch,
    fetch_work,
    finish,
    mailbox,
    next_execution,
    raised,
    start,
    started,
    take,
    take_work,
    timer,
    turn,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.observation import difference
from perdure.conformance.requires import requires
from perdure.errors import LockLost
from perdure.limits import ORPHAN_GRACE_MS
from perdure.model.failures import Block, BlockReason
from perdure.model.status import Status
from perdure.providers.records import (
    Claim,
    CustomStatusChange,
    KvClear,
    KvSet,
    SessionFetch,
    TurnCommit,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


INSTANCES = ("family", "child", "pending", "parked", "blocked", "ended", "unknown")


async def fill(store: Store) -> None:
    """A store that holds something of every kind."""
    await enqueue(store, mailbox("unknown"))
    await store.advance(ORPHAN_GRACE_MS)
    assert await fetch(store) is None
    await create(
        store,
        "family",
        kv_changes=(KvSet(key="old", value="1", updated_at_ms=1),),
        orchestrator_items=(start("child", parent="family"),),
        framework_version=(1, 2, 3),
    )
    await turn(store, "child", poke=False, history_delta=(started("child"),))
    await next_execution(
        store,
        "family",
        2,
        kv_changes=(KvSet(key="new", value="2", updated_at_ms=2), KvClear(key="old")),
        custom_status=CustomStatusChange(value='"half"'),
        worker_items=(activity("family", 2, 2, tag="gpu"), activity("family", 2, 3)),
    )
    await store.provider.enqueue_for_orchestrator(start("pending"), 60_000)
    for name in ("parked", "blocked", "ended"):
        await create(store, name)
    await store.admin.suspend_instance("parked")
    await enqueue(store, raised("blocked"))
    held = await take(store, "blocked")
    block = Block(reason=BlockReason.UNKNOWN_HANDLER, message="no handler", code="abc")
    await store.provider.abandon_orchestration_item(held.lock_token, delay_ms=60_000, block=block)
    await finish(store, "ended", Status.FAILED, '"reason"')


async def look(store: Store, instances: Sequence[str] = INSTANCES) -> dict[str, Any]:
    """Everything that can be seen of the store and of these instances, as plain data."""
    admin, exact_times = store.admin, store.capabilities.injected_clock
    calls = observation.totals(admin) | observation.details(store.reader, admin, instances)
    return {
        name: observation.plain(await observation.look(call, exact_times=exact_times))
        for name, call in calls.items()
    }


@requires("durable")
@checks
class TestSurvivingARestart:
    verbs = ("open", "close", "ack_orchestration_item", "fetch_orchestration_item")

    async def test_all_that_can_be_seen_is_the_same(self, store: Store) -> None:
        await fill(store)
        before = await look(store)

        await store.reopen()

        assert difference(before, await look(store)) == ""

    async def test_a_lock_is_still_held_by_its_token(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")

        await store.reopen()

        assert await fetch(store) is None
        await store.provider.renew_orchestration_item_lock(fetched.lock_token, LOCK_MS)
        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, history_delta=(started("a"),))
        )
        assert await fetch(store) is None

    async def test_a_late_message_is_still_told_from_its_batch(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await enqueue(store, raised("a"))

        await store.reopen()
        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, history_delta=(started("a"),))
        )

        assert bodies(await take(store, "a")) == [raised("a").body]

    async def test_an_item_lock_is_still_held_by_its_token(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        item = await take_work(store)
        await store.provider.renew_work_item_lock(item.lock_token, LOCK_MS, '"beat"')

        await store.reopen()

        assert await fetch_work(store) is None
        await store.provider.ack_work_item(item.lock_token, completion("a"))
        assert bodies(await take(store, "a")) == [completion("a").body]

    async def test_locks_expire_across_a_restart(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        await enqueue(store, raised("a"))
        fetched, item = await take(store, "a"), await take_work(store)

        await store.reopen()
        await store.advance(LOCK_MS)

        assert (await take(store, "a")).attempt_count == 2
        assert (await take_work(store)).attempt_count == 2
        with pytest.raises(LockLost):
            await store.provider.ack_work_item(item.lock_token)
        with pytest.raises(LockLost):
            await store.provider.abandon_orchestration_item(fetched.lock_token)

    async def test_a_timer_fires_at_its_time(self, store: Store) -> None:
        fire_at_ms = await store.now_ms() + 10_000
        await create(store, "a", orchestrator_items=(timer("a", fire_at_ms),))

        await store.reopen()

        assert await fetch(store) is None
        await store.advance(10_000)
        assert bodies(await take(store, "a")) == [timer("a", fire_at_ms).body]

    async def test_an_instance_backs_off_across_a_restart(self, store: Store) -> None:
        await enqueue(store, start("a"))
        fetched = await take(store, "a")
        await store.provider.abandon_orchestration_item(fetched.lock_token, delay_ms=10_000)

        await store.reopen()

        assert await fetch(store) is None
        await store.advance(10_000)
        await take(store, "a")

    async def test_a_session_stays_with_its_owner(self, store: Store) -> None:
        mine = SessionFetch(owner_id="mine", lock_timeout_ms=60_000)
        other = SessionFetch(owner_id="other", lock_timeout_ms=60_000)
        await enqueue_work(
            store, activity("a", 1, 2, session="s"), activity("a", 1, 3, session="s")
        )
        await take_work(store, session=mine)

        await store.reopen()

        assert await fetch_work(store, session=other) is None
        assert (await take_work(store, session=mine)).identity.activity_id == 3
        assert await store.provider.renew_session_lock(["mine"], 60_000, 60_000) == 1

    async def test_a_refused_commit_leaves_no_trace(self, store: Store) -> None:
        await fill(store)
        before = await look(store)
        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(
                "unknown", TurnCommit(execution_id=9, history_delta=(event("family", 99),))
            )

        await store.reopen()

        assert difference(before, await look(store)) == ""

    @requires("hot_path")
    async def test_a_kept_lock_and_a_claim_outlive_the_restart(self, store: Store) -> None:
        claim = Claim(lock_token=OWNER, lock_timeout_ms=LOCK_MS)
        await create(
            store,
            "a",
            owner=OWNER,
            keep_lock_ms=LOCK_MS,
            worker_items=(activity("a", claim=claim),),
        )
        await enqueue(store, raised("a"))

        await store.reopen()

        assert await fetch(store) is None
        assert await fetch_work(store) is None
        fetched = await take(store, "a", owner=OWNER)
        assert fetched.continues
        await store.provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(
                execution_id=1, history_delta=(event("a", 2),), settled_work=(claim.lock_token,)
            ),
        )

    async def test_new_messages_come_after_the_old_ones(self, store: Store) -> None:
        await enqueue(store, start("a"), raised("a", "old"))
        await enqueue_work(store, activity("a", 1, 2))

        await store.reopen()
        await enqueue(store, raised("a", "new"))
        await enqueue_work(store, activity("a", 1, 3))

        assert bodies(await take(store, "a")) == [
            start("a").body,
            raised("a", "old").body,
            raised("a", "new").body,
        ]
        assert [(await take_work(store)).identity.activity_id for _ in range(2)] == [2, 3]

    async def test_any_number_of_restarts_changes_nothing(self, store: Store) -> None:
        await fill(store)
        before = await look(store)

        for _ in range(3):
            await store.reopen()

        assert difference(before, await look(store)) == ""
