"""``export``, ``import``, ``db backup`` and ``db copy``: instances somewhere else."""

import asyncio
import json
import signal
import stat
import subprocess
import sys

import msgspec
import pytest

from campaigns.forged_exports import resealed, run_forgeries
from cli import flows
from cli.conftest import FLOWS, Cli
from integration.conditions import until
from perdure import Runtime
from perdure.providers.local_files import draft_beside
from perdure.providers.sqlite.admin import SqliteAdmin


@pytest.fixture
def waiting(cli):
    cli.run(
        ("a-1", flows.approval, 1),
        ("h-1", flows.hello, "ann"),
        ("p-1", flows.parent_of_waiting),
        until_open={"a-1", "p-1", "p-1::1.2"},
    )
    return cli


@pytest.fixture(params=["sqlite", "filesystem"])
def other(request):
    """A second store; both kinds, so that every pair is tried."""
    return Cli("other.db" if request.param == "sqlite" else "file:./other")


def test_an_exported_instance_goes_on_in_another_store(waiting, other, tmp_path):
    (tmp_path / "a-1.jsonl").write_text(waiting("export", "a-1").out)

    assert other("import", "a-1.jsonl", "-o", "json").json == {
        "imported": ["a-1"],
        "already_there": [],
    }
    other("send", "a-1", "answer", "--data", '"yes"')
    other.run(("a-1", flows.approval, 1))

    assert other("result", "a-1").out.strip() == '"1: yes"'
    assert other("history", "a-1", "-o", "json").json[0]["instance_id"] == "a-1"


def test_a_named_instance_is_exported_with_its_children(waiting, other):
    exported = waiting("export", "p-1::1.2", "p-1").out

    assert sorted(other("import", "-", "-o", "ids", stdin=exported).lines) == ["p-1", "p-1::1.2"]


def test_import_reads_standard_input(waiting, other):
    exported = waiting("export", "--query", "status:open").out

    ids = other("import", "-", "-o", "ids", stdin=exported).lines

    assert sorted(ids) == ["a-1", "p-1", "p-1::1.2"]


def test_export_writes_a_private_file_and_never_overwrites(waiting, tmp_path):
    waiting("export", "h-1", "--file", "h-1.jsonl")

    refused = waiting("export", "h-1", "--file", "h-1.jsonl", code=6)

    assert stat.S_IMODE((tmp_path / "h-1.jsonl").stat().st_mode) == 0o600
    assert "exists already" in refused.err


@pytest.mark.parametrize("how", [("--query", "status:ended"), ("h-1", "q-1")])
def test_export_can_delete_what_has_ended_and_import_brings_it_back(waiting, tmp_path, how):
    waiting.run(("q-1", flows.family, ["bob"]))
    before = {each: waiting("history", each, "-o", "json").json for each in ("h-1", "q-1")}

    waiting("export", *how, "--file", "old.jsonl", "--delete")

    assert sorted(waiting("list", "-o", "ids").lines) == ["a-1", "p-1", "p-1::1.2"]
    assert len((tmp_path / "old.jsonl").read_text().splitlines()) == 4
    waiting("import", "old.jsonl")
    for each, history in before.items():
        assert waiting("history", each, "-o", "json").json == history


def test_what_changed_after_it_was_written_is_not_deleted(sqlite_cli, monkeypatch):
    sqlite_cli.run(("f-1", flows.failing, "no"), ("h-1", flows.hello, "ann"))
    read = SqliteAdmin.export_instance

    async def meanwhile(self, instance_id):
        snapshot = await read(self, instance_id)
        if instance_id == "f-1":
            await self.delete_instance("f-1")
            await self.import_instance(msgspec.structs.replace(snapshot, created_at_ms=1))
        return snapshot

    monkeypatch.setattr(SqliteAdmin, "export_instance", meanwhile)
    done = sqlite_cli("export", "--query", "status:ended", "--file", "old.jsonl", "--delete")

    assert "changed meanwhile: f-1" in done.err
    assert sqlite_cli("list", "-o", "ids").lines == ["f-1"]


