"""Running activities: threads, time limits, heartbeats, tags, sessions, cancellation."""

import asyncio
import contextvars
import threading
import time
from collections import Counter
from functools import partial

import pytest

from integration.conditions import until, waiting
from patience import HANG_SECONDS
from perdure import (
    ActivityFailed,
    InMemoryProvider,
    OrchestrationFailed,
    Retry,
    Runtime,
    RuntimeOptions,
    TagFilter,
    activity,
    activity_info,
    heartbeat,
    is_cancelled,
    last_heartbeat,
    orchestration,
    wait_for_event,
)
from perdure.arguments import INTEGER_MAX
from perdure.clock import ManualClock
from perdure.conformance.factories import activity as work_item
from perdure.errors import UsageError
from perdure.providers.records import SessionFetch


def calling(handler, *args, **options):
    """An orchestration that calls one activity."""

    @orchestration
    async def call() -> object:
        return await handler.options(**options)(*args)

    return call


async def test_a_sync_activity_runs_in_a_thread(make_runtime):
    @activity
    def where() -> str:
        return threading.current_thread().name

    flow = calling(where)
    async with make_runtime([flow, where]) as runtime:
        handle = await runtime.start(flow)

        assert str(await handle.result(HANG_SECONDS)).startswith("perdure-activity")


async def test_an_activity_for_which_there_is_no_thread_waits_for_one(
    make_environment, monkeypatch
):
    ran, refused, start = [], [], threading.Thread.start

    def start_later(thread):
        if thread.name.startswith("perdure-activity") and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    @activity
    def count(number: int) -> int:
        ran.append(number)
        return number

    @orchestration
    async def flow() -> list[int]:
        return list(await asyncio.gather(*[count(number) for number in range(5)]))

    monkeypatch.setattr(threading.Thread, "start", start_later)
    async with make_environment([flow, count]) as environment:
        assert await environment.run(flow) == [0, 1, 2, 3, 4]

    assert refused
    assert sorted(ran) == [0, 1, 2, 3, 4]


async def test_an_async_activity_is_bounded_in_time(make_runtime):
    @activity(timeout=0.05)
    async def slow() -> None:
        await asyncio.Event().wait()

    flow = calling(slow)
    async with make_runtime([flow, slow]) as runtime:
        with pytest.raises(OrchestrationFailed, match="TimeoutError"):
            await (await runtime.start(flow)).result(HANG_SECONDS)


async def test_an_activity_that_stops_reporting_is_given_up(make_runtime):
    @activity(heartbeat_timeout=0.05, retry=Retry(max_attempts=2, first_delay=0))
    async def reporter() -> str:
        seen = last_heartbeat(int)
        if activity_info().attempt == 1:
            heartbeat(41)
            await asyncio.Event().wait()
        return f"went on after {seen}"

    flow = calling(reporter)
    async with make_runtime([flow, reporter]) as runtime:
        assert (await (await runtime.start(flow)).result(HANG_SECONDS)).startswith("went on")


async def test_some_errors_are_not_worth_another_attempt(make_runtime):
    attempts = []

    @activity(retry=Retry(max_attempts=5, first_delay=0, never=(LookupError,)))
    async def picky() -> None:
        attempts.append(1)
        raise KeyError("gone")

    flow = calling(picky)
    async with make_runtime([flow, picky]) as runtime:
        with pytest.raises(OrchestrationFailed, match="KeyError"):
            await (await runtime.start(flow)).result(HANG_SECONDS)
        assert len(attempts) == 1


async def test_retries_end_at_the_deadline(make_environment):
    attempts = []

    @activity(retry=Retry(max_attempts=1000, first_delay=2, multiplier=1, jitter=0), deadline=20)
    async def hopeless() -> None:
        attempts.append(1)
        raise ConnectionError("down")

    flow = calling(hopeless)
    async with make_environment([flow, hopeless]) as env:
        with pytest.raises(OrchestrationFailed, match="down"):
            await env.run(flow)
        assert len(attempts) == 10


async def test_a_retry_that_would_begin_after_the_deadline_is_not_waited_for(make_runtime):
    attempts = []
    hourly_at_last = Retry(max_attempts=1000, first_delay=0.01, multiplier=1e5, max_delay=3600)

    @activity(retry=hourly_at_last, deadline=600)
    async def hopeless() -> None:
        attempts.append(1)
        raise ConnectionError("down")

    flow = calling(hopeless)
    async with make_runtime([flow, hopeless]) as runtime:
        with pytest.raises(OrchestrationFailed, match="down"):
            await (await runtime.start(flow)).result(HANG_SECONDS)
        assert len(attempts) == 2


