"""The smallest reproduction of each thing that a failover of Postgres must not do to the data.

    python -m campaigns.postgres_failover --case event_twice      (with tests/ on the path)

Each case sets up a cluster of its own, does one thing to it, and raises AssertionError with what
it has seen if the promise does not hold. What it returns is a figure for the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil

from patience import run_and_watch
from perdure import Client, Runtime, RuntimeOptions, activity, orchestration, wait_for_event
from perdure.conformance import factories
from perdure.errors import LockLost, PerdureError, WaitTimeout
from perdure.providers.postgres import PostgresProvider
from perdure.providers.records import CustomStatusChange, ExecutionMetadata, TurnCommit
from postgres_cluster import Cluster, Node, await_that

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.records import FetchedOrchestration

LOCK_MS = 60_000
OWNER = "owner"

_runs: Counter[int] = Counter()


@orchestration
async def nap(seconds: float) -> None:
    await asyncio.sleep(seconds)


@activity
async def hold(number: int, seconds: float) -> None:
    _runs[number] += 1
    await asyncio.sleep(seconds)


@orchestration
async def holder(number: int, seconds: float) -> None:
    await hold(number, seconds)


@orchestration
async def hold_and_nap(number: int, seconds: float) -> None:
    await hold(number, seconds)
    await asyncio.sleep(seconds)


@activity
async def one() -> int:
    return 1


@orchestration
async def count(steps: int) -> int:
    return sum([await one() for _ in range(steps)])


@orchestration
async def listener() -> int:
    return await wait_for_event("done", int)


HANDLERS = [nap, hold, holder, hold_and_nap, one, count, listener]


# --- 1. An event or a message is heard once


def event_twice() -> str:
    """A turn cannot consume a message whose mark the crash has lost, and then get it again.

    The mark of the fetch is not flushed when the server dies, the kept lock is. The commit under
    that lock has to be refused, in the short form and in the general form.
    """
    ways = {"short": None, "general": CustomStatusChange(value="1")}
    heard = {way: run_and_watch(_hear_after_crash(change)) for way, change in ways.items()}
    assert all(times == 1 for times in heard.values()), f"one event was heard: {heard}"
    return f"each heard once: {heard}"


async def _hear_after_crash(change: CustomStatusChange | None) -> int:
    """Return how many committed turns have heard the one event; one more if it is still queued."""
    # The walwriter sleeps through the case, so that an unflushed mark stays unflushed.
    with Cluster(synchronous=True, wal_writer_delay="10s") as cluster:
        async with PostgresProvider(cluster.dsn) as provider:
            await _begin(provider, "x")
            await provider.enqueue_for_orchestrator(factories.raised("x", data=100))
            fetched = await _fetch(provider)
            await asyncio.to_thread(kill_and_promote, cluster)
            heard = 0
            for _ in range(5):
                if fetched is None:
                    break
                commit = TurnCommit(
                    execution_id=1,
                    history_delta=(factories.event("x", 2 + heard, data=100),),
                    consumed=tuple(each.message_id for each in fetched.item.messages),
                    custom_status=change,
                    keep_lock_ms=LOCK_MS,
                )
                with contextlib.suppress(PerdureError):
                    await provider.ack_orchestration_item(fetched.lock_token, commit)
                    heard += 1
                fetched = await _fetch(provider)
        return heard + int(cluster.primary.value("SELECT count(*) FROM perdure.orchestrator_queue"))


def work_twice() -> str:
    """A completion under a lock that the crash has lost is refused, and the work is done again."""
    return run_and_watch(_work_after_crash())


async def _work_after_crash() -> str:
    with Cluster(synchronous=True, wal_writer_delay="10s") as cluster:
        async with PostgresProvider(cluster.dsn) as provider:
            await _begin(provider, "x", worker_items=(factories.activity("x"),))
            fetched = await provider.fetch_work_item(LOCK_MS, 0)
            assert fetched is not None
            await asyncio.to_thread(kill_and_promote, cluster)
            accepted = 0
            while fetched is not None:
                with contextlib.suppress(LockLost):
                    await provider.ack_work_item(fetched.lock_token, factories.completion("x"))
                    accepted += 1
                fetched = await provider.fetch_work_item(LOCK_MS, 0)
            completions = cluster.primary.value(
                "SELECT count(*) FROM perdure.orchestrator_queue WHERE kind = 'ActivityCompleted'"
            )
            assert (accepted, completions) == (1, 1), f"{accepted} accepted, {completions} queued"
            return "one completion accepted, one queued"


# --- 2. A timer is never early by the store's clock, a lock keeps its length


def timer_early_after_repeat() -> str:
    """A stored answer that is given again does not set the clock back.

    A commit waits two seconds for its standby, then its connection is ended. The repeat gets the
    stored answer of two seconds ago.
    """
    return run_and_watch(_nap_after_repeat(seconds=2.0))


async def _nap_after_repeat(seconds: float) -> str:
    with Cluster(synchronous=True) as cluster:
        async with Runtime(PostgresProvider(cluster.dsn), HANDLERS) as runtime:
            await (await runtime.start(nap, 0.01)).result(30)
            cluster.standby.freeze()
            waiting = asyncio.create_task(runtime.start(nap, 0.01))
            await asyncio.to_thread(_await_hanging_commit, cluster.primary)
            await asyncio.sleep(seconds)
            end_hanging_commits(cluster.primary)
            cluster.standby.thaw()
            await waiting
            behind_ms = _store_ms(cluster.primary) - runtime.provider.clock().now_ms()
            took = await _timed(runtime, seconds)
            assert took >= seconds, (
                f"sleep({seconds:g}) took {took:.3f} s, the clock is {behind_ms} ms behind"
            )
            return f"sleep({seconds:g}) took {took:.3f} s"


def timer_early_on_faster_clock() -> str:
    """A timer that is set after a failover to a server 30 s ahead is not early."""
    return run_and_watch(_nap_on_faster_clock(seconds=5.0))


async def _nap_on_faster_clock(seconds: float) -> str:
    with Cluster(synchronous=True, skew_seconds=30) as cluster:
        async with Runtime(PostgresProvider(cluster.dsn), HANDLERS) as runtime:
            await (await runtime.start(nap, 0.01)).result(30)
            await asyncio.to_thread(kill_and_promote, cluster)
            took = await _timed(runtime, seconds)
            assert took >= seconds, f"sleep({seconds:g}) took {took:.3f} s"
            return f"sleep({seconds:g}) took {took:.3f} s"


def locks_stolen_on_faster_clock() -> str:
    """Activities whose locks were given by the old server's clock do not run twice.

    Five activities of six seconds hold locks of ten when a server takes over that is 30 s ahead.
    """
    return run_and_watch(_hold_on_faster_clock(activities=5, seconds=6.0))


async def _hold_on_faster_clock(activities: int, seconds: float) -> str:
    _runs.clear()
    with Cluster(synchronous=True, skew_seconds=30) as cluster:
        async with (
            Runtime(PostgresProvider(cluster.dsn), HANDLERS) as runtime,
            Runtime(PostgresProvider(cluster.dsn), HANDLERS),
        ):
            handles = [await runtime.start(holder, each, seconds) for each in range(activities)]
            await asyncio.to_thread(await_that, lambda: len(_runs) == activities, "all run")
            await asyncio.sleep(1)  # the marks of the fetches are flushed and replicated
            await asyncio.to_thread(kill_and_promote, cluster)
            for handle in handles:
                await handle.result(60)
    twice = sum(times > 1 for times in _runs.values())
    assert not twice, f"{twice} of {activities} activities ran twice"
    return f"each of {activities} activities ran once"


def message_overtaken_on_slower_clock() -> str:
    """A message that was sent before a failover to a server 30 s behind is not held back there."""
    return run_and_watch(_send_around_failover())


async def _send_around_failover() -> str:
    with Cluster(synchronous=True, skew_seconds=-30) as cluster:
        async with PostgresProvider(cluster.dsn) as provider:
            await _begin(provider, "x")
            await provider.enqueue_for_orchestrator(factories.raised("x", data="first"))
            await asyncio.to_thread(kill_and_promote, cluster)
            await provider.enqueue_for_orchestrator(factories.raised("x", data="second"))
            fetched = await _fetch(provider)
            assert fetched is not None
            heard = [
                word
                for body in factories.bodies(fetched)
                for word in ("first", "second")
                if word in body
            ]
    assert heard == ["first", "second"], f"of two messages the fetch brings {heard}"
    return "both messages come, in their order"


# --- 3. An instance is not Blocked for what the store did


def blocked_while_standby_is_away(
    *, away_seconds: float = 25.0, instances: int = 20, attempts: int = 3
) -> str:
    """Instances whose commits hang because the standby is away go on when it is back.

    Short locks and few attempts stand for a long absence: with the defaults it takes 140 s.
    """
    options = RuntimeOptions(
        orchestration_lock_timeout=1, activity_lock_timeout=1, max_attempts=attempts
    )
    return run_and_watch(_stay_away(options, away_seconds, instances))


async def _stay_away(options: RuntimeOptions, seconds: float, instances: int) -> str:
    with Cluster(synchronous=True) as cluster:
        async with (
            Client(PostgresProvider(cluster.dsn)) as client,
            Runtime(PostgresProvider(cluster.dsn), HANDLERS, options=options),
            Runtime(PostgresProvider(cluster.dsn), HANDLERS, options=options),
        ):
            # Due when the standby is gone: fetches find them, and no first turn can commit.
            for number in range(instances):
                await client.start(count, 5, id=f"i{number}", delay=3)
            cluster.standby.kill()
            await asyncio.sleep(seconds)
            await asyncio.to_thread(cluster.standby.start)
            await asyncio.to_thread(cluster.await_standby)
            running = (
                "SELECT count(*) FROM perdure.instances "
                "WHERE status NOT IN ('Completed', 'Blocked')"
            )
            with contextlib.suppress(AssertionError):
                await asyncio.to_thread(
                    await_that, lambda: cluster.primary.value(running) == 0, "all end", 60
                )
        states = dict(
            cluster.primary.ask("SELECT status, count(*) FROM perdure.instances GROUP BY 1")
        )
    assert states == {"Completed": instances}, f"after {seconds:g} s without the standby: {states}"
    return f"after {seconds:g} s without the standby: {states}"


def counted_while_standby_is_away(*, workers: int = 6) -> str:
    """Deliveries whose turns cannot be committed are not counted, however often workers start.

    Each worker is a new handle that takes over the expired lock of the one before.
    """
    return run_and_watch(_take_over_again(workers))


async def _take_over_again(workers: int) -> str:
    with Cluster(synchronous=True) as cluster:
        async with PostgresProvider(cluster.dsn) as provider:
            await _begin(provider, "x", worker_items=(factories.activity("x"),), keep_lock_ms=None)
            await provider.enqueue_for_orchestrator(factories.raised("x"))
        cluster.standby.kill()
        for _ in range(workers):
            async with PostgresProvider(
                cluster.dsn, answer_timeout=0.5, retry_timeout=0.5, listen=False
            ) as provider:
                with contextlib.suppress(PerdureError):
                    await provider.fetch_orchestration_item(200, 1000)
                with contextlib.suppress(PerdureError):
                    await provider.fetch_work_item(200, 1000)
        await asyncio.to_thread(cluster.standby.start)
        await asyncio.to_thread(cluster.await_standby)
        async with PostgresProvider(cluster.dsn) as provider:
            turn = await provider.fetch_orchestration_item(LOCK_MS, 60_000)
            work = await provider.fetch_work_item(LOCK_MS, 60_000)
    assert turn is not None
    assert work is not None
    counts = (turn.attempt_count, work.attempt_count)
    # One before the first worker died, one that hung until the standby was back, and this one.
    assert max(counts) <= 3, f"{workers} workers: a turn and a work item are on attempts {counts}"
    return f"{workers} workers later a turn and a work item are on attempts {counts}"


# --- 4. No hole in a history


def hole_in_history() -> str:
    """A turn whose predecessor the new primary does not have is refused.

    The second turn of three is lost by an asynchronous failover; its lock is the kept one of the
    first and still good.
    """
    return run_and_watch(_commit_ahead())


async def _commit_ahead() -> str:
    with Cluster(synchronous=False) as cluster:
        async with PostgresProvider(cluster.dsn) as provider:
            token = await _begin(provider, "x")
            await asyncio.to_thread(cluster.await_replay)
            hold_back(cluster.primary)
            await provider.ack_orchestration_item(token, _turn("x", 2))
            await asyncio.to_thread(kill_and_promote, cluster)
            with contextlib.suppress(PerdureError):
                await provider.ack_orchestration_item(token, _turn("x", 3))
        ids = [row[0] for row in cluster.primary.ask("SELECT event_id FROM perdure.history")]
    assert sorted(ids) == list(range(1, len(ids) + 1)), f"the history has the events {ids}"
    return f"the history has the events {ids}"


def stuck_after_lost_turn(*, seconds: float = 45.0) -> str:
    """A live instance that is ahead of the new primary is dropped and goes on from what is there.

    It waits for a timer that only the old primary knew of.
    """
    return run_and_watch(_wait_for_lost_timer(seconds))


async def _wait_for_lost_timer(seconds: float) -> str:
    _runs.clear()
    with Cluster(synchronous=False) as cluster:
        async with Runtime(PostgresProvider(cluster.dsn), HANDLERS) as runtime:
            handle = await runtime.start(hold_and_nap, 0, 1.0, id="x")
            await asyncio.to_thread(await_that, lambda: _runs[0] > 0, "the activity runs")
            await asyncio.to_thread(cluster.await_replay)
            hold_back(cluster.primary)
            timers = "SELECT count(*) FROM perdure.history WHERE data LIKE '%TimerCreated%'"
            await asyncio.to_thread(
                await_that, lambda: cluster.primary.value(timers) == 1, "the timer is set"
            )
            await asyncio.to_thread(kill_and_promote, cluster)
            begun = time.monotonic()
            try:
                await handle.result(seconds)
            except WaitTimeout:
                pass
            else:
                return f"it ended {time.monotonic() - begun:.1f} s after the failover"
        kinds = cluster.primary.value(
            "SELECT string_agg(data::json ->> 'type', ', ' ORDER BY event_id) FROM perdure.history"
        )
    raise AssertionError(f"it had not ended {seconds:g} s after the failover; history: {kinds}")


# --- 5. What is acknowledged has its standby


def acknowledged_without_standby(*, starts: int = 5) -> str:
    """The repeat of a commit waits for the standby as the first try did.

    The standby dies, the connections of the hanging commits are ended, the primary dies, and the
    standby is promoted.
    """
    return run_and_watch(_start_without_standby(starts, end_hanging_commits))


def acknowledged_when_cancelled(*, starts: int = 5) -> str:
    """A commit whose wait for the standby is cancelled is not acknowledged.

    The server commits it, warns, and reports success.
    """
    return run_and_watch(_start_without_standby(starts, cancel_hanging_commits))


async def _start_without_standby(starts: int, end: Callable[[Node], None]) -> str:
    with Cluster(synchronous=True) as cluster:
        async with PostgresProvider(cluster.dsn) as provider:
            cluster.standby.kill()
            calls = [
                asyncio.ensure_future(
                    provider.enqueue_for_orchestrator(factories.start(f"s{number}"))
                )
                for number in range(starts)
            ]
            await asyncio.to_thread(_await_hanging_commit, cluster.primary)
            end(cluster.primary)
            await asyncio.wait(calls, timeout=3)
            acknowledged = sum(call.done() and call.exception() is None for call in calls)
            cluster.primary.kill()
            await asyncio.to_thread(cluster.standby.start)
            await asyncio.to_thread(cluster.promote)
            await asyncio.wait(calls)
        found = cluster.primary.value("SELECT count(*) FROM perdure.orchestrator_queue")
    assert not acknowledged, (
        f"{acknowledged} of {starts} starts were acknowledged without the standby, "
        f"{found} are left after the failover"
    )
    return f"none of {starts} starts was acknowledged without the standby"


def verb_without_standby() -> str:
    """The repeat of an operator's verb, which finds nothing to write, waits for the standby too."""
    return run_and_watch(_pause_without_standby())


