"""The commands about one instance: ``show``, ``history``, ``tree``, ``stack``, ``result``."""

import json
import re
from pathlib import Path

import pytest

from cli import flows
from cli.conftest import FLOWS
from integration.conditions import reached
from perdure import Runtime, RuntimeOptions, Status, activity, orchestration
from perdure.limits import HISTORY_EVENTS_WARN
from perdure.model import events, wire
from perdure.providers.records import HistoryRecord


def test_show_of_a_waiting_instance_says_for_what_and_how_long(cli):
    cli.run(("a-1", flows.approval, 1), until_open={"a-1"})

    shown = cli("show", "a-1")

    assert re.search(r"Waiting \S+ for event 'answer'; times out in 23h", shown.out)
    assert '"waiting for approval"' in shown.out
    assert '✓ greet("1")' in shown.out
    assert '▷ wait_for_event("answer")' in shown.out


def test_raw_events_are_lines_and_no_document(cli):
    cli.run(("h-1", flows.hello, "ann"))

    assert cli("history", "h-1", "--raw").out == cli("history", "h-1", "-o", "jsonl").out
    assert "leave out -o json" in cli("history", "h-1", "--raw", "-o", "json", code=2).err


def test_times_count_from_the_beginning_also_where_that_is_not_shown(cli):
    cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    whole = cli("history", "a-1").lines
    part = cli("history", "a-1", "--type", "ExternalSubscribed").lines

    assert part == [line for line in whole if "ExternalSubscribed" in line]


def test_show_of_a_failed_instance_has_the_error_and_the_traceback(cli):
    cli.run(("f-1", flows.failing, "boom"))

    shown = cli("show", "f-1").out

    assert "Failed after" in shown
    assert '✗ fail("boom")' in shown
    assert "ValueError: boom" in shown
    assert "flows.py" in shown


@activity(name="greet")
async def wrong_greet(name: str) -> int:
    return len(name)


def test_show_of_data_that_does_not_fit_says_what_to_do(sqlite_cli):
    async def answer_with_a_number(client):
        await client.start(flows.hello, "ann", id="h-1")
        lone = RuntimeOptions(run_activities=False)
        async with (
            Runtime(sqlite_cli.store, [flows], options=lone) as orchestrator,
            Runtime(sqlite_cli.store, [wrong_greet]),
        ):
            await reached(orchestrator, "h-1", Status.BLOCKED)

    sqlite_cli.call(answer_with_a_number)
    shown = sqlite_cli("show", "h-1").out

    assert "Expected `str`, got `int`" in shown
    assert "let the annotation or the type in the code fit it, and deploy" in shown
    assert "ended, not taken up yet" in shown


@orchestration
async def count_names(names: list[str]) -> int:
    return len(names)


def test_show_of_a_start_with_wrong_arguments_says_how_to_start_it_again(sqlite_cli):
    async def run_until(status):
        async with Runtime(sqlite_cli.store, [count_names]) as runtime:
            await reached(runtime, "c-1", status)

    sqlite_cli("start", "count_names", "--id", "c-1", "--input", '["ann"]')
    sqlite_cli.call(lambda _: run_until(Status.BLOCKED))
    shown = sqlite_cli("show", "c-1").out

    assert "perdure start count_names --id c-1 --if-exists replace --input JSON" in shown

    again = ("--if-exists", "replace", "--input", '[["ann"]]')
    sqlite_cli("start", "count_names", "--id", "c-1", *again)
    sqlite_cli.call(lambda _: run_until(Status.COMPLETED))


def test_show_of_a_retried_activity_names_attempt_and_error(cli):
    cli.run(("r-1", flows.retrying), until_open={"r-1"})

    document = cli("show", "r-1", "-o", "json").json

    assert document["doing"] == "retrying"
    assert re.match(r"Retrying flaky: attempt 2 of 5 in (59m|1h)", document["sentence"])
    assert "ConnectionError: nobody answers" in document["sentence"]
    assert document["attempts"][0]["number"] == 2


def test_show_of_a_sleeping_instance_says_when_it_wakes(cli):
    cli.run(("s-1", flows.sleeper, 7200), until_open={"s-1"})

    assert re.search(r"Sleeping, wakes up in (1h 59m|2h)", cli("show", "s-1").out)


def test_show_of_a_pending_instance_says_that_nobody_works(cli):
    cli("start", "hello", "--id", "h-1", "--input", '"ann"')

    assert "for a worker; no worker is running" in cli("show", "h-1").out


