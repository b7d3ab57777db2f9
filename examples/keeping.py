"""Keeping and forgetting: what has completed goes after its time, what failed stays for longer."""

import asyncio

from perdure import InMemoryProvider, Runtime, orchestration


@orchestration
async def greet(name: str) -> str:
    return f"hello, {name}"


@orchestration(keep={"completed": "forever"})
async def invoice(order: str) -> str:
    return f"invoice of {order}"


async def main() -> None:
    store = InMemoryProvider()
    async with Runtime(store, [greet, invoice]) as runtime:
        for handle in (
            await runtime.start(greet, "ada", id="greet-ada"),
            await runtime.start(invoice, "o-1", id="invoice-o-1"),
        ):
            print(await handle.result())

    # A worker looks when it starts, and then each minute. Real ones keep for days: "30d".
    async with Runtime(store, [greet, invoice], keep={"completed": 0, "failed": "90d"}) as runtime:
        while await runtime.admin.count() > 1:
            await asyncio.sleep(0.05)
        print([each.id async for each in runtime.admin.instances()])


if __name__ == "__main__":
    asyncio.run(main())
