"""An environment for each engine, made once under the cache directory and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Environment:
    """The packages of an engine. Without any it runs in the interpreter that is running now."""

    name: str
    packages: tuple[str, ...] = ()
    node_packages: tuple[str, ...] = ()


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("perdure"),
        Environment("duroxide", ("duroxide",)),
        Environment("dbos", ("dbos", "psycopg[binary]")),
        Environment("restate", ("restate-sdk", "hypercorn"), ("@restatedev/restate-server",)),
        Environment("absurd", ("absurd-sdk", "absurdctl", "psycopg[binary]")),
    )
}


def home() -> Path:
    """Return the directory of environments, servers and measured stores, outside the repository."""
    chosen = os.environ.get("PERDURE_BENCH_HOME")
    if chosen:
        return Path(chosen).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "perdure-bench"


def variables(root: Path = ROOT) -> dict[str, str]:
    """The variables of this process, with the benchmarks of a checkout on the path of Python."""
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def prepare(environment: Environment, say: Callable[[str], None]) -> Path:
    """Make the environment if it is not there yet; return its interpreter."""
    if not environment.packages:
        return Path(sys.executable)
    directory = home() / environment.name
    python = directory / "venv" / "bin" / "python"
    stamp = directory / "installed.json"
    wanted = json.dumps([environment.packages, environment.node_packages, sys.version])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    directory.mkdir(parents=True, exist_ok=True)
    say(f"{environment.name}: new environment")
    _run([sys.executable, "-m", "venv", "--clear", directory / "venv"])
    say(f"{environment.name}: pip install {' '.join(environment.packages)}")
    _run([python, "-m", "pip", "install", "--quiet", *environment.packages])
    if environment.node_packages:
        say(f"{environment.name}: npm install {' '.join(environment.node_packages)}")
        npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", directory]
        _run([*npm, *environment.node_packages])
    stamp.write_text(wanted)
    return python


def restate_server() -> Path:
    """The server binary that npm installed for this platform."""
    found = sorted((home() / "restate" / "node_modules").glob("@restatedev/*/bin/restate-server"))
    if not found:
        raise FileNotFoundError("npm installed no restate-server for this platform")
    return found[0]


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
