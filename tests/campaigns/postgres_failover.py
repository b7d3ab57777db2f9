"""Fail a Postgres cluster over under load, and see that nothing is lost, doubled, early or stuck.

    python -m campaigns.postgres_failover --modes sync --failovers 100
    python -m campaigns.postgres_failover --case event_twice

With tests/ on the path. A primary and a streaming standby run on loopback. Workers and a client, as
processes, use them by a list of both servers and record on disk what was acknowledged. The modes
are functions, each a column of the table. ``--case`` runs the smallest reproduction of one fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.failover_audit import FINDINGS, Findings, Ledger, Store, audit, find_lost
from campaigns.failover_cases import CASES, end_hanging_commits, hold_back
from campaigns.failover_hosts import (
    HOST_CASES,
    LEAVES_SECONDS,
    count_sessions,
    end_sessions,
)
from campaigns.failover_load import HEARERS, WRITES, Place, call, stop_hearers, work
from campaigns.runtime_kill import _fork as fork
from campaigns.runtime_kill import _in_child as in_child
from postgres_bouncer import Bouncer, missing_bouncer
from postgres_cluster import Cluster, missing_faketime
from postgres_patroni import PatroniCluster, missing_patroni

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

RECOVERY_SECONDS = 180.0
DRAIN_SECONDS = 75.0
"""Instances that do not change for so long are stuck. Clocks may differ by half a minute."""
FAILOVERS_PER_ROUND = 10
UP_SECONDS = (0.5, 2.0)
_SOON_SECONDS = 5.0
ENDED = "('Completed', 'Failed', 'Cancelled', 'Terminated')"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The amount of work of a run."""

    failovers: int = 10
    workers: int = 3
    away_seconds: float = 300.0
    seed: int = 0
    skip: frozenset[str] = frozenset()
    """Findings that are not looked for."""


@dataclass(slots=True)
class Outcome:
    """The counts of one mode."""

    mode: str
    faults: Counter[str] = field(default_factory=Counter[str])
    acknowledged: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    """Calls that raised, by error."""
    gone: int = 0
    """Acknowledged and lost as an asynchronous failover may lose it."""
    findings: Findings = field(default_factory=Findings)
    outage_seconds: list[float] = field(default_factory=list[float])
    """From a fault to the promotion, where a failover manager decides."""
    first_seconds: list[float] = field(default_factory=list[float])
    """From a promotion to the first acknowledged write of any process."""
    all_seconds: list[float] = field(default_factory=list[float])
    """From a promotion to the first acknowledged write of the last process."""
    seconds: float = 0.0
    sessions: int = 0
    """The most server sessions that were seen at once, also of lost connections."""


