"""Numbered SQL files: found in order, applied once, by one of many processes, or not at all."""

from __future__ import annotations

import asyncio
import sys

import apsw
import pytest

from perdure.clock import ManualClock
from perdure.errors import InternalError, StoreRefused
from perdure.model.status import Status
from perdure.providers.migrate import Migration, due_migrations, load_migrations
from perdure.providers.records import (
    ExecutionMetadata,
    HistoryRecord,
    InstanceQuery,
    TurnCommit,
)
from perdure.providers.sqlite import SqliteProvider, connection

ONE = Migration(1, "one", "CREATE TABLE one (x)")
TWO = Migration(2, "two", "CREATE TABLE two (x)")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose ``migrations`` folder can be filled."""
    folder = tmp_path / "schemas" / "migrations"
    folder.mkdir(parents=True)
    (tmp_path / "schemas" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("schemas", None)


def test_migrations_are_found_in_the_order_of_their_numbers(package):
    (package / "0002_two.sql").write_text("second")
    (package / "0001_one.sql").write_text("first")
    (package / "README.md").write_text("not a migration")

    assert load_migrations("schemas") == (
        Migration(1, "one", "first"),
        Migration(2, "two", "second"),
    )


@pytest.mark.parametrize("names", [["one.sql"], ["0002_two.sql"], ["0001_a.sql", "0003_c.sql"]])
def test_a_gap_or_a_wrong_name_is_our_own_mistake(package, names):
    for name in names:
        (package / name).touch()

    with pytest.raises(InternalError):
        load_migrations("schemas")


@pytest.mark.parametrize(("version", "due"), [(0, (ONE, TWO)), (1, (TWO,)), (2, ())])
def test_only_what_is_missing_is_due(version, due):
    assert tuple(due_migrations((ONE, TWO), version, "store.db")) == due


def test_a_newer_schema_is_refused_by_name():
    with pytest.raises(StoreRefused, match=r"store\.db has schema 3"):
        due_migrations((ONE, TWO), 3, "store.db")


def test_a_store_of_an_earlier_schema_is_brought_up_to_date(tmp_path, monkeypatch):
    path = tmp_path / "store.db"

    async def open_and_close():
        async with SqliteProvider(path, clock=ManualClock()):
            pass

    asyncio.run(open_and_close())
    newest = len(connection.MIGRATIONS)
    later = Migration(newest + 1, "later", "CREATE TABLE later (x)")
    monkeypatch.setattr(connection, "MIGRATIONS", (*connection.MIGRATIONS, later))
    asyncio.run(open_and_close())
    asyncio.run(open_and_close())

    opened = apsw.Connection(str(path))
    assert opened.pragma("user_version") == newest + 1
    assert opened.table_exists(None, "later")
    opened.close()


def test_a_migration_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "store.db"

    async def open_and_close():
        async with SqliteProvider(path):
            pass

    asyncio.run(open_and_close())
    newest = len(connection.MIGRATIONS)
    broken = Migration(newest + 1, "broken", "CREATE TABLE later (x); nonsense;")
    monkeypatch.setattr(connection, "MIGRATIONS", (*connection.MIGRATIONS, broken))
    with pytest.raises(Exception, match="nonsense"):
        asyncio.run(open_and_close())

    opened = apsw.Connection(str(path))
    assert opened.pragma("user_version") == newest
    assert not opened.table_exists(None, "later")
    opened.close()


SCHEMA_1_ROWS = """
INSERT INTO store_info VALUES (1, 1, 5, 0, NULL);
INSERT INTO instances VALUES
    (1, 'order', 1, 'Shop', '1.0.0', NULL, 1, 'Running', NULL, NULL, 0, 10, 10, NULL),
    (2, 'paused', 1, 'Shop', '1.0.0', NULL, 1, 'Suspended', NULL, NULL, 0, 10, 10, NULL);
INSERT INTO executions VALUES (1, 1, 'Running', NULL, NULL, 10, NULL);
INSERT INTO history VALUES (1, 1, 1, '{"type":"OrchestrationStarted"}');
INSERT INTO instance_locks
    (instance_id, instance_key, name, version, state, wake_at, lock_token, locked_until, owner,
     kept)
    VALUES ('order', 1, 'Shop', '1.0.0', 1, 9000, 'turn', 9000, 'me', 1);
INSERT INTO executions VALUES (2, 1, 'Running', NULL, NULL, 10, NULL);
INSERT INTO instance_locks (instance_id, instance_key, name, version, state, suspended)
    VALUES ('paused', 2, 'Shop', '1.0.0', 3, 1);
INSERT INTO worker_queue VALUES
    (1, 'order', 1, 2, 'charge', '[]', NULL, NULL, 10, 10, 1, 1, 9000, 'work', 9000, NULL, NULL);
"""


@pytest.fixture
def schema_1_store(tmp_path):
    path = tmp_path / "store.db"
    old = apsw.Connection(str(path))
    old.execute(connection.MIGRATIONS[0].sql + SCHEMA_1_ROWS)
    old.pragma("user_version", 1)
    old.pragma("application_id", connection.APPLICATION_ID)
    old.close()
    return path


def test_an_instance_that_schema_1_calls_suspended_is_listed_as_paused(schema_1_store):
    async def paused():
        async with SqliteProvider(schema_1_store) as provider:
            query = InstanceQuery(statuses=frozenset({Status.PAUSED}))
            page = await provider.admin.list_instances(query)
            return [(info.instance_id, info.status) for info in page.instances]

    assert asyncio.run(paused()) == [("paused", Status.PAUSED)]


def test_the_locks_of_a_store_of_schema_1_hold_after_the_migration(schema_1_store):
    path = schema_1_store
    turn = TurnCommit(
        execution_id=1,
        history_delta=(HistoryRecord(event_id=2, data="2"),),
        metadata=ExecutionMetadata(status=Status.COMPLETED),
        consumed=(),
        settled_work=("work",),
    )

    async def go_on():
        async with SqliteProvider(path, clock=ManualClock(100)) as provider:
            locks = apsw.Connection(str(path)).execute("SELECT kind, locked_at FROM v_locks").get
            await provider.ack_orchestration_item("turn", turn)
            info = await provider.admin.get_instance_info("order")
            return locks, info.status, len(await provider.read("order"))

    assert asyncio.run(go_on()) == ([("instance", None), ("work", None)], Status.COMPLETED, 2)


OPENS = """
import asyncio, sys
from perdure.providers.sqlite import SqliteProvider

async def main():
    sys.stdin.readline()
    async with SqliteProvider(sys.argv[1]) as provider:
        await provider.admin.get_system_metrics()

asyncio.run(main())
"""


def test_many_processes_may_create_one_file_at_once(tmp_path):
    async def race():
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                OPENS,
                str(tmp_path / "store.db"),
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            for _ in range(8)
        ]
        # Each one waits for this line, so that they all start together.
        said = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
        return [process.returncode for process in processes], [err for _, err in said if err]

    codes, errors = asyncio.run(race())

    assert codes == [0] * 8, errors
    assert [file.name for file in tmp_path.iterdir()] == ["store.db"]
