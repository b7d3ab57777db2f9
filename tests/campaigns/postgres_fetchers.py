"""Sixteen fetchers and sixteen workers over many instances: every turn once, no error, no deadlock.

    python tests/campaigns/postgres_fetchers.py --instances 10000 --seconds 120

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
    parser.add_argument("--seconds", type=float, default=120, help="at least; whole rounds")
    options = parser.parse_args()
    with PostgresServer() as server:
        begin, number = time.monotonic(), 0
        while time.monotonic() < begin + options.seconds:
            number += 1
            schema = f"round_{number}"
            asyncio.run(fetch_all(server, schema, options.instances // 2, options.activities))
        deadlocks = _deadlocks(server)
    assert deadlocks == 0, f"{deadlocks} deadlocks were hidden from the callers"
    print(f"{number} rounds in {time.monotonic() - begin:.0f} s: no deadlock")


async def fetch_all(server: PostgresServer, schema: str, roots: int, activities: int) -> None:
    """Raises if a turn was taken twice, lost, or met an error."""
    handles = [PostgresProvider(server.dsn, schema=schema) for _ in range(HANDLES)]
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
    turns = sum(load.turns.values())
    print(
        f"{2 * roots} instances, {turns} turns, {roots * activities} activities in "
        f"{seconds:.0f} s: each once, no error",
        flush=True,
    )


def _deadlocks(server: PostgresServer) -> int:
    with psycopg.connect(server.dsn) as connection:
        ((count,),) = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchall()
    return int(count)


if __name__ == "__main__":
    main()