def test_show_of_a_delayed_start_says_when(cli):
    cli("start", "hello", "--id", "h-1", "--input", '"ann"', "--in", "2h")

    assert re.search(r"Starts in (1h 59m|2h)", cli("show", "h-1").out)


def test_show_of_a_paused_instance(cli):
    cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    cli("pause", "a-1")

    assert "Paused" in cli("show", "a-1").out


def test_show_of_an_instance_that_was_paused_before_it_began(cli):
    cli("start", "hello", "--id", "h-1", "--input", '"ann"')
    cli("pause", "h-1")

    assert "Paused" in cli("show", "h-1").out
    assert "paused" in cli("list").out


def test_show_folds_a_wide_fan_out_into_one_line(cli):
    cli.run(("w-1", flows.fan_out, 50))

    folded = [line for line in cli("show", "w-1").lines if "greet" in line]
    whole = [line for line in cli("show", "w-1", "--all").lines if "greet" in line]

    assert len(folded) == 1
    assert "50 x greet" in folded[0]
    assert "50 done" in folded[0]
    assert len(whole) == 50


def test_show_as_json_has_the_steps_and_the_input(cli):
    cli.run(("h-1", flows.hello, "ann"))

    document = cli("show", "h-1", "-o", "json").json

    assert document["input"] == ["ann"]
    assert document["output"] == "hello ann"
    (step,) = document["steps"]
    assert step["call"] == 'greet("ann")'
    assert step["state"] == "done"
    assert step["result"] == '"hello ann"'
    assert step["site"].startswith("cli/flows.py:")


def test_show_of_an_unreadable_history_says_so_instead_of_failing(sqlite_cli):
    sqlite_cli.run(("a-1", flows.approval, 1), until_open={"a-1"})

    async def damage(client):
        record = HistoryRecord(event_id=99, data='{"type":"FromTheFuture"}')
        await client.provider.append_with_execution("a-1", 1, [record])

    sqlite_cli.call(damage)

    assert "cannot be read" in sqlite_cli("show", "a-1").out
    assert sqlite_cli("history", "a-1").lines[-1].startswith("   99  unreadable")
    assert sqlite_cli("list").code == 0


def test_show_of_a_long_history_says_how_to_begin_a_fresh_one(sqlite_cli):
    sqlite_cli.run(("a-1", flows.approval, 1), until_open={"a-1"})

    async def lengthen(client):
        more = [HistoryRecord(event_id=n, data="{}") for n in range(20, HISTORY_EVENTS_WARN + 20)]
        await client.provider.append_with_execution("a-1", 1, more)

    assert "continue_as_new" not in sqlite_cli("show", "a-1").out
    sqlite_cli.call(lengthen)
    assert "continue_as_new() starts a fresh one" in sqlite_cli("show", "a-1").out


def test_history_prints_every_event_in_order(cli):
    cli.run(("h-1", flows.hello, "ann"))

    kinds = [line.split()[2] for line in cli("history", "h-1").lines]

    assert kinds == [
        "OrchestrationStarted",
        "ActivityScheduled",
        "ActivityCompleted",
        "OrchestrationCompleted",
    ]


def test_history_as_jsonl_is_what_replay_takes(cli):
    cli.run(("h-1", flows.hello, "ann"))

    history = list(map(wire.decode_event, cli("history", "h-1", "-o", "jsonl").lines))

    assert isinstance(history[0], events.OrchestrationStarted)
    assert len(cli("history", "h-1", "-o", "json").json) == len(history) == 4


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--type", "activity"], 4),
        (["--failed"], 2),
        (["--grep", "boom.*flows"], 2),
        (["--failed", "--type", "Orchestration"], 1),
        (["--grep", "nowhere"], 0),
    ],
)
def test_history_can_be_filtered(cli, options, count):
    cli.run(("f-1", flows.failing, "boom"))

    assert len(cli("history", "f-1", "-o", "json", *options).json) == count


def test_history_of_another_execution(cli):
    cli.run(("f-1", flows.failing, "boom"))
    cli("retry", "f-1")
    cli.run(("h-1", flows.hello, "wait for it"))

    first = cli("history", "f-1", "--execution", "1", "-o", "json").json

    assert {event["execution_id"] for event in first} == {1}
    assert cli("history", "f-1", "--execution", "9", code=3).err.endswith("its latest is 1\n")


def test_a_history_longer_than_a_page_is_printed_whole(cli):
    cli.run(("w-1", flows.fan_out, 2200))

    ids = [int(line.split()[0]) for line in cli("history", "w-1").lines]

    assert ids == list(range(1, 4403))


