"""The work of the processes of the SQLite campaigns: chains of activities, by storage verbs alone.

Each instance runs ``STEPS`` activities one after the other. Half of them go through the queues,
half along the hot path (lock kept, completion and turn in one commit). Every scheduled activity is,
at any moment, in exactly one place: in the worker queue, as a completion on its way, or completed
in history. What the store has acknowledged is reported at once.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from perdure.errors import LockLost
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    EnqueueCondition,
    ExecutionMetadata,
    HistoryRecord,
    OrchestratorMessage,
    StartRouting,
    TurnCommit,
    WorkerMessage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.records import FetchedOrchestration, FetchedWork
    from perdure.providers.sqlite import SqliteProvider

STEPS = 4
SIDE_BY_SIDE = 6
"""The most that a task starts, takes or does at once."""
NAME = "chain"
NAMED = ExecutionMetadata(name=NAME, version="1.0.0")
ENDED = ExecutionMetadata(name=NAME, version="1.0.0", status=Status.COMPLETED, output='"done"')
HOT_END = ExecutionMetadata(status=Status.COMPLETED, output='"done"')


class ShiftedClock:
    """The machine's clock, some lives ahead: locks of earlier lives have expired."""

    def __init__(self, shift_ms: int = 0) -> None:
        self._shift_ms = shift_ms

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._shift_ms

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Workload:
    """One process's share. ``report`` is told of each answer before anything follows from it."""

    def __init__(
        self, provider: SqliteProvider, report: Callable[..., None], *, lock_ms: int = 30_000
    ) -> None:
        self._provider = provider
        self._report = report
        self._lock_ms = lock_ms
        self._owner = secrets.token_hex(4)
        self._names = (f"{self._owner}-{number}" for number in range(1_000_000))
        self.fetch_seconds: list[float] = []

    async def run_until(self, is_over: Callable[[], bool], tasks: int = 3) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(self._start_some(is_over))
                group.create_task(self._take_turns(is_over))
                group.create_task(self._do_work(is_over))

    async def run_alone(self) -> None:
        """One operation at a time, for ever: the store commits them on the event loop."""
        for name in self._names:
            await self._run_hot(name)

    async def finish(self) -> None:
        """Until there is nothing left to do."""
        while any(
            await asyncio.gather(
                *[self._take_turn(poll_ms=0) for _ in range(SIDE_BY_SIDE)],
                *[self._do_some(poll_ms=0) for _ in range(SIDE_BY_SIDE)],
            )
        ):
            pass

    # --- starting

    async def _start_some(self, is_over: Callable[[], bool]) -> None:
        for name in self._names:
            if is_over():
                return
            run = self._start_by_queue if secrets.randbelow(2) else self._run_hot
            # Side by side: what they do shares commits.
            names = [name, *islice(self._names, secrets.randbelow(SIDE_BY_SIDE))]
            await asyncio.gather(*[run(each) for each in names])
            # Let the queues catch up, so that there is something in each of them.
            await asyncio.sleep(0.01 * len(names))

    async def _start_by_queue(self, name: str) -> None:
        self._report("starting", name)
        taken = await self._provider.enqueue_for_orchestrator(
            start_message(name), None, EnqueueCondition.ABSENT
        )
        assert taken
        self._report("started", name)

    async def _run_hot(self, name: str) -> None:
        """A whole chain on a kept lock; a claimed activity and its turn are one commit."""
        token, held = secrets.token_hex(16), self._claimed(name, 2)
        self._report("starting", name)
        first = TurnCommit(
            execution_id=1,
            history_delta=records((1, "started", 0), (2, "scheduled", 2)),
            worker_items=(held,),
            metadata=NAMED,
            keep_lock_ms=self._lock_ms,
        )
        assert await self._provider.start_orchestration_item(
            start_message(name), first, token, self._owner
        )
        self._report("started", name)
        self._report("events", name, 1, 2)
        for step in range(1, STEPS + 1):
            assert held.claim is not None
            settled = (held.claim.lock_token,)
            scheduled = 2 * step
            if step < STEPS:
                held = self._claimed(name, scheduled + 2)
                commit = TurnCommit(
                    execution_id=1,
                    history_delta=_following(scheduled),
                    worker_items=(held,),
                    consumed=(),
                    settled_work=settled,
                    keep_lock_ms=self._lock_ms,
                )
            else:
                commit = TurnCommit(
                    execution_id=1,
                    history_delta=_last(scheduled),
                    metadata=HOT_END,
                    consumed=(),
                    settled_work=settled,
                )
            await self._provider.ack_orchestration_item(token, commit)
            self._report("events", name, scheduled + 1, scheduled + 2)

    def _claimed(self, name: str, activity_id: int) -> WorkerMessage:
        claim = Claim(lock_token=secrets.token_hex(16), lock_timeout_ms=self._lock_ms)
        return work_message(name, activity_id, claim)

    # --- turns and work through the queues

    async def _take_turns(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            turns = [self._take_turn(poll_ms=200) for _ in range(SIDE_BY_SIDE)]
            await asyncio.gather(*turns)

    async def _take_turn(self, poll_ms: int) -> bool:
        begin = time.monotonic()
        fetched = await self._provider.fetch_orchestration_item(self._lock_ms, poll_ms)
        if fetched is not None:
            self.fetch_seconds.append(time.monotonic() - begin)
        if fetched is None:
            return False
        commit = next_turn(fetched)
        try:
            await self._provider.ack_orchestration_item(fetched.lock_token, commit)
        except LockLost:
            # Only in campaigns whose processes are stopped for longer than a lock lives.
            self._report("lost", fetched.item.instance_id)
            return True
        ids = [record.event_id for record in commit.history_delta]
        self._report("events", fetched.item.instance_id, *ids)
        return True

    async def _do_work(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            await self._do_some(poll_ms=200)

    async def _do_some(self, poll_ms: int) -> bool:
        limit = 1 + secrets.randbelow(SIDE_BY_SIDE)
        fetched = await self._provider.fetch_work_items(limit, self._lock_ms, poll_ms)
        await asyncio.gather(*[self._complete(work) for work in fetched])
        return bool(fetched)

    async def _complete(self, work: FetchedWork) -> None:
        identity = work.identity
        completion = OrchestratorMessage(
            instance_id=identity.instance_id, kind="done", body=str(identity.activity_id)
        )
        try:
            await self._provider.ack_work_item(work.lock_token, completion)
        except LockLost:
            self._report("lost", identity.instance_id)


def next_turn(fetched: FetchedOrchestration) -> TurnCommit:
    """Return the turn of a batch: one event for each completion, and the next activity or the end.

    Nothing is dropped as a duplicate: if the store delivered one twice, history would show it.
    """
    item = fetched.item
    done = [int(message.body) for message in item.messages if message.body != "start"]
    if not item.history:
        assert not done, f"a completion before the start of {item.instance_id}"
        return TurnCommit(
            execution_id=1,
            history_delta=records((1, "started", 0), (2, "scheduled", 2)),
            worker_items=(work_message(item.instance_id, 2),),
            metadata=NAMED,
        )
    (activity_id,) = done
    if activity_id < 2 * STEPS:
        return TurnCommit(
            execution_id=1,
            history_delta=_following(activity_id),
            worker_items=(work_message(item.instance_id, activity_id + 2),),
        )
    return TurnCommit(execution_id=1, history_delta=_last(activity_id), metadata=ENDED)


def _following(activity_id: int) -> tuple[HistoryRecord, ...]:
    return records(
        (activity_id + 1, "completed", activity_id), (activity_id + 2, "scheduled", activity_id + 2)
    )


def _last(activity_id: int) -> tuple[HistoryRecord, ...]:
    return records((activity_id + 1, "completed", activity_id), (activity_id + 2, "ended", 0))


def records(*events: tuple[int, str, int]) -> tuple[HistoryRecord, ...]:
    return tuple(
        HistoryRecord(event_id=event_id, data=json.dumps([kind, activity_id]))
        for event_id, kind, activity_id in events
    )


def start_message(name: str) -> OrchestratorMessage:
    return OrchestratorMessage(
        instance_id=name, kind="start", body="start", start=StartRouting(name=NAME, version="1.0.0")
    )


def work_message(name: str, activity_id: int, claim: Claim | None = None) -> WorkerMessage:
    return WorkerMessage(
        identity=ActivityIdentity(instance_id=name, execution_id=1, activity_id=activity_id),
        name="step",
        body=json.dumps({"step": activity_id}),
        claim=claim,
    )


class Ledger:
    """The acknowledged operations, against which the content of the store is checked."""

    def __init__(self) -> None:
        self.started: set[str] = set()
        self.attempted: set[str] = set()
        self.events: dict[str, int] = {}
        """The highest event that was acknowledged."""
        self.lost_locks = 0

    def note(self, kind: str, name: str, *numbers: Any) -> None:
        match kind:
            case "starting":
                self.attempted.add(name)
            case "started":
                self.started.add(name)
            case "events":
                self.events[name] = max(self.events.get(name, 0), *numbers)
            case "lost":
                self.lost_locks += 1
            case _:
                raise AssertionError(f"unknown report {kind!r}")
