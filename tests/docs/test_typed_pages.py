"""Pages with named files and commands work as typed, in a fresh directory, from top to bottom.

A block with a title is saved under that name. In a console block, a line that begins with ``$`` is
run, and the lines below it are its output; ``...`` stands for any text, and times may differ.
Commands that serve run in the background until the page ends. Commands that install or administrate
a machine are not run.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doc_pages import DOCS, PAGES, Block, blocks, name_of

from patience import HANG_SECONDS

TYPED = [page for page in PAGES if any(block.title for block in blocks(page))]
NEEDS = {
    "django.md": ("django",),
    "fastapi.md": ("fastapi", "uvicorn"),
    "pools-and-clients.md": ("fastapi", "uvicorn"),
}
"""Packages that a page asks its reader to install; the group dev has them."""

SERVERS = (
    "perdure worker",
    "perdure dev",
    "uvicorn",
    "python manage.py runserver",
    "python worker.py",
)
NOT_RUN = ("pip install", "docker", "kubectl", "sudo", "systemctl", "journalctl", "psql", "sqlite3")
REPEATED = ("curl ", "perdure list", "perdure show", "perdure stack", "perdure workers")
PORTS = re.compile(r"\b800[0-9]\b")
"""Each run replaces these ports by free ones."""

KILL = "kill -9"
"""After this command the output depends on how far the program came."""

TIMES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\b\d+(\.\d+)?(ms|s)\b")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def shell(tmp_path):
    shell = Shell(tmp_path)
    yield shell
    shell.close()


class Shell:
    """Runs the commands of one page in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports: dict[str, str] = {}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")
        } | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "PYTHONUTF8": "1",
        }

    def save(self, block: Block) -> None:
        file = self._directory / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._with_free_ports(block.text))

    def type(self, command: str, output: str) -> None:
        if command.startswith(NOT_RUN):
            return
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._environment[name] = value
        elif command.startswith(SERVERS):
            self._servers.append(self._start(f"exec {command}", subprocess.DEVNULL))
        else:
            self._run(command, output)

    def _run(self, command: str, output: str) -> None:
        """Run a command; repeat a request or a look until its server or worker has come so far."""
        until = time.monotonic() + HANG_SECONDS
        while True:
            process = self._start(command, subprocess.PIPE)
            said, complaint = (text.decode() for text in process.communicate(timeout=HANG_SECONDS))
            if process.returncode == 0 and (KILL in command or is_alike(output, said)):
                return
            if not command.startswith(REPEATED) or time.monotonic() > until:
                pytest.fail(f"$ {command}\nprinted\n{said}{complaint}\ninstead of\n{output}")
            time.sleep(0.2)

    def _start(self, command: str, stream: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", self._with_free_ports(command)],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )

    def _with_free_ports(self, text: str) -> str:
        return PORTS.sub(lambda found: self._ports.setdefault(found[0], free_port()), text)

    def close(self) -> None:
        for server in self._servers:
            server.send_signal(signal.SIGTERM)
        for server in self._servers:
            try:
                server.wait(timeout=HANG_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def is_alike(wanted: str, said: str) -> bool:
    wanted, said = (TIMES.sub("TIME", text) for text in (wanted, said))
    wanted = wanted.replace("\n...\n", "...")  # such a line stands for any number of lines
    return doctest.OutputChecker().check_output(wanted, said, FLAGS)


def commands_of(block: Block) -> list[tuple[str, str]]:
    """Return each command of a console block with the output below it."""
    found: list[tuple[str, str]] = []
    for line in block.text.replace("\\\n", "").splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        elif found:
            command, output = found[-1]
            found[-1] = (command, output + line)
    return found


@pytest.mark.parametrize("page", TYPED, ids=name_of)
def test_a_page_works_as_typed(page, shell):
    for package in NEEDS.get(page.name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install --group dev")
    for block in blocks(page):
        if block.title:
            shell.save(block)
        elif block.language == "console":
            for command, output in commands_of(block):
                shell.type(command, output)


@pytest.mark.parametrize("page", sorted((DOCS / "tutorial").glob("*.md")), ids=name_of)
def test_every_chapter_prints_something(page):
    printed = [
        output
        for block in blocks(page)
        if block.language == "console"
        for command, output in commands_of(block)
        if command.startswith("python ")
    ]

    assert any(output.strip() for output in printed)
