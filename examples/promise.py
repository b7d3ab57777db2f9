"""A promise: an order waits for its payment, which is reported by a key and not by an instance."""

import asyncio

from perdure import PromiseRejected, Runtime, orchestration, promise


@orchestration
async def order(payment_id: str) -> str:
    try:
        async with asyncio.timeout(3600):
            cents = await promise(f"payment:{payment_id}", int)
    except PromiseRejected as error:
        return f"{payment_id}: {error}"
    except TimeoutError:
        return f"{payment_id}: not paid in time"
    return f"{payment_id}: paid {cents} cents"


async def main() -> None:
    async with Runtime("memory:", [order]) as runtime:
        await runtime.resolve("payment:early", 1200)  # before an instance awaits it
        early = await runtime.start(order, "early")
        late = await runtime.start(order, "late")
        bad = await runtime.start(order, "bad")
        await runtime.resolve("payment:late", 900)
        await runtime.resolve("payment:late", 900)  # the same answer again changes nothing
        await runtime.reject("payment:bad", "the card was declined")
        for handle in (early, late, bad):
            print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
