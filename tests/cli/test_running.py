"""``worker``, ``dev`` and ``new``: processes that run the user's code."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest

from cli import flows
from cli.conftest import FLOWS, Cli
from patience import HANG_SECONDS
from perdure.cli.commands.setup import TEMPLATES
from perdure.cli.commands.workers import SourceWatch


def wait_for_line(process, text, seconds=HANG_SECONDS):
    """Read the process's output until a line holds the text."""
    deadline = time.monotonic() + seconds
    seen = []
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if not line:
            break
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came:\n{''.join(seen)}")


def wait_for_worker(cli, process, seconds=HANG_SECONDS):
    """Wait until others see it too: it says that it serves before the store lists it."""
    wait_for_line(process, " serves ")
    deadline = time.monotonic() + seconds
    while not cli("workers", "-o", "ids").out:
        assert time.monotonic() < deadline, "the store never listed it"


def test_a_worker_runs_what_was_started_and_drains_on_sigterm(sqlite_cli, start_process):
    worker = start_process("worker", FLOWS, "--slots", "5", "--drain", "2s", "--lock", "3s")
    wait_for_worker(sqlite_cli, worker)

    answer = sqlite_cli(
        "start", "hello", "--id", "h-1", "--input", '"ann"', "--wait", "--timeout", "120s"
    )
    (shown,) = sqlite_cli("workers", "-o", "json").json
    worker.terminate()
    wait_for_line(worker, "draining")

    assert answer.out.strip() == '"hello ann"'
    assert shown["process_id"] == worker.pid
    assert "hello@1.0.0" in shown["handlers"]
    assert shown["slots"] == 5
    assert worker.wait(HANG_SECONDS) == 0
    assert sqlite_cli("workers", "-o", "ids").out == ""


def answer_of(line, path):
    """Ask the worker whose log line names its address."""
    address = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
    with urllib.request.urlopen(address + path, timeout=HANG_SECONDS) as answer:
        return answer.read().decode()


def test_a_worker_answers_probes_and_logs_json(sqlite_cli, start_process):
    arguments = ("--health", "127.0.0.1:0", "--log-format", "json")
    worker = start_process("worker", FLOWS, *arguments)
    line = wait_for_line(worker, "probes at")
    wait_for_worker(sqlite_cli, worker)
    sqlite_cli("start", "failing", "--id", "f-1", "--input", '"boom"', "--wait", code=4)
    failed = json.loads(wait_for_line(worker, "orchestration 'failing'"))

    assert answer_of(line, "/livez") == answer_of(line, "/readyz") == "ok\n"
    assert 'perdure_instances{status="Failed"} 1.0' in answer_of(line, "/metrics")
    assert json.loads(line)["level"] == "INFO"
    assert failed["instance_id"] == "f-1"
    assert "Traceback" in failed["traceback"]


def test_several_worker_processes_are_one_command(sqlite_cli, start_process):
    worker = start_process("worker", FLOWS, "--processes", "2", "--name", "w")
    wait_for_line(worker, " serves ")

    def wait_for(*names):
        deadline = time.monotonic() + HANG_SECONDS
        while sqlite_cli("workers", "-o", "ids").out.split() != [*names]:
            assert time.monotonic() < deadline, "the workers never came"

    wait_for("w-0", "w-1")
    first, second = sqlite_cli("workers", "-o", "json").json
    os.kill(first["process_id"], signal.SIGKILL)
    wait_for_line(worker, "worker 0")
    wait_for("w-0", "w-1")
    again, same = sqlite_cli("workers", "-o", "json").json
    worker.terminate()

    assert again["process_id"] != first["process_id"]
    assert same["process_id"] == second["process_id"]
    assert worker.wait(HANG_SECONDS) == 0
    assert sqlite_cli("workers", "-o", "ids").out == ""


def test_several_worker_processes_need_a_store_that_they_share(sqlite_cli):
    refused = sqlite_cli("worker", FLOWS, "--processes", "2", "--store", "memory:", code=2)

    assert "a memory: store is gone with its process; name a file" in refused.err


def test_worker_processes_that_cannot_start_end_the_command(sqlite_cli, start_process):
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken:
        worker = start_process("worker", FLOWS, "--processes", "2", "--health", f"127.0.0.1:{port}")
        wait_for_line(worker, f"cannot listen on 127.0.0.1:{port}")
        assert worker.wait(HANG_SECONDS) == 2


