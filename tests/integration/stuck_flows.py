"""Handlers for worker processes that have to end although something does not."""

import asyncio
import os
import time
from pathlib import Path

from perdure import activity, orchestration


def touch(path: str) -> None:
    Path(path).touch()


@activity
def hangs(begun: str) -> None:
    touch(begun)
    time.sleep(600)


@activity(transactional=True)
def holds_store(begun: str) -> None:
    hangs(begun)


@activity
async def deaf(begun: str) -> None:
    touch(begun)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue


@activity
async def slow(begun: str) -> None:
    """Ends when the file is gone."""
    touch(begun)
    while os.path.exists(begun):  # noqa: ASYNC110, ASYNC240, PTH110
        await asyncio.sleep(0.01)


@orchestration
async def calls(name: str, begun: str) -> None:
    handlers = {"hangs": hangs, "deaf": deaf, "slow": slow, "holds_store": holds_store}
    await handlers[name](begun)
