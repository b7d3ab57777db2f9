"""Fan-out and fan-in: ten thousand steps side by side, joined by asyncio.gather."""

import asyncio
import sys

from perdure import Runtime, activity, orchestration


@activity
async def square(number: int) -> int:
    return number * number


@orchestration
async def sum_of_squares(width: int) -> int:
    return sum(await asyncio.gather(*[square(number) for number in range(width)]))


async def main(width: int) -> None:
    async with Runtime("memory:", [sum_of_squares, square]) as runtime:
        handle = await runtime.start(sum_of_squares, width)
        print(f"sum of {width} squares: {await handle.result()}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