async def _pause_without_standby() -> str:
    with Cluster(synchronous=True) as cluster:
        async with PostgresProvider(cluster.dsn, retry_timeout=30) as provider:
            await provider.enqueue_for_orchestrator(factories.start("x"))
            cluster.standby.kill()
            call = asyncio.ensure_future(provider.admin.suspend_instance("x"))
            await asyncio.to_thread(_await_hanging_commit, cluster.primary)
            end_hanging_commits(cluster.primary)
            done, _ = await asyncio.wait((call,), timeout=3)
            assert not done, "the pause was acknowledged without the standby"
            await asyncio.to_thread(cluster.standby.start)
            await call
            paused = (await provider.admin.get_instance_info("x")).status
    return f"acknowledged when the standby was back: {paused}"


CASES: dict[str, tuple[int, Callable[[], str]]] = {
    "event_twice": (1, event_twice),
    "work_twice": (1, work_twice),
    "timer_early_after_repeat": (2, timer_early_after_repeat),
    "timer_early_on_faster_clock": (2, timer_early_on_faster_clock),
    "locks_stolen_on_faster_clock": (2, locks_stolen_on_faster_clock),
    "message_overtaken_on_slower_clock": (2, message_overtaken_on_slower_clock),
    "blocked_while_standby_is_away": (3, blocked_while_standby_is_away),
    "counted_while_standby_is_away": (3, counted_while_standby_is_away),
    "hole_in_history": (4, hole_in_history),
    "stuck_after_lost_turn": (4, stuck_after_lost_turn),
    "acknowledged_without_standby": (5, acknowledged_without_standby),
    "acknowledged_when_cancelled": (5, acknowledged_when_cancelled),
    "verb_without_standby": (5, verb_without_standby),
}


