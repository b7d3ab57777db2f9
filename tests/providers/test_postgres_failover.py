"""The short tier of the failover campaign, and proof that its audit notices what it looks for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from campaigns.failover_audit import Findings, Ledger, audit
from campaigns.failover_load import (
    HANDLERS,
    NAP_SECONDS,
    STOP,
    Place,
    Record,
    chain,
    hear_events,
    nap,
)
from patience import HANG_SECONDS
from perdure import Runtime
from postgres_cluster import Cluster

NOTHING = frozenset[str]()
_AGAIN = """
    INSERT INTO perdure.orchestrator_queue (instance_id, kind, body, visible_at, enqueued_at)
    SELECT instance_id, 'ExternalRaised', data, 0, 0 FROM perdure.history
    WHERE instance_id = 'e-7' AND data LIKE '%e-7:1%' AND data NOT LIKE '%e-7:2%'
"""
"""An event that was heard is in the queue again."""
_SWAPPED = """
    UPDATE perdure.executions SET output = '["e-8:1", "e-8:0", "e-8:2"]' WHERE instance_id = 'e-8'
"""
"""Events were heard in another order than they were sent."""


def test_two_failovers_lose_nothing_and_leave_nothing_stuck() -> None:
    # In a process of its own, because campaigns fork. The full tier looks for the rest too.
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "campaigns.postgres_failover", "--modes", "killed", "--json"),
            *("--failovers", "2", "--workers", "2", "--seed", "7"),
        ],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr + finished.stdout
    (outcome,) = json.loads(finished.stdout)
    assert outcome["faults"] == {"kill": 2}
    assert len(outcome["every_process_seconds"]) == 2
    assert all(outcome["acknowledged"][what] for what in ("start", "event", "message", "result"))


def test_the_audit_notices_each_violation(tmp_path: Path) -> None:
    with Cluster(synchronous=True) as cluster:
        asyncio.run(_run_some(Place(cluster.dsn, tmp_path)))
        ledger = Ledger(tmp_path)
        ledger.read()
        before, after = Findings(), Findings()
        audit(cluster.primary, ledger, before, skip=NOTHING)

        _plant(cluster)
        audit(cluster.primary, ledger, after, skip=NOTHING)

    assert before.counts == {}
    assert set(after.counts) == {
        *("lost", "doubled", "overtaken", "early", "blocked", "stuck", "holes", "wrong", "damage")
    }


async def _run_some(place: Place) -> None:
    """Nine instances that have ended right, with everything about them on record."""
    record = Record(place, "client")
    async with Runtime(place.provider(), HANDLERS) as runtime:
        for number in range(6):
            await record.call(
                "start", f"c-{number}", None, runtime.start(chain, number, id=f"c-{number}")
            )
        await runtime.start(nap, list(NAP_SECONDS), id="n-6")
        for instance_id in ("e-7", "e-8"):
            heard = await runtime.start(hear_events, id=instance_id)
            for number in range(3):
                value = f"{instance_id}:{number}"
                await record.call("event", instance_id, value, heard.raise_event("said", value))
            await heard.raise_event("said", STOP)
        for instance_id in ("c-0", "c-1", "c-2", "c-3", "c-4", "c-5", "n-6", "e-7", "e-8"):
            result = runtime.get(instance_id).result(HANG_SECONDS)
            await record.call("result", instance_id, None, result)


def _plant(cluster: Cluster) -> None:
    """Do one kind of damage to each instance."""
    with cluster.primary.connection() as connection:
        for statement in (
            # Lost, with its result: a start.
            "DELETE FROM perdure.instances WHERE instance_id = 'c-0'",
            "DELETE FROM perdure.history WHERE instance_id = 'c-0'",
            "UPDATE perdure.instances SET status = 'Blocked' WHERE instance_id = 'c-1'",
            "UPDATE perdure.instances SET status = 'Running' WHERE instance_id = 'c-2'",
            "DELETE FROM perdure.history WHERE instance_id = 'c-3' AND event_id = 3",
            "UPDATE perdure.executions SET output = '77' WHERE instance_id = 'c-4'",
            # Events that are written anew, together, were committed at the same time.
            "UPDATE perdure.history SET data = data WHERE instance_id = 'n-6'",
            _AGAIN,
            _SWAPPED,
        ):
            assert connection.execute(statement).rowcount > 0, statement
