"""A store with instances in every state, and the command line on it through its entry point."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

import perdure
from cli import flows
from integration.conditions import until
from patience import HANG_SECONDS
from perdure import Client, Runtime, Status
from perdure.cli.main import root
from perdure.errors import NotFound

FLOWS = "cli.flows"
"""The module, as it is named on the command line."""


@dataclass
class Answer:
    """The output of a command, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def jsonl(self):
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def lines(self):
        return self.out.splitlines()


def runner():
    """Standard error apart from standard output, as click 8.1 does only when told."""
    try:
        return CliRunner(mix_stderr=False)
    except TypeError:
        return CliRunner()


class Cli:
    """Runs commands on one store."""

    def __init__(self, store):
        self.store = store

    def __call__(self, *args, code=0, stdin=None, env=None):
        environment = {"PERDURE_STORE": str(self.store), "NO_COLOR": None, **(env or {})}
        result = runner().invoke(root, [str(arg) for arg in args], input=stdin, env=environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        answer = Answer(result.exit_code, result.stdout, result.stderr)
        assert code is None or answer.code == code, (
            f"exit {answer.code}\n{answer.out}\n{answer.err}"
        )
        return answer

    def run(self, *starts, until_open=()):
        """Run instances to their end, or until those of ``until_open`` wait; then stop working."""
        asyncio.run(self._run(starts, set(until_open)))

    async def _run(self, starts, open_ids):
        async with Runtime(self.store, [flows]) as runtime:
            for instance_id, flow, *args in starts:
                await runtime.start(flow, *args, id=instance_id)
            for instance_id in {*open_ids, *(instance_id for instance_id, *_ in starts)}:
                await until(lambda id_=instance_id: self._is_settled(runtime, id_, open_ids))

    async def _is_settled(self, runtime, instance_id, open_ids):
        try:
            status = await runtime.describe(instance_id)
        except NotFound:  # a child whose parent has not asked for it yet
            return False
        if instance_id in open_ids:
            return bool(status.waiting_for) and not await self._is_running(runtime, instance_id)
        return status.status.is_final or status.status is Status.BLOCKED

    async def _is_running(self, runtime, instance_id):
        work = await runtime.provider.admin.list_work(instance_id)
        return any(item.locked_until_ms is not None for item in work)

    def call(self, body):
        """Run an async function with a client of the store."""

        async def main():
            async with Client(self.store) as client:
                return await body(client)

        return asyncio.run(main())


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """Let the processes of the tests react to Ctrl-C, which background jobs of a shell ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["sqlite", "filesystem"])
def cli(request, tmp_path, monkeypatch):
    """The command line on a fresh store of each local kind, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_MODULE", raising=False)
    return Cli("store.db" if request.param == "sqlite" else "file:./store")


@pytest.fixture
def sqlite_cli(tmp_path, monkeypatch):
    """A command line on SQLite, for tests in which the kind of store does not matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_MODULE", raising=False)
    return Cli("store.db")


@pytest.fixture
def environ():
    """For processes: the same interpreter and package, with the tests importable."""
    folders = (Path(each.__file__).parent.parent for each in (perdure, flows))
    path = os.pathsep.join(map(str, folders))
    return {**os.environ, "PYTHONPATH": path, "PERDURE_STORE": "store.db"}


@pytest.fixture
def start_process(environ, tmp_path):
    """Starts commands as processes of their own, and ends them with the test."""
    running = []

    def start(*args, stderr=subprocess.STDOUT):
        process = subprocess.Popen(
            [sys.executable, "-m", "perdure", *args],
            env=environ,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=HANG_SECONDS)
