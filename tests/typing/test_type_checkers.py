"""mypy (strict) and pyright (strict) infer arguments, results and mistakes of the author's API."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG_SECONDS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def mypy(path: Path) -> dict[int, str]:
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir",
         str(ROOT / ".mypy_cache" / "typing"), "--hide-error-context", "--no-color-output",
         "--no-pretty", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    found = re.findall(rf"{path.name}:(\d+): error: (.*)", answer.stdout)
    assert answer.stderr == ""
    return {int(line): message for line, message in found}


def pyright(path: Path) -> dict[int, str]:
    executable = Path(sys.executable).parent / "pyright"
    if not executable.exists():
        pytest.skip("pyright is not installed beside this interpreter")
    answer = subprocess.run(
        [str(executable), "--outputjson", "--pythonpath", sys.executable, str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    diagnostics = json.loads(answer.stdout)["generalDiagnostics"]
    return {
        entry["range"]["start"]["line"] + 1: entry["message"]
        for entry in diagnostics
        if entry["severity"] == "error"
    }


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_what_is_right_is_inferred_without_a_complaint(checker):
    assert checker(HERE / "snippets.py") == {}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_every_mistake_is_found(checker):
    path = HERE / "mistakes.py"
    lines = path.read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}

    assert set(checker(path)) == marked
