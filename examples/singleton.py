"""Singleton: one instance at a time for each customer, however many programs start it."""

import asyncio

from perdure import Runtime, activity, orchestration


@activity
async def fetch(customer: str) -> str:
    return f"report of {customer}"


@orchestration
async def report(customer: str) -> str:
    await asyncio.sleep(0.2)
    return await fetch(customer)


async def main() -> None:
    async with Runtime("memory:", [report, fetch]) as runtime:
        handles = [
            # One that runs is taken as it is, one that has ended begins anew.
            await runtime.start(report, "ada", id="report-ada", if_exists="restart")
            for _ in range(3)
        ]
        print(await asyncio.gather(*(handle.result() for handle in handles)))
        print(await runtime.admin.count(), "instance")


if __name__ == "__main__":
    asyncio.run(main())
