"""Several processes on one SQLite file: latency, cost of waiting processes, takeover after a kill.

With ``--before PYTHON`` (the interpreter of another checkout) both are measured in turns, and with
``--dbos`` also DBOS, with a client and a worker apart: as it comes, and with quick polling.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import pages
from benchmarks.environments import ENVIRONMENTS, home, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLES = Path(__file__).with_name("process_roles.py")
DBOS_ROLES = Path(__file__).with_name("dbos_roles.py")
DBOS_POLLS = {"dbos": "1", "dbos, polling every 10 ms": "0.01"}
IDLE_SECONDS = 10.0
KILLS = 5

NAMES = {
    "apart": "client and worker apart, one step after the other: p50 ms",
    "apart_p95": "the same: p95 ms",
    "apart_worst": "the same: worst ms",
    "pause": "client and worker apart, after a pause of 0.3 s: p50 ms",
    "pause_worst": "the same: worst ms",
    "alone": "one busy process: p50 ms of one step",
    "alone_chain": "one busy process: steps/s of a chain",
    "beside_1": "the same beside 1 process that waits for something else: p50 ms",
    "beside_1_chain": "the same: steps/s of a chain",
    "beside_1_cpu": "the waiting process: % of a core",
    "beside_8": "beside 8 processes that wait for something else: p50 ms",
    "beside_8_chain": "the same: steps/s of a chain",
    "idle_cpu": "an idle worker: % of a core",
    "idle_written": "an idle worker: bytes written",
    "takeover": "from the start of the next worker after a kill to its next step: ms",
    "restart": "the same after SIGTERM, as in a deploy: ms",
    "stop": "from SIGTERM to the end of the worker: ms",
}


class Installation:
    """The interpreter that has the version to be measured, and the program for it."""

    def __init__(self, python: Path, roles: Path = ROLES, **variables: str) -> None:
        self.python = python
        self.roles = roles
        self.variables = variables

    @contextmanager
    def running(self, role: str, store: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A process of that role, from the moment when it is ready; killed at the end."""
        process = self._popen(role, store, *arguments)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()
            process.communicate()

    def ask(self, role: str, store: Path, *arguments: str) -> dict[str, float]:
        """Run a process of that role to its end, and return what it says."""
        output, _ = self._popen(role, store, *arguments).communicate()
        answer: dict[str, float] = json.loads(output) if output else {}
        return answer

    def _popen(self, role: str, store: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [str(self.python), str(self.roles), role, str(store), *arguments]
        environment = os.environ | self.variables
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def measure(installation: Installation, directory: Path) -> dict[str, float]:
    """Measure everything once, each part on a fresh store."""
    found = measure_apart(installation, directory / "apart.db")
    if installation.roles != ROLES:
        return found
    for count in (0, 1, 8):
        found |= measure_beside(installation, directory / f"beside-{count}.db", count)
    found |= measure_idle(installation, directory / "idle.db")
    killed = measure_takeover(installation, directory / "takeover.db", signal.SIGKILL)
    stopped = measure_takeover(installation, directory / "restart.db", signal.SIGTERM)
    return found | {"takeover": killed[0], "restart": stopped[0], "stop": stopped[1]}


def measure_apart(installation: Installation, store: Path) -> dict[str, float]:
    with installation.running("work", store):
        back_to_back = installation.ask("latencies", store, "0")
        paused = installation.ask("latencies", store, "0.3")
    return {
        "apart": back_to_back["p50"],
        "apart_p95": back_to_back["p95"],
        "apart_worst": back_to_back["worst"],
        "pause": paused["p50"],
        "pause_worst": paused["worst"],
    }


def measure_beside(installation: Installation, store: Path, count: int) -> dict[str, float]:
    name = f"beside_{count}" if count else "alone"
    installation.ask("fill", store)  # slow-0 waits for ever: nothing here runs it
    found: dict[str, float] = {}
    with ExitStack() as stack:
        waiting = [
            stack.enter_context(installation.running("wait", store, "slow-0")).pid
            for _ in range(count)
        ]
        begin, used = time.perf_counter(), cpu_seconds(waiting)
        busy = installation.ask("alone", store)
        if count == 1:
            seconds = time.perf_counter() - begin
            found[f"{name}_cpu"] = (cpu_seconds(waiting) - used) / seconds * 100
    return found | {name: busy["p50"], f"{name}_chain": busy["steps"]}


def measure_idle(installation: Installation, store: Path) -> dict[str, float]:
    with installation.running("work", store) as worker:
        time.sleep(3)
        used, written = cpu_seconds([worker.pid]), bytes_written(worker.pid)
        time.sleep(IDLE_SECONDS)
        return {
            "idle_cpu": (cpu_seconds([worker.pid]) - used) / IDLE_SECONDS * 100,
            "idle_written": float(bytes_written(worker.pid) - written),
        }


def measure_takeover(
    installation: Installation, store: Path, end: signal.Signals
) -> tuple[float, float]:
    """End the only worker and start the next one, several times. Return two medians in ms:

    from the readiness of the new worker to the first event that it commits, and from the signal to
    the end of the old one.
    """
    installation.ask("fill", store)
    taken: list[float] = []
    ended: list[float] = []
    with ExitStack() as stack:
        worker = stack.enter_context(installation.running("work", store))
        reader = apsw.Connection(str(store), flags=apsw.SQLITE_OPEN_READONLY)
        stack.callback(reader.close)
        for _ in range(KILLS):
            time.sleep(1)
            begin = time.perf_counter()
            worker.send_signal(end)
            worker.wait()
            ended.append((time.perf_counter() - begin) * 1000)
            before = events_of(reader)
            worker = stack.enter_context(installation.running("work", store))
            begin = time.perf_counter()
            while events_of(reader) == before:
                time.sleep(0.001)
            taken.append((time.perf_counter() - begin) * 1000)
    return statistics.median(taken), statistics.median(ended)


def events_of(reader: apsw.Connection) -> int:
    return int(reader.execute("SELECT count(*) FROM history").get)


def cpu_seconds(pids: list[int]) -> float:
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / ticks


def bytes_written(pid: int) -> int:
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    return 0


def as_text(medians: dict[str, dict[str, float]], repeat: int) -> str:
    """The figures as a table of a page, with what the reader must know of the machine."""
    rows = [["what", *medians], ["---"] * (len(medians) + 1)]
    for figure, text in NAMES.items():
        found = [f"{each[figure]:,.2f}" if figure in each else "" for each in medians.values()]
        rows.append([text, *found])
    load = os.getloadavg()[1]
    return "\n".join(
        [
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            f"Medians of {repeat} rounds in turns; {os.cpu_count()} cores, load {load:.1f}.",
        ]
    )


@click.command()
@click.option("--repeat", default=3, show_default=True, help="Rounds; medians are shown.")
@click.option(
    "--before",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Interpreter of another checkout, measured in turns with this one.",
)
@click.option("--dbos", is_flag=True, help="Also DBOS, set up on first use.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON file.")
@click.option(
    "--into",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Page of the documentation whose figures are renewed.",
)
def main(
    *, repeat: int, before: Path | None, dbos: bool, output: Path | None, into: Path | None
) -> None:
    """Measure several processes on one SQLite file with every commit on disk."""
    installations = {"now": Installation(Path(sys.executable))}
    if before is not None:
        installations = {"before": Installation(before), **installations}
    if dbos:
        python = prepare(ENVIRONMENTS["dbos"], click.echo)
        for name, seconds in DBOS_POLLS.items():
            installations[name] = Installation(python, DBOS_ROLES, DBOS_POLL_SECONDS=seconds)
    figures: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in installations}
    runs = home() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    console = Console()
    for _ in track(range(repeat), "measuring", console=console):
        for name, installation in installations.items():
            directory = Path(tempfile.mkdtemp(dir=runs))
            try:
                for figure, value in measure(installation, directory).items():
                    figures[name][figure].append(value)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    medians = {
        name: {figure: statistics.median(values) for figure, values in found.items()}
        for name, found in figures.items()
    }
    if into is not None:
        page = pages.renew(into.read_text(), "processes", as_text(medians, repeat))
        into.write_text(page)
    table = Table("what", *[f"[bold]{name}[/bold]" for name in medians])
    for figure, text in NAMES.items():
        table.add_row(
            text,
            *[f"{found[figure]:,.2f}" if figure in found else "" for found in medians.values()],
        )
    console.print(table)
    if output is not None:
        output.write_text(json.dumps(medians, indent=2) + "\n")


if __name__ == "__main__":
    main()
