"""A damaged store: ``doctor`` and ``db check`` say where; no command takes it for sound."""

import asyncio

import pytest

from cli import flows
from cli.conftest import Cli
from integration.conditions import reached
from perdure import Runtime, Status


def test_doctor_names_a_damaged_instance_and_the_others_are_listed(tmp_path):
    store = tmp_path / "store"
    cli = Cli(f"file:{store}")
    cli.run(("h-1", flows.hello, "ann"), ("h-2", flows.hello, "bob"))
    (meta,) = store.glob("instances/h-1~*.json")
    meta.write_text(meta.read_text().replace("hello", "hallo"))

    answer = cli("doctor", "-o", "json", code=1)

    (damage,) = [finding for finding in answer.json if finding["subject"] == "damage"]
    assert damage["level"] == "bad"
    assert str(meta.relative_to(store)) in damage["text"]
    assert "backup" in damage["advice"]
    checked = cli("db", "check", "-o", "json", code=1).json
    assert checked["instances_checked"] == 1
    assert str(meta.relative_to(store)) in checked["damages"][0]["message"]
    refused = cli("db", "copy", f"file:{store}", str(tmp_path / "copy.db"), "--move", code=1)
    assert "would be left behind" in refused.err
    listed = cli("list").out
    assert "h-2" in listed
    assert "h-1" not in listed


@pytest.fixture
def changed_history(tmp_path, monkeypatch):
    """A directory store in which a person edited the history of a-1, which waits.

    The history has a file of its own, as a long one has.
    """
    monkeypatch.setattr("perdure.providers.directory.checkpoint.SHORT_HISTORY_BYTES", 0)
    monkeypatch.chdir(tmp_path)
    cli = Cli("file:./store")
    cli.run(("a-1", flows.approval, 1), ("h-1", flows.hello, "ann"), until_open={"a-1"})
    (history,) = tmp_path.glob("store/instances/a-1~*/executions/1.jsonl")
    history.write_text(history.read_text().replace("greet", "great"))
    return cli


def test_a_changed_history_hides_no_instance(changed_history):
    listed = changed_history("list").out

    assert "a-1" in listed
    assert "h-1" in listed
    assert "a-1" in changed_history("tree", "a-1").out
    assert {each["id"] for each in changed_history("list", "-o", "jsonl").jsonl} == {"a-1", "h-1"}


def test_show_says_that_a_changed_history_cannot_be_read(changed_history):
    shown = changed_history("show", "a-1", "-o", "json").json

    assert "the checksum does not fit" in shown["problem"]
    assert shown["steps"] == []


def test_doctor_says_who_reads_the_histories_and_check_names_the_changed_one(changed_history):
    (said,) = [
        f for f in changed_history("doctor", "-o", "json").json if f["subject"] == "histories"
    ]
    damages = changed_history("db", "check", "-o", "json", code=1).json["damages"]

    assert "perdure db check" in said["text"]
    assert [damage["instance_id"] for damage in damages] == ["a-1"]


def test_an_instance_with_a_changed_history_is_blocked_and_says_why(changed_history):
    async def block():
        async with Runtime(changed_history.store, [flows]) as runtime:
            await runtime.raise_event("a-1", "answer", "yes")
            await reached(runtime, "a-1", Status.BLOCKED)
            return await runtime.describe("a-1")

    status = asyncio.run(block())

    assert status.block is not None
    assert "the checksum does not fit" in status.block.message
    assert status.waiting_for == ()
    shown = changed_history("show", "a-1").out
    assert "BLOCKED" in shown
    assert "the checksum does not fit" in shown


def damage_sqlite(file):
    content = file.read_bytes()
    file.write_bytes(content[:-8192] + b"\x5a" * 8192)


def damage_directory(store):
    (meta,) = store.glob("instances/h-1~*.json")
    meta.write_text(meta.read_text().replace("hello", "hallo"))


@pytest.mark.parametrize(
    ("url", "name", "damage"),
    [
        ("store.db", "store.db", damage_sqlite),
        ("file:./store", "store", damage_directory),
    ],
)
def test_a_backup_of_a_damaged_store_is_refused_and_leaves_nothing(
    tmp_path, monkeypatch, url, name, damage
):
    monkeypatch.chdir(tmp_path)
    cli = Cli(url)
    cli.run(*((f"h-{number}", flows.hello, "x" * 300) for number in range(1, 40)))
    cli("db", "backup", "sound")
    damage(tmp_path / name)
    cli("db", "check", code=1)

    answer = cli("db", "backup", "saved", code=1)

    assert "backup" in answer.err
    assert answer.err.count("\n") == 1
    assert not answer.out
    assert {path.name for path in tmp_path.iterdir()} == {name, "sound"}
