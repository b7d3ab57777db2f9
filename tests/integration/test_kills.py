"""The short tier of the campaign that kills worker processes."""

import subprocess
import sys
from pathlib import Path

from patience import HANG_SECONDS

TESTS = Path(__file__).parent.parent


def test_killed_workers_lose_and_double_nothing():
    finished = subprocess.run(
        [sys.executable, "-m", "campaigns.runtime_kill", "--kills", "12", "--seed", "7"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    assert "12 kills: 0 lost, 0 doubled, 0 stuck" in finished.stdout
