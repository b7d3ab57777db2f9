"""The entry point as a process: help, start-up, exit codes, pipes, signals."""

import json
import os
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

from cli import flows
from cli.reference import reference
from patience import HANG_SECONDS
from perdure.cli.command import Command
from perdure.cli.main import SECTIONS, report, root
from perdure.cli.settings import Settings

PERDURE = [sys.executable, "-m", "perdure"]


def perdure(*args, environ, **options):
    return subprocess.run(
        [*PERDURE, *args],
        env=environ,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        **options,
    )


def leaf_commands(group=root, path=("perdure",)):
    context = click.Context(group, info_name="perdure")
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaf_commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = list(leaf_commands())
NAMES = [" ".join(path) for path, _ in COMMANDS]


def holds(check, environ):
    """Run a program in a process of its own; its exit says whether what it checks is so."""
    done = subprocess.run(
        [sys.executable, "-c", check], env=environ, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_the_console_script_is_declared():
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="perdure")

    assert script.load() is import_module("perdure.cli.main").main


def test_help_lists_every_command(sqlite_cli):
    out = sqlite_cli("--help").out

    for section in SECTIONS.values():
        for name, (_, text) in section.items():
            assert f"  {name} " in out
            assert text.split()[0] in out


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=NAMES)
def test_every_command_has_examples_that_begin_with_it(path, command, sqlite_cli):
    assert isinstance(command, Command)
    out = sqlite_cli(*path[1:], "--help").out

    assert command.examples
    assert "Examples:" in out
    for example in command.examples:
        assert example in out
        assert " ".join(path) in example or example.startswith("perdure ls")


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=NAMES)
def test_the_line_in_the_overview_is_the_commands_own(path, command, sqlite_cli):
    overview = " ".join(sqlite_cli(*path[1:-1], "--help").out.split())

    assert f" {path[-1]} {command.get_short_help_str(200)}" in overview


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=NAMES)
def test_examples_use_options_that_exist(path, command):
    known = {option for parameter in command.params for option in parameter.opts}

    for example in command.examples:
        own, _, _ = example.partition("|")
        used = {word for word in own.split() if word.startswith("-") and word != "-"}
        assert used <= known, example


def test_the_reference_page_lists_the_same_commands_and_options():
    page = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"

    assert page.read_text() == reference(), "run tests/cli/reference.py"


def test_no_arguments_show_the_help(sqlite_cli):
    assert sqlite_cli().out == sqlite_cli("--help").out
    assert "Commands:" in sqlite_cli("db").out


def test_version_is_printed(sqlite_cli):
    from perdure.version import VERSION

    assert sqlite_cli("--version").out == f"perdure {VERSION}\n"


def test_help_imports_neither_asyncio_nor_rich_nor_a_provider(environ):
    check = (
        "import sys\n"
        "try:\n"
        "    from perdure.cli.main import root\n"
        "    root.main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'asyncio', 'rich', 'msgspec', 'apsw', 'psycopg'} & set(sys.modules)\n"
        "sys.exit(repr(slow) if slow else 0)\n"
    )

    holds(check, environ)


@pytest.mark.parametrize("args", [["list"], ["count"], ["show", "h-1"]], ids=lambda args: args[0])
def test_looking_loads_neither_the_engine_nor_what_only_others_need(sqlite_cli, environ, args):
    sqlite_cli("start", "hello", "--id", "h-1")
    check = (
        "import sys\n"
        "try:\n"
        "    from perdure.cli.main import root\n"
        f"    root.main({args!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'rich', 'psycopg', 'importlib.metadata', 'importlib.resources', 'email',\n"
        "    'perdure.engine', 'perdure.runtime', 'perdure.client.client'} & set(sys.modules)\n"
        "sys.exit(repr(slow) if slow else 0)\n"
    )

    holds(check, environ)


def test_importing_perdure_loads_nothing_that_is_not_used_yet(environ):
    check = (
        "import sys, perdure\n"
        "slow = {'asyncio', 'click', 'rich', 'msgspec', 'apsw', 'psycopg'} & set(sys.modules)\n"
        "sys.exit(repr(slow) if slow else 0)\n"
    )

    holds(check, environ)


def test_everything_that_is_listed_can_be_imported_without_extras(environ):
    check = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(['psycopg', 'psycopg_pool'])\n"
        "from perdure import *\n"
        "assert callable(orchestration)\n"
    )

    holds(check, environ)


def test_help_of_one_command_loads_no_other_command(environ):
    check = (
        "import sys\n"
        "try:\n"
        "    from perdure.cli.main import root\n"
        "    root.main(['send', '--help'])\n"
        "except SystemExit: pass\n"
        "found = [m for m in sys.modules if m.startswith('perdure.cli.commands.')]\n"
        "sys.exit(0 if found == ['perdure.cli.commands.start'] else repr(found))\n"
    )

    holds(check, environ)


