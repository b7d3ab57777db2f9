"""A run that hangs tells where each of its tasks waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from patience import run_and_watch

if TYPE_CHECKING:
    import pytest


def test_a_run_that_hangs_tells_where_its_tasks_wait(capsys: pytest.CaptureFixture[str]) -> None:
    told = ""

    async def waits_inside(released: asyncio.Event) -> None:
        await released.wait()

    async def hang() -> str:
        nonlocal told
        released = asyncio.Event()
        task = asyncio.create_task(waits_inside(released), name="inner")
        while "waits_inside" not in told:
            await asyncio.sleep(0.01)
            told += capsys.readouterr().err
        released.set()
        await task
        return "done"

    assert run_and_watch(hang(), 0.01) == "done"
    assert "inner\n" in told
    assert "locks.py" in told, "the innermost wait is told too"
