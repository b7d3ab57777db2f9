"""Wait for another workflow: a shipment leaves when the payment has ended."""

import asyncio

from perdure import Runtime, instance, orchestration, raise_event_to, wait_for_event


@orchestration
async def payment() -> int:
    return await wait_for_event("paid", int)


@orchestration
async def shipment(payment_id: str) -> str:
    cents = await instance(payment_id, int).result()
    return f"shipped after {cents} cents"


@orchestration
async def cashier(payment_id: str) -> None:
    await raise_event_to(payment_id, "paid", 1200)


async def main() -> None:
    async with Runtime("memory:", [payment, shipment, cashier]) as runtime:
        await runtime.start(payment, id="payment-7")
        parcel = await runtime.start(shipment, "payment-7")
        await runtime.start(cashier, "payment-7")
        print(await parcel.result())


if __name__ == "__main__":
    asyncio.run(main())
