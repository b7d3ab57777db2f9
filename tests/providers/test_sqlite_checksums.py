"""Events in a SQLite file have a checksum: a changed text is noticed, also if it is still JSON."""

from __future__ import annotations

import asyncio

import apsw
import pytest

from perdure.conformance.factories import LOCK_MS, event, start, started
from perdure.errors import CorruptData
from perdure.providers.records import ExecutionMetadata, TurnCommit
from perdure.providers.sqlite import SqliteProvider


@pytest.fixture
def path(tmp_path):
    """A store with an instance that has two events and a message."""
    store = tmp_path / "store.db"

    async def fill():
        async with SqliteProvider(store) as provider:
            await provider.enqueue_for_orchestrator(start("i"))
            fetched = await provider.fetch_orchestration_item(LOCK_MS, 0)
            metadata = ExecutionMetadata(name="n", version="1.0.0")
            events = (started("i"), event("i", 2))
            commit = TurnCommit(execution_id=1, history_delta=events, metadata=metadata)
            await provider.ack_orchestration_item(fetched.lock_token, commit)
            await provider.enqueue_for_orchestrator(start("i"))

    asyncio.run(fill())
    return store


def change(path, sql):
    connection = apsw.Connection(str(path))
    connection.execute(sql)
    connection.close()


def run(path, function):
    async def main():
        async with SqliteProvider(path) as provider:
            return await function(provider)

    return asyncio.run(main())


DAMAGE = "UPDATE history SET data = replace(data, ':2', ':3') WHERE event_id = 2"


def test_a_changed_event_is_not_read_although_it_is_json(path):
    change(path, DAMAGE)

    with pytest.raises(CorruptData, match=r"of 'i' is not readable.*event 2 .*checksum"):
        run(path, lambda provider: provider.read("i"))


def test_a_changed_event_is_handed_out_as_damage(path):
    change(path, DAMAGE)

    fetched = run(path, lambda provider: provider.fetch_orchestration_item(LOCK_MS, 0))

    assert "event 2" in fetched.item.history_error
    assert not fetched.item.history


def test_a_changed_event_is_not_exported(path):
    change(path, DAMAGE)

    with pytest.raises(CorruptData, match="event 2"):
        run(path, lambda provider: provider.admin.export_instance("i"))


def test_a_damaged_body_is_listed_as_a_fetch_gives_it(path):
    change(path, "UPDATE orchestrator_queue SET body = CAST(x'7bff' AS TEXT)")

    (listed,) = run(path, lambda provider: provider.admin.list_messages("i"))
    fetched = run(path, lambda provider: provider.fetch_orchestration_item(LOCK_MS, 0))

    assert listed.message.body == fetched.item.messages[0].body == "{\\xff"


def test_an_event_from_before_there_were_checksums_is_read(path):
    before = run(path, lambda provider: provider.read("i"))
    change(path, "UPDATE history SET checksum = NULL")

    assert run(path, lambda provider: provider.read("i")) == before


def test_imported_events_have_checksums_too(path):
    snapshot = run(path, lambda provider: provider.admin.export_instance("i"))
    run(path, lambda provider: provider.admin.import_instance(snapshot, replace=True))
    change(path, DAMAGE)

    with pytest.raises(CorruptData, match="event 2"):
        run(path, lambda provider: provider.read("i"))
