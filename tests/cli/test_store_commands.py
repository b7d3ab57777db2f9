"""``db``, ``doctor`` and ``completion``: looking after a store and its surroundings."""

import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cli import flows
from cli.conftest import Cli
from cli.terminal import see
from perdure.providers.records import HistoryRecord


def test_info_tells_where_and_how_much(cli):
    cli.run(("h-1", flows.hello, "ann"), ("a-1", flows.approval, 1), until_open={"a-1"})

    document = cli("db", "info", "-o", "json").json

    assert document["instances"] == 2
    assert document["by_status"] == {"Running": 1, "Completed": 1}
    assert document["size_bytes"] > 0
    assert document["queues"]["orchestrator"]["delayed"] == 1
    assert "instances" in cli("db", "info").out


def test_migrate_creates_a_store_and_repeats(cli):
    first = cli("db", "migrate", "-o", "json").json
    second = cli("db", "migrate", "-o", "json").json

    assert first == second
    assert first["schema_version"] >= 1


def test_migrate_says_what_is_due_without_doing_it(sqlite_cli, tmp_path):
    before = set(tmp_path.rglob("*"))

    due = sqlite_cli("db", "migrate", "--dry-run", "-o", "json").json["due"]

    assert [migration["number"] for migration in due] == list(range(1, len(due) + 1))
    assert set(tmp_path.rglob("*")) == before

    sqlite_cli("db", "migrate")

    assert sqlite_cli("db", "migrate", "--dry-run", "-o", "json").json["due"] == []
    assert "up to date" in sqlite_cli("db", "migrate", "--dry-run").out


def test_a_directory_has_nothing_to_migrate(sqlite_cli, tmp_path):
    sqlite_cli.store = f"file:{tmp_path / 'd'}"

    assert "there is no store" in sqlite_cli("db", "migrate", "--dry-run", code=3).err
    assert not list(tmp_path.iterdir())
    sqlite_cli("db", "migrate")
    assert "is up to date" in sqlite_cli("db", "migrate", "--dry-run").out
    assert sqlite_cli("db", "migrate", "--dry-run", "-o", "json").json["due"] == []


def test_check_reads_everything(cli):
    cli.run(("h-1", flows.hello, "ann"), ("a-1", flows.approval, 1), until_open={"a-1"})

    assert cli("db", "check", "-o", "json").json == {"instances_checked": 2, "damages": []}
    assert "no damage found" in cli("db", "check", "--quick").out


def test_check_names_the_instance_that_is_damaged(cli):
    cli.run(("h-1", flows.hello, "ann"), ("h-2", flows.hello, "bob"))

    async def damage(client):
        record = HistoryRecord(event_id=77, data='{"type":"FromTheFuture"}')
        await client.provider.append_with_execution("h-2", 1, [record])

    cli.call(damage)

    document = cli("db", "check", "-o", "json", code=1).json
    assert [damage["instance_id"] for damage in document["damages"]] == ["h-2"]
    assert "FromTheFuture" in document["damages"][0]["message"]


def damages_after(cli, tmp_path, statement):
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as database, database:
        database.execute(statement)
    damages = cli("db", "check", "-o", "json", code=1).json["damages"]
    return {damage["instance_id"]: damage["message"] for damage in damages}


@pytest.fixture
def ended_store(sqlite_cli):
    """Ended in each way, waiting, held before its start, and in its second execution."""
    for instance_id in ("stopped", "killed", "round"):
        flow = flows.rounds if instance_id == "round" else flows.approval
        sqlite_cli.run((instance_id, flow, 1), until_open={instance_id})
    sqlite_cli("cancel", "stopped")
    sqlite_cli("terminate", "killed", "-y")
    sqlite_cli("send", "round", "go", "--data", '"x"')
    sqlite_cli.run(
        ("done", flows.hello, "ann"),
        ("failed", flows.failing, "boom"),
        ("stopped", flows.approval, 1),
        ("open", flows.approval, 1),
        until_open={"open", "round"},
    )
    sqlite_cli("start", "hello", "--id", "held")
    sqlite_cli("pause", "held")
    sqlite_cli("start", "hello", "--id", "later")
    assert sqlite_cli("db", "check", "-o", "json").json["damages"] == []
    return sqlite_cli


