"""Kill workers with SIGKILL around the due times of a schedule; each slot must run exactly once.

    python -m campaigns.schedule_kills --store sqlite --kills 200      (with tests/ on the path)

A schedule has a slot each second. Workers are killed within a tenth of a second around the slots,
and others take over. In between the schedule is paused, resumed and edited. Afterwards every slot
that was due has one completed instance, none was begun before its time or started in a pause.
Slots within the moment of a command may belong to either side of it.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

from campaigns.runtime_kill import _fork as fork
from campaigns.runtime_kill import _in_child as in_child
from perdure import (
    Client,
    FileSystemProvider,
    Runtime,
    RuntimeOptions,
    Schedule,
    SqliteProvider,
    activity,
    current,
    orchestration,
)
from perdure.model import events
from perdure.providers.records import InstanceQuery

LATE_SECONDS = 60.0
COMMAND_EVERY = 8
"""Kills between two commands."""


@activity
async def note(slot: str) -> str:
    return slot


@orchestration
async def tick() -> str:
    return await note(str(current().scheduled_for))


def spec(every: int) -> Schedule:
    return Schedule("tick", tick, every=every, catch_up="all", overlap="allow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "filesystem", "postgres"], default="sqlite")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    slots = run(options.store, options.kills, seed)
    print(f"{options.kills} kills, {slots} slots: each once, none early, none lost")


def run(store: str, kills: int, seed: int) -> int:
    """Do that many kills; raise at the first violation. Returns the number of slots."""
    rng = random.Random(seed)
    if store == "postgres":
        from postgres_server import PostgresServer

        server = PostgresServer()
    else:
        server = nullcontext()
    with server, tempfile.TemporaryDirectory() as directory:
        place = server.dsn if store == "postgres" else Path(directory) / "store"
        count = Path(directory) / "count"
        campaign = Campaign(store, place, rng, count)
        campaign.kill_workers(kills)
        in_child(campaign.check)
        return int(count.read_text())


class Campaign:
    """One store, and the times between which each setting of the schedule was in effect."""

    def __init__(self, store: str, place: object, rng: random.Random, count: Path) -> None:
        self._store = store
        self._place = place
        self._rng = rng
        self._count = count
        self._settings: list[tuple[float, float, int | None]] = []
        """Begin and end of the command, and the interval after it; None for a pause."""

    def kill_workers(self, kills: int) -> None:
        together = 1 if self._store == "filesystem" else 2
        self._command(1)
        workers = [fork(self._work) for _ in range(together)]
        for number in range(1, kills + 1):
            # Around a slot: at most a tenth of a second before or after a full second.
            left = 1 - time.time() % 1
            time.sleep(max(0.0, left + self._rng.uniform(-0.1, 0.1)))
            victim = workers.pop(0)
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            if number % COMMAND_EVERY == 0:
                setting = self._settings[-1][2]
                self._command(self._rng.choice([None, 2]) if setting == 1 else 1)
            workers.append(fork(self._work))
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
        self._command(None)
        in_child(self._settle)

    def _command(self, every: int | None) -> None:
        before = time.time()
        in_child(self._send, every, len(self._settings))
        self._settings.append((before, time.time(), every))

    def _provider(self):
        if self._store == "postgres":
            from perdure import PostgresProvider

            return PostgresProvider(self._place)
        return (FileSystemProvider if self._store == "filesystem" else SqliteProvider)(self._place)

    def _runtime(self) -> Runtime:
        options = RuntimeOptions(
            orchestration_lock_timeout=0.3, activity_lock_timeout=0.3, max_attempts=1000
        )
        return Runtime(self._provider(), [tick, note], options=options)

    async def _work(self) -> None:
        async with self._runtime():
            await asyncio.Event().wait()

    async def _send(self, every: int | None, number: int) -> None:
        async with Client(self._provider()) as client:
            if number == 0:
                await client.schedules.create(
                    "tick", tick, every=every, catch_up="all", overlap="allow"
                )
            elif every is None:
                await client.schedules.pause("tick", str(number))
            else:
                await client.schedules.update(spec(every))
                await client.schedules.resume("tick")

    async def _settle(self) -> None:
        deadline = time.monotonic() + LATE_SECONDS
        async with self._runtime() as runtime:
            while True:
                info = await runtime.schedules.describe("tick")
                is_last = info.paused == str(len(self._settings) - 1)
                if is_last and not info.running and not info.queued:
                    return
                if time.monotonic() > deadline:
                    await self._tell(runtime, time.time())
                    raise AssertionError(f"it does not settle: {info}")
                await asyncio.sleep(0.05)

    async def check(self) -> None:
        async with Client(self._provider()) as client:
            found: set[int] = set()
            async for view in client.admin.instances(InstanceQuery(id_prefix="tick@")):
                slot = round(datetime.fromisoformat(view.id.partition("@")[2]).timestamp())
                assert view.status == "Completed", view
                history = await client.history(view.id)
                assert isinstance(history[0], events.OrchestrationStarted)
                assert history[0].scheduled_for_ms == slot * 1000, view
                assert history[0].timestamp_ms >= slot * 1000, f"{view.id} was early"
                found.add(slot)
            wanted, refused = self._expected()
            wrong = (wanted - found) | (found & refused)
            if wrong:
                await self._tell(client, min(wrong))
        assert not wanted - found, f"lost: {sorted(wanted - found)}"
        assert not found & refused, f"not wanted: {sorted(found & refused)}"
        self._count.write_text(str(len(found)))

    async def _tell(self, client: Client, second: float) -> None:
        """Print what the schedule did around that second, and what has not ended."""
        print("settings", [each for each in self._settings if abs(each[0] - second) < 30])
        async for view in client.admin.instances():
            if not view.status.is_final:
                print(view, await client.provider.admin.list_messages(view.id))
        for execution in await client.admin.executions("tick"):
            for event in await client.history("tick", execution.execution_id):
                is_step = isinstance(event, (events.ActivityScheduled, events.ActivityCompleted))
                if not is_step and abs(event.timestamp_ms / 1000 - second) < LATE_SECONDS + 8:
                    print(event)

    def _expected(self) -> tuple[set[int], set[int]]:
        """The seconds that must have an instance, and those that must have none."""
        wanted: set[int] = set()
        refused: set[int] = set()
        following = [*self._settings[1:], None]
        for (_, begin, every), after in zip(self._settings, following, strict=True):
            if after is None:
                continue
            for second in range(int(begin) + 1, int(after[0]) + 1):
                if begin < second < after[0]:
                    due = every is not None and second % every == 0
                    (wanted if due else refused).add(second)
        return wanted, refused


if __name__ == "__main__":
    main()
