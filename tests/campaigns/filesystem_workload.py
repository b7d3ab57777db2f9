"""A small program of turns and activities over the bare verbs, and what must hold after any crash.

Each instance takes a fixed number of turns; a turn consumes the completion of the activity that
the turn before it scheduled. So a lost message stops an instance for good, a doubled one shows up
in its history, and half a turn leaves event ids, state and queues at odds with each other.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from perdure.model.status import Status
from perdure.providers.directory import FileSystemProvider
from perdure.providers.records import (
    ActivityIdentity,
    CustomStatusChange,
    EnqueueCondition,
    ExecutionMetadata,
    HistoryRecord,
    KvSet,
    OrchestratorMessage,
    StartRouting,
    TurnCommit,
    WorkerMessage,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.directory.fileops import FileOps
    from perdure.providers.records import FetchedOrchestration, FetchedWork

    Report: TypeAlias = Callable[[str], None]

LIFE_MS = 1_000_000
"""Each life of the store is this much later than the one before: all its locks have expired."""
LOCK_MS = 30_000
_CHECKS_AT_ONCE = 100


class LifeClock:
    """Stands still during a life."""

    def __init__(self, life: int) -> None:
        self._now_ms = 1_700_000_000_000 + life * LIFE_MS

    def now_ms(self) -> int:
        return self._now_ms

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("the workload never waits")


def provider_of_life(path: str, life: int, file_ops: FileOps | None = None) -> FileSystemProvider:
    """Every other life moves finished histories to the archive."""
    archive = timedelta(0) if life % 2 else None
    return FileSystemProvider(path, clock=LifeClock(life), file_ops=file_ops, archive=archive)


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one process on the store."""

    instances: int
    turns: int
    at_once: int
    """Callers at a time; their commits share flushes."""


SMALL = Load(instances=2, turns=3, at_once=1)
BUSY = Load(instances=24, turns=3, at_once=4)


def instance_id(number: int) -> str:
    return f"../Order {number}"


# --- doing


async def live(provider: FileSystemProvider, load: Load, report: Report) -> None:
    """Start what has not been started and bring all to the end, with checkpoints in between."""
    await start_instances(provider, load.instances, report)
    runs = [
        run_to_the_end(provider, load.turns, report, checkpoint_every=3)
        for _ in range(load.at_once)
    ]
    await asyncio.gather(*runs)


async def start_instances(provider: Provider, count: int, report: Report) -> None:
    for number in range(count):
        message = OrchestratorMessage(
            instance_id=instance_id(number),
            kind="StartOrchestration",
            body='{"completes":0}',
            start=StartRouting(name="Flow", version="1.0.0"),
        )
        await provider.enqueue_for_orchestrator(message, None, EnqueueCondition.ABSENT)
        report(f"started {number}")


async def run_to_the_end(
    provider: Provider, turns: int, report: Report, *, checkpoint_every: int = 0
) -> None:
    """Until nothing is left to do."""
    steps = 0
    while True:
        fetched = await provider.fetch_orchestration_item(LOCK_MS, 0)
        if fetched is not None:
            await take_turn(provider, fetched, turns, report, is_awkward=steps % 3 == 1)
        work = await provider.fetch_work_item(LOCK_MS, 0)
        if work is not None:
            await do_work(provider, work, report, is_awkward=steps % 4 == 2)
        if fetched is None and work is None:
            return
        steps += 1
        if checkpoint_every and steps % checkpoint_every == 0:
            assert isinstance(provider, FileSystemProvider)
            await provider.checkpoint()


async def take_some_steps(provider: Provider, turns: int, steps: int) -> None:
    """Leave the instances in the middle of their work."""
    for step in range(steps):
        fetched = await provider.fetch_orchestration_item(LOCK_MS, 0)
        if fetched is not None:
            await take_turn(provider, fetched, turns, lambda _: None, is_awkward=step % 5 == 1)
        work = await provider.fetch_work_item(LOCK_MS, 0) if step % 2 else None
        if work is not None:
            await do_work(provider, work, lambda _: None, is_awkward=step % 7 == 2)


async def take_turn(
    provider: Provider,
    fetched: FetchedOrchestration,
    turns: int,
    report: Report,
    *,
    is_awkward: bool,
) -> None:
    """Awkward: renew the lock, give the item back once, and take it again later."""
    if is_awkward:
        await provider.renew_orchestration_item_lock(fetched.lock_token, LOCK_MS)
        if fetched.attempt_count == 1:
            await provider.abandon_orchestration_item(fetched.lock_token)
            return
    item = fetched.item
    done = len(item.history) // 2
    assert [message.body for message in item.messages] == [f'{{"completes":{done}}}']
    assert [record.event_id for record in item.history] == list(range(1, 2 * done + 1))
    await provider.ack_orchestration_item(
        fetched.lock_token, _commit(item.instance_id, done + 1, is_last=done + 1 == turns)
    )
    report(f"turn {done + 1} of {item.instance_id}")


