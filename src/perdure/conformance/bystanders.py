"""A verb changes what it names, and nothing of the instances, locks and sessions beside it.

A store that forgets one condition of a statement passes every check that looks at one instance.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest

from perdure.conformance import observation
from perdure.conformance.factories import (
    LOCK_MS,
    activity,
    completion,
    continue_as_new,
    create,
    enqueue,
    event,
    fetch,
    fetch_work,
    identity,
    raised,
    start,
    take,
    take_work,
    timer,
)
from perdure.conformance.harness import Store, checks
from perdure.errors import DuplicateEvent, LockLost
from perdure.model.failures import Block, BlockReason
from perdure.model.status import Status
from perdure.providers.records import (
    CustomStatusChange,
    EnqueueCondition,
    ExecutionMetadata,
    KvClearAll,
    KvSet,
    PruneOptions,
    SessionFetch,
    TimerIdentity,
    TurnCommit,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any


BESIDE = ("held", "free", "paused", "blocked", "parent", "child")
DELAY_MS = 50 * LOCK_MS
FAR_MS = 4_000_000_000_000


@dataclass
class Locks:
    """Tokens of an instance with two work items and a session."""

    instance: str
    turn: str
    work: str
    work_of_session: str

    @property
    def of_work(self) -> tuple[str, str]:
        return self.work, self.work_of_session


def whole_commit(name: str, **fields: Any) -> TurnCommit:
    """A commit that changes something of every kind."""
    return TurnCommit(
        execution_id=1,
        history_delta=(event(name, 2),),
        worker_items=(activity(name, 1, 7),),
        orchestrator_items=(raised(name, "self"), timer(name, FAR_MS, 1, 20)),
        cancelled_activities=(identity(name, 1, 4),),
        cancelled_timers=(TimerIdentity(execution_id=1, timer_id=5),),
        custom_status=CustomStatusChange(value='"other"'),
        kv_changes=(KvClearAll(), KvSet(key="k", value='"other"', updated_at_ms=2)),
        **fields,
    )


async def lock(store: Store, name: str) -> Locks:
    """Create an instance and lock it, with two work items, a session, a message and a timer."""
    await create(
        store,
        name,
        worker_items=(
            activity(name, 1, 2),
            activity(name, 1, 3, session=name),
            activity(name, 1, 4, visible_at_ms=FAR_MS),
        ),
        orchestrator_items=(timer(name, FAR_MS, 1, 5),),
        kv_changes=(KvSet(key="k", value=f'"{name}"', updated_at_ms=1),),
        custom_status=CustomStatusChange(value=f'"{name}"'),
    )
    await enqueue(store, raised(name))
    session = SessionFetch(owner_id=name, lock_timeout_ms=LOCK_MS)
    work = [await take_work(store, session=session) for _ in range(2)]
    work.sort(key=lambda item: item.session_id is not None)
    turn = await take(store, name)
    return Locks(name, turn.lock_token, *[item.lock_token for item in work])


async def surround(store: Store) -> tuple[Locks, Locks]:
    """Lock ``a``, then add instances in other states; returns the locks of ``a`` and ``held``."""
    own, held = await lock(store, "a"), await lock(store, "held")
    await create(store, "parent")
    await create(store, "child", parent="parent")
    for name in ("paused", "blocked"):
        await create(store, name)
        await enqueue(store, raised(name))
        if name == "paused":
            await store.admin.suspend_instance(name)
        else:
            token = (await take(store, name)).lock_token
            block = Block(reason=BlockReason.NONDETERMINISM, message="other code")
            await store.provider.abandon_orchestration_item(token, DELAY_MS, block=block)
    await create(store, "free", kv_changes=(KvSet(key="k", value='"free"', updated_at_ms=1),))
    await enqueue(store, raised("free"))
    await store.provider.enqueue_for_worker(activity("free"))
    return own, held


async def seen(store: Store) -> dict[str, Any]:
    """Return all that can be seen of the instances beside ``a``."""
    calls = observation.details(store.reader, store.admin, BESIDE)
    found = {
        name: observation.plain(await observation.look(call, exact_times=True))
        for name, call in calls.items()
    }
    listed = await observation.list_whole(store.admin)
    return found | {
        f"listed {each.instance_id}": observation.plain(each)
        for each in listed
        if each.instance_id in BESIDE
    }


async def commit(store: Store, own: Locks) -> None:
    await store.provider.ack_orchestration_item(
        own.turn, whole_commit(own.instance, settled_work=(own.work,))
    )


async def commit_and_keep(store: Store, own: Locks) -> None:
    await store.provider.ack_orchestration_item(
        own.turn, whole_commit(own.instance, keep_lock_ms=LOCK_MS)
    )


async def commit_a_step(store: Store, own: Locks) -> None:
    step = TurnCommit(
        execution_id=1,
        history_delta=(event(own.instance, 2),),
        settled_work=(own.work,),
        consumed=(),
        keep_lock_ms=LOCK_MS,
    )
    await store.provider.ack_orchestration_item(own.turn, step)


async def end(store: Store, own: Locks) -> None:
    ending = ExecutionMetadata(status=Status.COMPLETED, output='"done"')
    await store.provider.ack_orchestration_item(
        own.turn, whole_commit(own.instance, metadata=ending)
    )


async def end_plainly(store: Store, own: Locks) -> None:
    ending = TurnCommit(
        execution_id=1,
        history_delta=(event(own.instance, 2),),
        metadata=ExecutionMetadata(status=Status.COMPLETED, output='"done"'),
    )
    await store.provider.ack_orchestration_item(own.turn, ending)


async def continue_anew(store: Store, own: Locks) -> None:
    ending = TurnCommit(
        execution_id=1,
        history_delta=(event(own.instance, 2),),
        orchestrator_items=(continue_as_new(own.instance, 2),),
        metadata=ExecutionMetadata(status=Status.CONTINUED_AS_NEW),
    )
    await store.provider.ack_orchestration_item(own.turn, ending)


async def change_state(store: Store, own: Locks) -> None:
    change = TurnCommit(
        execution_id=1, kv_changes=(KvSet(key="k", value='"other"', updated_at_ms=2),)
    )
    await store.provider.ack_orchestration_item(own.turn, change)


async def commit_too_late(store: Store, own: Locks) -> None:
    with pytest.raises(LockLost):
        await store.provider.ack_orchestration_item(
            store.provider.new_lock_token(), whole_commit(own.instance)
        )


async def commit_an_event_twice(store: Store, own: Locks) -> None:
    repeated = TurnCommit(execution_id=1, history_delta=(event(own.instance, 1),))
    with pytest.raises(DuplicateEvent):
        await store.provider.ack_orchestration_item(own.turn, repeated)


async def abandon(store: Store, own: Locks) -> None:
    await store.provider.abandon_orchestration_item(own.turn, 1, ignore_attempt=True)


async def block(store: Store, own: Locks) -> None:
    reason = Block(reason=BlockReason.NONDETERMINISM, message="another block")
    await store.provider.abandon_orchestration_item(own.turn, 1, block=reason)


async def renew(store: Store, own: Locks) -> None:
    await store.provider.renew_orchestration_item_lock(own.turn, 2 * LOCK_MS)


async def suspend(store: Store, own: Locks) -> None:
    await store.admin.suspend_instance(own.instance)


async def resume(store: Store, own: Locks) -> None:
    await suspend(store, own)
    await store.admin.resume_instance(own.instance)


async def take_the_lock(store: Store, own: Locks) -> None:
    await store.admin.lock_instance(own.instance, LOCK_MS)


async def delete(store: Store, own: Locks) -> None:
    await store.admin.delete_instances_atomic([own.instance], force=True)


async def prune(store: Store, own: Locks) -> None:
    await store.admin.prune_executions(own.instance, PruneOptions(keep_last=1))


async def replace(store: Store, own: Locks) -> None:
    condition = EnqueueCondition.REPLACE
    assert await store.provider.enqueue_for_orchestrator(start(own.instance), condition=condition)


async def copy_over(store: Store, own: Locks) -> None:
    snapshot = await store.admin.export_instance(own.instance)
    await store.admin.import_instance(snapshot, replace=True)


async def send(store: Store, own: Locks) -> None:
    condition = EnqueueCondition.ALIVE
    await store.provider.enqueue_for_orchestrator(raised(own.instance, "more"), condition=condition)


async def append(store: Store, own: Locks) -> None:
    await store.provider.append_with_execution(own.instance, 1, [event(own.instance, 2)])


async def complete_work(store: Store, own: Locks) -> None:
    for token in own.of_work:
        await store.provider.ack_work_item(token, completion(own.instance))


async def retry_work(store: Store, own: Locks) -> None:
    await store.provider.ack_work_item(own.work, retry=activity(own.instance, 1, 2, input="again"))


async def abandon_work(store: Store, own: Locks) -> None:
    for token in own.of_work:
        await store.provider.abandon_work_item(token, 1, ignore_attempt=True)


async def renew_work(store: Store, own: Locks) -> None:
    for token in own.of_work:
        await store.provider.renew_work_item_lock(token, 2 * LOCK_MS, '"beat"')


async def renew_a_session(store: Store, own: Locks) -> None:
    assert await store.provider.renew_session_lock([own.instance], 2 * LOCK_MS, LOCK_MS) == 1


async def clean_up_sessions(store: Store, own: Locks) -> None:
    await complete_work(store, own)
    assert await store.provider.cleanup_orphaned_sessions() == 0


CHANGES: tuple[Callable[[Store, Locks], Awaitable[None]], ...] = (
    *(commit, commit_and_keep, commit_a_step, end, end_plainly, abandon, block, renew),
    *(suspend, resume, take_the_lock, delete, prune, replace, copy_over, send, append),
    *(complete_work, retry_work, abandon_work, renew_work, renew_a_session, clean_up_sessions),
)

AT_ONCE: tuple[tuple[Callable[[Store, Locks], Awaitable[None]], ...], ...] = (
    (commit, commit_and_keep, commit_a_step, end, end_plainly, change_state, continue_anew),
    (end, commit_too_late, commit_a_step, commit_an_event_twice, commit),
    (abandon, block, abandon, commit),
    (complete_work, retry_work, abandon_work, commit_a_step, send, suspend, append),
)
"""Changes of several instances that a store may commit together."""


@checks
class TestBystanders:
    verbs = (
        "ack_orchestration_item",
        "abandon_orchestration_item",
        "renew_orchestration_item_lock",
        "enqueue_for_orchestrator",
        "append_with_execution",
        "ack_work_item",
        "abandon_work_item",
        "renew_work_item_lock",
        "renew_session_lock",
        "cleanup_orphaned_sessions",
        "suspend_instance",
        "resume_instance",
        "lock_instance",
        "delete_instances_atomic",
        "prune_executions",
        "import_instance",
    )

    @pytest.mark.parametrize("change", CHANGES)
    async def test_nothing_beside_the_named_instance_changes(
        self, store: Store, change: Callable[[Store, Locks], Awaitable[None]]
    ) -> None:
        own, held = await surround(store)
        before = await seen(store)

        await change(store, own)

        assert observation.difference(before, await seen(store)) == ""
        await store.provider.renew_orchestration_item_lock(held.turn, LOCK_MS)
        for token in held.of_work:
            await store.provider.renew_work_item_lock(token, LOCK_MS)
        assert await store.provider.renew_session_lock(["held"], LOCK_MS, LOCK_MS) == 1
        attempts: dict[str, int] = {}
        while (fetched := await fetch(store)) is not None:
            attempts[fetched.item.instance_id] = fetched.attempt_count
        attempts.pop("a", None)
        assert attempts == {"free": 1}
        session = SessionFetch(owner_id="other", lock_timeout_ms=LOCK_MS)
        taken: set[str] = set()
        while (work := await fetch_work(store, session=session)) is not None:
            taken.add(work.identity.instance_id)
        assert taken - {"a"} == {"free"}

    @pytest.mark.parametrize("changes", AT_ONCE)
    async def test_changes_of_several_instances_at_once_are_as_one_after_the_other(
        self, store: Store, changes: tuple[Callable[[Store, Locks], Awaitable[None]], ...]
    ) -> None:
        alone = [await lock(store, f"alone-{each}") for each in range(len(changes))]
        group = [await lock(store, f"group-{each}") for each in range(len(changes))]

        for change, own in zip(changes, alone, strict=True):
            await change(store, own)
        await asyncio.gather(
            *(change(store, own) for change, own in zip(changes, group, strict=True))
        )

        found: dict[str, list[Any]] = {"alone": [], "group": []}
        for own in (*alone, *group):
            export = await store.admin.export_instance(own.instance)
            seen = observation.comparable(export, exact_times=False)
            text = msgspec.json.encode(seen).decode().replace("group-", "alone-")
            found[own.instance[:5]].append(msgspec.json.decode(text))
        assert observation.difference(found["alone"], found["group"]) == ""
