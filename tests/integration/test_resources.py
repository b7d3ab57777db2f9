"""Pools and clients reach activities by annotation, from lifespans of modules, and as objects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Annotated, Generic, TypeVar
from unittest.mock import Mock

import pytest

from perdure import (
    RESOURCE,
    OrchestrationFailed,
    Runtime,
    RuntimeOptions,
    activity,
    orchestration,
)
from perdure.errors import InvalidValue, UsageError
from perdure.testing import Environment

T = TypeVar("T")


class Pool:
    def __init__(self, name: str = "pool") -> None:
        self.name = name
        self.is_open = True

    def fetch(self, table: str) -> str:
        assert self.is_open, "used after it was closed"
        return f"{self.name}: {table}"


class Sessions(Generic[T]):
    """A generic class, as SQLAlchemy's async_sessionmaker."""


@activity
async def load(table: str, *, pool: Pool = RESOURCE) -> str:
    return pool.fetch(table)


@activity
def load_in_thread(table: str, pool: Pool = RESOURCE, *, limit: int = 3) -> str:
    return f"{pool.fetch(table)} {limit}"


@activity
async def load_generic(
    pool: Annotated[Pool, "the main one"] = RESOURCE, sessions: Sessions[int] = RESOURCE
) -> str:
    return f"{pool.name} {type(sessions).__name__}"


@orchestration
async def report(table: str) -> list[str]:
    return [
        await load(table),
        await load_in_thread.options(timeout=30)(table, limit=5),
        await load_generic(),
    ]


class Billing:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    @activity
    async def charge(self, order: str, *, pool: Pool = RESOURCE) -> str:
        return f"{self._prefix}-{order}-{pool.name}"

    @activity(name="refund-order")
    def refund(self, order: str) -> str:
        return f"{self._prefix} back {order}"


class CheapBilling(Billing):
    """Inherits the activities."""


@orchestration
async def bill(order: str) -> list[str]:
    return [await Billing.charge(order), await Billing.refund.options(timeout=9)(order)]


def module_with(**members: object) -> ModuleType:
    module = ModuleType("flows")
    vars(module).update(members)
    return module


async def test_activities_get_the_resource_that_fits_their_annotation():
    handlers = [report, load, load_in_thread, load_generic]
    async with Runtime("memory:", handlers, resources=[Sessions(), Pool()]) as runtime:
        handle = await runtime.start(report, "sales")
        assert await handle.result() == ["pool: sales", "pool: sales 5", "pool Sessions"]


@pytest.mark.parametrize("kind", [Billing, CheapBilling])
async def test_an_object_runs_the_activities_that_are_its_methods(kind):
    async with Runtime("memory:", [bill, kind("receipt")], resources=[Pool()]) as runtime:
        handle = await runtime.start(bill, "o-1")
        assert await handle.result() == ["receipt-o-1-pool", "receipt back o-1"]


async def test_a_method_can_be_substituted_and_given_another_resource():
    async with Environment(
        [report, load, load_in_thread],
        resources=[Mock(spec=Pool, **{"fetch.return_value": "fake"})],
        substitutes={load_generic: lambda: "no pool"},
    ) as env:
        assert await env.run(report, "sales") == ["fake", "fake 5", "no pool"]
    async with Environment(
        [bill], substitutes={Billing.charge: _shout, Billing.refund: _shout}
    ) as env:
        assert await env.run(bill, "o-1") == ["O-1", "O-1"]


def _shout(order: str) -> str:
    return order.upper()


async def test_outside_of_orchestrations_resources_are_arguments():
    assert await load("sales", pool=Pool("mine")) == "mine: sales"
    assert Billing("b").refund("o-1") == "b back o-1"
    with pytest.raises(UsageError, match=r"gets pool from a runtime: .* pass pool=\.\.\."):
        load("sales")
    with pytest.raises(UsageError, match="'refund-order' is a method"):
        Billing.refund("o-1")