def test_check_names_instances_whose_histories_have_lost_their_ends(ended_store, tmp_path):
    found = damages_after(ended_store, tmp_path, "DELETE FROM history WHERE event_id > 2")

    assert set(found) == {"done", "failed", "stopped", "killed", "round", "open"}
    assert found["done"] == "execution 1: Completed, but it ends with ActivityScheduled"


def test_check_names_instances_whose_end_is_not_that_of_their_status(ended_store, tmp_path):
    found = damages_after(
        ended_store, tmp_path, "UPDATE instances SET status = 'Completed' WHERE status = 'Failed'"
    )

    assert found == {"failed": "execution 1: Completed, but it ends with OrchestrationFailed"}


def test_check_names_instances_without_their_current_execution(ended_store, tmp_path):
    found = damages_after(
        ended_store,
        tmp_path,
        "DELETE FROM executions WHERE instance_key NOT IN "
        "(SELECT instance_key FROM instances WHERE instance_id = 'round') OR execution_id = 2",
    )

    assert set(found) == {"done", "failed", "stopped", "killed", "open", "round"}
    assert found["round"] == "execution 2, its current one, is missing"


LOST_ROWS = {
    "work item": ("DELETE FROM worker_queue", "activity flaky is open, and no queue holds it"),
    "timer": (
        "DELETE FROM orchestrator_queue WHERE instance_id = 'sleeps'",
        "the timer is open, and no queue holds it",
    ),
    "readiness row": (
        "DELETE FROM instance_locks WHERE instance_id = 'sleeps'",
        "messages of 'sleeps' are delivered to no worker",
    ),
    "last event": (
        "DELETE FROM history WHERE rowid = (SELECT max(rowid) FROM history)",
        "Completed, but it ends with",
    ),
    "last events": (
        """DELETE FROM history WHERE event_id >= 3 AND instance_key =
        (SELECT instance_key FROM instances WHERE instance_id = 'two')""",
        "the activity greet is open, and no queue holds it",
    ),
    "output": (
        "UPDATE executions SET output = '1' WHERE output LIKE '%hello%'",
        "its output is not that of OrchestrationCompleted",
    ),
    "status": (
        "UPDATE instances SET status = 'Running' WHERE status = 'Completed'",
        "Running, but its execution 1 is Completed",
    ),
    "state": ("UPDATE kv_delta SET value = '9'", "its state is not what its history wrote"),
    "custom status": (
        "UPDATE instances SET custom_status = NULL",
        "its custom status is not what its history wrote",
    ),
    "child": (
        "DELETE FROM instances WHERE instance_id = 'parent::1.2'",
        "it waits for its child 'parent::1.2', which is not in the store",
    ),
}


@pytest.mark.parametrize("lost", LOST_ROWS)
def test_check_finds_what_was_lost(sqlite_cli, tmp_path, lost):
    sqlite_cli.run(
        ("retries", flows.retrying),
        ("sleeps", flows.sleeper, 9999.0),
        ("waits", flows.approval, 1),
        ("parent", flows.parent_of_waiting),
        ("two", flows.two_greetings),
        until_open={"retries", "sleeps", "waits", "parent", "parent::1.2", "two"},
    )
    sqlite_cli.run(("done", flows.hello, "ann"))
    assert sqlite_cli("db", "check", "-o", "json").json["damages"] == []
    statement, expected = LOST_ROWS[lost]

    found = damages_after(sqlite_cli, tmp_path, statement)

    assert any(expected in message for message in found.values()), found


def test_check_finds_a_start_that_was_removed_from_its_queue(sqlite_cli, tmp_path):
    sqlite_cli("start", "hello", "--id", "ann")

    found = damages_after(sqlite_cli, tmp_path, "DELETE FROM orchestrator_queue")

    assert "a message of 'ann' is missing" in found[""]


