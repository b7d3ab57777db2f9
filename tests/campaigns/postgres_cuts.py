"""Lose the connection before, during and after statements, and see that each is applied once.

    python tests/campaigns/postgres_cuts.py --cuts 1000

Every handle goes through a proxy that hangs up at random: some statements never arrive, some are
committed without anybody waiting, some answers are lost after the commit. Every turn, start and
completion must have been applied exactly once.
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
from postgres_proxy import Cut, Proxy
from postgres_server import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Callable

HANDLES = 2
ROOTS_PER_ROUND = 40
CUT_RATE = 0.05
CUT_RATE_OF_COMMITS = 0.3
_COMMITS = (b"commit_turns", b"complete_work", b"enqueue_messages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=1000, help="lost answers to commits")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    with PostgresServer() as server:
        begin = time.monotonic()
        counts = asyncio.run(
            cut_connections(server, options.cuts, seed, report=lambda text: print(text, flush=True))
        )
    print(f"{dict(counts)} in {time.monotonic() - begin:.0f} s: nothing lost, nothing doubled")


async def cut_connections(
    server: PostgresServer,
    cuts: int,
    seed: int,
    report: Callable[[str], None] = lambda _text: None,
) -> Counter[str]:
    """Rounds of load until that many commits have lost their answer; raises if one went wrong."""
    counts: Counter[str] = Counter()
    number = 0
    while counts["answers to commits lost"] < cuts:
        number += 1
        await _round(server, f"cuts_{seed}_{number}", random.Random(seed + number), counts)
        report(f"round {number}: {dict(counts)}")
    return counts


async def _round(
    server: PostgresServer, schema: str, rng: random.Random, counts: Counter[str]
) -> None:
    def plan(message: bytes) -> Cut | None:
        is_commit = any(name in message for name in _COMMITS)
        if rng.random() > (CUT_RATE_OF_COMMITS if is_commit else CUT_RATE):
            return None
        cut = rng.choice([Cut.BEFORE, Cut.DURING, Cut.AFTER, Cut.AFTER])
        counts[f"cut {cut.name.lower()}"] += 1
        if cut is Cut.AFTER and is_commit:
            counts["answers to commits lost"] += 1
        return cut

    direct = PostgresProvider(server.dsn, schema=schema, listen=False)
    async with direct, Proxy(server.socket_directory, plan) as proxy:
        # Statements are sent whole, not as the names of prepared ones, so that they can be told.
        handles = [
            PostgresProvider(proxy.dsn, schema=schema, prepare=False, retry_timeout=60)
            for _ in range(HANDLES)
        ]
        load = Load(ROOTS_PER_ROUND, lock_ms=1_500)
        for handle in handles:
            await _open(handle)
        await load.start(handles[0])
        await load.run(handles, fetchers=8, workers=8)
        for handle in handles:
            await handle.close()
        await load.check(direct, locks_may_expire=True)
        counts["errors that reached a caller"] += len(load.errors)


async def _open(handle: PostgresProvider) -> None:
    """Open with repeating; the provider reports a wrong address at once instead."""
    while True:
        try:
            return await handle.open()
        except Exception:
            await handle.close()


if __name__ == "__main__":
    main()