def test_history_with_a_bad_pattern_is_a_usage_error(sqlite_cli):
    sqlite_cli("db", "migrate")

    assert "no regular expression" in sqlite_cli("history", "x", "--grep", "(", code=2).err


def test_tree_is_in_numeric_order_with_arguments_and_folds_many_alike(sqlite_cli):
    names = [f"n{number}" for number in range(12)]
    sqlite_cli.run(("p-1", flows.family, names))

    whole = sqlite_cli("tree", "p-1", "--all").lines
    folded = sqlite_cli("tree", "p-1").lines

    assert [line.split("hello(")[1].split(")")[0] for line in whole[1:]] == [
        f'"{name}"' for name in names
    ]
    assert len(folded) == 2
    assert "12 x hello" in folded[1]
    ids = sqlite_cli("tree", "p-1", "-o", "ids").lines
    assert ids == sorted(ids, key=lambda each: [int(n) for n in re.findall("[0-9]+", each)])


def test_tree_shows_children_below_their_parent(cli):
    cli.run(("p-1", flows.family, ["ann", "bob"]))

    lines = cli("tree", "p-1").lines

    assert lines[0].startswith('✓ family(["ann","bob"]) p-1')
    assert lines[1].startswith('├─ ✓ hello("ann") p-1::1.2')
    assert lines[2].startswith('└─ ✓ hello("bob") p-1::1.3')
    children = cli("tree", "p-1", "-o", "json").json["children"]
    assert [child["output"] for child in children] == ["hello ann", "hello bob"]
    assert len(cli("tree", "p-1", "-o", "ids").lines) == 3


def test_stack_names_file_line_source_and_locals_of_every_branch(cli):
    cli.run(("b-1", flows.branches), until_open={"b-1"})
    source = Path(flows.__file__).read_text().splitlines()

    document = cli("stack", "b-1", "-m", FLOWS, "-o", "json").json
    text = cli("stack", "b-1", "-m", FLOWS).out

    frames = [wait["frames"][-1] for wait in document]
    assert [frame["locals"]["marker"] for frame in frames] == [
        "'local of left'",
        "'local of right'",
    ]
    for frame in frames:
        assert frame["file"] == "cli/flows.py"
        assert "await wait_for_event(name, str)" in source[frame["line"] - 1]
    assert text.count("answer = await wait_for_event(name, str)") == 2
    assert "name = 'left'" in text


def test_stack_of_an_ended_instance_is_refused(cli):
    cli.run(("h-1", flows.hello, "ann"))

    assert "nothing waits" in cli("stack", "h-1", "-m", FLOWS, code=6).err


def test_stack_without_code_says_how_to_name_it(sqlite_cli):
    sqlite_cli.run(("a-1", flows.approval, 1), until_open={"a-1"})

    assert "perdure stack a-1 -m" in sqlite_cli("stack", "a-1", code=2).err


def test_result_prints_the_output_as_json(cli):
    cli.run(("h-1", flows.hello, "ann"))

    assert json.loads(cli("result", "h-1").out) == "hello ann"
    assert cli("result", "h-1", "-o", "json").json["output"] == "hello ann"


def test_result_of_a_failed_instance_is_exit_4_with_the_error_beside(cli):
    cli.run(("f-1", flows.failing, "boom"))

    plain = cli("result", "f-1", code=4)
    document = cli("result", "f-1", "-o", "json", code=4).json

    assert plain.out == ""
    assert "failing f-1 failed: ActivityFailed: activity 'fail': ValueError: boom" in plain.err
    assert document["failure"]["type_name"] == "ActivityFailed"


def test_result_that_takes_too_long_is_exit_5(cli):
    cli("start", "hello", "--id", "h-1", "--input", '"ann"')

    timed_out = cli("result", "h-1", "--timeout", "10ms", code=5)

    assert "has not ended in time" in timed_out.err
    assert "no worker is running" in timed_out.err


@pytest.mark.parametrize(
    "command", ["show", "history", "tree", "result", "watch", "cancel", "rerun", "purge", "retry"]
)
def test_an_unknown_id_is_exit_3_with_near_matches(cli, command):
    cli.run(("order-1234", flows.hello, "ann"))

    answer = cli(command, "ordr-1234", code=3)

    assert "did you mean 'order-1234'?" in answer.err
    assert answer.err.count("\n") == 1
    assert "Traceback" not in answer.err


def test_the_beginning_of_an_id_suggests_the_whole(cli):
    cli.run(("order-1234", flows.hello, "ann"))

    assert "did you mean 'order-1234'?" in cli("show", "order", code=3).err
