"""``perdure schedule``: schedules that a worker declares and an operator controls."""

import asyncio

import pytest

from integration.conditions import until
from perdure import Runtime, Schedule, orchestration


@orchestration
async def report(city: str) -> str:
    return city


SCHEDULES = [
    Schedule("nightly", report, "Berlin", cron="30 2 * * mon-fri", zone="Europe/Berlin"),
    Schedule("hourly", report, "Rome", every=3600, jitter=60, pause_after_failures=3),
]


@pytest.fixture
def scheduled(cli):
    work(cli)
    return cli


def work(cli, schedules=SCHEDULES, seen=None):
    """Let a worker run until it has taken up its schedules and what was sent to them."""

    async def run():
        async with Runtime(cli.store, [report], schedules=schedules) as runtime:

            async def is_settled():
                found = await runtime.schedules.list()
                return len(found) == 2 and all(map(seen or bool, found))

            await until(is_settled)

    asyncio.run(run())


def test_list_shows_rhythm_next_slot_and_notes(scheduled):
    table = scheduled("schedule", "list").lines

    assert table[0].split() == [
        "SCHEDULE", "ORCHESTRATION", "RHYTHM", "NEXT", "STARTED", "NOTE"
    ]  # fmt: skip
    assert "every 3600 s" in table[1]
    assert "30 2 * * mon-fri Europe/Berlin" in table[2]
    assert scheduled("schedule", "list", "-o", "ids").lines == ["hourly", "nightly"]
    documents = scheduled("schedule", "list", "-o", "json").json
    assert [each["spec"]["args"] for each in documents] == [["Rome"], ["Berlin"]]
    assert all(each["next"].endswith("Z") for each in documents)


def test_a_store_without_schedules_says_so(cli):
    cli.run()
    assert cli("schedule", "list", "-o", "json").json == []


def test_show_and_next(scheduled):
    shown = scheduled("schedule", "show", "hourly").out
    for text in ('report("Rome")', "every 3600 s", "skip", "latest", "3 failures"):
        assert text in shown
    coming = scheduled("schedule", "next", "nightly", "-n", 3, "-o", "json").json
    assert len(coming) == 3
    assert coming == sorted(coming)
    assert len(scheduled("schedule", "next", "hourly").lines) == 5


def test_pause_and_resume_take_effect_with_the_next_worker(scheduled):
    scheduled("schedule", "pause", "nightly", "--reason", "moving")
    work(scheduled, seen=lambda info: info.id != "nightly" or info.paused == "moving")
    assert "paused: moving" in scheduled("schedule", "list").out
    scheduled("schedule", "resume", "nightly")
    work(scheduled, seen=lambda info: info.paused is None)
    assert "paused" not in scheduled("schedule", "list").out


def test_what_waits_for_a_worker_says_so(scheduled):
    for args in (["pause", "nightly"], ["resume", "nightly"], ["trigger", "nightly"]):
        said = scheduled("schedule", *args).err
        assert said == "perdure: no worker is running: it takes effect when one runs\n"


def test_trigger_prints_the_id_of_the_instance(scheduled):
    name = scheduled("schedule", "trigger", "nightly").out.strip()
    assert name.startswith("nightly@20")
    work(scheduled, seen=lambda info: info.id != "nightly" or info.recent)
    assert scheduled("result", name).json == "Berlin"


def test_backfill_shows_and_then_starts(scheduled):
    backfill = ["schedule", "backfill", "hourly"]
    morning = ["--from", "2026-01-01T00:30Z", "--to", "2026-01-01T03:30Z"]
    assert len(scheduled(*backfill, *morning, "--dry-run").lines) == 3
    assert "add -y" in scheduled(*backfill, *morning, code=2).err
    scheduled(*backfill, *morning, "-y")
    work(scheduled, seen=lambda info: info.id != "hourly" or len(info.recent) == 3)
    assert scheduled(*backfill, *morning, "--dry-run").lines == []


def test_remove_leaves_the_instances(scheduled):
    name = scheduled("schedule", "trigger", "nightly").out.strip()
    work(scheduled, seen=lambda info: info.id != "nightly" or info.recent)
    answer = scheduled("schedule", "remove", "nightly", "-y")
    assert "creates it again" in answer.err
    assert scheduled("schedule", "list", "-o", "ids").lines == ["hourly"]
    assert scheduled("result", name).json == "Berlin"


def test_an_unknown_id_and_one_of_something_else_are_refused(scheduled):
    assert "no schedule 'nix'" in scheduled("schedule", "pause", "nix", code=3).err
    name = scheduled("schedule", "trigger", "nightly").out.strip()
    work(scheduled, seen=lambda info: info.id != "nightly" or info.recent)
    assert "not a schedule" in scheduled("schedule", "show", name, code=2).err


def test_a_worker_declares_the_schedules_of_its_module(tmp_path, monkeypatch):
    from perdure.cli.modules import load_schedules

    monkeypatch.chdir(tmp_path)
    (tmp_path / "timed_flows.py").write_text(
        "from perdure import Schedule, orchestration\n"
        "@orchestration\n"
        "async def tick() -> None: ...\n"
        "one = Schedule('one', tick, every=60)\n"
        "MORE = [Schedule('two', tick, every=60), one]\n"
    )
    assert sorted(each.id for each in load_schedules(["timed_flows.py"])) == ["one", "two"]
