"""The author's API as type checkers must see it; checked, never run."""

import asyncio
import datetime
import uuid
from fractions import Fraction
from typing import assert_type

from perdure import (
    RESOURCE,
    Activity,
    BlockingClient,
    BlockingHandle,
    Client,
    Codec,
    CodecType,
    Handle,
    Handler,
    Orchestration,
    Request,
    Retry,
    Runtime,
    Saga,
    Step,
    activity,
    activity_info,
    continue_as_new,
    current,
    instance,
    last_heartbeat,
    next_message,
    now,
    orchestration,
    patched,
    random,
    requests,
    saga,
    side_effect,
    start_detached,
    state,
    uuid4,
    wait_for_event,
)
from perdure.errors import ActivityFailed


@activity(retry=Retry(max_attempts=5), timeout=30)
def charge(order: str, cents: int = 0) -> str:
    return f"receipt-{order}-{cents}"


@activity
async def ship(order: str) -> list[int]:
    return [len(order)]


@activity(executor="process")
def crunch(numbers: list[int]) -> int:
    return sum(numbers)


@orchestration
async def child(order: str, *, urgent: bool = False) -> bool:
    return urgent


@orchestration(version="1.2.0")
async def checkout(order: str, cents: int) -> str:
    assert_type(charge(order, cents), Step[str])
    assert_type(await charge(order, cents=cents), str)
    assert_type(await ship(order), list[int])
    assert_type(await charge.options(timeout=5, retry=None)(order), str)
    assert_type(await child(order, urgent=True), bool)
    assert_type(await child.options(id="x", on_parent_close="abandon")(order), bool)

    receipt, sizes = await asyncio.gather(charge(order), ship(order))
    assert_type(receipt, str)
    assert_type(sizes, list[int])
    assert_type(await asyncio.wait_for(charge(order), 5), str)
    assert_type(await asyncio.shield(ship(order)), list[int])

    async with asyncio.TaskGroup() as group:
        task = group.create_task(charge(order))
        other = group.create_task(child(order))
    assert_type(task.result(), str)
    assert_type(other.result(), bool)
    assert_type(asyncio.create_task(ship(order)), asyncio.Task[list[int]])

    done, pending = await asyncio.wait([charge(order), charge("other")])
    assert_type(done.pop().result(), str)
    assert_type(pending.pop(), Step[str])
    for each in asyncio.as_completed([ship(order), ship("other")]):
        assert_type(await each, list[int])

    assert_type(await wait_for_event("approval", bool), bool)
    answer = await wait_for_event("approval", bool | None)
    assert answer is None or isinstance(answer, bool)
    await wait_for_event("paid", None)
    await next_message("bell", None)
    assert_type(await next_message("inbox", dict[str, int]), dict[str, int])
    async for request in requests("add", str):
        assert_type(request, Request[str])
        assert_type(request.value, str)
        request.reply(len(request.value))
    assert_type(await instance("o-2").ask("add", "lamp", int), int)
    async with saga() as undo:
        assert_type(undo, Saga)
        undo(charge, order, cents=5)
        undo(child, order)
        undo(asyncio.sleep, 1)
    assert_type(now(), datetime.datetime)
    assert_type(uuid4(), uuid.UUID)
    assert_type(random(), float)
    assert_type(random.randint(1, 6), int)
    assert_type(side_effect(lambda: 5), int)
    assert_type(state.get("count", int), int | None)
    assert_type(state.get("count", int, 0), int)
    assert_type(patched("new"), bool)
    assert_type(current().instance_id, str)
    assert_type(start_detached(child, order, id="d"), str)
    assert_type(activity_info().idempotency_key, str)
    assert_type(last_heartbeat(int), int | None)
    if cents > 10:
        continue_as_new(order, cents - 1)
        assert_type(cents, str)  # never reached: no complaint
    return receipt


@orchestration
async def refund(order: str, cents: int = 0) -> bool:
    return cents > len(order)


def uses_definitions(
    handler: Orchestration[[str, int], str], work: Activity[[list[int]], int]
) -> str:
    return handler.name + work.name


uses_definitions(checkout, crunch)
assert charge("o-1", 5) == "receipt-o-1-5"  # the plain function outside


async def in_a_unit_test() -> None:
    number: int = crunch.fn([1, 2])
    assert crunch.fn([1, 2]) + 1 > number
    sizes: list[int] = await ship.fn("o-1")
    assert sizes == await ship("o-1")


