"""``retry``, ``rerun`` and ``diff``: what failed or was blocked, once more."""

import json

import pytest

from cli import flows
from cli.conftest import FLOWS
from perdure.model.failures import Block, BlockReason
from perdure.providers.records import OrchestrationFilter


def status_of(cli, instance_id):
    return cli("show", instance_id, "-o", "json").json["status"]


def block(cli, instance_id):
    async def park(client):
        admin = client.provider.admin
        fetched = await admin.lock_instance(instance_id, 1000)
        reason = Block(reason=BlockReason.NONDETERMINISM, message="the code changed", since_ms=1)
        await client.provider.abandon_orchestration_item(
            fetched.lock_token, 365 * 86_400_000, block=reason
        )

    cli.call(park)


def test_retry_lets_a_blocked_instance_go_on(cli):
    cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    block(cli, "a-1")
    blocked = cli("show", "a-1", "-o", "json").json

    cli("retry", "a-1")
    cli("send", "a-1", "answer", "--data", '"yes"')
    cli.run(("a-1", flows.approval, 1))

    assert blocked["status"] == "Blocked"
    assert blocked["sentence"].startswith("Blocked for")
    assert status_of(cli, "a-1") == "Completed"


def test_retry_lets_a_failed_instance_go_on_in_its_execution(cli):
    cli.run(("f-1", flows.failing, "boom"))

    said = cli("retry", "f-1").out
    alive = status_of(cli, "f-1")
    checked = cli("db", "check", "-o", "json").json
    cli.run(("h-1", flows.hello, "x"), ("f-1", flows.failing, "boom"))

    document = cli("show", "f-1", "-o", "json").json
    kinds = [event["type"] for event in cli("history", "f-1", "-o", "json").json]
    assert "retried f-1: goes on, 1 finished step stays finished; again: fail" in said
    assert alive == "Running"
    assert checked == {"instances_checked": 1, "damages": []}
    assert (document["status"], document["execution"]) == ("Failed", 1)
    assert kinds.count("ActivityScheduled") == 2
    assert kinds[-3:] == ["OrchestrationRetried", "ActivityFailed", "OrchestrationFailed"]
    assert "the turns after turn 2 are undone" in cli("history", "f-1").out
    assert cli("db", "check").code == 0


def test_retry_leaves_out_an_event_that_does_not_fit(cli):
    cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    cli("send", "a-1", "answer", "--data", "7")
    cli.run(("a-1", flows.approval, 1))

    said = cli("retry", "a-1").out
    cli.run(("a-1", flows.approval, 1))
    failed_again = status_of(cli, "a-1")
    said_without = cli("retry", "a-1", "--leave-out", "answer").out
    cli("send", "a-1", "answer", "--data", '"yes"')
    cli.run(("a-1", flows.approval, 1))

    assert "receives again: answer (without it, if it does not fit: --leave-out answer)" in said
    assert failed_again == "Failed"
    assert "receives again" not in said_without
    assert cli("result", "a-1").out.strip() == '"1: yes"'
    assert cli("db", "check").code == 0


def test_a_retried_instance_moves_to_another_store(cli, tmp_path):
    cli.run(("f-1", flows.failing, "boom"))
    cli("retry", "f-1")
    moved = type(cli)(tmp_path / "other.db")

    moved("import", "-", stdin=cli("export", "f-1").out)
    moved.run(("f-1", flows.failing, "boom"))

    kinds = [event["type"] for event in moved("history", "f-1", "-o", "json").json]
    assert kinds[-3:] == ["OrchestrationRetried", "ActivityFailed", "OrchestrationFailed"]


def test_rerun_says_how_many_steps_run_again(cli):
    cli.run(("f-1", flows.failing, "boom"))

    assert "1 finished step runs again" in cli("rerun", "f-1", "--id", "f-2").out
    scheduled = [
        event["event_id"]
        for event in cli("history", "f-1", "-o", "json").json
        if event["type"] == "ActivityScheduled"
    ]
    first, second = (
        cli("rerun", "f-1", "--id", f"f-{n}", "--from-event", event, "-o", "json").json
        for n, event in enumerate(scheduled, 3)
    )
    assert (first["steps_again"], second["steps_again"]) == (1, 0)