@pytest.mark.parametrize("args", [("h-1", "--delete"), ("a-1", "--file", "a.jsonl", "--delete")])
def test_export_deletes_only_what_has_ended_and_is_in_a_file(waiting, args):
    waiting("export", *args, code=2)

    assert "h-1" in waiting("list", "-o", "ids").lines


def test_import_refuses_what_exists_unless_told_to_replace(waiting, tmp_path):
    (tmp_path / "some.jsonl").write_text(waiting("export", "h-1", "a-1").out)
    waiting("terminate", "a-1")

    refused = waiting("import", "some.jsonl", code=6)
    waiting("import", "some.jsonl", "--replace", "--keep", code=2)
    waiting("import", "some.jsonl", "--keep")
    kept = waiting("show", "a-1", "-o", "json").json["status"]
    waiting("import", "some.jsonl", "--replace")

    assert "'a-1' is already in this store; --replace overwrites it" in refused.err
    assert kept == "Terminated"
    assert waiting("show", "a-1", "-o", "json").json["status"] == "Running"


@pytest.mark.parametrize("flags", [[], ["--paused"]])
def test_an_import_that_was_interrupted_is_told_and_can_be_repeated(
    waiting, tmp_path, monkeypatch, flags
):
    waiting("export", "--query", "id:*", "--file", "all.jsonl")
    ids = waiting("list", "-o", "ids").lines
    target, restore, left = Cli("other.db"), SqliteAdmin.import_instance, [2]

    def interrupted(self, snapshot, *, replace=False):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return restore(self, snapshot, replace=replace)

    with monkeypatch.context() as patched:
        patched.setattr(SqliteAdmin, "import_instance", interrupted)
        told = target("import", "all.jsonl", *flags, code=130).err
    done = target("import", "all.jsonl", *flags, "-o", "json").json
    again = target("import", "all.jsonl", *flags).out

    assert "interrupted: 2 instances are imported, and perhaps '" in told
    assert told.count("\n") == 1
    assert len(done["already_there"]) == 2
    assert sorted(done["imported"] + done["already_there"]) == sorted(ids)
    assert f"imported 0 instances, {len(ids)} already there" in again
    assert target("count").out == waiting("count").out


def test_ctrl_c_between_a_commit_and_its_answer_promises_no_wrong_number(waiting, monkeypatch):
    waiting("export", "--query", "id:*", "--file", "all.jsonl")
    target, restore = Cli("other.db"), SqliteAdmin.import_instance
    committed = []

    async def commit(self, snapshot, *, replace=False):
        await restore(self, snapshot, replace=replace)
        committed.append(snapshot.instance_id)
        if len(committed) == 2:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)

    with monkeypatch.context() as patched:
        patched.setattr(SqliteAdmin, "import_instance", commit)
        told = target("import", "all.jsonl", code=130).err

    assert f"1 instances are imported, and perhaps {committed[1]!r};" in told
    assert target("count").out == "2\n"


def test_copying_a_store_in_use_is_refused(sqlite_cli):
    async def attempt():
        async with Runtime(sqlite_cli.store, [flows]) as runtime:
            await until(runtime.provider.admin.list_workers)
            copy = ("db", "copy", sqlite_cli.store, "copy.db")
            return await asyncio.to_thread(sqlite_cli, *copy, code=6)

    assert "the source is in use" in asyncio.run(attempt()).err


def test_import_paused_leaves_it_alone(waiting, other, tmp_path):
    (tmp_path / "a-1.jsonl").write_text(waiting("export", "a-1", "h-1").out)

    other("import", "a-1.jsonl", "--paused")

    assert other("list", "status:paused", "-o", "ids").lines == ["a-1"]
    assert other("list", "status:completed", "-o", "ids").lines == ["h-1"]


def test_an_export_can_be_replayed_without_its_store(waiting, tmp_path):
    (tmp_path / "all.jsonl").write_text(waiting("export", "--query", "status:open").out)
    waiting.store = "elsewhere.db"

    assert waiting("replay", FLOWS, "all.jsonl").lines == ["3 histories · 3 ok"]