def _commit(instance: str, turn: int, *, is_last: bool) -> TurnCommit:
    identity = ActivityIdentity(instance_id=instance, execution_id=1, activity_id=turn)
    work = WorkerMessage(identity=identity, name="step", body=f'{{"step":{turn}}}')
    return TurnCommit(
        execution_id=1,
        history_delta=(
            HistoryRecord(event_id=2 * turn - 1, data=f'{{"type":"Completed","turn":{turn}}}'),
            HistoryRecord(event_id=2 * turn, data=f'{{"type":"Scheduled","turn":{turn}}}'),
        ),
        worker_items=() if is_last else (work,),
        metadata=ExecutionMetadata(
            name="Flow",
            version="1.0.0",
            status=Status.COMPLETED if is_last else None,
            output='"done"' if is_last else None,
        ),
        custom_status=CustomStatusChange(value=str(turn)),
        kv_changes=(KvSet(key="turn", value=str(turn), updated_at_ms=turn),),
    )


async def do_work(
    provider: Provider, work: FetchedWork, report: Report, *, is_awkward: bool
) -> None:
    if is_awkward:
        await provider.renew_work_item_lock(work.lock_token, LOCK_MS, heartbeat='"half"')
        if work.attempt_count == 1:
            await provider.abandon_work_item(work.lock_token)
            return
    completion = OrchestratorMessage(
        instance_id=work.identity.instance_id,
        kind="ActivityCompleted",
        body=f'{{"completes":{work.identity.activity_id}}}',
    )
    await provider.ack_work_item(work.lock_token, completion)
    report(f"work {work.identity.activity_id} of {work.identity.instance_id}")


# --- judging


def admin_of(provider: Provider) -> ProviderAdmin:
    admin = provider.admin
    assert admin is not None
    return admin


async def check_whole(provider: Provider, count: int) -> None:
    """No half turn anywhere: history, state and queues tell the same story."""
    await _for_each(count, lambda instance: _check_whole(provider, instance))


async def _for_each(count: int, check: Callable[[str], Awaitable[None]]) -> None:
    for start in range(0, count, _CHECKS_AT_ONCE):
        numbers = range(start, min(start + _CHECKS_AT_ONCE, count))
        await asyncio.gather(*(check(instance_id(number)) for number in numbers))


async def _check_whole(provider: Provider, instance: str) -> None:
    admin = admin_of(provider)
    history = await provider.read(instance)
    turn = len(history) // 2
    assert [record.event_id for record in history] == list(range(1, 2 * turn + 1)), instance
    messages = await admin.list_messages(instance)
    work = await admin.list_work(instance)
    if not turn:
        assert not work
        assert len(messages) <= 1
        return
    info = await admin.get_instance_info(instance)
    assert info.custom_status == str(turn)
    assert info.custom_status_version == turn
    assert await provider.get_kv_value(instance, "turn") == str(turn)
    on_its_way = [message.message.body for message in messages] + [
        item.message.body.replace("step", "completes") for item in work
    ]
    expected = [] if info.status is Status.COMPLETED else [f'{{"completes":{turn}}}']
    assert on_its_way == expected, f"{instance} after turn {turn}: {on_its_way}"


async def check_reported(provider: Provider, reports: Iterable[str]) -> None:
    """Nothing that was acknowledged is gone."""
    admin = admin_of(provider)
    for line in reports:
        what, number, *rest = line.split(" ", 3)
        if what == "started":
            assert await admin.get_instance_info(instance_id(int(number)))
            continue
        instance, done = rest[1], len(await provider.read(rest[1])) // 2
        if what == "turn":
            assert done >= int(number), f"{line!r} was acknowledged, but only {done} are there"
        else:
            queued = await admin.list_work(instance)
            pending = [item.message.identity.activity_id for item in queued]
            assert int(number) not in pending, f"{line!r} was acknowledged, but is still to be done"


async def check_finished(provider: Provider, count: int, turns: int) -> None:
    """Every instance went all the way."""
    await check_whole(provider, count)
    await _for_each(count, lambda instance: _check_finished(provider, instance, turns))
    depths = await admin_of(provider).get_queue_depths()
    assert depths.orchestrator.visible == depths.worker.visible == 0


async def _check_finished(provider: Provider, instance: str, turns: int) -> None:
    info = await admin_of(provider).get_instance_info(instance)
    assert info.status is Status.COMPLETED, f"{instance} is stuck: {info.status}"
    assert len(await provider.read(instance)) == 2 * turns


def print_report(line: str) -> None:
    """Report to the parent process in one write, so that a kill cuts between lines."""
    os.write(1, line.encode() + b"\n")
