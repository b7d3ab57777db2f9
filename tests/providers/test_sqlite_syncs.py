"""Commits of a SQLite store that wait for the disk, and those that do not."""

from __future__ import annotations

import asyncio

import apsw
import pytest

from perdure.conformance.factories import LOCK_MS, activity, start, started
from perdure.providers.records import ExecutionMetadata, TurnCommit
from perdure.providers.sqlite import SqliteProvider

COMMIT = TurnCommit(
    execution_id=1,
    history_delta=(started("i"),),
    metadata=ExecutionMetadata(name="n", version="1.0.0"),
)


@pytest.fixture
def syncs():
    """The names of the files that were made durable, in order."""
    base, found = apsw.vfs_names()[0], []

    class CountingFile(apsw.VFSFile):
        def __init__(self, name, flags):
            super().__init__(base, name, flags)
            self._name = name if isinstance(name, str) or name is None else name.filename()

        def xSync(self, flags):  # noqa: N802 - SQLite's name
            found.append(self._name)
            super().xSync(flags)

    class CountingVFS(apsw.VFS):
        def __init__(self):
            super().__init__("counting", base, makedefault=True)

        def xOpen(self, name, flags):  # noqa: N802 - SQLite's name
            return CountingFile(name, flags)

    layer = CountingVFS()
    yield found
    layer.unregister()


def run(path, function, **options):
    async def main():
        async with SqliteProvider(path, **options) as provider:
            return await function(provider)

    return asyncio.run(main())


def test_a_fetch_and_a_renewal_do_not_wait_for_the_disk_and_other_commits_do(tmp_path, syncs):
    async def work(provider):
        waited = {}

        async def note(name, verb, *args):
            before = len(syncs)
            answer = await verb(*args)
            waited[name] = len(syncs) > before
            return answer

        await note("enqueue", provider.enqueue_for_orchestrator, start("i"))
        turn = await note("fetch", provider.fetch_orchestration_item, LOCK_MS, 0)
        token = turn.lock_token
        await note("renew", provider.renew_orchestration_item_lock, token, LOCK_MS)
        await note("ack", provider.ack_orchestration_item, token, COMMIT)
        await note("enqueue work", provider.enqueue_for_worker, activity("i"))
        item = await note("fetch work", provider.fetch_work_item, LOCK_MS, 0)
        await note("ack work", provider.ack_work_item, item.lock_token)
        return waited

    assert run(tmp_path / "store.db", work) == {
        "enqueue": True,
        "fetch": False,
        "renew": False,
        "ack": True,
        "enqueue work": True,
        "fetch work": False,
        "ack work": True,
    }


def test_a_fetch_that_shares_a_commit_with_another_operation_waits_with_it(tmp_path, syncs):
    async def work(provider):
        await provider.enqueue_for_orchestrator(start("i"))
        before = len(syncs)
        await asyncio.gather(
            provider.fetch_orchestration_item(LOCK_MS, 0),
            provider.enqueue_for_orchestrator(start("j")),
        )
        return len(syncs) - before

    assert run(tmp_path / "store.db", work) >= 1


def test_no_commit_of_a_relaxed_store_waits_for_the_disk(tmp_path, syncs):
    async def work(provider):
        await provider.enqueue_for_orchestrator(start("i"))
        before = len(syncs)
        turn = await provider.fetch_orchestration_item(LOCK_MS, 0)
        await provider.ack_orchestration_item(turn.lock_token, COMMIT)
        return len(syncs) - before

    assert run(tmp_path / "store.db", work, durability="relaxed") == 0