def test_an_exported_instance_that_has_not_begun_has_nothing_to_replay(cli, tmp_path):
    cli("start", "hello", "--id", "h-1", "--input", '"ann"')
    (tmp_path / "h-1.jsonl").write_text(cli("export", "h-1").out)

    assert cli("replay", FLOWS, "h-1.jsonl").lines == ["0 histories"]


def test_several_that_go_on_while_they_are_written_are_refused(sqlite_cli, tmp_path, monkeypatch):
    sqlite_cli.run(
        ("a-1", flows.approval, 1), ("a-2", flows.approval, 2), until_open={"a-1", "a-2"}
    )
    export, seen = SqliteAdmin.export_instance, []

    async def meanwhile(self, instance_id):
        seen.append(instance_id)
        snapshot = await export(self, instance_id)
        later = snapshot.updated_at_ms + seen.count("a-1")
        is_moving = instance_id == "a-1"
        return msgspec.structs.replace(snapshot, updated_at_ms=later) if is_moving else snapshot

    whole = sqlite_cli("export", "a-1", "a-2").lines
    monkeypatch.setattr(SqliteAdmin, "export_instance", meanwhile)
    refused = sqlite_cli("export", "a-1", "a-2", "--file", "torn.jsonl", code=6)

    assert len(whole) == 2 + 1
    assert "'a-1' went on while it was written" in refused.err
    assert not (tmp_path / "torn.jsonl").exists()
    assert len(sqlite_cli("export", "a-1").lines) == 1 + 1  # one by itself is always whole


def test_an_export_that_fails_leaves_no_file(waiting, tmp_path):
    waiting("export", "a-1", "nobody", "--file", "some.jsonl", code=3)

    assert not (tmp_path / "some.jsonl").exists()


@pytest.mark.parametrize("stores", [("store.db", "memory:"), ("memory:", "other.db")])
def test_a_store_that_forgets_is_not_copied(sqlite_cli, stores):
    sqlite_cli("db", "migrate")

    assert "gone with its process" in sqlite_cli("db", "copy", *stores, "--move", code=2).err
    sqlite_cli("list")


def test_export_of_an_unknown_id_suggests_another(waiting):
    assert "did you mean" in waiting("export", "a1", code=3).err


@pytest.mark.parametrize("args", [[], ["a-1", "--query", "status:open"]])
def test_export_takes_ids_or_a_query(sqlite_cli, args):
    assert sqlite_cli("export", *args, code=2).err.count("\n") == 1


