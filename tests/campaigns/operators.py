"""Operators at work on instances that run, while workers come and go.

    python -m campaigns.operators --store postgres --rounds 50      (with tests/ on the path)

Each round sends numbered messages to mailboxes that continue as new and have children, while
runtimes with hardly any room start and stop and operators pause, resume, prune, export, check and
look. A second kind of instance continues as new for ever and is terminated, and sometimes retried
or deleted. No check finds damage. At the end every mailbox has every message, in order and once,
every other instance has exactly one end, and the queues are empty.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from pathlib import Path

from patience import HANG_SECONDS
from perdure import (
    Client,
    InMemoryProvider,
    Runtime,
    RuntimeOptions,
    SqliteProvider,
    Status,
    activity,
    continue_as_new,
    next_message,
    orchestration,
)
from perdure.client.damage import check_instances
from perdure.client.retry import retry
from perdure.errors import InstanceFinished, InstanceStillRunning, NotFound, WaitTimeout
from perdure.model import events
from perdure.providers.sqlite.memory import MemoryStore

STORES = ("memory", "sqlite", "postgres")
MAILBOXES = 6
MESSAGES = 20


@activity
async def note(number: int) -> int:
    return number


@orchestration
async def helper(number: int) -> int:
    return await note(number)


@orchestration
async def mailbox(got: list[int], total: int) -> list[int]:
    for _ in range(3):
        number = await next_message("q", int)
        got.append(await helper(number) if number % 5 == 4 else await note(number))
        if len(got) == total:
            break
    else:
        continue_as_new(got, total)
    return got


@orchestration
async def wheel(turns: int) -> None:
    await note(turns)
    continue_as_new(turns + 1)


HANDLERS = [mailbox, wheel, helper, note]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=STORES, default="sqlite")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"{options.rounds} rounds on {options.store}, seed {seed}", flush=True)
    for number in range(options.rounds):
        asyncio.run(run_round(options.store, seed + number))
        if sys.stdout.isatty() or number % 10 == 9:
            print(f"{number + 1} of {options.rounds} rounds", flush=True)
    print(f"{options.rounds} rounds: 0 lost, 0 doubled, 0 reordered, 0 stuck")


async def run_round(store: str, seed: int) -> None:
    """Raises at the first violation."""
    with _handles_on(store) as make:
        await _Round(make, seed).run()


@contextlib.contextmanager
def _handles_on(store: str):
    """A function that opens one more handle on the round's store."""
    if store == "memory":
        memory = MemoryStore()
        yield lambda: InMemoryProvider(store=memory)
    elif store == "sqlite":
        with tempfile.TemporaryDirectory() as directory:
            yield lambda: SqliteProvider(Path(directory) / "store.db")
    else:
        from perdure.providers.postgres import PostgresProvider
        from postgres_factory import new_schema
        from postgres_server import shared_server

        schema = new_schema()
        yield lambda: PostgresProvider(shared_server().dsn, schema=schema)


class _Round:
    def __init__(self, make, seed: int) -> None:
        self._make = make
        self._rng = random.Random(seed)
        self._is_over = False
        self._wheels = 0
        self._deleted: set[str] = set()

    async def run(self) -> None:
        async with Client(self._make()) as client:
            handles = await client.start_many(
                mailbox, [(f"m-{number}", ([], MESSAGES)) for number in range(MAILBOXES)]
            )
            helpers = [asyncio.ensure_future(self._serve()) for _ in range(2)]
            helpers += [asyncio.ensure_future(self._operate(client)) for _ in range(2)]
            helpers.append(asyncio.ensure_future(self._terminate(client)))
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    await asyncio.gather(*(self._send(client, handle.id) for handle in handles))
                    results = await asyncio.gather(*(handle.result() for handle in handles))
            finally:
                self._is_over = True
            await asyncio.gather(*helpers)
            assert all(result == list(range(MESSAGES)) for result in results), results
            await self._check_rest(client)

    async def _serve(self) -> None:
        """One runtime after the other, each with other bounds."""
        rng = self._rng
        while not self._is_over:
            options = RuntimeOptions(
                cached_instances=rng.choice([1, 3, 100]),
                cached_events=rng.choice([20, 2_000_000]),
                idle_timeout=rng.choice([0.005, 0.05, 10]),
            )
            async with Runtime(self._make(), HANDLERS, options=options):
                await asyncio.sleep(rng.random())

    async def _send(self, client: Client, instance_id: str) -> None:
        for number in range(MESSAGES):
            await client.send_message(instance_id, "q", number)
            await asyncio.sleep(self._rng.random() * 0.05 * self._rng.randrange(2))

    async def _operate(self, client: Client) -> None:
        rng, admin = self._rng, client.provider.admin
        assert admin is not None
        while not self._is_over:
            instance_id = f"m-{rng.randrange(MAILBOXES)}"
            with contextlib.suppress(InstanceFinished, WaitTimeout):
                match rng.choice(["pause", "resume", "prune", "export", "check", "look", "wait"]):
                    case "pause":
                        await client.pause(instance_id)
                        await asyncio.sleep(rng.random() * 0.1)
                        await client.resume(instance_id)
                    case "resume":
                        await client.resume(instance_id)
                    case "prune":
                        await client.admin.prune(instance_id)
                    case "export":
                        await admin.export_instance(instance_id)
                    case "check":
                        damages = [each async for each in check_instances(client.provider) if each]
                        assert not damages, damages
                    case "look":
                        await client.describe(instance_id)
                    case _:
                        await client.get(instance_id).result(rng.random() * 0.05)
            await asyncio.sleep(rng.random() * 0.02)

    async def _terminate(self, client: Client) -> None:
        rng = self._rng
        while not self._is_over:
            handle = await client.start(wheel, 0, id=f"w-{self._wheels}")
            self._wheels += 1
            await asyncio.sleep(rng.random() * 0.1)
            if rng.randrange(3) == 0:
                await handle.pause()
            await handle.terminate("enough")
            if rng.randrange(3) == 0:
                with contextlib.suppress(InstanceFinished, InstanceStillRunning, NotFound):
                    await retry(client.provider, handle.id, client.clock)
                with contextlib.suppress(InstanceFinished):
                    await handle.terminate("really")
            if rng.randrange(3) == 0:
                await client.admin.delete(handle.id, force=True)
                self._deleted.add(handle.id)

    async def _check_rest(self, client: Client) -> None:
        """With one quiet worker, everything comes to rest."""
        async with Runtime(self._make(), HANDLERS), asyncio.timeout(HANG_SECONDS):
            for number in range(self._wheels):
                if f"w-{number}" not in self._deleted:
                    await self._check_end(client, f"w-{number}")
            damages = [each async for each in check_instances(client.provider) if each]
            assert not damages, damages
            while not _is_empty(await client.admin.queue_depths()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _check_end(self, client: Client, instance_id: str) -> None:
        handle = client.get(instance_id)
        with contextlib.suppress(Exception):
            await handle.result()
        ended = (await handle.describe()).status
        assert ended in {Status.TERMINATED, Status.CANCELLED}, (instance_id, ended)
        last = events.without_undone(await handle.history())
        ends = [event for event in last if isinstance(event, events.Terminal)]
        assert ends == last[-1:], (instance_id, ends)


def _is_empty(depths) -> bool:
    queues = (depths.orchestrator, depths.worker)
    return not depths.dead_letters and not any(
        queue.visible + queue.delayed + queue.locked for queue in queues
    )


if __name__ == "__main__":
    main()