async def test_a_cause_can_be_caught_by_name(make_runtime):
    @activity
    async def broken() -> None:
        raise FileNotFoundError("no such thing")

    @orchestration
    async def careful() -> str:
        try:
            await broken()
        except ActivityFailed as error:
            if "OSError" in error.lineage:
                return f"{error.type_name}: {error.message}"
        return "missed"

    async with make_runtime([careful, broken]) as runtime:
        handle = await runtime.start(careful)

        assert await handle.result(HANG_SECONDS) == "FileNotFoundError: no such thing"


async def test_a_tagged_activity_waits_for_a_worker_with_the_tag(make_runtime, make_provider):
    @activity(tag="gpu")
    async def render() -> str:
        return "rendered"

    flow = calling(render)
    provider = make_provider()
    async with make_runtime([flow, render], provider) as runtime:
        handle = await runtime.start(flow, id="r")

        async def is_queued():
            admin = provider.admin
            return bool(await admin.list_work("r"))

        await until(is_queued)
    async with make_runtime([flow, render], provider, tags=TagFilter.default_and("gpu")) as gpu:
        assert await gpu.get(handle.id).result(HANG_SECONDS) == "rendered"


async def test_a_session_that_ends_makes_room_for_another_at_once(make_runtime):
    begun, may_end = asyncio.Event(), asyncio.Event()

    @activity
    async def hold() -> None:
        begun.set()
        await may_end.wait()

    @activity
    async def go_on() -> None: ...

    @orchestration
    async def holder() -> None:
        await hold.options(session="one")()

    @orchestration
    async def another() -> None:
        await go_on.options(session="two")()

    handlers = [holder, another, hold, go_on]
    # A fetch waits for the shorter of poll interval and lock: so long that only a wake ends it.
    long = {"poll_interval": 600, "activity_lock_timeout": 600}
    async with make_runtime(handlers, sessions=1, **long) as runtime:
        await runtime.start(holder)
        await begun.wait()
        handle = await runtime.start(another)
        await waiting(runtime, handle.id)
        may_end.set()

        await handle.result(HANG_SECONDS)


async def test_a_session_counts_until_the_last_of_its_activities_has_ended(make_runtime):
    begun = 0
    may_end = [asyncio.Event(), asyncio.Event()]

    @activity(session="one")
    async def hold(number: int) -> None:
        nonlocal begun
        begun += 1
        await may_end[number].wait()

    @orchestration
    async def holder() -> None:
        await asyncio.gather(hold(0), hold(1))

    async with make_runtime([holder, hold], sessions=1) as runtime:
        handle = await runtime.start(holder)
        await until(lambda: begun == 2)
        activities = runtime._running.activities
        may_end[0].set()
        await until(lambda: activities.busy == 1)
        assert activities._sessions == {"one": 1}
        may_end[1].set()

        await handle.result(HANG_SECONDS)
        assert activities._sessions == {}


@activity
async def other_work() -> None: ...


class CountingRenewals(InMemoryProvider):
    """Counts the renewals of sessions that were answered."""

    renewals = 0

    async def renew_session_lock(self, *args, **kwargs):
        renewed = await super().renew_session_lock(*args, **kwargs)
        self.renewals += 1
        return renewed


async def test_the_lease_of_a_session_is_renewed_while_its_worker_runs():
    clock = ManualClock()
    provider = CountingRenewals(clock=clock)
    options = RuntimeOptions(worker_id="mine", session_lock_timeout=30)
    mine = SessionFetch(owner_id="mine", lock_timeout_ms=30_000)
    theirs = SessionFetch(owner_id="theirs", lock_timeout_ms=30_000)

    async def sleeps():
        return (clock.next_due_ms() or INTEGER_MAX) <= clock.now_ms() + 250

    async with Runtime(provider, [other_work], options=options):
        await until(sleeps)
        for number in (1, 2):
            await provider.enqueue_for_worker(work_item("x", 1, number, session="s"))
        assert await provider.fetch_work_item(3_600_000, 0, mine)
        for count in range(1, 6):

            async def is_renewed(count=count):
                return provider.renewals == count

            clock.advance(12_000)
            await until(is_renewed)

        assert await provider.fetch_work_item(1_000, 0, theirs) is None
        assert await provider.fetch_work_item(1_000, 0, mine)


async def test_activities_of_a_session_run_on_one_worker(make_runtime):
    @activity(session="s")
    async def whose() -> str:
        return activity_info().worker_id

    @orchestration
    async def several() -> set[str]:
        return set(await asyncio.gather(*[whose() for _ in range(5)]))

    async with make_runtime([several, whose]) as runtime:
        assert await (await runtime.start(several)).result(HANG_SECONDS) == {runtime.worker_id}