def damaged(text):
    document = json.loads(text)
    yield "another id", text.replace("h-1", "h-2")
    yield "half", text[: len(text) // 2] + "\n"
    yield "no JSON", "hello\n"
    yield "a newer format", json.dumps(document | {"perdure_export": 99}) + "\n"
    yield "something else", json.dumps({"a": 1}) + "\n"
    yield "deep", "[" * 100_000 + "\n"
    yield "an unknown field", json.dumps(document | {"more": 1}) + "\n"


def test_a_damaged_file_imports_nothing_and_names_the_line(waiting, tmp_path):
    good, _end = waiting("export", "h-1").out.splitlines(keepends=True)
    target = Cli("fresh.db")
    target("db", "migrate")

    for name, bad in damaged(good):
        file = tmp_path / "bad.jsonl"
        file.write_text(good + bad)
        answer = target("import", "bad.jsonl", code=2)
        assert "line 2" in answer.err, name
        assert answer.err.count("\n") == 1, name
        assert target("count").out == "0\n", name


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_imports_nothing(sqlite_cli, tmp_path, content):
    (tmp_path / "empty.jsonl").write_bytes(content)

    assert "is cut" in sqlite_cli("import", "empty.jsonl", code=2).err
    assert "holds no instances" in sqlite_cli("import", "empty.jsonl", "--partial").err
    sqlite_cli("export", "--query", "name:nobody", "--file", "none.jsonl")
    assert "holds no instances" in sqlite_cli("import", "none.jsonl").err


def test_a_file_that_was_cut_imports_nothing(waiting, tmp_path):
    lines = waiting("export", "--query", "status:open").out.splitlines(keepends=True)
    parts = [lines[:length] for length in range(len(lines))]
    parts += [lines[:place] + lines[place + 1 :] for place in range(len(lines))]
    parts += [[*lines, lines[0]], [*lines, *lines[:-1]]]
    target = Cli("fresh.db")
    target("db", "migrate")

    for part in parts:
        (tmp_path / "part.jsonl").write_text("".join(part))
        for file, stdin in (("part.jsonl", None), ("-", "".join(part))):
            answer = target("import", file, stdin=stdin, code=2)
            assert "--partial" in answer.err
            assert answer.err.count("\n") == 1
        assert target("count").out == "0\n"
    (tmp_path / "part.jsonl").write_text("".join(lines[:2]))
    target("import", "part.jsonl", "--partial")
    assert target("count").out == "2\n"


def test_exports_may_be_put_one_after_the_other(waiting, other):
    exported = waiting("export", "a-1").out + waiting("export", "h-1").out

    assert other("import", "-", "-o", "ids", stdin=exported).lines == ["a-1", "h-1"]


def test_a_file_gets_its_name_when_it_is_whole(sqlite_cli, tmp_path, monkeypatch):
    sqlite_cli.run(("h-1", flows.hello, "ann"), ("h-2", flows.hello, "bob"))
    export, seen = SqliteAdmin.export_instance, []

    async def meanwhile(self, instance_id):
        seen.append((tmp_path / "all.jsonl").exists())
        return await export(self, instance_id)

    monkeypatch.setattr(SqliteAdmin, "export_instance", meanwhile)
    sqlite_cli("export", "h-1", "h-2", "--file", "all.jsonl")

    assert seen == [False, False]
    assert {path.name for path in tmp_path.iterdir()} == {"all.jsonl", "store.db"}


def test_a_parent_is_not_imported_without_the_children_for_which_it_waits(waiting, other):
    parent = waiting("export", "--query", "id:p-1").out
    child = waiting("export", "p-1::1.2").out

    refused = other("import", "-", stdin=parent, code=2)

    assert "'p-1' waits for 'p-1::1.2'" in refused.err
    assert other("count").out == "0\n"
    other("import", "-", stdin=child)
    other("import", "-", stdin=parent)
    other("purge", "p-1", "--force", "--yes")
    other("import", "-", "--partial", stdin=parent)
    assert other("list", "-o", "ids").lines == ["p-1"]


def test_a_parent_that_has_the_answer_of_its_child_needs_it_no_more(waiting, other):
    waiting("pause", "p-1")
    waiting("terminate", "p-1::1.2")
    waiting.run(("p-1::1.2", flows.approval, 1))
    parent = waiting("export", "--query", "id:p-1").out

    assert other("import", "-", "-o", "ids", stdin=parent).lines == ["p-1"]


def test_a_file_that_is_no_text_is_one_line(sqlite_cli, tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)))

    assert "UTF-8" in sqlite_cli("import", "binary", code=2).err
    assert "No such file" in sqlite_cli("import", "missing", code=2).err


def test_copy_takes_everything_to_a_store_of_any_kind(waiting, other):
    report = waiting("db", "copy", waiting.store, other.store, "-o", "json").json

    assert report["copied"] == report["instances"] == 4
    assert other("list", "-o", "ids").lines == waiting("list", "-o", "ids").lines
    other("send", "a-1", "answer", "--data", '"there"')
    other.run(("a-1", flows.approval, 1))
    assert other("result", "a-1").out.strip() == '"1: there"'


def test_copy_can_be_repeated_and_does_not_overwrite_what_differs(waiting, other):
    waiting("db", "copy", waiting.store, other.store)
    again = waiting("db", "copy", waiting.store, other.store, "-o", "json").json
    other("terminate", "a-1")

    refused = waiting("db", "copy", waiting.store, other.store, code=6)
    waiting("db", "copy", waiting.store, other.store, "--replace")

    assert again["already_there"] == 4
    assert "a-1" in refused.err
    assert other("show", "a-1", "-o", "json").json["status"] == "Running"


