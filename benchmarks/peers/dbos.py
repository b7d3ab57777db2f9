"""DBOS Transact, on SQLite with WAL through its custom engine, or on Postgres.

Settings: ``store`` is sqlite or postgres (with ``url``); ``synchronous`` is that of SQLite;
``flavour`` is sync or async workflows; ``in_flight`` bounds how many run at once; ``poll_seconds``
is how often it looks for messages and results of other processes (its default is 1).
"""

from __future__ import annotations

import asyncio
import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import sqlalchemy
from dbos import DBOS, DBOSClient, DBOSConfig, SetWorkflowID

from benchmarks.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

QUEUE = "bench"


@DBOS.step(name="step")
def step(i: int) -> str:
    return f"ok-{i}"


@DBOS.step(name="step_async")
async def step_async(i: int) -> str:
    return f"ok-{i}"


@DBOS.workflow(name="chain")
def chain(n: int) -> str:
    result = ""
    for i in range(n):
        result = step(i)
    return result


@DBOS.workflow(name="chain_async")
async def chain_async(n: int) -> str:
    result = ""
    for i in range(n):
        result = await step_async(i)
    return result


@DBOS.workflow(name="fan")
def fan(n: int) -> int:
    # Steps of a sync workflow run one after the other: there is no parallel step for them.
    return len({step(i) for i in range(n)})


@DBOS.workflow(name="fan_async")
async def fan_async(n: int) -> int:
    return len(set(await asyncio.gather(*[step_async(i) for i in range(n)])))


@DBOS.workflow(name="gate")
def gate(n: int) -> str:
    for i in range(n):
        step(i)
    DBOS.set_event("ready", value=True)
    DBOS.recv(topic="go", timeout_seconds=600)
    return step(n)


SYNC = {"chain": chain, "fan": fan, "gate": gate}
ASYNC = {"chain": chain_async, "fan": fan_async}


class DbosPeer(Peer):
    async def open(self, *, worker: bool) -> None:
        self.poll_seconds = self.settings.get("poll_seconds", 1.0)
        config: DBOSConfig = {
            "name": "bench",
            "application_version": "v1",
            "executor_id": "local",
            "log_level": "ERROR",
            "notification_listener_polling_interval_sec": self.poll_seconds,
        }
        where = self._where()
        config.update(where)
        DBOS(config=config)
        DBOS.launch()
        if worker:
            return
        # The schema exists now; submit as a program from outside would.
        await DBOS.register_queue_async(QUEUE)
        DBOS.destroy()
        self.client = DBOSClient(**self._where())

    def _where(self) -> Any:
        if self.settings["store"] == "postgres":
            url = self.settings["url"].replace("postgresql://", "postgresql+psycopg://")
            schema = "dbos_" + re.sub(r"\W", "_", self.directory.name.lower())
            return {"system_database_url": url, "dbos_system_schema": schema}
        url = f"sqlite:///{self.directory}/dbos.db"
        return {
            "system_database_url": url,
            "system_database_engine": wal_engine(url, self.settings["synchronous"]),
        }

    def _engine(self) -> sqlalchemy.Engine:
        where = self._where()
        if "system_database_engine" in where:
            return where["system_database_engine"]
        return sqlalchemy.create_engine(where["system_database_url"])

    async def start(self, flow: str, workflow_id: str, n: int) -> Any:
        with SetWorkflowID(workflow_id):
            if self._is_async(flow):
                return await DBOS.start_workflow_async(ASYNC[flow], n)
            return DBOS.start_workflow(SYNC[flow], n)

    def _is_async(self, flow: str) -> bool:
        return flow in ASYNC and self.settings["flavour"] == "async"

    async def result(self, handle: Any) -> Any:
        if asyncio.iscoroutinefunction(handle.get_result):
            return await handle.get_result(polling_interval_sec=0.01)
        return handle.get_result(polling_interval_sec=0.01)

    async def start_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> None:
        # Its quickest way: many in one transaction of the caller.
        with self._engine().begin() as connection:
            for one in workflow_ids:
                self.client.enqueue_in_transaction(
                    connection, {"workflow_name": flow, "queue_name": QUEUE, "workflow_id": one}, n
                )

    async def run_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> list[Any]:
        gate_ = asyncio.Semaphore(self.settings.get("in_flight", len(workflow_ids)))

        async def one(workflow_id: str) -> Any:
            async with gate_:
                return await self.result(await self.start(flow, workflow_id, n))

        if self._is_async(flow):
            return await asyncio.gather(*[one(workflow_id) for workflow_id in workflow_ids])
        handles = [await self.start(flow, workflow_id, n) for workflow_id in workflow_ids]
        return [await self.result(handle) for handle in handles]

    async def attach(self, workflow_id: str) -> Any:
        return await DBOS.retrieve_workflow_async(workflow_id)

    async def wait_ready(self, workflow_id: str) -> None:
        if not await DBOS.get_event_async(workflow_id, "ready", timeout_seconds=300):
            raise TimeoutError(f"{workflow_id} never became ready")
        await asyncio.sleep(0.3)

    async def signal(self, workflow_id: str) -> None:
        await DBOS.send_async(workflow_id, "x", topic="go")

    async def count(self) -> int:
        return len(self.client.list_workflows(load_input=False, load_output=False))

    async def close(self) -> None:
        """Leave it to the end of the process: its own ``destroy`` waits for open workflows."""

    def about(self) -> dict[str, Any]:
        return {"dbos": version("dbos"), **self.settings}


def wal_engine(url: str, synchronous: str) -> sqlalchemy.Engine:
    engine = sqlalchemy.create_engine(url, connect_args={"check_same_thread": False})

    @sqlalchemy.event.listens_for(engine, "connect")
    def tune(connection: Any, _record: Any) -> None:
        connection.isolation_level = "IMMEDIATE"
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "busy_timeout=30000",
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    return engine
