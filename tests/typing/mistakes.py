"""Mistakes that type checkers must find; each line that ends in ``# error`` has exactly one."""

import asyncio
from fractions import Fraction

from perdure import (
    RESOURCE,
    BlockingClient,
    Client,
    CodecType,
    activity,
    orchestration,
    wait_for_event,
)


@activity
def charge(order: str, cents: int = 0) -> str:
    return f"receipt-{order}-{cents}"


@orchestration
async def child(order: str) -> bool:
    return bool(order)


@orchestration
async def checkout(order: str) -> str:
    await charge(5)  # error
    await charge(order, "many")  # error
    await charge()  # error
    await charge(order, amount=3)  # error
    await charge.options(timeout="long")(order)  # error
    await charge.options(speed=3)(order)  # error
    number: int = await charge(order)  # error
    text: str = await child(order)  # error
    await child.options(on_parent_close="forget")(order)  # error
    answer: str = await wait_for_event("approval", bool)  # error
    first, second = await asyncio.gather(charge(order), child(order))
    second.upper()  # error
    return f"{number}{text}{answer}{first}"


class Pool:
    pass


class Billing:
    @activity
    async def bill(self, order: str, *, pool: Pool = RESOURCE) -> int:
        return len(order)


@orchestration
async def with_resources(order: str) -> int:
    await Billing.bill(5)  # error
    await Billing.bill()  # error
    await Billing().bill(order, pool="wrong")  # error
    total: str = await Billing.bill(order)  # error
    return len(total)


def in_a_script() -> None:
    charge.fn(5)  # error
    with BlockingClient(Client("shop.db")) as shop:
        shop.start(checkout, 5)  # error
        shop.start(checkout)  # error
        shop.start("checkout", kwargs={"order": "o-1"})  # error
        shop.start(checkout, "o-1", if_exists="keep")  # error
        result: str = shop.start(child, "o-1").result()  # error
        print(result)


@orchestration  # error
def not_async(order: str) -> str:
    return order


CodecType(Fraction, stored_as=int, encode=len, decode=Fraction)  # error
CodecType(Fraction, stored_as=str, encode=str, decode=chr)  # error
