"""Operations that share a commit are written table by table, and do what they do one by one."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import apsw
import pytest

from perdure.clock import ManualClock
from perdure.conformance.observation import details, look, totals
from perdure.errors import PerdureError
from perdure.model.status import Status
from perdure.providers.items import (
    ActivityIdentity,
    Claim,
    CustomStatusChange,
    EnqueueCondition,
    ExecutionMetadata,
    HistoryRecord,
    KvSet,
    OrchestratorMessage,
    StartRouting,
    TimerIdentity,
    TurnCommit,
    WorkerMessage,
)
from perdure.providers.memory import InMemoryProvider
from perdure.providers.sqlite import SqliteProvider, batches, writer

IDS = [f"i{number:03}" for number in range(150)]
KEEP_MS = 1_000


def start_of(instance_id, name="Shop"):
    routing = StartRouting(name=name, version="1.0.0")
    return OrchestratorMessage(
        instance_id=instance_id, kind="StartOrchestration", body="{}", start=routing
    )


def event_for(instance_id):
    return OrchestratorMessage(instance_id=instance_id, kind="EventRaised", body='"e"')


class Bursts:
    """Draws verbs for a few instances; most of them sensible, some of them not."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.numbers = count(1)
        self.unused = IDS[12:]
        self.locks = {}
        """Token of the first turn of each instance that was begun and has not ended."""
        self.events = dict.fromkeys(IDS, 0)
        self.idle = []
        """Of these, the ones without a turn in this burst."""
        self.work = {}
        """Tokens of the work items claimed for each instance."""

    def draw(self):
        """Pairs of a verb and what to note if it is accepted."""
        self.idle = list(self.locks)
        size = self.random.choice([1, 2, 3, 6, 12])
        return [self.draw_verb() for _ in range(size)]

    def draw_verb(self):
        draw = self.random.choices(
            [self.begin, self.ack, self.enqueue, self.raise_event, self.suspend, self.take_work],
            [40, 80, 10, 8, 2, 2],
        )[0]
        return draw(self.random.choice([*IDS[:12], *self.locks]))

    def begin(self, instance_id):
        if self.unused and self.random.random() < 0.8:
            instance_id = self.unused.pop(0)
        token = f"turn-{next(self.numbers):05}-{'t' * 16}"
        commit = self.commit(instance_id, first=1, settles=False)

        def call(provider):
            return provider.start_orchestration_item(start_of(instance_id), commit, token, "me")

        return call, lambda: self.note(instance_id, token, commit)

    def ack(self, instance_id):
        if self.idle and self.random.random() < 0.9:
            instance_id = self.idle.pop(self.random.randrange(len(self.idle)))
        token = self.locks.get(instance_id, "nobody's")
        commit = self.commit(instance_id, first=self.events[instance_id] + 1, settles=True)

        def call(provider):
            return provider.ack_orchestration_item(token, commit)

        return call, lambda: self.note(instance_id, token, commit)

    def note(self, instance_id, token, commit):
        self.events[instance_id] = commit.history_delta[-1].event_id
        claims = [item.claim.lock_token for item in commit.worker_items if item.claim is not None]
        self.work[instance_id] = tuple(each for each in claims if each != "taken")
        self.locks[instance_id] = token
        if commit.keep_lock_ms is None:
            del self.locks[instance_id]

    def commit(self, instance_id, first, *, settles):
        chance = self.random.random
        ends = chance() < 0.15
        events = self.random.choice([1, 2, 5])
        if chance() < 0.04 and first > 1:
            first -= 1  # an event that is there already
        settled = self.work.get(instance_id, ()) if settles else ()
        if chance() < 0.04:
            settled = (*settled, "lost")
        if chance() < 0.04 and self.work:
            settled = (*settled, *next(iter(self.work.values())))
        return TurnCommit(
            execution_id=1 if chance() > 0.03 else 2,
            history_delta=tuple(
                HistoryRecord(event_id=first + number, data='"d"') for number in range(events)
            ),
            worker_items=tuple(
                self.item(instance_id) for _ in range(self.random.choice([0, 1, 5]))
            ),
            orchestrator_items=self.messages(instance_id),
            metadata=ExecutionMetadata(
                status=self.random.choice([Status.COMPLETED, Status.FAILED]) if ends else None,
                output='"out"' if ends else None,
                name="Shop" if first == 1 else None,
                version="1.0.0" if first == 1 else None,
                framework_version=(1, 2, 3) if first == 1 else None,
            ),
            custom_status=CustomStatusChange(value='"busy"') if chance() < 0.05 else None,
            kv_changes=(KvSet(key="k", value="1", updated_at_ms=1),) if chance() < 0.05 else (),
            cancelled_timers=(
                (TimerIdentity(execution_id=1, timer_id=1),) if chance() < 0.05 else ()
            ),
            consumed=() if chance() < 0.95 else None,
            keep_lock_ms=None
            if ends or chance() < 0.04
            else self.random.choice([KEEP_MS] * 9 + [1]),
            settled_work=tuple(dict.fromkeys(settled)),
        )

    def item(self, instance_id):
        number = next(self.numbers)
        claim = None
        if self.random.random() < 0.7:
            # Now and then one that is taken.
            token = "taken" if self.random.random() < 0.02 else f"work-{number:05}-{'w' * 16}"
            claim = Claim(
                lock_token=token, lock_timeout_ms=self.random.choice([KEEP_MS] * 9 + [20])
            )
        return WorkerMessage(
            identity=ActivityIdentity(instance_id=instance_id, execution_id=1, activity_id=number),
            name="act",
            body="[]",
            claim=claim,
        )

    def messages(self, instance_id):
        match self.random.choices(["none", "event", "start", "timer"], [30, 2, 1, 1])[0]:
            case "event":
                return (event_for(self.random.choice(IDS)),)
            case "start":
                return (start_of(self.random.choice(IDS), "Child"),)
            case "timer":
                timer = TimerIdentity(execution_id=1, timer_id=1)
                return (
                    OrchestratorMessage(
                        instance_id=instance_id, kind="TimerFired", body="{}", timer=timer
                    ),
                )
            case _:
                return ()

    def enqueue(self, instance_id):
        message = start_of(instance_id)
        condition = self.random.choice([EnqueueCondition.ABSENT] * 3 + [EnqueueCondition.REPLACE])
        return (
            lambda provider: provider.enqueue_for_orchestrator(message, condition=condition)
        ), nothing

    def raise_event(self, instance_id):
        message = event_for(instance_id)
        condition = self.random.choice([None, EnqueueCondition.ALIVE])
        return (
            lambda provider: provider.enqueue_for_orchestrator(message, condition=condition)
        ), nothing

    def suspend(self, instance_id):
        if self.random.random() < 0.5:
            return (lambda provider: provider.admin().suspend_instance(instance_id)), nothing
        return (lambda provider: provider.admin().resume_instance(instance_id)), nothing

    def take_work(self, _instance_id):
        return (lambda provider: identities(provider.fetch_work_items(3, KEEP_MS, 0))), nothing


