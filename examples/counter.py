"""State: a small key-value store of the instance, readable from outside while it runs."""

import asyncio

from perdure import Runtime, next_message, orchestration, state


@orchestration
async def counter() -> int:
    while (change := await next_message("changes", int)) != 0:
        state["value"] = state.get("value", int, 0) + change
    return state.get("value", int, 0)


async def main() -> None:
    async with Runtime("memory:", [counter]) as runtime:
        handle = await runtime.start(counter, id="counter")
        for change in (5, 7, -2, 0):
            await handle.send_message("changes", change)
        print(await handle.result(), await handle.state("value", int))


if __name__ == "__main__":
    asyncio.run(main())
