"""Cases of the failover campaign about servers: which one is used, and how long it is waited for.

    python -m campaigns.postgres_failover --case split_brain_thawed      (with tests/ on the path)

As in ``failover_cases``, each case sets up a cluster of its own and raises AssertionError if the
promise does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from campaigns.failover_cases import HANDLERS, count, kill_and_promote, listener, nap, one
from patience import run_and_watch
from perdure import Client, Runtime
from perdure.conformance import factories
from perdure.errors import PerdureError, StoreBusy
from perdure.providers.postgres import PostgresProvider
from perdure.providers.postgres.address import PRIMARY_WANTED
from postgres_bouncer import Bouncer
from postgres_cluster import Cluster, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

SESSIONS_MAX = 22
"""Two handles with a pool of ten and a connection that listens."""
LEAVES_SECONDS = 20.0
"""A process that is connected to an old primary only learns of the new one within this time."""


# --- 6. No work on an older timeline


def split_brain_resurrected(*, starts: int = 200) -> str:
    """A process that has worked on the new primary does not go back to the resurrected old one."""
    return run_and_watch(_split(starts, _resurrect))


def split_brain_thawed(*, starts: int = 200) -> str:
    """A process that has worked on the new primary does not go back to the thawed old one."""
    return run_and_watch(_split(starts, _freeze_and_thaw))


def split_brain_side_by_side(*, seconds: float = LEAVES_SECONDS) -> str:
    """A process whose pool stays on the old primary leaves it soon for the new one of the list.

    What it has had acknowledged until then is only on the old one: no client can prevent that.
    """
    return run_and_watch(_leave(seconds))


def split_brain_at_opening() -> str:
    """A process that is started beside two primaries works on the new one, though the old is first.

    Both are named, and the old one comes first in the list.
    """
    return run_and_watch(_open_between_two())


def split_brain_behind_pooler(*, starts: int = 20) -> str:
    """Nothing is acknowledged when a pooler leads transactions back to the old primary."""
    return run_and_watch(_be_led_back(starts))


async def _resurrect(cluster: Cluster, provider: PostgresProvider) -> None:
    await asyncio.to_thread(kill_and_promote, cluster)
    await provider.enqueue_for_orchestrator(factories.start("seen"))
    await asyncio.to_thread(cluster.standby.start)


async def _freeze_and_thaw(cluster: Cluster, provider: PostgresProvider) -> None:
    cluster.primary.freeze()
    await asyncio.to_thread(cluster.promote)
    await provider.enqueue_for_orchestrator(factories.start("seen"))
    cluster.standby.thaw()


async def _leave(seconds: float) -> str:
    with Cluster(synchronous=False) as cluster:
        async with PostgresProvider(cluster.dsn) as provider:
            await provider.enqueue_for_orchestrator(factories.start("before"))
            await asyncio.to_thread(cluster.await_replay)
            await asyncio.to_thread(cluster.promote)
            begun = time.monotonic()
            number = 0
            while (took := time.monotonic() - begun) < seconds + 10:
                number += 1
                await provider.enqueue_for_orchestrator(factories.start(f"s{number}"))
                if f"s{number}" in _queued(cluster.primary):
                    break
                await asyncio.sleep(0.1)
            for late in range(100):
                await provider.enqueue_for_orchestrator(factories.start(f"late{late}"))
        astray = {each for each in _queued(cluster.standby) if each.startswith("late")}
    assert took < seconds, f"the process was on the old primary for {took:.0f} s"
    assert not astray, f"{len(astray)} later starts are only on the old primary"
    return f"left the old primary after {took:.1f} s, all later starts are on the new one"


async def _open_between_two() -> str:
    with Cluster(synchronous=False) as cluster:
        async with PostgresProvider(cluster.dsn) as provider:
            await provider.enqueue_for_orchestrator(factories.start("before"))
        await asyncio.to_thread(cluster.await_replay)
        await asyncio.to_thread(cluster.promote)
        async with PostgresProvider(cluster.dsn) as provider:
            await provider.enqueue_for_orchestrator(factories.start("after"))
        assert "after" in _queued(cluster.primary), "it went to the old primary"
    return "it works on the new primary"


async def _be_led_back(starts: int) -> str:
    with Cluster(synchronous=False) as cluster, Bouncer(cluster) as bouncer:
        provider = PostgresProvider(bouncer.dsn, prepare=False, listen=False, retry_timeout=1)
        async with provider:
            await provider.enqueue_for_orchestrator(factories.start("before"))
            await asyncio.to_thread(cluster.await_replay)
            await asyncio.to_thread(cluster.promote)
            bouncer.turn()
            await provider.enqueue_for_orchestrator(factories.start("seen"))
            assert "seen" in _queued(cluster.primary), "the pooler has not turned"
            cluster.primary, cluster.standby = cluster.standby, cluster.primary
            bouncer.turn()
            calls = [
                provider.enqueue_for_orchestrator(factories.start(f"s{number}"))
                for number in range(starts)
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
    said = {str(each) for each in outcomes if isinstance(each, PerdureError)}
    acknowledged = sum(each is True for each in outcomes)
    assert not acknowledged, f"{acknowledged} of {starts} starts were acknowledged"
    assert all("timeline" in each for each in said), said
    return f"none of {starts} starts was acknowledged"


async def _split(
    starts: int, divide: Callable[[Cluster, PostgresProvider], Coroutine[Any, Any, None]]
) -> str:
    with Cluster(synchronous=False) as cluster:
        async with PostgresProvider(cluster.dsn, retry_timeout=60) as provider:
            await provider.enqueue_for_orchestrator(factories.start("before"))
            await asyncio.to_thread(cluster.await_replay)
            await divide(cluster, provider)
            acknowledged: set[str] = set()

            async def start(instance_id: str) -> None:
                with contextlib.suppress(PerdureError):
                    await provider.enqueue_for_orchestrator(factories.start(instance_id))
                    acknowledged.add(instance_id)

            for number in range(starts):
                if number == starts // 2:
                    # The pool connects anew, to the first server of the list that takes writes.
                    end_sessions(cluster.primary)
                await start(f"s{number}")
        old, new = _queued(cluster.standby), _queued(cluster.primary)
    astray = acknowledged & old - new
    assert not astray, (
        f"{len(astray)} of {len(acknowledged)} acknowledged starts are only on the old primary"
    )
    return f"all {len(acknowledged)} acknowledged starts are on the new primary"


def _queued(node: Node) -> set[str]:
    return {row[0] for row in node.ask("SELECT instance_id FROM perdure.orchestrator_queue")}


def end_sessions(node: Node) -> None:
    """End the connections of the store's clients, as a restart or an operator would."""
    node.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perdure'"
    )


