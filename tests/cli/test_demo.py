"""``make demo``: the shop survives the death of its worker, and says so in a pipe too."""

import os
import subprocess
import sys
from pathlib import Path

from patience import HANG_SECONDS

REPOSITORY = Path(__file__).parents[2]


def test_the_demo_ends_right_and_leaves_a_store_to_explore(tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed with SIGKILL" in done.stdout
    assert "each observed exactly once" in done.stdout
    assert "\x1b" not in done.stdout
    commands = [line.strip() for line in done.stdout.splitlines() if "--store" in line]
    assert [command.split("perdure ")[1].split()[0] for command in commands] == [
        "list",
        "show",
        "history",
        "serve",
    ]
    for command in commands[:3]:
        arguments = command.partition("perdure ")[2].split()
        shown = subprocess.run(
            [sys.executable, "-m", "perdure", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout


def test_every_order_of_the_demo_has_its_own_id():
    sys.path.insert(0, str(REPOSITORY))
    try:
        from examples.demo.plan import make_plan
    finally:
        sys.path.remove(str(REPOSITORY))

    ids = [case.id for case in make_plan()]

    assert len(ids) == len(set(ids))