def test_a_worker_exports_what_the_variables_of_opentelemetry_say(
    sqlite_cli, start_process, environ
):
    environ["OTEL_TRACES_EXPORTER"] = "console"
    environ["OTEL_METRICS_EXPORTER"] = "none"
    worker = start_process("worker", FLOWS, "--otel")
    wait_for_worker(sqlite_cli, worker)
    sqlite_cli("start", "failing", "--input", '"boom"', "--wait", code=4)
    worker.terminate()
    wait_for_line(worker, '"name": "activity')

    environ["OTEL_TRACES_EXPORTER"] = "jaeger"
    worker = start_process("worker", FLOWS, "--otel")
    wait_for_line(worker, "names the exporter 'jaeger', which is not installed")
    assert worker.wait(HANG_SECONDS) == 2


def test_a_killed_worker_is_not_listed_any_more(sqlite_cli, start_process):
    worker = start_process("worker", FLOWS)
    wait_for_worker(sqlite_cli, worker)
    assert "1 running" in sqlite_cli("doctor", code=None).out

    worker.kill()
    worker.wait()

    assert sqlite_cli("workers", "-o", "ids").out == ""
    assert "0 running" in sqlite_cli("doctor", code=None).out


def test_a_failed_instance_of_start_and_wait_is_exit_4(sqlite_cli, start_process):
    wait_for_line(start_process("worker", FLOWS), " serves ")

    answer = sqlite_cli("start", "failing", "--input", '"boom"', "--wait", "-o", "json", code=4)

    assert answer.json["status"] == "Failed"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--version", "2"], "MAJOR.MINOR.PATCH, e.g. '1.0.0': '2'"),
        (["x", "--id", ""], "id must not be empty"),
        (["x", "--id", "a\nb"], r"'a\nb'"),
        (["x" * 300], "orchestration name"),
        (["x", "--input", "[1,"], "--input is not JSON"),
    ],
)
def test_a_start_that_cannot_be_is_refused_before_a_store_is_created(
    sqlite_cli, tmp_path, args, said
):
    answer = sqlite_cli("start", *args, code=2)

    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_id_that_was_started_with_other_arguments_is_told_with_options_that_exist(sqlite_cli):
    sqlite_cli.run(("h-1", flows.hello, "ann"))

    same = sqlite_cli("start", "hello", "--id", "h-1", "--input", '"ann"')
    other = sqlite_cli("start", "hello", "--id", "h-1", "--input", '"bob"')
    anew = sqlite_cli("start", "hello", "--id", "h-1", "--input", '"bob"', "--if-exists", "restart")

    assert (same.err, anew.err) == ("", "")
    assert other.err == (
        "perdure: 'h-1' was started with ('ann'), and not again with ('bob'); --if-exists replace "
        "deletes it first, or name another --id\n"
    )


def test_a_wait_without_end_tells_that_no_worker_runs(sqlite_cli, start_process):
    sqlite_cli("start", "hello", "--id", "h-1", "--input", '"ann"')
    waiting = start_process("result", "h-1", stderr=subprocess.PIPE)

    assert waiting.stderr.readline() == "perdure: no worker is running; it waits for one\n"
    sqlite_cli.run(("h-2", flows.hello, "bob"), ("h-1", flows.hello, "ann"))
    assert waiting.communicate(timeout=HANG_SECONDS)[0] == '"hello ann"\n'
    assert sqlite_cli("result", "h-1").err == ""


def test_a_name_that_no_worker_has_is_warned_of(sqlite_cli, start_process):
    wait_for_worker(sqlite_cli, start_process("worker", FLOWS))

    answer = sqlite_cli("start", "helo", "--id", "h-1")

    assert "perdure: no running worker has the orchestration 'helo'" in answer.err
    assert answer.err.count("did you mean 'hello'?") == 1
    assert "no running worker has the orchestration 'helo'" in sqlite_cli("show", "h-1").out


def test_watching_a_store_prints_its_changes_as_lines(sqlite_cli, start_process):
    sqlite_cli("db", "migrate")
    watching = start_process("watch")
    wait_for_line(watching, "no instances")

    sqlite_cli("start", "hello", "--id", "h-1")

    assert "1 pending" in wait_for_line(watching, "pending")


def test_following_a_history_goes_on_until_the_end(sqlite_cli, start_process):
    sqlite_cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    following = start_process("history", "a-1", "--follow")
    wait_for_line(following, "ExternalSubscribed")

    sqlite_cli("send", "a-1", "answer", "--data", '"yes"')
    sqlite_cli.run(("a-1", flows.approval, 1))

    wait_for_line(following, "OrchestrationCompleted")
    assert following.wait(HANG_SECONDS) == 0


