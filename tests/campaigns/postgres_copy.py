"""Move a load that is under way from SQLite to Postgres and back, and let it finish.

    python tests/campaigns/postgres_copy.py --instances 2000

On each store the load goes on for a while, then every worker stops where it is. Each copy must have
the hashes of its source, and at the last store every result must be the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.mixed_load import HANDLERS, load, mailbox
from campaigns.runtime_kill import _check_history as check_history
from perdure import Client, Runtime, RuntimeOptions
from perdure.client.moving import copy_store, snapshot_hash
from perdure.model.status import Status
from perdure.providers.postgres import PostgresProvider
from perdure.providers.records import InstanceQuery
from perdure.providers.sqlite import SqliteProvider
from postgres_server import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import QueueDepths

LOCK_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=2000)
    options = parser.parse_args()
    with PostgresServer() as server, tempfile.TemporaryDirectory() as directory:
        begin = time.monotonic()
        moved = asyncio.run(
            move(Path(directory), lambda: PostgresProvider(server.dsn), options.instances)
        )
    print(
        f"{moved[0]} instances to Postgres with {moved[1]} messages and work items in flight, "
        f"{moved[2]} back with {moved[3]}, in {time.monotonic() - begin:.0f} s: equal hashes, "
        "every result right"
    )


async def move(
    directory: Path,
    postgres: Callable[[], Provider],
    instances: int,
    lock_seconds: float = LOCK_SECONDS,
) -> tuple[int, int, int, int]:
    """Instances and what was in flight at each copy; raises if anything was lost or changed."""
    first, second = (lambda n=n: SqliteProvider(directory / f"{n}.db") for n in (1, 2))
    async with Client(first()) as client:
        for flow, arguments, instance_id, _ in load(instances):
            handle = await client.start(flow, *arguments, id=instance_id)
            if flow is mailbox:
                for number in range(3):
                    await handle.send_message("numbers", number)
    await _work(first, instances // 3, lock_seconds)
    there = await _copy(first, postgres)
    await _work(postgres, 2 * instances // 3, lock_seconds)
    back = await _copy(postgres, second)
    async with Runtime(second(), HANDLERS) as runtime:
        for _, _, instance_id, expected in load(instances):
            result = await runtime.get(instance_id).result(120)
            assert result == expected, f"{instance_id}: {result!r} instead of {expected!r}"
        async for view in runtime.admin.instances():
            for execution in await runtime.admin.executions(view.id):
                check_history(await runtime.history(view.id, execution.execution_id))
    return (*there, *back)


async def _work(store: Callable[[], Provider], completed: int, lock_seconds: float) -> None:
    """Until that many have completed, more or less; few slots, so that much is waiting then."""
    options = RuntimeOptions(
        activity_slots=2,
        cached_instances=20,
        drain_timeout=0,
        orchestration_lock_timeout=lock_seconds,
        activity_lock_timeout=lock_seconds,
    )
    async with Runtime(store(), HANDLERS, options=options) as runtime:
        query = InstanceQuery(statuses=frozenset({Status.COMPLETED}))
        while await runtime.admin.count(query) < completed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _copy(source: Callable[[], Provider], target: Callable[[], Provider]) -> tuple[int, int]:
    async with source() as origin, target() as destination:
        admin = origin.admin
        assert admin is not None
        depths = await _when_nothing_is_locked(admin)
        await copy_store(origin, destination)
        expected = await _hashes(origin)
        assert await _hashes(destination) == expected, "the copy differs from the original"
    queues = (depths.orchestrator, depths.worker)
    return len(expected), sum(each.visible + each.delayed for each in queues)


async def _when_nothing_is_locked(admin: ProviderAdmin) -> QueueDepths:
    """Locks of what was stopped in the middle expire."""
    while True:
        depths = await admin.get_queue_depths()
        if depths.orchestrator.locked + depths.worker.locked == 0:
            return depths
        await asyncio.sleep(0.05)


async def _hashes(provider: Provider) -> dict[str, str]:
    admin = provider.admin
    assert admin is not None
    hashes: dict[str, str] = {}
    cursor = None
    while True:
        page = await admin.list_instances(cursor=cursor, limit=500)
        for info in page.instances:
            hashes[info.instance_id] = snapshot_hash(await admin.export_instance(info.instance_id))
        if (cursor := page.next_cursor) is None:
            return hashes


if __name__ == "__main__":
    main()