# --- 7. Waiting for a result


def waiters_get_busy(*, waiters: int = 2500, seconds: float = 10.0) -> str:
    """Many waiters without LISTEN wait until their own timeout, and get no StoreBusy."""
    return run_and_watch(_wait_together(waiters, seconds))


async def _wait_together(waiters: int, seconds: float) -> str:
    with Cluster(synchronous=False) as cluster:
        provider = PostgresProvider(cluster.dsn, listen=False, pool_size=2, retry_timeout=1)
        async with Runtime(PostgresProvider(cluster.dsn), HANDLERS), Client(provider) as client:
            handles = await client.start_many(
                listener, [(f"w{number}", ()) for number in range(waiters)]
            )
            calls = [asyncio.create_task(handle.result(120)) for handle in handles]
            await asyncio.wait(calls, timeout=seconds)
            failed = Counter(type(call.exception()).__name__ for call in calls if call.done())
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
    busy = failed[StoreBusy.__name__]
    assert not failed, f"{busy} of {waiters} waiters got StoreBusy within {seconds:g} s: {failed}"
    return f"{waiters} waiters waited for {seconds:g} s"


# --- 8. A frozen primary


def frozen_primary(*, seconds_max: float = 15.0) -> str:
    """Work goes on soon after a promotion, although the old primary is silent and not dead."""
    return run_and_watch(_outlast_frozen(seconds_max))


async def _outlast_frozen(seconds_max: float) -> str:
    with Cluster(synchronous=True) as cluster:
        async with PostgresProvider(cluster.dsn, retry_timeout=90) as provider:
            await provider.enqueue_for_orchestrator(factories.start("before"))
            cluster.primary.freeze()
            going_on = asyncio.ensure_future(
                provider.enqueue_for_orchestrator(factories.start("after"))
            )
            await asyncio.to_thread(cluster.promote)
            begun = time.monotonic()
            await going_on
            took = time.monotonic() - begun
    assert took <= seconds_max, f"the first write took {took:.1f} s after the promotion"
    return f"the first write took {took:.1f} s after the promotion"


# --- 9. Which servers are named, and what is said of them


def opened_before_promotion(*, seconds: float = 3.0) -> str:
    """A store that is opened while no listed server accepts writes waits until one does."""
    return run_and_watch(_open_before_promotion(seconds))


async def _open_before_promotion(seconds: float) -> str:
    with Cluster(synchronous=False) as cluster:
        async with PostgresProvider(cluster.dsn):
            pass
        await asyncio.to_thread(cluster.await_replay)
        cluster.primary.kill()
        provider = PostgresProvider(cluster.dsn, retry_timeout=60)
        opening = asyncio.create_task(provider.open())
        done, _ = await asyncio.wait((opening,), timeout=seconds)
        assert not done, f"opened or refused without a primary: {opening}"
        await asyncio.to_thread(cluster.promote)
        await opening
        await provider.enqueue_for_orchestrator(factories.start("x"))
        await provider.close()
    return f"it waited for {seconds:g} s and the promotion"


