"""Signals and programs on every system. Runs under Windows too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from patience import HANG_SECONDS
from perdure.processes import STOP_SIGNALS, ask_to_stop, start_program

SERVE = """
import asyncio, signal, sys, threading
from perdure import Runtime

class Telling(Runtime):
    async def __aenter__(self):
        await super().__aenter__()
        print("running", flush=True)
        return self

    async def __aexit__(self, *args):
        await super().__aexit__(*args)
        print("drained", flush=True)

def stop_when_told():
    if line := sys.stdin.readline():
        signal.raise_signal(int(line))

threading.Thread(target=stop_when_told, daemon=True).start()
asyncio.run(Telling("memory:", []).serve())
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_worker_drains_after_each_stop_signal(number: int) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", SERVE), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline().strip() == b"running"
        output, _ = worker.communicate(b"%d\n" % number, timeout=HANG_SECONDS)

    assert output.strip() == b"drained"
    assert worker.returncode == 0


def test_a_program_ends_when_it_is_asked_to() -> None:
    program = start_program([sys.executable, "-c", "import time; time.sleep(10_000)"])

    ask_to_stop(program)

    assert program.wait(HANG_SECONDS) != 0