@pytest.mark.parametrize("is_decorated", [False, True])
async def test_a_lifespan_surrounds_the_work_of_its_module(is_decorated):
    seen: list[str] = []
    release = asyncio.Event()

    @activity
    async def slow(*, pool: Pool = RESOURCE) -> str:
        seen.append("began")
        release.set()
        await asyncio.sleep(0.01)
        return pool.fetch("slowly")

    @orchestration
    async def flow() -> str:
        return await slow()

    async def lifespan(runtime: Runtime) -> AsyncIterator[list[object]]:
        assert await runtime.admin.workers() == []  # the store is open
        pool = Pool()
        seen.append("opened")
        yield [pool]
        pool.is_open = False
        seen.append("closed")

    opener = contextlib.asynccontextmanager(lifespan) if is_decorated else lifespan
    runtime = Runtime("memory:", [module_with(flow=flow, slow=slow, lifespan=opener)])
    async with runtime:
        handle = await runtime.start(flow, id="a")
        await release.wait()  # the runtime drains: the pool closes after the activity
    assert seen == ["opened", "began", "closed"]
    assert handle.id == "a"


async def test_a_lifespan_that_fails_leaves_nothing_open(tmp_path):
    async def lifespan(runtime: Runtime) -> AsyncIterator[list[object]]:
        raise OSError("the database is away")
        yield

    runtime = Runtime(tmp_path / "shop.db", [module_with(report=report, lifespan=lifespan)])
    with pytest.raises(OSError, match="is away"):
        await runtime.__aenter__()
    async with Runtime(tmp_path / "shop.db", [report]):
        pass


async def test_the_lifespan_of_a_web_framework_is_none_of_ours():
    async def lifespan(app: object) -> AsyncIterator[None]:
        raise AssertionError("called by a runtime")
        yield

    async with Runtime("memory:", [module_with(bill=bill, lifespan=lifespan)]):
        pass


@pytest.mark.parametrize("resources", [[], [Pool(), Pool()]])
async def test_a_resource_that_is_missing_or_not_unique_is_named_at_the_start(resources):
    with pytest.raises(UsageError, match=r"'load' needs Pool for 'pool', and \d of the resources"):
        async with Runtime("memory:", [load], resources=resources):
            pass
    async with Runtime("memory:", [load], options=RuntimeOptions(run_activities=False)):
        pass


async def test_wrong_resources_are_refused_with_the_way_out():
    with pytest.raises(UsageError, match=r"resources= gives a list .* as \[pool\]; not <.*Pool"):
        Runtime("memory:", [load], resources=Pool())

    async def yields_a_pool(runtime: Runtime) -> AsyncIterator[Pool]:
        yield Pool()

    async def yields_nothing(runtime: Runtime) -> None: ...

    for lifespan, told in ((yields_a_pool, "gives a list"), (yields_nothing, "must yield once")):
        with pytest.raises(UsageError, match=rf"lifespan\(runtime\) of flows {told}"):
            async with Runtime("memory:", [module_with(bill=bill, lifespan=lifespan)]):
                pass


def test_wrong_definitions_are_refused_with_the_way_out():
    with pytest.raises(UsageError, match="has 'limit' after a resource"):

        @activity
        def positional(pool: Pool = RESOURCE, limit: int = 3) -> None: ...

    with pytest.raises(UsageError, match="runs in a process, which has neither"):

        @activity(executor="process")
        def in_a_process(pool: Pool = RESOURCE) -> None: ...

    with pytest.raises(UsageError, match="only activities use objects of the worker"):

        @orchestration
        async def with_pool(pool: Pool = RESOURCE) -> None: ...

    @activity
    def vague(pool: Pool | None = RESOURCE) -> None: ...

    with pytest.raises(UsageError, match="'pool' of activity 'vague' needs a class"):
        Runtime("memory:", [vague])
    with pytest.raises(UsageError, match="is a method: register an object of its class"):
        Runtime("memory:", [Billing.charge])
    with pytest.raises(InvalidValue, match=r"register an object: Billing\(\)"):
        Runtime("memory:", [Billing])
    with pytest.raises(InvalidValue, match="an object with activities as methods; not <object"):
        Runtime("memory:", [object()])


async def test_a_resource_cannot_be_passed_by_an_orchestration():
    @orchestration
    async def wrong() -> str:
        return await load("sales", pool=Pool())

    async with Environment([wrong, load], resources=[Pool()]) as env:
        with pytest.raises(OrchestrationFailed, match="unexpected keyword argument 'pool'"):
            await env.run(wrong)