def test_following_goes_on_with_the_next_execution(sqlite_cli, start_process):
    sqlite_cli.run(("r-1", flows.rounds, 1), until_open={"r-1"})
    following = start_process("history", "r-1", "--follow")
    wait_for_line(following, "ExternalSubscribed")

    for _ in range(2):
        sqlite_cli("send", "r-1", "go", "--data", '"on"')
    sqlite_cli.run(("r-1", flows.rounds, 1))

    wait_for_line(following, "OrchestrationContinuedAsNew")
    wait_for_line(following, "OrchestrationCompleted")
    assert following.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["worker"], "name the module"),
        (["worker", "nowhere.flows"], "there is no module 'nowhere.flows'"),
        (["worker", "."], "there is no module '.' here"),
        (["worker", ":flows"], "there is no module '' here"),
        (["worker", "missing.py"], "there is no file 'missing.py'"),
        (["worker", "torn.py"], "importing torn.py failed: SyntaxError: '(' was never closed"),
        (["worker", f"{FLOWS}:nothing"], "has no 'nothing'"),
        (["worker", f"{FLOWS}:asyncio"], "defines no handler"),
        (
            ["worker", f"{FLOWS}:broken_factory"],
            "calling cli.flows:broken_factory() failed at flows",
        ),
        (["worker", f"{FLOWS}:no_handlers"], "is int; name a handler"),
        (["worker", FLOWS, "--only-tags"], "--only-tags needs"),
        (["worker", FLOWS, "--lock", "1ms"], "at least 0.1"),
        (["dev"], "name the module"),
    ],
)
def test_a_worker_that_cannot_run_says_why_in_one_line(sqlite_cli, tmp_path, args, said):
    (tmp_path / "torn.py").write_text("x = (")
    answer = sqlite_cli(*args, code=2)

    assert said in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only-tags"], "--only-tags needs"),
        (["--lock", "1ms"], "at least 0.1"),
        (["--name", ""], "worker_id"),
        ([word for tag in "abcdef" for word in ("--tag", tag)], "1 to 5 tags"),
    ],
)
def test_a_worker_with_wrong_options_does_not_say_that_it_serves(start_process, options, said):
    process = start_process("worker", FLOWS, *options)

    told = process.communicate(timeout=HANG_SECONDS)[0]

    assert process.returncode == 2
    assert said in told
    assert told.count("\n") == 1


BROKEN_MODULES = {
    "import sys; sys.exit(0)": "failed at broken.py:1: it calls sys.exit(0)",
    "raise SystemExit": "failed at broken.py:1: it calls sys.exit(None)",
    "import sys\nsys.exit('no database')": "broken.py:2: it calls sys.exit('no database')",
    "import asyncio; raise asyncio.CancelledError": "failed at broken.py:1: CancelledError",
    "raise GeneratorExit('over')": "failed at broken.py:1: GeneratorExit: over",
    "class Mute(Exception):\n  def __str__(self): return 1/0\nraise Mute": "broken.py:3: Mute",
}


@pytest.mark.parametrize("text", BROKEN_MODULES)
@pytest.mark.parametrize(
    "args",
    [
        ["worker", "broken.py"],
        ["replay", "broken.py"],
        ["stack", "h-1", "-m", "broken.py"],
        ["worker", "broken"],
        ["worker", "factory.py:make"],
        ["worker", "factory.py:several"],
    ],
)
def test_a_module_that_ends_the_program_is_refused(sqlite_cli, tmp_path, monkeypatch, args, text):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken", "factory"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    sqlite_cli.run(("h-1", flows.hello, "ann"))
    (tmp_path / "broken.py").write_text(text)
    (tmp_path / "factory.py").write_text(
        "def make():\n    import broken\ndef several():\n    yield make()\n"
    )

    answer = sqlite_cli(*args, code=2)

    assert BROKEN_MODULES[text] in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""


@pytest.mark.parametrize(
    "args", [["worker", "whole.py"], ["stack", "x", "-m", "whole.py"], ["replay", "whole.py"]]
)
def test_a_file_that_runs_its_program_when_imported_is_refused(sqlite_cli, tmp_path, args):
    (tmp_path / "whole.py").write_text(
        "import asyncio\nasync def main():\n    print('ran')\nasyncio.run(main())\n"
    )

    answer = sqlite_cli(*args, code=2)

    assert "runs its program when it is imported, at whole.py:4; put that line" in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""


