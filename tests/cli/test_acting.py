"""Acting on instances: start, send, cancel, terminate, pause, resume, purge; one or many."""

import asyncio
import json
import re
import signal

import pytest

from cli import flows
from perdure.providers.sqlite.admin import SqliteAdmin


def status_of(cli, instance_id):
    return cli("show", instance_id, "-o", "json").json["status"]


@pytest.fixture
def waiting(cli):
    cli.run(
        ("a-1", flows.approval, 1),
        ("a-2", flows.approval, 2),
        ("h-1", flows.hello, "ann"),
        until_open={"a-1", "a-2"},
    )
    return cli


def test_start_on_a_store_that_cannot_be_made_claims_nothing(sqlite_cli, tmp_path):
    sqlite_cli.store = "missing/store.db"

    refused = sqlite_cli("start", "hello", code=None)

    assert refused.code == 1
    assert "created" not in refused.err
    assert len(refused.err.splitlines()) == 1


def test_sending_says_what_is_waited_for(waiting):
    right = waiting("send", "a-1", "answer", "--data", '"x"')
    wrong = waiting("send", "a-2", "anwser", "--data", '"x"')
    mailbox = waiting("send", "a-2", "answer", "--data", '"x"', "--mailbox")

    assert "it waits" not in right.out + right.err
    assert "it waits for event 'answer'; this is kept" in wrong.out + wrong.err
    assert "it waits for event 'answer'; this is kept" in mailbox.out + mailbox.err
    details = waiting("show", "a-2", "-o", "json").json
    assert details["unread"] == [
        {"kind": "event", "name": "anwser", "count": 1},
        {"kind": "message", "name": "answer", "count": 1},
    ]
    assert "event 'anwser', message 'answer'" in waiting("show", "a-2").out


def test_sending_to_an_instance_that_has_not_begun_says_so(sqlite_cli):
    sqlite_cli("start", "hello", "--id", "h-1")

    assert "it has not begun" in sqlite_cli("send", "h-1", "answer").err


def test_show_says_that_a_cancel_waits_for_a_worker(waiting):
    waiting("cancel", "a-1")

    assert re.search(
        r"asked to stop .* ago, which has not reached its code yet; no worker is running",
        waiting("show", "a-1", "-o", "json").json["sentence"],
    )
    assert (
        "asked to stop" in waiting("list", "-o", "json", "id:a-1").json["instances"][0]["sentence"]
    )


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ('["ann", 3]', ["ann", 3]),
        ('"ann"', ["ann"]),
        ('{"a": 1}', [{"a": 1}]),
        ("[[1, 2]]", [[1, 2]]),
        ("null", [None]),
        (None, []),
    ],
)
def test_start_takes_a_list_of_arguments_or_the_one_value(cli, given, stored):
    options = [] if given is None else ["--input", given]

    cli("start", "hello", "--id", "h-1", *options)

    async def arguments(client):
        (queued,) = await client.provider.admin.list_messages("h-1")
        return json.loads(queued.message.body).get("input")

    assert cli.call(arguments) == stored


def test_start_reads_input_from_a_file_and_from_standard_input(cli, tmp_path):
    (tmp_path / "input.json").write_text('["from file"]')

    cli("start", "hello", "--id", "h-1", "--input", "@input.json")
    cli("start", "hello", "--id", "h-2", "--input", "-", stdin='["from stdin"]')
    cli.run(("h-3", flows.hello, "x"), ("h-1", flows.hello, "x"), ("h-2", flows.hello, "x"))

    assert cli("result", "h-1").out.strip() == '"hello from file"'
    assert cli("result", "h-2").out.strip() == '"hello from stdin"'


def test_start_is_idempotent_by_id(cli):
    first = cli("start", "hello", "--id", "h-1", "-o", "json").json
    second = cli("start", "hello", "--id", "h-1", "-o", "json").json

    assert (first["created"], second["created"]) == (True, False)
    assert "exists already" in cli("start", "hello", "--id", "h-1").out
    assert cli("count").out == "1\n"