def test_a_moved_store_refuses_and_names_the_new_place(waiting, other):
    waiting("db", "copy", waiting.store, other.store, "--move")

    assert "other" in waiting("list", code=6).err


def test_the_mark_of_a_move_can_be_taken_back(waiting, other):
    waiting("db", "copy", waiting.store, other.store, "--move")
    assert "was moved to" in waiting("list", code=None).err

    assert "add -y" in waiting("db", "unmove", code=2).err
    done = waiting("db", "unmove", "-y", "-o", "json").json
    assert done["was_moved_to"].endswith("other.db") or done["was_moved_to"].endswith("other")

    assert waiting("count").out == "4\n"
    assert "has no mark of a move" in waiting("db", "unmove").out


@pytest.mark.parametrize(
    ("source", "target", "code"),
    [
        ("gone.db", "new.db", 3),
        ("store.db", "store.db", 2),
        ("store.db", "sqlite:///./store.db", 2),
        ("store.db", "nosuch:x", 2),
    ],
)
def test_a_copy_that_cannot_be_made_is_one_line(sqlite_cli, source, target, code):
    sqlite_cli("db", "migrate")

    assert sqlite_cli("db", "copy", source, target, code=code).err.count("\n") == 1


def test_a_backup_is_a_store_of_its_own(waiting, tmp_path):
    waiting("db", "backup", "saved")
    saved = Cli("saved" if waiting.store == "store.db" else "file:./saved")
    waiting("terminate", "a-1")

    assert saved("show", "a-1", "-o", "json").json["status"] == "Running"
    assert saved("count").out == "4\n"


def test_a_backup_may_be_named_as_the_store_that_it_becomes(waiting, tmp_path):
    is_directory = str(waiting.store).startswith("file:")
    own, other = (
        ("file:saved", "sqlite:///saved") if is_directory else ("sqlite:saved", "file:saved")
    )
    before = set(tmp_path.iterdir())

    for target in (other, "memory:", "postgresql://db.example/shop", "at-10:30.db"):
        assert "perdure db copy" in waiting("db", "backup", target, code=2).err
    assert set(tmp_path.iterdir()) == before

    assert waiting("db", "backup", own, "-o", "json").json == {"backup": "saved"}
    waiting("db", "backup", "./at-10:30.db")
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"saved", "at-10:30.db"}


def test_a_backup_never_overwrites(waiting, tmp_path):
    (tmp_path / "saved").write_text("mine")

    assert "exists already" in waiting("db", "backup", "saved", code=6).err
    assert (tmp_path / "saved").read_text() == "mine"


