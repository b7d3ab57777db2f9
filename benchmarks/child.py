"""One phase of one workload for one engine, in this process. Started by the driver, not by hand."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.workloads import WORKLOADS

PREFIX = "@bench "


def tell(**message: Any) -> None:
    print(PREFIX + json.dumps(message), flush=True)


def mark(name: str) -> None:
    """Have the driver look at this process now, and go on when it has."""
    tell(mark=name)
    sys.stdin.readline()


async def run(order: dict[str, Any]) -> None:
    module = importlib.import_module(f"benchmarks.peers.{order['peer']}")
    adapter = next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Peer) and value is not Peer
    )
    peer = adapter(Path(order["directory"]), order["settings"])
    phase = getattr(WORKLOADS[order["workload"]], order["phase"])
    try:
        result = await phase(peer, mark, **order["parameters"])
        tell(result=result, about=peer.about())
    finally:
        await peer.close()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        # Not asyncio.run(): it waits for threads that an engine may leave busy.
        loop.run_until_complete(run(order))
    except BaseException as error:  # noqa: BLE001 - the driver must hear of every error
        tell(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    # Threads that an engine leaves behind must not keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
