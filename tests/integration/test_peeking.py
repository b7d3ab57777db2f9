"""Local variables of suspended code, read by replay."""

import asyncio
import collections
import dataclasses
from typing import NamedTuple

import msgspec
import pytest

from integration.conditions import until, waiting
from perdure import (
    BlockingClient,
    Client,
    InstanceFinished,
    InvalidValue,
    NotFound,
    Runtime,
    UsageError,
    activity,
    continue_as_new,
    orchestration,
    wait_for_event,
)
from perdure.client.recorded import parse_expression
from perdure.errors import Nondeterminism, NotRegistered

ran: list[str] = []


class Line(NamedTuple):
    name: str
    price: int


class Packet(msgspec.Struct):
    weight: float


class Slotted:
    __slots__ = ("full", "unset")

    def __init__(self) -> None:
        self.full = 1


@dataclasses.dataclass
class Order:
    lines: list[Line]
    packet: Packet
    _secret: int = 5

    @property
    def total(self) -> int:
        ran.append("total")
        return 0


class Odd(dict):  # type: ignore[type-arg]
    def __missing__(self, key: str) -> str:
        ran.append("missing")
        return key


@activity
async def price(name: str) -> int:
    ran.append("price")
    return len(name)


async def helper(depth: int) -> None:
    inner = depth + 1
    await wait_for_event("go", None)
    del inner


@orchestration
async def shop(name: str) -> int:
    cents = await price(name)
    order = Order([Line("lamp", cents), Line("desk", 9)], Packet(1.5))
    odd, slotted, queue = Odd(a=1), Slotted(), collections.deque([1, 2])
    lock = asyncio.Lock()
    task = asyncio.create_task(helper(1))
    await wait_for_event("end", None)
    return cents + len(order.lines) + len(odd) + slotted.full + len(queue) + bool(lock and task)


@orchestration
async def counts(number: int) -> None:
    total = number * 10
    await wait_for_event("next", None)
    continue_as_new(total)


HANDLERS = [shop, counts, price]


async def test_variables_and_their_parts_are_read_on_every_store(make_every_store):
    async with Runtime(make_every_store(), HANDLERS) as runtime:
        handle = await runtime.start(shop, "lamp", id="s-1")
        await waiting(runtime, "s-1")

        async def has_order():
            return any(step.name == "end" for step in (await handle.describe()).waiting_for)

        await until(has_order)
        ran.clear()
        assert await handle.peek("cents") == 4
        assert await handle.peek("order") == Order([Line("lamp", 4), Line("desk", 9)], Packet(1.5))
        assert await handle.peek("order.lines[0].price") == 4
        assert await handle.peek("order.lines[-1].name") == "desk"
        assert await handle.peek(" order.packet.weight ") == 1.5
        assert await handle.peek("odd['a']") == 1
        assert await handle.peek("queue[1]") == 2
        assert await handle.peek("slotted.full") == 1
        assert await handle.peek("name") == "lamp"
        assert await handle.peek("inner") == 2  # of a function that another task awaits
        assert ran == []
        for wrong, words in {
            "orders": "did you mean 'order'",
            "nothing": "has no variable 'nothing' now; it has: ",
            "order.nothing": "of class Order, which has no 'nothing'",
            "order.total": "is code",
            "order.lines[7]": "index out of range",
            "order.lines['a']": "does not exist",
            "odd['b']": "has no such key",
            "order['a']": "of class Order",
            "slotted.unset": "has no value yet",
            "task": "cannot be copied",
        }.items():
            with pytest.raises(InvalidValue, match=words):
                await handle.peek(wrong)
        assert ran == []
        await handle.raise_event("end")
        assert await handle.result() == 4 + 2 + 1 + 1 + 2 + 1
        with pytest.raises(InstanceFinished, match=r"has ended \(Completed\)"):
            await handle.peek("cents")


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "1",
        "a()",
        "a.b()",
        "a + b",
        "a[b]",
        "a[1:2]",
        "a if b else c",
        "(lambda: 1)",
        "a.__class__",
        "__import__('os')",
        "[a for a in b]",
        "a[1.5]",
        "a\nb",
        "(" * 500,
        "a" + ".b" * 100_000,
        5,
        None,
    ],
)
def test_an_expression_is_a_path_and_nothing_else(wrong):
    with pytest.raises(InvalidValue, match="names no variable"):
        parse_expression(wrong)


async def test_no_worker_is_needed_but_the_code_is(tmp_path):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS) as runtime:
        await runtime.start(counts, 1, id="c-1")
        await waiting(runtime, "c-1")
    async with Client(store) as client:
        assert await client.get("c-1", counts).peek("total") == 10
        with pytest.raises(UsageError, match=r"write client\.get"):
            await client.get("c-1").peek("total")
        with pytest.raises(NotRegistered, match="'counts' is not registered"):
            await client.get("c-1", shop).peek("total")
        with pytest.raises(NotFound):
            await client.get("c-2", counts).peek("total")
        await client.start(counts, 1, id="c-3")
        with pytest.raises(NotFound, match="no history yet"):
            await client.get("c-3", counts).peek("total")
    with BlockingClient(Client(store)) as shop_client:
        assert shop_client.get("c-1", counts).peek("number") == 1


async def test_other_code_is_a_mismatch(tmp_path):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS) as runtime:
        await runtime.start(counts, 1, id="c-1")
        await waiting(runtime, "c-1")

    @orchestration(name="counts")
    async def edited(number: int) -> None:
        await wait_for_event("other", None)

    async with Client(store) as client:
        with pytest.raises(Nondeterminism):
            await client.get("c-1", edited).peek("number")


async def test_the_latest_execution_is_read_and_the_copy_changes_nothing(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(counts, 1, id="c-1")
        await waiting(runtime, "c-1")
        await handle.raise_event("next")

        async def is_next():
            view = await handle.describe()
            return view.execution_id == 2 and bool(view.waiting_for)

        await until(is_next)
        assert await handle.peek("total") == 100
        assert len(await handle.history()) == 2
