"""An eternal loop: continue_as_new starts the next execution with a fresh, short history."""

import asyncio
import sys

from perdure import Runtime, activity, continue_as_new, orchestration


@activity
async def poll(round_number: int) -> int:
    return round_number % 3


@orchestration
async def poller(round_number: int, rounds: int, hits: int) -> int:
    hits += await poll(round_number) == 0
    if round_number < rounds:
        continue_as_new(round_number + 1, rounds, hits)
    return hits


async def main(rounds: int) -> None:
    async with Runtime("memory:", [poller, poll]) as runtime:
        handle = await runtime.start(poller, 1, rounds, 0, id="poller")
        hits = await handle.result()
        print(f"{hits} hits in {(await handle.describe()).execution_id} executions")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