def test_an_instance_takes_events_as_soon_as_it_was_retried(cli):
    cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    cli("terminate", "a-1")

    cli("retry", "a-1")
    cli("send", "a-1", "answer", "--data", '"yes"')
    cli.run(("a-1", flows.approval, 1))

    assert cli("result", "a-1").out.strip() == '"1: yes"'


@pytest.mark.parametrize(("ends", "said"), [(True, "rerun it"), (False, "nothing to retry")])
def test_retry_of_what_needs_none_is_refused(cli, ends, said):
    if ends:
        cli.run(("x-1", flows.hello, "ann"))
    else:
        cli.run(("x-1", flows.approval, 1), until_open={"x-1"})

    assert said in cli("retry", "x-1", code=6).err


def test_retry_by_query_takes_blocked_and_failed_only(cli):
    cli.run(
        ("a-1", flows.approval, 1),
        ("f-1", flows.failing, "boom"),
        ("h-1", flows.hello, "ann"),
        until_open={"a-1"},
    )
    block(cli, "a-1")

    preview = cli("retry", "--query", "created:<1h", "--dry-run", "-o", "json").json
    cli("retry", "--query", "created:<1h", "-y")

    assert sorted(preview["ids"]) == ["a-1", "f-1"]
    assert status_of(cli, "a-1") == status_of(cli, "f-1") == "Running"


def test_rerun_starts_the_same_input_under_a_new_id(cli):
    cli.run(("h-1", flows.hello, "ann"))

    (new_id,) = cli("rerun", "h-1", "-o", "ids").lines
    cli.run(("h-2", flows.hello, "x"), (new_id, flows.hello, "ann"))

    assert new_id.startswith("h-1-rerun-")
    assert cli("result", new_id).out.strip() == '"hello ann"'
    assert status_of(cli, "h-1") == "Completed"


def test_rerun_with_other_arguments_and_a_chosen_id(cli):
    cli.run(("h-1", flows.hello, "ann"))

    cli("rerun", "h-1", "--id", "h-9", "--input", '["bob"]')
    cli.run(("h-2", flows.hello, "x"), ("h-9", flows.hello, "bob"))

    assert cli("result", "h-9").out.strip() == '"hello bob"'


def test_rerun_refuses_an_id_in_use(cli):
    cli.run(("h-1", flows.hello, "ann"))

    assert "exists already" in cli("rerun", "h-1", "--id", "h-1", code=6).err


def test_rerun_of_an_instance_that_has_not_begun(cli):
    cli("start", "hello", "--id", "h-1", "--input", '"ann"')

    cli("rerun", "h-1", "--id", "h-2")
    cli.run(("h-2", flows.hello, "ann"))

    assert cli("result", "h-2").out.strip() == '"hello ann"'


def test_rerun_from_an_event_keeps_the_past_and_asks_again_for_what_was_open(cli):
    cli.run(("f-1", flows.failing, "boom"))
    (scheduled,) = [
        event["event_id"]
        for event in cli("history", "f-1", "-o", "json").json
        if event.get("name") == "fail"
    ]

    kept = cli("rerun", "f-1", "--id", "f-2", "--from-event", scheduled, "-o", "json").json
    before = cli("history", "f-2", "-o", "json").json
    cli.run(("h-1", flows.hello, "x"), ("f-2", flows.failing, "boom"))

    history = cli("history", "f-2", "-o", "json").json
    assert kept["events_kept"] == len(before) == scheduled
    assert {event["instance_id"] for event in history} == {"f-2"}
    assert [event["type"] for event in history[scheduled:]] == [
        "ActivityFailed",
        "OrchestrationFailed",
    ]


