"""Stop the server dead under load, again and again, and see that nothing is lost or done twice.

    python tests/campaigns/postgres_stops.py --stops 300

Each stop is immediate: no checkpoint, every session gone, recovery at the next start. What was
answered must be there afterwards, and every turn must have been applied exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from perdure.providers.postgres import PostgresProvider
from postgres_load import Load
from postgres_server import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Callable

HANDLES = 2
ROOTS_PER_ROUND = 150
UP_SECONDS = (0.1, 0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    begin = time.monotonic()
    with PostgresServer() as server:
        counts = asyncio.run(
            stop_server(server, options.stops, seed, report=lambda text: print(text, flush=True))
        )
    print(f"{dict(counts)} in {time.monotonic() - begin:.0f} s: nothing lost, doubled or stuck")


async def stop_server(
    server: PostgresServer,
    stops: int,
    seed: int,
    *,
    roots: int = ROOTS_PER_ROUND,
    report: Callable[[str], None] = lambda _text: None,
) -> Counter[str]:
    """Rounds of load until the server was stopped that often; raises if anything went wrong."""
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    number = 0
    while counts["stops"] < stops:
        number += 1
        handles = [
            PostgresProvider(server.dsn, schema=f"stops_{number}", retry_timeout=60)
            for _ in range(HANDLES)
        ]
        for handle in handles:
            await handle.open()
        load = Load(roots, lock_ms=3_000)
        await load.start(handles[0])
        running = asyncio.create_task(load.run(handles, fetchers=8, workers=8))
        while not running.done() and counts["stops"] < stops:
            await asyncio.wait({running}, timeout=rng.uniform(*UP_SECONDS))
            await asyncio.to_thread(server.restart, "immediate")
            counts["stops"] += 1
        await running
        await load.check(handles[0], locks_may_expire=True)
        counts["turns"] += sum(load.turns.values())
        counts["errors that reached a caller"] += len(load.errors)
        for handle in handles:
            await handle.close()
        report(f"round {number}: {dict(counts)}")
        for error in {str(error) for error in load.errors}:
            report(f"  reached a caller: {error}")
    return counts


if __name__ == "__main__":
    main()
