"""A store that was damaged: ``doctor`` and ``db check`` say where; nobody takes it for sound."""

import pytest

from cli import flows
from cli.conftest import Cli


def test_doctor_names_a_damaged_instance_and_the_others_are_listed(tmp_path):
    store = tmp_path / "store"
    cli = Cli(f"file:{store}")
    cli.run(("h-1", flows.hello, "ann"), ("h-2", flows.hello, "bob"))
    (meta,) = store.glob("instances/h-1~*/meta.json")
    meta.write_text(meta.read_text().replace("hello", "hallo"))

    answer = cli("doctor", "-o", "json", code=1)

    (damage,) = [finding for finding in answer.json if finding["subject"] == "damage"]
    assert damage["level"] == "bad"
    assert str(meta.parent.relative_to(store)) in damage["text"]
    assert "backup" in damage["advice"]
    checked = cli("db", "check", "-o", "json", code=1).json
    assert checked["instances_checked"] == 1
    assert str(meta.parent.relative_to(store)) in checked["damages"][0]["message"]
    refused = cli("db", "copy", f"file:{store}", str(tmp_path / "copy.db"), "--move", code=1)
    assert "would be left behind" in refused.err
    listed = cli("list").out
    assert "h-2" in listed
    assert "h-1" not in listed


def damage_sqlite(file):
    content = file.read_bytes()
    file.write_bytes(content[:-8192] + b"\x5a" * 8192)


def damage_directory(store):
    (meta,) = store.glob("instances/h-1~*/meta.json")
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