# --- steps


async def _begin(provider: PostgresProvider, instance_id: str, **commit: Any) -> str:
    """Start an instance, commit its first turn and keep its lock; return the token."""
    await provider.enqueue_for_orchestrator(factories.start(instance_id))
    fetched = await _fetch(provider)
    assert fetched is not None
    await provider.ack_orchestration_item(
        fetched.lock_token,
        TurnCommit(
            execution_id=1,
            history_delta=(factories.started(instance_id),),
            metadata=ExecutionMetadata(name=factories.NAME, version=factories.VERSION),
            **{"keep_lock_ms": LOCK_MS, **commit},
        ),
    )
    return fetched.lock_token


def _turn(instance_id: str, event_id: int) -> TurnCommit:
    return TurnCommit(
        execution_id=1,
        history_delta=(factories.event(instance_id, event_id),),
        consumed=(),
        keep_lock_ms=LOCK_MS,
    )


async def _fetch(provider: PostgresProvider) -> FetchedOrchestration | None:
    return await provider.fetch_orchestration_item(LOCK_MS, 0, owner=OWNER)


def kill_and_promote(cluster: Cluster) -> None:
    cluster.primary.kill()
    cluster.promote()


def hold_back(primary: Node) -> None:
    """Let the standby get nothing more."""
    senders = primary.processes("walsender")
    assert senders, "no standby is attached"
    for process in senders:
        process.suspend()
    stopped = psutil.STATUS_STOPPED
    await_that(lambda: all(each.status() == stopped for each in senders), "the senders stop")


def _await_hanging_commit(primary: Node) -> None:
    await_that(lambda: bool(_hanging(primary)), "a commit waits for the standby")


def _hanging(primary: Node) -> list[tuple[Any, ...]]:
    return primary.ask("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'")


def end_hanging_commits(primary: Node) -> None:
    for (process_id,) in _hanging(primary):
        primary.ask("SELECT pg_terminate_backend(%s)", process_id)


def cancel_hanging_commits(primary: Node) -> None:
    for (process_id,) in _hanging(primary):
        primary.ask("SELECT pg_cancel_backend(%s)", process_id)


def _store_ms(node: Node) -> int:
    return int(node.value("SELECT perdure.now_ms()"))


async def _timed(runtime: Runtime, seconds: float) -> float:
    begun = time.monotonic()
    await (await runtime.start(nap, seconds)).result(120)
    return time.monotonic() - begun