handlers: list[Handler] = [checkout, charge, ship]
Runtime("shop.db", handlers)
Runtime("shop.db", [checkout, charge, ship])


class Pool:
    async def fetch(self, table: str) -> list[str]:
        return [table]


@activity(timeout=30)
async def load(table: str, *, pool: Pool = RESOURCE) -> list[str]:
    return await pool.fetch(table)


class Billing:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @activity
    async def bill(self, order: str, cents: int = 0) -> list[str]:
        return await self._pool.fetch(f"{order} {cents}")

    @activity(name="refund-order", retry=Retry())
    def refund(self, order: str) -> int:
        return len(order)


@orchestration
async def with_resources(order: str) -> int:
    assert_type(await load(order), list[str])
    assert_type(await Billing.bill(order, 5), list[str])
    assert_type(await Billing.bill.options(timeout=5)(order, cents=5), list[str])
    assert_type(Billing.refund(order), Step[int])
    return await Billing.refund(order)


async def in_a_test_of_methods() -> None:
    assert_type(await load("sales", pool=Pool()), list[str])
    assert_type(await Billing(Pool()).bill("o-1"), list[str])
    assert Billing(Pool()).refund("o-1") == 3


Runtime("shop.db", [with_resources, load, Billing(Pool())], resources=[Pool()])


async def in_a_program(client: Client) -> None:
    assert_type(await client.start(checkout, "o-1", 1200, id="o-1"), Handle[str])
    assert_type(await client.start(child, "o-1", kwargs={"urgent": True}), Handle[bool])
    named = await client.start("checkout", "o-1", 1200)
    print(await named.result())
    assert_type(await named.ask("add", "lamp", int, timeout=5), int)
    print(await named.ask("total"), await named.peek("items[0]"))
    assert_type(await client.start_many(refund, [("o-1", ("o-1", 5))]), list[Handle[bool]])
    assert_type(await client.start(charge, "o-1", 5), Handle[str])
    assert_type(await client.start(ship, kwargs={"order": "o-1"}), Handle[list[int]])
    told = await client.start(refund, "o-1", if_exists="restart", message=("inbox", 1))
    assert_type(told, Handle[bool])
    await client.start("refund", "o-1", at=datetime.datetime.now(datetime.UTC))
    many = await client.start_many("refund", [("o-2", ("o-2",))])
    print(await many[0].result())


def in_a_script() -> None:
    with BlockingClient(Client("shop.db")) as shop:
        handle = shop.start(checkout, "o-1", 1200, id="o-1")
        assert_type(handle, BlockingHandle[str])
        assert_type(handle.result(), str)
        handle.raise_event("approval", True)
        assert_type(shop.get("o-1", refund).result(), bool)
        assert_type(handle.ask("add", "lamp", int, id="r-1"), int)
        assert_type(handle.state("step", int), int | None)
        assert_type(shop.start(refund, "o-1"), BlockingHandle[bool])
        assert_type(shop.start(refund, "o-1", 5, delay=60, if_exists="fail"), BlockingHandle[bool])
        assert_type(shop.start(child, "o-1", kwargs={"urgent": True}), BlockingHandle[bool])
        assert_type(shop.start(checkout, kwargs={"order": "o-1", "cents": 5}), BlockingHandle[str])
        shop.start("checkout", "o-1", 5).id.upper()
        assert_type(shop.call(lambda: shop.client.start(refund, "o-1")), Handle[bool])


class CardDeclined(Exception):
    cents: int


@activity(raises=[CardDeclined, TimeoutError])
async def buy(cents: int) -> str:
    raise CardDeclined(cents)


@orchestration
async def catches(cents: int) -> str | bool:
    try:
        assert_type(await buy(cents), str)
    except CardDeclined as declined:
        assert_type(declined.cents, int)
    except ActivityFailed as failed:
        assert_type(failed.is_(CardDeclined, ValueError), bool)
        return failed.is_(CardDeclined)
    return await buy(cents)


codec = Codec(
    types=[
        CodecType(Fraction, stored_as=str, encode=str, decode=Fraction),
        CodecType(
            complex,
            stored_as=list[float],
            encode=lambda number: [number.real, number.imag],
            decode=lambda parts: complex(*parts),
        ),
    ]
)
