"""Restate: its server as a child process, and a worker of its Python SDK under hypercorn.

Settings: ``server`` is the path of the binary; ``clients`` the connections that submit at once.
The server listens on loopback only, without telemetry, with its own data directory.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import restate

from benchmarks.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]


def work(i: int) -> str:
    return f"ok-{i}"


chain = restate.Workflow("chain")
fan = restate.Workflow("fan")
gate = restate.Workflow("gate")


@chain.main(name="run")
async def run_chain(ctx: restate.WorkflowContext, n: int) -> str:
    result = ""
    for i in range(n):
        result = await ctx.run_typed("step", work, i=i)
    return result


@fan.main(name="run")
async def run_fan(ctx: restate.WorkflowContext, n: int) -> int:
    steps = [ctx.run_typed("step", work, i=i) for i in range(n)]
    done = await restate.gather(*steps)
    return len({await step for step in done})


@gate.main(name="run")
async def run_gate(ctx: restate.WorkflowContext, n: int) -> str:
    for i in range(n):
        await ctx.run_typed("step", work, i=i)
    ctx.set("ready", value=True)
    await ctx.promise("go").value()
    return await ctx.run_typed("step", work, i=n)


@gate.handler(name="go")
async def go(ctx: restate.WorkflowSharedContext, value: str) -> None:
    await ctx.promise("go").resolve(value)


@gate.handler(name="ready")
async def ready(ctx: restate.WorkflowSharedContext) -> bool:
    return bool(await ctx.get("ready"))


app = restate.app([chain, fan, gate])


class RestatePeer(Peer):
    async def open(self, *, worker: bool) -> None:
        self.connections = threading.local()
        self.ingress, self.admin, node = free_port(), free_port(), free_port()
        self.server = self._launch_server(node)
        # The address of the worker is part of the stored deployment: W6 needs the same again.
        remembered = self.directory / "worker-port"
        if not remembered.exists():
            remembered.write_text(str(free_port()))
        self.worker_port = int(remembered.read_text())
        self.worker = self._launch_worker()
        await self._deploy()
        if not worker:
            self._end_worker()

    def _launch_server(self, node: int) -> subprocess.Popen[bytes]:
        settings = {
            "RESTATE_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
            "RESTATE_BIND_IP": "127.0.0.1",
            "RESTATE_BASE_DIR": str(self.directory / "restate"),
            "RESTATE_NODE_NAME": "bench",
            "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}",
            "RESTATE_ADVERTISED_ADDRESS": f"http://127.0.0.1:{node}",
            "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{self.ingress}",
            "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{self.admin}",
            "RESTATE_LOG_FILTER": "warn",
            **self.settings.get("environment", {}),
        }
        with (self.directory / "server.log").open("ab") as log:
            return subprocess.Popen(
                [self.settings["server"]], env=os.environ | settings, stdout=log, stderr=log
            )

    def _launch_worker(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hypercorn", "--log-level", "error"]
        command += ["-b", f"127.0.0.1:{self.worker_port}", "benchmarks.peers.restate:app"]
        with (self.directory / "worker.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    async def _deploy(self) -> None:
        body = {"uri": f"http://127.0.0.1:{self.worker_port}", "force": True}
        deadline = time.monotonic() + 60
        while True:
            try:
                request(self.admin, "GET", "/health")
                request(self.admin, "POST", "/deployments", body)
            except (OSError, RuntimeError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.02)
            else:
                return

    def _end_worker(self) -> None:
        """End the worker with the process that it serves from, and wait for its port."""
        os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.wait()
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.worker_port)) != 0:
                    return
            time.sleep(0.02)
        raise RuntimeError(f"port {self.worker_port} of the worker is still open")

    async def close(self) -> None:
        if self.worker.returncode is None:
            self._end_worker()
        self.server.terminate()
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = getattr(self.connections, "mine", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.ingress, timeout=300)
            self.connections.mine = connection
        return exchange(connection, method, path, body)

    def _start(self, flow: str, workflow_id: str, n: int) -> tuple[str, str]:
        self._call("POST", f"/{flow}/{workflow_id}/run/send", n)
        return flow, workflow_id

    def _result(self, handle: tuple[str, str]) -> Any:
        return self._call("GET", f"/restate/workflow/{handle[0]}/{handle[1]}/attach")

    async def start(self, flow: str, workflow_id: str, n: int) -> tuple[str, str]:
        return self._start(flow, workflow_id, n)

    async def result(self, handle: tuple[str, str]) -> Any:
        return self._result(handle)

    async def start_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> None:
        with ThreadPoolExecutor(self.settings["clients"]) as pool:
            list(pool.map(lambda one: self._start(flow, one, n), workflow_ids))

    async def run_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> list[Any]:
        with ThreadPoolExecutor(self.settings["clients"]) as pool:
            handles = list(pool.map(lambda one: self._start(flow, one, n), workflow_ids))
            return list(pool.map(self._result, handles))

    async def attach(self, workflow_id: str) -> tuple[str, str]:
        return "gate", workflow_id

    async def wait_ready(self, workflow_id: str) -> None:
        while not self._call("POST", f"/gate/{workflow_id}/ready"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)

    async def signal(self, workflow_id: str) -> None:
        self._call("POST", f"/gate/{workflow_id}/go", "x")

    async def count(self) -> int:
        query = {"query": "SELECT count(*) AS total FROM sys_invocation"}
        answer = request(self.admin, "POST", "/query", query)
        return answer["rows"][0]["total"]

    def about(self) -> dict[str, Any]:
        told = subprocess.run(
            [self.settings["server"], "--version"], capture_output=True, text=True, check=True
        )
        return {
            "restate-server": told.stdout.split()[-1],
            "restate-sdk": version("restate-sdk"),
            "settings": "defaults",
            "clients": self.settings["clients"],
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def request(port: int, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        return exchange(connection, method, path, body)
    finally:
        connection.close()


def exchange(connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> Any:
    headers = {"accept": "application/json"}
    if body is not None:
        headers["content-type"] = "application/json"
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read()
    if response.status >= 300:
        raise RuntimeError(f"{method} {path}: {response.status} {text[:300]!r}")
    return json.loads(text) if text else None
