"""Patroni with two servers and etcd on loopback, from Debian's packages, to be killed and switched.

Needs patroni, etcd-server and postgresql. Patroni decides which server is the primary, and lets an
old one follow the new one again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from patience import HANG_SECONDS
from postgres_cluster import Server, await_that, free_port

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_USER = "postgres"
_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
"""The lock of a dead primary in etcd ends after 20 seconds at the earliest."""


def missing_patroni() -> str | None:
    """Say what is missing for Patroni; None if nothing is."""
    programs = [each for each in ("patroni", "etcd") if shutil.which(each) is None]
    if programs or not _BINARIES:
        return "patroni is missing: install Debian's packages patroni, etcd-server and postgresql"
    return None


class Member(Server):
    """One server and the Patroni that runs it."""

    def __init__(self, name: str, home: Path, etcd_port: int) -> None:
        self.name, self.port = name, free_port()
        self._interface = free_port()
        self._settings = home / f"{name}.json"
        self._log = home / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._settings.write_text(json.dumps(self._configuration(home, etcd_port)))

    def _configuration(self, home: Path, etcd_port: int) -> dict[str, Any]:
        """Return the settings of Patroni; its files may be JSON, because YAML contains it."""
        parameters = {
            "track_commit_timestamp": "on",
            "max_connections": 200,
            "wal_log_hints": "on",
            "unix_socket_directories": "",
            "fsync": "off",
        }
        local = "127.0.0.1/32"
        return {
            "scope": "shop",
            "name": self.name,
            "restapi": {
                "listen": f"127.0.0.1:{self._interface}",
                "connect_address": f"127.0.0.1:{self._interface}",
            },
            "etcd3": {"host": f"127.0.0.1:{etcd_port}"},
            "bootstrap": {
                "dcs": {
                    "ttl": 20,
                    "loop_wait": 2,
                    "retry_timeout": 5,
                    "synchronous_mode": True,
                    "postgresql": {"use_pg_rewind": True, "parameters": parameters},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C.UTF-8"}, {"auth": "trust"}],
            },
            "postgresql": {
                "listen": self.address,
                "connect_address": self.address,
                "data_dir": str(home / self.name),
                "bin_dir": str(_BINARIES[-1]),
                "pgpass": str(home / f"{self.name}.pass"),
                "authentication": {
                    "superuser": {"username": _USER},
                    "replication": {"username": "replicator"},
                    "rewind": {"username": _USER},
                },
                "pg_hba": [f"host all all {local} trust", f"host replication all {local} trust"],
            },
        }

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["patroni", str(self._settings)],
                stdout=log,
                stderr=log,
                cwd=self._settings.parent,
                user=_USER,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill Patroni and its server at once, as when their machine loses power."""
        data = self._settings.parent / self.name / "postmaster.pid"
        doomed: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error, OSError, ValueError, IndexError):
            first = psutil.Process(int(data.read_text().split()[0]))
            doomed = [first, *first.children(recursive=True)]
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(doomed, timeout=10)

    def state(self, of: str = "") -> dict[str, Any]:
        """Return what Patroni says of its server, or of the cluster; {} if it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.interface}{of}", timeout=2) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                return dict(json.load(error))
        except OSError:
            return {}

    @property
    def interface(self) -> str:
        return f"http://127.0.0.1:{self._interface}/"


class PatroniCluster:
    """Two members with synchronous replication."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="perdure-patroni-"))
        self.home.chmod(0o755)
        shutil.chown(self.home, _USER)
        self._etcd_port = free_port()
        self._etcd: subprocess.Popen[bytes] | None = None
        self.members = [Member(name, self.home, self._etcd_port) for name in ("a", "b")]

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@{','.join(each.address for each in self.members)}/postgres"

    @property
    def primary(self) -> Member:
        """The member that Patroni has made the primary; waits until there is one."""
        found: list[Member] = []

        def is_there() -> bool:
            found[:] = [each for each in self.members if each.state().get("role") == "master"]
            return len(found) == 1

        await_that(is_there, "Patroni has made a server the primary", HANG_SECONDS)
        return found[0]

    @property
    def standby(self) -> Member:
        primary = self.primary
        return next(each for each in self.members if each is not primary)

    def await_standby(self) -> None:
        """Wait until Patroni has noted a synchronous standby: only such a one is promoted."""

        def is_there() -> bool:
            known = self.primary.state("cluster").get("members", [])
            return any(each["role"] == "sync_standby" for each in known)

        await_that(is_there, "the standby is synchronous", HANG_SECONDS)

    def kill_primary(self) -> Member:
        """Kill the machine of the primary, wait for the promotion, and return the dead member."""
        old = self.primary
        old.kill()
        await_that(lambda: self.primary is not old, "a promotion", HANG_SECONDS)
        return old

    def switch(self) -> None:
        """Let Patroni switch over to the standby in order."""
        old, new = self.primary, self.standby
        order = json.dumps({"leader": old.name, "candidate": new.name}).encode()
        request = urllib.request.Request(f"{old.interface}switchover", order, method="POST")
        with urllib.request.urlopen(request, timeout=HANG_SECONDS):
            pass
        await_that(lambda: self.primary is new, "the standby is the primary", HANG_SECONDS)

    def __enter__(self) -> Self:
        with (self.home / "etcd.log").open("ab") as log:
            url, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{free_port()}"
            self._etcd = subprocess.Popen(
                [
                    *("etcd", "--data-dir", str(self.home / "etcd")),
                    *("--listen-client-urls", url, "--advertise-client-urls", url),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"default={peer}"),
                ],
                stdout=log,
                stderr=log,
            )
        try:
            for member in self.members:
                member.start()
            self.await_standby()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.kill()
        if self._etcd is not None:
            self._etcd.send_signal(signal.SIGKILL)
            self._etcd.wait()
        shutil.rmtree(self.home, ignore_errors=True)