def nothing():
    pass


async def identities(fetch):
    return [(work.identity, work.attempt_count) for work in await fetch]


async def outcome(verb, provider):
    try:
        return await verb(provider)
    except PerdureError as error:
        return type(error).__name__


async def observe(provider, instance_ids):
    calls = totals(provider.admin()) | details(provider, provider.admin(), instance_ids)
    return {name: await look(call, exact_times=True) for name, call in calls.items()}


async def compare_bursts(path, seed, rounds):
    clock = ManualClock(1_800_000_000_000)
    bursts = Bursts(seed)
    async with (
        InMemoryProvider(clock=clock) as model,
        SqliteProvider(path, clock=clock, durability="relaxed") as sqlite,
    ):
        for number in range(rounds):
            verbs, notes = zip(*bursts.draw(), strict=True)
            expected = [await outcome(verb, model) for verb in verbs]
            # Accepted in one pass of the loop: they share a commit.
            actual = await asyncio.gather(*[outcome(verb, sqlite) for verb in verbs])
            assert actual == expected, f"burst {number} of seed {seed}"
            some = bursts.random.sample(IDS[: len(IDS) - len(bursts.unused)], 12)
            seen = await observe(sqlite, some)
            assert seen == await observe(model, some), f"burst {number} of seed {seed}"
            for answer, note in zip(expected, notes, strict=True):
                if answer in (None, True):
                    note()
            clock.advance(bursts.random.choice([0, 1, 30]))


