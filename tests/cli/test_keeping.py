"""``keep`` in pyproject.toml, what ``show`` and ``db info`` say of it, and ``db vacuum``."""

import asyncio
from pathlib import Path

import apsw
import pytest

from cli import flows
from integration.conditions import until
from perdure import Runtime, Status
from perdure.client.retention import Retention, keep_rules
from perdure.providers.records import InstanceQuery


def write_project(text):
    Path("pyproject.toml").write_text(f"[tool.perdure]\n{text}\n")


def test_show_and_info_say_until_when_an_instance_is_kept(cli):
    cli.run(("h-1", flows.hello, "ann"), ("a-1", flows.approval, 1), until_open={"a-1"})
    assert "kept" not in cli("show", "h-1").out
    assert cli("show", "h-1", "-o", "json").json["deleted_at"] is None
    assert cli("db", "info", "-o", "json").json["keep"] == []

    write_project('keep = {completed = "30d", failed = "forever"}')

    assert "(29d 23h more)" in cli("show", "h-1").out
    assert cli("show", "h-1", "-o", "json").json["deleted_at"] is not None
    assert "kept" not in cli("show", "a-1").out
    document = cli("db", "info", "-o", "json").json
    assert (document["keep"], document["due"]) == (["completed 30d", "failed forever"], 0)
    assert "completed 30d, failed forever" in cli("db", "info").out

    write_project("keep = {completed = 0}")

    assert "due to be deleted" in cli("show", "h-1").out
    assert cli("db", "info", "-o", "json").json["due"] == 1


def test_live_workers_decide_how_long_is_kept(sqlite_cli):
    sqlite_cli.run(("h-1", flows.hello, "ann"))
    write_project('keep = {completed = "1d"}')

    async def main():
        async with Runtime("store.db", [flows], keep={"completed": "60d"}) as runtime:

            async def is_listed():
                return bool(await runtime.admin.workers())

            await until(is_listed)
            said = await asyncio.to_thread(sqlite_cli, "show", "h-1")
            assert "(59d 23h more)" in said.out

    asyncio.run(main())


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{done = "30d"}', "'done', which is none of 'completed'"),
        ('{completed = "soon"}', "'soon' is no length of time"),
        ("{completed = -1}", "must be at least 0 seconds, not -1"),
        ('"30d"', "must be a dict such as"),
    ],
)
def test_a_mistake_in_the_project_is_refused(sqlite_cli, written, message):
    sqlite_cli.run(("h-1", flows.hello, "ann"))
    write_project(f"keep = {written}")

    for arguments in (("worker", "cli.flows"), ("show", "h-1"), ("db", "info")):
        said = sqlite_cli(*arguments, code=2).err
        assert message in said
        assert "pyproject.toml" in said


def test_a_worker_of_the_project_deletes_what_has_ended(sqlite_cli, start_process):
    sqlite_cli.run(("h-1", flows.hello, "ann"), ("a-1", flows.approval, 1), until_open={"a-1"})
    write_project("keep = {completed = 0}")
    start_process("worker", "cli.flows")

    async def is_gone():
        return (await asyncio.to_thread(sqlite_cli, "list", "-o", "ids")).lines == ["a-1"]

    asyncio.run(until(is_gone))


def test_vacuum_gives_space_back(sqlite_cli):
    sqlite_cli.run(*((f"h-{each}", flows.hello, "x" * 20_000) for each in range(20)))
    sqlite_cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    with apsw.Connection("store.db") as observer:
        assert observer.execute("PRAGMA auto_vacuum").get == 0
    observer.close()

    async def delete(client):
        await client.admin.delete_many(InstanceQuery())

    sqlite_cli.call(delete)
    document = sqlite_cli("db", "vacuum", "-o", "json").json

    assert document["bytes_after"] < document["bytes_before"] / 2
    assert Path("store.db").stat().st_size <= document["bytes_after"]
    sqlite_cli("db", "check")
    assert sqlite_cli("list", "-o", "ids").lines == ["a-1"]


def test_an_incremental_store_shrinks_as_instances_are_deleted(sqlite_cli):
    sqlite_cli.run(*((f"h-{each}", flows.hello, "x" * 20_000) for each in range(40)))
    assert "kept for new instances" in sqlite_cli("db", "info").out
    sqlite_cli("db", "vacuum", "--incremental")
    assert "given back bit by bit" in sqlite_cli("db", "info").out
    before = Path("store.db").stat().st_size

    sqlite_cli.call(delete_all_by_retention)

    assert Path("store.db").stat().st_size < before / 2
    sqlite_cli("db", "check")
    sqlite_cli.run(("h-new", flows.hello, "x" * 20_000))
    sqlite_cli("db", "vacuum")  # stays incremental
    assert "given back bit by bit" in sqlite_cli("db", "info").out
    sqlite_cli("db", "vacuum", "--no-incremental")
    assert "kept for new instances" in sqlite_cli("db", "info").out
    assert sqlite_cli("list", "-o", "ids").lines == ["h-new"]


def test_a_worker_learns_of_a_store_that_becomes_incremental(sqlite_cli):
    sqlite_cli.run(*((f"h-{each}", flows.hello, "x" * 20_000) for each in range(40)))
    before = Path("store.db").stat().st_size

    async def make_incremental_and_delete(client):
        said = await asyncio.to_thread(sqlite_cli, "db", "vacuum", "--incremental")
        assert "now" in said.out
        await delete_all_by_retention(client)
        info = await client.provider.admin.get_store_info()
        assert info.details["free_space"] == "given back bit by bit"

    sqlite_cli.call(make_incremental_and_delete)
    assert Path("store.db").stat().st_size < before / 2
    sqlite_cli("db", "check")


async def delete_all_by_retention(client):
    retention = Retention(keep_rules({Status.COMPLETED: 0}, {}))
    async for root in retention.due(client.provider.admin, client.clock.now_ms() + 1):
        await client.provider.admin.delete_instance_bulk(root)


def test_vacuum_while_a_worker_runs(sqlite_cli, start_process):
    sqlite_cli.run(("h-1", flows.hello, "ann"))
    start_process("worker", "cli.flows")
    sqlite_cli("start", "cli.flows:hello", "--args", '["bob"]', "--id", "h-2", code=None)
    sqlite_cli("db", "vacuum")
    sqlite_cli("db", "check")


def test_a_directory_has_nothing_to_vacuum(sqlite_cli):
    sqlite_cli.store = "file:./store"
    sqlite_cli.run(("h-1", flows.hello, "ann"))

    said = sqlite_cli("db", "vacuum", code=None)

    assert said.code != 0
    assert "give space back by themselves: there is nothing to do" in said.err