def test_start_does_not_take_an_instance_of_another_orchestration_for_its_own(cli):
    cli.run(("h-1", flows.hello, "ann"))

    for options in ([], ["--wait"]):
        refused = cli("start", "approval", "--id", "h-1", *options, code=6)
        assert "belongs to an instance of 'hello', not of 'approval'" in refused.err
        assert refused.out == ""


def test_start_can_refuse_or_replace_what_exists(cli):
    cli.run(("h-1", flows.hello, "ann"))

    refused = cli("start", "hello", "--id", "h-1", "--if-exists", "fail", code=6)
    cli("start", "hello", "--id", "h-1", "--if-exists", "replace")

    assert "exists already; --if-exists get takes it" in refused.err
    assert "if_exists" not in refused.err
    assert status_of(cli, "h-1") == "Pending"


def test_start_makes_up_an_id_and_prints_it_for_pipes(cli):
    (made_up,) = cli("start", "hello", "--input", '"ann"', "-o", "ids").lines

    assert status_of(cli, made_up) == "Pending"


def test_start_and_wait_gives_up_in_time(cli):
    cli("start", "hello", "--id", "h-1", "--wait", "--timeout", "10ms", code=5)


def test_a_time_to_wait_without_waiting_is_refused_and_starts_nothing(cli):
    cli("start", "hello", "--id", "h-1")

    refused = cli("start", "hello", "--id", "h-2", "--timeout", "1s", code=2)

    assert "--timeout needs --wait" in refused.err
    assert cli("list", "-o", "ids").lines == ["h-1"]


def test_start_on_a_missing_store_says_that_it_creates_one(sqlite_cli):
    assert "created the store store.db" in sqlite_cli("start", "hello").err
    assert sqlite_cli("start", "hello").err == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--input", "{bad"], "--input is not JSON"),
        (["--input", "hello"], "a text needs its own quotes"),
        (["--input", "@missing.json"], "No such file"),
        (["--input", '"' + "x" * 1_100_000 + '"'], "more than 1048576 bytes"),
        (["--input", "[" * 5000 + "]" * 5000], "perdure: "),
        (["--in", "soon"], "is no length of time"),
        (["--id", ""], "must not be empty"),
        (["--id", "a\x1b[31m"], "control characters"),
        (["--id", "x" * 300], "at most 255"),
    ],
)
def test_bad_input_of_start_is_one_line_and_exit_2(sqlite_cli, options, said):
    sqlite_cli("db", "migrate")

    answer = sqlite_cli("start", "hello", *options, code=2)

    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert "\x1b" not in answer.err
    assert sqlite_cli("count").out == "0\n"


def test_an_event_that_is_sent_reaches_the_code(waiting):
    waiting("send", "a-1", "answer", "--data", '"yes"')
    waiting.run(("a-1", flows.approval, 1))

    assert waiting("result", "a-1").out.strip() == '"1: yes"'


def test_sending_to_an_ended_instance_is_refused(waiting):
    assert waiting("send", "h-1", "answer", code=6).err.count("\n") == 1


def test_sending_to_nobody_suggests_an_id(waiting):
    assert "did you mean" in waiting("send", "a1", "answer", code=3).err


def test_cancel_asks_the_code_to_stop(waiting):
    waiting("cancel", "a-1", "--reason", "changed my mind")
    waiting.run(("h-2", flows.hello, "x"), ("a-1", flows.approval, 1))

    assert status_of(waiting, "a-1") == "Cancelled"
    assert "changed my mind" in waiting("show", "a-1").out


def test_terminate_ends_it_without_a_worker(waiting):
    waiting("terminate", "a-1", "--reason", "stuck")

    assert status_of(waiting, "a-1") == "Terminated"
    assert "stuck" in waiting("list", "id:a-1").out
    assert waiting("result", "a-1", code=4).err == "perdure: approval a-1 terminated: stuck\n"


def test_an_end_without_a_reason_is_told_without_one(waiting):
    waiting("terminate", "a-1")

    assert waiting("result", "a-1", code=4).err == "perdure: approval a-1 terminated\n"