async def test_an_unwanted_activity_is_told_and_its_result_dropped(make_runtime):
    begun, told = threading.Event(), threading.Event()

    @activity
    def long_one() -> str:
        begun.set()
        while not is_cancelled():
            time.sleep(0.005)
        told.set()
        return "too late"

    @orchestration
    async def impatient() -> str:
        unwanted = asyncio.ensure_future(long_one())
        await wait_for_event("enough", None)
        unwanted.cancel()
        return "gave up"

    async with make_runtime([impatient, long_one], activity_lock_timeout=0.5) as runtime:
        handle = await runtime.start(impatient)
        assert await asyncio.to_thread(begun.wait, 15)
        await handle.raise_event("enough")

        assert await handle.result(HANG_SECONDS) == "gave up"
        assert await asyncio.to_thread(told.wait, 15)


async def test_an_idempotency_key_is_the_same_for_every_attempt(make_runtime):
    keys = []

    @activity(retry=Retry(max_attempts=3, first_delay=0))
    async def charge() -> str:
        keys.append(activity_info().idempotency_key)
        if len(keys) < 3:
            raise ConnectionError("again")
        return keys[-1]

    flow = calling(charge)
    async with make_runtime([flow, charge]) as runtime:
        await (await runtime.start(flow, id="i")).result(HANG_SECONDS)

        assert len(keys) == 3
        assert len(set(keys)) == 1
        assert keys[0].startswith("i/1/2/")


async def test_a_thread_that_an_activity_starts_is_told_how_to_report(make_runtime):
    told = []

    @activity
    def parent() -> None:
        def alone() -> None:
            try:
                heartbeat(1)
            except UsageError as error:
                told.append(str(error))

        for target in (alone, partial(contextvars.copy_context().run, heartbeat, 2)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    flow = calling(parent)
    async with make_runtime([flow, parent]) as runtime:
        await (await runtime.start(flow)).result(HANG_SECONDS)

    assert len(told) == 1
    assert "contextvars.copy_context().run" in told[0]


async def test_a_result_that_is_not_json_fails_the_activity(make_runtime):
    @activity
    async def bad() -> object:
        return object()

    flow = calling(bad)
    async with make_runtime([flow, bad]) as runtime:
        with pytest.raises(OrchestrationFailed, match="cannot be written as JSON"):
            await (await runtime.start(flow)).result(HANG_SECONDS)


class CrossingRenewals(InMemoryProvider):
    """A renewal that crosses the outcome of a failed attempt is answered first: no lock."""

    tell_lost = staticmethod(lambda _tokens: None)

    async def ack_work_item(self, lock_token, completion=None, retry=None):
        await super().ack_work_item(lock_token, completion, retry)
        if retry is not None:
            self.tell_lost(frozenset({lock_token}))
            await asyncio.sleep(0)


async def test_a_lock_that_ends_with_the_outcome_of_its_attempt_costs_no_slot():
    attempts: Counter[int] = Counter()

    @activity(retry=Retry(max_attempts=2, first_delay=0.001))
    async def second_time(n: int) -> int:
        attempts[n] += 1
        if attempts[n] == 1:
            raise ValueError(n)
        return n

    @orchestration
    async def one_by_one() -> list[int]:
        return [await second_time(n) for n in range(5)]

    provider = CrossingRenewals()
    async with Runtime(
        provider, [one_by_one, second_time], options=RuntimeOptions(activity_slots=1)
    ) as runtime:
        activities = runtime._running.activities
        provider.tell_lost = activities.lost_locks
        handle = await runtime.start(one_by_one)

        assert await handle.result(HANG_SECONDS) == [0, 1, 2, 3, 4]
        assert activities.lock_tokens == []


@activity
def run_out() -> int:
    return next(iter([]))


@activity
def leave_thread() -> int:
    raise SystemExit("bye")


@activity
async def leave_loop() -> int:
    raise SystemExit("bye")


@pytest.mark.parametrize(
    ("handler", "named"),
    [(run_out, "StopIteration"), (leave_thread, "SystemExit"), (leave_loop, "bye")],
)
async def test_an_activity_that_leaves_by_a_side_door_has_failed(make_runtime, handler, named):
    flow = calling(handler)
    async with make_runtime([flow, handler]) as runtime:
        handle = await runtime.start(flow)

        with pytest.raises(OrchestrationFailed, match=named):
            await handle.result(HANG_SECONDS)
