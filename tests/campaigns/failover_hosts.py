"""Cases of the failover campaign about servers: which one is used, and how long it is waited for.

    python -m campaigns.postgres_failover --case split_brain_thawed      (with tests/ on the path)

As in ``failover_cases``, each case sets up a cluster of its own and raises AssertionError if the
promise does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from campaigns.failover_cases import HANDLERS, kill_and_promote, listener
from perdure import Client, Runtime
from perdure.conformance import factories
from perdure.errors import PerdureError, StoreBusy
from perdure.providers.postgres import PostgresProvider
from postgres_bouncer import Bouncer
from postgres_cluster import Cluster, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

LEAVES_SECONDS = 20.0
"""A process that is connected to an old primary only learns of the new one within this time."""


# --- 6. No work on an older timeline


def split_brain_resurrected(*, starts: int = 200) -> str:
    """A process that has worked on the new primary does not go back to the resurrected old one."""
    return asyncio.run(_split(starts, _resurrect))


def split_brain_thawed(*, starts: int = 200) -> str:
    """A process that has worked on the new primary does not go back to the thawed old one."""
    return asyncio.run(_split(starts, _freeze_and_thaw))


def split_brain_side_by_side(*, seconds: float = LEAVES_SECONDS) -> str:
    """A process whose pool stays on the old primary leaves it soon for the new one of the list.

    What it has had acknowledged until then is only on the old one: no client can prevent that.
    """
    return asyncio.run(_leave(seconds))


def split_brain_at_opening() -> str:
    """A process that is started beside two primaries works on the new one, though the old is first.

    Both are named, and the old one comes first in the list.
    """
    return asyncio.run(_open_between_two())


def split_brain_behind_pooler(*, starts: int = 20) -> str:
    """Nothing is acknowledged when a pooler leads transactions back to the old primary."""
    return asyncio.run(_be_led_back(starts))


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
    return asyncio.run(_wait_together(waiters, seconds))


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
    return asyncio.run(_outlast_frozen(seconds_max))


async def _outlast_frozen(seconds_max: float) -> str:
    with Cluster(synchronous=True) as cluster:
        async with PostgresProvider(cluster.dsn, retry_timeout=90) as provider:
            await provider.enqueue_for_orchestrator(factories.start("before"))
            cluster.primary.freeze()
            going_on = asyncio.create_task(
                provider.enqueue_for_orchestrator(factories.start("after"))
            )
            await asyncio.to_thread(cluster.promote)
            begun = time.monotonic()
            await going_on
            took = time.monotonic() - begun
    assert took <= seconds_max, f"the first write took {took:.1f} s after the promotion"
    return f"the first write took {took:.1f} s after the promotion"


HOST_CASES: dict[str, tuple[int, Callable[[], str]]] = {
    "split_brain_resurrected": (6, split_brain_resurrected),
    "split_brain_thawed": (6, split_brain_thawed),
    "split_brain_side_by_side": (6, split_brain_side_by_side),
    "split_brain_at_opening": (6, split_brain_at_opening),
    "split_brain_behind_pooler": (6, split_brain_behind_pooler),
    "waiters_get_busy": (7, waiters_get_busy),
    "frozen_primary": (8, frozen_primary),
}
