"""absurd on Postgres: tasks whose steps are checkpointed one by one inside the worker.

Settings: ``url`` is the server; ``workers`` the workers of this process, one connection each, and
``concurrency`` the tasks that each runs at once.
"""

from __future__ import annotations

import asyncio
import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import absurdctl
import psycopg
from absurd_sdk import AsyncAbsurd
from psycopg import sql

from benchmarks.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

QUEUE = "default"
POLL_SECONDS = 0.002
SUBMITTERS = 4
OVER = {"completed", "failed", "cancelled"}


async def chain(params: Any, ctx: Any) -> str:
    result = ""
    for i in range(params["n"]):
        result = await ctx.step("step", lambda i=i: work(i))
    return result


async def fan(params: Any, ctx: Any) -> int:
    steps = [ctx.step(f"step-{i}", lambda i=i: work(i)) for i in range(params["n"])]
    return len(set(await asyncio.gather(*steps)))


async def gate(params: Any, ctx: Any) -> str:
    for i in range(params["n"]):
        await ctx.step("step", lambda i=i: work(i))
    await ctx.await_event("go")
    return await ctx.step("step", lambda: work(params["n"]))


async def work(i: int) -> str:
    return f"ok-{i}"


class AbsurdPeer(Peer):
    async def open(self, *, worker: bool) -> None:
        url = self._database()
        self.client = AsyncAbsurd(url)
        await self.client.create_queue(QUEUE)
        self.running: list[tuple[AsyncAbsurd, asyncio.Task[None]]] = []
        for number in range(self.settings["workers"] if worker else 0):
            app = AsyncAbsurd(url)
            for flow in (chain, fan, gate):
                app.register_task(flow.__name__)(flow)
            working = app.start_worker(
                worker_id=f"worker-{number}",
                concurrency=self.settings["concurrency"],
                poll_interval=POLL_SECONDS,
            )
            self.running.append((app, asyncio.create_task(working)))

    def _database(self) -> str:
        """A database of its own with its schema, made on first use."""
        server = self.settings["url"]
        name = "absurd_" + re.sub(r"\W", "_", self.directory.name.lower())
        url = psycopg.conninfo.make_conninfo(server, dbname=name)
        with psycopg.connect(server, autocommit=True) as admin:
            found = admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            if found.fetchone() is not None:
                return url
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        with psycopg.connect(url, autocommit=True) as fresh:
            fresh.execute(absurdctl.BUNDLED_SCHEMA_SQL)
        return url

    async def close(self) -> None:
        for app, _working in self.running:
            app.stop_worker()
        await asyncio.wait_for(
            asyncio.gather(*[working for _app, working in self.running]), timeout=10
        )

    async def start(self, flow: str, workflow_id: str, n: int) -> str:
        spawned = await self.client.spawn(flow, {"n": n}, queue=QUEUE, idempotency_key=workflow_id)
        return spawned["task_id"]

    async def result(self, handle: str) -> Any:
        # Its own await_task_result backs off to whole seconds; asking often is its best latency.
        while True:
            snapshot = await self.client.fetch_task_result(handle)
            if snapshot is not None and snapshot.state in OVER:
                break
            await asyncio.sleep(POLL_SECONDS)
        if snapshot.state != "completed":
            raise RuntimeError(f"{handle} is {snapshot.state}")
        return snapshot.result

    async def start_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> None:
        await self._spawn_all(flow, workflow_ids, n)

    async def run_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> list[Any]:
        return [await self.result(one) for one in await self._spawn_all(flow, workflow_ids, n)]

    async def _spawn_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> list[str]:
        """From several connections at once: one statement at a time on each."""
        clients = [AsyncAbsurd(self._database()) for _ in range(SUBMITTERS)]
        left, handles = iter(workflow_ids), list[str]()

        async def submit(client: AsyncAbsurd) -> None:
            for one in left:
                spawned = await client.spawn(flow, {"n": n}, queue=QUEUE, idempotency_key=one)
                handles.append(spawned["task_id"])

        await asyncio.gather(*[submit(client) for client in clients])
        return handles

    async def attach(self, workflow_id: str) -> str:
        # Spawning with the same key gives the existing task.
        return await self.start("gate", workflow_id, 0)

    async def wait_ready(self, workflow_id: str) -> None:
        handle = await self.attach(workflow_id)
        while (await self.client.fetch_task_result(handle)).state != "sleeping":  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def signal(self, workflow_id: str) -> None:
        await self.client.emit_event("go", "x")

    async def count(self) -> int:
        async with await psycopg.AsyncConnection.connect(self._database()) as connection:
            found = await connection.execute("SELECT count(*) FROM absurd.t_default")
            row = await found.fetchone()
            assert row is not None
            return row[0]

    def about(self) -> dict[str, Any]:
        return {"absurd-sdk": version("absurd-sdk")} | {
            name: self.settings[name] for name in ("workers", "concurrency")
        }