KILLED = """
import os, pathlib, signal, sys
from perdure.providers.local_files import draft_beside
with draft_beside(pathlib.Path("saved"), is_directory=sys.argv[1] == "True") as draft:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("was_directory", [False, True])
def test_a_backup_or_export_removes_the_drafts_of_killed_ones_only(
    waiting, tmp_path, was_directory
):
    subprocess.run([sys.executable, "-c", KILLED, str(was_directory)], cwd=tmp_path, check=False)
    assert len(list(tmp_path.glob(".saved.*"))) == 1
    with draft_beside(tmp_path / "saved", is_directory=was_directory) as alive:
        assert list(tmp_path.glob(".saved.*")) == [alive.path]
        waiting("db", "backup", "saved")
        assert list(tmp_path.glob(".saved.*")) == [alive.path]
    (tmp_path / ".saved.jsonl.0123456789ab").write_text("of a killed one")
    (tmp_path / ".saved.jsonl.mine").write_text("of a person")
    waiting("export", "a-1", "--file", "saved.jsonl")

    assert [path.name for path in tmp_path.glob(".saved*")] == [".saved.jsonl.mine"]


# --- forged files: the checksum fits, the content does not


def event_at(instance, place):
    return instance["executions"][0]["history"][place]["event"]


def queue(instance, kind, body, **routing):
    entry = {"kind": kind, "visible_at_ms": 1, "enqueued_at_ms": 1, **routing}
    entry["body"] = {"type": kind, "instance_id": instance["instance_id"], **body}
    instance.setdefault("messages", []).append(entry)


def shift_turns(instance):
    for record in instance["executions"][0]["history"]:
        record["event"]["turn"] += 1


FORGERIES = {
    "history that begins with its second turn": shift_turns,
    "neither history nor start": lambda i: i.update(executions=[], messages=[], work=[]),
    "event of another instance": lambda i: event_at(i, 1).update(instance_id="p-1"),
    "event of another execution": lambda i: event_at(i, 1).update(execution_id=7),
    "missing event": lambda i: i["executions"][0]["history"].pop(1),
    "second beginning": lambda i: event_at(i, 2).update(event_at(i, 0), event_id=3),
    "result of no step": lambda i: event_at(i, 2).update(source_event_id=1),
    "time of an event": lambda i: event_at(i, 1).update(timestamp_ms=2**62),
    "time of the instance": lambda i: i.update(created_at_ms=2**62),
    "deep JSON": lambda i: event_at(i, 0).update(input=deep(400)),
    "very deep JSON": lambda i: event_at(i, 0).update(input=deep(900)),
    "malformed $perdure": lambda i: event_at(i, 0).update(input={"$perdure": 5}),
    "undecodable event": lambda i: event_at(i, 1).update(type="FromTheFuture"),
    "no name": lambda i: i.pop("name"),
    "name of another orchestration": lambda i: i.update(name="hello"),
    "false parent": lambda i: i.update(parent_instance_id="p-1"),
    "parent in the history only": lambda i: event_at(i, 0).update(
        parent_instance_id="p-1", parent_execution_id=1, parent_event_id=2
    ),
    "parent that did not start it": lambda i: (
        i.update(parent_instance_id="p-1"),
        event_at(i, 0).update(parent_instance_id="p-1", parent_execution_id=1, parent_event_id=2),
    ),
    "ended without an end": lambda i: i["executions"][0].update(status="Completed", output=1),
    "answer of no activity": lambda i: queue(
        i, "ActivityCompleted", {"execution_id": 1, "activity_id": 1, "result": 1}
    ),
    "answer of no child": lambda i: queue(
        i, "SubOrchCompleted", {"execution_id": 1, "event_id": 2, "child_instance_id": "h-1"}
    ),
    "message of another instance": lambda i: queue(i, "QueueMessage", {"instance_id": "p-1"}),
    "body of another kind": lambda i: queue(i, "ExternalRaised", {"type": "CancelInstance"}),
    "start of another instance": lambda i: queue(
        i, "StartOrchestration", {"instance_id": "p-1", "name": "hello"}, start={"name": "hello"}
    ),
    "work of no step": lambda i: i.setdefault("work", []).append(
        {
            "execution_id": 1,
            "activity_id": 1,
            "name": "greet",
            "visible_at_ms": 1,
            "enqueued_at_ms": 1,
            "body": {
                "type": "ActivityExecute",
                "instance_id": "a-1",
                "execution_id": 1,
                "activity_id": 1,
                "name": "greet",
            },
        }
    ),
}


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_file_is_refused_although_its_checksum_fits(waiting, tmp_path, name):
    line = waiting("export", "a-1").lines[0]
    (tmp_path / "forged.jsonl").write_text(resealed(line, FORGERIES[name]))
    waiting("purge", "a-1", "-y", "--force", code=None)

    refused = waiting("import", "forged.jsonl", "--partial", "--replace", code=None)

    assert refused.code not in (0, None)
    assert "forged.jsonl" in refused.err
    assert "Traceback" not in refused.err
    assert len(refused.err) < 2_000


def test_a_resealed_file_without_changes_is_imported_and_passes_the_check(waiting, other, tmp_path):
    lines = waiting("export", "a-1", "p-1", "h-1").lines
    whole = "".join(resealed(line, lambda _: None) for line in lines[:-1])
    (tmp_path / "same.jsonl").write_text(whole + lines[-1] + "\n")

    other("import", "same.jsonl")

    assert other("db", "check", "-o", "json").json == {"instances_checked": 4, "damages": []}


def test_no_forgery_that_is_taken_damages_the_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    ends = run_forgeries(25, seed=1)

    assert ends["refused"]
