"""Operations that share a commit are written table by table, and do what they do one by one."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import msgspec
import pytest

from model import ModelProvider
from perdure.clock import ManualClock
from perdure.conformance.observation import details, look, totals
from perdure.errors import DuplicateEvent, PerdureError
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    CustomStatusChange,
    EnqueueCondition,
    ExecutionMetadata,
    HistoryRecord,
    KvSet,
    OrchestrationFilter,
    OrchestratorMessage,
    StartRouting,
    TimerIdentity,
    TurnCommit,
    VersionRange,
    WorkerMessage,
)
from perdure.providers.sqlite import SqliteProvider, writer

IDS = [f"i{number:03}" for number in range(300)]
KEEP_MS = 1_000
FILTERS = [
    None,
    OrchestrationFilter(handlers=frozenset({("Shop", "1.0.0")})),
    OrchestrationFilter(handlers=frozenset({("Child", "1.0.0")})),
    OrchestrationFilter(framework_versions=(VersionRange(minimum=(0, 0, 0), maximum=(1, 0, 0)),)),
]


def start_of(instance_id, name="Shop", parent=None):
    routing = StartRouting(name=name, version="1.0.0", parent_instance_id=parent)
    return OrchestratorMessage(
        instance_id=instance_id, kind="StartOrchestration", body="{}", start=routing
    )


def event_for(instance_id):
    return OrchestratorMessage(instance_id=instance_id, kind="EventRaised", body='"e"')


class Lock:
    """One lock of each store, and the messages that it carries."""

    def __init__(self, token=None):
        self.token = token
        """The same in each store, if the caller has made it up."""
        self.fetched = {}

    def note(self, fetched):
        """Take in what each store has handed out."""
        for provider, each in fetched.items():
            old = self.fetched.get(provider)
            before = old.item.messages if old is not None and each.continues else ()
            item = msgspec.structs.replace(each.item, messages=(*before, *each.item.messages))
            self.fetched[provider] = msgspec.structs.replace(each, item=item)

    def token_in(self, provider):
        return self.fetched[provider].lock_token if self.fetched else self.token

    def messages_in(self, provider):
        fetched = self.fetched.get(provider)
        return () if fetched is None else [each.message_id for each in fetched.item.messages]


class Bursts:
    """Draws verbs for a few instances; most of them sensible, some of them not."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.numbers = count(1)
        self.unused = IDS[12:]
        self.locks = {}
        """Of each instance that was begun or fetched and has not ended."""
        self.events = dict.fromkeys(IDS, 0)
        self.idle = []
        """Of these, the ones without a turn in this burst."""
        self.queued = []
        """A few of those whose starts were enqueued last."""
        self.work = {}
        """Tokens of the work items claimed for each instance."""

    def draw(self):
        """Pairs of a verb and what to note if it is accepted."""
        self.idle = list(self.locks)
        size = self.random.choice([1, 2, 3, 6, 12])
        draw = self.random.choices(
            [self.draw_verb, self.enqueue_new, self.ack, self.fetch], [4, 3, 3, 3]
        )[0]
        if draw != self.fetch:
            return [draw() for _ in range(size)]
        wanted = (
            self.random.choice([KEEP_MS] * 9 + [20]),
            self.random.choices(FILTERS, [3, 3, 1, 1])[0],
            self.random.choice(["me", "me", None]),
        )
        verbs = [self.fetch(*wanted) for _ in range(size)]
        if self.random.random() < 0.2:
            verbs.insert(self.random.randrange(size), self.draw_verb())
        if self.random.random() < 0.2:
            verbs.insert(self.random.randrange(size), self.fetch(KEEP_MS, None, "other"))
        return verbs

    def draw_verb(self):
        draw = self.random.choices(
            [
                self.begin,
                self.ack,
                self.enqueue,
                self.raise_event,
                self.suspend,
                self.take_work,
                self.abandon,
            ],
            [40, 80, 10, 16, 6, 2, 2],
        )[0]
        return draw(self.random.choice([*IDS[:12], *self.locks, *self.queued]))

    def begin(self, instance_id):
        if self.unused and self.random.random() < 0.8:
            instance_id = self.unused.pop(0)
        token = f"turn-{next(self.numbers):05}-{'t' * 16}"
        commit = self.commit(instance_id, first=1, settles=False)

        def call(provider):
            return provider.start_orchestration_item(start_of(instance_id), commit, token, "me")

        return call, lambda: self.note(instance_id, Lock(token), commit)

    def ack(self, instance_id=IDS[0]):
        if self.idle and self.random.random() < 0.9:
            instance_id = self.idle.pop(self.random.randrange(len(self.idle)))
        lock = self.locks.get(instance_id, Lock("unknown token"))
        commit = self.commit(instance_id, first=self.events[instance_id] + 1, settles=True)
        uses = self.random.choices(["all", "less", "another's"], [90, 6, 6])[0]
        another = self.random.choice([lock, *self.locks.values()])

        def call(provider):
            consumed = lock.messages_in(provider)
            if uses == "less":
                consumed = consumed[:-1]
            elif uses == "another's":
                consumed = [*consumed, *another.messages_in(provider)]
            given = None if commit.consumed is None else tuple(consumed)
            mine = msgspec.structs.replace(commit, consumed=given)
            return provider.ack_orchestration_item(lock.token_in(provider), mine)

        return call, lambda: self.note(instance_id, lock, commit)

    def fetch(self, lock_timeout_ms, wanted, owner):
        found = {}

        async def call(provider):
            fetched = await provider.fetch_orchestration_item(lock_timeout_ms, 0, wanted, owner)
            if fetched is None:
                return "nothing"
            found[provider] = fetched
            return described(fetched)

        def note():
            if found:
                fetched = next(iter(found.values()))
                instance_id = fetched.item.instance_id
                if not fetched.continues:
                    self.locks[instance_id] = Lock()
                    self.events[instance_id] = len(fetched.item.history)
                self.locks[instance_id].note(found)

        return call, note

    def abandon(self, instance_id):
        lock = self.locks.get(instance_id, Lock("unknown token"))
        delay_ms = self.random.choice([None, 1, 20])
        ignore = self.random.random() < 0.5

        def call(provider):
            return provider.abandon_orchestration_item(
                lock.token_in(provider), delay_ms, ignore_attempt=ignore
            )

        return call, lambda: self.locks.pop(instance_id, None)

    def note(self, instance_id, lock, commit):
        self.events[instance_id] = commit.history_delta[-1].event_id
        claims = [item.claim.lock_token for item in commit.worker_items if item.claim is not None]
        self.work[instance_id] = tuple(each for each in claims if each != "taken")
        self.locks[instance_id] = lock
        for provider in lock.fetched:
            lock.fetched[provider] = msgspec.structs.replace(
                lock.fetched[provider],
                item=msgspec.structs.replace(lock.fetched[provider].item, messages=()),
            )
        if commit.keep_lock_ms is None:
            del self.locks[instance_id]

    def commit(self, instance_id, first, *, settles):
        chance = self.random.random
        ends = chance() < 0.15
        events = self.random.choice([1, 2, 5])
        if chance() < 0.04 and first > 1:
            first -= 1  # an event that is there already
        is_named = (first == 1) != (chance() < 0.04)
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
                name="Shop" if is_named else None,
                version="1.0.0" if is_named else None,
                framework_version=(1, 2, 3) if is_named else None,
                parent_instance_id=IDS[0] if is_named and chance() < 0.1 else None,
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

    def enqueue_new(self):
        if not self.unused:
            return self.enqueue(self.random.choice(IDS[:12]))
        instance_id = self.unused.pop(0)
        if self.random.random() < 0.1:
            self.unused.insert(0, instance_id)  # something more for it
            return self.raise_event(instance_id)
        name = self.random.choice(["Shop"] * 9 + ["Child"])
        self.queued = [*self.queued[-5:], instance_id]
        message = start_of(instance_id, name, self.random.choice([None] * 9 + [IDS[0]]))
        delay_ms = self.random.choice([None] * 9 + [10])

        def call(provider):
            return provider.enqueue_for_orchestrator(message, delay_ms, EnqueueCondition.ABSENT)

        return call, nothing

    def raise_event(self, instance_id):
        message = event_for(instance_id)
        condition = self.random.choice([None, EnqueueCondition.ALIVE])
        return (
            lambda provider: provider.enqueue_for_orchestrator(message, condition=condition)
        ), nothing

    def suspend(self, instance_id):
        if self.locks:
            instance_id = self.random.choice(list(self.locks))
        if self.random.random() < 0.5:
            return (lambda provider: provider.admin.suspend_instance(instance_id)), nothing
        return (lambda provider: provider.admin.resume_instance(instance_id)), nothing

    def take_work(self, _instance_id):
        return (lambda provider: identities(provider.fetch_work_items(3, KEEP_MS, 0))), nothing