def test_what_has_not_begun_is_terminated_at_once(cli):
    cli("start", "hello", "--id", "h-1")
    cli("start", "hello", "--id", "h-2")

    one = cli("terminate", "h-1")
    many = cli("terminate", "--query", "id:h-2", "-y")

    assert one.lines == ["✓ terminated h-1"]
    assert many.lines == ["✓ terminated 1 instance"]
    assert {status_of(cli, "h-1"), status_of(cli, "h-2")} == {"Terminated"}
    assert "hello@" not in cli("history", "h-1").out


def test_pause_and_resume(waiting):
    waiting("pause", "a-1")
    paused = status_of(waiting, "a-1")
    waiting("resume", "a-1")

    assert (paused, status_of(waiting, "a-1")) == ("Paused", "Running")


def test_several_ids_are_acted_on_and_the_bad_ones_reported(waiting):
    answer = waiting("terminate", "a-1", "nobody", "h-1", "a-2", code=3)

    assert answer.lines == ["✓ terminated a-1", "✓ terminated a-2"]
    assert "'nobody'" in answer.err
    assert "'h-1' has ended already" in answer.err


def test_a_dry_run_says_exactly_what_would_be_done_and_does_nothing(waiting):
    answer = waiting("cancel", "--query", "name:approval", "--dry-run")
    document = waiting("cancel", "--query", "name:a*", "--dry-run", "-o", "json").json

    assert "would cancel 2 instances (approval 2), oldest started" in answer.out
    assert document["count"] == 2
    assert sorted(document["ids"]) == ["a-1", "a-2"]
    assert status_of(waiting, "a-1") == "Running"


def test_a_query_acts_on_all_that_fit_and_nothing_else(waiting):
    answer = waiting("terminate", "--query", "name:approval", "-y")

    assert "terminated 2 instances" in answer.out
    assert {status_of(waiting, i) for i in ("a-1", "a-2")} == {"Terminated"}
    assert status_of(waiting, "h-1") == "Completed"


def test_a_query_without_a_yes_is_refused_where_nobody_can_be_asked(waiting):
    answer = waiting("terminate", "--query", "status:open", code=2)

    assert "would terminate 2 instances" in answer.err
    assert "add -y" in answer.err
    assert status_of(waiting, "a-1") == "Running"


def test_a_query_that_fits_nothing_does_nothing(waiting):
    assert waiting("terminate", "--query", "name:nobody", "-y").out == "terminated 0 instances\n"
    looked = waiting("terminate", "--query", "name:nobody", "--dry-run").out
    assert looked == "would terminate 0 instances\n"


@pytest.mark.parametrize(
    "args", [[], ["a-1", "--query", "status:open"], ["--query", " "], ["--query", "status:ended"]]
)
def test_wrong_targets_are_a_usage_error(waiting, args):
    assert waiting("terminate", *args, code=2).err.count("\n") == 1


def test_purge_deletes_what_has_ended_with_its_children(cli):
    cli.run(("p-1", flows.family, ["ann", "bob"]), ("h-1", flows.hello, "x"))

    cli("purge", "p-1")

    assert cli("list", "-o", "ids").lines == ["h-1"]


def test_purge_refuses_a_running_instance_unless_forced(waiting):
    waiting("purge", "a-1", code=6)
    waiting("purge", "a-1", "--force")

    assert waiting("list", "-o", "ids", "name:approval").lines == ["a-2"]


def test_purge_by_query_counts_roots_that_have_ended(cli):
    cli.run(
        ("p-1", flows.family, ["ann"]), ("h-1", flows.hello, "x"), ("a-1", flows.approval, 1),
        until_open={"a-1"},
    )  # fmt: skip

    preview = cli("purge", "--query", "created:<1h", "--dry-run", "-o", "json").json
    cli("purge", "--query", "created:<1h", "-y")

    assert sorted(preview["ids"]) == ["h-1", "p-1"]
    assert cli("list", "-o", "ids").lines == ["a-1"]


def test_a_child_is_purged_with_its_root_only(cli):
    cli.run(("p-1", flows.family, ["ann"]))

    assert "delete its root" in cli("purge", "p-1::1.2", code=6).err


@pytest.fixture
def orphans(cli, tmp_path):
    """A store with the children of two roots that were left behind, one of them open."""
    cli.run(
        ("c-1", flows.clan, ["ann", "bob"]),
        ("w-1", flows.parent_of_waiting),
        until_open={"w-1", "w-1::1.2"},
    )
    cli("export", "--query", "id:*::*", "--file", "children.jsonl")
    cli.store = "file:./other" if str(cli.store).startswith("file:") else "other.db"
    cli("import", "children.jsonl")
    return cli