def test_rerun_from_an_event_starts_open_children_under_ids_of_their_own(cli):
    cli.run(("p-1", flows.parent_of_waiting), until_open={"p-1", "p-1::1.2"})

    cli("rerun", "p-1", "--id", "p-2", "--from-event", "2")
    cli.run(
        ("h-1", flows.hello, "x"),
        ("p-2", flows.parent_of_waiting),
        until_open={"p-2", "p-2::1.2"},
    )
    (child,) = cli("tree", "p-2", "-o", "json").json["children"]
    cli("send", child["id"], "answer", "--data", '"yes"')
    cli.run(("p-2", flows.parent_of_waiting))

    assert child["id"] == "p-2::1.2"
    assert cli("result", "p-2").out.strip() == '"7: yes"'
    assert status_of(cli, "p-1") == "Running"


def test_rerun_from_an_event_keeps_state_status_and_timers(cli):
    cli.run(("a-1", flows.approval, 5), until_open={"a-1"})
    last = len(cli("history", "a-1", "-o", "json").json)

    cli("rerun", "a-1", "--id", "a-2", "--from-event", last)

    async def read(client):
        timers = await client.provider.admin.list_messages("a-2")
        return await client.state("a-2", "number"), [m.message.kind for m in timers]

    assert cli.call(read) == (5, ["TimerFired"])
    assert cli("show", "a-2", "-o", "json").json["custom_status"] == "waiting for approval"
    cli("send", "a-2", "answer", "--data", '"again"')
    cli.run(("a-2", flows.approval, 5))
    assert cli("result", "a-2").out.strip() == '"5: again"'


def test_rerun_from_an_event_gives_activities_their_retries_back_from_the_code(cli):
    cli.run(("r-1", flows.retrying), until_open={"r-1"})
    cli("terminate", "r-1")

    cli("rerun", "r-1", "--id", "r-2", "--from-event", "2", "-m", FLOWS)

    async def retry_plan(client):
        (queued,) = await client.provider.admin.list_work("r-2")
        return json.loads(queued.message.body)["retry"]["max_attempts"]

    assert cli.call(retry_plan) == 5


@pytest.mark.parametrize(
    ("event", "said"), [("99", "has no event 99"), ("4", "choose an event before 3")]
)
def test_rerun_from_an_event_that_leaves_nothing_to_do_is_refused(cli, event, said):
    cli.run(("h-1", flows.hello, "ann"))

    assert said in cli("rerun", "h-1", "--from-event", event, code=2).err


def test_rerun_from_an_event_keeps_input_and_version(sqlite_cli):
    sqlite_cli.run(("h-1", flows.hello, "ann"))

    assert (
        "keeps input" in sqlite_cli("rerun", "h-1", "--from-event", 2, "--input", "1", code=2).err
    )


def test_diff_says_where_two_instances_part(cli):
    cli.run(("h-1", flows.hello, "ann"), ("h-2", flows.hello, "bob"), ("h-3", flows.hello, "ann"))

    different = cli("diff", "h-1", "h-2")
    same = cli("diff", "h-1", "h-3", "-o", "json").json

    assert '- input    hello@1.0.0 ["ann"]  ← here they part' in different.lines
    assert '+ input    hello@1.0.0 ["bob"]' in different.lines
    assert same["same"] is True
    assert cli("diff", "h-1", "h-2", "--exit-code", code=1)
    assert "no difference" in cli("diff", "h-1", "h-3", "--exit-code").out


def test_diff_of_two_executions_of_one_instance(cli):
    cli.run(("l-1", flows.rounds, 1), until_open={"l-1"})
    cli("send", "l-1", "go", "--data", '""')
    cli("send", "l-1", "go", "--data", '""')
    cli.run(("l-1", flows.rounds, 1))

    assert "here they part" in cli("diff", "l-1#1", "l-1#2").out
    assert "no difference" in cli("diff", "l-1#1", "l-1#1").out
    assert "has no execution 9" in cli("diff", "l-1#1", "l-1#9", code=3).err


def test_an_instance_that_was_retried_is_offered_to_workers(cli):
    cli.run(("f-1", flows.failing, "boom"))
    cli("retry", "f-1")

    async def fetch(client):
        handlers = frozenset({("failing", "1.0.0")})
        return await client.provider.fetch_orchestration_item(
            1000, 0, OrchestrationFilter(handlers=handlers)
        )

    assert cli.call(fetch).item.instance_id == "f-1"
