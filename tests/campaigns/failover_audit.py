"""Compares a store after failovers with the records of everything that was acknowledged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from campaigns.failover_load import HEARERS, NAP_SECONDS, STOP, WRITES, expected, nap
from perdure.model import events, wire

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from postgres_cluster import Server

FINDINGS = (
    *("lost", "doubled", "overtaken", "early", "blocked", "stuck", "holes", "wrong"),
    *("without standby", "dead workers", "not recovered", "damage"),
)
"""Faults that must not occur. Each is counted, with some examples."""

_SAID = re.compile(r'"([a-z]+-?\d*-\d+:\d+)"')
_ROUNDING_MS = 2


@dataclass(slots=True)
class Findings:
    """The violations of one mode."""

    counts: Counter[str] = field(default_factory=Counter[str])
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, example: str) -> None:
        assert kind in FINDINGS, kind
        self.counts[kind] += 1
        if len(self.examples[kind]) < 5:
            self.examples[kind].append(example)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a record."""

    process: str
    outcome: str
    what: str
    instance_id: str
    value: Any
    time: float


class Ledger:
    """The records of all processes, read as they grow."""

    def __init__(self, records: Path) -> None:
        self._records = records
        self._places: dict[Path, int] = {}
        self.lines: list[Line] = []
        self.gone: set[Line] = set()
        """Acknowledged, and allowed to be lost: the standby did not have it."""

    def read(self) -> None:
        for path in sorted(self._records.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                text = file.read()
            whole = text.rpartition(b"\n")[0]
            self._places[path] = self._places.get(path, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                row = json.loads(line)
                value = row["value"]
                self.lines.append(
                    Line(
                        path.stem,
                        row["outcome"],
                        row["what"],
                        row["id"],
                        json.dumps(value) if row["what"] == "result" else value,
                        row["time"],
                    )
                )

    def acknowledged(self, since: float = 0, until: float = float("inf")) -> list[Line]:
        """Return what must be in the store, of the answers within that time."""
        return [
            line
            for line in self.lines
            if line.outcome == "ack" and since <= line.time <= until and line not in self.gone
        ]

    def first_answers(self, after: float) -> dict[str, float]:
        """Return when each process got its first answer to a write after that time."""
        found: dict[str, float] = {}
        for line in self.lines:
            if line.outcome == "ack" and line.what in WRITES and line.time > after:
                found.setdefault(line.process, line.time)
        return found


class Store:
    """The content of the tables of one server, read in one transaction."""

    def __init__(self, node: Server) -> None:
        with node.connection() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")

            def rows(statement: Any) -> list[tuple[Any, ...]]:
                return connection.execute(statement).fetchall()

            self.instances = {
                row[0]: row[1:]
                for row in rows(
                    "SELECT i.instance_id, i.name, i.status, x.output FROM perdure.instances i "
                    "LEFT JOIN perdure.executions x USING (instance_id, execution_id)"
                )
            }
            self.bodies = rows(
                "SELECT instance_id, body FROM perdure.orchestrator_queue "
                "UNION ALL SELECT instance_id, message FROM perdure.dead_letters"
            )
            self.work_left = rows("SELECT count(*) FROM perdure.worker_queue")[0][0]
            self.histories: dict[tuple[str, int], list[tuple[events.Event, float]]] = defaultdict(
                list
            )
            for instance_id, execution_id, data, committed_ms in rows(
                "SELECT instance_id, execution_id, data, "
                "extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1000 "
                "FROM perdure.history ORDER BY instance_id, execution_id, event_id"
            ):
                event = wire.decode_event(data)
                self.histories[instance_id, execution_id].append((event, float(committed_ms or 0)))

    def heard(self) -> Counter[str]:
        """Count how often each value is in a history."""
        return Counter(
            value
            for history in self.histories.values()
            for event, _ in history
            if isinstance(event, events.ExternalEvent | events.QueueEventDelivered)
            for value in _SAID.findall(bytes(event.data).decode())
        )

    def waiting(self) -> Counter[str]:
        """Count how often each value is in a queue."""
        return Counter(value for _, body in self.bodies for value in _SAID.findall(body))


def find_lost(store: Store, lines: Iterable[Line]) -> list[Line]:
    """Return the acknowledged lines that the store does not have."""
    present = store.heard() + store.waiting()

    def is_there(line: Line) -> bool:
        if line.what in {"event", "message"}:
            return present[line.value] > 0
        if line.instance_id not in store.instances:
            return any(line.instance_id == each for each, _ in store.bodies)
        if line.what == "result":
            _, status, output = store.instances[line.instance_id]
            return bool(status == "Completed") and json.loads(output) == json.loads(line.value)
        return True

    return [line for line in lines if not is_there(line)]


def audit(primary: Server, ledger: Ledger, findings: Findings, *, skip: frozenset[str]) -> None:
    """Add everything that is wrong with a store whose instances have had time to end.

    ``skip`` names findings that are not looked for.
    """
    store = Store(primary)
    found = Findings()
    for line in find_lost(store, ledger.acknowledged()):
        status = store.instances.get(line.instance_id, ("", "not there"))[1]
        found.add("lost", f"{line.what} {line.value}: {line.instance_id} is {status}")
    doubled = {value for value, times in (store.heard() + store.waiting()).items() if times > 1}
    for value in sorted(doubled):
        found.add("doubled", value)
    for instance_id, (name, status, output) in store.instances.items():
        if status == "Blocked":
            found.add("blocked", instance_id)
        elif status != "Completed":
            kind = "wrong" if status in {"Failed", "Cancelled", "Terminated"} else "stuck"
            found.add(kind, f"{instance_id} is {status}")
        else:
            _check_result(found, doubled, instance_id, name, json.loads(output))
    for (instance_id, execution_id), history in store.histories.items():
        for hole in _holes([event for event, _ in history]):
            found.add("holes", f"{instance_id}/{execution_id}: {hole}")
        if store.instances.get(instance_id, ("",))[0] == nap.name:
            for early in _early(history):
                found.add("early", f"{instance_id}: {early}")
    if store.work_left and not found.counts["stuck"] + found.counts["blocked"]:
        found.add("stuck", f"{store.work_left} work items are left")
    checked = subprocess.run(
        [sys.executable, "-m", "perdure", "db", "check", "--store", primary.dsn],
        capture_output=True,
        text=True,
        check=False,
    )
    if checked.returncode != 0:
        found.add("damage", (checked.stdout + checked.stderr)[-1000:])
    for kind, examples in found.examples.items():
        if kind not in skip:
            findings.counts[kind] += found.counts[kind]
            findings.examples[kind] += examples


def _check_result(
    found: Findings, doubled: set[str], instance_id: str, name: str, result: Any
) -> None:
    if "/" in instance_id or not instance_id.rpartition("-")[2].isdigit():
        return  # a child; its parent has used its result
    if name in {flow.name for flow in HEARERS}:
        twice = {value for value, times in Counter(result).items() if times > 1} - doubled
        strange = [value for value in result if not value.startswith(f"{instance_id}:")]
        if twice:
            found.add("doubled", f"{instance_id} has heard {twice} twice")
        if strange or STOP in result:
            found.add("wrong", f"{instance_id} has heard {strange}")
        elif list(dict.fromkeys(result)) != sorted(set(result)):
            found.add("overtaken", f"{instance_id} has heard {result}")
    elif result != expected(instance_id, name):
        found.add("wrong", f"{instance_id}: {result!r}")


def _holes(history: list[events.Event]) -> list[str]:
    """Report ids that are not consecutive, and outcomes without or before their cause."""
    ids = [event.event_id for event in history]
    if ids != list(range(1, len(ids) + 1)):
        return [f"the events {ids}"]
    found: list[str] = []
    resolved: set[int] = set()
    for event in history:
        if not isinstance(event, events.Resolving):
            continue
        source = event.source_event_id
        if source >= event.event_id or not isinstance(history[source - 1], events.Scheduled):
            found.append(f"event {event.event_id} follows no cause: {source}")
        if isinstance(
            event,
            events.ActivityCompleted
            | events.ActivityFailed
            | events.TimerFired
            | events.SubOrchestrationCompleted
            | events.SubOrchestrationFailed,
        ):
            if source in resolved:
                found.append(f"event {source} has two outcomes")
            resolved.add(source)
    return found


def _early(history: list[tuple[events.Event, float]]) -> list[str]:
    """Report sleeps that were shorter than asked for, by the clock of the store.

    A sleep begins after the commit of the step before it, and ends with the commit of its timer. It
    cannot be measured if a failover in between has set the clock back.
    """
    found: list[str] = []
    delays = iter(NAP_SECONDS)
    begun_ms = 0.0
    for event, committed_ms in history:
        if isinstance(event, events.ActivityScheduled):
            begun_ms = committed_ms
        elif isinstance(event, events.TimerFired):
            wanted_ms = next(delays) * 1000
            took_ms = committed_ms - begun_ms
            if 0 <= took_ms < wanted_ms - _ROUNDING_MS:
                found.append(f"a sleep of {wanted_ms:.0f} ms took {took_ms:.0f} ms")
    return found
