"""Reads a store behind the provider's back and checks it against what was acknowledged."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import apsw

from campaigns.sqlite_workload import STEPS

if TYPE_CHECKING:
    from pathlib import Path

    from campaigns.sqlite_workload import Ledger


def audit(path: Path, ledger: Ledger, *, must_be_done: bool = False) -> None:
    """Raise AssertionError for anything lost, doubled or damaged (and, at the end, stuck)."""
    if not path.exists():
        assert not ledger.started, "the file is gone"
        return
    # For writing: the first process that opens the file after a crash recovers its log.
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        with connection:
            _audit(connection, ledger, must_be_done=must_be_done)
    finally:
        connection.close()


def _audit(connection: apsw.Connection, ledger: Ledger, *, must_be_done: bool) -> None:
    found = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    assert found == ["ok"], f"damaged: {found}"
    if connection.pragma("user_version") == 0:
        assert not ledger.started, "the tables are gone"
        return
    histories = _histories(connection)
    pending = {
        row[0]
        for row in connection.execute(
            "SELECT instance_id FROM orchestrator_queue WHERE start_name IS NOT NULL"
        )
    }
    known = pending | histories.keys()
    assert ledger.started <= known, f"lost starts: {sorted(ledger.started - known)[:5]}"
    assert known <= ledger.attempted, f"no process started {sorted(known - ledger.attempted)[:5]}"
    both = pending & histories.keys()
    assert not both, f"started twice: {sorted(both)[:5]}"
    for name, last in ledger.events.items():
        have = len(histories.get(name, ()))
        assert have >= last, f"{name}: event {last} was acknowledged, {have} are there"
    _check_places(connection, histories)
    if must_be_done:
        _check_done(connection, histories, pending)


def _histories(connection: apsw.Connection) -> dict[str, list[tuple[str, int]]]:
    histories: dict[str, list[tuple[str, int]]] = {}
    for name, event_id, data in connection.execute(
        "SELECT i.instance_id, h.event_id, h.data FROM history h JOIN instances i"
        " USING (instance_key) ORDER BY h.instance_key, h.event_id"
    ):
        events = histories.setdefault(name, [])
        assert event_id == len(events) + 1, f"{name}: a gap before event {event_id}"
        kind, activity_id = json.loads(data)
        events.append((kind, activity_id))
    return histories


def _check_places(connection: apsw.Connection, histories: dict[str, list[tuple[str, int]]]) -> None:
    """Each scheduled activity is in exactly one place."""
    places: Counter[tuple[str, int]] = Counter()
    for name, activity_id in connection.execute(
        "SELECT instance_id, activity_id FROM worker_queue"
    ):
        places[name, activity_id] += 1
    for name, body in connection.execute(
        "SELECT instance_id, body FROM orchestrator_queue WHERE kind = 'done'"
    ):
        places[name, int(body)] += 1
    scheduled: set[tuple[str, int]] = set()
    for name, events in histories.items():
        for kind, activity_id in events:
            if kind == "completed":
                places[name, activity_id] += 1
            elif kind == "scheduled":
                scheduled.add((name, activity_id))
    lost = scheduled - places.keys()
    assert not lost, f"lost activities: {sorted(lost)[:5]}"
    doubled = [each for each, count in places.items() if count > 1]
    assert not doubled, f"doubled activities: {sorted(doubled)[:5]}"
    assert places.keys() <= scheduled, "an activity that no turn scheduled"


def _check_done(
    connection: apsw.Connection, histories: dict[str, list[tuple[str, int]]], pending: set[str]
) -> None:
    assert not pending, f"stuck before the first turn: {sorted(pending)[:5]}"
    stuck = [name for name, events in histories.items() if len(events) != 2 * STEPS + 2]
    assert not stuck, f"stuck half-way: {sorted(stuck)[:5]}"
    for table in ("orchestrator_queue", "worker_queue", "dead_letters"):
        left = connection.execute(f"SELECT count(*) FROM {table}").get
        assert left == 0, f"{left} left in {table}"
    statuses = connection.execute("SELECT DISTINCT status FROM instances").fetchall()
    assert statuses in ([], [("Completed",)]), statuses