class Round:
    """One cluster under load, from an empty store to its audit."""

    def __init__(
        self,
        cluster: Cluster | PatroniCluster,
        outcome: Outcome,
        sizes: Sizes,
        dsn: str = "",
        **options: Any,
    ) -> None:
        self.cluster = cluster
        self.outcome = outcome
        self._sizes = sizes
        self.rng = random.Random(sizes.seed + sum(outcome.faults.values()))
        records = cluster.home / "records"
        records.mkdir()
        self._place = Place(dsn or cluster.dsn, records, options)
        self.ledger = Ledger(self._place.records)
        self._workers: list[int] = []
        self._client = 0
        self._checked_until = 0.0

    def __enter__(self) -> Self:
        in_child(stop_hearers, self._place, [])  # creates the schema
        names = [f"worker{number}" for number in range(self._sizes.workers)]
        self._workers = [fork(work, self._place, name) for name in names]
        self._client = fork(call, self._place, "client", self._sizes.seed)
        self.await_answers(time.monotonic(), is_recovery=False)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in [*self._workers, self._client]:
            _kill(process)

    # --- while it runs

    def stay_up(self) -> None:
        """Let the load run undisturbed for a moment."""
        time.sleep(self.rng.uniform(*UP_SECONDS))

    def await_answers(self, since: float, *, is_recovery: bool = True) -> None:
        """Wait until every process has had a write acknowledged, and note how long it took."""
        wanted = self._sizes.workers + 1
        give_up_at = time.monotonic() + RECOVERY_SECONDS
        while True:
            self.ledger.read()
            answers = self.ledger.first_answers(since)
            if len(answers) == wanted or time.monotonic() > give_up_at:
                break
            time.sleep(0.02)
        if len(answers) < wanted:
            self.outcome.findings.add("not recovered", f"answers only for {sorted(answers)}")
        elif is_recovery:
            self.outcome.first_seconds.append(min(answers.values()) - since)
            self.outcome.all_seconds.append(max(answers.values()) - since)

    def verify(self, fault: float, may_lose_since: float | None = None) -> None:
        """See that the new primary has what was acknowledged before the fault.

        What was acknowledged after ``may_lose_since`` may be gone.
        """
        self.ledger.read()
        lines = self.ledger.acknowledged(self._checked_until, fault)
        for line in find_lost(Store(self.cluster.primary), lines):
            if may_lose_since is not None and line.time >= may_lose_since:
                self.outcome.gone += 1
            else:
                text = f"{line.what} {line.instance_id}, {fault - line.time:.3f} s before the fault"
                self.outcome.findings.add("lost", text)
            self.ledger.gone.add(line)  # said once
        self._checked_until = fault

    # --- at its end

    def finish(self) -> None:
        """Let every instance end, then audit the store."""
        _terminate(self._client)
        for worker in self._workers:
            os.kill(worker, signal.SIGTERM)
        self._drain()
        for worker in self._workers:
            if os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self.outcome.findings.add("dead workers", f"process {worker}")
            _kill(worker)
        self._workers = []
        self.ledger.read()
        audit(self.cluster.primary, self.ledger, self.outcome.findings, skip=self._sizes.skip)
        for line in self.ledger.lines:
            if line.outcome == "ack":
                self.outcome.acknowledged[line.what] += 1
            elif line.outcome == "fail":
                self.outcome.failed[f"{line.what}: {str(line.value).partition(':')[0]}"] += 1

    def _drain(self) -> None:
        """Tell those that listen to end, until every instance has ended or nothing changes."""
        hearers = "', '".join(flow.name for flow in HEARERS)
        running = (
            "SELECT instance_id, name FROM perdure.instances "
            f"WHERE status NOT IN {ENDED} AND status <> 'Blocked'"
        )
        listening = f"SELECT instance_id FROM ({running}) r WHERE name IN ('{hearers}')"
        primary = self.cluster.primary
        told: set[str] = set()
        left = 0
        changed_at = time.monotonic()
        while (now := len(primary.ask(running))) and time.monotonic() < changed_at + DRAIN_SECONDS:
            if now != left:
                left, changed_at = now, time.monotonic()
            new = {row[0] for row in primary.ask(listening)} - told
            if new:
                in_child(stop_hearers, self._place, sorted(new))
                told |= new
            time.sleep(0.1)


# --- modes


def synchronous(sizes: Sizes) -> Outcome:
    """Fail over with a synchronous standby: half of the primaries are killed, half frozen.

    A frozen one stays so until the work goes on, and is killed then.
    """
    return _fail_over("sync", sizes, hows=("kill", "freeze"))


def killed(sizes: Sizes) -> Outcome:
    """Like ``synchronous``, with killed primaries only."""
    return _fail_over("sync, killed", sizes, hows=("kill",))


def skewed(sizes: Sizes) -> Outcome:
    """Fail over to and fro between servers whose clocks differ by 30 seconds."""
    return _fail_over("clocks +-30 s", sizes, hows=("kill",), skew_seconds=30.0)


