"""Count the statements of an idle runtime by the counters of the server.

    python tests/campaigns/postgres_idle.py --seconds 60

Every statement is a transaction of its own, so the transactions of the database are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.mixed_load import HANDLERS
from perdure import Runtime
from perdure.providers.postgres import PostgresProvider
from postgres_server import PostgresServer

SETTLE_SECONDS = 5.0
PER_SECOND_MAX = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with PostgresServer() as server:
        rate = asyncio.run(idle_rate(server.dsn, options.seconds))
    print(f"{rate:.2f} statements a second over {options.seconds:.0f} s")
    if rate >= PER_SECOND_MAX:
        sys.exit(f"an idle runtime may send {PER_SECOND_MAX} a second at most")


async def idle_rate(dsn: str, seconds: float) -> float:
    """Statements a second of a runtime that has nothing to do."""
    async with Runtime(PostgresProvider(dsn), HANDLERS):
        await asyncio.sleep(SETTLE_SECONDS)
        before = await asyncio.to_thread(_transactions, dsn)
        await asyncio.sleep(seconds)
        after = await asyncio.to_thread(_transactions, dsn)
    # The second look at the counters is not yet in them; the first one is.
    return (after - before - 1) / seconds


def _transactions(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database "
            "WHERE datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    main()
