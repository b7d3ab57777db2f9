"""Chaining: each step takes the result of the one before."""

import asyncio

from perdure import Runtime, activity, orchestration


@activity
async def fetch_price(article: str) -> int:
    return len(article) * 100


@activity
def add_tax(cents: int) -> int:
    return round(cents * 1.19)


@activity
async def format_price(cents: int) -> str:
    return f"{cents / 100:.2f} EUR"


@orchestration
async def quote(article: str) -> str:
    cents = await fetch_price(article)
    cents = await add_tax(cents)
    return await format_price(cents)


async def main() -> None:
    async with Runtime("memory:", [quote, fetch_price, add_tax, format_price]) as runtime:
        handle = await runtime.start(quote, "lamp")
        print(await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
