"""Promises resolved by many processes, and a storm of requests, while workers are killed.

    python -m campaigns.talking --store sqlite --promises 10000 --asks 2000 --kills 60

Promises: instances await them while four processes resolve each of them twice, before, during and
after the wait, each process in its own order. Every instance gets the value once, and every promise
is one completed instance.

Requests: four processes ask counters, which continue as new every few requests, while workers are
killed by SIGKILL; some askers give up and ask again with the same id. Every reply is that of its
own request, and no request was counted twice.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from campaigns.runtime_kill import _fork as fork
from campaigns.runtime_kill import _in_child as in_child
from patience import HANG_SECONDS
from perdure import (
    Client,
    FileSystemProvider,
    Runtime,
    RuntimeOptions,
    SqliteProvider,
    Status,
    WaitTimeout,
    continue_as_new,
    orchestration,
    promise,
    requests,
)
from perdure.errors import StoreBusy
from perdure.providers.records import InstanceQuery

PROCESSES = 4
COUNTERS = 4
ASKS_PER_EXECUTION = 25


@orchestration
async def awaits(key: str) -> int:
    return await promise(key, int)


@orchestration
async def counter(seen: list[str]) -> list[str]:
    """Number the requests, and keep them, to find one that is counted twice."""
    for _ in range(ASKS_PER_EXECUTION):
        request = await anext(requests("count", str))
        if request.value == "end":
            request.reply(len(seen))
            return seen
        seen.append(request.value)
        request.reply([request.value, len(seen)])
    return continue_as_new(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["sqlite", "filesystem", "postgres"], default="sqlite")
    parser.add_argument("--promises", type=int, default=10_000)
    parser.add_argument("--asks", type=int, default=2_000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    run(options.store, options.promises, options.asks, options.kills, seed)


def run(store: str, promises: int, asks: int, kills: int, seed: int) -> None:
    """Do both parts; raises at the first violation."""
    if promises:
        begun = time.monotonic()
        with _stores(store) as campaign:
            campaign.resolve_promises(promises, seed)
        print(f"{promises} promises: each once, in {time.monotonic() - begun:.0f} s", flush=True)
    if asks:
        begun = time.monotonic()
        with _stores(store) as campaign:
            killed = campaign.ask_under_kills(asks, kills, seed)
        took = time.monotonic() - begun
        print(f"{asks} requests, {killed} kills: every reply matches, none twice, in {took:.0f} s")


class _stores:  # noqa: N801 - used as a function
    """A fresh store for one part."""

    def __init__(self, store: str) -> None:
        self._store = store

    def __enter__(self) -> "Campaign":
        server = nullcontext()
        if self._store == "postgres":
            from postgres_server import PostgresServer

            server = PostgresServer()
        self._opened = (server, tempfile.TemporaryDirectory())
        server, directory = self._opened
        server.__enter__()
        path = Path(directory.__enter__()) / "store"
        return Campaign(self._store, server.dsn if self._store == "postgres" else path)

    def __exit__(self, *error: object) -> None:
        for each in reversed(self._opened):
            each.__exit__(*error)


class Campaign:
    """One store."""

    def __init__(self, store: str, place: object) -> None:
        self._store = store
        self._place = place

    def _provider(self):
        if self._store == "postgres":
            from perdure import PostgresProvider

            return PostgresProvider(self._place)
        return (FileSystemProvider if self._store == "filesystem" else SqliteProvider)(self._place)

    def _runtime(self) -> Runtime:
        options = RuntimeOptions(
            orchestration_lock_timeout=0.5, activity_lock_timeout=0.5, max_attempts=1000
        )
        return Runtime(self._provider(), [awaits, counter], options=options)

    # --- promises

    def resolve_promises(self, count: int, seed: int) -> None:
        # A directory belongs to one process: there the four resolvers are tasks of the worker.
        if self._store == "filesystem":
            in_child(self._all_in_one, count, seed)
            return
        children = [fork(self._resolve, count, seed, number) for number in range(PROCESSES)]
        children.append(fork(self._await_all, count))
        for child in children:
            assert os.waitpid(child, 0)[1] == 0, "a process failed"
        in_child(self._check_promises, count)

    async def _all_in_one(self, count: int, seed: int) -> None:
        async with self._runtime() as runtime:
            await asyncio.gather(
                *(self._resolve_with(runtime, count, seed, n) for n in range(PROCESSES)),
                self._await_with(runtime, count),
            )
            await self._check_with(runtime, count)

    async def _resolve(self, count: int, seed: int, number: int) -> None:
        async with Client(self._provider()) as client:
            await self._resolve_with(client, count, seed, number)

    async def _resolve_with(self, client: Client, count: int, seed: int, number: int) -> None:
        """Resolve half of the promises in an order of its own: each has two resolvers."""
        own = [place for place in range(count) if number in {place % 4, (place + 1) % 4}]
        random.Random(seed + number).shuffle(own)
        for place in own:
            await client.resolve(f"k-{place}", place)

    async def _await_all(self, count: int) -> None:
        async with self._runtime() as runtime:
            await self._await_with(runtime, count)

    async def _await_with(self, runtime: Runtime, count: int) -> None:
        # A third is awaited at once, a third during the resolving, and the rest after it.
        parts = [range(n, count, 3) for n in range(3)]
        for part in parts:
            await runtime.start_many(awaits, [(f"w-{n}", (f"k-{n}",)) for n in part])
            for place in part:
                result = await runtime.get(f"w-{place}", awaits).result()
                assert result == place, f"w-{place} got {result}"

    async def _check_promises(self, count: int) -> None:
        async with Client(self._provider()) as client:
            await self._check_with(client, count)

    async def _check_with(self, client: Client, count: int) -> None:
        completed = frozenset({Status.COMPLETED})
        for name in ("awaits", "perdure.promise"):
            found = await client.admin.count(InstanceQuery(name=name, statuses=completed))
            assert found == count, f"{found} of {count} {name} have completed"
        assert await client.admin.count() == 2 * count
        assert not await client.admin.dead_letters()

    # --- requests

    def ask_under_kills(self, asks: int, kills: int, seed: int) -> int:
        rng, together = random.Random(seed), 1 if self._store == "filesystem" else 2
        in_child(self._start_counters)
        if self._store == "filesystem":
            return self._ask_in_one(asks, kills, rng)
        workers = [fork(self._work) for _ in range(together)]
        askers = [fork(self._ask, asks, number) for number in range(PROCESSES)]
        killed = 0
        while any(_is_running(asker) for asker in askers):
            time.sleep(rng.uniform(0.05, 0.5))
            if killed < kills:
                victim = workers.pop(0)
                os.kill(victim, signal.SIGKILL)
                os.waitpid(victim, 0)
                killed += 1
                workers.append(fork(self._work))
        for asker in askers:
            assert os.waitpid(asker, 0)[1] == 0, "an asker failed"
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
        in_child(self._check_counters, asks)
        return killed

    def _ask_in_one(self, asks: int, kills: int, rng: random.Random) -> int:
        """A directory belongs to one process: kill that one, and ask again with the same ids."""
        killed = 0
        while killed < kills:
            worker = fork(self._ask_here, asks)
            time.sleep(rng.uniform(0.3, 1.5))
            is_running = _is_running(worker)
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            killed += 1
            if not is_running:
                break
        in_child(self._ask_here, asks)
        in_child(self._check_counters, asks)
        return killed

    async def _ask_here(self, asks: int) -> None:
        async with self._runtime() as runtime:
            await asyncio.gather(*(self._ask_with(runtime, asks, n) for n in range(PROCESSES)))

    async def _start_counters(self) -> None:
        async with Client(self._provider()) as client:
            for number in range(COUNTERS):
                await client.start(counter, [], id=f"counter-{number}")

    async def _work(self) -> None:
        async with self._runtime():
            await asyncio.Event().wait()

    async def _ask(self, asks: int, number: int) -> None:
        async with Client(self._provider()) as client:
            await self._ask_with(client, asks, number)

    async def _ask_with(self, client: Client, asks: int, number: int) -> None:
        """Ask this process's share, some at once; some give up quickly and ask again."""
        own = list(range(number, asks, PROCESSES))
        counters = [client.get(f"counter-{n}", counter) for n in range(COUNTERS)]

        async def ask(place: int) -> None:
            text = f"{number}-{place}"
            timeout = 0.02 if place % 3 == 0 else HANG_SECONDS
            while True:
                try:
                    reply = await counters[place % COUNTERS].ask(
                        "count", text, list, timeout=timeout, id=text
                    )
                except (WaitTimeout, StoreBusy):
                    timeout = HANG_SECONDS
                    continue
                assert reply[0] == text, f"{text} got the reply {reply}"
                return

        for first in range(0, len(own), 8):
            await asyncio.gather(*map(ask, own[first : first + 8]))

    async def _check_counters(self, asks: int) -> None:
        async with self._runtime() as runtime:
            heard: list[str] = []
            for number in range(COUNTERS):
                handle = runtime.get(f"counter-{number}", counter)
                count = await handle.ask("count", "end", int, timeout=HANG_SECONDS)
                seen = await handle.result(HANG_SECONDS)
                assert count == len(seen) == len(set(seen)), "a request was counted twice"
                heard += seen
            wanted = [f"{place % PROCESSES}-{place}" for place in range(asks)]
            assert sorted(heard) == sorted(wanted), "requests were lost or counted twice"
            replies: dict[str, list[int]] = {}
            query = InstanceQuery(name="perdure.ask")
            async for view in runtime.admin.instances(query):
                assert view.status is Status.COMPLETED, view
                text, place = view.output["value"]
                replies.setdefault(f"counter-{int(text.partition('-')[2]) % COUNTERS}", []).append(
                    place
                )
            for each in replies.values():
                assert sorted(each) == list(range(1, len(each) + 1)), "a number was given twice"
            assert sum(map(len, replies.values())) == asks
            assert not await runtime.admin.dead_letters()


def _is_running(process_id: int) -> bool:
    return os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


if __name__ == "__main__":
    main()
