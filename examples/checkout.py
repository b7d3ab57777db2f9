"""The first example: an order that survives crashes, waits for days, and reads like asyncio."""

import asyncio
import contextlib
import sys

from perdure import Retry, Runtime, activity, orchestration, wait_for_event
from perdure.errors import InstanceFinished


@activity(retry=Retry(max_attempts=5), timeout=30)
def charge(order: str, cents: int) -> str:
    return f"receipt-{order}"


@activity
async def ship(order: str) -> None: ...


@activity
async def send_mail(order: str, text: str) -> None: ...


@orchestration(version="1.0.0")
async def checkout(order: str, cents: int) -> str:
    receipt = await charge(order, cents)
    try:
        async with asyncio.timeout(3 * 86400):
            approved = await wait_for_event("approval", bool)
    except TimeoutError:
        return "timed out"
    if not approved:
        return "declined"
    async with asyncio.TaskGroup() as group:
        group.create_task(ship(order))
        group.create_task(send_mail.options(timeout=5)(order, receipt))
    return receipt


async def main(store: str) -> None:
    async with Runtime(store, [checkout, charge, ship, send_mail]) as runtime:
        handle = await runtime.start(checkout, "o-1", 1200, id="o-1")
        with contextlib.suppress(InstanceFinished):  # run again: it has ended
            await handle.raise_event("approval", True)
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "shop.db"))
