"""Cancelling with clean-up: CancelledError is raised once, and finally blocks may await steps."""

import asyncio

from perdure import OrchestrationCancelled, Runtime, activity, orchestration, wait_for_event


@activity
async def reserve(seat: str) -> str:
    return seat


@activity
async def release(seat: str) -> None:
    print(f"seat {seat} is free again")


@orchestration
async def hold_seat(seat: str) -> str:
    await reserve(seat)
    try:
        return await wait_for_event("paid", str)
    except asyncio.CancelledError:
        await release(seat)
        raise


async def main() -> None:
    async with Runtime("memory:", [hold_seat, reserve, release]) as runtime:
        handle = await runtime.start(hold_seat, "12A", id="seat-12a")
        while not any(step.kind == "event" for step in (await handle.describe()).waiting_for):
            await asyncio.sleep(0.01)
        await handle.cancel("the customer left")
        try:
            await handle.result()
        except OrchestrationCancelled as error:
            print(error.message)


if __name__ == "__main__":
    asyncio.run(main())
