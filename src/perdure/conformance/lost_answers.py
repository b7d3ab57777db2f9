"""A caller that never got its answer asks again: nothing may be done twice.

Each check lets a verb succeed, looks at the whole store, repeats the call and looks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    OWNER,
    activity,
    completion,
    create,
    enqueue,
    enqueue_work,
    event,
    fetch,
    finish,
    identity,
    next_execution,
    raised,
    start,
    started,
    take,
    take_work,
    timer,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.observation import difference
from perdure.conformance.reopening import look
from perdure.conformance.requires import requires
from perdure.errors import AlreadyExists, DuplicateEvent, LockLost, NotFound, PerdureError
from perdure.limits import ORPHAN_GRACE_MS
from perdure.providers.records import (
    CustomStatusChange,
    EnqueueCondition,
    ExecutionMetadata,
    InstanceQuery,
    KvSet,
    PruneOptions,
    SessionFetch,
    TurnCommit,
    WorkerInfo,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any


NAMED = ExecutionMetadata(name="TestOrch", version="1.0.0")


async def repeat(
    store: Store, call: Callable[[], Awaitable[Any]], *, refused: type[PerdureError] | None = None
) -> list[Any]:
    """Make the call twice; the second time the whole store must stay as it is."""
    instances = ("a", "b", "c")
    answers = [await call()]
    before = await look(store, instances)
    if refused is None:
        answers.append(await call())
    else:
        with pytest.raises(refused):
            await call()
    assert difference(before, await look(store, instances)) == ""
    return answers


def whole_commit(**fields: Any) -> TurnCommit:
    """A commit of instance ``a`` that adds something of every kind."""
    return TurnCommit(
        execution_id=1,
        history_delta=(event("a", 2),),
        worker_items=(activity("a", 1, 7),),
        orchestrator_items=(raised("a", "self"), start("b", parent="a"), timer("a", 1)),
        custom_status=CustomStatusChange(value='"half"'),
        kv_changes=(KvSet(key="k", value="v", updated_at_ms=1),),
        **fields,
    )


@checks
class TestLostAnswersOfTurns:
    verbs = (
        "fetch_orchestration_item",
        "ack_orchestration_item",
        "abandon_orchestration_item",
        "renew_orchestration_item_lock",
        "start_orchestration_item",
        "append_with_execution",
        "enqueue_for_orchestrator",
    )

    async def test_of_a_commit(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        token = (await take(store, "a")).lock_token

        await repeat(
            store,
            lambda: store.provider.ack_orchestration_item(token, whole_commit()),
            refused=LockLost,
        )

    async def test_of_a_commit_after_the_next_holder_has_begun(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        token = (await take(store, "a")).lock_token
        await store.provider.ack_orchestration_item(token, whole_commit())
        await take(store, "a")
        before = await look(store, ("a", "b"))

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(token, whole_commit())

        assert difference(before, await look(store, ("a", "b"))) == ""

    @requires("hot_path")
    async def test_of_a_commit_that_keeps_the_lock(self, store: Store) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        token = (await take(store, "a", owner=OWNER)).lock_token

        await repeat(
            store,
            lambda: store.provider.ack_orchestration_item(
                token, whole_commit(keep_lock_ms=LOCK_MS)
            ),
            refused=DuplicateEvent,
        )

    @requires("hot_path")
    async def test_of_a_first_turn(self, store: Store) -> None:
        commit = TurnCommit(
            execution_id=1,
            history_delta=(started("a"),),
            worker_items=(activity("a"),),
            metadata=NAMED,
        )

        answers = await repeat(
            store,
            lambda: store.provider.start_orchestration_item(start("a"), commit, "turn", OWNER),
        )

        assert answers == [True, False]

    async def test_of_giving_a_turn_back(self, store: Store) -> None:
        await enqueue(store, start("a"))
        token = (await take(store, "a")).lock_token

        await repeat(
            store,
            lambda: store.provider.abandon_orchestration_item(token, 500, ignore_attempt=True),
            refused=LockLost,
        )

    async def test_of_renewing_a_lock(self, store: Store) -> None:
        await enqueue(store, start("a"))
        token = (await take(store, "a")).lock_token

        await repeat(
            store, lambda: store.provider.renew_orchestration_item_lock(token, LOCK_MS * 2)
        )

        await store.advance(LOCK_MS)
        assert await fetch(store) is None

    async def test_of_a_fetch_the_lock_expires(self, store: Store) -> None:
        await enqueue(store, start("a"))
        await take(store, "a")

        assert await fetch(store) is None
        await store.advance(LOCK_MS)
        assert len((await take(store, "a")).item.messages) == 1

    async def test_of_a_start_that_must_be_new(self, store: Store) -> None:
        answers = await repeat(
            store,
            lambda: store.provider.enqueue_for_orchestrator(
                start("a"), condition=EnqueueCondition.ABSENT
            ),
        )

        assert answers == [True, False]

    async def test_of_a_start_that_replaces(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))

        answers = await repeat(
            store,
            lambda: store.provider.enqueue_for_orchestrator(
                start("a"), condition=EnqueueCondition.REPLACE
            ),
        )

        assert answers == [True, True]

    async def test_of_appending_history(self, store: Store) -> None:
        await repeat(
            store,
            lambda: store.provider.append_with_execution("a", 1, [event("a", 1)]),
            refused=DuplicateEvent,
        )


@checks
class TestLostAnswersOfWork:
    verbs = (
        "fetch_work_item",
        "ack_work_item",
        "abandon_work_item",
        "renew_work_item_lock",
        "renew_session_lock",
        "cleanup_orphaned_sessions",
    )

    async def test_of_settling_an_item(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        token = (await take_work(store)).lock_token

        await repeat(
            store,
            lambda: store.provider.ack_work_item(token, completion("a")),
            refused=LockLost,
        )

        assert len((await take(store, "a")).item.messages) == 1

    async def test_of_retrying_an_item(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        token = (await take_work(store)).lock_token

        await repeat(
            store,
            lambda: store.provider.ack_work_item(token, retry=activity("a", input="again")),
            refused=LockLost,
        )

    async def test_of_giving_an_item_back(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        token = (await take_work(store)).lock_token

        await repeat(
            store,
            lambda: store.provider.abandon_work_item(token, 500, ignore_attempt=True),
            refused=LockLost,
        )

    async def test_of_a_heartbeat(self, store: Store) -> None:
        await enqueue_work(store, activity("a"))
        token = (await take_work(store)).lock_token

        await repeat(
            store,
            lambda: store.provider.renew_work_item_lock(token, LOCK_MS * 2, '"beat"'),
        )

    async def test_of_renewing_and_cleaning_up_sessions(self, store: Store) -> None:
        await enqueue_work(store, activity("a", session="s"))
        session = SessionFetch(owner_id=OWNER, lock_timeout_ms=LOCK_MS)
        item = await take_work(store, session=session)
        await store.provider.ack_work_item(item.lock_token)

        renewed = await repeat(
            store, lambda: store.provider.renew_session_lock([OWNER], LOCK_MS, LOCK_MS)
        )
        await store.advance(LOCK_MS)
        cleaned = await repeat(store, store.provider.cleanup_orphaned_sessions)

        assert (renewed, cleaned) == ([1, 1], [1, 0])


@checks
class TestLostAnswersOfAdministration:
    verbs = (
        "suspend_instance",
        "resume_instance",
        "delete_instances_atomic",
        "delete_instance_bulk",
        "prune_executions",
        "prune_executions_bulk",
        "requeue_dead_letter",
        "delete_dead_letter",
        "register_worker",
        "import_instance",
        "lock_instance",
    )

    async def test_of_holding_an_instance(self, store: Store) -> None:
        await create(store, "a")

        await repeat(store, lambda: store.admin.suspend_instance("a"))
        await repeat(store, lambda: store.admin.resume_instance("a"))

    async def test_of_deleting(self, store: Store) -> None:
        await create(store, "a")
        await create(store, "b")

        await repeat(
            store,
            lambda: store.admin.delete_instances_atomic(["a"], force=True),
            refused=NotFound,
        )

    async def test_of_deleting_in_bulk(self, store: Store) -> None:
        for name in ("a", "b"):
            await create(store, name)
            await finish(store, name)

        deleted = await repeat(
            store, lambda: store.admin.delete_instance_bulk(InstanceQuery(instance_ids=("a",)))
        )

        assert [each.instances for each in deleted] == [1, 0]

    async def test_of_pruning(self, store: Store) -> None:
        await create(store, "a")
        await next_execution(store, "a", 2)
        await next_execution(store, "a", 3)

        one = await repeat(store, lambda: store.admin.prune_executions("a", PruneOptions()))
        many = await repeat(
            store, lambda: store.admin.prune_executions_bulk(InstanceQuery(), PruneOptions())
        )

        assert [each.executions for each in one + many] == [2, 0, 0, 0]

    async def test_of_dealing_with_a_dead_letter(self, store: Store) -> None:
        await enqueue(store, raised("a"), raised("b"))
        await store.advance(ORPHAN_GRACE_MS)
        assert await fetch(store) is None
        first, second = [each.letter_id for each in await store.admin.list_dead_letters()]

        await repeat(store, lambda: store.admin.requeue_dead_letter(first), refused=NotFound)
        await repeat(store, lambda: store.admin.delete_dead_letter(second), refused=NotFound)

    async def test_of_announcing_a_worker(self, store: Store) -> None:
        worker = WorkerInfo(
            worker_id="w", host="h", process_id=1, started_at_ms=0, framework_version="0.1.0"
        )

        await repeat(store, lambda: store.admin.register_worker(worker, 60_000))
        await repeat(store, lambda: store.admin.register_worker(worker, 0))

        assert await store.admin.list_workers() == []

    async def test_of_an_import(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),), orchestrator_items=(raised("a"),))
        snapshot = await store.admin.export_instance("a")
        await store.admin.delete_instance("a", force=True)

        await repeat(store, lambda: store.admin.import_instance(snapshot), refused=AlreadyExists)
        await repeat(store, lambda: store.admin.import_instance(snapshot, replace=True))

    async def test_of_taking_a_lock_the_last_answer_counts(self, store: Store) -> None:
        await create(store, "a", worker_items=(activity("a"),))
        lost = await store.admin.lock_instance("a", LOCK_MS)
        held = await store.admin.lock_instance("a", LOCK_MS)
        commit = TurnCommit(execution_id=1, cancelled_activities=(identity("a"),))

        with pytest.raises(LockLost):
            await store.provider.ack_orchestration_item(lost.lock_token, commit)

        await store.provider.ack_orchestration_item(held.lock_token, commit)
