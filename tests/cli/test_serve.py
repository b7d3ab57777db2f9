"""``perdure serve``: what it refuses before it listens."""

from __future__ import annotations

import subprocess
import sys

import pytest

from patience import HANG_SECONDS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.db", "--store", "b.db"], "either 'a.db' or --store 'b.db', not both"),
        (["a.db"], "there is no store at a.db"),
        (["--listen", "0.0.0.0:7700"], "needs --tokens FILE"),
        (["--listen", "example.com:7700"], "is no address"),
        (["--listen", "7700"], "must be HOST:PORT"),
    ],
)
def test_a_wrong_place_is_refused(tmp_path, arguments, words):
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "serve", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode != 0
    assert words in done.stderr
