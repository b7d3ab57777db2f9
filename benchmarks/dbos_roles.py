"""DBOS in the place of ``process_roles.py``: a worker and a client that measures, on one file.

Run by path with the interpreter of its environment: ``python dbos_roles.py ROLE STORE [ARGUMENT]``.
The variable ``DBOS_POLL_SECONDS`` is how often it looks for starts and results of other processes;
its own default is 1.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import sqlalchemy
from dbos import DBOS, DBOSClient

QUEUE = "bench"
POLL_SECONDS = float(os.environ["DBOS_POLL_SECONDS"])


@DBOS.step(name="step")
def step(number: int) -> int:
    return number + 1


@DBOS.workflow(name="one_step")
def one_step(number: int) -> int:
    return step(number)


def say(**values: float) -> None:
    print(json.dumps(values), flush=True)


def place(store: str) -> dict:
    """Its store with a log and every commit on disk, as it is measured beside it."""
    url = f"sqlite:///{store}"
    engine = sqlalchemy.create_engine(url, connect_args={"check_same_thread": False})

    @sqlalchemy.event.listens_for(engine, "connect")
    def tune(connection, _record) -> None:
        connection.isolation_level = "IMMEDIATE"
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=30000"):
            connection.execute(f"PRAGMA {pragma}")

    return {"system_database_url": url, "system_database_engine": engine}


def work(store: str) -> None:
    """Serve until killed."""
    config = {"name": "bench", "application_version": "v1", "log_level": "ERROR"}
    DBOS(config=config | place(store))
    DBOS.launch()
    DBOS.register_queue(QUEUE, polling_interval_sec=POLL_SECONDS)
    say(up=time.time())
    threading.Event().wait()


def latencies(store: str, pause: str) -> None:
    """Start one workflow after the other in another process, and wait for each."""
    client, taken = DBOSClient(**place(store)), []
    for number in range(15):
        time.sleep(float(pause))
        begin = time.perf_counter()
        handle = client.enqueue({"workflow_name": "one_step", "queue_name": QUEUE}, number)
        handle.get_result(polling_interval_sec=POLL_SECONDS)
        taken.append((time.perf_counter() - begin) * 1000)
    taken = sorted(taken[5:])
    say(p50=taken[len(taken) // 2], p95=taken[len(taken) * 95 // 100], worst=taken[-1])


if __name__ == "__main__":
    {"work": work, "latencies": latencies}[sys.argv[1]](*sys.argv[2:])