def standby_refused() -> str:
    """A connection that leads to a standby only is refused with the same words, however asked."""
    return run_and_watch(_ask_standby())


async def _ask_standby() -> str:
    said: dict[str, str] = {}
    attributes = ("", "any", "read-write", "primary", "prefer-standby", "standby", "read-only")
    with Cluster(synchronous=False) as cluster:
        for attribute in attributes:
            given = f"&target_session_attrs={attribute}" if attribute else ""
            try:
                async with PostgresProvider(f"{cluster.standby.dsn}{given}"):
                    said[attribute] = "opened"
            except PerdureError as error:
                said[attribute] = str(error)
    odd = {each: text for each, text in said.items() if PRIMARY_WANTED not in text}
    assert not odd, f"refused with other words: {odd}"
    return f"{len(said)} forms refused: {said['read-write']}"


def standby_away_said(*, seconds: float = 25.0) -> str:
    """While commits hang, log and errors name the standby, and server sessions do not grow."""
    return run_and_watch(_hang(seconds))


async def _hang(seconds: float) -> str:
    options: dict[str, Any] = {"answer_timeout": 4, "retry_timeout": 1}
    heard = _Heard()
    logging.getLogger("perdure").addHandler(heard)
    sessions: list[int] = []
    with Cluster(synchronous=True) as cluster:
        async with (
            Client(PostgresProvider(cluster.dsn, **options)) as client,
            Runtime(PostgresProvider(cluster.dsn, **options), HANDLERS),
        ):
            for number in range(20):
                await client.start(nap, 1, id=f"i{number}")
            cluster.standby.kill()
            failures: list[str] = []

            async def start(number: int) -> None:
                try:
                    await client.start(nap, 0, id=f"late{number}")
                except PerdureError as error:
                    failures.append(str(error))

            calls = [asyncio.create_task(start(number)) for number in range(5)]
            give_up_at = time.monotonic() + seconds
            while time.monotonic() < give_up_at:
                await asyncio.sleep(1)
                sessions.append(count_sessions(cluster.primary))
            await asyncio.gather(*calls)
            await asyncio.to_thread(cluster.standby.start)
            await asyncio.to_thread(cluster.await_standby)
            for number in range(20):
                await client.get(f"i{number}").result(60)
    words = "the synchronous standby does not answer"
    assert any(words in line for line in heard.lines), f"the log does not say it: {heard.lines}"
    assert failures
    assert all(words in each for each in failures), f"the errors do not say it: {failures}"
    assert max(sessions) <= SESSIONS_MAX, f"server sessions, second by second: {sessions}"
    return f"said in log and errors; at most {max(sessions)} server sessions"


def count_sessions(node: Node) -> int:
    """Return how many sessions of the store's handles the server has, also of lost connections."""
    return int(
        node.value("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'perdure'")
    )


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listening_beside_pooler(*, steps: int = 20) -> str:
    """With a direct connection to listen on, a step in another process behind a pooler is quick."""
    return run_and_watch(_listen_beside(steps))


async def _listen_beside(steps: int) -> str:
    took: dict[bool, float] = {}
    with Cluster(synchronous=False) as cluster, Bouncer(cluster) as bouncer:
        for is_direct in (False, True):
            listen = cluster.dsn if is_direct else False
            options: dict[str, Any] = {"prepare": False, "listen": listen, "schema": "s"}
            async with (
                Runtime(PostgresProvider(bouncer.dsn, **options), [count]),
                Runtime(PostgresProvider(bouncer.dsn, **options), [one]),
                Client(PostgresProvider(bouncer.dsn, **options)) as client,
            ):
                await (await client.start(count, 1)).result(60)
                begun = time.monotonic()
                await (await client.start(count, steps if is_direct else 2)).result(60)
                took[is_direct] = (time.monotonic() - begun) / (steps if is_direct else 2)
    assert took[True] < took[False] / 2, f"seconds for a step: {took}"
    return f"{1000 * took[False]:.0f} ms for a step without, {1000 * took[True]:.0f} ms with it"


HOST_CASES: dict[str, tuple[int, Callable[[], str]]] = {
    "split_brain_resurrected": (6, split_brain_resurrected),
    "split_brain_thawed": (6, split_brain_thawed),
    "split_brain_side_by_side": (6, split_brain_side_by_side),
    "split_brain_at_opening": (6, split_brain_at_opening),
    "split_brain_behind_pooler": (6, split_brain_behind_pooler),
    "waiters_get_busy": (7, waiters_get_busy),
    "frozen_primary": (8, frozen_primary),
    "opened_before_promotion": (9, opened_before_promotion),
    "standby_refused": (9, standby_refused),
    "standby_away_said": (9, standby_away_said),
    "listening_beside_pooler": (9, listening_beside_pooler),
}
