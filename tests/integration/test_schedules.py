"""Schedules: slots, overlaps, outages, pauses, edits and what an operator does with them."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from integration.conditions import until
from perdure import (
    Client,
    InMemoryProvider,
    Retry,
    Runtime,
    Schedule,
    Status,
    activity,
    continue_as_new,
    current,
    orchestration,
    wait_for_event,
)
from perdure.clock import ManualClock
from perdure.errors import AlreadyExists, InvalidValue, NotFound, PayloadError
from perdure.providers.records import InstanceQuery
from perdure.providers.sqlite.memory import MemoryStore
from perdure.testing import Environment

MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC)
MIDNIGHT_MS = round(MIDNIGHT.timestamp() * 1000)


def at_midnight():
    return ManualClock(MIDNIGHT_MS)


@orchestration
async def quick(name: str = "") -> str:
    due = current().scheduled_for
    return f"{name} {'' if due is None else due.isoformat()}"


@orchestration
async def slow(seconds: float) -> None:
    await asyncio.sleep(seconds)


@orchestration
async def fails() -> None:
    raise ValueError("no luck")


@orchestration
async def twice(left: int = 1) -> str:
    if left:
        continue_as_new(left - 1)
    return str(current().scheduled_for)


@orchestration
async def waits() -> int:
    return await wait_for_event("go", int)


HANDLERS = [quick, slow, fails, twice, waits]


async def started(client, schedule_id):
    """Return the slots for which instances exist, in order."""
    page = await client.provider.admin.list_instances(
        InstanceQuery(id_prefix=f"{schedule_id}@"), limit=1000
    )
    return sorted(info.instance_id.partition("@")[2] for info in page.instances)


async def test_a_slot_is_one_instance_that_knows_its_time(replays):
    nightly = Schedule("nightly", quick, "n", cron="30 2 * * *")
    async with Environment(
        HANDLERS, schedules=[nightly], clock=at_midnight(), always_replay=replays
    ) as env:
        await env.advance(timedelta(days=2))
        assert await started(env.runtime, "nightly") == ["2026-03-02T02:30Z", "2026-03-03T02:30Z"]
        result = await env.runtime.get("nightly@2026-03-02T02:30Z", quick).result()
        assert result == "n 2026-03-02T02:30:00+00:00"
        info = await env.runtime.schedules.describe("nightly")
    assert (info.started, info.skipped, info.is_declared) == (2, 0, True)
    assert info.next_at == datetime(2026, 3, 4, 2, 30, tzinfo=UTC)
    assert [run.status for run in info.recent] == ["Completed", "Completed"]


async def test_the_time_of_a_slot_stays_through_continue_as_new():
    async with Environment(
        HANDLERS, schedules=[Schedule("s", twice, cron="0 1 * * *")], clock=at_midnight()
    ) as env:
        await env.advance(timedelta(hours=2))
        result = await env.runtime.get("s@2026-03-02T01:00Z", twice).result()
    assert result == "2026-03-02 01:00:00+00:00"


async def test_an_interval_counts_from_1970():
    clock = ManualClock(MIDNIGHT_MS + 1234)
    async with Environment(
        HANDLERS, schedules=[Schedule("s", quick, every=timedelta(minutes=20))], clock=clock
    ) as env:
        await env.advance(timedelta(hours=1))
        assert await started(env.runtime, "s") == [
            "2026-03-02T00:20Z",
            "2026-03-02T00:40Z",
            "2026-03-02T01:00Z",
        ]


@pytest.mark.parametrize(
    ("overlap", "minutes", "skipped"),
    [
        ("skip", [10, 40, 70], 4),
        ("queue_one", [10, 20, 40], 3),
        ("queue_all", [10, 20, 30], 0),
        ("allow", [10, 20, 30, 40, 50, 60, 70], 0),
        ("cancel", [10, 20, 30, 40, 50, 60, 70], 0),
    ],
)
async def test_overlap(overlap, minutes, skipped, replays):
    """A slot each 10 minutes, and each instance takes 25: look at it after 75 minutes."""
    every = Schedule("s", slow, 25 * 60.0, every=600, overlap=overlap)
    async with Environment(
        HANDLERS, schedules=[every], clock=at_midnight(), always_replay=replays
    ) as env:
        await env.advance(timedelta(minutes=75))
        found = [
            int(each[11:13]) * 60 + int(each[14:16]) for each in await started(env.runtime, "s")
        ]
        info = await env.runtime.schedules.describe("s")
        statuses = {run.status for run in info.recent}
    assert (found, info.skipped) == (minutes, skipped)
    assert ("Cancelled" in statuses) == (overlap == "cancel")
    if overlap != "allow":
        assert len(info.running) == 1


async def outage(catch_up, hours, **options):
    """Run a schedule, let no worker run for some hours, and run it again."""
    clock = at_midnight()
    schedule = Schedule("s", quick, cron="0 * * * *", catch_up=catch_up, **options)
    store = MemoryStore(clock)
    settings = {"schedules": [schedule], "clock": clock}
    async with Environment(HANDLERS, provider=InMemoryProvider(store=store), **settings) as env:
        await env.advance(timedelta(minutes=90))
    clock.advance(hours * 3_600_000)
    async with Environment(HANDLERS, provider=InMemoryProvider(store=store), **settings) as env:
        await env.advance(timedelta(minutes=5))
        found = [
            int(each[8:10]) * 24 + int(each[11:13]) - 48 for each in await started(env.runtime, "s")
        ]
        return found, await env.runtime.schedules.describe("s")


@pytest.mark.parametrize(
    ("catch_up", "expected"), [("none", [1]), ("latest", [1, 6]), ("all", [1, 2, 3, 4, 5, 6])]
)
async def test_catching_up(catch_up, expected):
    found, info = await outage(catch_up, 5, overlap="allow")
    assert found == expected
    assert info.started + info.skipped == 6
    assert {run.reason for run in info.recent if run.status == "Skipped"} <= {"missed"}


async def test_catching_up_is_bounded():
    found, info = await outage("all", 24 * 20, overlap="allow")
    assert len(found) == 101
    assert info.started + info.skipped == 1 + 24 * 20


async def test_jitter_delays_the_start_and_not_the_slot():
    spread = Schedule("s", quick, cron="0 * * * *", jitter=600)
    async with Environment(HANDLERS, schedules=[spread], clock=at_midnight()) as env:
        await env.advance(timedelta(hours=6))
        page = await env.provider.admin.list_instances(InstanceQuery(id_prefix="s@"))
        delays = set()
        for info in page.instances:
            history = await env.runtime.history(info.instance_id)
            if not history:
                continue  # the last one waits for its delay
            delay = history[0].timestamp_ms - history[0].scheduled_for_ms
            assert history[0].scheduled_for_ms % 3_600_000 == 0
            delays.add(delay)
    assert len(delays) > 3
    assert all(0 <= delay <= 600_000 for delay in delays)


async def test_jitter_does_not_delay_what_was_asked_for_now():
    spread = Schedule("s", quick, cron="0 * * * *", jitter=600)
    async with Environment(HANDLERS, schedules=[spread], clock=at_midnight()) as env:
        hour_before = MIDNIGHT - timedelta(hours=1)
        handle = await env.runtime.schedules.trigger("s")
        await env.runtime.schedules.backfill("s", hour_before, hour_before)
        await env.advance(1)
        for name in (handle.id, "s@2026-03-01T23:00Z"):
            assert (await env.runtime.describe(name)).status is Status.COMPLETED


async def test_a_pause_skips_and_a_resume_goes_on(replays):
    hourly = Schedule("s", quick, cron="0 * * * *", catch_up="all")
    async with Environment(
        HANDLERS, schedules=[hourly], clock=at_midnight(), always_replay=replays
    ) as env:
        schedules = env.runtime.schedules
        await env.advance(timedelta(minutes=90))
        await schedules.pause("s", "moving house")
        await env.advance(timedelta(hours=2))
        info = await schedules.describe("s")
        assert (info.paused, info.next_at) == ("moving house", None)
        handle = await schedules.trigger("s")
        await env.settle()
        assert (await handle.result()).startswith(" 2026-03-02T03:30")
        await schedules.resume("s")
        await env.advance(timedelta(hours=1))
        info = await schedules.describe("s")
        slots = [each for each in await started(env.runtime, "s") if each.endswith(":00Z")]
    assert slots == ["2026-03-02T01:00Z", "2026-03-02T04:00Z"]
    assert [run.reason for run in info.recent if run.status == "Skipped"] == ["paused", "paused"]
    assert info.paused is None


async def test_failures_in_a_row_pause_it():
    hourly = Schedule("s", fails, cron="0 * * * *", pause_after_failures=3)
    async with Environment(HANDLERS, schedules=[hourly], clock=at_midnight()) as env:
        await env.advance(timedelta(hours=9))
        info = await env.runtime.schedules.describe("s")
        assert info.paused == "3 failures in a row; the last was s@2026-03-02T03:00Z"
        assert info.started == 3
        assert "no luck" in info.recent[-1].reason
        await env.runtime.schedules.resume("s")
        await env.advance(timedelta(hours=1))
        info = await env.runtime.schedules.describe("s")
    assert (info.started, info.failures, info.paused) == (4, 1, None)


async def test_a_backfill_starts_what_is_missing_once():
    hourly = Schedule("s", slow, 60.0, cron="0 * * * *")
    async with Environment(HANDLERS, schedules=[hourly], clock=at_midnight()) as env:
        schedules = env.runtime.schedules
        await env.advance(timedelta(hours=2, minutes=1))
        times = MIDNIGHT - timedelta(hours=3), MIDNIGHT + timedelta(hours=2)
        planned = await schedules.backfill("s", *times, dry_run=True)
        assert [moment.hour for moment in planned] == [21, 22, 23, 0]
        assert len(await started(env.runtime, "s")) == 2
        assert await schedules.backfill("s", *times) == planned
        assert await schedules.backfill("s", *times) == planned, "nothing is known of it yet"
        await env.advance(timedelta(minutes=30))
        assert len(await started(env.runtime, "s")) == 6
        assert await schedules.backfill("s", *times) == []
        info = await schedules.describe("s")
        assert (info.started, info.queued) == (6, ())


async def test_an_edit_neither_loses_nor_doubles_a_slot(replays):
    """Slots at each half hour become slots at each quarter hour, at twenty past four."""
    async with Environment(HANDLERS, clock=at_midnight(), always_replay=replays) as env:
        schedules = env.runtime.schedules
        await schedules.create("s", quick, "old", cron="0,30 * * * *", catch_up="all")
        await env.advance(timedelta(hours=4, minutes=20))
        await schedules.update(Schedule("s", quick, "new", cron="*/15 * * * *", catch_up="all"))
        await env.advance(timedelta(hours=1))
        slots = await started(env.runtime, "s")
        expected = [f"{n // 2:02}:{n % 2 * 30:02}" for n in range(1, 9)]
        expected += ["04:30", "04:45", "05:00", "05:15"]
        assert slots == [f"2026-03-02T{each}Z" for each in expected]
        names = [await env.runtime.get(f"s@{slot}", quick).result() for slot in slots]
    assert [name[:3] for name in names] == ["old"] * 8 + ["new"] * 4


async def test_an_edit_during_an_outage_takes_effect_at_its_time():
    clock = at_midnight()
    store = MemoryStore(clock)
    late = {"catch_up": "all", "overlap": "allow"}
    async with Environment(HANDLERS, provider=InMemoryProvider(store=store), clock=clock) as env:
        await env.runtime.schedules.create("s", quick, cron="0 * * * *", **late)
        await env.advance(timedelta(minutes=90))
    clock.advance(2 * 3_600_000)  # to half past three
    async with Client(InMemoryProvider(store=store), clock=clock) as client:
        await client.schedules.update(Schedule("s", quick, cron="20 * * * *", **late))
        clock.advance(2 * 3_600_000)
        await client.schedules.pause("s")
        clock.advance(3_600_000)
        await client.schedules.update(Schedule("s", quick, cron="40 * * * *", **late))
        await client.schedules.resume("s")
        clock.advance(2 * 3_600_000)
    async with Environment(HANDLERS, provider=InMemoryProvider(store=store), clock=clock) as env:
        await env.advance(timedelta(minutes=1))
        slots = await started(env.runtime, "s")
    assert [slot[11:16] for slot in slots] == [
        "01:00", "02:00", "03:00", "04:20", "05:20", "06:40", "07:40"
    ]  # fmt: skip


async def test_commands_of_an_outage_take_effect_at_their_times_after_a_pause():
    """The worker knows of the pause; the edit and the resume come while none runs."""
    clock = at_midnight()
    store = MemoryStore(clock)
    late = {"catch_up": "all", "overlap": "allow"}
    async with Environment(HANDLERS, provider=InMemoryProvider(store=store), clock=clock) as env:
        await env.runtime.schedules.create("s", waits, cron="0 * * * *", **late)
        await env.advance(timedelta(minutes=90))
        await env.runtime.schedules.pause("s")
        await env.advance(timedelta(hours=1))
    async with Client(InMemoryProvider(store=store), clock=clock) as client:
        await client.raise_event("s@2026-03-02T01:00Z", "go", 1)
        await client.schedules.update(Schedule("s", quick, cron="10 * * * *", **late))
        await client.schedules.resume("s")
        clock.advance(3 * 3_600_000)
    async with Environment(HANDLERS, provider=InMemoryProvider(store=store), clock=clock) as env:
        await env.advance(timedelta(minutes=1))
        slots = await started(env.runtime, "s")
    assert [slot[11:16] for slot in slots] == ["01:00", "03:10", "04:10", "05:10"]


@pytest.mark.parametrize("flood", [40, 200])
async def test_commands_behind_a_flood_of_messages_take_effect_at_their_times(flood, replays):
    """More messages wait than a turn gets; timers and ends come before messages."""
    clock = at_midnight()
    store = MemoryStore(clock)
    late = {"catch_up": "all", "overlap": "allow"}
    env = Environment(
        HANDLERS, provider=InMemoryProvider(store=store), clock=clock, always_replay=replays
    )
    async with env:
        await env.runtime.schedules.create("s", quick, cron="0 * * * *", **late)
        await env.advance(timedelta(minutes=90))
    async with Client(InMemoryProvider(store=store), clock=clock) as client:
        for each in range(flood):
            await client.send_message("s", "not read", each)
        clock.advance(3_600_000)
        await client.schedules.pause("s")
        clock.advance(2 * 3_600_000)
        await client.schedules.update(Schedule("s", quick, cron="20 * * * *", **late))
        await client.schedules.resume("s")
        clock.advance(3_600_000)
    clock.tick_ms = 2
    env = Environment(
        HANDLERS, provider=InMemoryProvider(store=store), clock=clock, always_replay=replays
    )
    async with env:
        await env.advance(timedelta(minutes=1))
        slots = await started(env.runtime, "s")
    assert [slot[11:16] for slot in slots] == ["01:00", "02:00", "05:20"]


async def test_a_declared_schedule_that_changed_is_updated_and_one_that_vanished_is_shown(tmp_path):
    store = tmp_path / "store.db"
    first = Schedule("a", quick, cron="0 * * * *"), Schedule("b", quick, cron="0 * * * *")
    async with Runtime(store, HANDLERS, schedules=first) as runtime:
        await until(lambda: _is_declared(runtime, "a", "0 * * * *"))
        await runtime.schedules.create("c", quick, every=3600)
    second = Schedule("a", quick, cron="5 * * * *")
    async with Runtime(store, HANDLERS, schedules=[second]) as runtime:
        await until(lambda: _is_declared(runtime, "a", "5 * * * *"))

        async def is_announced():
            return any(each.schedules for each in await runtime.provider.admin.list_workers())

        await until(is_announced)
        found = {each.id: each for each in await runtime.schedules.list()}
    assert {name: info.has_vanished for name, info in found.items()} == {
        "a": False,
        "b": True,
        "c": False,
    }
    assert found["b"].status is Status.RUNNING


async def _is_declared(client, schedule_id, cron):
    info = await client.schedules.describe(schedule_id)
    return info.spec.cron == cron and info.is_declared


async def test_a_removed_schedule_leaves_its_instances():
    async with Environment(HANDLERS, clock=at_midnight()) as env:
        await env.runtime.schedules.create("s", waits, cron="0 * * * *")
        await env.advance(timedelta(hours=1))
        await env.runtime.schedules.remove("s")
        await env.advance(timedelta(hours=5))
        assert await started(env.runtime, "s") == ["2026-03-02T01:00Z"]
        with pytest.raises(NotFound, match="there is no schedule 's'"):
            await env.runtime.schedules.describe("s")


async def test_a_schedule_that_an_operator_ended_begins_anew_when_it_is_declared():
    nightly = Schedule("s", quick, cron="30 2 * * *")
    async with Environment(HANDLERS, schedules=[nightly], clock=at_midnight()) as env:
        await env.runtime.get("s").terminate("no more")
        await env.advance(timedelta(days=1))
        assert await started(env.runtime, "s") == []
        await env.runtime.schedules.declare(nightly)
        await env.advance(timedelta(days=1))
        assert len(await started(env.runtime, "s")) == 1


async def test_a_client_without_a_worker_creates_and_looks(tmp_path):
    async with Client(tmp_path / "store.db") as client:
        await client.schedules.create("s", "elsewhere", 1, 2, cron="0 3 * * sun", zone="Asia/Tokyo")
        (info,) = await client.schedules.list()
        assert (info.status, info.spec.args, info.next_at.hour) == (Status.PENDING, [1, 2], 18)
        assert len(await client.schedules.next("s", 3)) == 3
        await client.schedules.remove("s")
        assert await client.schedules.list() == []


async def test_an_id_of_something_else_is_refused():
    async with Environment(HANDLERS, clock=at_midnight()) as env:
        await env.start(waits, id="taken")
        for call in (env.runtime.schedules.pause, env.runtime.schedules.describe):
            with pytest.raises(InvalidValue, match="'taken' is an instance of 'waits'"):
                await call("taken")
        with pytest.raises(InvalidValue, match="'taken' is an instance of 'waits', not a schedule"):
            await env.runtime.schedules.create("taken", quick, every=60)
        await env.runtime.schedules.create("s", quick, every=60)
        with pytest.raises(AlreadyExists, match=r"there is a schedule 's' already; change it with"):
            await env.runtime.schedules.create("s", quick, every=60)
        declared = Schedule("taken", quick, every=60)
        with pytest.raises(InvalidValue, match="not a schedule"):
            await env.runtime.schedules.declare(declared)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cron": "0 0 30 2 *"}, "never fires: there is no day 30 in month 2"),
        ({"cron": "0 0 31 feb,apr *"}, "never fires: there is no day 31 in month feb,apr"),
        ({"cron": "0 0 32 2 *"}, "Bad day-of-month; write five fields"),
        ({"cron": "0 0 1 13 *"}, "Bad month; write five fields"),
        ({"cron": "0 0 31 4,6 *"}, "never fires: there is no day 31 in month 4,6"),
        ({"cron": "0 25 * * *"}, "Bad hour"),
        ({"cron": "nonsense"}, "five fields"),
        ({"cron": "0 0 * *"}, "five fields"),
        ({"cron": 7}, "must be a text"),
        ({"cron": "0 0 * * *", "zone": "Europe/Atlantis"}, "no time zone 'Europe/Atlantis'"),
        ({"cron": "0 0 * * *", "zone": "../etc/passwd"}, "no time zone"),
        ({"cron": "0 0 * * *", "every": 5}, "either cron"),
        ({}, "either cron"),
        ({"every": 0}, "at least 1"),
        ({"every": 1.5}, "whole seconds"),
        ({"every": 60, "overlap": "maybe"}, "overlap is 'maybe'"),
        ({"every": 60, "catch_up": "some"}, "catch_up is 'some'"),
        ({"every": 60, "pause_after_failures": 0}, "pause_after_failures"),
        ({"every": 60, "jitter": -1}, "jitter"),
        ({"every": 60, "version": "two"}, "MAJOR.MINOR.PATCH"),
    ],
)
def test_a_bad_schedule_is_refused_where_it_is_written(options, text):
    with pytest.raises(InvalidValue) as raised:
        Schedule("s", quick, **options)
    assert text in str(raised.value)


def test_arguments_and_ids_are_checked_where_they_are_written():
    with pytest.raises(PayloadError):
        Schedule("s", slow, "not a number", every=60)
    with pytest.raises(TypeError):
        Schedule("s", slow, every=60)
    with pytest.raises(InvalidValue, match="at most"):
        Schedule("s" * 250, quick, every=60)
    with pytest.raises(InvalidValue, match="bytes"):
        Schedule("s", quick, "x" * 70_000, every=60)
    with pytest.raises(InvalidValue, match="two schedules"):
        Runtime("memory:", HANDLERS, schedules=[Schedule("s", quick, every=60)] * 2)
    with pytest.raises(InvalidValue, match="Schedule"):
        Runtime("memory:", HANDLERS, schedules=[quick])


async def test_bad_backfills_are_refused():
    async with Environment(HANDLERS, clock=at_midnight()) as env:
        await env.runtime.schedules.create("s", quick, every=60)
        backfill = env.runtime.schedules.backfill
        with pytest.raises(InvalidValue, match="more than 1000 slots"):
            await backfill("s", MIDNIGHT - timedelta(days=3), MIDNIGHT)
        with pytest.raises(InvalidValue, match="in the past"):
            await backfill("s", MIDNIGHT, MIDNIGHT + timedelta(days=3))
        with pytest.raises(InvalidValue, match="time zone"):
            await backfill("s", datetime(2026, 1, 1), MIDNIGHT)  # noqa: DTZ001


async def test_a_schedule_goes_on_for_many_executions():
    @activity(retry=Retry(max_attempts=2))
    async def step() -> None:
        pass

    async with Environment([*HANDLERS, step], clock=at_midnight()) as env:
        await env.runtime.schedules.create("s", slow, 30.0, every=60, overlap="queue_all")
        await env.advance(timedelta(hours=4))
        assert len(await started(env.runtime, "s")) == 240
        view = await env.runtime.describe("s")
        info = await env.runtime.schedules.describe("s")
    assert view.execution_id > 3
    assert (info.started, info.skipped) == (240, 0)