def asynchronous(sizes: Sizes) -> Outcome:
    """Fail over to a standby that lacks the last moments of the primary.

    What was acknowledged before the standby had last caught up must be there.
    """
    outcome = Outcome("async")
    for count in _rounds(sizes.failovers):
        with Cluster(synchronous=False) as cluster, Round(cluster, outcome, sizes) as round_:
            for _ in range(count):
                round_.stay_up()
                covered = time.monotonic()
                cluster.await_replay()
                hold_back(cluster.primary)
                time.sleep(round_.rng.uniform(0.05, 0.5))
                cluster.primary.kill()
                fault = time.monotonic()
                cluster.promote()
                outcome.faults["kill"] += 1
                round_.await_answers(time.monotonic())
                round_.verify(fault, may_lose_since=covered)
                cluster.attach()
            round_.finish()
    return outcome


def standby_away(sizes: Sizes) -> Outcome:
    """Take the synchronous standby away for a long time, then bring it back.

    Meanwhile nothing may be acknowledged, also not by the repeat of a commit whose connection is
    ended. Afterwards everything goes on.
    """
    outcome = Outcome("standby away")
    with Cluster(synchronous=True) as cluster, Round(cluster, outcome, sizes) as round_:
        round_.stay_up()
        cluster.standby.kill()
        away = time.monotonic()
        outcome.faults["away"] += 1
        # Soon: later the callers have given up.
        time.sleep(_SOON_SECONDS)
        end_hanging_commits(cluster.primary)
        while time.monotonic() < away + sizes.away_seconds:
            time.sleep(1)
            outcome.sessions = max(outcome.sessions, count_sessions(cluster.primary))
        back = time.monotonic()
        cluster.standby.start()
        round_.ledger.read()
        for line in round_.ledger.acknowledged(away + 2, back):
            if line.what in WRITES:
                text = f"{line.what} {line.instance_id} after {line.time - away:.1f} s"
                outcome.findings.add("without standby", text)
        cluster.await_standby()
        round_.await_answers(time.monotonic())
        round_.finish()
    return outcome


def split_brain(sizes: Sizes) -> Outcome:
    """Let the old primary take writes beside the new one, and end it then.

    It is resurrected after its death, thawed, or was never gone. What was acknowledged must be on
    the new primary. Only of an asynchronous old primary that was never gone may it be lost, and
    only for the time in which a process learns of the new one.
    """
    outcome = Outcome("split brain")
    for how in ("resurrected", "thawed", "side by side", "side by side, synchronous"):
        is_synchronous = how.endswith("synchronous")
        with (
            Cluster(synchronous=is_synchronous) as cluster,
            Round(cluster, outcome, sizes) as round_,
        ):
            round_.stay_up()
            cluster.await_replay()
            if how == "resurrected":
                cluster.primary.kill()
            elif how == "thawed":
                cluster.primary.freeze()
            fault = time.monotonic()
            cluster.promote()
            outcome.faults[how] += 1
            if how == "side by side":
                time.sleep(LEAVES_SECONDS)
            else:
                round_.await_answers(time.monotonic(), is_recovery=not is_synchronous)
            left = time.monotonic()
            if how == "resurrected":
                cluster.standby.start()
            elif how == "thawed":
                cluster.standby.thaw()
            time.sleep(2)
            end_sessions(cluster.primary)
            time.sleep(2)
            cluster.standby.kill()
            moment = time.monotonic()
            round_.await_answers(moment, is_recovery=False)
            if not is_synchronous:
                round_.verify(fault, may_lose_since=fault - 1)
            if how == "side by side":
                round_.verify(left, may_lose_since=fault)
            round_.verify(moment)
            round_.finish()
    return outcome