APP = """
    from perdure import activity, orchestration

    @activity
    def say() -> str:
        return "{word}"

    @orchestration
    async def talk() -> str:
        return await say()
    """


def test_dev_restarts_when_the_code_changes_and_survives_a_broken_file(
    sqlite_cli, start_process, tmp_path
):
    app = tmp_path / "app.py"
    app.write_text(textwrap.dedent(APP.format(word="old")))
    dev = start_process("dev", "app.py")
    wait_for_line(dev, " serves ")
    old = sqlite_cli("start", "talk", "--wait", "--timeout", "120s").out

    app.write_text("def broken(:")
    wait_for_line(dev, "app.py changed")
    wait_for_line(dev, "waiting for a change")
    app.write_text(textwrap.dedent(APP.format(word="newer")))
    wait_for_line(dev, " serves ")
    new = sqlite_cli("start", "talk", "--wait", "--timeout", "120s").out

    assert (old, new) == ('"old"\n', '"newer"\n')


def test_dev_that_is_interrupted_in_a_terminal_drains_its_worker(
    sqlite_cli, start_process, tmp_path
):
    (tmp_path / "app.py").write_text(textwrap.dedent(APP.format(word="on")))
    dev = start_process("dev", "app.py")
    wait_for_line(dev, " serves ")

    os.killpg(dev.pid, signal.SIGINT)

    assert dev.wait(HANG_SECONDS) == 130
    assert sqlite_cli("workers", "-o", "ids").out == ""


def test_source_watch_sees_changes_and_leaves_environments_out(tmp_path):
    source, hidden = tmp_path / "a.py", tmp_path / ".git"
    environment = tmp_path / "env"
    source.write_text("1")
    hidden.mkdir()
    environment.mkdir()
    (environment / "pyvenv.cfg").write_text("")
    watch = SourceWatch([tmp_path])

    (hidden / "x.py").write_text("1")
    (environment / "x.py").write_text("1")
    (tmp_path / "notes.txt").write_text("1")
    assert watch.changed() is None
    source.write_text("22")
    assert watch.changed() == str(source)
    assert watch.changed() is None
    (tmp_path / "b.py").write_text("1")
    assert watch.changed() == str(tmp_path / "b.py")
    source.unlink()
    assert watch.changed() == str(source)


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_is_a_program_that_runs_and_runs_again(sqlite_cli, template, tmp_path):
    sqlite_cli("new", template)

    first, second = (
        subprocess.run(
            [sys.executable, f"{template}.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        for _ in range(2)
    )

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout
    assert second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    assert Cli("perdure.db")("count", "status:completed").out != "0\n"


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_says_how_the_file_at_hand_is_run(sqlite_cli, template):
    sqlite_cli("new", template, "app.py")
    source = Path("app.py").read_text()

    assert "python app.py\n" in source
    assert "perdure dev app.py\n" in source
    assert f"{template}.py" not in source


def test_new_does_not_overwrite(sqlite_cli, tmp_path):
    (tmp_path / "hello.py").write_text("mine")

    assert "exists already" in sqlite_cli("new", code=6).err
    assert (tmp_path / "hello.py").read_text() == "mine"


def test_new_lists_its_templates(sqlite_cli):
    assert [line.split()[0] for line in sqlite_cli("new", "--list").lines] == list(TEMPLATES)


def test_new_in_a_folder_that_is_not_there_is_one_line(sqlite_cli):
    assert "cannot write" in sqlite_cli("new", "hello", "nowhere/hello.py", code=1).err


def test_dev_keeps_the_store_out_of_the_list_of_processes(start_process, environ):
    environ["PERDURE_STORE"] = "sqlite:///secret-place.db"
    dev = start_process("dev", FLOWS)
    wait_for_line(dev, " serves ")

    listed = subprocess.run(
        ["ps", "-s", str(dev.pid), "-o", "args="], capture_output=True, text=True, check=True
    ).stdout

    assert "perdure worker" in listed
    assert "secret-place" not in listed


def test_a_killed_worker_of_a_directory_is_not_listed_any_more(sqlite_cli, start_process, environ):
    cli = sqlite_cli
    cli.store = environ["PERDURE_STORE"] = "file:./store"
    killed = start_process("worker", FLOWS)
    wait_for_line(killed, " serves ")

    killed.kill()
    killed.wait(HANG_SECONDS)

    assert cli("workers", "-o", "ids").out == ""
    workers = [each for each in cli("doctor", "-o", "json").json if each["subject"] == "workers"]
    assert workers[0]["text"].startswith("0 running")
