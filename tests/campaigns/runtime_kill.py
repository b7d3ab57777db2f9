"""Kill a worker process with SIGKILL at random moments and see that every instance ends right.

    python -m campaigns.runtime_kill --kills 500      (with tests/ on the path)

Each round starts a load on a fresh SQLite file, a mixed one or one long chain, then runs worker
processes one after the other, each killed after a random time, until the round's kills are used up;
the last worker may finish. Every result must equal the undisturbed one, and no history may hold a
result twice.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
import traceback
from itertools import cycle
from pathlib import Path

from campaigns.mixed_load import HANDLERS, load, lone, mailbox
from patience import HANG_SECONDS
from perdure import Client, Runtime, RuntimeOptions, SqliteProvider
from perdure.model import events

INSTANCES = 28
STEPS = 3_000
KILLS_PER_ROUND = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    kills = run(options.kills, seed, report=lambda text: print(text, flush=True))
    print(f"{kills} kills: 0 lost, 0 doubled, 0 stuck")


def run(kills: int, seed: int, report=lambda _text: None) -> int:
    """Do at least that many kills; raises at the first violation."""
    rng, done = random.Random(seed), 0
    loads = cycle([list(load(INSTANCES)), list(lone(STEPS))])
    while done < kills:
        given = next(loads)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "store.db"
            _in_child(_start_load, path, given)
            wanted = min(KILLS_PER_ROUND, kills - done)
            done += _kill_workers(path, wanted, rng)
            _in_child(_finish, path, given)
            _in_child(_check, path, given)
        report(f"{done} of {kills} kills, nothing lost, doubled or stuck")
    return done


def _kill_workers(path: Path, kills: int, rng: random.Random) -> int:
    for _ in range(kills):
        worker = _fork(_work, path)
        time.sleep(rng.uniform(0.02, 0.5))
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    return kills


def _fork(function, *args) -> int:
    """A process of its own, from a parent that has imported everything and runs no threads."""
    child = os.fork()
    if child:
        return child
    try:
        asyncio.run(function(*args))
    except BaseException as error:
        traceback.print_exception(error)
        os._exit(1)
    os._exit(0)


def _in_child(function, *args) -> None:
    _, status = os.waitpid(_fork(function, *args), 0)
    assert status == 0, f"{function.__name__} failed"


def _runtime(path: Path) -> Runtime:
    options = RuntimeOptions(
        orchestration_lock_timeout=0.3, activity_lock_timeout=0.3, max_attempts=1000, threads=4
    )
    return Runtime(SqliteProvider(path), HANDLERS, options=options)


async def _start_load(path: Path, given) -> None:
    async with Client(SqliteProvider(path)) as client:
        for flow, arguments, instance_id, _ in given:
            handle = await client.start(flow, *arguments, id=instance_id)
            if flow is mailbox:
                for number in range(3):
                    await handle.send_message("numbers", number)


async def _work(path: Path) -> None:
    async with _runtime(path):
        await asyncio.Event().wait()


async def _finish(path: Path, given) -> None:
    async with _runtime(path) as runtime:
        for _, _, instance_id, expected in given:
            result = await runtime.get(instance_id).result(HANG_SECONDS)
            assert result == expected, f"{instance_id}: {result!r} instead of {expected!r}"


async def _check(path: Path, given) -> None:
    provider = SqliteProvider(path)
    async with Client(provider) as client:
        found = 0
        async for view in client.admin.instances():
            found += 1
            for execution in await client.admin.executions(view.id):
                _check_history(await client.history(view.id, execution.execution_id))
        assert found >= len(given)
        depths = await client.admin.queue_depths()
        assert depths.worker.visible + depths.worker.delayed + depths.worker.locked == 0, depths
        check = getattr(provider, "integrity_check", None)
        if check is not None:
            await check()


def _check_history(history: list[events.Event]) -> None:
    ids = [event.event_id for event in history]
    assert ids == list(range(1, len(ids) + 1)), "event ids are not contiguous"
    completed: set[int] = set()
    for event in history:
        if isinstance(
            event,
            (
                events.ActivityCompleted,
                events.ActivityFailed,
                events.TimerFired,
                events.SubOrchestrationCompleted,
                events.SubOrchestrationFailed,
            ),
        ):
            assert event.source_event_id not in completed, f"a result twice: {event}"
            completed.add(event.source_event_id)
    ends = [event for event in history if isinstance(event, events.Terminal)]
    assert ends == history[-1:], "a terminal event is last and alone"


if __name__ == "__main__":
    main()