def pooled(sizes: Sizes) -> Outcome:
    """Restart, pause and reconnect PgBouncer, and fail over behind it, in transaction mode."""
    outcome = Outcome("pgbouncer")
    options = {"prepare": False, "listen": False}
    for count in _rounds(sizes.failovers):
        with ExitStack() as stack:
            cluster = stack.enter_context(Cluster(synchronous=True))
            bouncer = stack.enter_context(Bouncer(cluster))
            round_ = stack.enter_context(Round(cluster, outcome, sizes, bouncer.dsn, **options))
            for number in range(count):
                round_.stay_up()
                fault = time.monotonic()
                how = ("restart", "pause", "reconnect", "failover")[number % 4]
                outcome.faults[how] += 1
                if how == "restart":
                    bouncer.kill()
                    bouncer.start()
                elif how == "pause":
                    bouncer.command("PAUSE")
                    time.sleep(2)
                    bouncer.command("RESUME")
                elif how == "reconnect":
                    bouncer.command("RECONNECT")
                else:
                    cluster.primary.kill()
                    cluster.promote()
                    bouncer.turn()
                round_.await_answers(time.monotonic())
                round_.verify(fault)
                if how == "failover":
                    cluster.attach()
            round_.finish()
    return outcome


def managed(sizes: Sizes) -> Outcome:
    """Let Patroni decide: kill the machine of the primary, or switch over in order."""
    outcome = Outcome("patroni")
    for count in _rounds(sizes.failovers):
        with PatroniCluster() as cluster, Round(cluster, outcome, sizes) as round_:
            for number in range(count):
                round_.stay_up()
                how = ("kill", "switchover")[number % 2]
                fault = time.monotonic()
                dead = None
                if how == "kill":
                    dead = cluster.kill_primary()
                else:
                    cluster.switch()
                outcome.faults[how] += 1
                outcome.outage_seconds.append(time.monotonic() - fault)
                round_.await_answers(time.monotonic())
                round_.verify(fault)
                if dead is not None:
                    dead.start()
                cluster.await_standby()
            round_.finish()
    return outcome


MODES: dict[str, Callable[[Sizes], Outcome]] = {
    "sync": synchronous,
    "killed": killed,
    "async": asynchronous,
    "skew": skewed,
    "away": standby_away,
    "split": split_brain,
    "pgbouncer": pooled,
    "patroni": managed,
}


ALL_CASES: dict[str, tuple[int, Callable[[], str]]] = CASES | HOST_CASES


def _fail_over(
    mode: str, sizes: Sizes, hows: tuple[str, ...], *, skew_seconds: float = 0
) -> Outcome:
    outcome = Outcome(mode)
    for count in _rounds(sizes.failovers):
        with (
            Cluster(synchronous=True, skew_seconds=skew_seconds) as cluster,
            Round(cluster, outcome, sizes) as round_,
        ):
            for number in range(count):
                round_.stay_up()
                how = hows[number % len(hows)]
                fault = time.monotonic()
                if how == "kill":
                    cluster.primary.kill()
                else:
                    cluster.primary.freeze()
                cluster.promote()
                outcome.faults[how] += 1
                round_.await_answers(time.monotonic())
                round_.verify(fault)
                cluster.attach()
            round_.finish()
    return outcome


def _rounds(failovers: int) -> list[int]:
    whole, rest = divmod(failovers, FAILOVERS_PER_ROUND)
    return [FAILOVERS_PER_ROUND] * whole + [rest] * bool(rest)


def _terminate(process: int) -> None:
    """End a process that ends by itself when it is told to."""
    os.kill(process, signal.SIGTERM)
    give_up_at = time.monotonic() + 15
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > give_up_at:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


# --- the report


