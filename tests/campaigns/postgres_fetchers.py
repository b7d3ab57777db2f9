"""Sixteen fetchers and sixteen workers over many instances: every turn once, no error, no deadlock.

    python tests/campaigns/postgres_fetchers.py --instances 10000

Half of the instances are children of the other half; every root fans out first. Four handles share
the store as four processes would.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1]))

from perdure.providers.postgres import PostgresProvider
from postgres_load import Load
from postgres_server import PostgresServer

HANDLES = 4
FETCHERS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--activities", type=int, default=5)
    options = parser.parse_args()
    with PostgresServer() as server:
        asyncio.run(fetch_all(server, options.instances // 2, options.activities))


async def fetch_all(server: PostgresServer, roots: int, activities: int) -> None:
    """Raises if a turn was taken twice, lost, or met an error."""
    handles = [PostgresProvider(server.dsn) for _ in range(HANDLES)]
    for handle in handles:
        await handle.open()
    load = Load(roots, activities)
    await load.start(handles[0])
    begin = time.monotonic()
    await load.run(handles, fetchers=FETCHERS, workers=FETCHERS)
    seconds = time.monotonic() - begin
    await load.check(handles[0])
    assert load.errors == []
    for handle in handles:
        await handle.close()
    deadlocks = _deadlocks(server)
    assert deadlocks == 0, f"{deadlocks} deadlocks were hidden from the callers"
    turns = sum(load.turns.values())
    print(
        f"{2 * roots} instances, {turns} turns, {roots * activities} activities in "
        f"{seconds:.0f} s: each once, no error, no deadlock"
    )


def _deadlocks(server: PostgresServer) -> int:
    with psycopg.connect(server.dsn) as connection:
        ((count,),) = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchall()
    return int(count)


if __name__ == "__main__":
    main()
