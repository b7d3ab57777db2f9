"""One repetition: fresh directory, fresh process for each phase, watched from outside."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from benchmarks.child import PREFIX
from benchmarks.environments import ROOT, variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Order:
    """The workload to run, and the engine to run it on."""

    peer: str
    python: Path
    settings: Mapping[str, Any]
    workload: Workload
    parameters: Mapping[str, int]
    base: Path
    """Directory for the stores; its file system is what is measured."""
    timeout_seconds: float = 300.0
    root: Path = ROOT
    """The checkout whose benchmarks are run."""


def run_trial(order: Order) -> dict[str, Any]:
    """The measured values, or ``error`` with what went wrong. Never raises for the engine."""
    order.base.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{order.peer}-", dir=order.base))
    try:
        result: dict[str, Any] = {}
        if order.workload.prepare is not None:
            result = _run_phase(order, "prepare", directory)
        if "error" not in result:
            result |= _run_phase(order, "run", directory)
        return result
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run_phase(order: Order, phase: str, directory: Path) -> dict[str, Any]:
    with (directory / f"{phase}.log").open("w+") as log:
        answer = _run_child(order, phase, directory, log)
        if answer is not None:
            return answer
        log.seek(0)
        said = log.read()[-800:]
        return {"error": f"no answer within {order.timeout_seconds:.0f} s; it said: {said}"}


def _run_child(order: Order, phase: str, directory: Path, log: TextIO) -> dict[str, Any] | None:
    with subprocess.Popen(
        [order.python, "-m", "benchmarks.child"],
        cwd=order.root,
        env=variables(order.root),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    ) as child:
        late = threading.Timer(order.timeout_seconds, _end_tree, [child.pid])
        late.start()
        try:
            return _converse(child, order, phase, directory)
        finally:
            late.cancel()
            _end_tree(child.pid)


def _converse(
    child: subprocess.Popen[str], order: Order, phase: str, directory: Path
) -> dict[str, Any] | None:
    assert child.stdin is not None
    assert child.stdout is not None
    instruction = {
        "peer": order.peer,
        "workload": order.workload.name,
        "phase": phase,
        "directory": str(directory),
        "settings": dict(order.settings),
        "parameters": dict(order.parameters),
    }
    child.stdin.write(json.dumps(instruction) + "\n")
    child.stdin.flush()
    marks: dict[str, Any] = {}
    answer = None
    for line in child.stdout:
        if not line.startswith(PREFIX):
            continue
        message = json.loads(line.removeprefix(PREFIX))
        if "mark" in message:
            marks[message["mark"]] = usage(child.pid)
            child.stdin.write("\n")
            child.stdin.flush()
        elif "error" in message and answer is None:
            return {"error": message["error"], "traceback": message["traceback"]}
        elif "result" in message:
            summary = order.workload.summary(marks) if phase == "run" else {}
            answer = message["result"] | summary | {"about": message["about"]}
    return answer


def usage(pid: int) -> dict[str, float]:
    """CPU time and resident memory of a process and everything below it."""
    tree = _tree(pid)
    return {
        "time": time.perf_counter(),
        "cpu_seconds": sum(sum(one.cpu_times()[:2]) for one in tree),
        "rss_mb": sum(one.memory_info().rss for one in tree) / 1e6,
    }


def _tree(pid: int) -> list[psutil.Process]:
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end_tree(pid: int) -> None:
    for process in _tree(pid):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
