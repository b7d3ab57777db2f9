"""Output in a real terminal, 80 and 140 columns wide: nothing wraps, nothing is garbled."""

import asyncio
import re
import threading

import pytest

from cli import flows
from cli.terminal import plain, see
from patience import HANG_SECONDS
from perdure import Runtime

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")
LONG = "a very long name that does not fit into the line of any terminal " * 4


@pytest.fixture
def busy(sqlite_cli):
    sqlite_cli.run(
        ("a-1", flows.approval, 1),
        ("f-1", flows.failing, LONG),
        ("h-1", flows.hello, LONG),
        ("p-1", flows.family, ["ann", "bob"]),
        ("s-1", flows.sleeper, 7200),
        ("w-1", flows.fan_out, 40),
        until_open={"a-1", "s-1"},
    )
    return sqlite_cli


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize(
    "args",
    [
        ["list"],
        ["count", "--by", "status"],
        ["show", "a-1"],
        ["show", "w-1"],
        ["history", "f-1"],
        ["tree", "p-1"],
        ["workers"],
        ["db", "info"],
        ["doctor"],
        ["list", "--limit", "1"],
    ],
    ids=" ".join,
)
def test_no_line_is_longer_than_the_terminal(busy, environ, tmp_path, width, args):
    code, text = see(args, width, environ, tmp_path)

    # A path is never cut: a user who copies it needs it whole.
    lines = [line for line in plain(text).splitlines() if str(tmp_path) not in line]
    assert code == 0
    assert lines
    assert max(map(len, lines)) <= width, [line for line in lines if len(line) > width]


def test_a_wide_terminal_shows_more_columns(busy, environ, tmp_path):
    _, narrow = see(["list"], 80, environ, tmp_path)
    _, wide = see(["list"], 140, environ, tmp_path)

    assert plain(narrow).splitlines()[0].split() == ["STATUS", "NAME", "ID", "STARTED", "NOW"]
    assert "VERSION" in plain(wide)
    assert "TOOK" in plain(wide)


def test_long_ids_leave_room_for_what_an_instance_is_doing(sqlite_cli, environ, tmp_path):
    sqlite_cli("start", "hello", "--input", '"ann"')
    (found,) = sqlite_cli("list", "-o", "ids").lines

    for width in (70, 80, 100, 140):
        _, text = see(["list"], width, environ, tmp_path)
        assert f"{found} " in plain(text)
        assert "Waiting " in plain(text)
    assert "VERSION" in plain(text)


def test_ids_are_never_cut(busy, environ, tmp_path):
    _, text = see(["list"], 80, environ, tmp_path)

    assert "p-1::1.2" in plain(text)


def test_next_steps_name_the_store_that_was_named(busy, environ, tmp_path):
    store = environ.pop("PERDURE_STORE")
    _, text = see(["show", "a-1", "--store", store], 200, environ, tmp_path)

    assert f"perdure watch a-1 --store {store}" in plain(text)


def test_a_terminal_gets_colours_and_next_steps_and_a_pipe_gets_neither(busy, environ, tmp_path):
    _, text = see(["show", "a-1"], 80, environ, tmp_path)
    piped = busy("show", "a-1").out

    assert "\x1b[" in text
    assert "next: perdure send a-1 answer --data JSON" in plain(text)
    assert "\x1b" not in piped
    assert "next:" not in piped


def test_an_instance_whose_start_cannot_be_read_says_how_to_go_on(sqlite_cli, environ, tmp_path):
    sqlite_cli("start", "hello", "--id", "b-1", "--input", "5")
    sqlite_cli.run(("b-1", flows.hello, "the first start counts"))

    _, shown = see(["show", "b-1"], 80, environ, tmp_path)
    _, history = see(["history", "b-1"], 80, environ, tmp_path)

    assert "Expected `str`, got `int`" in plain(shown)
    assert "perdure rerun b-1 --input JSON" in plain(shown)
    assert "no event yet" in plain(history)


def test_no_color_is_respected(busy, environ, tmp_path):
    _, text = see(["list"], 80, environ, tmp_path, colours=False)

    assert "STATUS" in text
    assert not COLOUR.search(text)


def test_watching_an_instance_ends_with_its_end(busy, environ, tmp_path):
    finisher = threading.Thread(target=finish, args=("store.db", "a-1"))
    finisher.start()

    code, text = see(["watch", "a-1"], 80, environ, tmp_path)
    finisher.join()

    assert code == 0
    assert "Completed in" in plain(text)
    assert '"1: yes"' in plain(text)


def finish(store, instance_id):
    async def main():
        async with Runtime(store, [flows]) as runtime:
            await runtime.raise_event(instance_id, "answer", "yes")
            await runtime.get(instance_id).result(timeout=HANG_SECONDS)

    asyncio.run(main())


def test_watching_in_a_pipe_prints_a_line_for_each_change(busy):
    finish("store.db", "a-1")

    answer = busy("watch", "a-1")
    failed = busy("watch", "f-1", code=4)

    assert answer.lines == [f"completed: {busy('show', 'a-1', '-o', 'json').json['sentence']}"]
    assert failed.out.startswith("failed: Failed after")


def test_a_query_is_confirmed_in_a_terminal(busy, environ, tmp_path):
    command = ["terminate", "--query", "status:open"]

    code, text = see(command, 80, environ, tmp_path, answers=b"n\n")

    assert code == 0
    assert "terminate 2 instances" in plain(text)
    assert "nothing was done" in plain(text)
    assert busy("count", "status:open").out == "2\n"


def test_pruning_is_left_alone_by_a_no(busy, environ, tmp_path):
    busy.run(("f-9", flows.failing_at_once, "boom"))
    busy("retry", "f-9")
    busy.run(("f-9", flows.failing_at_once, "boom"))

    code, text = see(["db", "prune", "--keep-last", "1"], 80, environ, tmp_path, answers=b"n\n")

    assert code == 0
    assert "nothing was done" in plain(text)
    assert (
        busy("db", "prune", "--keep-last", "1", "--dry-run", "-o", "json").json["executions"] == 1
    )


@pytest.mark.parametrize(
    "args", [["db", "check"], ["export", "--query", "status:ended", "--file", "x"]]
)
def test_a_long_command_shows_its_progress_and_removes_it(busy, environ, tmp_path, args):
    code, seen = see(args, 80, environ, tmp_path)

    assert code == 0
    assert re.search(r"\[[#.]{20}\] \d+ of \d+ instances", seen)
    assert "of" not in plain(seen.rpartition("\x1b[K")[2])
