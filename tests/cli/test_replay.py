"""``perdure replay``: the gate before a deploy."""

import asyncio
import sys
import textwrap

import pytest

from cli import flows
from cli.conftest import FLOWS
from cli.test_promise_commands import asks
from integration.conditions import until
from perdure import InstanceQuery, Runtime, Schedule, Status
from perdure.authoring.communication import request_id
from perdure.cli.modules import load_code

OLD = """
    import asyncio
    from perdure import activity, orchestration, wait_for_event

    @activity
    def charge(order: str) -> str:
        return order

    @orchestration
    async def order(number: str, kind: str) -> str:
        if kind == "rare":
            await charge(number)
        await wait_for_event("go", str)
        return number
    """
NEW = OLD.replace("            await charge(number)\n", "            await asyncio.sleep(60)\n")


def write(tmp_path, name, source):
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    return name


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a version of the user's code and forgets the one that was loaded before."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def make(source):
        name = f"orders_{len(written)}_{id(tmp_path)}"
        written.append(name)
        return write(tmp_path, name, source)

    yield make
    for name in written:
        sys.modules.pop(name, None)


def run_in_flight(store, module_name, count, rare):
    """Leave ``count`` instances waiting; those in ``rare`` took the other way."""
    __import__(module_name)
    code = sys.modules[module_name]

    async def main():
        async with Runtime(store, [code]) as runtime:
            pairs = [
                (f"o-{number}", (f"o-{number}", "rare" if number in rare else "usual"))
                for number in range(count)
            ]
            await runtime.start_many(code.order, pairs)

            async def all_wait():
                running = InstanceQuery(statuses=frozenset({Status.RUNNING}))
                if await runtime.admin.count(running) < count:
                    return False
                waits = [(await runtime.describe(f"o-{number}")).waiting_for for number in rare]
                return all(steps and steps[0].kind == "event" for steps in waits)

            await until(all_wait, 60)

    asyncio.run(main())


def test_what_perdure_itself_runs_is_replayed_with_its_own_code(sqlite_cli):
    every_hour = Schedule("report", flows.hello, "ann", every=3600)

    async def main():
        async with Runtime("store.db", [asks], schedules=[every_hour]) as runtime:
            await runtime.start(asks, "approval", id="o-1")

            async def is_awaited():
                return [each.awaited_by async for each in runtime.promises()] == [("o-1",)]

            async def has_a_next_slot():
                return (await runtime.describe("report")).custom_status is not None

            await until(is_awaited)
            await until(has_a_next_slot)
            request = asyncio.create_task(runtime.get("o-1").ask("nothing", id="r-1"))
            await until(lambda: _has_begun(runtime, request_id("r-1")))
            request.cancel()
            await asyncio.wait([request])
            return {name for name, _ in runtime.registry.orchestration_keys if "perdure." in name}

    own = asyncio.run(main())
    registry, _ = load_code(["cli.test_promise_commands"], "perdure replay")

    assert own <= {name for name, _ in registry.orchestration_keys}
    found = sqlite_cli("replay", "cli.test_promise_commands", "-o", "jsonl").jsonl
    assert {each["name"] for each in found} == {"asks", *own}
    assert {each["verdict"] for each in found} == {"ok"}


async def _has_begun(runtime, instance_id):
    return any(each.id == instance_id for each in (await runtime.admin.page())[0])


def test_one_planted_divergence_among_a_thousand_is_named(sqlite_cli, module):
    run_in_flight("store.db", module(OLD), 1000, {712})

    answer = sqlite_cli("replay", module(NEW), code=1)

    assert answer.lines[0] == "1000 histories · 999 ok · 1 diverges"
    assert "o-712 at event 2" in answer.lines[1]
    (line,) = [
        n for n, text in enumerate(textwrap.dedent(NEW).splitlines(), 1) if "sleep(60)" in text
    ]
    assert f".py:{line}" in answer.lines[1]
    assert "activity charge" in answer.lines[2]
    assert "timer" in answer.lines[3]


def test_unchanged_code_passes(cli):
    cli.run(("a-1", flows.approval, 1), ("b-1", flows.branches), until_open={"a-1", "b-1"})

    assert cli("replay", FLOWS).lines == ["2 histories · 2 ok"]


def test_the_finding_as_json_has_event_and_both_sides(cli, module):
    run_in_flight(cli.store, module(OLD), 2, {1})

    document = cli("replay", module(NEW), "-o", "json", code=1).json

    (problem,) = document["problems"]
    assert document["verdicts"] == {"ok": 1, "diverges": 1}
    assert problem["instance_id"] == "o-1"
    assert problem["event_id"] == 2
    assert problem["site"].count(":") == 1
    assert "charge" in problem["recorded"]
    assert "What to do" in problem["report"]


def test_the_report_can_be_printed_whole(cli, module):
    run_in_flight(cli.store, module(OLD), 1, {0})

    assert "What to do" in cli("replay", module(NEW), "o-0", "--report", code=1).out


def test_code_that_is_gone_is_a_finding(cli, module):
    run_in_flight(cli.store, module(OLD), 1, set())

    answer = cli("replay", FLOWS, code=1)

    assert answer.lines[0] == "1 history · 1 no code"
    assert "'order' is not registered" in answer.out


def test_a_recorded_history_in_a_file_is_replayed_without_a_store(cli, module, tmp_path):
    run_in_flight(cli.store, module(OLD), 1, {0})
    (tmp_path / "o-0.jsonl").write_text(cli("history", "o-0", "-o", "jsonl").out)
    cli.store = "elsewhere.db"

    assert cli("replay", module(OLD), "o-0.jsonl").lines == ["1 history · 1 ok"]
    assert "o-0 at event 2" in cli("replay", module(NEW), "o-0.jsonl", code=1).out


@pytest.mark.parametrize("content", ["{}", "not json", '{"type":"OrchestrationStarted"}'])
def test_a_file_without_a_history_is_a_usage_error(sqlite_cli, tmp_path, content):
    (tmp_path / "bad.jsonl").write_text(content)

    assert "bad.jsonl" in sqlite_cli("replay", FLOWS, "bad.jsonl", code=2).err


def test_a_missing_file_is_a_usage_error(sqlite_cli):
    assert "No such file" in sqlite_cli("replay", FLOWS, "missing.jsonl", code=2).err


def test_ended_instances_are_replayed_when_named(cli):
    cli.run(("h-1", flows.hello, "ann"), ("f-1", flows.failing, "boom"))

    assert cli("replay", FLOWS, "h-1", "f-1").lines == ["2 histories · 2 ok"]
    assert cli("replay", "--query", "status:ended", FLOWS).lines == ["2 histories · 2 ok"]


def test_pending_instances_have_nothing_to_diverge_from(cli):
    cli("start", "hello", "--id", "h-1", "--input", '"ann"')

    assert cli("replay", FLOWS).lines == ["0 histories"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "there is no module"),
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("def f(:", "SyntaxError"),
        ("x = 1", "defines no handler"),
    ],
)
def test_a_module_that_cannot_be_used_is_one_line(sqlite_cli, module, source, said):
    name = "nowhere_at_all" if source is None else module(source)

    answer = sqlite_cli("replay", name, code=2)

    assert said in answer.err
    assert answer.err.count("\n") == 1