def test_help_takes_less_than_a_quarter_of_a_second_of_cpu(environ):
    def cpu_seconds():
        process = subprocess.Popen([*PERDURE, "--help"], env=environ, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    assert min(cpu_seconds() for _ in range(3)) < 0.25


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["lst"], "there is no command 'lst'; did you mean 'list'"),
        (["db", "chek"], "did you mean 'check'?"),
        (["list", "--limit", "0"], "--limit"),
        (["list", "--nonsense"], "--nonsense"),
        (["list", "-o", "xml"], "-o"),
        (["show"], "ID"),
        (["send", "x"], "EVENT"),
        (["show", "-dash"], "argument that begins with -: perdure show -- ID"),
        (["schedule", "show", "-dash"], "argument that begins with -: perdure schedule show -- ID"),
        (["completion"], "Choose from: bash, zsh, fish"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(sqlite_cli, args, said):
    answer = sqlite_cli(*args, code=2)

    assert said in answer.err
    assert answer.err.startswith("perdure: ")
    assert "--help" in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""


def test_a_traceback_is_shown_only_when_asked_for(environ, tmp_path):
    plain = perdure("show", "x", "--store", "gone.db", environ=environ, cwd=tmp_path)
    long = perdure("show", "x", "--store", "gone.db", "--traceback", environ=environ, cwd=tmp_path)

    assert plain.returncode == 3
    assert "Traceback" not in plain.stderr
    assert "Traceback" in long.stderr


def test_a_defect_of_ours_says_so_and_is_exit_1(capsys):
    code = report(ZeroDivisionError("division by zero"), Settings())

    said = capsys.readouterr().err
    assert code == 1
    assert "ZeroDivisionError: division by zero" in said
    assert "please report it" in said
    assert said.count("\n") == 1


BROKEN_LIFESPAN = """
from perdure import orchestration

async def lifespan(runtime):
    1 / 0
    yield []

@orchestration
async def nothing() -> None: ...
"""


def test_an_error_of_the_authors_code_names_its_line(environ, tmp_path):
    (tmp_path / "shop.py").write_text(BROKEN_LIFESPAN)

    answer = perdure("worker", "shop.py", environ=environ, cwd=tmp_path)

    assert answer.returncode == 1
    assert "ZeroDivisionError: division by zero" in answer.stderr
    assert "shop.py:5" in answer.stderr
    assert "defect of perdure" not in answer.stderr
    assert "--traceback" in answer.stderr


def test_a_reader_that_goes_away_is_no_error_message(sqlite_cli, environ, tmp_path):
    sqlite_cli.run(("w-1", flows.fan_out, 400))  # more than a pipe holds
    process = subprocess.Popen(
        [*PERDURE, "history", "w-1", "-o", "jsonl"],
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    process.stdout.readline()
    process.stdout.close()

    assert process.stderr.read() == b""
    assert process.wait(HANG_SECONDS) == 141
    process.stderr.close()


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["list", "--help"], []], ids=" ".join)
def test_help_that_nobody_reads_is_no_error_message(environ, tmp_path, args):
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(
        [*PERDURE, *args], env=environ, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE,
        check=False,
    )  # fmt: skip
    os.close(writer)

    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_an_output_that_is_closed_is_no_error(sqlite_cli, environ, tmp_path, closed):
    sqlite_cli.run(("h-1", flows.hello, "ann"))
    command = f"{shlex.join([*PERDURE, 'list'])} {closed}"

    done = subprocess.run(
        ["/bin/sh", "-c", command], check=False, env=environ, cwd=tmp_path, capture_output=True
    )

    assert done.returncode == 0
    assert done.stderr == b""


def test_ctrl_c_is_exit_130_without_a_traceback(sqlite_cli, start_process):
    sqlite_cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    process = start_process("watch", "a-1", stderr=subprocess.PIPE)

    assert "Waiting" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=HANG_SECONDS)

    assert process.returncode == 130
    assert error == ""


def test_output_for_programs_is_plain_json_through_the_real_entry_point(
    sqlite_cli, environ, tmp_path
):
    sqlite_cli.run(("h-1", flows.hello, "ann"))

    done = perdure("show", "h-1", "-o", "json", environ=environ, cwd=tmp_path)

    assert json.loads(done.stdout)["output"] == "hello ann"
    assert done.stderr == ""


PLAIN = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}


def test_what_programs_read_does_not_depend_on_the_locale(sqlite_cli, environ, tmp_path):
    sqlite_cli.run(("ü-1", flows.hello, "✓ 😀"))
    plain = {**environ, **PLAIN}

    shown = perdure("show", "ü-1", "-o", "json", environ=plain, cwd=tmp_path)
    ids = perdure("list", "-o", "ids", environ=plain, cwd=tmp_path, encoding="utf-8")
    archive = perdure("export", "ü-1", environ=plain, cwd=tmp_path, encoding="utf-8").stdout
    (tmp_path / "archive.jsonl").write_text(archive, encoding="utf-8")
    done = perdure("import", "archive.jsonl", "--store", "other.db", environ=environ, cwd=tmp_path)

    assert json.loads(shown.stdout)["output"] == "hello ✓ 😀"
    assert ids.stdout == "ü-1\n"
    assert done.returncode == 0, done.stderr


def test_an_argument_that_is_no_text_is_wrong_usage(environ, tmp_path):
    done = perdure("show", os.fsdecode(b"\xff"), environ=environ, cwd=tmp_path)

    assert done.returncode == 2
    assert "is not valid UTF-8" in done.stderr


def test_a_terminal_without_unicode_gets_ascii(sqlite_cli, environ, tmp_path):
    sqlite_cli.run(("h-1", flows.hello, "ünïcode ✓"))

    done = perdure("list", environ={**environ, **PLAIN}, cwd=tmp_path)

    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "+ completed" in done.stdout
