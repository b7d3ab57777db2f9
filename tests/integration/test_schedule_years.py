"""A year of slots in five zones, compared one by one with a computation of its own.

The computation walks over the year in steps of five minutes, which the times of the lines and the
offsets of the zones are multiples of, and asks the time zone for the local time. It shares no code
with the schedules.
"""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from perdure import Schedule, current, orchestration
from perdure.clock import ManualClock
from perdure.providers.records import InstanceQuery
from perdure.testing import Environment

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
END = datetime(2027, 1, 1, tzinfo=UTC)
STEP = timedelta(minutes=5)
SUNDAYS = {6}
EVERY_DAY = set(range(7))
CHANGES = {3, 4, 10, 11}
"""The months in which the clock is set somewhere."""

ZONES = {
    "Europe/Berlin": "the hour from 2 to 3 is left out in March, and comes twice in October",
    "America/New_York": "in March and November",
    "Australia/Lord_Howe": "half an hour, and in the other half of the year",
    "America/St_Johns": "an offset of half an hour",
    "Asia/Kolkata": "no changes",
}

FIXED = {
    # A cron line with fixed times: the minutes of the day, the weekdays (Monday is 0), the months.
    "30 2 * * *": ([2 * 60 + 30], EVERY_DAY, range(1, 13)),
    "15,45 1,2 * 3,4,10,11 sun": ([75, 105, 135, 165], SUNDAYS, CHANGES),
}
PASSING = "*/20 0-3 * 3,4,10,11 sun"


@orchestration
async def note() -> str:
    return str(current().scheduled_for)


def local_times(zone):
    """Every step of the year with what the clock of the zone shows."""
    moments = [BEGIN + number * STEP for number in range(1, (END - BEGIN) // STEP + 1)]
    return [(moment, moment.astimezone(zone)) for moment in moments]


def fixed_slots(times, minutes, weekdays, months):
    """The first moment at which the clock shows the time, or has passed it that day."""
    found, day, waiting = [], None, []
    for moment, local in times:
        shown = local.hour * 60 + local.minute
        if local.date() != day:
            day = local.date()
            is_due = local.weekday() in weekdays and local.month in months
            waiting = [minute for minute in minutes if minute >= shown] if is_due else []
        if any(minute <= shown for minute in waiting):
            waiting = [minute for minute in waiting if minute > shown]
            found.append(moment)
    return found


def passing_slots(times):
    """``*/20 0-3`` goes by the time that passes: each such minute, also repeated ones."""
    return [
        moment
        for moment, local in times
        if local.weekday() in SUNDAYS
        and local.month in CHANGES
        and local.hour <= 3
        and local.minute % 20 == 0
    ]


@pytest.mark.parametrize("name", sorted(ZONES))
async def test_a_year_has_exactly_the_slots_of_its_zone(name):
    times = local_times(ZoneInfo(name))
    lines = [*FIXED, PASSING]
    expected = [fixed_slots(times, *FIXED[line]) for line in FIXED] + [passing_slots(times)]
    schedules = [
        Schedule(f"s{number}", note, cron=line, zone=name, overlap="allow")
        for number, line in enumerate(lines)
    ]
    clock = ManualClock(round(BEGIN.timestamp() * 1000))
    async with Environment([note], schedules=schedules, clock=clock) as env:
        await env.advance(END - BEGIN)
        for number, slots in enumerate(expected):
            found = await started(env, f"s{number}")
            assert [slot for slot, _ in found] == slots, lines[number]
            assert all(slot <= begun for slot, begun in found), "one began before its time"


async def started(env, schedule_id):
    """The slot of each instance, as its code saw it, and the time at which it began."""
    found, cursor = [], None
    while True:
        query = InstanceQuery(id_prefix=f"{schedule_id}@")
        page = await env.provider.admin.list_instances(query, cursor=cursor, limit=1000)
        for info in page.instances:
            slot = datetime.fromisoformat(info.output.strip('"'))
            found.append((slot, datetime.fromtimestamp(info.created_at_ms / 1000, UTC)))
        cursor = page.next_cursor
        if cursor is None:
            return sorted(found)