def test_a_pause_and_a_resume_write_a_lost_readiness_row(sqlite_cli, tmp_path):
    sqlite_cli.run(("waits", flows.approval, 1), until_open={"waits"})
    damages_after(sqlite_cli, tmp_path, "DELETE FROM instance_locks")

    sqlite_cli("pause", "waits")
    sqlite_cli("resume", "waits")

    assert sqlite_cli("db", "check", "-o", "json").json["damages"] == []


def test_check_finds_a_queued_file_that_was_removed(sqlite_cli, tmp_path):
    sqlite_cli.store = "file:./store"
    sqlite_cli.run(("retries", flows.retrying), until_open={"retries"})
    (queued,) = (tmp_path / "store/queues/worker").iterdir()
    queued.unlink()

    damages = sqlite_cli("db", "check", "-o", "json", code=1).json["damages"]

    assert "no queue holds it" in damages[0]["message"]


def test_an_instance_that_was_retried_from_its_first_turn_is_sound(retried):
    assert retried("db", "check", "-o", "json").json["damages"] == []


def test_check_finds_a_broken_database_file(sqlite_cli, tmp_path):
    sqlite_cli.run(("w-1", flows.fan_out, 300))
    sqlite_cli.call(lambda client: client.provider.admin.get_store_info())
    file = tmp_path / "store.db"
    size = file.stat().st_size
    with file.open("r+b") as opened:  # most of it: a single page may be one that is not in use
        opened.seek(size // 3)
        opened.write(b"\xff" * (size - size // 3))

    answer = sqlite_cli("db", "check", code=1)

    assert answer.out + answer.err
    assert "Traceback" not in answer.err


def executions_of(cli, instance_id):
    return cli.call(lambda client: client.provider.admin.list_executions(instance_id))


@pytest.fixture
def retried(cli):
    cli.run(("f-1", flows.failing_at_once, "boom"), ("f-2", flows.failing_at_once, "boom"))
    for _ in range(3):
        cli("retry", "f-1")
        cli.run(("h-1", flows.hello, "x"), ("f-1", flows.failing_at_once, "boom"))
    return cli


def test_prune_drops_past_executions_and_counts_them_before(retried):
    preview = retried("db", "prune", "--keep-last", "2", "--dry-run", "-o", "json").json
    untouched = executions_of(retried, "f-1")
    done = retried("db", "prune", "--keep-last", "2", "-y", "-o", "json").json

    assert preview == {"dry_run": True, "instances": 1, "executions": 2}
    assert untouched == [1, 2, 3, 4]
    assert done["executions"] == 2
    assert executions_of(retried, "f-1") == [3, 4]


def test_prune_by_age_leaves_young_ones(retried):
    preview = retried("db", "prune", "--older-than", "1h", "--dry-run", "-o", "json").json
    done = retried("db", "prune", "--older-than", "1h", "-y")
    retried("db", "prune", "--older-than", "0s", "--query", "id:f-1", "-y")

    assert preview["executions"] == 0
    assert "dropped 0 past executions" in done.out
    assert executions_of(retried, "f-1") == [4]


def test_prune_needs_to_know_what_may_go(sqlite_cli):
    sqlite_cli("db", "migrate")

    assert "--keep-last" in sqlite_cli("db", "prune", code=2).err


def test_prune_asks_where_nobody_can_answer(retried):
    assert "add -y" in retried("db", "prune", "--keep-last", "1", code=2).err
    assert executions_of(retried, "f-1") == [1, 2, 3, 4]


def findings(answer):
    return {finding["subject"]: finding for finding in answer.json}


def test_doctor_finds_a_healthy_store_healthy(cli):
    cli.run(("h-1", flows.hello, "ann"))

    found = findings(cli("doctor", "-o", "json"))

    assert {finding["level"] for finding in found.values()} <= {"ok", "warn"}
    assert found["store"]["level"] == "ok"
    assert found["permissions"]["level"] == "ok"
    assert re.search(r"SQLite 3\.\d+", found["sqlite"]["text"])
    assert "python" in cli("doctor").out


def test_doctor_warns_of_a_store_that_others_can_read(sqlite_cli, tmp_path):
    sqlite_cli("db", "migrate")
    (tmp_path / "store.db").chmod(0o644)

    found = findings(sqlite_cli("doctor", "-o", "json"))

    assert found["permissions"]["level"] == "warn"
    assert "chmod 600" in found["permissions"]["advice"]


def test_doctor_warns_of_work_that_nobody_takes(cli):
    cli("start", "hello", "--id", "h-1")

    found = findings(cli("doctor", "-o", "json"))

    assert found["workers"]["level"] == "warn"
    assert "perdure worker" in found["workers"]["advice"]


def test_doctor_warns_of_work_that_a_worker_has_left_locked(cli):
    cli("start", "hello", "--id", "h-1")

    async def lock(client):
        await client.provider.fetch_orchestration_item(60_000, 0)

    cli.call(lock)

    found = findings(cli("doctor", "-o", "json"))

    assert "1 locked" in found["turns"]["text"]
    assert found["workers"]["level"] == "warn"
    assert "perdure worker" in found["workers"]["advice"]


def test_doctor_finds_a_store_that_cannot_be_opened_bad(sqlite_cli, tmp_path):
    (tmp_path / "store.db").write_text("this is no database")

    answer = sqlite_cli("doctor", "-o", "json", code=1)

    assert findings(answer)["store"]["level"] == "bad"


def test_doctor_finds_times_from_the_future_bad(sqlite_cli):
    sqlite_cli.run(("h-1", flows.hello, "ann"))

    async def move_ahead(client):
        admin = client.provider.admin
        snapshot = await admin.export_instance("h-1")
        later = msgspec.structs.replace(snapshot, updated_at_ms=snapshot.updated_at_ms + 3_600_000)
        await admin.import_instance(later, replace=True)

    sqlite_cli.call(move_ahead)

    found = findings(sqlite_cli("doctor", "-o", "json", code=1))

    assert found["clock"]["level"] == "bad"


def test_doctor_counts_blocked_instances(sqlite_cli):
    from cli.test_trying_again import block

    sqlite_cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    block(sqlite_cli, "a-1")

    assert "1 instance Blocked" in findings(sqlite_cli("doctor", "-o", "json"))["blocked"]["text"]


def test_doctor_warns_of_work_whose_worker_is_gone(sqlite_cli):
    sqlite_cli("start", "hello", "--id", "h-1")

    async def take(client):
        await client.provider.fetch_orchestration_item(60_000, 0)

    sqlite_cli.call(take)

    found = findings(sqlite_cli("doctor", "-o", "json"))["turns"]
    assert (found["level"], "0 ready, 1 locked" in found["text"]) == ("warn", True)
    assert "perdure worker" in found["advice"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["export", "h-1", "--file"], "sqlite"),
        (["db", "backup"], "sqlite"),
        (["db", "backup"], "filesystem"),
        (["new", "hello"], "sqlite"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    tmp_path, monkeypatch, command, kind
):
    monkeypatch.chdir(tmp_path)
    cli = Cli("store.db" if kind == "sqlite" else "file:./store")
    cli.run(("h-1", flows.hello, "ann"))

    said = cli(*command, str(tmp_path / "no such" / "file.py"), code=1).err

    assert f"'{tmp_path}/no such/file.py': No such file or directory" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(sqlite_cli, shell):
    script = sqlite_cli("completion", shell).out

    assert "_PERDURE_COMPLETE" in script
    assert shell != "fish" or 'string split --max 1 ","' in script  # an id may have commas
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def complete(line, environ, tmp_path, shell="bash"):
    words = line.split(" ")
    environ = {
        **environ,
        "_PERDURE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line.replace(" ", "\n") if shell == "bash" else line,
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
    }
    code = "import sys; sys.argv = ['perdure']; from perdure.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if shell == "zsh":  # three lines for each: type, value, description
        return done.stdout.splitlines()[1::3]
    return [item.partition(",")[2].partition("\t")[0] for item in done.stdout.splitlines() if item]


def test_completion_knows_commands_options_and_ids(sqlite_cli, environ, tmp_path):
    sqlite_cli.run(("order-1", flows.hello, "ann"), ("other-2", flows.hello, "bob"))

    assert complete("perdure re", environ, tmp_path) == [
        "result",
        "resume",
        "retry",
        "rerun",
        "resolve",
        "replay",
    ]
    assert "--follow" in complete("perdure history --f", environ, tmp_path)
    assert complete("perdure show order", environ, tmp_path) == ["order-1"]
    assert complete("perdure cancel oth", environ, tmp_path) == ["other-2"]


def test_completion_knows_the_names_of_orchestrations(sqlite_cli, environ, tmp_path):
    sqlite_cli.run(("order-1", flows.hello, "ann"), ("other-2", flows.sleeper, 0))

    assert complete("perdure start ", environ, tmp_path) == ["hello", "sleeper"]
    assert complete("perdure list --name sl", environ, tmp_path) == ["sleeper"]


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_bash_runs_nothing_of_an_id_that_it_completes(sqlite_cli, environ, tmp_path, quote):
    sqlite_cli("start", "hello", "--id", "evil $(touch pwned)`touch pwned`", "--input", '["x"]')
    (tmp_path / "script").write_text(sqlite_cli("completion", "bash").out)
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    end = quote if quote == '"' else ""  # nothing is completed then; bash closes the other quote
    typed = f". ./script\nperdure show {quote}ev\t{end}\nexit\n"

    _, seen = see(
        ("--norc", "--noprofile", "-i"), 140, environ, tmp_path, answers=typed.encode(),
        program=("bash",),
    )  # fmt: skip

    assert not (tmp_path / "pwned").exists()
    assert quote == '"' or "Waiting" in seen, seen


COMPLETED = {
    "a": r"a\b",
    "b": "b,c,",
    "c": "c*[x]?",
    "d:e": "d:e:$(touch pwned)",
    "e=1:": "e=1:2 3",
    "f": r"f'b\'$(touch pwned)\'",
    "-- -": "-g",
}
"""The id that belongs to each beginning that is typed."""


def test_bash_completes_the_very_id(sqlite_cli, environ, tmp_path):
    for instance_id in COMPLETED.values():
        sqlite_cli("start", "hello", "--id", instance_id, "--input", '["x"]')
    (tmp_path / "ab").touch()  # a file that a pattern could match
    (tmp_path / "script").write_text(sqlite_cli("completion", "bash").out)
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    shows = [f"perdure show -o json {typed}\t > found{n}" for n, typed in enumerate(COMPLETED)]
    _, seen = see(
        ("--norc", "--noprofile", "-i"), 140, environ, tmp_path,
        answers="\n".join([". ./script", *shows, "exit\n"]).encode(), program=("bash",),
    )  # fmt: skip

    assert not (tmp_path / "pwned").exists(), seen
    found = [(tmp_path / f"found{n}").read_text() for n in range(len(COMPLETED))]
    assert all(found), seen
    assert [json.loads(each)["id"] for each in found] == list(COMPLETED.values()), seen


@pytest.mark.parametrize(("shell", "written"), [("zsh", r"a\\b,c"), ("fish", r"a\b,c")])
def test_other_shells_get_what_becomes_the_very_id(sqlite_cli, environ, tmp_path, shell, written):
    """Zsh takes one backslash of two from a value; fish takes all that follows the first comma."""
    sqlite_cli("start", "hello", "--id", r"a\b,c", "--input", '["x"]')

    assert complete("perdure show a", environ, tmp_path, shell) == [written]


def test_completion_of_ids_is_silent_without_a_store(environ, tmp_path):
    assert complete("perdure show x", environ, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
