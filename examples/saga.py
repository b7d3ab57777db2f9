"""Saga: undo in reverse order what was done, when a later step fails."""

import asyncio

from perdure import ActivityFailed, Runtime, activity, orchestration, saga


@activity
async def book(what: str, trip: str) -> str:
    if what == "hotel":
        raise LookupError("fully booked")
    return f"{what}-{trip}"


@activity
async def cancel_booking(booking: str) -> None:
    print(f"cancelled {booking}")


@orchestration
async def travel(trip: str) -> str:
    try:
        async with saga() as undo:
            for what in ("flight", "car", "hotel"):
                booking = await book(what, trip)
                undo(cancel_booking, booking)
    except ActivityFailed as error:
        return f"no trip: {error.message}"
    return "have a nice trip"


async def main() -> None:
    async with Runtime("memory:", [travel, book, cancel_booking]) as runtime:
        handle = await runtime.start(travel, "t-1")
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
