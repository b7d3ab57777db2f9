"""Requests: a client asks a running cart, and gets the reply of its code."""

import asyncio

from perdure import RequestRejected, Runtime, orchestration, requests


@orchestration
async def cart() -> list[str]:
    items: list[str] = []
    async for request in requests("add", str):
        if request.value == "checkout":
            request.reply(len(items))
            break
        if request.value in items:
            request.reject(f"{request.value} is in the cart already")
            continue
        items.append(request.value)
        request.reply(len(items))
    return items


async def main() -> None:
    async with Runtime("memory:", [cart]) as runtime:
        handle = await runtime.start(cart)
        print(await handle.ask("add", "lamp", int))
        print(await handle.ask("add", "desk", int, timeout=60))
        print(await handle.peek("items[0]"))  # a local variable, read by a replay
        try:
            await handle.ask("add", "lamp")
        except RequestRejected as error:
            print(error)
        await handle.ask("add", "checkout")
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
