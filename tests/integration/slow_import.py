"""A module that lets itself be imported when a test says so: it reads the pipe named by GATE."""

import os
from pathlib import Path

from perdure import activity

if gate := os.environ.get("GATE"):
    Path(gate).read_bytes()


@activity(executor="process")
def work() -> str:
    return "done"
