"""Ctrl-C while a command waits for a person: the first one ends it."""

import signal
import sys

import pytest

from cli import flows
from perdure.cli.inputs import interruptible
from perdure.cli.main import root


def press_ctrl_c(*_ignored):
    """In place of a blocking read: the signal comes while it waits."""
    signal.raise_signal(signal.SIGINT)
    pytest.fail("the wait goes on")


class Keyboard:
    """A terminal whose user presses nothing but Ctrl-C."""

    readline = staticmethod(press_ctrl_c)

    def isatty(self):
        return True


@pytest.fixture
def interrupted(sqlite_cli, monkeypatch, capsys):
    """Runs a command that is interrupted where it waits; gives what it said."""
    sqlite_cli.run(
        ("a-1", flows.approval, 1), ("f-1", flows.failing_at_once, "boom"), until_open={"a-1"}
    )
    sqlite_cli("retry", "f-1")
    sqlite_cli.run(("f-1", flows.failing_at_once, "boom"))
    monkeypatch.setattr("click.termui.visible_prompt_func", press_ctrl_c)
    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setenv("PERDURE_STORE", sqlite_cli.store)

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            root.main(list(args))
        said = capsys.readouterr()
        assert ended.value.code == 130
        assert not said.out
        return said.err

    return run


@pytest.mark.parametrize(
    "command",
    [
        ["terminate", "--query", "status:open"],
        ["purge", "--query", "status:failed"],
        ["db", "prune", "--keep-last", "1"],
    ],
    ids=" ".join,
)
def test_one_ctrl_c_leaves_a_question(interrupted, sqlite_cli, command):
    said = interrupted(*command)

    assert said.count("\n") == 1
    assert sqlite_cli("count", "status:open").out == "1\n"
    past = sqlite_cli("db", "prune", "--keep-last", "1", "--dry-run", "-o", "json").json
    assert past["executions"] == 1


def test_one_ctrl_c_ends_the_reading_of_standard_input(interrupted):
    said = interrupted("import", "-")

    assert said.count("\n") == 1
    assert "interrupted" in said


def test_a_background_job_that_ignores_ctrl_c_goes_on_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
