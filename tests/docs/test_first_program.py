"""The program of README survives kills, and the commands show what it did. Runs on every system."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from patience import HANG_SECONDS

MOMENTS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.7, 2.2)
"""Seconds after which the program is killed."""
README = Path(__file__).parents[2] / "README.md"


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        (sys.executable, *arguments),
        cwd=folder,
        capture_output=True,
        timeout=HANG_SECONDS,
        check=False,
        env=os.environ | {"PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_the_program_of_readme_ends_after_kills_at_any_moment(tmp_path: Path) -> None:
    found = re.search(r"## An example\n\n```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert found is not None
    (tmp_path / "shop.py").write_text(found[1], encoding="utf-8")
    for moment in MOMENTS:
        with subprocess.Popen((sys.executable, "shop.py"), cwd=tmp_path) as program:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(moment)
            program.kill()

    assert run(tmp_path, "shop.py").strip() == "receipt-o-1"

    store = ("--store", "shop.db")
    assert "o-1" in run(tmp_path, "-m", "perdure", "list", *store)
    assert "Completed" in run(tmp_path, "-m", "perdure", "show", "o-1", *store)
    history = run(tmp_path, "-m", "perdure", "history", "o-1", *store)
    for step in ("charge", "ship", "send_mail"):
        assert step in history
    assert "failed" not in run(tmp_path, "-m", "perdure", "doctor", *store).lower()
