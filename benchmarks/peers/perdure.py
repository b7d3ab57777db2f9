"""Perdure through its public face.

Settings: ``store`` is sqlite, filesystem, memory or postgres; ``durability`` is that of SQLite;
``url`` is the Postgres server.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import perdure
from benchmarks.peers.peer import Peer, Settings
from perdure import (
    Client,
    Handle,
    Runtime,
    activity,
    orchestration,
    set_custom_status,
    wait_for_event,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@activity
async def step(i: int) -> str:
    return f"ok-{i}"


@orchestration
async def chain(n: int) -> str:
    result = ""
    for i in range(n):
        result = await step(i)
    return result


@orchestration
async def fan(n: int) -> int:
    return len(set(await asyncio.gather(*[step(i) for i in range(n)])))


@orchestration
async def gate(n: int) -> str:
    for i in range(n):
        await step(i)
    set_custom_status("ready")
    await wait_for_event("go", str)
    return await step(n)


FLOWS = {"chain": chain, "fan": fan, "gate": gate}


class PerdurePeer(Peer):
    def __init__(self, directory: Path, settings: Settings) -> None:
        super().__init__(directory, settings)
        self.provider = self._provider()

    async def open(self, *, worker: bool) -> None:
        handlers = [chain, fan, gate, step]
        self.client = Runtime(self.provider, handlers) if worker else Client(self.provider)
        await self.client.__aenter__()

    def _provider(self) -> perdure.Provider:
        match self.settings["store"]:
            case "sqlite":
                return perdure.SqliteProvider(
                    self.directory / "perdure.db", durability=self.settings["durability"]
                )
            case "filesystem":
                return perdure.FileSystemProvider(self.directory / "store")
            case "memory":
                return perdure.InMemoryProvider()
            case _:
                schema = re.sub(r"\W", "_", self.directory.name.lower())
                return perdure.PostgresProvider(self.settings["url"], schema=f"perdure_{schema}")

    async def close(self) -> None:
        await self.client.__aexit__(None, None, None)

    async def start(self, flow: str, workflow_id: str, n: int) -> Handle[Any]:
        return await self.client.start(FLOWS[flow], n, id=workflow_id)

    async def result(self, handle: Handle[Any]) -> Any:
        return await handle.result()

    async def start_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> None:
        await self.client.start_many(FLOWS[flow], [(one, (n,)) for one in workflow_ids])

    async def run_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> list[Any]:
        handles = await asyncio.gather(*[self.start(flow, one, n) for one in workflow_ids])
        return [await handle.result() for handle in handles]

    async def attach(self, workflow_id: str) -> Handle[Any]:
        return self.client.get(workflow_id, gate)

    async def wait_ready(self, workflow_id: str) -> None:
        handle = self.client.get(workflow_id)
        view = await handle.describe()
        while view.custom_status != "ready":
            view = await handle.wait_for_status_change(view.custom_status_version)

    async def signal(self, workflow_id: str) -> None:
        await self.client.raise_event(workflow_id, "go", "x")

    async def count(self) -> int:
        return await self.client.admin.count()

    def about(self) -> dict[str, Any]:
        return {"perdure": perdure.__version__, **self.settings}