def test_a_child_without_its_parent_is_purged_with_its_own_children(orphans):
    assert orphans("count").out == "4\n"
    assert "delete its root" in orphans("purge", "c-1::1.2::1.2", code=6).err

    orphans("purge", "c-1::1.2")

    assert orphans("list", "-o", "ids").lines == ["w-1::1.2"]


def test_an_open_child_without_its_parent_is_purged_only_by_force(orphans):
    assert "still running" in orphans("purge", "w-1::1.2", code=6).err

    orphans("purge", "w-1::1.2", "--force")

    assert "w-1::1.2" not in orphans("list", "-o", "ids").lines


def test_an_interrupted_bulk_command_says_how_far_it_came(sqlite_cli, monkeypatch):
    sqlite_cli.run(*((f"h-{number}", flows.hello, "ann") for number in range(7)))
    delete, deleted = SqliteAdmin.delete_instance, []
    monkeypatch.setattr("perdure.cli.commands.act._AT_ONCE", 2)

    async def commit(self, instance_id, **options):
        await delete(self, instance_id, **options)
        deleted.append(instance_id)
        if len(deleted) == 5:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)

    with monkeypatch.context() as patched:
        patched.setattr(SqliteAdmin, "delete_instance", commit)
        answer = sqlite_cli("purge", "--query", "name:hello", "-y", code=130)
    left = int(sqlite_cli("count").out)
    rest = sqlite_cli("purge", "--query", "name:hello", "-y", "-o", "json").json

    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert "interrupted: purged 4 of 7 instances, and perhaps the next 2;" in answer.err
    assert left in {1, 2}
    assert len(rest["purged"]) == left


# --- ids that look like options


@pytest.fixture
def dashed(cli):
    for instance_id in ("-y", "--force", "plain", "--query=status:open"):
        cli("start", "hello", "--id", instance_id, "--input", '["x"]')
        cli("terminate", "--", instance_id)
    return cli


def test_ids_from_a_pipe_are_never_options(dashed):
    ids = dashed("list", "-o", "ids", "id:-*").out

    done = dashed("purge", "--ids-from", "-", "-y", "-o", "json", stdin=ids).json

    assert sorted(done["purged"]) == ["--force", "--query=status:open", "-y"]
    assert dashed("list", "-o", "ids").lines == ["plain"]


def test_ids_from_a_file_join_the_others(dashed, tmp_path):
    (tmp_path / "ids").write_text("-y\n\n--force\n")

    dashed("purge", "plain", "--ids-from", "ids")

    assert dashed("list", "-o", "ids").lines == ["--query=status:open"]


def test_no_ids_from_a_pipe_change_nothing(dashed):
    answer = dashed("purge", "--ids-from", "-", "-y", stdin="")

    assert "names no instance" in answer.err
    assert dashed("count").out == "4\n"


def test_a_question_without_a_person_names_options_that_exist(sqlite_cli):
    sqlite_cli.run(("h-1", flows.hello, "ann"))
    purge = sqlite_cli("purge", "--query", "status:ended", code=2).err
    assert purge.endswith("add -y to do it, or --dry-run to look\n")

    sqlite_cli.call(_schedule)
    remove = sqlite_cli("schedule", "remove", "report", code=2).err
    assert remove == "perdure: this would remove the schedule report; add -y to do it\n"


async def _schedule(client):
    await client.schedules.create("report", "hello", "ann", every=3600)


def test_ids_from_a_file_that_cannot_be_read_are_one_line(dashed):
    assert (
        "--ids-from missing cannot be read" in dashed("purge", "--ids-from", "missing", code=2).err
    )


def test_an_export_takes_ids_from_a_pipe(dashed, tmp_path):
    exported = dashed("export", "--ids-from", "-", stdin="-y\n").out

    assert '"instance_id":"-y"' in exported


def test_two_dashes_end_the_options(dashed):
    assert dashed("show", "-o", "json", "--", "--force").json["id"] == "--force"
