"""Kill workers on one Postgres with SIGKILL under load and see that every instance ends right.

    python tests/campaigns/postgres_kills.py --kills 2000

Two workers share the store at any time; each is killed after a random time and replaced. Every
result must equal the undisturbed one, and no history may hold a result twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.mixed_load import HANDLERS, load, mailbox
from campaigns.runtime_kill import _check_history as check_history
from campaigns.runtime_kill import _fork as fork
from campaigns.runtime_kill import _in_child as in_child
from patience import HANG_SECONDS
from perdure import Client, Runtime, RuntimeOptions
from perdure.providers.postgres import PostgresProvider
from postgres_server import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Callable

INSTANCES = 70
KILLS_PER_ROUND = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    with PostgresServer() as server:
        kills = kill_workers(
            server, options.kills, seed, report=lambda text: print(text, flush=True)
        )
    print(f"{kills} kills: 0 lost, 0 doubled, 0 stuck")


def kill_workers(
    server: PostgresServer,
    kills: int,
    seed: int,
    *,
    instances: int = INSTANCES,
    report: Callable[[str], None] = lambda _text: None,
) -> int:
    """Do at least that many kills; raises at the first violation."""
    rng, done, number = random.Random(seed), 0, 0
    while done < kills:
        number += 1
        place = f"{server.dsn} kills_{seed}_{number} {instances}"
        in_child(_start_load, place)
        workers = [fork(_work, place), fork(_work, place)]
        for _ in range(min(KILLS_PER_ROUND, kills - done)):
            time.sleep(rng.uniform(0.02, 0.4))
            _kill(workers.pop(0))
            workers.append(fork(_work, place))
            done += 1
        in_child(_finish, place)
        for worker in workers:
            _kill(worker)
        in_child(_check, place)
        report(f"{done} of {kills} kills, nothing lost, doubled or stuck")
    return done


def _kill(worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


def _provider(place: str) -> PostgresProvider:
    dsn, schema, _ = place.split()
    return PostgresProvider(dsn, schema=schema)


def _instances(place: str) -> int:
    return int(place.split()[2])


def _runtime(place: str) -> Runtime:
    options = RuntimeOptions(
        orchestration_lock_timeout=0.5, activity_lock_timeout=0.5, max_attempts=1000, threads=4
    )
    return Runtime(_provider(place), HANDLERS, options=options)


async def _start_load(place: str) -> None:
    async with Client(_provider(place)) as client:
        for flow, arguments, instance_id, _ in load(_instances(place)):
            handle = await client.start(flow, *arguments, id=instance_id)
            if flow is mailbox:
                for number in range(3):
                    await handle.send_message("numbers", number)


async def _work(place: str) -> None:
    import asyncio

    async with _runtime(place):
        await asyncio.Event().wait()


async def _finish(place: str) -> None:
    async with _runtime(place) as runtime:
        for _, _, instance_id, expected in load(_instances(place)):
            result = await runtime.get(instance_id).result(HANG_SECONDS)
            assert result == expected, f"{instance_id}: {result!r} instead of {expected!r}"


async def _check(place: str) -> None:
    async with Client(_provider(place)) as client:
        found = 0
        async for view in client.admin.instances():
            found += 1
            for execution in await client.admin.executions(view.id):
                check_history(await client.history(view.id, execution.execution_id))
        assert found >= _instances(place)
        depths = await client.admin.queue_depths()
        assert depths.worker.visible + depths.worker.delayed + depths.worker.locked == 0, depths


if __name__ == "__main__":
    main()
