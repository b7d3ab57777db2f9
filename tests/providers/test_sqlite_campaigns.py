"""The short tier of the SQLite campaigns, and proof that their audit notices what it looks for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from campaigns.sqlite_audit import audit
from campaigns.sqlite_workload import STEPS, Ledger, Workload, start_message
from patience import HANG_SECONDS
from perdure.providers.sqlite import SqliteProvider


def run_campaign(name, *options):
    """In a process of its own: campaigns fork."""
    finished = subprocess.run(
        [sys.executable, "-m", f"campaigns.{name}", *options],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_nothing_is_lost_doubled_or_stuck_when_processes_are_killed():
    said = run_campaign("sqlite_kill", "--kills", "40", "--seed", "20").splitlines()[-1]

    assert int(said.split()[0]) >= 40
    assert "0 lost, 0 doubled, 0 stuck, 0 damaged" in said
    # How many of each kind depends on who is quicker, the others' deaths or the point of this one.
    for way in ("at a random moment", " commit", " a write"):
        assert way in said


def test_eight_processes_share_a_file_without_an_error():
    said = run_campaign("sqlite_contention", "--seconds", "3")

    assert "8 processes" in said
    assert "0 errors, 0 lost, 0 doubled, 0 stuck" in said


def test_workers_take_over_from_killed_ones_and_never_from_live_ones():
    said = run_campaign("sqlite_peers", "--kills", "8", "--seed", "3")

    assert "0 lost, 0 doubled, 0 stuck, 0 locks taken from live processes" in said


@pytest.fixture
def finished(tmp_path):
    """A store with three finished chains, and the ledger of what it acknowledged."""
    path, ledger = tmp_path / "store.db", Ledger()

    async def work():
        async with SqliteProvider(path) as provider:
            for name in ("a", "b", "c"):
                ledger.note("starting", name)
                await provider.enqueue_for_orchestrator(start_message(name))
                ledger.note("started", name)
            await Workload(provider, ledger.note).finish()

    asyncio.run(work())
    audit(path, ledger, must_be_done=True)
    assert ledger.events == {"a": 2 * STEPS + 2, "b": 2 * STEPS + 2, "c": 2 * STEPS + 2}
    return path, ledger


KEY = "(SELECT instance_key FROM instances WHERE instance_id = 'b')"
DAMAGES = {
    "a lost event": (
        f"DELETE FROM history WHERE instance_key = {KEY} AND event_id = 10",
        "lost|event 10",
    ),
    "a lost instance": (f"DELETE FROM history WHERE instance_key = {KEY}", "lost starts"),
    "a gap": (f"DELETE FROM history WHERE instance_key = {KEY} AND event_id = 5", "a gap"),
    "a doubled activity": (
        (
            "INSERT INTO orchestrator_queue (message_id, instance_id, kind, body, visible_at,"
            " enqueued_at, attempt_count) VALUES (9999, 'b', 'done', '4', 0, 0, 0)"
        ),
        "doubled",
    ),
    "a second start": (
        (
            "INSERT INTO orchestrator_queue (message_id, instance_id, kind, body, visible_at,"
            " enqueued_at, attempt_count, start_name) VALUES (9999, 'b', 'start', 'start', 0, 0, 0,"
            " 'chain')"
        ),
        "started twice",
    ),
    "a stuck instance": (
        "UPDATE instances SET status = 'Running' WHERE instance_id = 'b'",
        "Running",
    ),
    "a forgotten message": (
        (
            "INSERT INTO worker_queue (message_id, instance_id, execution_id, activity_id, name,"
            " body, visible_at, enqueued_at, attempt_count, state) VALUES (9999, 'b', 1, 99,"
            " 'step', '{}', 0, 0, 0, 0)"
        ),
        "no turn scheduled",
    ),
}


@pytest.mark.parametrize(("sql", "complaint"), DAMAGES.values(), ids=DAMAGES)
def test_the_audit_notices_damage(finished, sql, complaint):
    path, ledger = finished
    connection = apsw.Connection(str(path))
    connection.execute(sql)
    connection.close()

    with pytest.raises(AssertionError, match=complaint):
        audit(path, ledger, must_be_done=True)