@pytest.mark.parametrize("seed", range(12))
def test_bursts_of_verbs_do_what_the_model_does_one_by_one(tmp_path, seed):
    asyncio.run(compare_bursts(tmp_path / "store.db", seed, 40))


@pytest.mark.parametrize("seed", range(4))
def test_single_verbs_do_the_same_when_they_are_written_as_runs(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(batches, "RUN_MIN", 1)

    asyncio.run(compare_bursts(tmp_path / "store.db", 100 + seed, 40))


def work_of(number, body, instance_id="x", claim=None):
    identity = ActivityIdentity(instance_id=instance_id, execution_id=1, activity_id=number)
    return WorkerMessage(identity=identity, name="act", body=body, claim=claim)


def test_big_items_are_fetched_together_with_small_ones(tmp_path):
    bodies = ['"' * 900_000 if number % 7 == 3 else f"{number}" for number in range(1, 40)]

    async def fetch():
        async with SqliteProvider(tmp_path / "store.db", durability="relaxed") as provider:
            for number, body in enumerate(bodies, 1):
                await provider.enqueue_for_worker(work_of(number, body))
            return await provider.fetch_work_items(100, KEEP_MS, 0)

    fetched = asyncio.run(fetch())

    assert [work.body for work in fetched] == bodies
    assert {work.attempt_count for work in fetched} == {1}


@pytest.fixture
def statements(monkeypatch):
    """The statements that writers run from now on."""
    seen = []
    adopt = writer.Writer._adopt

    def watch(self, connection):
        adopt(self, connection)
        connection.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: seen.append(event["sql"]))

    monkeypatch.setattr(writer.Writer, "_adopt", watch)
    return seen


def test_a_burst_of_turns_takes_few_statements(tmp_path, statements):
    ids = [f"x{number:03}" for number in range(200)]

    def first_of(instance_id):
        claim = Claim(lock_token=f"work of {instance_id}", lock_timeout_ms=KEEP_MS)
        return TurnCommit(
            execution_id=1,
            history_delta=(
                HistoryRecord(event_id=1, data="1"),
                HistoryRecord(event_id=2, data="2"),
            ),
            worker_items=(work_of(2, "[]", instance_id, claim),),
            metadata=ExecutionMetadata(name="Shop", version="1.0.0"),
            keep_lock_ms=KEEP_MS,
        )

    def last_of(instance_id):
        return TurnCommit(
            execution_id=1,
            history_delta=(HistoryRecord(event_id=3, data="3"),),
            metadata=ExecutionMetadata(status=Status.COMPLETED, output="1"),
            consumed=(),
            settled_work=(f"work of {instance_id}",),
        )

    async def run():
        clock = ManualClock(1_800_000_000_000)
        async with SqliteProvider(tmp_path / "s.db", clock=clock, durability="relaxed") as provider:
            statements.clear()
            begun = await asyncio.gather(
                *[
                    provider.start_orchestration_item(
                        start_of(each), first_of(each), f"turn of {each}", "me"
                    )
                    for each in ids
                ]
            )
            await asyncio.gather(
                *[provider.ack_orchestration_item(f"turn of {each}", last_of(each)) for each in ids]
            )
            count = len(statements)
            metrics = await provider.admin().get_system_metrics()
        return begun, count, metrics

    begun, count, metrics = asyncio.run(run())

    assert all(begun)
    assert (metrics.by_status, metrics.total_events) == ({Status.COMPLETED: 200}, 600)
    assert count < 100