def nothing():
    pass


def described(fetched):
    """All that is the same in each store."""
    bodies = [(each.body, each.attempt_count) for each in fetched.item.messages]
    item = msgspec.structs.replace(fetched.item, messages=())
    return item, bodies, fetched.attempt_count, fetched.continues


async def identities(fetch):
    return [(work.identity, work.attempt_count) for work in await fetch]


async def outcome(verb, provider):
    try:
        return await verb(provider)
    except PerdureError as error:
        return type(error).__name__


async def observe(provider, instance_ids):
    calls = totals(provider.admin) | details(provider, provider.admin, instance_ids)
    return {name: await look(call, exact_times=True) for name, call in calls.items()}


async def compare_bursts(path, seed, rounds):
    clock = ManualClock(1_800_000_000_000)
    bursts = Bursts(seed)
    async with (
        ModelProvider(clock=clock) as model,
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
                if answer in (None, True) or isinstance(answer, tuple):
                    note()
            clock.advance(bursts.random.choice([0, 1, 30]))


@pytest.mark.parametrize("seed", range(12))
def test_bursts_of_verbs_do_what_the_model_does_one_by_one(tmp_path, seed):
    asyncio.run(compare_bursts(tmp_path / "store.db", seed, 50))


@pytest.mark.parametrize("seed", range(4))
def test_single_verbs_do_the_same_when_they_are_written_as_runs(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(writer, "TOGETHER_MIN", 1)

    asyncio.run(compare_bursts(tmp_path / "store.db", 100 + seed, 50))


async def give_back(provider):
    """The oldest start, not to be fetched again before the next one."""
    fetched = await provider.fetch_orchestration_item(KEEP_MS, 0)
    await provider.abandon_orchestration_item(fetched.lock_token)


def nothing_special(provider):
    return provider.enqueue_for_orchestrator(start_of("z"))


def event_for_one(provider):
    return provider.enqueue_for_orchestrator(event_for("c"))


def second_start_for_one(provider):
    return provider.enqueue_for_orchestrator(start_of("c", "Child"))


def suspend_one(provider):
    return provider.admin.suspend_instance("c")


async def first_turns_from_the_queue(provider, before, after):
    """Six starts are fetched and begun at once, then events are fetched for them."""
    ids = list("abcdef")
    for each in ids:
        await provider.enqueue_for_orchestrator(start_of(each))
    await before(provider)

    async def fetch():
        return await asyncio.gather(
            *[provider.fetch_orchestration_item(KEEP_MS, 0, FILTERS[1], "me") for _ in range(8)]
        )

    begun = [each for each in await fetch() if each is not None]
    await after(provider)
    first = TurnCommit(
        execution_id=1,
        history_delta=(HistoryRecord(event_id=1, data="1"),),
        metadata=ExecutionMetadata(name="Shop", version="1.0.0", framework_version=(1, 2, 3)),
        keep_lock_ms=KEEP_MS,
    )
    commits = [
        msgspec.structs.replace(
            first, consumed=tuple(message.message_id for message in each.item.messages)
        )
        for each in begun
    ]
    acks = [
        outcome(
            lambda store, a=each, b=commit: store.ack_orchestration_item(a.lock_token, b), provider
        )
        for each, commit in zip(begun, commits, strict=True)
    ]
    answers = await asyncio.gather(*acks)
    after_acks = await observe(provider, ids)
    for each in ids:
        await provider.enqueue_for_orchestrator(event_for(each))
    more = [each and described(each) for each in await fetch()]
    fetched = [described(each) for each in begun]
    return fetched, answers, after_acks, more, await observe(provider, ids)


@pytest.mark.parametrize(
    "after", [nothing_special, event_for_one, suspend_one, second_start_for_one]
)
@pytest.mark.parametrize(
    "before", [nothing_special, event_for_one, second_start_for_one, suspend_one, give_back]
)
def test_first_turns_from_the_queue_do_what_the_model_does(tmp_path, before, after):
    async def compare():
        clock = ManualClock(1_800_000_000_000)
        async with (
            ModelProvider(clock=clock) as model,
            SqliteProvider(tmp_path / "s.db", clock=clock, durability="relaxed") as sqlite,
        ):
            expected = await first_turns_from_the_queue(model, before, after)
            assert await first_turns_from_the_queue(sqlite, before, after) == expected
            return expected

    _, answers, _, more, _ = asyncio.run(compare())

    assert answers.count(None) >= 5
    assert any(each is not None and each[-1] for each in more)


async def two_turns_of_one_lock(path):
    def turn(*event_ids, **fields):
        records = tuple(HistoryRecord(event_id=each, data="{}") for each in event_ids)
        return TurnCommit(execution_id=1, history_delta=records, keep_lock_ms=KEEP_MS, **fields)

    named = ExecutionMetadata(name="Shop", version="1.0.0")
    async with SqliteProvider(path, clock=ManualClock()) as provider:
        for name in ("x", "y"):
            first = turn(1, metadata=named)
            assert await provider.start_orchestration_item(start_of(name), first, name, "me")

        answers = await asyncio.gather(
            *(
                provider.ack_orchestration_item(name, turn(event_id))
                for name, event_id in (("x", 2), ("y", 2), ("x", 3), ("x", 3), ("y", 3))
            ),
            return_exceptions=True,
        )

        assert [type(answer) for answer in answers] == [
            *[type(None)] * 3,
            DuplicateEvent,
            type(None),
        ]
        for name in ("x", "y"):
            assert [record.event_id for record in await provider.read(name)] == [1, 2, 3]


def test_two_turns_of_one_lock_in_a_burst_are_committed_one_after_the_other(tmp_path):
    asyncio.run(two_turns_of_one_lock(tmp_path / "store.db"))
