"""Workers whose machines disagree about the time, on one server."""

from __future__ import annotations

import asyncio
import time

import pytest

from patience import HANG_SECONDS
from perdure import Runtime, orchestration
from perdure.clock import SystemClock


@orchestration
async def nap(seconds: float) -> None:
    await asyncio.sleep(seconds)


@pytest.mark.parametrize("minutes", [-10, 10], ids=["behind", "ahead"])
async def test_a_timer_follows_the_clock_of_the_server(make_provider, monkeypatch, minutes):
    monkeypatch.setattr(
        SystemClock, "now_ms", lambda _self: time.time_ns() // 1_000_000 + minutes * 60_000
    )
    async with Runtime(make_provider(), [nap]) as runtime:
        begun = time.monotonic()
        await (await runtime.start(nap, 0.3)).result(HANG_SECONDS)

        assert time.monotonic() - begun >= 0.3