def table(outcomes: list[Outcome]) -> str:
    """Return the figures of all modes as one table."""
    heads = [
        *("mode", "faults", "writes", "results", "gone"),
        *FINDINGS,
        *(
            "promotion p50/p95",
            "first write p50/p95",
            "every process p50/p95",
            "sessions",
            "seconds",
        ),
    ]
    rows = [heads]
    rows += [
        [
            outcome.mode,
            " ".join(f"{count} {how}" for how, count in outcome.faults.items()),
            str(sum(outcome.acknowledged[what] for what in WRITES)),
            str(outcome.acknowledged["result"]),
            str(outcome.gone),
            *(str(outcome.findings.counts[kind]) for kind in FINDINGS),
            _quantiles(outcome.outage_seconds),
            _quantiles(outcome.first_seconds),
            _quantiles(outcome.all_seconds),
            str(outcome.sessions or "-"),
            f"{outcome.seconds:.0f}",
        ]
        for outcome in outcomes
    ]
    # One line for each figure: there are more figures than modes.
    columns = list(zip(*rows, strict=True))
    widths = [max(len(cell) for cell in row) for row in rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(column, widths, strict=True)).rstrip()
        for column in columns
    )


def as_json(outcomes: list[Outcome]) -> str:
    return json.dumps(
        [
            {
                "mode": outcome.mode,
                "faults": outcome.faults,
                "acknowledged": outcome.acknowledged,
                "failed": outcome.failed,
                "gone": outcome.gone,
                "findings": {kind: outcome.findings.counts[kind] for kind in FINDINGS},
                "examples": outcome.findings.examples,
                "promotion_seconds": outcome.outage_seconds,
                "first_write_seconds": outcome.first_seconds,
                "every_process_seconds": outcome.all_seconds,
                "sessions": outcome.sessions,
                "seconds": outcome.seconds,
            }
            for outcome in outcomes
        ],
        indent=2,
    )


def _quantiles(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{ordered[len(ordered) // 2]:.2f} / {p95:.2f} s"


def run_mode(name: str, sizes: Sizes) -> Outcome:
    begun = time.monotonic()
    outcome = MODES[name](sizes)
    outcome.seconds = time.monotonic() - begun
    return outcome


def missing_for(name: str) -> str | None:
    """Say what is missing for that mode or case; None if nothing is."""
    if name == "pgbouncer" or name.endswith("_pooler"):
        return missing_bouncer()
    if name == "patroni":
        return missing_patroni()
    if name == "skew" or name.endswith("_clock"):
        return missing_faketime()
    return None


def run_case(name: str) -> bool:
    """Run one reproduction and say what it has seen; True if the promise holds."""
    item, case = ALL_CASES[name]
    if (missing := missing_for(name)) is not None:
        print(f"item {item}  {name}: left out, {missing}", flush=True)
        return True
    try:
        said = f"holds: {case()}"
    except AssertionError as error:
        said = f"BROKEN: {error}"
    print(f"item {item}  {name}: {said}", flush=True)
    return said.startswith("holds")


def main() -> None:
    usual = Sizes()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=[])
    parser.add_argument("--case", nargs="+", choices=[*ALL_CASES, "all"], default=[])
    parser.add_argument("--failovers", type=int, default=usual.failovers)
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--away-seconds", type=float, default=usual.away_seconds)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--leave-out", nargs="+", choices=FINDINGS, default=[], help="do not look for these"
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON, with examples")
    options = parser.parse_args()
    if options.case:
        names = list(ALL_CASES) if "all" in options.case else options.case
        broken = [name for name in names if not run_case(name)]
        sys.exit(1 if broken else 0)
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", file=sys.stderr, flush=True)
    sizes = Sizes(
        failovers=options.failovers,
        workers=options.workers,
        away_seconds=options.away_seconds,
        seed=seed,
        skip=frozenset(options.leave_out),
    )
    outcomes: list[Outcome] = []
    for name in options.modes or MODES:
        if (missing := missing_for(name)) is not None:
            print(f"{name}: left out, {missing}", file=sys.stderr, flush=True)
            continue
        outcomes.append(run_mode(name, sizes))
        for kind, examples in outcomes[-1].findings.examples.items():
            print(f"{name}: {kind}: {examples[:5]}", file=sys.stderr, flush=True)
    print(as_json(outcomes) if options.json else table(outcomes))
    sys.exit(1 if any(sum(outcome.findings.counts.values()) for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
