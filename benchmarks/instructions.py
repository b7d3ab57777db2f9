"""Count the instructions of one unit of work, which depend little on the load of the machine.

Each workload runs at two sizes under valgrind, which must be installed, and the difference is the
cost of what was added: a step of W2 and W3, a workflow of W1 and W4, a start of W5. On a quiet
machine two runs of the same code differ by one part in a hundred, where their times differ by half.
A busy one stretches a run: so each size is run several times and the least number counts, and what
a store does several times a second in any case is left out.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from benchmarks.environments import ROOT, variables
from benchmarks.server import postgres
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Mapping


class Sizes(NamedTuple):
    parameter: str
    small: int
    large: int
    fixed: Mapping[str, int] = {}


SIZES: Final = {
    "w1": Sizes("runs", 50, 150),
    "w2": Sizes("steps", 100, 300),
    "w3": Sizes("steps", 200, 1000),
    "w4": Sizes("workflows", 100, 300, {"steps": 5}),
    "w5": Sizes("workflows", 500, 1500),
}

STORES: Final[Mapping[str, dict[str, str]]] = {
    "sqlite": {"store": "sqlite", "durability": "full"},
    "filesystem": {"store": "filesystem"},
    "memory": {"store": "memory"},
    "postgres": {"store": "postgres"},
}
"""Of Postgres, the client's side is counted; its server runs outside of valgrind."""


@click.command()
@click.option("--workload", "-w", multiple=True, type=click.Choice(list(SIZES)))
@click.option("--store", "-s", multiple=True, type=click.Choice(list(STORES)))
@click.option("--repeat", default=3, help="Runs of each size; the cheapest counts.")
@click.option("--child", hidden=True, help="What to run in this process.")
def main(workload: tuple[str, ...], store: tuple[str, ...], repeat: int, child: str | None) -> None:
    """Print thousands of instructions for each unit of work."""
    if shutil.which("valgrind") is None:
        raise click.ClickException("valgrind counts the instructions; install its package")
    if child is not None:
        asyncio.run(run(json.loads(child)))
        return
    with ExitStack() as stack:
        url = stack.enter_context(postgres()) if "postgres" in store else ""
        for name in workload or SIZES:
            for each in store or ("sqlite", "memory"):
                sizes = SIZES[name]
                small, large = (
                    min(count(name, each, size, url) for _ in range(repeat))
                    for size in (sizes.small, sizes.large)
                )
                cost = (large - small) / (sizes.large - sizes.small) / 1000
                click.echo(f"{name} {each:10} {cost:8.1f} thousand instructions a unit")


def count(workload: str, store: str, size: int, url: str) -> int:
    """Instructions of a process that runs so much of the workload."""
    order = json.dumps({"workload": workload, "store": store, "size": size, "url": url})
    command = [
        "valgrind",
        "--tool=cachegrind",
        "--cache-sim=no",
        "--cachegrind-out-file=/dev/null",
        sys.executable,
        "-m",
        "benchmarks.instructions",
        "--child",
        order,
    ]
    environment = variables() | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1].replace(",", ""))


async def run(order: dict[str, Any]) -> None:
    from benchmarks.peers.perdure import PerdurePeer
    from perdure.providers.directory import store
    from perdure.providers.sqlite import database, peers, writer

    writer.QUICK_SECONDS = 3_600.0  # the disk is not slow, everything here is
    for module, name in (
        (writer, "LOOK_FOR_DEAD_SECONDS"),
        (database, "WATCH_BESIDE_PEERS_SECONDS"),
        (peers, "RESCAN_SECONDS"),
        (store, "IDLE_SECONDS"),  # a checkpoint comes when it closes, as in a run that is not slow
        (store, "AGE_SECONDS"),
    ):
        setattr(module, name, 3_600.0)
    workload, sizes = WORKLOADS[order["workload"]], SIZES[order["workload"]]
    with tempfile.TemporaryDirectory() as directory:
        peer = PerdurePeer(Path(directory), STORES[order["store"]] | {"url": order["url"]})
        parameters = dict(sizes.fixed) | {sizes.parameter: order["size"]}
        await workload.run(peer, lambda _name: None, **parameters)
        await peer.close()


if __name__ == "__main__":
    main()
