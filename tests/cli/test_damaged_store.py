"""A directory in which a file was damaged: ``doctor`` says which one, and the rest works."""

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
