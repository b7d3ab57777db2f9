"""Debian's PgBouncer on loopback, in transaction mode, to be restarted, paused and turned."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import psycopg

from postgres_cluster import await_that, free_port

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from postgres_cluster import Cluster

_PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")


def missing_bouncer() -> str | None:
    """Say what is missing for PgBouncer; None if nothing is."""
    return None if _PROGRAM else "pgbouncer is missing: install Debian's package pgbouncer"


class Bouncer:
    """One PgBouncer in front of the primary of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.port = free_port()
        self._home = cluster.home / "bouncer"
        self._home.mkdir()
        self._user = cluster.primary.user
        if self._user is not None:
            shutil.chown(self._home, self._user)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        assert _PROGRAM is not None, missing_bouncer()
        self._configure()
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_PROGRAM, str(self._home / "bouncer.ini")],
                stdout=log,
                stderr=log,
                cwd=self._home,
                user=self._user,
            )
        await_that(self._answers, "PgBouncer answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def command(self, text: str) -> None:
        """Give an order on its console: PAUSE, RESUME, RECONNECT, RELOAD, KILL."""
        connection: psycopg.Connection[Any]
        with psycopg.connect(
            f"host=127.0.0.1 port={self.port} user=postgres dbname=pgbouncer",
            autocommit=True,
            prepare_threshold=None,
        ) as connection:
            # Its console knows the simple protocol only.
            result = connection.pgconn.exec_(text.encode())
            assert not result.error_message, f"{text}: {result.error_message!r}"

    def turn(self) -> None:
        """Lead clients to the server that is the primary now."""
        self._configure()
        self.command("RELOAD")
        self.command("RECONNECT")

    def _configure(self) -> None:
        primary = self._cluster.primary
        (self._home / "bouncer.ini").write_text(
            f"""
[databases]
postgres = host=127.0.0.1 port={primary.port} dbname=postgres user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
pidfile = {self._home}/bouncer.pid
auth_type = any
admin_users = postgres
pool_mode = transaction
max_client_conn = 500
default_pool_size = 40
server_login_retry = 1
server_connect_timeout = 5
"""
        )

    def _answers(self) -> bool:
        try:
            self.command("SHOW VERSION")
        except psycopg.OperationalError:
            return False
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
