"""A schedule: one instance for each slot, by a clock that jumps through a week."""

import asyncio
from datetime import UTC, datetime, timedelta

from perdure import Schedule, current, orchestration
from perdure.clock import ManualClock
from perdure.testing import Environment


@orchestration
async def report(city: str) -> None:
    print(city, current().scheduled_for)


async def main() -> None:
    nightly = Schedule("report", report, "Berlin", cron="30 2 * * sat,sun", zone="Europe/Berlin")
    clock = ManualClock(round(datetime(2026, 3, 23, tzinfo=UTC).timestamp() * 1000))
    async with Environment([report], schedules=[nightly], clock=clock) as env:
        await env.advance(timedelta(days=7))  # the clock is set on Sunday: 2:30 does not exist
        info = await env.runtime.schedules.describe("report")
        print(f"{info.started} started, next at {info.next_at}")


if __name__ == "__main__":
    asyncio.run(main())
