"""The test environment that users get: jumping clock, substitutes, replays, crashes."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import partial
from types import ModuleType
from unittest.mock import AsyncMock, Mock

import pytest

from perdure import (
    RESOURCE,
    RuntimeOptions,
    SqliteProvider,
    TagFilter,
    activity,
    continue_as_new,
    now,
    orchestration,
    set_custom_status,
    uuid4,
    wait_for_event,
)
from perdure.clock import ManualClock
from perdure.errors import Nondeterminism, OrchestrationTerminated, UsageError
from perdure.model import wire
from perdure.providers.sqlite.memory import InMemoryProvider
from perdure.testing import Environment, Stuck, assert_crash_safe, assert_replays
from perdure.testing.crashes import intercept


@activity
async def fetch(url: str) -> str:
    raise AssertionError("the network is not there in tests")


@activity
async def add(left: int, right: int) -> int:
    return left + right


@orchestration
async def crawl(url: str) -> str:
    page = await fetch(url)
    await asyncio.sleep(30 * 86_400)
    return page.upper()


@orchestration
async def child(value: int) -> int:
    return await add(value, 1)


@orchestration
async def busy(rounds: int, total: int) -> str:
    total = await add(total, await child(1))
    async with asyncio.TaskGroup() as group:
        one = group.create_task(add(1, 2))
        two = group.create_task(add(3, 4))
    set_custom_status(total)
    try:
        async with asyncio.timeout(60):
            word = await wait_for_event("word", str)
    except TimeoutError:
        word = "none"
    if rounds:
        continue_as_new(rounds - 1, total)
    return f"{word} {total} {one.result() + two.result()}"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_the_end_of_what_is_terminated_is_told_at_once(make_environment, has_begun):
    async with make_environment([busy, child, add]) as env:
        handle = await env.start(busy, 0, 0)
        if has_begun:
            await env.advance(1)
        waiting = asyncio.ensure_future(handle.result())
        await asyncio.sleep(0)
        await handle.terminate("enough")

        for result in (waiting, handle.result()):
            with pytest.raises(OrchestrationTerminated, match="enough"):
                await result


async def test_a_month_passes_in_a_moment_with_a_substitute_for_the_network():
    async with Environment([crawl], substitutes={fetch: lambda url: f"page of {url}"}) as env:
        before = env.clock.now_ms()

        assert await env.run(crawl, "x") == "PAGE OF X"
        assert timedelta(milliseconds=env.clock.now_ms() - before) == timedelta(days=30)


@activity(transactional=True)
def record(text: str) -> int:
    raise AssertionError("there is no database in tests")


@activity(executor="process")
def crunch(number: int) -> int:
    raise AssertionError("no processes in tests")


@orchestration
async def bookkeeping(text: str) -> int:
    return await crunch(await record(text))


async def test_a_substitute_runs_wherever_the_activity_would_have_run():
    substitutes = {record: lambda text: len(text.strip()), crunch: lambda number: number * 2}
    async with Environment([bookkeeping], substitutes=substitutes) as env:
        assert await env.run(bookkeeping, "four") == 8


@pytest.mark.parametrize("has_substitute", [False, True])
async def test_activities_of_every_tag_run(has_substitute):
    @activity(tag="maps")
    async def locate(place: str) -> str:
        return place

    @orchestration
    async def route(place: str) -> str:
        return await locate(place) + await locate.options(tag="spare")(place)

    substitutes = {locate: str} if has_substitute else {}
    handlers = [route, locate]
    async with Environment(handlers, substitutes=substitutes) as env:
        assert await env.run(route, "Bern") == "BernBern"
    assert await assert_crash_safe(route, "Bern", handlers=handlers, substitutes=substitutes) > 4


async def test_a_substitute_takes_the_place_of_an_activity_of_a_module():
    module = ModuleType("shop")
    vars(module).update(crawl=crawl, fetch=fetch)
    async with Environment([module], substitutes={fetch: lambda url: f"page of {url}"}) as env:
        assert await env.run(crawl, "x") == "PAGE OF X"


@dataclass
class Parcel:
    order: str
    weight: Decimal


class Lost(Exception):
    pass


@activity(raises=[Lost])
async def send(parcel: Parcel, /, *, express: bool = False) -> Parcel:
    raise AssertionError("no parcels in tests")


class Carrier:
    @activity
    async def pick_up(self, parcel: Parcel) -> Parcel:
        raise AssertionError("no parcels in tests")

    def send(self, parcel):
        return Parcel(parcel.order, parcel.weight * 2)


@orchestration
async def shipping(parcel: Parcel) -> Parcel:
    return await Carrier.pick_up(await send(parcel, express=True))


def double(parcel, express):
    assert express
    return Parcel(parcel.order, parcel.weight * 2)


@pytest.mark.parametrize(
    "substitute",
    [
        double,
        lambda *args, **_: double(*args, express=True),
        Mock(side_effect=double),
        AsyncMock(side_effect=double),
        partial(lambda factor, parcel, **_: Parcel(parcel.order, parcel.weight * factor), 2),
    ],
)
async def test_a_substitute_gets_and_returns_values_of_the_types_of_the_activity(substitute):
    substitutes = {send: substitute, Carrier.pick_up: Carrier().send}
    async with Environment([shipping], substitutes=substitutes) as env:
        result = await env.run(shipping, Parcel("o-1", Decimal("1.5")))

    assert result == Parcel("o-1", Decimal("6.0"))


async def test_a_substitute_may_take_fewer_arguments_and_raise_what_the_activity_declares():
    def lose(parcel):
        raise Lost(parcel.order)

    @orchestration
    async def careful(parcel: Parcel) -> str:
        try:
            await send(parcel)
        except Lost as error:
            return f"lost {error}"
        return "sent"

    async with Environment([careful], substitutes={send: lose}) as env:
        assert await env.run(careful, Parcel("o-1", Decimal(1))) == "lost o-1"


def test_a_substitute_that_cannot_be_called_is_refused():
    with pytest.raises(
        UsageError, match="the substitute of activity 'send' is 'sent', and no func"
    ):
        Environment([shipping], substitutes={send: "sent"})


async def test_waiting_for_what_never_comes_is_an_error_that_names_it():
    @orchestration
    async def hopeful() -> None:
        await wait_for_event("never", str)

    async with Environment([hopeful]) as env:
        with pytest.raises(Stuck, match="event never"):
            await env.run(hopeful)


async def test_time_does_not_pass_by_polling_with_options_of_the_author():
    @orchestration
    async def endless() -> None:
        await wait_for_event("never", None)

    async with Environment([endless, crawl], options=RuntimeOptions(threads=1)) as env:
        with pytest.raises(Stuck, match="waits for event never"):
            await env.run(endless)
        with pytest.raises(Stuck, match="fetch, which is not registered here"):
            await env.run(crawl, "a")


async def test_tags_of_the_author_are_kept():
    @activity(tag="maps")
    async def locate(place: str) -> str:
        return place

    @orchestration
    async def route(place: str) -> str:
        return await locate(place)

    options = RuntimeOptions(tags=TagFilter.only("other"))
    async with Environment([route, locate], options=options) as env:
        with pytest.raises(Stuck, match="waits for activity locate"):
            await env.run(route, "Bern")


async def test_the_methods_of_a_client_are_those_of_the_runtime(make_environment):
    async with make_environment([busy, child, add]) as env:
        with pytest.raises(AttributeError, match=r"no 'resolve'; write env\.runtime\.resolve$"):
            await env.resolve("approval", True)
        with pytest.raises(AttributeError, match=r"no 'nothing'$"):
            env.nothing()


async def test_what_is_not_registered_is_named():
    @activity
    async def forgotten() -> None: ...

    @orchestration
    async def forgetful() -> None:
        await forgotten()

    async with Environment([forgetful]) as env:
        with pytest.raises(Stuck, match="activity forgotten, which is not registered here"):
            await env.run(forgetful)
    async with Environment([]) as env:
        with pytest.raises(Stuck, match="is Pending, waits for forgetful, which is not registered"):
            await env.run(forgetful)


async def test_a_blocked_instance_or_child_ends_the_wait_with_the_reason():
    @orchestration
    async def child(number: int = 0) -> int:
        continue_as_new("many", version="1.0.0")

    @orchestration
    async def parent() -> int:
        return await child()

    async with Environment([parent, child]) as env:
        with pytest.raises(Stuck, match=r"Blocked .*of orchestration 'child': Expected `int`"):
            await env.run(child)
    async with Environment([parent, child]) as env:
        with pytest.raises(Stuck, match=r"child .* is Blocked"):
            await env.run(parent)


async def test_time_can_be_advanced_by_hand():
    @orchestration
    async def sleeper() -> str:
        await asyncio.sleep(3600)
        return now().isoformat()

    async with Environment([sleeper]) as env:
        handle = await env.start(sleeper)
        await env.advance(3599)
        assert not (await handle.describe()).status.is_final
        await env.advance(1)
        assert (await handle.describe()).status.is_final


async def test_a_recorded_history_replays_until_the_code_changes(tmp_path):
    def flow(first, second):
        @orchestration(name="flow")
        async def run() -> str:
            await first(1, 2)
            await second("x")
            return str(uuid4())

        return run

    async with Environment([flow(add, fetch), add], substitutes={fetch: lambda _url: "p"}) as env:
        handle = await env.start(flow(add, fetch))
        await handle.result()
        history = await handle.history()
    assert_replays(history, flow(add, fetch))
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(wire.encode(event) for event in history))
    assert_replays(path, flow(add, fetch))

    with pytest.raises(Nondeterminism):
        assert_replays(history, flow(fetch, add))


async def test_a_workflow_survives_a_crash_at_every_commit():
    crashes = await assert_crash_safe(
        busy, 1, 0, handlers=[busy, child, add], events=[("word", "a"), ("word", "b")]
    )

    assert crashes > 20


async def test_a_crash_test_takes_substitutes_and_resources():
    @activity
    async def weigh(parcel: Parcel, *, scale: Decimal = RESOURCE) -> Parcel:
        return Parcel(parcel.order, parcel.weight * scale)

    @orchestration
    async def weighing(parcel: Parcel) -> Parcel:
        return await send(await weigh(parcel), express=True)

    mock = Mock(side_effect=double)
    crashes = await assert_crash_safe(
        weighing,
        Parcel("o-1", Decimal(1)),
        handlers=[weighing, weigh],
        substitutes={send: mock},
        resources=[Decimal(3)],
    )

    assert crashes > 4
    mock.assert_called_with(Parcel("o-1", Decimal(3)), express=True)


async def test_a_workflow_that_keeps_secrets_from_its_history_is_caught():
    memory = []

    @activity
    async def remember() -> int:
        memory.append(1)
        return len(memory)

    @orchestration
    async def forgetful() -> int:
        return await remember() + await remember()

    with pytest.raises(AssertionError, match="after a crash"):
        await assert_crash_safe(forgetful, handlers=[forgetful, remember])


def test_an_environment_on_a_store_with_threads_is_refused(tmp_path):
    with pytest.raises(UsageError, match="in memory, not sqlite"):
        Environment([], provider=SqliteProvider(tmp_path / "s.db"))


def test_intercepting_leaves_alone_what_is_not_awaited():
    async def make_the_call(_verb, call):
        return await call()

    clock = ManualClock()
    inner = InMemoryProvider(clock=clock)
    provider = intercept(inner, make_the_call)

    assert isinstance(provider.new_lock_token(), str)
    assert provider.clock() is inner.clock()
    assert provider.name == inner.name
