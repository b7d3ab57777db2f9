"""Human in the loop: wait three days for a decision; an ordinary asyncio.timeout is durable."""

import asyncio

from perdure import Runtime, orchestration, wait_for_event


@orchestration
async def request_leave(name: str, days: int) -> str:
    try:
        async with asyncio.timeout(3 * 86_400):
            approved = await wait_for_event("decision", bool)
    except TimeoutError:
        return f"{name}: no answer"
    return f"{name}: {days} days {'approved' if approved else 'declined'}"


async def main() -> None:
    async with Runtime("memory:", [request_leave]) as runtime:
        handle = await runtime.start(request_leave, "Ada", 5, id="leave-ada")
        await handle.raise_event("decision", True)
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
