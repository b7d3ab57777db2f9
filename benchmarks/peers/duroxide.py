"""duroxide: a Rust core with Python generators on top, on its SQLite provider (WAL, NORMAL).

Settings: ``orchestrations`` and ``workers`` are its dispatchers, ``poll_ms`` their poll interval
(its defaults are 2, 2 and 100), ``in_flight`` bounds how many workflows run at once.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from duroxide import Client, Runtime, RuntimeOptions, SqliteProvider

from benchmarks.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

WAIT_MS = 300_000
SUBMITTERS = 4  # its client calls release the interpreter while Rust writes


def step(_ctx: Any, i: int) -> str:
    return f"ok-{i}"


def chain(ctx: Any, n: int) -> Any:
    result = ""
    for i in range(n):
        result = yield ctx.schedule_activity("step", i)
    return result


def fan(ctx: Any, n: int) -> Any:
    results = yield ctx.all([ctx.schedule_activity("step", i) for i in range(n)])
    return len({str(result) for result in results})


def gate(ctx: Any, n: int) -> Any:
    for i in range(n):
        yield ctx.schedule_activity("step", i)
    ctx.set_custom_status("ready")
    yield ctx.wait_for_event("go")
    result = yield ctx.schedule_activity("step", n)
    return result


class DuroxidePeer(Peer):
    runtime: Runtime | None = None

    async def open(self, *, worker: bool) -> None:
        provider = SqliteProvider.open(f"sqlite:{self.directory}/duroxide.db?mode=rwc")
        self.client = Client(provider)
        if not worker:
            return
        options: dict[str, Any] = {"log_level": "error"}
        for ours, theirs in (
            ("orchestrations", "orchestration_concurrency"),
            ("workers", "worker_concurrency"),
            ("poll_ms", "dispatcher_poll_interval_ms"),
        ):
            if ours in self.settings:
                options[theirs] = self.settings[ours]
        self.runtime = Runtime(provider, RuntimeOptions(**options))
        self.runtime.register_activity("step")(step)
        for flow in (chain, fan, gate):
            self.runtime.register_orchestration(flow.__name__)(flow)
        self.runtime.start()

    async def close(self) -> None:
        if self.runtime is not None:
            self.runtime.shutdown(2000)

    async def start(self, flow: str, workflow_id: str, n: int) -> str:
        self.client.start_orchestration(workflow_id, flow, n)
        return workflow_id

    async def result(self, handle: str) -> Any:
        return self._wait(handle)

    def _wait(self, workflow_id: str) -> Any:
        status = self.client.wait_for_orchestration(workflow_id, WAIT_MS)
        if status.status != "Completed":
            raise RuntimeError(f"{workflow_id} is {status.status}: {status.error}")
        return status.output

    async def start_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> None:
        def one(workflow_id: str) -> None:
            self.client.start_orchestration(workflow_id, flow, n)

        with ThreadPoolExecutor(SUBMITTERS) as pool:
            list(pool.map(one, workflow_ids))

    async def run_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> list[Any]:
        bound = self.settings.get("in_flight")
        if bound is None:
            await self.start_all(flow, workflow_ids, n)
            return [self._wait(one) for one in workflow_ids]

        def one(workflow_id: str) -> Any:
            self.client.start_orchestration(workflow_id, flow, n)
            return self._wait(workflow_id)

        with ThreadPoolExecutor(bound) as pool:
            return list(pool.map(one, workflow_ids))

    async def attach(self, workflow_id: str) -> str:
        return workflow_id

    async def wait_ready(self, workflow_id: str) -> None:
        while self.client.get_status(workflow_id).custom_status != "ready":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # the turn that publishes the status may still be committing

    async def signal(self, workflow_id: str) -> None:
        self.client.raise_event(workflow_id, "go", "x")

    async def count(self) -> int:
        # Starts that no dispatcher has seen are only in its queue.
        return max(
            len(self.client.list_all_instances()),
            self.client.get_queue_depths().orchestrator_queue,
        )

    def about(self) -> dict[str, Any]:
        return {
            "duroxide": version("duroxide"),
            "sqlite": "WAL, synchronous=NORMAL",
        } | self.settings
